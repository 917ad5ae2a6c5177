"""From a cell to a logit for each label, and to how little the cell looks like any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scdiva._checks import check_choices
from scdiva.diffusion import cell_of_token
from scdiva.models.encoder import weighted_sum
from scdiva.models.layers import perceptron

METHODS = ("linear", "knn", "probe")
HIDDEN = 128
"""Width of the two hidden layers of `"probe"`."""
CLIP = 10.0
"""Most standard deviations that a gene may be off its mean."""
QUERY_BLOCK = 256
"""Cells whose distances to all known cells are held at once."""


class Read(NamedTuple):
    """Cells as a head reads them.

    Attributes
    ----------
    state
        `(B, state_dim)`, what the model makes of each.
    tokens, values, cu_seqlens
        Their genes, packed.
    """

    state: Tensor
    tokens: Tensor
    values: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the parts of an :class:`AnnotationHead`.

    Attributes
    ----------
    method
        One of `METHODS`.
    n_labels, state_dim, n_tokens
        Labels, width of the model's state, token space.
    own_dim, n_genes
        Width of the head's own projection, and genes that are read one by one; 0 for none.
    n_known
        Known cells of `"knn"`.
    n_neighbors
        Neighbours that vote.
    """

    method: str
    n_labels: int
    state_dim: int
    n_tokens: int
    own_dim: int = 0
    n_genes: int = 0
    n_known: int = 0
    n_neighbors: int = 15

    def __post_init__(self) -> None:
        check_choices(method=(self.method, METHODS))

    @property
    def dim(self) -> int:
        """Width of a cell's features: the state and the own projection."""
        return self.state_dim + self.own_dim


class Neighbors(nn.Module):
    """Shares of the labels among the nearest known cells, as logits.

    One cell more, of no label, votes for all equally, so that no share is 0.

    Parameters
    ----------
    n_known, dim, n_labels, n_neighbors
        Sizes.
    """

    def __init__(self, n_known: int, dim: int, n_labels: int, n_neighbors: int) -> None:
        super().__init__()
        self.n_labels = n_labels
        # more would only count how many cells each label has
        self.n_neighbors = min(n_neighbors, max(1, n_known // n_labels))
        self.known = nn.Buffer(torch.zeros(n_known, dim))
        self.label = nn.Buffer(torch.zeros(n_known, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, n_labels)` of features `(B, dim)`."""
        parts = []
        for block in x.split(QUERY_BLOCK):
            near = torch.cdist(block, self.known).topk(self.n_neighbors, largest=False).indices
            votes = F.one_hot(self.label[near], self.n_labels).sum(dim=1).to(x.dtype)
            parts.append(((votes + 1 / self.n_labels) / (self.n_neighbors + 1)).log())
        return torch.cat(parts)


class AnnotationHead(nn.Module):
    r"""Classifier of cells on a model's state, with calibrated probabilities and a measure of novelty.

    For `"linear"` the features of a cell are :math:`u = [\hat z, \hat x] / \sqrt 2`: the cell state and a projection of
    the cell's genes fitted on the reference, each scaled to length 1. For `"probe"` and `"knn"` they are
    :math:`u = \hat z`. The classifier maps them to logits :math:`\ell`:

    - `"linear"`: a linear layer without bias on the centred state :math:`\hat z` and on single genes, which are not
      centred; the state has one scale and the genes another;
    - `"probe"`: a multilayer perceptron with two hidden layers on standardised features (paper, section on annotation);
    - `"knn"`: votes of the nearest reference cells.

    Probabilities are :math:`\mathrm{softmax}(\ell / T)`; the temperature T is fitted on held-out cells of the reference
    (Guo et al. 2017).

    Novelty is high for cells of types that the reference lacks, by two quantities that fall in such cells. One is the
    largest logit. For `"linear"` it is not a logit of the labels but of a second linear layer, on standardised features
    u and standardised single genes, whose logits fall more in such cells. With c the label of the largest of them and
    :math:`m_c, s_c` mean and deviation of that logit among held-out cells named c; and with :math:`\cos_k` the cosine
    between :math:`\hat z` and the centroid of label k, :math:`\mu_k, \sigma_k` its mean and deviation among held-out
    cells of k:

    .. math::

        \mathrm{novelty} = -\tfrac12\Bigl(\frac{\ell_c - m_c}{s_c} + \max_k \frac{\cos_k - \mu_k}{\sigma_k}\Bigr) - n_0

    with :math:`n_0` such that held-out cells have a mean of 0.

    The projection has no part in the cosines: it holds what separates the types of the reference, where the state
    was trained on many more.

    Parameters
    ----------
    sizes
        Of everything.
    """

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = s = sizes
        # torch sums no rows of width 0
        self.own = nn.Embedding(s.n_tokens, s.own_dim) if s.own_dim else None
        self.classifier: nn.Module
        if s.method == "knn":
            self.classifier = Neighbors(s.n_known, s.dim, s.n_labels, s.n_neighbors)
        elif s.method == "probe":
            self.classifier = perceptron(s.dim, HIDDEN, s.n_labels)
        else:
            self.classifier = nn.Linear(s.state_dim + s.n_genes, s.n_labels)
        self.novelty_classifier = nn.Linear(s.dim + s.n_genes, s.n_labels) if s.method == "linear" else None
        self.feature_mean, self.feature_scale = nn.Buffer(torch.zeros(s.dim)), nn.Buffer(torch.ones(s.dim))
        self.gene_tokens = nn.Buffer(torch.zeros(s.n_genes, dtype=torch.int64))
        self.gene_mean, self.gene_scale = nn.Buffer(torch.zeros(s.n_genes)), nn.Buffer(torch.ones(s.n_genes))
        self.gene_weight, self.temperature = nn.Buffer(torch.ones(1)), nn.Buffer(torch.ones(1))
        self.state_factor, self.gene_factor = nn.Buffer(torch.ones(1)), nn.Buffer(torch.ones(1))
        self.centroids = nn.Buffer(torch.zeros(s.n_labels, s.state_dim))
        self.cosine_mean, self.cosine_scale = nn.Buffer(torch.zeros(s.n_labels)), nn.Buffer(torch.ones(s.n_labels))
        self.logit_mean, self.logit_scale = nn.Buffer(torch.zeros(s.n_labels)), nn.Buffer(torch.ones(s.n_labels))
        self.novelty_mean = nn.Buffer(torch.zeros(1))

    def features(self, cells: Read) -> Tensor:
        """Return u, `(B, dim)`."""
        state = F.normalize(cells.state.float(), dim=1)
        if self.own is None:
            return state
        own = weighted_sum(self.own.weight, cells.tokens, cells.values, cells.cu_seqlens)
        return torch.cat([state, F.normalize(own, dim=1)], dim=1) / 2**0.5

    def genes(self, cells: Read) -> Tensor | None:
        """Return log-normalised expression of the genes that are read one by one, `(B, n_genes)`; None without any."""
        if not self.sizes.n_genes:
            return None
        column = torch.full((self.sizes.n_tokens,), -1, dtype=torch.int64, device=cells.tokens.device)
        column[self.gene_tokens] = torch.arange(len(self.gene_tokens), device=column.device)
        columns = column[cells.tokens]
        kept = columns >= 0
        rows = cell_of_token(cells.cu_seqlens, len(cells.tokens))
        dense = cells.values.new_zeros(len(cells.state), self.sizes.n_genes)
        dense[rows[kept], columns[kept]] = cells.values[kept]
        return dense

    def inputs(self, u: Tensor, genes: Tensor | None, measured: Tensor | None = None) -> Tensor:
        """Return what the classifier reads.

        Parameters
        ----------
        u
            Features `(B, dim)`.
        genes
            From :meth:`genes`.
        measured
            bool `(n_genes,)`; the others count as average. None: all.
        """
        if self.sizes.method != "linear":
            return self.novelty_inputs(u, genes, measured)
        # features are states of length 1 / √2, if there is a projection
        width = self.sizes.state_dim
        state = (u - self.feature_mean)[:, :width] * self.state_factor
        if genes is None:
            return state
        if measured is not None:
            genes = torch.where(measured, genes, self.gene_mean)
        return torch.cat([state, genes * self.gene_factor], dim=1)

    def novelty_inputs(self, u: Tensor, genes: Tensor | None, measured: Tensor | None = None) -> Tensor:
        """Return what the layer of the novelty's logits reads; parameters as in :meth:`inputs`."""
        if self.sizes.method == "knn":
            return u
        standard = (u - self.feature_mean) / self.feature_scale
        if genes is None:
            return standard
        scaled = ((genes - self.gene_mean) / self.gene_scale).clamp(-CLIP, CLIP) * self.gene_weight
        if measured is not None:
            scaled = scaled * measured
        return torch.cat([standard, scaled], dim=1)

    def cosines(self, u: Tensor, centroids: Tensor) -> Tensor:
        """Return the cosines `(B, n_labels)` of the states in features u with centroids `(n_labels, state_dim)`."""
        return F.normalize(u[:, : self.sizes.state_dim], dim=1) @ centroids.T

    def novelty(self, logits: Tensor, cosines: Tensor) -> Tensor:
        """Return the novelty of each cell `(B,)`, from its logits and its cosines with the centroids."""
        largest, named = logits.max(dim=1)
        by_logit = (largest - self.logit_mean[named]) / self.logit_scale[named]
        by_cosine = ((cosines - self.cosine_mean) / self.cosine_scale).max(dim=1).values
        return -(by_logit + by_cosine) / 2 - self.novelty_mean

    def forward(self, cells: Read, measured: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities `(B, n_labels)` and novelty `(B,)` of cells; `measured` as in :meth:`inputs`."""
        u, genes = self.features(cells), self.genes(cells)
        logits = of_novelty = self.classifier(self.inputs(u, genes, measured))
        if self.novelty_classifier is not None:
            of_novelty = self.novelty_classifier(self.novelty_inputs(u, genes, measured))
        return (logits / self.temperature).softmax(dim=1), self.novelty(of_novelty, self.cosines(u, self.centroids))
