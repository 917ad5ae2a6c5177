# ruff: noqa
from base import *
from reader import *
import json

CODES = F.normalize(MODEL.anchor.table.weight[N_SPECIAL:].detach().float(), dim=1)
HELD = tuple(h for h in HELD_OUT if h != "pbmc4k_soupx") + ("friedman2018_ipsc_cardiac_scgps",)
BENCH = (
    "panc8_small_500",
    "mouse_pancreas_bastidasponce_739",
    "mouse_brain_zeisel_550",
    "darmanis_brain_320",
    "kang_ifnb_2800",
    "pbmc3k_raw",
    "baron2016_mouse_pancreas",
    "sc_mixology_cell_lines",
)


@torch.inference_mode()
def read(net, left, seed=0, M=512, N=256, with_cell=(True, False), step=64):
    X = sp.csr_matrix(left.X, dtype=np.float32)
    n, G = X.shape
    T = np.asarray(X.sum(1)).ravel().astype(np.float32)
    L = X.copy()
    L.data = np.log1p(L.data * np.repeat(1e4 / T, np.diff(L.indptr))).astype(np.float32)
    genes = MODEL.vocabulary.match(left.var_names).tokens - N_SPECIAL
    rng = np.random.default_rng(seed)
    fold = rng.permutation(np.arange(G) % 10)
    ctx_rows = np.sort(rng.permutation(n)[:M])
    own = np.full(n, -1)
    own[ctx_rows] = np.arange(len(ctx_rows))
    outs = [np.zeros((n, G), np.float32) for _ in with_cell]
    size = np.zeros((n, G), np.float32)
    Lc, Xc = L.tocsc(), X.tocsc()
    v = torch.from_numpy
    for f in range(10):
        part, vis = np.flatnonzero(fold == f), np.flatnonzero(fold != f)
        Lv = Lc[:, vis].tocsr()
        cv, cq = CODES[genes[vis]], CODES[genes[part]]
        ctx = study_of(v(Lv[ctx_rows].toarray()), cv, v(Xc[:, part][ctx_rows].toarray()), v(T[ctx_rows]))
        gen = torch.Generator().manual_seed(f)
        for a in range(0, n, step):
            vals = v(Lv[a : a + step].toarray())
            D = vals - ctx.mean
            comps, state = (D @ ctx.axes).clamp(-6, 6), F.normalize(D @ cv, dim=1)
            key = torch.rand(vals.shape, generator=gen).masked_fill(vals == 0, -1.0)
            top = key.topk(min(N, vals.shape[1]), dim=1)
            idx = top.indices
            lat = net.cell(cv[idx], vals.gather(1, idx), D.gather(1, idx), top.values > 0)
            for o, w in zip(outs, with_cell):
                lr, ls = net(comps, state, v(T[a : a + step]), lat, cq, ctx, v(own[a : a + step]), with_cell=w)
                o[a : a + step, part] = np.log1p(1e4 * lr.clamp_max(0).exp().numpy())
    return outs


if __name__ == "__main__":
    ck, sets = sys.argv[1], sys.argv[2]
    net = Reader()
    net.load_state_dict(torch.load(ck))
    net.eval()
    res = {}
    for name in HELD if sets == "held" else BENCH:
        folder = "corpus" if sets == "held" else "benchmark"
        a = load(name, folder)
        left, rows, cols, truth = with_holes(a)
        p = Path(f"call/{name}.npy")
        if not p.exists():
            m = np.asarray(
                sd.tl.impute(left, model="scdiva-mini", keep_observed=False, rng=0, copy=True).layers["scdiva_imputed"],
                np.float32,
            )
            np.save(p, m)
        m = np.load(p)
        m = np.nan_to_num(m)
        t = time.process_time()
        outs = read(net, left)
        t = time.process_time() - t
        A, B = m[rows, cols], outs[0][rows, cols]
        N = outs[1][rows, cols]
        row = {
            "call": scores(left, rows, cols, truth, A),
            "reader": scores(left, rows, cols, truth, B),
            "nocell": scores(left, rows, cols, truth, N),
        }
        for w in (0.3, 0.5, 0.7):
            row[f"mix{w}"] = scores(left, rows, cols, truth, (1 - w) * A + w * B)
        row["mixno.5"] = scores(left, rows, cols, truth, 0.5 * (A + N))
        # totals of each gene kept
        res[name] = row
        print(
            name,
            left.shape,
            round(t, 1),
            {k: tuple(round(v[s], 3) for s in ("sp", "sps", "rmse", "rs")) for k, v in row.items()},
            flush=True,
        )
        json.dump(res, open(f"res_{sets}_{Path(ck).stem}.json", "w"))
    for s in ("sp", "sps", "rmse", "rs"):
        d = pd.DataFrame([{k: v[s] for k, v in r.items()} for r in res.values()])
        e = d.sub(d.call, axis=0)
        print(s)
        print(
            pd.DataFrame(
                {
                    "mean": d.mean(),
                    "diff": e.mean(),
                    "up": (e > 0).sum(),
                    "up01": (e >= 0.01).sum(),
                    "down": (e < 0).sum(),
                }
            ).round(4)
        )
