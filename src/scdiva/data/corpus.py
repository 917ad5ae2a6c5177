"""The studies of a corpus: opened and counted, which ones validate, and how often the others are seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scdiva._checks import or_nearest
from scdiva.data.files import data_files
from scdiva.data.packed import PackedCells, is_packed, study_names, warn_left_out
from scdiva.data.reading import Reading
from scdiva.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:  # its module needs torch, and the command line looks at studies before it loads that
    from scdiva.data.stream import Source


class OpenStudies(NamedTuple):
    """Opened studies.

    Attributes
    ----------
    sources
        One a file, or the packed corpus.
    names
        Of the studies.
    studies
        For each source, int (n_obs,), the number of each cell's study.
    report
        Of each study its name (`study`), `cells` kept, `cells_dropped`, `columns` of its file (None if it is packed)
        and `genes_matched`.
    """

    sources: list[Source]
    names: list[str]
    studies: list[np.ndarray]
    report: list[dict[str, Any]]


def corpus_files(data: Sequence[Any]) -> list[Any]:
    """Find the files that are meant, and check that they go together.

    Parameters
    ----------
    data
        AnnData objects, files and folders.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is nothing of a name, a packed corpus does not stand alone, or two files have one name.
    """
    files = data_files(data)
    packed = [isinstance(one, str | Path) and is_packed(one) for one in files]
    if any(packed) and len(files) > 1:
        raise ValueError("a packed corpus stands alone: pack all files into one with scdiva.data.pack_files.")
    if not any(packed):
        _names(files, "adata")
    return files


def _names(files: Sequence[Any], unnamed: str) -> list[str]:
    return study_names([Path(one if isinstance(one, str | Path) else f"{unnamed}{i}") for i, one in enumerate(files)])


def open_studies(
    files: Sequence[Any],
    vocabulary: Vocabulary,
    min_genes: int,
    context: int,
    reading: Reading,
    entropy_floor: float,
    unnamed: str = "adata",
) -> OpenStudies:
    """Open and check the studies of a corpus, and warn of the cells of each that have too few genes.

    Parameters
    ----------
    files
        What :func:`corpus_files` gave.
    vocabulary
        Genes and entropies.
    min_genes
        Cells with fewer known genes are counted as dropped.
    context
        Genes kept per cell.
    reading
        What is read of each.
    entropy_floor
        As in :func:`scdiva.data.cells.open_cells`.
    unnamed
        What an AnnData object is called, before its number.

    Raises
    ------
    KeyError, ValueError
        See :func:`scdiva.data.cells.open_cells`; the message names the file. If a packed corpus has another vocabulary,
        or shorter cells than `context` or `min_genes`.
    """
    report: list[dict[str, Any]] = []

    def count(name: str, lengths: np.ndarray, columns: int | None, matched: int) -> None:
        dropped = int((lengths < min_genes).sum())
        warn_left_out(name, dropped, len(lengths), min_genes)
        kept = len(lengths) - dropped
        report.append(
            {"study": name, "cells": kept, "cells_dropped": dropped, "columns": columns, "genes_matched": matched}
        )

    if isinstance(files[0], str | Path) and is_packed(files[0]):
        corpus = PackedCells(files[0], vocabulary)
        for option, asked in (("context", context), ("min_genes", min_genes)):
            if corpus.max_length < asked:
                raise ValueError(
                    f"{str(files[0])!r} holds {corpus.max_length} genes per cell, fewer than {option}={asked}; lower "
                    f"the {option} or pack it anew with a larger max_length."
                )
        for number, name in enumerate(corpus.study_names):
            count(name, corpus.lengths[corpus.study == number], None, int(corpus.measured[number].sum()))
        return OpenStudies([corpus], corpus.study_names, [corpus.study.astype(np.int64)], report)

    from scdiva.data.cells import open_cells

    names = _names(files, unnamed)
    sources: list[Source] = []
    for name, one in zip(names, files, strict=True):
        try:
            source = open_cells(
                one, vocabulary, reading, max_length=context, entropy_floor=entropy_floor, empty="nan", keep=False
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"{name}: {error.args[0]}") from error
        count(name, source.lengths, len(source.tokens), len(source.measured_tokens))
        sources.append(replace(source, name=name))
    return OpenStudies(sources, names, [np.full(source.n_obs, i, np.int64) for i, source in enumerate(sources)], report)


def held_out_studies(names: Sequence[str], asked: float | Sequence[str] | None, seed: int) -> list[str]:
    """Choose the studies that validate instead of being trained on.

    Parameters
    ----------
    names
        All studies.
    asked
        Names, or a share of the studies (not of the cells) between 0 and 1: so many, rounded, but one at least, are
        drawn. None: no study.
    seed
        Of the draw; with the names, in whatever order, it settles it.

    Returns
    -------
    Their names, in the order of `names`.

    Raises
    ------
    ValueError
        If a name is unknown or given twice, the share is not between 0 and 1, or no study would be left to train on.
    """
    if asked is None:
        return []
    if isinstance(asked, str):
        asked = [asked]
    if isinstance(asked, int | float):
        if isinstance(asked, bool) or not 0 < asked < 1:
            raise ValueError(f"validation_studies must be names, or a share between 0 and 1; got {asked!r}.")
        n = max(1, round(asked * len(names)))
        # The second number keeps this draw apart from those of the order.
        drawn = np.random.default_rng([seed, len(names), 0, 3]).permutation(len(names))[:n]
        chosen = {sorted(names)[i] for i in drawn}
    else:
        chosen = set(asked)
        if len(chosen) < len(asked):
            raise ValueError("validation_studies names a study twice.")
        for name in sorted(chosen - set(names)):
            raise ValueError(f"validation_studies: there is no study {name!r}{or_nearest(name, names)}.")
    if len(chosen) == len(names):
        raise ValueError(
            f"all {len(names)} studies would validate and none be trained on; name fewer, or give more files."
        )
    return [name for name in names if name in chosen]


def study_times(weights: Mapping[str, float] | float | None, names: Sequence[str], sizes: np.ndarray) -> np.ndarray:
    """Find how often an epoch holds each cell of each study, on average.

    Parameters
    ----------
    weights
        By name how often; studies that are not named once. Or a power p: a study of n cells then is a share of the
        epoch that goes with n ** p (1: as it is; 0: all studies equal; 0.5 between), and the epoch stays as long as the
        corpus. None: once.
    names
        The training studies.
    sizes
        int (n_studies,), cells of each.

    Returns
    -------
    float64 (n_studies,).

    Raises
    ------
    ValueError
        If a study is unknown, or a weight is not finite or not above zero.
    """
    times = np.ones(len(names))
    if weights is None:
        return times
    if isinstance(weights, Mapping):
        for name, weight in weights.items():
            if name not in names:
                raise ValueError(f"study_weights: there is no training study {name!r}{or_nearest(name, names)}.")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(
                    f"study_weights: the weight of {name!r} must be a finite number above 0, got {weight!r}. A study "
                    "that is not to be trained on is left out of the files."
                )
            times[list(names).index(name)] = weight
        return times
    if isinstance(weights, bool) or not isinstance(weights, int | float) or not 0 <= weights <= 1:
        raise ValueError(f"study_weights must be weights by name, or a power from 0 to 1; got {weights!r}.")
    cells = sizes.astype(np.float64)
    some = cells > 0
    times[some] = cells[some] ** (weights - 1)
    found: np.ndarray = times * cells.sum() / (times * cells).sum()
    return found
