# ruff: noqa
"""Weights of the study's network under the names of the package."""

import sys, torch
from scdiva.models.reader import Reader, HEADS

names = dict(
    query="state_query",
    key="state_key",
    sharp="state_sharpness",
    near="distance_sharpness",
    comp_weight="component_weight",
    tau="slope",
    code="gene",
    value="token_value",
    read="pool",
    ask="gene_query",
    keys="latent_key_value",
)


def convert(state):
    out = {}
    for k, v in state.items():
        head, *rest = k.split(".")
        if head == "hidden":
            head = {"0": "first", "2": "second"}[rest.pop(0)]
        out[".".join([names.get(head, head), *rest])] = v
    return out


if __name__ == "__main__":
    torch.manual_seed(0)
    net = Reader(128)
    net.load_state_dict(convert(torch.load(sys.argv[1])))
    import reader as old

    o = old.Reader()
    o.load_state_dict(torch.load(sys.argv[1]))
    M, B, G, Q = 50, 6, 400, 30
    from scdiva.models.reader import study_of, cells_of

    codes = torch.nn.functional.normalize(torch.randn(G + Q, 128), dim=1)
    C = torch.poisson(torch.rand(M + B, G + Q) * 2)
    T = C.sum(1)
    V = torch.log1p(C * (1e4 / T)[:, None])
    s = study_of(V[:M, :G], codes[:G], C[:M, G:], T[:M])
    so = old.study_of(V[:M, :G], codes[:G], C[:M, G:], T[:M])
    own = torch.tensor([-1, 3, 5, -1, 7, -1])
    V2, T2 = V[M:].clone(), T[M:].clone()
    V2[own >= 0] = V[own[own >= 0]]
    T2[own >= 0] = T[own[own >= 0]]
    c = cells_of(s, V2[:, :G], codes[:G], T2, torch.randperm(G))
    a = net(c, codes[G:], s, own)
    lat = o.cell(c.codes, c.values, c.change, c.shown)
    b = o(c.components, c.state, T2, lat, codes[G:], so, own)
    print((a[0] - b[0]).abs().max(), (a[1] - b[1]).abs().max())
