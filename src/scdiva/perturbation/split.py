"""Conditions held out of training, so that predictions of them can be scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from scdiva._checks import check_arguments, check_choices, check_least
from scdiva._constants import OBS_SPLIT, SEEN
from scdiva._labels import read_labels
from scdiva._settings import settings
from scdiva.data.results import check_anndata, check_key, check_writable, write
from scdiva.perturbation.conditions import Perturbations, read_perturbations
from scdiva.tokenizer.vocabulary import load_vocabulary


@check_arguments
def split_perturbations(
    adata: AnnData,
    perturbation_key: str,
    control: Sequence[str] | str = "control",
    *,
    by: Literal["single", "combination", "group"],
    groupby: str | None = None,
    n_splits: int = 5,
    fold: int = 0,
    separator: str = "+",
    guides: Mapping[str, str] | None = None,
    key_added: str = OBS_SPLIT,
    rng: int | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Hold conditions out of a screen: single perturbations, combinations, or all that was done to a group of cells.

    The folds of one seed are disjoint and hold every condition once between them. Control cells are always for
    training.

    - `"single"`: a fold of the perturbations that occur singly, and every combination that one of them is part of.
    - `"combination"`: a fold of the combinations. Singles are all for training.
    - `"group"`: the perturbed cells of one group, that of number `fold` in the order of their names. Groups without
      perturbed cells are not counted.

    Parameters
    ----------
    adata
        The cells.
    perturbation_key
        Column of `adata.obs` with each cell's perturbation.
    control
        Its label of control cells, or several of them; see :func:`scdiva.tl.fit_perturbation`.
    by
        See above.
    groupby
        Column of `adata.obs` with the groups, for `"group"`: cell types or cell lines.
    n_splits
        Number of folds; of no effect for `"group"`.
    fold
        Which one is held out, from 0.
    separator
        What stands between the parts of a combination. `"B+A"` is `"A+B"`, and `"A+control"` is `"A"`. A gene whose
        name contains it is one part. Empty: there are no combinations.
    guides
        Mapping of guides to genes, if the column contains guides; see :func:`scdiva.tl.fit_perturbation`. All guides of
        a gene are then in one part of the split.
    key_added
        Column to write.
    rng
        Seed of the folds; None takes `scdiva.settings.seed`.
    copy
        Write into a copy and return it.

    Returns
    -------
    None, or the copy. Written are

    `adata.obs[key_added]`
        Categorical, `"train"` or `"test"`.
    `adata.obs[key_added + "_seen"]`
        int8: of a test cell, how many parts of its perturbation occur singly among the training cells; -1 for training
        cells.
    `adata.uns["scdiva"][key_added]`
        `held_out` (labels of the data, of guides their genes; of `"group"` the group's), and the arguments; `guides`
        as `label` and `gene`.

    Raises
    ------
    KeyError
        If there is no such column.
    TypeError
        If `rng` is no int: another generator's folds would not fit together.
    ValueError
        If a label is missing or has an empty part; if there are no control cells, fewer conditions than folds, no such
        fold, or fewer than two groups with perturbed cells; if the group held out has no control cells; if labels look
        like controls that `control` lacks, or two are names of one gene, and `guides` does not declare it; or if
        arguments do not go together.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60)
    >>> adata.obs["perturbation"] = ["control", "A", "B", "A+B", "C", "B+C"] * 10
    >>> sd.pp.split_perturbations(adata, "perturbation", by="combination", n_splits=2)
    >>> adata.obs["scdiva_split"].value_counts().to_dict()
    {'train': 50, 'test': 10}
    """
    seen_key = f"{key_added}_{SEEN}"
    check_anndata(adata)
    check_key(key_added, "key_added")
    seed = _checked(by, groupby, n_splits, fold, rng)
    if {key_added, seen_key} & {perturbation_key, groupby}:
        raise ValueError(f"key_added={key_added!r} would overwrite what the split is made from; choose another name.")
    check_writable(adata, copy=copy, call="pp.split_perturbations", entry=key_added, obs=[key_added, seen_key])
    known = read_perturbations(adata, perturbation_key, control, separator, guides, load_vocabulary())
    if by == "group":
        test, held_out = _group(adata, known, str(groupby), fold)
    else:
        test, held_out = _conditions(known, by, n_splits, fold, seed, perturbation_key, separator)
    trained = [known.parts[code] for code in np.unique(known.code[~test])]
    singles = {parts[0] for parts in trained if len(parts) == 1}
    n_seen = np.array([sum(part in singles for part in parts) for parts in known.parts])
    seen = np.where(test, n_seen[known.code], -1).astype(np.int8)
    found = {
        "held_out": np.array(held_out, dtype=object),
        "perturbation_key": perturbation_key,
        "control": np.array(known.naming.control, dtype=object),
        "by": by,
        "groupby": groupby or "",
        "n_splits": n_splits,
        "fold": fold,
        "separator": separator,
        "seed": seed,
        **known.notes,
    }
    part = pd.Categorical(np.where(test, "test", "train"), categories=["train", "test"])
    columns = {key_added: part, seen_key: seen}
    return write(adata, "pp.split_perturbations", key_added, found, copy=copy, obs=columns)


def _checked(by: str, groupby: str | None, n_splits: int, fold: int, rng: int | None) -> int:
    """Refuse arguments that do not go together; return the seed."""
    check_choices(by=(by, ("single", "combination", "group")))
    if (groupby is not None) != (by == "group"):
        raise ValueError(f"groupby=, a column of adata.obs, goes with by='group' alone; got {groupby!r} and by={by!r}.")
    check_least(fold=(fold, 0))
    if by != "group":
        check_least(n_splits=(n_splits, 2))
        if fold >= n_splits:
            raise ValueError(f"there is no fold {fold}: folds go from 0 to {n_splits - 1}.")
    seed = settings.seed if rng is None else rng
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"rng must be an int or None, so that all folds come from one seed; got {type(rng).__name__}.")
    check_least(rng=(int(seed), 0))
    return int(seed)


def _conditions(
    known: Perturbations, by: str, n_splits: int, fold: int, seed: int, perturbation_key: str, separator: str
) -> tuple[NDArray[np.bool_], list[str]]:
    """Hold out a fold of the singles, with what they are part of, or of the combinations."""
    wanted = [code for code, parts in enumerate(known.parts) if parts and (len(parts) > 1) == (by == "combination")]
    if len(wanted) < n_splits:
        first = f" (the first is {known.labels[wanted[0]]!r})" if wanted else ""
        kinds = "perturbations that occur singly" if by == "single" else f"combinations with {separator!r}"
        raise ValueError(
            f"adata.obs[{perturbation_key!r}] has {len(wanted)} {kinds}{first}, too few for {n_splits} folds."
            + (" Pass a smaller n_splits." if len(wanted) > 1 else "")
        )
    order = np.random.default_rng(seed).permutation(wanted)
    held = np.sort(np.array_split(order, n_splits)[fold])
    if by == "single":
        parts = {known.parts[code][0] for code in held}
        held = np.array([code for code, these in enumerate(known.parts) if parts & set(these)])
    return np.isin(known.code, held), [known.labels[code] for code in held]


def _group(adata: AnnData, known: Perturbations, groupby: str, fold: int) -> tuple[NDArray[np.bool_], list[str]]:
    """Hold out the perturbed cells of a group."""
    group = read_labels(adata, groupby)
    names = np.unique(group[~known.is_control])
    if len(names) < 2:
        shown = f" ({str(names[0])!r})" if len(names) else ""
        raise ValueError(
            f"adata.obs[{groupby!r}] has {len(names)} groups with perturbed cells{shown}; one to hold out and one to "
            "learn from are needed."
        )
    if fold >= len(names):
        last = len(names) - 1
        raise ValueError(f"there is no fold {fold}: {len(names)} groups have perturbed cells, so it is 0 to {last}.")
    name = names[fold]
    if not known.is_control[group == name].any():
        raise ValueError(
            f"group {str(name)!r} of adata.obs[{groupby!r}] has {(group == name).sum()} cells and none is a control: "
            "there is nothing to predict its response from. Leave the group out."
        )
    return (group == name) & ~known.is_control, [str(name)]
