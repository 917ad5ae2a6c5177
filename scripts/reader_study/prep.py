# ruff: noqa
"""Counts of the training studies, of genes that the model knows: cache."""

from base import *
import pickle, csv

out = {}
skip = set(HELD_OUT) | {"numbat_ATC2_173"}
pub = {r["study"]: r["publication"] for r in csv.DictReader(open("scripts/corpus.csv"))}
held = {pub.get(h) for h in HELD_OUT}
print("held-out publications", held)
for f in sorted((DATA / "corpus").glob("*.h5ad")):
    a = ad.read_h5ad(f)
    tokens = MODEL.vocabulary.match(a.var_names).tokens
    _, first = np.unique(tokens, return_index=True)
    columns = np.sort(first[tokens[first] >= N_SPECIAL])
    X = sp.csr_matrix(a.X, dtype=np.float32)[:, columns]
    rows = X.getnnz(axis=1) >= 200
    if f.stem == "tidytranscriptomics_pbmc_3000":
        rows &= ~a.obs["batch"].astype(str).str.startswith(("SCP345", "SCP591")).to_numpy()
    X = X[rows]
    keep = X.getnnz(axis=0) >= 10
    d = X.data[:10000]
    out[f.stem] = (sp.csr_matrix(X[:, keep]), tokens[columns][keep] - N_SPECIAL)
    print(
        f.stem,
        "HELD" if f.stem in skip else "",
        pub.get(f.stem),
        X.shape,
        int(keep.sum()),
        "int" if np.allclose(d, np.round(d)) else "NOT COUNTS",
        round(float(X.sum(1).mean())),
        flush=True,
    )
pickle.dump(out, open("train.pkl", "wb"))
