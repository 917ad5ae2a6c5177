"""The query head as it is trained: its features are their formulas, and its table has the same answers."""

from __future__ import annotations

import pytest
import torch
from mini_objectives import Context, SingleQueries

from scdiva.models import queries

B, M, N, GENES, STATE, READ = 3, 5, 11, 7, 6, 4


@pytest.fixture
def head():
    torch.manual_seed(0)
    head = SingleQueries(STATE, READ, GENES)
    torch.nn.init.normal_(head.out.weight)
    return head.double()


@pytest.fixture
def inputs():
    """Cells, queries, and what the state head says of them."""
    source = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    gene = torch.randint(GENES, (N,), generator=source)
    return {
        "state": normal(B, STATE), "head_hidden": normal(B, READ), "n_genes": torch.tensor([30, 400, 2000]),
        "cell": torch.randint(B, (N,), generator=source), "gene": gene, "column": gene,
        "log_odds": normal(N), "values": normal(N).abs(),
    }  # fmt: skip


@pytest.fixture
def context():
    source = torch.Generator().manual_seed(2)
    counts = torch.poisson(torch.full((M, GENES), 0.8, dtype=torch.float64), generator=source)
    return Context(
        torch.randn(M, STATE, generator=source, dtype=torch.float64),
        torch.tensor([100, 200, 300, 400, 500]),
        torch.exp2(-counts),
        torch.log1p(50 * counts),
        torch.randn(GENES, generator=source, dtype=torch.float64),
    )


def test_a_table_has_the_answers_to_single_queries(head, inputs, context):
    source = torch.Generator().manual_seed(3)
    log_odds, values = torch.randn(2, B, GENES, generator=source, dtype=torch.float64)
    own_row, gene = torch.tensor([1, -1, 4]), torch.arange(GENES)
    cells = {name: inputs[name] for name in ("state", "head_hidden", "n_genes")}
    for of_context in (context, context._replace(values=torch.zeros_like(context.values))):
        state, n_genes, _, visible_values, mean = of_context
        around = queries.Context(state, n_genes, visible_values, (visible_values > 0).double(), mean)
        tables = head.table(*cells.values(), gene, log_odds, values, around, own_row)
        cell, column = torch.arange(B).repeat_interleave(GENES), gene.repeat(B)
        single = head(
            **cells, cell=cell, gene=column, column=column, log_odds=log_odds.flatten(), values=values.flatten(),
            thinned=False, context=of_context, own_row=own_row,
        )  # fmt: skip
        for table, answers in zip(tables, single, strict=True):
            torch.testing.assert_close(table.flatten(), answers)
