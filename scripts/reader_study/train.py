# ruff: noqa
from base import *
from reader import *
import pickle, os

SECONDS = float(sys.argv[1])
NAME = sys.argv[2]
skip = (set(HELD_OUT) - {"pbmc4k_soupx"}) | {
    "numbat_ATC2_173",
    "friedman2018_ipsc_cardiac_scgps",
    "vangalen2019_aml_bm_5000",
}
data = {k: v for k, v in pickle.load(open("train.pkl", "rb")).items() if k not in skip and v[0].shape[0] >= 80}
names = list(data)
sizes = np.array([data[k][0].shape[0] for k in names])
share = sizes**0.5
share /= share.sum()
CODES = MODEL.anchor.table.weight[N_SPECIAL:].detach().float()
CODES = F.normalize(CODES, dim=1)
print(len(names), sizes.sum())
torch.manual_seed(0)
net = Reader()
print(sum(p.numel() for p in net.parameters()))
opt = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.01, betas=(0.9, 0.98))
rng = np.random.default_rng(0)


def dense_norm(C, T):
    return np.log1p(C * (1e4 / T)[:, None])


def episode():
    k = names[rng.choice(len(names), p=share)]
    X, genes = data[k]
    n = X.shape[0]
    B = min(40, n // 3)
    M = min(int(np.exp(rng.uniform(np.log(48), np.log(400)))), n - B)
    rows = rng.permutation(n)[: B + M]
    C = X[np.sort(rows)].toarray()
    C = C[rng.permutation(len(C))]
    det = (C > 0).sum(0)
    G = len(genes)
    use = det > 0
    if G > 4000 and rng.random() < 0.5:
        use &= rng.random(G) < rng.uniform(0.15, 1)  # a panel of genes
    use = np.flatnonzero(use)
    C = C[:, use]
    g = genes[use]
    det = det[use]
    T = C.sum(1)
    ok = T > 20
    C, T = C[ok], T[ok]
    B = min(B, len(C) - 24)
    masked = rng.random(len(g)) < rng.uniform(0.1, 0.4)
    cand = np.flatnonzero(masked)
    Q = min(256, len(cand))
    p = np.sqrt(det[cand])
    q = rng.choice(cand, Q, replace=False, p=p / p.sum())
    vis = np.flatnonzero(~masked)
    given, tg, target, tt = C[:B], T[:B], C[:B][:, q], T[:B]
    if rng.random() < 0.4:
        half = rng.binomial(C[:B].astype(np.int64), 0.5).astype(np.float32)
        given, target = half, (C[:B] - half)[:, q]
        tt = (C[:B] - half).sum(1) + 1e-3
        tg = half.sum(1) + 1e-3
    v = torch.from_numpy
    ctx = study_of(v(dense_norm(C[B:][:, vis], T[B:])), CODES[g[vis]], v(C[B:][:, q]), v(T[B:]))
    vals = v(dense_norm(given[:, vis], tg)).float()
    return ctx, vals, CODES[g[vis]], CODES[g[q]], v(target), v(tg).float(), v(tt).float()


def prepare(ctx, vals, codes, N=256, gen=None):
    D = vals - ctx.mean
    comps, state = D @ ctx.axes, F.normalize(D @ codes, dim=1)
    key = torch.rand(vals.shape, generator=gen).masked_fill(vals == 0, -1.0)
    top = key.topk(min(N, vals.shape[1]), dim=1)
    shown = top.values > 0
    idx = top.indices
    ch = D.gather(1, idx)
    return comps.clamp(-6, 6), state, codes[idx], vals.gather(1, idx), ch, shown


t0 = time.time()
step = 0
log = []
while time.time() - t0 < SECONDS:
    for gr in opt.param_groups:
        gr["lr"] = (
            2e-3 * min(1, (step + 1) / 50) * max(0.03, 0.5 * (1 + math.cos(math.pi * (time.time() - t0) / SECONDS)))
        )
    ctx, vals, cv, cq, y, tg, tt = episode()
    comps, state, tc, tv, ch, shown = prepare(ctx, vals, cv)
    lat = net.cell(tc, tv, ch, shown)
    lr, ls = net(comps, state, tg, lat, cq, ctx, with_cell=bool(rng.random() > 0.25))
    nll = nb_nll(y, lr + tt.log()[:, None], ls)
    with torch.no_grad():
        b = nb_nll(
            y, (ctx.counts.sum(0) + 0.2).log() - ctx.total.sum().log() + tt.log()[:, None], torch.zeros_like(ls) + 0.7
        ).mean()
    loss = nll.mean() / b.clamp_min(0.05) ** 0.5
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    step += 1
    log.append((float(nll.mean()), float(b)))
    if step % 50 == 0:
        l = np.array(log[-200:])
        print(
            step,
            round(time.time() - t0),
            "nll/base",
            round(float((l[:, 0] / l[:, 1]).mean()), 4),
            "nll",
            l.mean(0).round(4),
            flush=True,
        )
    if step % 250 == 0:
        torch.save(net.state_dict(), NAME + ".tmp")
        os.replace(NAME + ".tmp", NAME)
torch.save(net.state_dict(), NAME)
print("end", step)
