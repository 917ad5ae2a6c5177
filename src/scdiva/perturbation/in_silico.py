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
from scdiva._checks import warn
from scdiva._rng import step_seed
from scdiva._settings import progress_bar, torch_threads_kept
from scdiva.data.conditions import listed, species_of, wanted_groups
from scdiva.data.genes import column_tokens
from scdiva.data.reading import Reading
from scdiva.data.writing import check_columns
from scdiva.models.scdiva import ScDiVa
from scdiva.perturbation.model import COLUMNS
from scdiva.perturbation.predict import Targets, distinct_parts, laid_out
from scdiva.perturbation.screen import Conditions, Controls, group_names, known_tokens, read_controls
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

    def only(self, chosen: NDArray[np.bool_]) -> Ranked:
        """Return some of its genes."""
        return Ranked(self.tokens[chosen], self.expression[chosen], self.turn[chosen])


def changed(
    cell: Ranked,
    sources: Tokens,
    raised: NDArray[np.floating] | None,
    denominator: NDArray[np.float32],
    max_length: int,
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
    cell = cell._replace(turn=np.where(own, -1, cell.turn))
    before = cell.only(own | (np.cumsum(~own) <= max_length - own.sum()))
    rest = before.only(~np.isin(before.tokens, sources))
    if raised is None:
        return before, rest
    was = dict(zip(cell.tokens[own].tolist(), cell.expression[own].tolist(), strict=True))
    high = [max(was.get(int(s), 0.0), float(np.float32(r))) for s, r in zip(sources, raised, strict=True)]
    room = max_length - len(sources)
    tokens = np.concatenate([sources, rest.tokens[:room]])
    values = np.concatenate([np.array(high, np.float32), rest.expression[:room]])
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
    parts = distinct_parts(names, "", separator, "genes")
    if groups is not None and groupby is None:
        raise ValueError("groups are given without a column: groupby=...")
    check_columns(groupby)
    if groupby in (C.PERTURBATION, C.OBS_CONDITION, C.OBS_CONTROL_CELL):
        raise ValueError(
            f"obs[{groupby!r}] of the result names a cell's perturbation: copy the groups to a column of another "
            "name, and name that with groupby."
        )
    if not adata.n_obs:
        raise ValueError(f"adata is empty: 0 cells × {adata.n_vars} genes.")
    species = species_of(list(map(str, reading.var(adata).index)), model.vocabulary, reading.species)
    sources = _sources(names, parts, known_tokens(model, parts, species), model.config.max_length)
    group = group_names(adata, groupby)
    wanted = wanted_groups(groups, sorted(set(group)), f"are not in adata.obs[{groupby!r}]")
    warn(
        "the model was trained on no intervention: what follows says which genes go together, not what a perturbation "
        "causes. With a screen, use scdiva.tl.predict_perturbation."
    )
    controls = read_controls(adata, np.isin(group.astype(str), wanted), group, model, None, reading)
    levels = _levels(controls, names, sources, kind)
    of_column = column_tokens(controls.var, model.vocabulary, reading)
    home = next(model.parameters()).device
    origin, means, after = [], [], []
    try:
        model.to(device)
        with torch_threads_kept(1 if device == "cpu" else None):  # products too small to share
            for name in wanted:
                # a group's cells do not depend on which others are asked for
                draw = np.random.default_rng(step_seed(seed, 0, f"in silico in {name}"))
                own = np.sort(draw.permutation(controls.of_group(name))[:n_cells])
                before = controls.expression[controls.rows[own]].toarray()
                for change in _changes(model, controls, own, sources, levels, of_column, draw):
                    made = np.maximum(before + change, 0.0)
                    error = (made - before).std(axis=0, ddof=1 if len(own) > 1 else 0) / len(own) ** 0.5
                    means.append((made.mean(axis=0), error, before.mean(axis=0)))
                    after.append(made)
                    origin.append(controls.names[controls.rows[own]])
    finally:
        model.to(home)
    number = np.repeat(np.arange(len(wanted)), len(names))
    conditions = Conditions(tuple(parts) * len(wanted), number, np.ones(len(number)))
    targets = Targets(conditions, names * len(wanted), [wanted[i] for i in number], np.zeros((0, 0)))
    nothing = conditions.only(np.zeros(0, dtype=np.int64))
    design = dict(zip(COLUMNS, (C.PERTURBATION, "", groupby or "", "", separator), strict=True))
    notes: dict[str, Any] = {
        "base": np.full(len(number), "none", dtype=object),
        "trained_on_interventions": False,
        "kind": kind,
        "seed": str(seed),
        "seconds": time.monotonic() - begun,
    }
    by_key = dict(zip((C.VARM_MEAN, C.VARM_SD, C.VARM_CONTROL), map(np.array, zip(*means, strict=True)), strict=True))
    return laid_out(after, origin, controls.var, by_key, targets, nothing, design, notes)


def _sources(names: list[str], parts: list[tuple[str, ...]], tokens: dict[str, int], most: int) -> list[Tokens]:
    """Give the tokens of each perturbation; refuse a gene that is named twice, and more genes than the model reads."""
    sources = [np.array([tokens[part] for part in these], dtype=np.int64) for these in parts]
    for name, these in zip(names, sources, strict=True):
        if len(np.unique(these)) < len(these):
            raise ValueError(f"{name!r} names one gene twice, once by another name.")
        if len(these) > most:
            raise ValueError(f"{len(these)} genes are perturbed together, more than the {most} that the model reads.")
    return sources


def _levels(controls: Controls, names: list[str], sources: list[Tokens], kind: str) -> list[NDArray[np.float64] | None]:
    """Give what the genes of each perturbation are raised to, None in a knock-out; refuse what can't be changed."""
    values, of = controls.cells.values, controls.cells.tokens
    enough, does = (np.any, "take away") if kind == "knockout" else (np.all, "raise")
    lacking = [name for name, these in zip(names, sources, strict=True) if not enough(np.isin(these, of))]
    if lacking:
        raise ValueError(
            f"{len(lacking)} of {len(names)} perturbations {does} what none of these cells expresses, the first is "
            f"{lacking[0]!r}: leave such genes out."
        )
    if kind == "knockout":
        return [None] * len(names)
    return [np.array([np.quantile(values[of == token], RAISED) for token in these]) for these in sources]


def _changes(
    model: ScDiVa,
    controls: Controls,
    own: NDArray[np.int64],
    sources: list[Tokens],
    levels: list[NDArray[np.float64] | None],
    of_column: NDArray[np.int32],
    draw: np.random.Generator,
) -> list[NDArray[np.float64]]:
    """Perturb cells, by their numbers among the controls: for each perturbation the change, cells × genes."""
    denominator = score_denominator(model.vocabulary.entropy, model.config.entropy_floor)
    first_column = {int(token): j for j, token in reversed(list(enumerate(of_column))) if token >= 0}
    changes = [np.zeros((len(own), len(of_column))) for _ in sources]
    for i, cell in enumerate(progress_bar(own, desc="perturbing", unit="cell")):
        ranked, expression, _ = (part.numpy() for part in controls.cells.take(np.array([cell])).packed)
        whole = Ranked(ranked, expression, draw.permutation(len(ranked)) % PARTS)
        for change, these, raised in zip(changes, sources, levels, strict=True):
            if raised is None and not np.isin(these, whole.tokens).any():
                continue
            before, after = changed(whole, these, raised, denominator, model.config.max_length)
            expected, now = masked_values(model, before), masked_values(model, after)
            for token in expected.keys() & now.keys():
                change[i, first_column[token]] = now[token] - expected[token]
            if raised is None:
                change[i, np.isin(of_column, these)] = -np.inf  # nothing falls below 0, and none of it is left
                continue
            for source, level in zip(these.tolist(), raised.tolist(), strict=True):
                if source in first_column:
                    was = whole.expression[whole.tokens == source].sum()
                    change[i, first_column[source]] = max(was, level) - was
    return changes
