# ruff: noqa
"""tl.impute with and without the reader: holes, and one half of the counts from the other."""

from apply import *
from scdiva.models import load_model as lm

model = lm(sys.argv[1])
sets = sys.argv[2]
out = sys.argv[3]
only = sys.argv[4:]
res = {}


def imp(a, m, ex=False):
    t = time.process_time()
    r = sd.tl.impute(a, model=m, keep_observed=False, expressed=ex, rng=0, copy=True).layers["scdiva_imputed"]
    return np.asarray(r), time.process_time() - t


for name in HELD if sets == "held" else BENCH:
    if only and name not in only:
        continue
    a = load(name, "corpus" if sets == "held" else "benchmark", 300)
    left, rows, cols, truth = with_holes(a)
    X = a.X.tocsr()
    half = X.copy()
    half.data = np.random.default_rng(1).binomial(X.data.astype(np.int64), 0.5).astype(np.float32)
    half.eliminate_zeros()
    other = (X - half).toarray()
    L = np.log1p(1e4 * other / other.sum(1, keepdims=True))
    h = ad.AnnData(half, var=a.var)
    h.obs_names = a.obs_names
    g = np.argsort(-(other > 0).sum(0) + 1e6 * (half.getnnz(0) == 0), kind="stable")[:1000]
    row = {}
    for arm, mm in (("today", "scdiva-mini"), ("reader", model)):
        m, t = imp(left, mm)
        e, _ = imp(left, mm, True)
        s = scores(left, rows, cols, truth, m[rows, cols], e[rows, cols])
        s["s"] = t
        m, _ = imp(h, mm)
        p = m[:, g]
        from scipy.stats import rankdata

        R = lambda z: (lambda r: (r - r.mean(0)) / (r.std(0) + 1e-9))(rankdata(z, axis=0))
        s["half"] = float((R(p) * R(L[:, g])).mean(0).mean())
        rate = np.expm1(p) * 1e-4 * other.sum(1, keepdims=True) + 1e-9
        c = other[:, g]
        s["pois"] = float((rate - c * np.log(rate)).mean())
        s["halfrmse"] = float(np.sqrt(np.square(p - L[:, g]).mean()))
        row[arm] = s
    res[name] = row
    print(name, left.shape, {k: {x: round(v, 4) for x, v in s.items()} for k, s in row.items()}, flush=True)
    json.dump(res, open(out, "w"))
for s in ("sp", "sps", "rmse", "rs", "half", "pois", "halfrmse", "s"):
    d = np.array([[r["today"][s], r["reader"][s]] for r in res.values()])
    e = d[:, 1] - d[:, 0]
    b = np.random.default_rng(0).choice(e, (10000, len(e))).mean(1)
    print(
        s,
        d.mean(0).round(4),
        "diff",
        e.mean().round(4),
        np.quantile(b, [0.025, 0.975]).round(4),
        "up",
        (e > 0).sum(),
        "up.01",
        (e >= 0.01).sum(),
        "ratio",
        (d[:, 1] / d[:, 0]).mean().round(3),
    )
