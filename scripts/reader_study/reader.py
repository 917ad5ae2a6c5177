# ruff: noqa
import math
import numpy as np, torch, torch.nn.functional as F
from torch import nn, Tensor
from typing import NamedTuple

HEADS, KEY, COMPONENTS, LINEAR, WIDTH, LATENTS, HIDDEN, CODE = 8, 16, 30, 2, 64, 16, 96, 32
LEAST = 1e-9


class Study(NamedTuple):
    """Context: cells whose queried counts are known."""

    axes: Tensor  # (G, K) projection of centred visible values on components
    mean: Tensor  # (G,) mean value of visible genes
    comps: Tensor  # (M, K) unit variance
    spectrum: Tensor  # (K,) share of variance
    state: Tensor  # (M, code) code-projected
    counts: Tensor  # (M, Q)
    total: Tensor  # (M,)


def study_of(values, codes, counts, total):
    """values (M,G) dense log-normalised visible; codes (G, D)."""
    mean = values.mean(0)
    D = values - mean
    M = len(D)
    w, V = torch.linalg.eigh(D @ D.T)
    k = min(COMPONENTS, M - 1)
    w, V = w.flip(0)[:k].clamp_min(1e-6), V.flip(1)[:, :k]
    axes = D.T @ (V / w) * M**0.5  # (G,k) so that D@axes = V*sqrt(M): unit variance
    comps = V * M**0.5
    spec = w / w.sum()
    if k < COMPONENTS:
        axes, comps, spec = (F.pad(x, (0, COMPONENTS - k)) for x in (axes, comps, spec))
    return Study(axes, mean, comps, spec, F.normalize(D @ codes, dim=1), counts, total)


class Reader(nn.Module):
    def __init__(self, code_dim=128):
        super().__init__()
        self.query, self.key = (nn.Linear(code_dim, HEADS * KEY, bias=False) for _ in range(2))
        with torch.no_grad():
            self.key.weight.copy_(self.query.weight)
        self.sharp = nn.Parameter(torch.linspace(0, 3, HEADS))  # of states
        self.near = nn.Parameter(torch.linspace(0, 2.5, HEADS).flip(0))  # of components
        self.comp_weight = nn.Parameter(torch.zeros(HEADS, COMPONENTS))
        self.prior = nn.Parameter(torch.full((HEADS,), 1.0))
        self.tau = nn.Parameter(torch.tensor([-1.0, -2.0])[:, None].repeat(1, COMPONENTS))
        self.code = nn.Linear(code_dim, CODE)
        self.token = nn.Linear(code_dim, 2 * WIDTH)
        self.value = nn.Linear(2, WIDTH)
        self.latent = nn.Parameter(torch.randn(LATENTS, WIDTH) * 0.3)
        self.read = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, F.silu, batch_first=True, norm_first=True)
        self.ask = nn.Linear(CODE, WIDTH)
        self.keys = nn.Linear(WIDTH, 2 * WIDTH)
        n = 2 * HEADS + LINEAR + 6
        self.n = n
        self.line = nn.Parameter(torch.cat([torch.full((HEADS,), 0.7 / HEADS), torch.full((LINEAR,), 0.1)]))
        self.hidden = nn.Sequential(
            nn.Linear(n + CODE + WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU()
        )
        self.out = nn.Linear(HIDDEN, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def weigh(self, comps, state, s: Study, own=None):
        w = F.softplus(self.comp_weight) * s.spectrum * COMPONENTS  # (H,K)
        scale = w.sum(1)[:, None, None] * 2
        qa = w[:, None] * comps[None]
        d = (w @ comps.square().T)[:, :, None] + (w @ s.comps.square().T)[:, None] - 2 * qa @ s.comps.T
        near = -d / scale * self.near.exp()[:, None, None]  # (H,B,M)
        q = F.normalize(self.query(state).view(-1, HEADS, KEY), dim=2)
        k = F.normalize(self.key(s.state).view(-1, HEADS, KEY), dim=2)
        near = near.transpose(0, 1) + torch.einsum("bhd,mhd->bhm", q, k) * self.sharp.exp()[None, :, None]
        if own is not None:
            near = near.masked_fill((own[:, None] == torch.arange(len(s.comps)))[:, None], -torch.inf)
        return near.softmax(2)

    def features(self, comps, state, total, s: Study, own=None):
        """(B, n, Q) features; log pooled (B,Q)"""
        C, T = s.counts, s.total
        mine = torch.zeros(len(comps), C.shape[1])
        mt = torch.zeros(len(comps))
        if own is not None:
            has = own >= 0
            mine[has] = C[own[has]]
            mt[has] = T[own[has]]
        pooled = (C.sum(0) - mine + 0.2) / (T.sum() - mt)[:, None]  # (B,Q)
        a = self.weigh(comps, state, s, own)
        B, M = len(comps), len(T)
        num = (a.flatten(0, 1) @ C).view(B, HEADS, -1)
        den = a @ T  # (B,H,Q),(B,H)
        eff = 1 / a.square().sum(2)
        tbar = T.mean()
        pri = F.softplus(self.prior) * tbar
        rate = (num * eff[..., None] + pri[:, None] * pooled[:, None]) / (den * eff + pri)[..., None]
        f = (rate / pooled[:, None]).log()
        e = torch.log1p((den * eff)[..., None] * pooled[:, None])
        p0 = (C.sum(0) + 0.2) / T.sum()
        mu = T[:, None] * p0
        R = C - mu
        info = mu.sum(0)
        disp = (R.square().sum(0) / info).clamp_min(1)
        S = s.comps.T @ R  # (K,Q)
        lin = []
        for h in range(LINEAR):
            t = (self.tau[h].exp() * s.spectrum * COMPONENTS)[:, None].clamp_min(1e-8)
            g = t / (disp + info * t)
            d = comps @ (S * g)
            if own is not None:
                d = d - (comps.square() @ g) * torch.where((own >= 0)[:, None], mine - mt[:, None] * p0, 0.0)
            lin.append(d.clamp(-4, 4))
        lp = pooled.log()
        depth = (total / tbar).log()[:, None].expand_as(lp)
        extra = [
            lp + 9.2,
            lp + total.log()[:, None],
            depth,
            disp.log().expand_as(lp),
            (info.log() / 4).expand_as(lp),
            torch.full_like(lp, math.log(M / 100)),
        ]
        return torch.cat([f, e / 2, torch.stack(lin + extra, 1)], 1), lp

    def cell(self, codes, values, change, shown):
        """Latents (B, LATENTS, WIDTH) of cells' tokens (B, N)."""
        t = self.token(codes)
        x = t[..., :WIDTH] + t[..., WIDTH:] * change[..., None] + self.value(torch.stack([values, change], -1))
        q = self.latent.expand(len(x), -1, -1)
        y = q + self.read(q, x, x, key_padding_mask=~shown, need_weights=False)[0]
        return self.block(y)

    def forward(self, comps, state, total, latents, codes, s: Study, own=None, with_cell=True):
        """log rate (B,Q), log size of the negative binomial."""
        f, lp = self.features(comps, state, total, s, own)
        base = torch.einsum("bhq,h->bq", torch.cat([f[:, :HEADS], f[:, 2 * HEADS : 2 * HEADS + LINEAR]], 1), self.line)
        code = self.code(codes)  # (Q,CODE)
        k, v = self.keys(latents).chunk(2, -1)  # (B,L,W)
        q = self.ask(code).view(-1, 4, WIDTH // 4)
        att = torch.einsum("qhd,blhd->bhql", q, k.view(*k.shape[:2], 4, -1)) / (WIDTH // 4) ** 0.5
        W0 = self.hidden[0].weight
        wf, wc, wr = W0.split([self.n, CODE, WIDTH], 1)
        # read through first layer: values projected once a latent
        vr = torch.einsum("blhd,ohd->bhlo", v.view(*v.shape[:2], 4, -1), wr.view(-1, 4, WIDTH // 4))  # (B,h,L,HID)
        h = torch.einsum("bnq,on->bqo", f, wf) + (code @ wc.T + self.hidden[0].bias)
        if with_cell:
            h = h + torch.einsum("bhql,bhlo->bqo", att.softmax(-1), vr)
        o = self.out(self.hidden[2:](F.silu(h)))
        return lp + base + o[..., 0], o[..., 1] + 0.7


def nb_nll(counts, log_mu, log_size):
    r = log_size.clamp(-4, 6).exp()
    mu = log_mu.clamp(-25, 15).exp()
    return -(
        torch.lgamma(counts + r)
        - torch.lgamma(r)
        - torch.lgamma(counts + 1)
        + r * (r / (r + mu)).log()
        + counts * (log_mu - (r + mu).log())
    )
