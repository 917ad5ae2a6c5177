"""How well batches are mixed and types kept apart, and how well types are carried over: arrays in, floats out."""

from __future__ import annotations

import numpy as np
from sklearn.metrics import accuracy_score, f1_score, silhouette_score
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

import scdiva as sd
from scdiva.metrics.annotation import labelled

LISI_NEIGHBORS, PERPLEXITY = 90, 30


def lisi(embedding: np.ndarray, batches: np.ndarray, perplexity: float | None = PERPLEXITY) -> np.ndarray:
    """Local inverse Simpson index of the batches around each cell (Korsunsky et al. 2019), from 1 to their number.

    Of the 90 nearest neighbours the cell itself is one. The others are weighted by exp(-beta d), d the Euclidean
    distance, with beta such that the weights have the perplexity; the index is one over the sum of the batches'
    squared shares. Without a perplexity all 90 count alike.
    """
    k = min(LISI_NEIGHBORS, len(embedding))
    finder = NearestNeighbors(n_neighbors=k).fit(embedding)
    if perplexity is None:
        neighbors = finder.kneighbors(embedding, return_distance=False)
        weights = np.full(neighbors.shape, 1 / k)
    else:
        distances, neighbors = finder.kneighbors(n_neighbors=k - 1)
        weights = perplexed(distances, min(perplexity, k / 3))
    names, codes = np.unique(batches, return_inverse=True)
    of_neighbors = codes[neighbors]
    shares = np.stack([(weights * (of_neighbors == code)).sum(axis=1) for code in range(len(names))], axis=1)
    return 1 / (shares**2).sum(axis=1)


def perplexed(distances: np.ndarray, perplexity: float, rounds: int = 60) -> np.ndarray:
    """Weights exp(-beta d), each row summing to 1, beta found by bisection so that exp(entropy) is the perplexity."""
    apart = distances - distances.min(axis=1, keepdims=True)
    scale = np.maximum(apart.mean(axis=1), np.finfo(float).tiny)
    low, high = np.full(len(apart), -30.0), np.full(len(apart), 30.0)  # log beta, in units of the mean distance
    for _ in range(rounds):
        middle = (low + high) / 2
        weights = np.exp(-apart * (np.exp(middle) / scale)[:, None])
        weights /= weights.sum(axis=1, keepdims=True)
        entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=1)
        broad = entropy > np.log(perplexity)
        low, high = np.where(broad, middle, low), np.where(broad, high, middle)
    return weights


def ilisi(embedding: np.ndarray, batches: np.ndarray, perplexity: float | None = PERPLEXITY) -> float:
    """Median LISI of the batches, scaled to 0 (one batch around each cell) .. 1 (all alike), as scib does."""
    n_batches = len(np.unique(batches))
    return float((np.median(lisi(embedding, batches, perplexity)) - 1) / (n_batches - 1))


def conserved(embedding: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """NMI and ARI of Leiden clusters, scaled silhouette of the labels, and their mean, `average_bio`."""
    found = sd.metrics.avg_bio(embedding, labels, rng=seed)
    return {"average_bio": found.pop("avg_bio"), **found}


def integrated(embedding: np.ndarray, batches: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """Scores of an embedding that was fitted without labels.

    `ilisi_even` is iLISI with all 90 neighbours counting alike. `shuffled` are the two if batches were dealt out at
    random: the most that mixing can give. `avg_batch` is the paper's, 1 - silhouette of the batches over all cells.
    """
    known = labelled(labels)
    shuffled = np.random.default_rng(seed).permutation(batches)
    return {
        **sd.metrics.knn_cross_validation(embedding, labels, rng=seed),
        **conserved(embedding, labels, seed),
        "ilisi": ilisi(embedding, batches),
        "ilisi_even": ilisi(embedding, batches, None),
        "ilisi_shuffled": ilisi(embedding, shuffled),
        "ilisi_even_shuffled": ilisi(embedding, shuffled, None),
        "batch_asw": sd.metrics.avg_batch(embedding[known], batches[known], labels[known])["asw_batch"],
        "avg_batch": 1 - float(silhouette_score(embedding, batches)),
    }


def carried(
    known: np.ndarray, known_labels: np.ndarray, asked: np.ndarray, asked_labels: np.ndarray
) -> dict[str, float]:
    """Accuracy and macro-F1 of the types that the 15 nearest known cells give to others."""
    predicted = KNeighborsClassifier(15).fit(known, known_labels).predict(asked)
    return named(predicted, asked_labels)


def named(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy and macro-F1 over the types that there are; a type that only occurs among the predictions is wrong."""
    types = np.unique(labels)
    return {
        "accuracy": float(accuracy_score(labels, predicted)),
        "macro_f1": float(f1_score(labels, predicted, labels=types, average="macro", zero_division=0)),
    }
