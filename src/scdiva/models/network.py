"""A network beside its passes: what goes in and comes out, how it shows itself, and how it is written to a folder."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scdiva._constants import FINETUNED, MASK, N_SPECIAL
from scdiva._files import output_path
from scdiva._version import __version__
from scdiva.diffusion import cell_of_token
from scdiva.kernels._attention import longest_cell
from scdiva.models._folder import (
    CARD,
    CONFIG,
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    SUMMED,
    VOCABULARY,
    WEIGHTS,
    write_sums,
    written_beside,
)
from scdiva.models.config import ScDiVaConfig
from scdiva.models.layers import INIT_STD, Blocks, GeneValueEmbedding

if TYPE_CHECKING:
    from scdiva.tokenizer.vocabulary import Vocabulary

CARD_VALUE = 300
"""Characters of the longest value that a model card written from the metadata repeats."""


class ScDiVaOutput(NamedTuple):
    """Output of one forward pass.

    Attributes
    ----------
    hidden
        `(T, dim)`, the gene positions after the final norm, in the order of the input; `(0, dim)` without transformer.
    cell_state
        `(B, state_dim)`: `[LAT]` after the final norm; with the set encoder, its state `z`, or `z + R·[LAT]` under
        `anchor_residual`.
    anchor
        `(B, state_dim)`, the state that `[LAT]` started from; `None` with `anchor="learned"` unless one was given.
    cells
        int64 `(T,)`, the cell of each position.
    read
        `(B, state_rank + 1)`, what a state head makes of each cell; `None` without one.
    hidden_share
        `(B,)`, share of each cell's identities that is masked.
    """

    hidden: Tensor
    cell_state: Tensor
    anchor: Tensor | None
    cells: Tensor
    read: Tensor | None
    hidden_share: Tensor


def check_input(
    config: ScDiVaConfig,
    tokens: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    value_mask: Tensor | None,
    anchor_state: Tensor | None,
    *,
    max_length: int | None = None,
) -> int:
    """Check what a network is given.

    Parameters
    ----------
    config
        Of the network.
    tokens, values, cu_seqlens, value_mask, anchor_state
        As :meth:`scdiva.models.ScDiVa.forward` takes them. With `cu_seqlens` on the CPU and the rest elsewhere, they
        were checked before they went there.
    max_length
        Most genes of a cell; None takes the configuration's.

    Returns
    -------
    Number of genes of the longest cell.

    Raises
    ------
    ValueError
        If the tensors don't fit each other, a token isn't one of this vocabulary, or a cell is too long.
    """
    if cu_seqlens.device != tokens.device:
        return int(cu_seqlens.diff().max())
    c = config
    max_length = c.max_length if max_length is None else max_length
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be a packed int64 vector (T,); got {tokens.dtype} {tuple(tokens.shape)}.")
    if values.shape != tokens.shape or not values.is_floating_point():
        raise ValueError(
            f"values must be floating and as long as tokens, {tokens.numel()}; "
            f"got {values.dtype} {tuple(values.shape)}."
        )
    if value_mask is not None and (value_mask.shape != tokens.shape or value_mask.dtype != torch.bool):
        raise ValueError(
            f"value_mask must be bool and as long as tokens, {tokens.numel()}; "
            f"got {value_mask.dtype} {tuple(value_mask.shape)}."
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32; got {cu_seqlens.dtype}.")
    n_cells, lengths = cu_seqlens.numel() - 1, cu_seqlens.diff()
    too_long = lengths > max_length
    bad = (tokens != MASK) & ((tokens < N_SPECIAL) | (tokens >= c.n_tokens))
    longest, n_too_long, n_bad = longest_cell(cu_seqlens, tokens.numel(), too_long.sum(), bad.sum())
    if n_too_long:
        cell = int(too_long.nonzero()[0])
        raise ValueError(
            f"{n_too_long} cell(s) have more than the {max_length} genes that the model reads, the first "
            f"is cell {cell} of the batch with {int(lengths[cell])}; serialize with max_length={max_length}."
        )
    if n_bad:
        raise ValueError(
            f"{n_bad} token(s) are neither MASK nor one of this model's {c.n_genes} genes, the first is "
            f"{int(tokens[bad][0])}; serialize with the vocabulary that the model was trained with."
        )
    if anchor_state is not None and anchor_state.shape != (n_cells, c.state_dim):
        raise ValueError(f"anchor_state must be {(n_cells, c.state_dim)}; got {tuple(anchor_state.shape)}.")
    return longest


def mean_of_cells(flags: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> Tensor:
    """Share of each cell's positions that are flagged, `(B,)`; 0 of an empty cell."""
    lengths = cu_seqlens.diff().long()
    total = torch.zeros(len(lengths), dtype=torch.promote_types(dtype, torch.float32), device=flags.device)
    total = total.index_add_(0, cell_of_token(cu_seqlens, flags.numel()), flags.to(total.dtype))
    return (total / lengths.clamp_min(1)).to(dtype)


class Network(nn.Module):
    """What a network is beside its passes.

    Attributes
    ----------
    config
        The architecture.
    vocabulary
        The genes that the tokens stand for; set by :func:`scdiva.models.load_model`.
    metadata
        What its author noted of it.
    origin
        Where it was loaded from.
    """

    config: ScDiVaConfig
    embedding: GeneValueEmbedding
    blocks: Blocks
    vocabulary: Vocabulary
    metadata: dict[str, Any] | None = None
    origin: str | None = None

    def __init__(self, config: ScDiVaConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        if generator is None:
            self._build()
            return
        seed = int(torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._build()

    def _build(self) -> None:
        """Make the layers of the configuration, with weights drawn from torch's global stream."""
        raise NotImplementedError

    def known_vocabulary(self) -> Vocabulary:
        """Give the vocabulary; ValueError if there is none."""
        if getattr(self, "vocabulary", None) is None:
            raise ValueError(
                "this model has no vocabulary: set `model.vocabulary` to the genes that it was built for, or save it "
                "with save_model(model, vocabulary, folder) and load that"
            )
        return self.vocabulary

    @property
    def seen_tokens(self) -> np.ndarray:
        """Which tokens are genes of the model's corpus, bool `(n_tokens,)`."""
        seen = self.vocabulary.table["entropy"].notna().to_numpy()
        return np.concatenate([np.zeros(N_SPECIAL, bool), seen])

    @property
    def state_dim(self) -> int:
        """Width of the cell state."""
        return self.config.state_dim

    @property
    def n_parameters(self) -> int:
        """Number of trained numbers; tied weights count once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def adaptation(self) -> dict[str, Any] | None:
        """What :func:`scdiva.tl.adapt` reports of its fit; `None`: the model is not adapted."""
        found: dict[str, Any] | None = (self.metadata or {}).get("adaptation")
        return found

    @property
    def finetuned_for(self) -> str | None:
        """Task that all weights were fine-tuned for, `"integrate"`, `"annotate"` or `"perturbation"`; None if none."""
        found: str | None = (self.metadata or {}).get(FINETUNED, {}).get("task")
        return found

    def __repr__(self) -> str:
        c = self.config
        return (
            f"ScDiVa({self.n_parameters:,} parameters, {c.n_genes:,} genes, {c.n_layers} layers of width {c.dim}, "
            f"on {_device(self)})"
        )

    def compile_blocks(self, **options: Any) -> None:
        """Compile each transformer block in place (`torch.compile`), for any number of tokens.

        Norms, gates and casts fuse into few kernels around the matrix products. With the Triton backend a block is one
        graph; elsewhere attention breaks it. Compiling takes up to a minute, so it pays in long runs only. The names of
        the weights stay as they are.

        Parameters
        ----------
        **options
            For `torch.compile`, such as `mode` or `backend`. `fullgraph=True` refuses a graph break.
        """
        self.blocks.compile_each(**options)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model, its vocabulary and its metadata to a folder, which is there whole or not at all.

        What :func:`scdiva.models.save_model` does with `model.vocabulary`; that one also takes a card of your own,
        other metadata, and a smaller type of numbers.

        Parameters
        ----------
        path
            The folder to make.
        overwrite
            Whether a model that stands there is replaced. Anything else never is.

        Returns
        -------
        The folder.

        Raises
        ------
        FileExistsError
            If something stands there already, and it is no model, contains files that scdiva did not write, or
            `overwrite` is False.
        ValueError
            If `path` is a URL, the model has no vocabulary, or weights are not finite.

        Examples
        --------
        >>> import scdiva as sd
        >>> model = sd.models.load_model()
        >>> folder = model.save("my-model")
        >>> sd.models.load_model("my-model").config == model.config
        True
        """
        return save_model(self, self.known_vocabulary(), path, metadata=self.metadata, overwrite=overwrite)


def save_model(
    model: Network,
    vocabulary: Vocabulary,
    path: str | os.PathLike[str],
    card: str | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
) -> Path:
    """Write a model, its vocabulary and its card to a folder.

    The folder is written beside `path` and renamed, so that it is there whole or not at all.

    Parameters
    ----------
    model
        The model; it is left as it is.
    vocabulary
        The genes it was built for, with their entropy: `model.config.n_genes` of them.
    path
        The folder to make. Its parents are made as needed.
    card
        Markdown for the model's README.md; None writes a short one from the configuration and `metadata`.
    metadata
        What else to keep in config.json, for instance the corpus and the steps trained. Plain JSON values.
    dtype
        How weights are stored: ``"float32"``, ``"float16"`` or ``"bfloat16"``. They are loaded as float32 in any case.
    overwrite
        Whether a model folder that stands at `path` is replaced. Anything else that stands there never is.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FileExistsError
        If something stands at `path` already, and it is no model folder, contains files that scdiva did not write, or
        `overwrite` is False.
    ValueError
        If `path` is a URL, the vocabulary is not the model's, weights are not finite (or not in `dtype`), or `metadata`
        is not JSON.

    Examples
    --------
    >>> import scdiva as sd
    >>> model = sd.models.load_model()
    >>> folder = sd.models.save_model(model, model.vocabulary, "my-model")
    >>> sd.models.load_model("my-model").config == model.config
    True
    """
    from safetensors.torch import save

    folder = output_path(path, "path")
    if vocabulary.n_genes != model.config.n_genes:
        raise ValueError(
            f"the model was built for {model.config.n_genes:,} genes and the vocabulary holds {vocabulary.n_genes:,}: "
            "pass the vocabulary that it was trained with"
        )
    weights = {name: _stored(name, tensor, dtype) for name, tensor in model.state_dict().items()}
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "scdiva_version": __version__,
        "model": model.config.stored(),
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype,
        "vocabulary": {"n_genes": vocabulary.n_genes, "fingerprint": vocabulary.fingerprint},
        "metadata": metadata or {},
    }
    try:
        text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata must hold plain JSON values (str, int, finite float, bool, list, dict): {error}"
        ) from error

    with written_beside(folder, overwrite, "model") as part:
        (part / CONFIG).write_text(text, encoding="utf-8")
        (part / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
        vocabulary.write(part / VOCABULARY)
        (part / CARD).write_text(_default_card(config) if card is None else card, encoding="utf-8")
        write_sums(part, SUMMED)
    return folder


def _stored(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Copy a tensor to the CPU in the dtype it is stored in; refuse what that dtype can't hold."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: weights are stored as one of {', '.join(DTYPES)}")
    value = tensor.detach().cpu().contiguous()
    if not value.is_floating_point():
        return value.clone()
    if bad := int((~torch.isfinite(value)).sum()):
        raise ValueError(f"{bad:,} of {value.numel():,} values of {name!r} are NaN or infinite: the model is not saved")
    value = value.to(getattr(torch, dtype), copy=True)
    if bad := int((~torch.isfinite(value)).sum()):
        raise ValueError(f"{bad:,} values of {name!r} are too large for {dtype}: store them as bfloat16 or float32")
    return value


def _default_card(config: dict[str, Any]) -> str:
    """Write a short model card from the configuration."""
    said = {**config["model"], **config["metadata"]}
    lines = [f"- {name}: {value if len(str(value)) <= CARD_VALUE else f'see {CONFIG}'}" for name, value in said.items()]
    return (
        "# An scdiva model\n\n"
        f"{config['n_parameters']:,} parameters, {config['vocabulary']['n_genes']:,} genes; written by scdiva "
        f"{config['scdiva_version']}.\n\n"
        "Load it with `scdiva.models.load_model(folder)`; embed cells with `scdiva.tl.embed(adata, model=folder)`.\n\n"
        "## Configuration\n\n" + "\n".join(lines) + "\n"
    )


@torch.no_grad()
def init_gene_embedding(
    model: Network, matrix: Tensor | np.ndarray, *, generator: torch.Generator | None = None
) -> None:
    """Start the gene embeddings from gene vectors, such as those of a truncated SVD of the corpus.

    The first `k` columns of a gene's embedding become its vector, all scaled by one number so that an average row is
    as long as a freshly drawn one; the others are drawn at a tenth of the usual size, so that the vectors rule at
    first. A gene whose vector is all 0 (the corpus never saw it) and the special tokens keep what they have.

    Parameters
    ----------
    model
        Changed in place.
    matrix
        `(n_genes, k)`, row `j` for token `j + N_SPECIAL`, leading directions first; `k <= dim`.
    generator
        Source of the small random numbers; `None`: torch's global stream.

    Raises
    ------
    ValueError
        If the matrix has another number of genes, too many columns, numbers that aren't finite, or only zeros. The
        model is then left as it was.

    Examples
    --------
    >>> import torch
    >>> from scdiva.models import ScDiVa, ScDiVaConfig, init_gene_embedding
    >>> model = ScDiVa(ScDiVaConfig(n_genes=30, dim=16, n_layers=1, n_heads=2, ffn_dim=24))
    >>> vectors = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    >>> init_gene_embedding(model, vectors)
    """
    vectors = torch.as_tensor(matrix)
    c = model.config
    if vectors.dim() != 2 or vectors.shape[0] != c.n_genes or not 1 <= vectors.shape[1] <= c.dim:
        raise ValueError(
            f"The gene matrix must be ({c.n_genes}, k) with 1 <= k <= dim = {c.dim}; got {tuple(vectors.shape)}."
        )
    if not torch.isfinite(vectors).all():
        row = int((~torch.isfinite(vectors)).any(dim=1).nonzero()[0])
        raise ValueError(f"The gene matrix holds NaN or infinite numbers, first in row {row}.")
    if not vectors.any():
        raise ValueError("The gene matrix holds only zeros.")
    rows = model.embedding.gene.weight[N_SPECIAL:]
    vectors = vectors.to(torch.float64)
    known = vectors.any(dim=1)
    rms = vectors[known].square().sum(dim=1).mean().sqrt()
    scale = INIT_STD * rows.shape[1] ** 0.5 / rms
    fresh = torch.randn(rows.shape, generator=generator) * (INIT_STD / 10)
    fresh[:, : vectors.shape[1]] = (vectors * scale).to(fresh.dtype)
    rows[known.to(rows.device)] = fresh[known].to(device=rows.device, dtype=rows.dtype)


@torch.no_grad()
def copy_weights(model: Network, source: Network) -> None:
    """Copy all weights of a network into one with the same architecture and as many genes, or more.

    Tables of genes keep their further rows: the genes of `source` must be the first of `model`.

    Parameters
    ----------
    model
        Changed in place.
    source
        Left as it is.

    Raises
    ------
    ValueError
        If `model` has fewer genes, or another architecture. It is then left as it was.
    """
    n_genes = source.config.n_genes
    if model.config.n_genes < n_genes or replace(model.config, n_genes=n_genes) != source.config:
        raise ValueError(f"The weights of {source!r} do not fit {model!r}: the architecture must be the same.")
    weights = source.state_dict()
    for name, tensor in model.state_dict().items():  # shares memory with the model
        tensor[: len(weights[name])] = weights[name].to(tensor)


def fingerprint(model: Network) -> str:
    """SHA-256 of a model: its configuration, genes with their entropies, and every weight."""
    digest = hashlib.sha256(json.dumps(model.config.stored(), sort_keys=True).encode())
    digest.update(model.vocabulary.fingerprint.encode())
    digest.update(np.ascontiguousarray(model.vocabulary.entropy).tobytes())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _device(model: Network) -> str:
    return str(next(model.parameters()).device)
