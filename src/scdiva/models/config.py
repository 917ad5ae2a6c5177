"""One dataclass says what a network is. It imports no torch, so that a command line can show it at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from scdiva._checks import check_choices, check_fields, or_nearest, refuse_unknown
from scdiva._constants import MAX_LENGTH, N_SPECIAL, PRESETS
from scdiva._files import printable

_LATER = ("adapted", "query_head")
"""Fields that older files do without; written where they are not at their default."""
_GONE: dict[str, Any] = {"time_conditioning": False}
"""Fields that there were: files hold them still, with the one value that every model has now."""
MOST_LAYERS = 1_000
"""Blocks of the deepest model. Each takes time to build, even where it takes no memory."""


@dataclass(frozen=True)
class ScDiVaConfig:
    """Architecture of an :class:`~scdiva.models.ScDiVa`.

    `ScDiVaConfig()` holds our defaults, :meth:`paper` the paper's tables to the letter. Each field in which the two
    differ says why. :meth:`preset` has smaller ones too.

    Parameters
    ----------
    n_genes
        Genes of the vocabulary; special tokens come on top.
    dim, n_layers, n_heads, ffn_dim
        Width of the stream, number of blocks, heads in each, hidden width of SwiGLU.
    max_length
        Most genes a cell may hold; `[LAT]` comes on top.
    rope_base
        Base of the rotary frequencies.
    norm_eps
        Of every RMSNorm.
    tie_gene_head
        Use the gene rows of the embedding table as gene head. The paper's count of parameters is only reached untied;
        small models spend most of their weights there and may tie.
    anchor
        What `[LAT]` starts from, beside its own learned vector: `"learned"`, nothing, as in the paper's text;
        `"encoder"`, a light set encoder, for the latent encoder that the paper's figure shows and its text leaves
        undefined. Default `"encoder"`: in a single denoising pass nothing trains `[LAT]` directly, and on its own it
        stays a weak summary of the cell.
    anchor_linear_dim, anchor_learned_dim, anchor_hidden, anchor_balance
        Of the set encoder (:class:`~scdiva.models.SetEncoder`): widths of the two parts of its state and of its MLP,
        and the weight of the linear part. Without effect for other anchors.
    anchor_length
        Most genes of a cell that the set encoder sees, the first of its ranking. It costs next to nothing per gene, so
        it sees practically all, where the transformer sees `max_length`. Without effect for other anchors.
    anchor_residual
        With the set encoder: whether the cell state is `z + R·[LAT]`, R starting at zero, or `z` alone, which needs no
        transformer. Off: in studies that nothing was trained on, a residual trained for two CPU hours lowered the
        accuracy of cell types.
    state_head, state_rank
        Whether the heads read the cell state too (:class:`~scdiva.models.StateHead`), and through how many numbers.
        Off, as in the paper, whose heads see the hidden state alone; with it the network need not learn first how
        frequent each gene is in which cells, which takes a small one most of its training.
    query_head
        Whether a :class:`~scdiva.models.QueryHead` predicts genes of a cell from other cells of its study, beside the
        state head, which it needs.
    integrated, integrated_own_dim, integrated_hidden
        Whether an :class:`~scdiva.models.IntegrationHead` turns the cell state into the embedding, as `tl.integrate`
        leaves it; width of its own projection, and of its hidden layers.
    adapted
        Width of the embedding of a model from `tl.adapt`, which a :class:`~scdiva.models.DatasetComponents` makes of
        the cell state and of principal components of the dataset; 0: the model is not adapted.
    position
        `"rope"`: attention sees the distance in rank between two genes; `"none"`: a cell is a set.
    entropy_floor
        Least entropy, in nats, by which a value is divided when genes are ranked. 0 in the paper; ours is 0.3, because
        a gene detected in one cell of ten thousand would otherwise outrank any marker by hundreds of times.
    attention_backend
        Backend of :func:`scdiva.kernels.rope_attention` unless a call names another. It changes no number beyond
        rounding.

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
    integrated: bool = False
    integrated_own_dim: int = 20
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
        if self.query_head and (not self.state_head or self.anchor == "learned"):
            raise ValueError(
                'query_head needs state_head=True and anchor="encoder"; got '
                f"state_head={self.state_head}, anchor={self.anchor!r}."
            )

    @classmethod
    def paper(cls) -> ScDiVaConfig:
        """Return the paper's model configuration (its table "Model configuration").

        93,432,321 parameters: 93.43 M for what the paper lists, 1,536 for the special tokens' embeddings and 512 for
        the hidden value's. The "about 94.5 M" of the paper's text can't be reached from its tables.
        """
        return cls(anchor="learned", entropy_floor=0.0)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ScDiVaConfig:
        """Return a configuration by name; :meth:`scdiva.train.PretrainingConfig.preset` has the training of that name.

        Parameters
        ----------
        name
            - `"paper"`: :meth:`paper`, 93 M parameters;
            - `"base"`: 8 blocks of width 256, set encoder, state head and tied gene head, 30 M parameters for the
              41,818 genes of the human vocabulary. To be trained on one GPU;
            - `"base-lat"`: the same without set encoder, 25 M parameters: the cell state is `[LAT]` as the transformer
              returns it, as in the paper, and the state head reads it;
            - `"mini"`: the bundled scdiva-mini without its query head, which is trained apart: 4 blocks of width 128,
              8.9 M parameters for its 19,623 genes. To be trained on a CPU.
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
        """Whether genes and values are predicted through the transformer alone, as in the paper.

        So it is without a state head, and where the cell state that a state head reads comes from the transformer. Such
        a model saw masked genes at their ranks only.
        """
        return not self.state_head or self.anchor == "learned"

    @property
    def input_length(self) -> int:
        """Most genes of a cell that the model reads: those of the set encoder where there is one, else `max_length`."""
        return max(self.anchor_length, self.max_length) if self.anchor == "encoder" else self.max_length

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain Python, ready for JSON; those that came later only where they say something."""
        default = {field.name: field.default for field in fields(self) if field.name in _LATER}
        return {name: value for name, value in asdict(self).items() if name not in default or value != default[name]}

    def stored(self) -> dict[str, Any]:
        """Return what a model folder holds of it: :meth:`to_dict`, and the fields that there were."""
        return {**self.to_dict(), **_GONE}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ScDiVaConfig:
        """Rebuild a configuration from the result of :meth:`to_dict` or :meth:`stored`.

        Parameters
        ----------
        values
            One entry for every field; `adapted` and `query_head` may be left out.

        Raises
        ------
        ValueError
            If a field is missing or unknown, or of an option that was removed: a weight file read with a guessed field
            would give a plausible, wrong model.
        """
        for name, only in _GONE.items():
            if values.get(name, only) is not only:
                raise ValueError(f"{name} was removed: a model has {name}={only}; got {values[name]!r:.80}.")
        values = {name: value for name, value in values.items() if name not in _GONE}
        known = {field.name for field in fields(cls)}
        unknown, missing = sorted(set(values) - known), sorted(known - set(values) - set(_LATER))
        if unknown or missing:
            named = [printable(f"{name!s:.80}") + or_nearest(name, known) for name in unknown[:10]]
            named += ["..."] * (len(unknown) > 10)
            said = f"unknown: {', '.join(named) or 'none'}; missing: {', '.join(missing) or 'none'}"
            raise ValueError(f"Not a complete model configuration ({said}).")
        return cls(**values)


ScDiVaConfig()  # its annotations are read once, here: that compiles them, which loading a model must never do
