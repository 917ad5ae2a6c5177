"""Entropy of each gene over a corpus, from integer histograms that add up in any order."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from scdiva._constants import N_SPECIAL
from scdiva.tokenizer.serialize import plain

BIN_WIDTH = 0.5
BIN_EDGES = np.arange(0.0, 10.0 + BIN_WIDTH, BIN_WIDTH)
"""Edges of the bins of v = log(1 + 1e4 c / C): zero has a bin of its own, then (0, 0.5], ... (9.5, 10]. The largest
possible v is log(10001) = 9.21. The edges are part of the definition of the entropy and never depend on data."""
N_BINS = len(BIN_EDGES)
"""The bin of zero and one bin between each two edges."""

_FORMAT = 1
_PARTS = ("format", "edges", "counts", "n_cells", "fingerprint")
"""Arrays of a file."""


class EntropyHistogram:
    """Counts of cells per gene and expression bin, and the entropy that follows from them.

    Counts are integers, so that any division of a corpus into files, blocks and workers gives the same histogram.

    Parameters
    ----------
    n_tokens
        Size of the token space: genes and specials.
    fingerprint
        Fingerprint of the vocabulary; histograms of different vocabularies are not added.

    Attributes
    ----------
    counts
        int64 (n_tokens, n_bins). Column 0 counts zeros, only of cells in whose study the gene was measured.
    n_cells
        Number of cells counted.
    """

    def __init__(self, n_tokens: int, fingerprint: str = "") -> None:
        if n_tokens <= N_SPECIAL:
            raise ValueError(f"n_tokens must exceed the {N_SPECIAL} special tokens, got {n_tokens}.")
        self.counts = np.zeros((n_tokens, N_BINS), dtype=np.int64)
        self.n_cells = 0
        self.fingerprint = fingerprint

    @property
    def n_tokens(self) -> int:
        """Size of the token space."""
        return self.counts.shape[0]

    def update(self, cells: sp.csr_matrix, measured_tokens: np.ndarray) -> None:
        """Count a block of cells.

        Parameters
        ----------
        cells
            Expression in token space, (n, n_tokens), from :func:`scdiva.tokenizer.serialize.to_token_space`.
        measured_tokens
            Tokens of the genes that these cells' study has a column for (negative ones are ignored). A gene without a
            column was not seen to be zero, so nothing is counted for it.

        Raises
        ------
        ValueError
            If the cells have another token space, hold values outside of the bins, or genes that were not measured.
            Then none of them is counted.
        """
        from scdiva.tokenizer import _kernels

        if cells.shape[1] != self.n_tokens:
            raise ValueError(f"cells have {cells.shape[1]} tokens, the histogram {self.n_tokens}.")
        if cells.dtype != np.float32:
            raise ValueError(f"cells must be float32 (see to_token_space), got {cells.dtype}.")
        measured = np.asarray(measured_tokens)
        is_measured = np.zeros(self.n_tokens, dtype=bool)
        is_measured[measured[measured >= 0]] = True
        columns, data = plain(cells.indices, np.int32), plain(cells.data, np.float32)
        n_cells, bins_per_unit = cells.shape[0], 1 / BIN_WIDTH
        if not _kernels.count(columns, data, is_measured, n_cells, bins_per_unit, BIN_EDGES[-1], self.counts):
            raise ValueError(
                f"the cells hold values outside of 0 to {BIN_EDGES[-1]:g}, or tokens that are not among the measured "
                "ones: pass what to_token_space returns of a matrix, and the tokens of its columns."
            )
        self.n_cells += n_cells

    def __add__(self, other: EntropyHistogram) -> EntropyHistogram:
        """Add histograms over one vocabulary; ValueError for those of different ones."""
        names = {self.fingerprint, other.fingerprint} - {""}
        if other.n_tokens != self.n_tokens or len(names) > 1:
            raise ValueError("histograms of different vocabularies cannot be added.")
        total = EntropyHistogram(self.n_tokens, self.fingerprint or other.fingerprint)
        total.counts, total.n_cells = self.counts + other.counts, self.n_cells + other.n_cells
        return total

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EntropyHistogram):
            return NotImplemented
        return self.n_cells == other.n_cells and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]

    def entropy(self) -> np.ndarray:
        r"""Shannon entropy :math:`H_g = -\sum_b p_b \log p_b` of each gene (paper, appendix, eq. gene_entropy).

        Returns
        -------
        float32 (n_tokens,), in nats; NaN for specials and for genes that no cell was measured for.
        """
        n = self.counts.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            p = self.counts / n[:, None]
            terms = np.where(self.counts > 0, -p * np.log(p), 0.0)
        entropy = np.where(n > 0, terms.sum(axis=1), np.nan)
        return entropy.astype(np.float32)

    def save(self, path: str | Path) -> None:
        """Write the histogram to an ``.npz`` file, whole or not at all.

        Parameters
        ----------
        path
            File to write; replaced if it exists.
        """
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        parts = (np.int64(_FORMAT), BIN_EDGES, self.counts, np.int64(self.n_cells), np.array(self.fingerprint))
        try:
            with part.open("wb") as file:
                np.savez_compressed(file, **dict(zip(_PARTS, parts, strict=True)))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> EntropyHistogram:
        """Read what :meth:`save` wrote. Nothing is unpickled.

        Parameters
        ----------
        path
            File to read.

        Raises
        ------
        ValueError
            If the file is no such histogram, or was counted with other bins.
        """
        try:
            with np.load(path, allow_pickle=False) as held:
                version, edges, counts, n_cells, fingerprint = (held[name] for name in _PARTS)
        except FileNotFoundError:
            raise
        except Exception as error:  # zip, key and numpy errors of many kinds; all mean a damaged or foreign file
            raise ValueError(f"{str(path)!r} is no entropy histogram: {error}") from error
        if version.tolist() != _FORMAT or not np.array_equal(edges, BIN_EDGES):
            raise ValueError(f"{str(path)!r} was counted with other bins or by another version; count the corpus anew.")
        fits = counts.dtype == np.int64 and counts.ndim == 2 and counts.shape[1] == N_BINS and len(counts) > N_SPECIAL
        if not fits or (counts < 0).any() or n_cells.shape != ():
            raise ValueError(f"{str(path)!r} is damaged: counts of {counts.dtype} {counts.shape}.")
        histogram = cls(counts.shape[0], str(fingerprint))
        histogram.counts, histogram.n_cells = counts, int(n_cells)
        return histogram
