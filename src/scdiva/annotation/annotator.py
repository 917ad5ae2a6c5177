"""The annotator: a model, a calibrated classifier on its cell states, and the labels; run over cells and saved."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from scdiva._checks import check_choices
from scdiva._constants import N_SPECIAL
from scdiva._settings import logger
from scdiva.data.batch import from_ragged
from scdiva.data.cells import Ragged, has_gene_below, take_cells
from scdiva.diffusion import cell_of_token
from scdiva.models.inference import Cells, RunConfig, run_cells, width_of
from scdiva.models.layers import perceptron, weighted_sum
from scdiva.models.pretrained import Fitted, arrays, check_shapes
from scdiva.models.scdiva import ScDiVa
from scdiva.models.storage import MODEL
from scdiva.tokenizer.vocabulary import Vocabulary, with_human_genes

METHODS = ("linear", "knn", "probe")
HIDDEN = 128
"""Width of the two hidden layers of `"probe"`."""
CLIP = 10.0
"""Maximum absolute value of a standardised gene."""
QUERY_BLOCK = 256
"""Cells whose distances to all reference cells are held at once."""
BLOCK_CELLS = 1024
"""Cells that are classified at once."""
_MOST = {"n_labels": 100_000, "own_dim": 4096, "n_genes": 200_000, "n_known": 10_000_000, "n_neighbors": 10_000_000}
"""Largest sizes that are accepted from a file."""


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of an :class:`AnnotationHead`.

    Attributes
    ----------
    method
        One of `METHODS`.
    n_labels, state_dim, n_tokens
        Labels, width of the model's state, token space.
    own_dim, n_genes
        Principal components and single genes of the dataset that are read; 0 for none.
    n_known, n_neighbors
        Reference cells of `"knn"`, and neighbours that vote.
    self_trained
        Whether the labels of `"linear"` are taken from the layer for novelty, as it was fitted to unlabelled cells too.
    """

    method: str
    n_labels: int
    state_dim: int
    n_tokens: int
    own_dim: int = 0
    n_genes: int = 0
    n_known: int = 0
    n_neighbors: int = 15
    self_trained: bool = False

    def __post_init__(self) -> None:
        check_choices(method=(self.method, METHODS))

    @property
    def two_layers(self) -> bool:
        """Whether labels and novelty have separate linear layers."""
        return self.method == "linear" and not self.self_trained

    @property
    def dim(self) -> int:
        """Width of a cell's features: the state and the principal components."""
        return self.state_dim + self.own_dim


class Neighbors(nn.Module):
    """Log shares of the labels among the nearest reference cells, with one additional vote divided among all labels.

    Parameters
    ----------
    n_known, dim, n_labels, n_neighbors
        Sizes.
    """

    def __init__(self, n_known: int, dim: int, n_labels: int, n_neighbors: int) -> None:
        super().__init__()
        self.n_labels = n_labels
        # more neighbours would only count how many cells each label has
        self.n_neighbors = min(n_neighbors, max(1, n_known // n_labels))
        self.known = nn.Buffer(torch.zeros(n_known, dim))
        self.label = nn.Buffer(torch.zeros(n_known, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(B, n_labels)` of features `(B, dim)`."""
        parts = []
        for block in x.split(QUERY_BLOCK):
            near = torch.cdist(block, self.known).topk(self.n_neighbors, largest=False).indices
            votes = F.one_hot(self.label[near], self.n_labels).sum(dim=1).to(x.dtype)
            parts.append(((votes + 1 / self.n_labels) / (self.n_neighbors + 1)).log())
        return torch.cat(parts)


class AnnotationHead(nn.Module):
    r"""Classifier of cells on a model's state, with calibrated probabilities and a measure of novelty.

    For `"linear"` the features of a cell are :math:`u = [\hat z, \hat x] / \sqrt 2`: the cell state and principal
    components of the reference, each scaled to length 1. For `"probe"` and `"knn"` they are :math:`u = \hat z`. The
    classifier maps them to logits :math:`\ell`:

    - `"linear"`: a linear layer without bias on the centred state :math:`\hat z` and on single genes, which are not
      centred; the state has one scale and the genes another. Where few of the cells have a label, the layer for
      novelty gives the labels too;
    - `"probe"`: a multilayer perceptron with two hidden layers on standardised features (paper, section on annotation);
    - `"knn"`: votes of the nearest reference cells.

    Probabilities are :math:`\mathrm{softmax}(\ell / T)`; the temperature T is fitted on held-out cells of the reference
    (Guo et al. 2017).

    Novelty is high for cells of types that the reference lacks. It combines two quantities that are low in such cells.
    One is the largest logit. For `"linear"` it is a logit of a second linear layer, on standardised features u and
    standardised single genes, whose logits fall more in such cells. With c the label of the largest of them and
    :math:`m_c, s_c` mean and standard deviation of that logit among held-out cells predicted as c; and with
    :math:`\cos_k` the cosine between :math:`\hat z` and the centroid of label k, :math:`\mu_k, \sigma_k` its mean and
    standard deviation among held-out cells of k:

    .. math::

        \mathrm{novelty} = -\tfrac12\Bigl(\frac{\ell_c - m_c}{s_c} + \max_k \frac{\cos_k - \mu_k}{\sigma_k}\Bigr) - n_0

    with :math:`n_0` such that held-out cells have a mean of 0.

    The cosines do not use the principal components, which describe only the types of the reference; the state was
    trained on many more.

    Parameters
    ----------
    sizes
        Sizes of all parts of the head.
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
            self.classifier = nn.Linear((s.state_dim if s.two_layers else s.dim) + s.n_genes, s.n_labels)
        self.novelty_classifier = nn.Linear(s.dim + s.n_genes, s.n_labels) if s.two_layers else None
        self.feature_mean, self.feature_scale = nn.Buffer(torch.zeros(s.dim)), nn.Buffer(torch.ones(s.dim))
        self.gene_tokens = nn.Buffer(torch.zeros(s.n_genes, dtype=torch.int64))
        self.gene_mean, self.gene_scale = nn.Buffer(torch.zeros(s.n_genes)), nn.Buffer(torch.ones(s.n_genes))
        self.gene_weight, self.temperature = nn.Buffer(torch.ones(1)), nn.Buffer(torch.ones(1))
        self.state_factor, self.gene_factor = nn.Buffer(torch.ones(1)), nn.Buffer(torch.ones(1))
        self.centroids = nn.Buffer(torch.zeros(s.n_labels, s.state_dim))
        self.cosine_mean, self.cosine_scale = nn.Buffer(torch.zeros(s.n_labels)), nn.Buffer(torch.ones(s.n_labels))
        self.logit_mean, self.logit_scale = nn.Buffer(torch.zeros(s.n_labels)), nn.Buffer(torch.ones(s.n_labels))
        self.novelty_mean = nn.Buffer(torch.zeros(1))

    def features(self, state: Tensor, tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Features u `(B, dim)` of cell states `(B, state_dim)` and packed genes."""
        state = F.normalize(state.float(), dim=1)
        if self.own is None:
            return state
        components = weighted_sum(self.own.weight, tokens, values, cu_seqlens)
        return torch.cat([state, F.normalize(components, dim=1)], dim=1) / 2**0.5

    def genes(self, tokens: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor | None:
        """Log-normalised expression of the single genes that are read, `(B, n_genes)`; None without any."""
        if not self.sizes.n_genes:
            return None
        column = torch.full((self.sizes.n_tokens,), -1, dtype=torch.int64, device=tokens.device)
        column[self.gene_tokens] = torch.arange(len(self.gene_tokens), device=column.device)
        columns, rows = column[tokens], cell_of_token(cu_seqlens, len(tokens))
        selected = columns >= 0
        dense = values.new_zeros(len(cu_seqlens) - 1, self.sizes.n_genes)
        dense[rows[selected], columns[selected]] = values[selected]
        return dense

    def inputs(self, u: Tensor, genes: Tensor | None, measured: Tensor | None = None) -> Tensor:
        """Input of the classifier.

        Parameters
        ----------
        u
            Features `(B, dim)`.
        genes
            From :meth:`genes`.
        measured
            bool `(n_genes,)`; genes that were not measured are set to their mean. None: all were.
        """
        if not self.sizes.two_layers:
            return self.novelty_inputs(u, genes, measured)
        # u holds the state with length 1 / √2 where there are principal components
        state = (u - self.feature_mean)[:, : self.sizes.state_dim] * self.state_factor
        if genes is None:
            return state
        if measured is not None:
            genes = torch.where(measured, genes, self.gene_mean)
        return torch.cat([state, genes * self.gene_factor], dim=1)

    def novelty_inputs(self, u: Tensor, genes: Tensor | None, measured: Tensor | None = None) -> Tensor:
        """Input of the layer for the logits of novelty; parameters as in :meth:`inputs`."""
        if self.sizes.method == "knn":
            return u
        standardised = (u - self.feature_mean) / self.feature_scale
        if genes is None:
            return standardised
        scaled = ((genes - self.gene_mean) / self.gene_scale).clamp(-CLIP, CLIP) * self.gene_weight
        if measured is not None:
            scaled = scaled * measured
        return torch.cat([standardised, scaled], dim=1)

    def cosines(self, u: Tensor, centroids: Tensor) -> Tensor:
        """Cosines `(B, n_labels)` of the states in features u with centroids `(n_labels, state_dim)`."""
        return F.normalize(u[:, : self.sizes.state_dim], dim=1) @ centroids.T

    def novelty(self, logits: Tensor, cosines: Tensor) -> Tensor:
        """Novelty of each cell `(B,)`, from its logits and its cosines with the centroids."""
        largest, label = logits.max(dim=1)
        by_logit = (largest - self.logit_mean[label]) / self.logit_scale[label]
        by_cosine = ((cosines - self.cosine_mean) / self.cosine_scale).max(dim=1).values
        return -(by_logit + by_cosine) / 2 - self.novelty_mean

    def forward(
        self, state: Tensor, tokens: Tensor, values: Tensor, cu_seqlens: Tensor, measured: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Probabilities `(B, n_labels)` and novelty `(B,)` of cells; parameters as in the other methods."""
        u, genes = self.features(state, tokens, values, cu_seqlens), self.genes(tokens, values, cu_seqlens)
        logits = novelty_logits = self.classifier(self.inputs(u, genes, measured))
        if self.novelty_classifier is not None:
            novelty_logits = self.novelty_classifier(self.novelty_inputs(u, genes, measured))
        novelty = self.novelty(novelty_logits, self.cosines(u, self.centroids))
        return (logits / self.temperature).softmax(dim=1), novelty


@dataclass(eq=False, repr=False)
class Annotator(Fitted):
    """Result of `tl.annotate`; `tl.annotate(query, model=annotator)` annotates later cells with it.

    Attributes
    ----------
    model
        Model whose cell states the head reads.
    head
        Calibrated classifier.
    labels
        The labels, as columns of the probabilities: text, or numbers or truth values where the reference has these.
    parents
        Label or group of labels to the group above it; empty without a hierarchy.
    tokens
        Genes used for annotation, as int32 tokens of `vocabulary` in ascending order. Other genes of later cells are
        ignored.
    novelty
        Novelties of held-out cells of the reference, float32, ascending: `reject` takes its quantile as the threshold.
        `notes["max_novelty_from"]` states whether their whole batches were held out.
    notes
        Results of the fit: `labels_key`, `seed`, `temperature`, `n_held_out`, `accuracy`, `ece`, and `reliability`.
    dtype
        Type of the labels: that of the reference's, such as `"int64"`, or `"object"`, text.
    ordered
        Whether the reference's labels are ordered categories; `labels` has their order.
    """

    kind: ClassVar[str] = "annotator"
    model: ScDiVa
    head: AnnotationHead
    labels: tuple[Any, ...]
    tokens: NDArray[np.int32]
    novelty: NDArray[np.float32]
    parents: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "object"
    ordered: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The labels as text."""
        return tuple(map(str, self.labels))

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of `tokens`: the genes of the model and, for `"linear"`, all other human genes after them."""
        vocabulary = self.model.vocabulary
        return vocabulary if self.head.sizes.n_tokens == self.model.config.n_tokens else with_human_genes(vocabulary)

    @property
    def method(self) -> str:
        """Method of annotation."""
        return self.head.sizes.method

    def _predict(
        self, cells: Cells, measured: np.ndarray, run_config: RunConfig, states: np.ndarray | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Label probabilities and novelty of cells.

        Parameters
        ----------
        cells
            Opened cells or cells in memory, restricted to the annotator's genes.
        measured
            Tokens that they have a column for.
        run_config
            How cells are run through the model.
        states
            Cell states of cells in memory; None computes them.

        Returns
        -------
        Probabilities, float32 `(n_obs, n_labels)`, and novelty, float32 `(n_obs,)`; NaN if a cell expresses no gene of
        the model.
        """
        windows: Iterable[tuple[np.ndarray, Ragged, Iterator[tuple[np.ndarray, np.ndarray]]]]
        if states is None:
            windows = run_cells(self.model, cells, run_config)
        else:
            windows = ((rows, ragged, iter([(rows, states)])) for rows, ragged in cells.windows(cells.n_obs))
        measured_genes = torch.from_numpy(np.isin(self.head.gene_tokens.numpy(), measured))
        probability = np.full((cells.n_obs, len(self.labels)), np.nan, dtype=np.float32)
        novelty = np.full(cells.n_obs, np.nan, dtype=np.float32)
        with torch.inference_mode():
            for rows, ragged, batches in windows:
                state = torch.empty(len(rows), self.head.sizes.state_dim)
                for at, part in batches:
                    state[at] = torch.from_numpy(part)
                for start in range(0, len(rows), BLOCK_CELLS):
                    block = np.arange(start, min(start + BLOCK_CELLS, len(rows)))
                    packed = from_ragged(*take_cells(ragged, block)).packed
                    shares, novel = self.head(state[block], *packed, measured_genes)
                    probability[rows[block]], novelty[rows[block]] = shares.numpy(), novel.numpy()
                unknown = rows[~has_gene_below(*ragged[:2], self.model.config.n_tokens)]
                probability[unknown], novelty[unknown] = np.nan, np.nan
        if n_empty := int(np.isnan(novelty).sum()):
            logger.info("%d cells express no gene of the model and get no label", n_empty)
        return probability, novelty

    def _about(self) -> dict[str, object]:
        notes = self.notes
        accuracy, held, labelled = notes.get("accuracy"), notes.get("n_held_out"), notes.get("n_labelled")
        tested = isinstance(held, int) and held > 0 and isinstance(accuracy, float)
        kind = "that were not trained on" if notes.get("finetuned") else "each predicted by a fit without it"
        return {
            "method": self.method,
            "labels": f"{len(self.labels)}: {', '.join(self.names)}",
            "label column": notes.get("labels_key"),
            "genes read": f"{len(self.tokens):,}",
            "fitted on": f"{labelled:,} labelled cells" if isinstance(labelled, int) else None,
            "rejection calibrated on": notes.get("max_novelty_from"),
            "held-out accuracy": f"{accuracy:.3f} on {held:,} labelled cells, {kind}" if tested else None,
        }

    def _contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        settings = {name: getattr(self, name) for name in ("dtype", "ordered", "parents", "notes")}
        settings = {"sizes": asdict(self.head.sizes), "labels": list(self.labels)} | settings
        settings["genes"] = self.vocabulary.fingerprint
        tensors = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        tensors |= {"tokens": torch.from_numpy(self.tokens), "novelty": torch.from_numpy(self.novelty)}
        return settings, tensors

    @classmethod
    def _restored(cls, model: ScDiVa, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        sizes, labels = HeadSizes(**settings["sizes"]), settings["labels"]
        dtype, ordered = str(settings["dtype"]), bool(settings["ordered"])
        if np.dtype(dtype).kind not in "biuf":
            dtype, labels = "object", list(map(str, labels))
        labels = tuple(np.asarray(labels, dtype=dtype).tolist())
        parents = {str(name): str(parent) for name, parent in settings["parents"].items()}
        notes = arrays(dict(settings["notes"]))
        if wrong := [name for name, most in _MOST.items() if not 0 <= operator.index(getattr(sizes, name)) <= most]:
            raise ValueError(f"{wrong[0]} out of range")
        if len(labels) != sizes.n_labels or len(labels) < 2:
            raise ValueError("labels out of range")
        width = width_of(model, "embedding" if sizes.method == "knn" else "state")
        linear = sizes.method == "linear"
        genes = with_human_genes(model.vocabulary) if linear else model.vocabulary
        if linear and settings.get("genes") != genes.fingerprint:
            raise ValueError("it was fitted by a version with other human genes, so fit it again")
        if (sizes.n_tokens, sizes.state_dim) != (genes.n_genes + N_SPECIAL, width):
            raise ValueError(f"its head does not fit the model in its folder {MODEL!r}")
        with torch.device("meta"):  # no memory is allocated before the sizes match the tensors
            head = AnnotationHead(sizes)
        shapes = {f"head.{name}": tuple(value.shape) for name, value in head.state_dict().items()}
        check_shapes(tensors, {**shapes, "tokens": (-1,), "novelty": (-1,)})
        head.to_empty(device="cpu").load_state_dict({name.removeprefix("head."): tensors[name] for name in shapes})
        head.requires_grad_(False).eval()
        tokens, novelty = tensors["tokens"].numpy(), tensors["novelty"].numpy()
        return cls(model, head, labels, tokens, novelty, parents, notes, dtype, ordered)
