"""A batch of cells, packed one after another without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class CellBatch:
    """Serialised cells, packed: the genes of cell i are positions ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``.

    The model adds ``[LAT]``; no special token is in here.

    Attributes
    ----------
    tokens
        int64 (T,), gene tokens in rank order.
    values
        float32 (T,), log-normalised expression.
    cu_seqlens
        int32 (B + 1,), starts at 0 and ends at T. A cell may be empty.
    study
        int64 (B,), number of the study that each cell comes from, or None.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    cu_seqlens: torch.Tensor
    study: torch.Tensor | None = None

    @property
    def n_cells(self) -> int:
        """Number of cells, B."""
        return len(self.cu_seqlens) - 1

    @property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`tokens`, `values` and `cu_seqlens`, as a model takes them."""
        return self.tokens, self.values, self.cu_seqlens

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CellBatch:
        """Return the batch on another device.

        Parameters
        ----------
        device
            Where to.
        non_blocking
            As in :meth:`torch.Tensor.to`.
        """
        study = None if self.study is None else self.study.to(device, non_blocking=non_blocking)
        return CellBatch(
            self.tokens.to(device, non_blocking=non_blocking),
            self.values.to(device, non_blocking=non_blocking),
            self.cu_seqlens.to(device, non_blocking=non_blocking),
            study,
        )

    def pin_memory(self) -> CellBatch:
        """Return the batch in page-locked memory (what a data loader calls before copying to a GPU)."""
        study = None if self.study is None else self.study.pin_memory()
        return CellBatch(self.tokens.pin_memory(), self.values.pin_memory(), self.cu_seqlens.pin_memory(), study)


def from_ragged(
    indptr: np.ndarray, tokens: np.ndarray, values: np.ndarray, study: np.ndarray | None = None, *, copy: bool = True
) -> CellBatch:
    """Make a batch of what :func:`scdiva.tokenizer.serialize.serialize` returns.

    Parameters
    ----------
    indptr
        int (B + 1,), not descending; may start above 0, as a slice of a longer one does.
    tokens, values
        (T,) where T is ``indptr[-1] - indptr[0]``.
    study
        int (B,), or None.
    copy
        False takes over arrays that have the type of a batch, which the caller then must not use.

    Returns
    -------
    A batch that owns its memory.

    Raises
    ------
    ValueError
        If the parts do not fit each other.
    """
    indptr = np.asarray(indptr, dtype=np.int64)
    cu_seqlens = indptr - indptr[0]
    n = int(cu_seqlens[-1])
    if len(tokens) != n or len(values) != n or (np.diff(cu_seqlens) < 0).any():
        raise ValueError(f"indptr spans {n} positions; there are {len(tokens)} tokens and {len(values)} values.")
    if n > np.iinfo(np.int32).max:
        raise ValueError(f"a batch of {n} tokens is too large: cu_seqlens is int32. Lower batch_size.")
    if study is not None and len(study) != len(cu_seqlens) - 1:
        raise ValueError(f"{len(study)} study numbers for {len(cu_seqlens) - 1} cells.")
    return CellBatch(
        torch.from_numpy(np.array(tokens, dtype=np.int64, copy=copy or None)),
        torch.from_numpy(np.array(values, dtype=np.float32, copy=copy or None)),
        torch.from_numpy(cu_seqlens.astype(np.int32)),
        None if study is None else torch.from_numpy(np.array(study, dtype=np.int64)),
    )
