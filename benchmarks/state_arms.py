"""What `tl.embed` would gain from other cells of the study, read and not fitted, and from its transformer.

    python benchmarks/state_arms.py --corpus FOLDER --base FOLDER --head FILE [--residual FOLDER] [--seeds 0 1 2]

Labelled studies that base and query head were not trained on (denoising.py says how both are made). For each seed 200
cells, half at most, are drawn as context; a cell that is among them does not read itself.

- state: `tl.embed`. state, centred: less the mean of the study.
- predicted: 50 principal components of what the state head expects of the 2,000 genes that most cells show, the chance
  that a gene is expressed times its value. predicted, context: the same by the query head, which reads the context.
- state and predicted, state and predicted, context: the state with 20 of these components beside it, both at length 1.
- residual: the state with what residual_state.py trained a transformer to add to it.
- pca: of 2,000 highly variable genes, fitted to the cells. adapted: `tl.adapt`, fitted to them too, for each seed anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import anndata as ad
import numpy as np
import torch
from _judge import across, judge, over_seeds
from _record import record
from _rivals import fit_pca, scdiva_arm
from _scripts import load_head, with_head
from _sets import load_set, scored, scores, typed
from _timing import report
from scipy.special import expit

import scdiva as sd
from scdiva._constants import N_SPECIAL
from scdiva.data.cells import open_cells
from scdiva.models import ScDiVa, load_model
from scdiva.populations.states import context_of, predicted, states_of
from scdiva.train.adaptation import read_cells

STUDIES = ("breast_scdeconr_ref", "pbmc4k_soupx", "zilionis_scgate_300")
"""Those of denoising.py whose cells have types."""
CONTEXT, N_GENES, N_COMPONENTS, N_BESIDE = 200, 2000, 50, 20
SCORED = ("accuracy", "average_bio")
WEIGHTS = "trained as the bundled ones, without these studies"


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def components(x: np.ndarray, n: int) -> np.ndarray:
    """Of cells by genes: their coordinates along the n directions of most variance."""
    u, s, _ = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    return u[:, :n] * s[:n]


def arms_of(
    adata: ad.AnnData, model: ScDiVa, seed: int, residual: ScDiVa | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each arm and its embedding of all cells; the model has a query head."""
    cells = read_cells(open_cells(adata, model, empty="nan"), np.zeros(adata.n_obs, dtype=np.int64))[0]
    states = states_of(model, cells)
    often = np.bincount(cells.tokens, minlength=model.config.n_tokens)[N_SPECIAL:]
    genes = N_SPECIAL + np.sort(np.argsort(-often, kind="stable")[:N_GENES])
    around = np.sort(np.random.default_rng(seed).permutation(cells.n_cells)[: min(CONTEXT, cells.n_cells // 2)])
    own = np.full(cells.n_cells, -1)
    own[around] = np.arange(len(around))
    context = context_of(model, cells.subset(around), states.take(around), genes)

    state = unit(states.state)
    yield "state", state
    yield "state, centred", unit(states.state - states.state.mean(axis=0))
    for about, given in (("", (states,)), (", context", (states._replace(own=own), context))):
        log_odds, values = predicted(model, genes, *given)
        expected = expit(log_odds) * np.maximum(values, 0)
        yield f"predicted{about}", components(expected, N_COMPONENTS)
        yield f"state and predicted{about}", np.hstack([state, unit(components(expected, N_BESIDE))])
    if residual is not None:
        yield "residual", scdiva_arm(residual)(adata)
    yield "pca", fit_pca(adata)(adata)
    yield "adapted", scdiva_arm(sd.tl.adapt(adata, model, rng=seed))(adata)


def goals(rows: list[dict]) -> list[dict]:
    """By how much an arm is above `tl.embed`, mean over the studies."""
    at = {(row["set"], row["arm"]): row for row in rows}
    sets, arms = (list(dict.fromkeys(row[of] for row in rows)) for of in ("set", "arm"))
    found = []
    for arm in (one for one in arms if one not in ("state", "pca") and not one.startswith("predicted")):
        for key in SCORED if len(sets) > 1 else ():
            leads = [at[name, arm][key] - at[name, "state"][key] for name in sets]
            found.append(judge(f"{arm}: mean {key} above the state", across(leads, "sets"), at_least=0))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="folder of train_mini.py without these studies")
    parser.add_argument("--head", type=Path, required=True, help="of train_denoiser.py on that base")
    parser.add_argument("--studies", nargs="+", default=list(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--residual", type=Path, help="model of residual_state.py on that base")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    sd.settings.progress, sd.settings.threads = False, 1
    base = load_model(arguments.base / "model")
    model = with_head(base, load_head(base, arguments.head)).eval()
    model.vocabulary = base.vocabulary
    residual = load_model(arguments.residual) if arguments.residual else None
    rows: list[dict] = []
    for name in arguments.studies:
        adata, labels = load_set(arguments.corpus, name)
        labels = typed(labels)
        kept, found = scored(labels), {}
        for seed in arguments.seeds:
            for arm, embedding in arms_of(adata, model, seed, residual):
                found.setdefault(arm, []).append(scores(embedding[kept], labels[kept], seed))
        for arm, each in found.items():
            row: dict = {"set": name, "arm": arm, "n_cells": len(kept), "weights_note": WEIGHTS}
            for key in SCORED:
                row |= over_seeds(key, [one[key] for one in each])
            rows.append(row)
            print(f"{name} {arm}: {row['accuracy']:.3f} / {row['average_bio']:.3f}", flush=True)
        record("state_arms", [*rows, *goals(rows)])
    report(goals(rows))


if __name__ == "__main__":
    main()
