"""Who answers the queries of denoising.py: each arm gives log-odds of presence and values, from the same cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from _scripts import Asked, QueryModule
from torch import Tensor, nn

from scdiva._constants import MASK, N_SPECIAL
from scdiva.diffusion.masking import cell_of_token
from scdiva.diffusion.thinning import Counts, counts_of, log_normalised
from scdiva.models import ScDiVa
from scdiva.populations.corrections import fit_population
from scdiva.populations.imputation import RIDGE as RIDGE_IMPUTED
from scdiva.populations.states import Fitted, States, predicted
from scdiva.tokenizer import Vocabulary
from scdiva.tokenizer.serialize import score_denominator

MASKED = 32
"""Genes that a transformer is asked of at once."""
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
    whole
        The same of the cells that are asked about, which no arm reads.
    offsets
        Queries of the cells around, drawn in the same way: what offsets are fitted to.
    """

    name: str
    asked: Asked
    around: tuple[Tensor, Counts, Tensor]
    others: tuple[Tensor, Counts, Tensor]
    whole: tuple[Tensor, Counts, Tensor]
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


def at_depth(log_odds: Tensor, n_genes: Tensor) -> Tensor:
    """Log-odds `(B, n)` that Poisson counts are above 0, their means scaled so that so many `(B,)` are in each cell."""
    mean = F.softplus(log_odds.double())
    low, high = torch.full((len(mean), 1), -12.0).double(), torch.full((len(mean), 1), 12.0).double()
    for _ in range(40):
        middle = (low + high) / 2
        few = (-torch.expm1(-mean * middle.exp())).sum(dim=1, keepdim=True) < n_genes[:, None]
        low, high = torch.where(few, middle, low), torch.where(few, high, middle)
    return torch.expm1(mean * low.exp()).clamp(1e-9, 1e9).log().float()


def own_state_head(model: ScDiVa) -> Answer:
    """The model's own state head as it is, which a transformer of masked diffusion adds to."""

    def answer(study: Study) -> Answers:
        asked = study.asked
        with torch.inference_mode():
            state = model.encode_anchor(*asked.seen)
        assert state is not None
        used = torch.unique(torch.cat([asked.token, asked.value_token]))
        lengths = asked.seen[2].diff().numpy().astype(np.int64)
        odds, expected = predicted(model, used.numpy(), States(state.numpy(), lengths))
        return _asked_of(torch.from_numpy(odds), torch.from_numpy(expected), used, asked, model.config.n_genes)

    return answer


def _asked_of(odds: Tensor, values: Tensor, genes: Tensor, asked: Asked, n_genes: int) -> Answers:
    """Answer queries from tables `(n_cells, len(genes))` of these genes."""
    tables = torch.zeros(2, len(odds), n_genes)
    tables[:, :, genes - N_SPECIAL] = torch.stack([odds, values])
    return taken(tables[0], asked), taken(tables[1], asked, values=True)


def population(model: ScDiVa) -> Answer:
    """The model's own state head, corrected gene by gene along 20 directions of the states of all other cells.

    Counts of a gene taken as Poisson, the log-odds of whole cells are brought to the depth at which a cell would show
    as many genes as it does: its other half is as deep.
    """

    def answer(study: Study) -> Answers:
        tokens, counts, bounds = study.others
        used = torch.unique(torch.cat([study.asked.token, study.asked.value_token, study.asked.seen[0]]))
        shown = dense(study.others, model.config.n_genes).values[:, used - N_SPECIAL].numpy()
        with torch.inference_mode():
            theirs = model.encode_anchor(tokens, log_normalised(counts, bounds), bounds)
            ours = model.encode_anchor(*study.asked.seen)
        assert theirs is not None
        assert ours is not None
        lengths = bounds.diff().numpy().astype(np.int64), study.asked.seen[2].diff().numpy().astype(np.int64)
        others, asked = (States(*pair) for pair in zip((theirs.numpy(), ours.numpy()), lengths, strict=True))
        genes = used.numpy()
        fitted = Fitted(
            model,
            genes,
            fit_population(
                others.state, *predicted(model, genes, others), shown, np.random.default_rng(0), RIDGE_IMPUTED
            ),
        )
        odds, expected = (torch.from_numpy(table) for table in fitted.expected(asked))
        odds = at_depth(odds, torch.from_numpy(asked.n_genes))
        return _asked_of(odds, expected, used, study.asked, model.config.n_genes)

    return answer


def transformer(model: ScDiVa, vocabulary: Vocabulary, *, behind: bool) -> Answer:
    """A transformer of masked diffusion: genes that it predicts at masked positions, and their values.

    It reads the genes that a cell shows in order of rank. Of presence, the mean of p(gene) over masked positions spread
    evenly among them; of values, genes whose value is masked, each where the state head's value would rank it. With
    `behind` both stand behind the visible genes.
    """
    denominator = torch.from_numpy(score_denominator(vocabulary.entropy, model.config.entropy_floor))

    def answer(study: Study) -> Answers:
        asked, bounds = study.asked, study.asked.seen[2].tolist()
        odds, values = torch.zeros(len(asked.cell)), torch.zeros(len(asked.value_cell))
        for cell, (start, end) in enumerate(itertools.pairwise(bounds)):
            seen = asked.seen[0][start:end], asked.seen[1][start:end]
            by_score = (-seen[1] / denominator[seen[0]]).argsort(stable=True)
            by_score = by_score[: model.config.max_length - MASKED]
            tokens, shown = (part[by_score] for part in seen)
            with torch.inference_mode():
                state = model.encode_anchor(*seen, torch.tensor([0, end - start], dtype=torch.int32))
                of_presence, of_value = asked.cell == cell, asked.value_cell == cell
                even = torch.linspace(0, len(tokens), MASKED)
                at = _inserted(torch.full((MASKED,), MASK), even, tokens, shown, behind=behind)
                out = model(*at[:2], at[2], value_mask=at[3], anchor_state=state)
                chance = model.logits(out, at[3]).float().softmax(dim=1).mean(dim=0)
                odds[of_presence] = chance.clamp_min(1e-12).log()[asked.token[of_presence] - N_SPECIAL]

                genes = asked.value_token[of_value]
                expected = predicted(model, genes.numpy(), States(state.numpy(), np.array([end - start])))[1][0]
                score, ranked = torch.from_numpy(expected) / denominator[genes], shown / denominator[tokens]
                found = torch.zeros(len(genes))
                for some in torch.arange(len(genes)).split(MASKED):
                    place = torch.searchsorted(-ranked, -score[some]).float()
                    at = _inserted(genes[some], place, tokens, shown, behind=behind)
                    out = model(*at[:2], at[2], value_mask=at[3], anchor_state=state)
                    found[some[at[4]]] = model.values(out, at[0][at[3]], at[3]).float()
                values[of_value] = found
        return odds, values

    return answer


def _inserted(
    genes: Tensor, place: Tensor, tokens: Tensor, values: Tensor, *, behind: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One cell with genes of hidden values at given places: tokens, values, boundaries, which are new, their order."""
    places = torch.cat([torch.arange(len(tokens)) + 0.5, torch.full_like(place, len(tokens) + 1) if behind else place])
    order = places.argsort(stable=True)
    new = order >= len(tokens)
    all_values = torch.cat([values, torch.zeros(len(genes))])[order]
    bounds = torch.tensor([0, len(order)], dtype=torch.int32)
    return torch.cat([tokens, genes])[order], all_values, bounds, new, order[new] - len(tokens)


def queries(modules: list[QueryModule], *, context: bool) -> Answer:
    """The query head, with or without the cells around; of two the first says presence, the second values."""

    def answer(study: Study) -> Answers:
        with torch.inference_mode():
            found = [module.answer(study.asked, study.around if context else None) for module in modules]
        return found[0][0], found[-1][1]

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
