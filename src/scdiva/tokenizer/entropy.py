"""Entropy of each gene over a corpus, from integer histograms that can be added in any order."""

from __future__ import annotations

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


class EntropyHistogram:
    """Number of cells per gene and expression bin, and the entropy of each gene.

    Counts are integers, so that any division of a corpus into files, blocks and workers gives the same histogram. Save
    it by ``np.savez(path, **vars(histogram))`` and load it by ``EntropyHistogram(**np.load(path))``.

    Parameters
    ----------
    counts
        int64 (n_tokens, n_bins). Column 0 counts zeros in cells of the studies that measured the gene.
    n_cells
        Number of cells counted.
    fingerprint
        Fingerprint of the vocabulary; histograms of different vocabularies are not added.

    Raises
    ------
    ValueError
        If the counts have another dtype or shape, or are negative.
    """

    def __init__(self, counts: np.ndarray, n_cells: int = 0, fingerprint: str = "") -> None:
        bins = counts.shape[1:] == (N_BINS,) and len(counts) > N_SPECIAL
        if counts.dtype != np.int64 or not bins or (counts < 0).any():
            raise ValueError(
                f"counts must be int64 (n_tokens, {N_BINS}) of more than {N_SPECIAL} tokens, none negative; got "
                f"{counts.dtype} {counts.shape}."
            )
        self.counts, self.n_cells, self.fingerprint = counts, int(n_cells), str(fingerprint)

    @classmethod
    def empty(cls, n_tokens: int, fingerprint: str = "") -> EntropyHistogram:
        """Histogram without cells for `n_tokens` genes and special tokens."""
        return cls(np.zeros((n_tokens, N_BINS), dtype=np.int64), 0, fingerprint)

    @property
    def n_tokens(self) -> int:
        """Size of the token space."""
        return len(self.counts)

    def update(self, cells: sp.csr_matrix, measured_tokens: np.ndarray) -> None:
        """Count a block of cells.

        Parameters
        ----------
        cells
            Expression in token space, (n, n_tokens), from :func:`scdiva.tokenizer.serialize.to_token_space`.
        measured_tokens
            Tokens of the genes that these cells' study has a column for (negative ones are ignored). A gene without a
            column was not measured, so nothing is counted for it.

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
        fingerprint = self.fingerprint or other.fingerprint
        return EntropyHistogram(self.counts + other.counts, self.n_cells + other.n_cells, fingerprint)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EntropyHistogram):
            return NotImplemented
        return self.n_cells == other.n_cells and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]

    def entropy(self) -> np.ndarray:
        r"""Shannon entropy :math:`H_g = -\sum_b p_b \log p_b` of each gene (paper, appendix, eq. gene_entropy).

        Returns
        -------
        float32 (n_tokens,), in nats; NaN for special tokens and for genes that were not measured in any cell.
        """
        n = self.counts.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            p = self.counts / n[:, None]
            terms = np.where(self.counts > 0, -p * np.log(p), 0.0)
        entropy = np.where(n > 0, terms.sum(axis=1), np.nan)
        return entropy.astype(np.float32)
