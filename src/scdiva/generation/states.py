"""What cells of a population express given their states: a model's state head, corrected gene by gene by the cells.

`tl.generate` draws cells from it, and `tl.impute` reads expected values off it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from scdiva._constants import N_SPECIAL
from scdiva.data.memory import InMemoryCells
from scdiva.generation.corrections import RIDGE, Corrections, Matrix, fit_population, shift_to
from scdiva.models import ScDiVa
from scdiva.models.queries import Context

HELD = 40_000_000
"""Most values (cells × genes) that a population is fitted to: of more cells, so many are drawn."""
CELLS = 256
"""Cells that are read or written together."""
CONTEXT, LEAST_CONTEXT = 256, 16
"""Cells that a query head reads beside the one asked about: at most, and fewest that it was trained with."""
QUERIES = 20_000
"""Queries (cells × genes) that a query head answers at once."""


class States(NamedTuple):
    """Cell states and the number of genes that each was read from, `(n, state_dim)` and `(n,)`.

    `group` `(n, n_groups)` is the share of each cell that is of a group, where groups are fitted apart. `own` `(n,)` is
    the row of the context cells that is the cell itself, -1 where none is.
    """

    state: Matrix
    n_genes: NDArray[np.int64]
    group: Matrix | None = None
    own: NDArray[np.int64] | None = None

    def take(self, rows: NDArray[np.integer]) -> States:
        """Give some of them."""
        return States(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def described(self) -> Matrix:
        """Give the states with the groups beside them: what corrections may depend on."""
        return self.state if self.group is None else np.concatenate([self.state, self.group], axis=1)


class Fitted(NamedTuple):
    """A model's state head, fitted to cells.

    Attributes
    ----------
    model
        With a state head.
    genes
        int64 `(n_genes,)`, tokens of the genes that the data measure, ascending.
    corrections
        What the cells add to it.
    """

    model: ScDiVa
    genes: NDArray[np.int64]
    corrections: Corrections

    def expected(self, states: States) -> tuple[Matrix, Matrix]:
        """Give log-odds that cells of these states express each gene, and its value where they do, `(n, n_genes)`."""
        return self.corrections.added(states.described(), *predicted(self.model, self.genes, states))


@contextlib.contextmanager
def on_cpu(model: ScDiVa) -> Iterator[None]:
    """Have a model on the CPU for the block, and back where it was after it: its states meet arrays of numpy here."""
    home = next(model.parameters()).device
    try:
        model.to("cpu")
        yield
    finally:
        model.to(home)


def states_of(model: ScDiVa, cells: InMemoryCells) -> States:
    """Read the states of all cells, each from all of its genes."""
    found = np.empty((cells.n_cells, model.state_dim), dtype=np.float32)
    with torch.inference_mode():
        for start in range(0, cells.n_cells, CELLS):
            rows = np.arange(start, min(start + CELLS, cells.n_cells))
            state = model.encode_anchor(*cells.take(rows, model.config.input_length).packed)
            assert state is not None
            found[rows] = state.float().numpy()
    return States(found, np.diff(cells.indptr).astype(np.int64))


def context_of(model: ScDiVa, cells: InMemoryCells, states: States, genes: NDArray[np.int64]) -> Context:
    """Make what the query head reads of cells, whole ones: their states, and these genes of them, on the CPU."""
    head, values = model.state_head, torch.from_numpy(expression_of(cells, genes).toarray())
    assert head is not None
    state, n_genes = torch.from_numpy(states.state), torch.from_numpy(states.n_genes)
    with torch.inference_mode():
        mean = head(state, n_genes).mean(dim=0, keepdim=True)
        log_odds = head.log_odds(mean, torch.from_numpy(genes - N_SPECIAL))[0]
    return Context(state, n_genes, values, (values > 0).to(values.dtype), log_odds)


@torch.inference_mode()
def predicted(
    model: ScDiVa, genes: NDArray[np.int64], states: States, context: Context | None = None
) -> tuple[Matrix, Matrix]:
    """Predict as :meth:`Fitted.expected`, uncorrected: by the state head, or by the query head given other cells."""
    head, own = model.state_head, torch.from_numpy(genes - N_SPECIAL)
    assert head is not None
    state, n_genes = torch.from_numpy(states.state), torch.from_numpy(states.n_genes)
    read = head(state, n_genes)
    log_odds, values = head.log_odds(read, own).float(), head.values(read, own).float()
    if context is not None:
        assert model.query_head is not None
        step = max(1, QUERIES // max(len(genes), 1))
        for start in range(0, len(state), step):
            part = slice(start, start + step)
            among = None if states.own is None else torch.from_numpy(states.own[part])
            log_odds[part], values[part] = model.query_head.table(
                state[part], read[part], n_genes[part], own, log_odds[part], values[part], context, own=among
            )
    return log_odds.numpy(), values.numpy()


def fit_to(
    model: ScDiVa,
    cells: InMemoryCells,
    states: States,
    rng: np.random.Generator,
    genes: NDArray[np.int64] | None = None,
    ridge: float = RIDGE,
) -> Fitted:
    """Fit a model's state head to cells.

    Parameters
    ----------
    model
        On the CPU; not changed.
    cells
        All of them.
    states
        Theirs.
    rng
        Draws the cells that are fitted to, where there are too many.
    genes
        Tokens, ascending; None: all that the data measure.
    ridge
        Penalty on the corrections, in cells.
    """
    genes = cells.measured.astype(np.int64) if genes is None else genes
    rows = drawn(cells.n_cells, len(genes), rng)
    some, observed = states.take(rows), expression_of(cells.subset(rows), genes)
    return Fitted(model, genes, fit_population(some.described(), *predicted(model, genes, some), observed, rng, ridge))


def drawn(n_cells: int, n_genes: int, rng: np.random.Generator) -> NDArray[np.integer]:
    """Draw the rows of as many cells as a population is fitted to."""
    rows, most = np.arange(n_cells), max(2, HELD // max(n_genes, 1))
    return rows if n_cells <= most else np.sort(rng.choice(rows, most, replace=False))


def depth_of(fitted: Fitted, cells: InMemoryCells, states: States) -> tuple[Matrix, Matrix]:
    """Estimate the depth of cells by the genes that were fitted: by their number in each cell, and by their values.

    By how much the log-odds and the values of each cell are above what its state predicts, `(n,)` each.
    """
    odds, values = np.empty((2, cells.n_cells), dtype=np.float32)
    for start in range(0, cells.n_cells, CELLS):
        rows = np.arange(start, min(start + CELLS, cells.n_cells))
        observed = expression_of(cells.subset(rows), fitted.genes).toarray()
        log_odds, expected = fitted.expected(states.take(rows))
        number = (observed > 0).sum(axis=1)
        odds[rows] = shift_to(log_odds, np.clip(number, 0.5, observed.shape[1] - 0.5))
        values[rows] = np.where(observed > 0, observed - expected, 0).sum(axis=1) / np.maximum(number, 1)
    return odds, values


def expression_of(cells: InMemoryCells, genes: NDArray[np.int64]) -> sp.csr_matrix:
    """Give log-normalised expression of some genes, by their tokens, float32 CSR `(n_cells, n_genes)`."""
    return cells.matrix(max(int(cells.tokens.max(initial=0)), int(genes.max(initial=0))) + 1)[:, genes]
