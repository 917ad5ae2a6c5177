"""The studies of a corpus, whatever files they come from, opened and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scdiva.data.files import data_files
from scdiva.data.packed import PackedCells, is_packed, study_names, warn_left_out
from scdiva.data.reading import Reading
from scdiva.data.stream import Source
from scdiva.tokenizer.vocabulary import Vocabulary


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
