"""Entropy of each gene over a corpus, from integer histograms that add up in any order."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from scdiva._constants import N_SPECIAL
from scdiva.tokenizer.serialize import Backend, kernels, plain

BIN_WIDTH = 0.5
BIN_EDGES = np.arange(0.0, 10.0 + BIN_WIDTH, BIN_WIDTH)
"""Edges of the bins of v = log(1 + 1e4 c / C): zero has a bin of its own, then (0, 0.5], ... (9.5, 10]. The largest
possible v is log(10001) = 9.21. The edges are part of the definition of the entropy and never depend on data."""
N_BINS = len(BIN_EDGES)
"""The bin of zero and one bin between each two edges."""

_FORMAT = 1


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

    def update(self, cells: sp.csr_matrix, measured_tokens: np.ndarray, *, backend: Backend = "auto") -> None:
        """Count a block of cells.

        Parameters
        ----------
        cells
            Expression in token space, (n, n_tokens), from :func:`scdiva.tokenizer.serialize.to_token_space`.
        measured_tokens
            Tokens of the genes that these cells' study has a column for (negative ones are ignored). A gene without a
            column was not seen to be zero, so nothing is counted for it.
        backend
            ``"auto"``, ``"numba"`` or ``"numpy"``: who counts; the counts are the same.

        Raises
        ------
        ImportError
            If `backend` is ``"numba"`` and numba can't be used.
        ValueError
            If the cells have another token space, hold values outside of the bins, or genes that were not measured.
            Then none of them is counted.
        """
        if cells.shape[1] != self.n_tokens:
            raise ValueError(f"cells have {cells.shape[1]} tokens, the histogram {self.n_tokens}.")
        if cells.dtype != np.float32:
            raise ValueError(f"cells must be float32 (see to_token_space), got {cells.dtype}.")
        measured = np.asarray(measured_tokens)
        is_measured = np.zeros(self.n_tokens, dtype=bool)
        is_measured[measured[measured >= 0]] = True
        compiled = kernels(backend)
        if compiled is None or not compiled.count(
            plain(cells.indices, np.int32), plain(cells.data, np.float32), is_measured, cells.shape[0],
            1 / BIN_WIDTH, BIN_EDGES[-1], self.counts,
        ):  # fmt: skip
            self._count_numpy(cells, is_measured)  # which also says what it was that the loop did not like
        self.n_cells += cells.shape[0]

    def _count_numpy(self, cells: sp.csr_matrix, is_measured: np.ndarray) -> None:
        if len(cells.data):
            low, high = int(cells.indices.min()), int(cells.indices.max())
            if low < 0 or high >= self.n_tokens:
                raise ValueError(f"cells hold tokens {low} to {high}, outside of 0 ... {self.n_tokens - 1}: damaged.")
            unknown = ~is_measured[cells.indices]
            if unknown.any():
                first = int(cells.indices[unknown][0])
                raise ValueError(f"cells hold token {first}, which is not among the measured tokens.")
            if not (cells.data.min() >= 0 and cells.data.max() <= BIN_EDGES[-1]):
                raise ValueError(
                    f"values must lie in 0 to {BIN_EDGES[-1]:g}, got {cells.data.min()} to {cells.data.max()}; "
                    "pass what to_token_space returns."
                )
        # ceil(v / 0.5): the division is exact, so the bins are (a, b] to the bit.
        bins = np.ceil(cells.data / np.float32(BIN_WIDTH)).astype(np.int64)
        flat = np.bincount(cells.indices.astype(np.int64) * N_BINS + bins, minlength=self.counts.size)
        seen = flat.reshape(self.counts.shape)
        seen[is_measured, 0] += cells.shape[0] - seen[is_measured].sum(axis=1)
        self.counts += seen

    def merge(self, other: EntropyHistogram) -> EntropyHistogram:
        """Add another histogram to this one, in place, and return this one.

        Parameters
        ----------
        other
            A histogram over the same vocabulary.

        Raises
        ------
        ValueError
            If the two count over different vocabularies.
        """
        if other.n_tokens != self.n_tokens or (
            self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint
        ):
            raise ValueError("histograms of different vocabularies cannot be added.")
        self.counts += other.counts
        self.n_cells += other.n_cells
        self.fingerprint = self.fingerprint or other.fingerprint
        return self

    def __add__(self, other: EntropyHistogram) -> EntropyHistogram:
        return EntropyHistogram(self.n_tokens, self.fingerprint).merge(self).merge(other)

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
        try:
            with part.open("wb") as file:
                np.savez_compressed(
                    file,
                    format=np.int64(_FORMAT),
                    edges=BIN_EDGES,
                    counts=self.counts,
                    n_cells=np.int64(self.n_cells),
                    fingerprint=np.array(self.fingerprint),
                )
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
                parts = {name: held[name] for name in held.files}
        except FileNotFoundError:
            raise
        except Exception as error:  # zip and numpy errors of many kinds; all mean a damaged or foreign file
            raise ValueError(f"{str(path)!r} is no entropy histogram: {error}") from error
        missing = {"format", "edges", "counts", "n_cells", "fingerprint"} - set(parts)
        if missing:
            raise ValueError(f"{str(path)!r} is no entropy histogram: it lacks {', '.join(sorted(missing))}.")
        if parts["format"].tolist() != _FORMAT or not np.array_equal(parts["edges"], BIN_EDGES):
            raise ValueError(f"{str(path)!r} was counted with other bins or by another version; count the corpus anew.")
        counts = parts["counts"]
        fits = counts.dtype == np.int64 and counts.ndim == 2 and counts.shape[1] == N_BINS and len(counts) > N_SPECIAL
        if not fits or (counts < 0).any() or parts["n_cells"].shape != ():
            raise ValueError(f"{str(path)!r} is damaged: counts of {counts.dtype} {counts.shape}.")
        histogram = cls(counts.shape[0], str(parts["fingerprint"]))
        histogram.counts = counts
        histogram.n_cells = int(parts["n_cells"])
        return histogram
