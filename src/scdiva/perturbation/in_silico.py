"""In-silico knock-out and over-expression: what a model that saw no intervention expects of a cell's other genes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scdiva import _constants as C
from scdiva._checks import or_nearest, warn
from scdiva._progress import progress_bar
from scdiva._rng import step_seed
from scdiva._settings import torch_threads_kept
from scdiva.data.conditions import column, genes_among, genes_of_guides, listed, wanted_groups
from scdiva.data.genes import check_unique, column_tokens
from scdiva.data.reading import Reading
from scdiva.data.writing import check_columns
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.predict import distinct_parts, laid_out
from scdiva.perturbation.reading import Controls, read_controls
from scdiva.perturbation.screen import gene_tokens
from scdiva.tokenizer.serialize import score_denominator

if TYPE_CHECKING:
    from anndata import AnnData

PARTS = 4
"""Turns in which the values of a cell's genes are masked, each gene's in one."""
RAISED = 0.95
"""Quantile of a gene's values among the cells that express it, to which it is raised."""

Tokens = NDArray[np.int64]
Values = NDArray[np.float32]


class Ranked(NamedTuple):
    """A cell's genes by rank: tokens, expression, and the turn in which each is masked (-1: in none)."""

    tokens: Tokens
    expression: Values
    turn: NDArray[np.int64]


def changed(
    cell: Ranked, sources: Tokens, raised: Values | None, denominator: NDArray[np.float32], max_length: int
) -> tuple[Ranked, Ranked]:
    """Rank a cell's genes as they are, and without some of them, or with these raised.

    Parameters
    ----------
    cell
        All of its genes.
    sources
        Genes to take away, or to raise; their own values are never masked.
    raised
        What to raise them to, where they are lower; None takes them away.
    denominator
        Of the ranking score, by token.
    max_length
        Genes kept, as many as there are sources or more. Of a longer cell the last ones are left out, but never a
        source.

    Returns
    -------
    The cell before and after.
    """
    own = np.isin(cell.tokens, sources)
    turn = np.where(own, -1, cell.turn)
    there = np.ones(len(own), dtype=bool)
    there[np.flatnonzero(~own)[max_length - int(own.sum()) :]] = False
    before = Ranked(cell.tokens[there], cell.expression[there], turn[there])
    left = there & ~own
    rest = Ranked(cell.tokens[left], cell.expression[left], turn[left])
    if raised is None:
        return before, rest
    was = {int(token): float(value) for token, value in zip(cell.tokens[own], cell.expression[own], strict=True)}
    high = np.array([max(was.get(int(s), 0.0), float(r)) for s, r in zip(sources, raised, strict=True)], np.float32)
    room = max_length - len(sources)
    tokens = np.concatenate([sources, rest.tokens[:room]])
    values = np.concatenate([high, rest.expression[:room]])
    turns = np.concatenate([np.full(len(sources), -1), rest.turn[:room]])
    order = np.lexsort((tokens, -values / denominator[tokens]))  # ties as the serialiser breaks them
    return before, Ranked(tokens[order], values[order], turns[order])


@torch.inference_mode()
def masked_values(model: ScDiVa, cell: Ranked) -> dict[int, float]:
    """Predict the value of each gene of a cell from the others, a quarter of them masked at a time.

    Identities stay visible. A gene whose turn is -1 is not predicted.

    Parameters
    ----------
    model
        The model.
    cell
        Its genes.

    Returns
    -------
    By token.
    """
    n = len(cell.tokens)
    turns = np.unique(cell.turn[cell.turn >= 0])
    if not len(turns):
        return {}
    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.tile(cell.tokens, len(turns))).to(device)
    values = torch.from_numpy(np.tile(cell.expression, len(turns))).to(device)
    masked = torch.from_numpy((cell.turn == turns[:, None]).ravel()).to(device)
    bounds = torch.arange(0, n * len(turns) + 1, n, dtype=torch.int32, device=device)
    out = model(tokens, values, bounds, value_mask=masked)
    found: Tensor = model.values(out, tokens[masked], masked).float().cpu()
    return dict(zip(tokens[masked].tolist(), found.tolist(), strict=True))


def value_change(before: dict[int, float], after: dict[int, float]) -> dict[int, float]:
    """Difference of predicted values, of the genes that both cells hold."""
    return {token: after[token] - value for token, value in before.items() if token in after}


def perturbed_in_silico(
    adata: AnnData,
    genes: Sequence[str] | str,
    kind: Literal["knockout", "overexpression"],
    groupby: str | None,
    groups: Sequence[str] | str | None,
    separator: str,
    model: ScDiVa,
    n_cells: int,
    seed: int,
    device: str,
    reading: Reading,
) -> AnnData:
    """Perturb cells, and lay the result out; arguments as for :func:`scdiva.tl.in_silico_perturbation`.

    Parameters
    ----------
    adata, genes, kind, groupby, groups, separator, n_cells, device
        As there.
    model
        The model.
    seed
        Of the choice of cells and of what is masked when.
    reading
        What to read.
    """
    begun = time.monotonic()
    names = listed(genes)
    if not names:
        raise ValueError("genes names no gene to perturb.")
    parts = distinct_parts(names, "", separator, "genes")
    if () in parts:
        raise ValueError("genes holds a blank name.")
    if groups is not None and groupby is None:
        raise ValueError("groups are given without a column: groupby=...")
    check_columns(groupby)
    if groupby in (C.PERTURBATION, C.OBS_CONDITION, C.OBS_CONTROL_CELL):
        raise ValueError(
            f"obs[{groupby!r}] of the result names a cell's perturbation: copy the groups to a column of another "
            "name, and name that with groupby."
        )
    tokens = _known_tokens(model, names, parts, reading)
    if not adata.n_obs:
        raise ValueError(f"adata is empty: 0 cells × {adata.n_vars} genes.")
    group = np.full(adata.n_obs, "", dtype=object) if groupby is None else column(adata, groupby).astype(object)
    wanted = wanted_groups(groups, sorted(set(group)), f"are not in adata.obs[{groupby!r}]")
    check_unique(reading.var(adata).index)
    warn(
        "the model was trained on no intervention: what follows says which genes go together, not what a perturbation "
        "causes. With a screen, use scdiva.tl.predict_perturbation."
    )
    controls = read_controls(adata, np.isin(group.astype(str), wanted), group, model, None, reading)
    of_column = column_tokens(controls.var, model.vocabulary, reading)
    home = next(model.parameters()).device
    cells, origin, changes = [], [], []
    try:
        model.to(device)
        with torch_threads_kept(1 if device == "cpu" else None):  # products too small to share
            for name in wanted:
                rows, of_group = _changes(model, controls, name, parts, tokens, kind, n_cells, of_column, seed)
                changes += of_group
                cells += [controls.expression[rows].toarray()] * len(parts)
                origin += [controls.names[rows]] * len(parts)
    finally:
        model.to(home)
    after = [np.maximum(before + change, 0.0) for before, change in zip(cells, changes, strict=True)]
    errors = [
        (values - before).std(axis=0, ddof=1 if len(before) > 1 else 0) / len(before) ** 0.5
        for values, before in zip(after, cells, strict=True)
    ]
    means = {
        C.VARM_MEAN: np.array([values.mean(axis=0) for values in after]),
        C.VARM_SD: np.array(errors),
        C.VARM_CONTROL: np.array([before.mean(axis=0) for before in cells]),
    }
    of = [(name, in_group) for in_group in wanted for name in names]
    n_parts = np.array([len(p) for _ in wanted for p in parts], dtype=np.int64)
    notes: dict[str, Any] = {
        "perturbation_key": C.PERTURBATION,
        "control": "",
        "groupby": groupby or "",
        "dose_key": "",
        "separator": separator,
        "condition": np.array([name + (f" in {at}" if groupby else "") for name, at in of], dtype=object),
        "perturbation": np.array([name for name, _ in of], dtype=object),
        "group": np.array([at for _, at in of], dtype=object),
        "dose": np.ones(len(of)),
        "n_parts": n_parts,
        "n_seen": np.zeros_like(n_parts),
        "trained": np.zeros(len(of), dtype=bool),
        "base": np.full(len(of), "none", dtype=object),
        "trained_on_interventions": False,
        "kind": kind,
        "seed": str(seed),
        "seconds": time.monotonic() - begun,
    }
    return laid_out(after, origin, controls.var, means, notes)


def _known_tokens(model: ScDiVa, names: list[str], parts: list[tuple[str, ...]], reading: Reading) -> dict[str, int]:
    """Give the tokens of the genes to perturb; refuse those that the model does not know, or more than it can read."""
    every = {part for p in parts for part in p}
    tokens = gene_tokens(model, every, reading.species)
    unknown = sorted(every - set(tokens))
    if unknown:
        of_guide = genes_of_guides(unknown[:1], genes_among(model.vocabulary), "", "").values()
        raise ValueError(
            f"the model does not know {len(unknown)} of the genes to perturb, the first is {unknown[0]!r}"
            f"{or_nearest(unknown[0], of_guide or model.vocabulary.symbols)}: name them by symbol or Ensembl id."
        )
    for name, p in zip(names, parts, strict=True):
        if len({tokens[part] for part in p}) < len(p):
            raise ValueError(f"{name!r} names one gene twice, once by another name.")
    if (most := max(map(len, parts))) > model.config.max_length:
        raise ValueError(
            f"{most} genes are perturbed together, more than the {model.config.max_length} that the model reads of a "
            "cell."
        )
    return tokens


def _changes(
    model: ScDiVa,
    controls: Controls,
    group: str,
    parts: list[tuple[str, ...]],
    tokens: dict[str, int],
    kind: str,
    n_cells: int,
    of_column: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Perturb cells of a group: their rows of `controls`, and for each perturbation the change, cells × genes."""
    cells, c = controls.cells, model.config
    denominator = score_denominator(model.vocabulary.entropy, c.entropy_floor)
    # a group's cells do not depend on which others are asked for
    draw = np.random.default_rng(step_seed(seed, 0, f"in silico in {group}"))
    own = np.sort(draw.permutation(controls.of_group(group))[:n_cells])
    values_of = {name: cells.values[cells.tokens == token] for name, token in tokens.items()}
    raised = {name: float(np.quantile(v, RAISED)) if len(v) else None for name, v in values_of.items()}
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
    first_column = {int(token): j for j, token in reversed(list(enumerate(of_column))) if token >= 0}
    changes = [np.zeros((len(own), len(of_column))) for _ in parts]
    for i, cell in enumerate(progress_bar(own, desc=f"perturbing {group}".strip(), unit="cell")):
        ranked, expression, _ = (part.numpy() for part in cells.take(np.array([cell])).packed)
        whole = Ranked(ranked, expression, draw.permutation(len(ranked)) % PARTS)
        for change, names in zip(changes, parts, strict=True):
            sources = np.array([tokens[name] for name in names], dtype=np.int64)
            if kind == "knockout" and not np.isin(sources, whole.tokens).any():
                continue
            high = None if kind == "knockout" else np.array([raised[name] for name in names], dtype=np.float32)
            before, after = changed(whole, sources, high, denominator, c.max_length)
            for token, value in value_change(masked_values(model, before), masked_values(model, after)).items():
                change[i, first_column[token]] = value
            for source, name in zip(sources, names, strict=True):
                if high is None:
                    change[i, of_column == source] = -np.inf  # nothing falls below 0, and none of it is left
                elif int(source) in first_column:
                    was = whole.expression[whole.tokens == source].sum()
                    change[i, first_column[int(source)]] = max(was, raised[name] or 0.0) - was
    return controls.rows[own], changes
