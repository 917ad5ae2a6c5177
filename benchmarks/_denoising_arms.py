"""Who answers the queries of denoising.py: each arm gives log-odds of presence and values, from the same cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._constants import N_SPECIAL
from scdiva.diffusion.masking import cell_of_token
from scdiva.diffusion.thinning import Counts, counts_of, log_normalised
from scdiva.models import ScDiVa
from scdiva.train.queries import Asked, QueryModule

NEIGHBORS = 30
FEW = 1.0
"""Cells of the corpus' mean that are put beside those counted."""
RIDGE = 2.0
"""Penalty on the offset of a gene, in cells."""


class Study(NamedTuple):
    """A study that nothing was trained on: what is asked of some of its cells, and the others.

    Attributes
    ----------
    asked
        Queries, and what the cells show.
    around
        Tokens, counts and boundaries of the other cells that an arm in context may read: 200 at most.
    others
        The same of all cells that are not asked about, for nearest neighbours.
    offsets
        Queries of the cells around, drawn in the same way: what offsets are fitted to.
    """

    name: str
    asked: Asked
    around: tuple[Tensor, Counts, Tensor]
    others: tuple[Tensor, Counts, Tensor]
    offsets: Asked


Answers = tuple[Tensor, Tensor]
Answer = Callable[[Study], Answers]


class Halves(NamedTuple):
    """Of dense cells (M × genes): the chance that half of the counts misses a gene, and log-normalised values."""

    missed: Tensor
    values: Tensor

    def rate(self, weights: Tensor, prior: Tensor) -> Tensor:
        """How often cells so weighted `(B, M)` show a gene in one half that the other misses, `(B, n_genes)`."""
        late, missed = weights @ (self.missed * (self.values > 0)), weights @ self.missed
        return (late + FEW * prior) / (missed + FEW)

    def mean(self, weights: Tensor, prior: Tensor) -> Tensor:
        """Mean value of a gene where it is expressed."""
        there = weights @ (self.values > 0).float()
        return (weights @ self.values + FEW * prior) / (there + FEW)


def dense(cells: tuple[Tensor, Counts, Tensor], n_genes: int) -> Halves:
    tokens, counts, bounds = cells
    of = cell_of_token(bounds, len(tokens))
    missed, values = torch.ones(len(bounds) - 1, n_genes), torch.zeros(len(bounds) - 1, n_genes)
    missed[of, tokens - N_SPECIAL] = torch.exp2(-counts.of_token).float()
    values[of, tokens - N_SPECIAL] = log_normalised(counts, bounds)
    return Halves(missed, values)


class Corpus(NamedTuple):
    """Of the training cells: how often each gene is expressed, and its mean value where it is."""

    rate: Tensor
    mean: Tensor


def taken(table: Tensor, asked: Asked, *, values: bool = False) -> Tensor:
    """Of a table `(B or 1, n_genes)` what stands at the queries."""
    cell, token = (asked.value_cell, asked.value_token) if values else (asked.cell, asked.token)
    return table[cell if len(table) > 1 else torch.zeros_like(cell), token - N_SPECIAL]


def unigram(corpus: Corpus) -> Answer:
    def answer(study: Study) -> Answers:
        return taken(corpus.rate.logit()[None], study.asked), taken(corpus.mean[None], study.asked, values=True)

    return answer


def study_means(corpus: Corpus) -> Answer:
    """Gene means of the cells around."""

    def answer(study: Study) -> Answers:
        cells = dense(study.around, len(corpus.rate))
        uniform = torch.ones(1, len(cells.values))
        rate, mean = cells.rate(uniform, corpus.rate), cells.mean(uniform, corpus.mean)
        return taken(rate.logit(), study.asked), taken(mean, study.asked, values=True)

    return answer


def neighbors(corpus: Corpus, model: ScDiVa) -> Answer:
    """The 30 nearest by cell state of all other cells of the study, and ten cells of its mean."""

    def answer(study: Study) -> Answers:
        tokens, counts, bounds = study.others
        cells = dense(study.others, len(corpus.rate))
        with torch.inference_mode():
            theirs = model.encode_anchor(tokens, log_normalised(counts, bounds), bounds)
            ours = model.encode_anchor(*study.asked.seen)
        assert theirs is not None
        assert ours is not None
        near = (F.normalize(ours) @ F.normalize(theirs).T).topk(min(NEIGHBORS, len(theirs)), dim=1).indices
        weights = torch.zeros(len(ours), len(theirs)).scatter_(1, near, 1.0) + 10 / len(theirs)
        rate, mean = cells.rate(weights, corpus.rate), cells.mean(weights, corpus.mean)
        return taken(rate.logit(), study.asked), taken(mean, study.asked, values=True)

    return answer


class Head(nn.Module):
    """A state head for queries: linear in the state, or through two layers to 64 numbers."""

    def __init__(self, corpus: Corpus, state_dim: int, *, mlp: bool) -> None:
        super().__init__()
        width = 64 if mlp else state_dim + 1
        self.read = (
            nn.Sequential(nn.Linear(state_dim + 1, 256), nn.SiLU(), nn.Linear(256, width)) if mlp else nn.Identity()
        )
        self.gene, self.value = (nn.Parameter(torch.zeros(len(corpus.rate), width + 1)) for _ in range(2))
        with torch.no_grad():
            self.gene[:, -1], self.value[:, -1] = corpus.rate.logit(), corpus.mean

    def forward(self, state: Tensor, n_genes: Tensor, asked: Asked) -> Answers:
        known = torch.log1p(n_genes.float())[:, None] - 6
        u = self.read(torch.cat([F.rms_norm(state, state.shape[-1:]), known], dim=1))
        u = torch.cat([u, torch.ones_like(known)], dim=1)
        odds = (u[asked.cell] * self.gene[asked.token - N_SPECIAL]).sum(dim=1)
        return odds, (u[asked.value_cell] * self.value[asked.value_token - N_SPECIAL]).sum(dim=1)

    def of(self, model: ScDiVa, asked: Asked) -> Answers:
        with torch.no_grad():
            state = model.encode_anchor(*asked.seen)
        assert state is not None
        return self(state, asked.seen[2].diff(), asked)


def state_head(model: ScDiVa, head: Head) -> Answer:
    def answer(study: Study) -> Answers:
        with torch.inference_mode():
            return head.of(model, study.asked)

    return answer


def state_head_offsets(model: ScDiVa, head: Head) -> Answer:
    """The state head with an offset for each gene, fitted to the queries of the cells around."""

    def answer(study: Study) -> Answers:
        with torch.no_grad():
            odds, values = head.of(model, study.offsets)
            ours, found = head.of(model, study.asked)
        genes = study.offsets.token - N_SPECIAL
        n_genes = len(head.gene)
        offset = torch.zeros(n_genes, requires_grad=True)
        line = torch.tensor([0.0, 1.0], requires_grad=True)
        optimizer = torch.optim.LBFGS([offset, line], max_iter=80, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            fitted = line[0] + line[1] * odds + offset[genes]
            total = F.binary_cross_entropy_with_logits(fitted, study.offsets.present, reduction="sum")
            total = total + RIDGE / 2 * offset.square().sum()
            total.backward()
            return total

        optimizer.step(loss)  # type: ignore[arg-type]
        with torch.no_grad():
            at = study.offsets.value_token - N_SPECIAL
            left = torch.zeros(n_genes).index_add_(0, at, study.offsets.value - values)
            shift = left / (torch.bincount(at, minlength=n_genes) + RIDGE)
            ours = line[0] + line[1] * ours + taken(offset[None], study.asked)
            return ours, found + taken(shift[None], study.asked, values=True)

    return answer


def queries(module: QueryModule, *, context: bool) -> Answer:
    """The query head, with or without the cells around."""

    def answer(study: Study) -> Answers:
        with torch.inference_mode():
            return module.answer(study.asked, study.around if context else None)

    return answer


def scvi(seed: int = 0, epochs: int | None = None) -> Answer:
    """scVI with its defaults, fitted to what the cells asked about show and to all counts of the others."""

    def answer(study: Study) -> Answers:
        import anndata as ad
        import scipy.sparse as sp
        import scvi as scvi_tools
        from scvi.model import SCVI

        tokens, values, bounds = study.asked.seen
        parts = [(tokens, counts_of(values, bounds), bounds), study.others]
        used = torch.unique(torch.cat([parts[1][0], study.asked.token, study.asked.value_token]))
        n = len(bounds) - 1
        matrices = []
        for of_token, counts, ends in parts:
            kept = torch.isin(of_token, used)
            row, column = cell_of_token(ends, len(of_token))[kept], torch.searchsorted(used, of_token[kept])
            shape = len(ends) - 1, len(used)
            matrices.append(
                sp.csr_matrix((counts.of_token[kept].float().numpy(), (row.numpy(), column.numpy())), shape)
            )
        cells = ad.AnnData(sp.vstack(matrices).tocsr())
        scvi_tools.settings.seed = seed
        SCVI.setup_anndata(cells)
        network = SCVI(cells)
        network.train(epochs, accelerator="cpu", enable_progress_bar=False)
        found = network.get_likelihood_parameters(indices=np.arange(n))
        mean, size, dropout = (torch.as_tensor(np.array(found[key])) for key in ("mean", "dispersions", "dropout"))
        none = (size.log() - (size + mean).log()) * size
        chance = (
            (1 - dropout.sigmoid()) * -torch.expm1(none)
            if bool((dropout < 0).any())
            else (1 - dropout) * -torch.expm1(none)
        )
        total = torch.from_numpy(np.asarray(matrices[0].sum(axis=1))).float()
        value = torch.log1p(1e4 * mean / -torch.expm1(none).clamp_max(-1e-6) / total)
        table = torch.zeros(2, n, int(used.max()) + 1 - N_SPECIAL)
        table[:, :, used - N_SPECIAL] = torch.stack([chance.clamp(1e-6, 1 - 1e-6).logit(), value]).float()
        return taken(table[0], study.asked), taken(table[1], study.asked, values=True)

    return answer
