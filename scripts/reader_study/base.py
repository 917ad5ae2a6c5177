# ruff: noqa
"""Common: studies, holes, scores."""

import sys, time, warnings
from pathlib import Path
import numpy as np, pandas as pd, scipy.sparse as sp, anndata as ad, torch

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
import scdiva as sd

sd.settings.progress = False
from scdiva.models import load_model
from scdiva._constants import N_SPECIAL

HELD_OUT = (
    "accordion_bone_marrow_1482",
    "breast_scdeconr_ref",
    "citefuse_eccite_pbmc_500",
    "copykat_breast_tumor_302",
    "infercnv_colon_10x_partial",
    "kang_pbmc_stim_2000",
    "pbmc4k_soupx",
    "pisces_pbmc_1000",
    "scillus_GSE128531_skin",
    "streak_malt_2100",
    "vision_metastasis_cp007_604",
    "zilionis_scgate_300",
)
DATA = Path("../shared/data")
MODEL = load_model("scdiva-mini")
MOST = 500


def load(name, folder="corpus", most=MOST):
    a = ad.read_h5ad(DATA / folder / f"{name}.h5ad")
    tokens = MODEL.vocabulary.match(a.var_names).tokens
    _, first = np.unique(tokens, return_index=True)
    columns = np.sort(first[tokens[first] >= N_SPECIAL])
    X = sp.csr_matrix(a.X, dtype=np.float32)[:, columns]
    rows = np.flatnonzero(X.getnnz(axis=1) >= 200)
    rows = np.sort(np.random.default_rng(0).permutation(rows)[:most])
    X = X[rows]
    keep = np.flatnonzero(X.getnnz(axis=0) >= 10)
    b = ad.AnnData(sp.csr_matrix(X[:, keep]), var=a.var[[]].iloc[columns[keep]])
    b.obs_names = a.obs_names[rows]
    return b[np.asarray(b.X.sum(1)).ravel() > 0].copy()


def with_holes(adata, seed=0, share=0.1):
    counts = adata.X.tocoo()
    order = np.random.default_rng(seed).permutation(counts.nnz)
    kept = np.zeros(counts.nnz, bool)
    kept[order[round(share * counts.nnz) :]] = True
    left = adata.copy()
    left.X = sp.csr_matrix((counts.data[kept], (counts.row[kept], counts.col[kept])), shape=adata.shape)
    rows, cols = counts.row[~kept], counts.col[~kept]
    totals = np.asarray(left.X.sum(1)).ravel()
    return left, rows, cols, np.log1p(1e4 * counts.data[~kept] / totals[rows])


def grouped_spearman(group, true, predicted):
    r = pd.DataFrame({"t": true, "p": predicted}).groupby(group).rank()
    r["g"] = group

    def z(c):
        m = r.groupby("g")[c].transform("mean")
        return r[c] - m

    t, p = z("t"), z("p")
    d = pd.DataFrame({"g": group, "tp": t * p, "tt": t * t, "pp": p * p}).groupby("g").sum()
    d = d[(d.tt > 0) & (d.pp > 0)]
    return float((d.tp / np.sqrt(d.tt * d.pp)).mean())


def scores(left, rows, cols, truth, m, shown=None):
    """m: log1p expected counts per 1e4 at holes"""
    m = m.astype(float)
    unit = 1e4 / np.asarray(left.X.sum(1)).ravel()[rows]
    if shown is None:
        rate = np.maximum(np.expm1(m) / unit, 1e-6)
        shown = np.log1p(unit * rate / -np.expm1(-rate))
    genes = np.argsort(-np.bincount(cols, minlength=left.n_vars), kind="stable")[:300]
    g = np.isin(cols, genes)
    return dict(
        sp=grouped_spearman(cols[g], truth[g], m[g]),
        sps=grouped_spearman(cols[g], truth[g], shown[g]),
        rmse=float(np.sqrt(np.mean((m - truth) ** 2))),
        rs=float(np.sqrt(np.mean((shown - truth) ** 2))),
    )
