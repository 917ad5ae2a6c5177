"""Architecture of a network, without torch, so that the command line starts at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from scdiva._checks import check_choices, check_fields, or_nearest, printable, refuse_unknown
from scdiva._constants import MAX_LENGTH, N_SPECIAL, PRESETS

_LATER = ("adapted", "query_head", "reader")
"""Fields that older files lack; written if they differ from the default."""
_GONE: dict[str, Any] = {"time_conditioning": False, "integrated_own_dim": 20}
"""Removed fields, which files still have, with the value of all models."""
MOST_LAYERS = 1_000
"""Maximum number of blocks, which take time to build even without memory."""


@dataclass(frozen=True)
class ScDiVaConfig:
    """Architecture of an :class:`~scdiva.models.ScDiVa`.

    `ScDiVaConfig()` has our defaults, :meth:`paper` the values of the paper; fields in which they differ state the
    reason. :meth:`preset` has smaller models too.

    Parameters
    ----------
    n_genes
        Number of genes of the vocabulary, without special tokens.
    dim, n_layers, n_heads, ffn_dim
        Width of the stream, number of blocks, heads in each, hidden width of SwiGLU.
    max_length
        Maximum number of genes per cell, without `[LAT]`.
    rope_base
        Base of the rotary frequencies.
    norm_eps
        Epsilon of every RMSNorm.
    tie_gene_head
        Whether the gene head shares the gene rows of the embedding table. The number of parameters in the paper
        requires separate weights; in small models most weights are there.
    anchor
        Initial state of `[LAT]`, added to its learned vector: `"learned"`, none, as in the text of the paper;
        `"encoder"`, the state of a set encoder, in place of the latent encoder that the paper's figure shows and its
        text does not define. The default is `"encoder"` because the denoising loss does not train `[LAT]` directly, and
        on its own it remains a weak summary of the cell.
    anchor_linear_dim, anchor_learned_dim, anchor_hidden, anchor_balance
        Widths of the two parts of the state of the set encoder (:class:`~scdiva.models.SetEncoder`) and of its MLP, and
        the weight of the linear part. Ignored for other anchors.
    anchor_length
        Maximum number of genes per cell in the set encoder, the top-ranked ones. Its cost per gene is small, so that it
        uses practically all genes, and the transformer `max_length`. Ignored for other anchors.
    anchor_residual
        With the set encoder, whether the cell state is `z + R·[LAT]`, R starting at zero, or `z` alone, which does not
        need the transformer. Off by default: in held-out studies, a residual trained for two CPU hours lowered the
        accuracy of cell types.
    state_head, state_rank
        Whether predictions also use the cell state (:class:`~scdiva.models.StateHead`), and the width of its hidden
        layer. Off by default, as in the paper. With it the network need not learn the frequency of genes in cell types,
        which takes most of the training of a small model.
    query_head
        Whether a :class:`~scdiva.models.QueryHead` predicts genes of a cell from other cells of its study. Requires a
        state head.
    reader
        Whether a :class:`~scdiva.models.reader.Reader` predicts counts of masked genes for `tl.impute`. Requires a
        state head and `anchor="encoder"`.
    integrated, integrated_hidden
        Whether an :class:`~scdiva.models.IntegrationHead` maps the components of an adapted model to the embedding, as
        after `tl.integrate`; width of its hidden layers.
    adapted
        Width of the embedding of a model from `tl.adapt` or `tl.integrate`, which a
        :class:`~scdiva.models.DatasetComponents` computes from the cell state and principal components of the dataset;
        0: the model is not adapted.
    position
        `"rope"`: attention depends on the difference in rank between two genes; `"none"`: a cell is a set.
    entropy_floor
        Minimum entropy, in nats, by which values are divided in the ranking of genes. 0 in the paper; the default is
        0.3, because the score of a gene detected in one of ten thousand cells would otherwise exceed that of any marker
        hundreds of times.
    attention_backend
        Default backend of :func:`scdiva.kernels.rope_attention`. Results differ by rounding only.

    Raises
    ------
    TypeError
        If a field has the wrong type.
    ValueError
        If a field is out of range, or `n_heads` doesn't divide `dim` into heads that RoPE can rotate.
    """

    n_genes: int = 41_818
    dim: int = 512
    n_layers: int = 12
    n_heads: int = 8
    ffn_dim: int = 2048
    max_length: int = MAX_LENGTH
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tie_gene_head: bool = False
    anchor: Literal["learned", "encoder"] = "encoder"
    anchor_linear_dim: int = 128
    anchor_learned_dim: int = 64
    anchor_hidden: int = 512
    anchor_balance: float = 2.0
    anchor_length: int = 8192
    anchor_residual: bool = False
    state_head: bool = False
    state_rank: int = 64
    query_head: bool = False
    reader: bool = False
    integrated: bool = False
    integrated_hidden: int = 256
    adapted: int = 0
    position: Literal["rope", "none"] = "rope"
    entropy_floor: float = 0.3
    attention_backend: Literal["auto", "sdpa", "reference", "triton"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self, {"adapted", "entropy_floor"}, {"n_layers": MOST_LAYERS})
        if self.dim % self.n_heads:
            raise ValueError(f"n_heads must divide dim; {self.n_heads} doesn't divide {self.dim}.")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"RoPE rotates pairs, so dim / n_heads must be even; {self.dim} / {self.n_heads} is not.")
        if self.integrated and not self.adapted:
            raise ValueError("integrated=True requires adapted, the components that the head reads; got adapted=0.")
        for name in ("query_head", "reader"):
            if getattr(self, name) and (not self.state_head or self.anchor == "learned"):
                raise ValueError(
                    f'{name} needs state_head=True and anchor="encoder"; got '
                    f"state_head={self.state_head}, anchor={self.anchor!r}."
                )

    @classmethod
    def paper(cls) -> ScDiVaConfig:
        """Model configuration of the paper (its table "Model configuration").

        93,432,321 parameters: 93.43 M of the layers in the paper, 1,536 of the embeddings of special tokens and 512 of
        the vector of masked values. The "about 94.5 M" in the text of the paper do not follow from its tables.
        """
        return cls(anchor="learned", entropy_floor=0.0)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ScDiVaConfig:
        """Configuration by name; :meth:`scdiva.train.PretrainingConfig.preset` has the training of that name.

        Parameters
        ----------
        name
            - `"paper"`: :meth:`paper`, 93 M parameters;
            - `"base"`: 8 blocks of width 256, set encoder, state head and tied gene head, 30 M parameters for the
              41,818 genes of the human vocabulary. For training on one GPU;
            - `"base-lat"`: the same without set encoder, 25 M parameters: the cell state is `[LAT]` as the transformer
              returns it, as in the paper, and the state head reads it;
            - `"mini"`: the bundled scdiva-mini without its query head, which is trained apart: 4 blocks of width 128,
              8.9 M parameters for its 19,623 genes. For training on a CPU.
        **changes
            Fields that differ, such as `n_genes`.

        Raises
        ------
        ValueError
            If there is no such preset or field; the message names the nearest.
        """
        check_choices(preset=(name, PRESETS))
        refuse_unknown(changes, [field.name for field in fields(cls)], cls.__name__)
        if name == "paper":
            return replace(cls.paper(), **changes)
        shared = {"state_head": True, "tie_gene_head": True}
        base: dict[str, Any] = {"dim": 256, "n_layers": 8, "n_heads": 8, "ffn_dim": 1024}
        size = {
            "base": base,
            "base-lat": {**base, "anchor": "learned"},
            "mini": {"dim": 128, "n_layers": 4, "n_heads": 4, "ffn_dim": 384, "n_genes": 19_623},
        }[name]
        return cls(**{**shared, **size, **changes})

    @property
    def n_tokens(self) -> int:
        """Rows of the embedding table: special tokens and genes."""
        return self.n_genes + N_SPECIAL

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def state_dim(self) -> int:
        """Width of the cell state: that of the set encoder where there is one, else `dim`."""
        return self.anchor_linear_dim + self.anchor_learned_dim if self.anchor == "encoder" else self.dim

    @property
    def by_transformer(self) -> bool:
        """Whether genes and values are predicted by the transformer alone, as in the paper.

        This is true without a state head, and if the input of the state head comes from the transformer. In the
        training of such a model, masked genes are always at their ranks.
        """
        return not self.state_head or self.anchor == "learned"

    @property
    def input_length(self) -> int:
        """Maximum number of genes per cell: that of the set encoder if there is one, else `max_length`."""
        return max(self.anchor_length, self.max_length) if self.anchor == "encoder" else self.max_length

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain Python values; later fields only if they differ from the default."""
        default = {field.name: field.default for field in fields(self) if field.name in _LATER}
        return {name: value for name, value in asdict(self).items() if name not in default or value != default[name]}

    def stored(self) -> dict[str, Any]:
        """Fields in a model folder: those of :meth:`to_dict` and the removed ones."""
        return {**self.to_dict(), **_GONE}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ScDiVaConfig:
        """Rebuild a configuration from the result of :meth:`to_dict` or :meth:`stored`.

        Parameters
        ----------
        values
            One entry per field; `adapted`, `query_head` and `reader` are optional.

        Raises
        ------
        ValueError
            If a field is missing, unknown or removed: weights with a guessed field would give a plausible, wrong model.
        """
        for name, only in _GONE.items():
            if values.get(name, only) is not only:
                raise ValueError(f"{name} was removed: a model has {name}={only}; got {values[name]!r:.80}.")
        values = {name: value for name, value in values.items() if name not in _GONE}
        field_names = {field.name for field in fields(cls)}
        unknown, missing = sorted(set(values) - field_names), sorted(field_names - set(values) - set(_LATER))
        if unknown or missing:
            names = [printable(f"{name!s:.80}") + or_nearest(name, field_names) for name in unknown[:10]]
            names += ["..."] * (len(unknown) > 10)
            raise ValueError(
                f"Not a complete model configuration (unknown: {', '.join(names) or 'none'}; "
                f"missing: {', '.join(missing) or 'none'})."
            )
        return cls(**values)


ScDiVaConfig()  # evaluates the annotations once, here, since loading a model must not compile code
