"""Ranking the genes of cells and counting their histograms, beside plain ways to do it: CPU time.

    python benchmarks/serialisation.py [--cells 50000] [--repeats 5]

`serialize` takes cells in token space to ranked tokens. Beside it stand a loop over rows with
numpy's lexsort, to the bit the same ranking; a copy of the cells' three arrays, the floor of whatever reads and writes
as much; and tokenizers of other models, written out here as plain references. `EntropyHistogram` counts values by gene
and bin; beside it stands numpy's bincount.

Cells are made up: lengths log-normal about a median, genes drawn by the detection rate that follows from their entropy
in the bundled vocabulary, counts small integers, so that there are ties. One thread, arms in turn, best
CPU time of `repeats` rounds, of three times as many for what is over soon.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
import torch
from _judge import judge_times
from _record import record
from _timing import interleaved, report

from scdiva._constants import MAX_LENGTH, N_SPECIAL, TARGET_SUM
from scdiva.data.blocks import BLOCK_ROWS
from scdiva.tokenizer.entropy import BIN_WIDTH, N_BINS, EntropyHistogram
from scdiva.tokenizer.serialize import score_denominator, serialize, to_token_space
from scdiva.tokenizer.vocabulary import load_vocabulary

MEDIAN, SPREAD, LONGEST = 900, 0.35, 6000
"""Genes of a cell: median and standard deviation of their logarithm, and the most there are."""
CHUNK = 512
"""Cells that Geneformer's tokenizer normalises at a time."""
GENEFORMER_GENES, KEPT = 25_424, 2048
BINS = 51

Ranked = tuple[np.ndarray, np.ndarray, np.ndarray]


def detection_rate(entropy: np.ndarray) -> np.ndarray:
    """Share of cells in which a gene of this entropy is found, if it were found or not and nothing else."""
    rate = np.linspace(1e-6, 0.5, 100_000)
    return np.interp(entropy, -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)), rate)


def synthetic(n_cells: int, entropy: np.ndarray, token_of: np.ndarray, seed: int = 0) -> sp.csr_matrix:
    """Counts of cells, float32 CSR, a column for each of the tokens `token_of`."""
    rng, entropy = np.random.default_rng(seed), entropy[token_of]
    upto = np.cumsum(detection_rate(entropy))
    lengths = np.clip(MEDIAN * rng.lognormal(0, SPREAD, n_cells), 100, LONGEST).astype(int)
    genes = []
    for length in lengths:
        drawn = np.unique(np.searchsorted(upto, rng.random(2 * length) * upto[-1]))
        genes.append(np.sort(rng.permutation(drawn)[:length]).astype(np.int32))
    indices = np.concatenate(genes)
    rate = 0.1 * np.exp(2 * entropy[indices]) * rng.standard_exponential(len(indices))
    counts = (1 + rng.poisson(rate)).astype(np.float32)
    return sp.csr_matrix((counts, indices, np.cumsum([0, *map(len, genes)])), shape=(n_cells, len(entropy)))


def fresh(cells: sp.csr_matrix) -> sp.csr_matrix:
    """The same arrays in a matrix that scipy knows nothing of yet, so that looking at its order is timed as well."""
    return sp.csr_matrix((cells.data, cells.indices, cells.indptr), shape=cells.shape)


def blocks(cells: sp.csr_matrix) -> list[sp.csr_matrix]:
    return [cells[start : start + BLOCK_ROWS] for start in range(0, cells.shape[0], BLOCK_ROWS)]


def lexsort_loop(cells: sp.csr_matrix, denominator: np.ndarray) -> Ranked:
    """Row by row: falling score, then rising token."""
    indptr, tokens, values = [0], [], []
    for i in range(cells.shape[0]):
        row = slice(cells.indptr[i], cells.indptr[i + 1])
        token, value = cells.indices[row], cells.data[row]
        order = np.lexsort((token, -(value / denominator[token])))[:MAX_LENGTH]
        tokens.append(token[order])
        values.append(value[order])
        indptr.append(indptr[-1] + len(order))
    return np.array(indptr), np.concatenate(tokens), np.concatenate(values)


def geneformer(counts: sp.csr_matrix, medians: np.ndarray, token_of: np.ndarray) -> list[np.ndarray]:
    """Counts per 10,000 over the gene's median, argsort: Geneformer as first published, a dense vector of a cell."""
    cells = []
    for start in range(0, counts.shape[0], CHUNK):
        chunk = counts[start : start + CHUNK].toarray()
        normed = chunk / chunk.sum(axis=1, keepdims=True) * TARGET_SUM / medians
        for vector in normed:
            nonzero = np.nonzero(vector)[0]
            order = np.argsort(-vector[nonzero])
            cells.append(token_of[nonzero][order][:KEPT])
    return cells


def geneformer_sparse(counts: sp.csr_matrix, medians: np.ndarray, token_of: np.ndarray) -> list[np.ndarray]:
    """The same as its later versions do it for h5ad files: chunks stay sparse, scipy gives each row."""
    cells = []
    for start in range(0, counts.shape[0], CHUNK):
        chunk = counts[start : start + CHUNK]
        normed = sp.csr_matrix(chunk / np.asarray(chunk.sum(axis=1)) * TARGET_SUM / medians)
        for i in range(normed.shape[0]):
            order = np.argsort(-normed[i].data)
            cells.append(token_of[normed[i].indices][order][:KEPT])
    return cells


def geneformer_slices(counts: sp.csr_matrix, medians: np.ndarray, token_of: np.ndarray) -> list[np.ndarray]:
    """The same from slices of the arrays: the least that numpy can do for it, row by row."""
    cells = []
    for i in range(counts.shape[0]):
        row = slice(counts.indptr[i], counts.indptr[i + 1])
        count, gene = counts.data[row], counts.indices[row]
        normed = count / count.sum() * TARGET_SUM / medians[gene]
        cells.append(token_of[gene][np.argsort(-normed)][:KEPT])
    return cells


def scgpt(cells: sp.csr_matrix, seed: int = 0) -> list[np.ndarray]:
    """Values above zero binned by the cell's own quantiles; one that lies on several edges falls to one by chance."""
    rng, bins = np.random.default_rng(seed), []
    for i in range(cells.shape[0]):
        value = cells.data[cells.indptr[i] : cells.indptr[i + 1]]
        edges = np.quantile(value, np.linspace(0, 1, BINS - 1))
        left, right = np.digitize(value, edges), np.digitize(value, edges, right=True)
        bins.append(np.ceil(rng.random(len(value)) * (right - left) + left).astype(np.int64))
    return bins


def bincount(parts: list[sp.csr_matrix], measured: np.ndarray, n_tokens: int) -> np.ndarray:
    """Histograms of gene by bin, zeros by subtraction; nothing is checked."""
    counts, n_cells = np.zeros((n_tokens, N_BINS), np.int64), 0
    for part in parts:
        bins = np.ceil(part.data / np.float32(BIN_WIDTH)).astype(np.int64)
        flat = np.bincount(part.indices.astype(np.int64) * N_BINS + bins, minlength=counts.size)
        counts += flat.reshape(counts.shape)
        n_cells += part.shape[0]
    counts[measured, 0] += n_cells - counts[measured].sum(axis=1)
    return counts


def histogram(parts: list[sp.csr_matrix], measured: np.ndarray, n_tokens: int) -> np.ndarray:
    found = EntropyHistogram.empty(n_tokens)
    for part in parts:
        found.update(part, measured)
    return found.counts


def ties(ranked: Ranked, denominator: np.ndarray) -> float:
    """Genes of a cell, on average, whose score equals that of the gene before."""
    indptr, tokens, values = ranked
    score = values / denominator[tokens]
    equal = score[1:] == score[:-1]
    equal[indptr[1:-1] - 1] = False
    return float(equal.sum() / (len(indptr) - 1))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    entropy = load_vocabulary("human").entropy
    denominator, n_tokens = score_denominator(entropy), len(entropy)
    # the columns' order is their own
    token_of = np.random.default_rng(1).permutation(np.arange(N_SPECIAL, n_tokens)).astype(np.int32)
    counts = synthetic(options.cells, entropy, token_of)
    cells = sp.vstack([to_token_space(part, token_of, n_tokens) for part in blocks(counts)], format="csr")
    # the genes that Geneformer knows would be as many; of a gene, any positive number costs what its median would
    known = np.sort(np.argsort(-entropy[token_of], kind="stable")[:GENEFORMER_GENES])
    theirs, medians = sp.csr_matrix(counts[:, known]), 1 + np.random.default_rng(2).random(len(known))
    raw, parts = blocks(counts), blocks(cells)

    ranked = serialize(cells, denominator)
    if not all(map(np.array_equal, ranked, lexsort_loop(cells, denominator))):
        raise AssertionError("the rankings differ")
    tied = ties(ranked, denominator)
    del ranked
    measured = np.sort(token_of)
    if not np.array_equal(histogram(parts, measured, n_tokens), bincount(parts, measured, n_tokens)):
        raise AssertionError("the histograms differ")

    arms: dict[str, Callable[[], object]] = {
        "serialize, numba": lambda: serialize(fresh(cells), denominator),
        "lexsort, row by row": lambda: lexsort_loop(cells, denominator),
        "copy of the arrays": lambda: (cells.indptr.copy(), cells.indices.copy(), cells.data.copy()),
        "counts to ranks: to_token_space + serialize": lambda: [
            serialize(to_token_space(part, token_of, n_tokens), denominator) for part in raw
        ],
        "histograms, numba": lambda: histogram(parts, measured, n_tokens),
        "histograms, bincount": lambda: bincount(parts, measured, n_tokens),
    }
    rivals: dict[str, Callable[[], object]] = {
        "serialize, numba": arms["serialize, numba"],
        "Geneformer-style, dense": lambda: geneformer(theirs, medians, token_of[known]),
        "Geneformer-style, rows of scipy": lambda: geneformer_sparse(theirs, medians, token_of[known]),
        "Geneformer-style, slices": lambda: geneformer_slices(theirs, medians, token_of[known]),
        "scGPT-style": lambda: scgpt(cells),
    }
    # A short run is more easily spoilt as a whole by what else the machine does, so the short ones are repeated more.
    seconds = interleaved(arms, repeats=3 * options.repeats)
    for name, spent in interleaved(rivals, repeats=options.repeats).items():
        seconds[name] = seconds.get(name, []) + spent
    best = {name: min(spent) for name, spent in seconds.items()}

    def times(what: str, rival: str, ours: str, **bound: float) -> dict:
        return judge_times(what, seconds[rival], seconds[ours], **bound)

    ours = "serialize, numba"
    rows = [
        times("serialize: times as fast as the lexsort loop", "lexsort, row by row", ours, at_least=5),
        times("serialize: times as fast as Geneformer-style", "Geneformer-style, dense", ours, at_least=15),
        times("serialize: times as slow as a copy", ours, "copy of the arrays", at_most=10),
        times("histograms: times as fast as bincount", "histograms, bincount", "histograms, numba", at_least=1.8),
        *(
            {"what": f"serialize: times as fast as {rival}", "value": best[rival] / best[ours]}
            for rival in ("Geneformer-style, rows of scipy", "Geneformer-style, slices", "scGPT-style")
        ),
        *(
            {
                "what": name,
                "cpu_seconds": round(least, 3),
                "cells_per_cpu_second": round(options.cells / least),
                "ns_per_value": round(least / cells.nnz * 1e9, 2),
            }
            for name, least in best.items()
        ),
    ]
    lengths = np.diff(cells.indptr)
    record(
        "serialisation", rows, cells=options.cells, genes=n_tokens - N_SPECIAL, max_length=MAX_LENGTH,
        median_length=int(np.median(lengths)), mean_length=float(lengths.mean()), ties_per_cell=tied,
        block_rows=BLOCK_ROWS, cells_cut=float((lengths > MAX_LENGTH).mean()),
    )  # fmt: skip
    return report(rows)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
