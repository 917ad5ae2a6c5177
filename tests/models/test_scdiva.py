from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from scdiva._constants import LAT, MASK, N_SPECIAL, PAD
from scdiva.models import ScDiVa, ScDiVaConfig

SMALL = ScDiVaConfig(
    anchor_residual=True, n_genes=40, dim=16, n_layers=2, n_heads=2, ffn_dim=24, max_length=20, anchor_linear_dim=6,
    anchor_learned_dim=4, anchor_hidden=10, anchor_length=30,
)  # fmt: skip
ANCHORS = ("learned", "encoder")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(anchor: str = "encoder", *, shake: bool = True, seed: int = 0, **fields) -> ScDiVa:
    """A small model; `shake` gives every weight, the zero ones too, a size at which a missing term shows."""
    model = ScDiVa(replace(SMALL, anchor=anchor, **fields), generator=seeded(seed))
    if shake:
        generator = seeded(seed + 1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.15 * torch.randn(p.shape, generator=generator))
    return model


def batch(lengths: list[int], *, masked: float = 0.0, seed: int = 0):
    rng = np.random.default_rng(seed)
    n_genes = SMALL.n_genes
    tokens = [torch.from_numpy(rng.permutation(n_genes)[:n].astype(np.int64) + N_SPECIAL) for n in lengths]
    tokens = torch.cat(tokens)
    values = torch.from_numpy(rng.gamma(2.0, 1.0, len(tokens)).astype(np.float32))
    tokens[torch.from_numpy(rng.random(len(tokens)) < masked)] = MASK
    return tokens, values, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def slow_forward(model: ScDiVa, tokens, values, hidden):
    """The whole network for one cell in numpy float64, from the paper's appendix, by the names of the weights."""
    c = model.config
    w = {name: p.detach().double().numpy() for name, p in model.state_dict().items()}

    def norm(x, gamma):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + c.norm_eps) * gamma

    def silu(x):
        return x / (1 + np.exp(-x))

    def affine(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    genes = w["embedding.gene.weight"]
    visible_value = affine(
        silu(affine(np.asarray(values, float)[:, None], "embedding.value_in")), "embedding.value_out"
    )
    x = genes[tokens] + np.where(hidden[:, None], w["embedding.hidden_value"], visible_value)

    lat, z = genes[LAT], None
    weights = np.where(hidden, 0.0, values)
    if c.anchor == "encoder":
        share = min(1.0, weights.sum() / w["anchor.full_total"].item())
        raw = weights @ w["anchor.table.weight"][tokens] + share * w["anchor.bias"]
        raw = raw / max(np.linalg.norm(raw), 1e-12)
        y = silu(affine(silu(affine(raw * np.sqrt(c.anchor_linear_dim), "anchor.mlp.0")), "anchor.mlp.2"))
        y = affine(y, "anchor.mlp.4")
        z = np.concatenate([c.anchor_balance * raw, y / np.linalg.norm(y)]) / np.hypot(c.anchor_balance, 1)
    if z is not None:
        lat = lat + affine(z, "anchor_in")
    x = np.concatenate([lat[None], x])

    d_h = c.dim // c.n_heads
    turn = np.exp(1j * np.outer(np.arange(len(x)), c.rope_base ** (-2 * np.arange(d_h // 2) / d_h)))
    if c.position == "none":
        turn = np.ones_like(turn)
    for i in range(c.n_layers):
        y = norm(x, w[f"blocks.{i}.attention_norm.weight"])
        q, k, v = np.split(affine(y, f"blocks.{i}.attention.qkv"), 3, axis=1)
        heads = []
        for h in range(c.n_heads):
            cut = slice(h * d_h, (h + 1) * d_h)
            q_, k_ = ((a[:, cut][:, : d_h // 2] + 1j * a[:, cut][:, d_h // 2 :]) * turn for a in (q, k))
            scores = np.exp((q_ @ k_.conj().T).real / np.sqrt(d_h))
            heads.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, cut])
        x = x + affine(np.concatenate(heads, axis=1), f"blocks.{i}.attention.out")
        y = norm(x, w[f"blocks.{i}.ffn_norm.weight"])
        ffn = f"blocks.{i}.ffn"
        x = x + affine(silu(affine(y, f"{ffn}.gate")) * affine(y, f"{ffn}.up"), f"{ffn}.down")
    x = norm(x, w["norm.weight"])
    state = x[0]
    if c.anchor == "encoder":
        state = z + affine(x[0], "anchor_out") if c.anchor_residual else z
    logits = x[1:] @ (genes[N_SPECIAL:] if c.tie_gene_head else w["heads.gene.weight"]).T
    return x[1:], state, logits, affine(x[1:], "heads.value")[:, 0]


@pytest.mark.parametrize(
    ("anchor", "fields"),
    [
        ("learned", {}),
        ("learned", {"position": "none", "tie_gene_head": True}),
        ("encoder", {"norm_eps": 0.1}),
        ("encoder", {"anchor_residual": False}),
        ("encoder", {"tie_gene_head": True}),
    ],
)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_the_network_is_the_papers_written_slowly(anchor, fields, backend):
    model = build(anchor, **fields).double()
    lengths = [7, 1, 12, 7]
    tokens, values, cu = batch(lengths, masked=0.4)
    value_mask = torch.from_numpy(np.random.default_rng(5).random(len(tokens)) < 0.3)
    out = model(tokens, values, cu, value_mask=value_mask, backend=backend)
    for b in range(len(lengths)):
        cell = slice(int(cu[b]), int(cu[b + 1]))
        hidden = (value_mask | (tokens == MASK))[cell].numpy()
        expected = slow_forward(model, tokens[cell].numpy(), values[cell].numpy(), hidden)
        got = (
            out.hidden[cell],
            out.cell_state[b],
            model.logits(out, torch.arange(cell.start, cell.stop)),
            model.values(out, tokens[cell], cell),
        )
        for actual, slow in zip(got, expected, strict=True):
            np.testing.assert_allclose(actual.detach().numpy(), slow, atol=2e-5)


@pytest.mark.parametrize("anchor", ANCHORS)
@settings(deadline=None, max_examples=15)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_a_cell_does_not_depend_on_its_batch(anchor, lengths, seed):
    model = build(anchor)
    tokens, values, cu = batch([*lengths, 1], masked=0.3, seed=seed)
    with torch.inference_mode():
        together = model(tokens, values, cu)
        for b in range(len(lengths)):
            cell = slice(int(cu[b]), int(cu[b + 1]))
            alone = model(tokens[cell], values[cell], torch.tensor([0, lengths[b]], dtype=torch.int32))
            torch.testing.assert_close(alone.hidden, together.hidden[cell], atol=1e-5, rtol=0)
            torch.testing.assert_close(alone.cell_state[0], together.cell_state[b], atol=1e-5, rtol=0)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_hidden_values_never_leak(anchor):
    model = build(anchor)
    tokens, values, cu = batch([9, 6], masked=0.5)
    value_mask = torch.zeros_like(tokens, dtype=torch.bool)
    value_mask[::3] = True
    hidden = value_mask | (tokens == MASK)
    outputs = []
    for filler in (0.0, 7.0, torch.nan):
        out = model(tokens, values.masked_fill(hidden, filler), cu, value_mask=value_mask)
        outputs.append(torch.cat([out.hidden.flatten(), out.cell_state.flatten()]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("anchor", ANCHORS)
def test_the_state_of_one_view_prompts_another(anchor):
    """The cell state of a view can be given to any model as the other view's anchor, and gradients flow through it."""
    model = build(anchor)
    tokens, values, cu = batch([9, 6])
    masked = torch.full_like(tokens, MASK)
    plain = model(masked, values, cu)
    state = model.encode(tokens, values, cu)
    prompted = model(masked, values, cu, anchor_state=state)
    assert prompted.anchor is state
    assert (prompted.hidden - plain.hidden).abs().max() > 1e-3
    prompted.hidden[:9].sum().backward()
    assert model.embedding.gene.weight.grad[tokens[:9]].abs().sum() > 0
    assert model.embedding.gene.weight.grad[tokens[9:][~torch.isin(tokens[9:], tokens[:9])]].abs().sum() == 0


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_that_should_learn_gets_a_gradient(anchor, tied):
    model = build(anchor, tie_gene_head=tied)
    tokens, values, cu = batch([12, 9], masked=0.4)
    out = model(tokens, values, cu)
    loss = model.logits(out, torch.arange(len(tokens))).logsumexp(-1).sum() + model.values(out, tokens).square().sum()
    (loss + out.cell_state.square().sum()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name
    assert model.embedding.gene.weight.grad[PAD].abs().max() == 0


def test_a_generator_fixes_the_weights_and_leaves_the_global_stream():
    before = torch.get_rng_state()
    first, again, reseeded = (ScDiVa(SMALL, generator=seeded(s)).state_dict() for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.gene.weight"], reseeded["embedding.gene.weight"])


TOKENS, VALUES, CU = batch([4, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS.int()}, "tokens must be a packed int64 vector"),
        ({"values": VALUES[:-1]}, "values must .*tokens, 7"),
        ({"value_mask": torch.zeros(7)}, "value_mask must be bool"),
        ({"cu_seqlens": CU.long()}, "cu_seqlens must be int32"),
        ({"cu_seqlens": CU[:1]}, "at least one cell"),
        ({"cu_seqlens": torch.tensor([0, 4, 6], dtype=torch.int32)}, "rise from 0 .*tokens, 7"),
        ({"tokens": TOKENS.clone().index_fill(0, torch.tensor(2), LAT)}, r"1 token\(s\) are neither MASK nor"),
        (
            {"tokens": TOKENS.clone().index_fill(0, torch.tensor([2, 5]), 43)},
            r"2 token\(s\).*40 genes, the first is 43",
        ),
        ({"anchor_state": torch.zeros(2, 16)}, r"anchor_state must be \(2, 10\); got \(2, 16\)"),
        ({"backend": "flash"}, "Unknown attention backend"),
    ],
)
def test_bad_input_is_refused(change, message):
    model = build()
    arguments = {"tokens": TOKENS, "values": VALUES, "cu_seqlens": CU} | change
    with pytest.raises(ValueError, match=message):
        model(arguments.pop("tokens"), arguments.pop("values"), arguments.pop("cu_seqlens"), **arguments)


def test_a_cell_that_is_too_long_is_named():
    tokens, values, cu = batch([5, 21, 22])
    with pytest.raises(ValueError, match=r"2 cell.*20 genes.*cell 1 .*21"):
        build()(tokens, values, cu)


def test_an_unavailable_backend_is_refused():
    with pytest.raises(ValueError, match="backend='triton' can't run"):
        build(attention_backend="triton")(TOKENS, VALUES, CU)
    assert build(attention_backend="triton")(TOKENS, VALUES, CU, backend="sdpa").hidden.isfinite().all()


def test_a_set_encoder_sees_cells_whole_and_the_transformer_their_first_genes():
    model = build("encoder")
    tokens, values, cu = batch([25, 7, 30])  # max_length is 20, anchor_length 30
    state = model.encode(tokens, values, cu)
    anchor = model.encode_anchor(tokens, values, cu)
    cut = torch.cat([torch.arange(20), torch.arange(25, 32), torch.arange(32, 52)])
    short = torch.tensor([0, 20, 27, 47], dtype=torch.int32)
    expected = model(tokens[cut], values[cut], short, anchor_state=anchor).cell_state
    torch.testing.assert_close(state, expected)
    with pytest.raises(ValueError, match="more than the 20 genes"):
        model(tokens, values, cu)
    with pytest.raises(ValueError, match="more than the 30 genes"):
        model.encode(*batch([31]))


def test_without_residual_the_cell_state_is_the_encoders_and_no_block_runs():
    model = build("encoder", anchor_residual=False)
    cells = batch([25, 7])
    model.blocks = None  # would fail if it were run
    torch.testing.assert_close(model.encode(*cells), model.encode_anchor(*cells))


@pytest.mark.parametrize(
    ("anchor", "fields"),
    [("learned", {}), ("learned", {"position": "none", "n_layers": 1}), ("encoder", {"norm_eps": 0.1})],
)
@pytest.mark.parametrize("lengths", [[12], [7, 0, 1, 12, 7]])
def test_encode_runs_the_last_block_for_lat_alone(anchor, fields, lengths):
    """Values and gradients are those of the whole network."""
    model = build(anchor, **fields).double()
    cells = batch(lengths)
    rows, results = [], []
    model.blocks[-1].ffn.register_forward_hook(lambda _, inputs, output: rows.append(len(output)))
    for state_of in (lambda: model.read(*cells).cell_state, lambda: model.encode(*cells)):
        model.zero_grad()
        state = state_of()
        (state * torch.linspace(-1, 2, state.shape[1])).square().sum().backward()
        used = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"state": state.detach(), **used})
    assert rows == [sum(lengths) + len(lengths), len(lengths)]
    expected, got = results
    assert expected.keys() == got.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-11, msg=name)
    with torch.no_grad():
        single = build(anchor, **fields)
        state = single.read(*cells).cell_state
        assert (single.encode(*cells) - state).norm() <= 1e-6 * state.norm()
    model.blocks.micro_batches = 2
    torch.testing.assert_close(model.encode(*cells), expected["state"])
    assert sum(rows[2:]) == rows[0], "in parts, the whole block is run"
