"""`tl.in_silico_perturbation`: knock-out and over-expression by a model that was trained on no intervention."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from scdiva import _constants as C
from scdiva._docs import with_shared_docs
from scdiva._nearest import or_nearest
from scdiva._progress import progress_bar
from scdiva._rng import step_seed
from scdiva._settings import settings
from scdiva._threads import torch_threads_kept
from scdiva.data.conditions import column, perturbation_parts
from scdiva.data.genes import column_tokens
from scdiva.data.guides import genes_among, genes_of_guides
from scdiva.data.predictions import stored_prediction
from scdiva.data.reading import Reading, Species
from scdiva.data.writing import check_columns, check_writable, noted
from scdiva.tl._notes import model_name, seed_of
from scdiva.tl._predicted import laid_out
from scdiva.tl._screen import Controls, check_genes, read_controls

if TYPE_CHECKING:
    import torch
    from anndata import AnnData

    from scdiva.models import ScDiVa

RAISED = 0.95
"""Quantile of a gene's values among the cells that express it, to which it is raised."""


@with_shared_docs
def in_silico_perturbation(
    adata: AnnData,
    genes: Sequence[str] | str,
    *,
    kind: Literal["knockout", "overexpression"] = "knockout",
    groupby: str | None = None,
    groups: Sequence[str] | str | None = None,
    separator: str = "+",
    model: ScDiVa | str | PathLike[str] = C.DEFAULT_MODEL,
    n_cells: int = 50,
    key_added: str = C.IN_SILICO,
    layer: str | None = None,
    use_raw: bool = False,
    input: Literal["auto", "counts", "lognorm"] = "auto",
    gene_ids: str | None = None,
    species: Species = None,
    duplicates: Literal["sum", "error"] = "sum",
    rng: int | np.random.Generator | torch.Generator | None = None,
    device: str | None = None,
) -> AnnData:
    """Say how a model's view of a cell changes if a gene is taken away or raised; it was trained on no intervention.

    A model that has only seen unperturbed cells knows which genes go together, not which one causes which: what it
    expects of the others when a gene is gone is a statement on association. Where there is a screen,
    :func:`predict_perturbation` learns from it.

    The values of a cell's genes are hidden, a quarter at a time, and predicted from all others; this is done once with
    the cell as it is, and once with the gene taken out of it (knock-out) or raised to the 95th percentile of the cells
    of these groups that express it (over-expression). The difference is the change of those genes. Genes that a cell
    does not express do not change, and neither does a cell without the gene that is knocked out.

    Parameters
    ----------
    adata
        Cells × genes, raw counts or log-normalised expression; only `uns[key_added]` is written.
    genes
        Genes to perturb, such as `["SPI1", "STAT1+IRF1"]`.
    kind
        `"knockout"` or `"overexpression"`.
    groupby, groups
        Column with groups of cells, and those in which to predict; None: one group of all cells, or all groups.
    separator
        What stands between genes that are perturbed together.
    model
        A loaded model, a model folder, the name of a bundled model, or `"hf://owner/name"`.
    n_cells
        Cells of each group that are perturbed, drawn at random.
    key_added
        Key of `adata.uns` to write; a prediction that stands there is replaced.
    %(reading)s
    rng
        Seed of the choice of cells and of what is hidden when; None takes `scdiva.settings.seed`.
    device
        Torch device; None takes `scdiva.settings.device`.

    Returns
    -------
    AnnData of the perturbed cells × all genes of `adata`, laid out as by :func:`predict_perturbation`: `X`,
    `obs["scdiva_condition"]`, `obs["perturbation"]`, `varm["scdiva_mean"]`, `varm["scdiva_control"]`, and
    `varm["scdiva_sd"]`, here the standard error over cells. There are no baselines, and
    `uns["scdiva"]["perturbation"]["trained_on_interventions"]` is False. Means are those of the cells that were drawn,
    before and after: hold them against `varm["scdiva_control"]`, not against all cells of the group.

    Means, changes and notes are also written into `adata.uns[key_added]`, as by :func:`predict_perturbation`, for
    `scdiva.get.perturbation_df(adata, key="scdiva_in_silico")` and the plots.

    Raises
    ------
    KeyError
        If a column or layer does not exist.
    ValueError
        If a gene is not known to the model, or expressed by no cell; if a group does not exist; if an
        argument is out of range, genes repeat a name, or the matrix is refused as by :func:`embed`; if
        `adata.uns[key_added]` holds what scdiva did not write, or `adata` is a backed view.
    TypeError
        If `adata` is no AnnData object.

    Warns
    -----
    UserWarning
        Always: that the model was not trained on interventions.

    Examples
    --------
    >>> import scdiva as sd
    >>> adata = sd.datasets.toy(60, 100)
    >>> gene = adata.var_names[adata.X.sum(0).A1.argmax()]
    >>> predicted = sd.tl.in_silico_perturbation(adata, [gene], n_cells=8)
    >>> bool(predicted.uns["scdiva"]["perturbation"]["trained_on_interventions"])
    False
    """
    begun = time.monotonic()
    check_writable(adata, call="tl.in_silico_perturbation", uns=[key_added])
    if kind not in ("knockout", "overexpression"):
        raise ValueError(f'kind must be "knockout" or "overexpression", got {kind!r}.')
    if operator.index(n_cells) < 1:
        raise ValueError(f"n_cells must be at least 1, got {n_cells}.")
    names = [genes] if isinstance(genes, str) else [str(name) for name in genes]
    if not names:
        raise ValueError("genes names no gene to perturb.")
    parts = [perturbation_parts(name, "", separator) for name in names]
    if () in parts:
        raise ValueError("genes holds a blank name.")
    if len(set(parts)) < len(parts):
        twice = next(name for name, p in zip(names, parts, strict=True) if parts.count(p) > 1)
        raise ValueError(f"genes holds {twice!r} more than once; the order of parts does not count.")
    if groups is not None and groupby is None:
        raise ValueError("groups are given without a column: groupby=...")
    check_columns(groupby)
    if groupby in (C.PERTURBATION, C.OBS_CONDITION, C.OBS_CONTROL_CELL):
        raise ValueError(
            f"obs[{groupby!r}] of the result says what was done to a cell: copy the groups to a column of another "
            "name, and name that with groupby."
        )
    reading = Reading(layer, use_raw, input, gene_ids, species, duplicates)

    from scdiva.models.pretrained import load_for
    from scdiva.perturbation.model import gene_tokens

    target = settings.resolve_device(device)
    given = load_for(model, target)
    tokens = gene_tokens(given, {part for p in parts for part in p}, reading.species)
    unknown = sorted({part for p in parts for part in p} - set(tokens))
    if unknown:
        guessed = genes_of_guides(unknown[:1], genes_among(given.vocabulary), "", "")
        raise ValueError(
            f"the model does not know {len(unknown)} of the genes to perturb, the first is {unknown[0]!r}"
            f"{or_nearest(unknown[0], guessed.values() or given.vocabulary.symbols)}: name them by symbol or "
            "Ensembl id."
        )
    for name, p in zip(names, parts, strict=True):
        if len({tokens[part] for part in p}) < len(p):
            raise ValueError(f"{name!r} names one gene twice, once by another name.")
    if not adata.n_obs:
        raise ValueError(f"adata is empty: 0 cells × {adata.n_vars} genes.")
    group = np.full(adata.n_obs, "", dtype=object) if groupby is None else column(adata, groupby).astype(object)
    present = sorted(set(group))
    wanted = present if groups is None else [groups] if isinstance(groups, str) else [str(g) for g in groups]
    if not wanted:
        raise ValueError("groups names no group; leave it out to perturb all.")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"groups holds {max(wanted, key=wanted.count)!r} more than once.")
    if absent := [name for name in wanted if name not in present]:
        raise ValueError(
            f"{len(absent)} of {len(wanted)} groups are not in adata.obs[{groupby!r}], the first is {absent[0]!r}; "
            f"there are {', '.join(map(repr, present[:10]))}."
        )
    if (most := max(map(len, parts))) > given.config.max_length:
        raise ValueError(
            f"{most} genes are perturbed together, more than the {given.config.max_length} that the model reads of a "
            "cell."
        )
    var = reading.var(adata)
    check_genes(var.index)
    warnings.warn(
        "the model was trained on no intervention: what follows says which genes go together, not what a perturbation "
        "causes. With a screen, use scdiva.tl.predict_perturbation.",
        UserWarning,
        stacklevel=2,
    )
    controls = read_controls(adata, np.isin(group.astype(str), wanted), group, given, None, reading)
    seed = seed_of(rng)
    of_column = column_tokens(var, given.vocabulary, reading)
    home = next(given.parameters()).device
    try:
        given.to(target)
        with torch_threads_kept(1 if target == "cpu" else None):  # products too small to share
            made = [
                _group(given, controls, controls.groups.index(name), parts, tokens, kind, n_cells, of_column, seed)
                for name in wanted
            ]
    finally:
        given.to(home)
    result = _result(var, controls, wanted, names, parts, made, groupby, separator, kind, {
        "model": model_name(model),
        "seed": str(seed),
        "seconds": time.monotonic() - begun,
    })  # fmt: skip
    adata.uns[key_added] = stored_prediction(result)
    adata.uns[C.UNS] = noted(adata, "tl.in_silico_perturbation", None, uns=[key_added])
    return result


def _group(
    model: ScDiVa,
    controls: Controls,
    at: int,
    parts: list[tuple[str, ...]],
    tokens: dict[str, int],
    kind: str,
    n_cells: int,
    of_column: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Perturb cells of a group: the rows of the cells, and for each perturbation the change, cells × genes."""
    from scdiva.perturbation.in_silico import PARTS, Ranked, changed, hidden_values, value_change
    from scdiva.tokenizer.serialize import score_denominator

    cells, c = controls.cells, model.config
    denominator = score_denominator(model.vocabulary.entropy, c.entropy_floor)
    # a group's cells do not depend on which others are asked for
    draw = np.random.default_rng(step_seed(seed, 0, f"in silico in {controls.groups[at]}"))
    own = np.sort(draw.permutation(np.flatnonzero(controls.number[controls.rows] == at))[:n_cells])
    raised = {name: _high(cells.tokens, cells.values, token) for name, token in tokens.items()}
    if kind == "overexpression" and (never := [name for name, value in raised.items() if value is None]):
        raise ValueError(
            f"{len(never)} of the genes to raise are expressed by none of these cells, the first is {never[0]!r}: "
            "nothing says how high they can be."
        )
    absent = [names for names in parts if all(raised[name] is None for name in names)]
    if kind == "knockout" and absent:
        raise ValueError(
            f"{len(absent)} of {len(parts)} perturbations take away what none of these cells expresses, the first is "
            f"{' and '.join(absent[0])!r}: that changes nothing."
        )
    place = {int(token): j for j, token in reversed(list(enumerate(of_column))) if token >= 0}
    changes = [np.zeros((len(own), len(of_column))) for _ in parts]
    for i, cell in enumerate(progress_bar(own, desc=f"perturbing {controls.groups[at]}".strip(), unit="cell")):
        ranked, expression, _ = (part.numpy() for part in cells.take(np.array([cell])).packed)
        whole = Ranked(ranked, expression, draw.permutation(len(ranked)) % PARTS)
        for change, names in zip(changes, parts, strict=True):
            sources = np.array([tokens[name] for name in names], dtype=np.int64)
            if kind == "knockout" and not np.isin(sources, whole.tokens).any():
                continue
            high = None if kind == "knockout" else np.array([raised[name] for name in names], dtype=np.float32)
            before, after = changed(whole, sources, high, denominator, c.max_length)
            for token, value in value_change(hidden_values(model, before), hidden_values(model, after)).items():
                change[i, place[token]] = value
            for source, name in zip(sources, names, strict=True):
                if high is None:
                    change[i, of_column == source] = -np.inf  # nothing falls below 0, and none of it is left
                elif int(source) in place:
                    was = whole.expression[whole.tokens == source].sum()
                    change[i, place[int(source)]] = max(was, raised[name] or 0.0) - was
    return own, changes


def _high(tokens: np.ndarray, values: np.ndarray, token: int) -> float | None:
    """Value to which a gene is raised; None if no cell expresses it."""
    found = values[tokens == token]
    return float(np.quantile(found, RAISED)) if len(found) else None


def _result(
    var: pd.DataFrame,
    controls: Controls,
    groups: list[str],
    names: list[str],
    parts: list[tuple[str, ...]],
    made: list[tuple[np.ndarray, list[np.ndarray]]],
    groupby: str | None,
    separator: str,
    kind: str,
    notes: dict[str, Any],
) -> AnnData:
    taken, values, means, starts, errors, conditions = [], [], [], [], [], []
    for group, (own, changes) in zip(groups, made, strict=True):
        rows = controls.rows[own]
        cells = controls.expression[rows].toarray()
        for name, change in zip(names, changes, strict=True):
            after = np.maximum(cells + change, 0.0)
            taken.append(controls.names[rows])
            values.append(after)
            means.append(after.mean(axis=0))
            starts.append(cells.mean(axis=0))
            errors.append((after - cells).std(axis=0, ddof=1 if len(rows) > 1 else 0) / len(rows) ** 0.5)
            conditions.append((name, group))
    labels = [name + (f" in {group}" if groupby else "") for name, group in conditions]
    result = laid_out(values, taken, labels, var)
    of = result.obs[C.OBS_CONDITION].cat.codes
    key = C.PERTURBATION
    result.obs[key] = pd.Categorical([conditions[i][0] for i in of], categories=names)
    if groupby is not None:
        result.obs[groupby] = pd.Categorical([conditions[i][1] for i in of], categories=groups)
    for name, part in ((C.VARM_MEAN, means), (C.VARM_SD, errors), (C.VARM_CONTROL, starts)):
        result.varm[name] = np.array(part).T.astype(np.float32)
    n_parts = np.array([len(p) for _ in groups for p in parts], dtype=np.int64)
    result.uns[C.UNS] = {
        C.PERTURBATION: {
            "perturbation_key": key,
            "control": "",
            "groupby": groupby or "",
            "dose_key": "",
            "separator": separator,
            "condition": np.array(labels, dtype=object),
            "perturbation": np.array([name for name, _ in conditions], dtype=object),
            "group": np.array([group for _, group in conditions], dtype=object),
            "dose": np.ones(len(conditions)),
            "n_parts": n_parts,
            "n_seen": np.zeros_like(n_parts),
            "trained": np.zeros(len(conditions), dtype=bool),
            "base": np.full(len(conditions), "none", dtype=object),
            "trained_on_interventions": False,
            "kind": kind,
            **notes,
        }
    }
    return result
