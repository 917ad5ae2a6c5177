"""What else there is for the same work: eager and compiled rotation, SDPA, FlexAttention, liger-kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _gpu_device import Arm, Setting, compiled, free_memory, peak_gib, sdpa_backends, time_rows, timed
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from scdiva.diffusion.loss import masked_cross_entropy
from scdiva.kernels import rope_tables
from scdiva.nn.layers import RMSNorm

FLEX_BLOCK = 128


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as most code has it: in the dtype of x, tables `(tokens, D)` that hold each angle twice."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, in one function to be compiled."""
    return rotate_half_split(q, cos, sin), rotate_half_split(k, cos, sin)


def wide_tables(cos: Tensor, sin: Tensor, where: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables for :func:`rotate_half_split`, `(tokens, 1, D)`, of the positions `where`."""
    return tuple(torch.cat([t, t], dim=-1)[where].unsqueeze(1).to(dtype) for t in (cos, sin))  # type: ignore[return-value]


def sdpa(setting: Setting, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One kernel of SDPA on `(B, L, H, D)`."""
    with sdpa_kernel(sdpa_backends(setting, name)):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


def document_mask(bounds: Tensor, n_tokens: int) -> BlockMask:
    """Mask of packed cells for FlexAttention: a token sees its own cell.

    Made from the cells' bounds, block by block: `create_block_mask` would look at every pair of tokens, 10^11 here.
    """
    ends = bounds[1:].long()
    cell = torch.searchsorted(ends, torch.arange(n_tokens, device=bounds.device), right=True)
    n_blocks = -(-n_tokens // FLEX_BLOCK)
    edges = torch.arange(n_blocks, device=bounds.device) * FLEX_BLOCK
    lowest, highest = cell[edges], cell[(edges + FLEX_BLOCK - 1).clamp_max(n_tokens - 1)]
    touches = (lowest[:, None] <= highest[None, :]) & (lowest[None, :] <= highest[:, None])
    whole = (lowest == highest) & (edges + FLEX_BLOCK <= n_tokens)
    full = whole[:, None] & whole[None, :] & (lowest[:, None] == lowest[None, :])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        count = blocks.sum(dim=1, dtype=torch.int32)
        order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()
        return count[None, None], order[None, None].contiguous()

    def same_cell(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return cell[q] == cell[kv]

    return BlockMask.from_kv_blocks(
        *listed(touches & ~full), *listed(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=same_cell,
        seq_lengths=(n_tokens, n_tokens),
    )  # fmt: skip


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask) -> Tensor:
    """What stands in for FlexAttention in a dry run: on a CPU it has no backward pass."""
    places = torch.arange(q.shape[-2])
    zero = torch.zeros((), dtype=torch.long)
    seen = block_mask.mask_mod(zero, zero, places[:, None], places[None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def flex_arm(
    setting: Setting, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, tables: tuple[Tensor, Tensor] | None
) -> Callable[[], Tensor]:
    """FlexAttention on packed `(T, H, D)`, with the compiled rotation before it where tables are given."""
    mask = document_mask(bounds, q.shape[0])
    attend = torch.compile(flex_attention, dynamic=False) if setting.cuda else dense_attention
    rotate = compiled(setting, rotate_both)

    def run() -> Tensor:
        turned = rotate(q, k, *tables) if tables is not None else (q, k)
        out = attend(*(x.transpose(0, 1).unsqueeze(0) for x in (*turned, v)), block_mask=mask)
        return out.squeeze(0).transpose(0, 1)

    return run


def liger_rotation(setting: Setting) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """liger-kernel's RoPE on `(B, L, H, D)`; None where it is not installed or cannot run."""
    try:
        from liger_kernel.ops.rope import LigerRopeFunction
    except ImportError:
        return None
    if not setting.cuda:
        return None
    cos, sin = rope_tables(setting.length, setting.head_dim, device=setting.device)
    cos, sin = (torch.cat([t, t], dim=-1).unsqueeze(0).to(torch.bfloat16) for t in (cos, sin))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # it writes into its inputs; those of a model are slices of qkv, which it would have to copy too
        turned = LigerRopeFunction.apply(q.clone().transpose(1, 2), k.clone().transpose(1, 2), cos, sin)
        return tuple(x.transpose(1, 2) for x in turned)  # type: ignore[return-value]

    return rotate


def liger_rows(setting: Setting) -> list[dict]:
    """liger-kernel's RMSNorm, SwiGLU, RoPE and fused linear cross-entropy beside ours, forward + backward."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        print(f"liger-kernel is not here ({error}): its rows are left out.")
        return [{"what": "liger-kernel", "left_out": str(error)}]
    n, dim, hidden, n_genes = (64, 32, 48, 100) if setting.tiny else (153_600, 512, 2048, 41_818)
    dtype, device = torch.bfloat16, setting.device

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    def both_ways(function: Callable[..., object], *inputs: Tensor) -> Arm:
        grads = None

        def run() -> object:
            nonlocal grads
            outs = function(*inputs)
            outs = outs if isinstance(outs, tuple) else (outs,)
            outs = tuple(out for out in outs if isinstance(out, Tensor) and out.requires_grad)
            grads = grads or tuple(torch.randn_like(out) if out.dim() else torch.ones_like(out) for out in outs)
            return torch.autograd.grad(outs, inputs, grads)

        return run

    def compare(what: str, ours: Arm, theirs: Arm) -> list[dict]:
        arms = {"ours": ours, "liger-kernel": theirs} if setting.cuda else {"ours": ours}  # its kernels need a GPU
        free_memory(setting)
        rows = time_rows(f"{what}, forward + backward", timed(setting, arms))
        for row, arm in zip(rows, arms.values(), strict=True):
            free_memory(setting)
            before = peak_gib(setting)
            if "error" not in row:
                arm()
                row["peak_gib_above_inputs"] = round(peak_gib(setting) - before, 3)
        return rows

    rows: list[dict] = []
    norm = RMSNorm(dim).to(device)
    fast_norm = compiled(setting, norm)
    rows += compare(
        f"RMSNorm, {n:,} × {dim}",
        both_ways(lambda x, w: fast_norm(x), leaf(n, dim), norm.weight),
        both_ways(lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False), leaf(n, dim), leaf(dim)),
    )
    rows += compare(
        f"SwiGLU's product, {n:,} × {hidden}",
        both_ways(compiled(setting, lambda a, b: F.silu(a) * b), leaf(n, hidden), leaf(n, hidden)),
        # inputs of its own: its backward pass writes into them
        both_ways(lambda a, b: LigerSiLUMulFunction.apply(a, b), leaf(n, hidden), leaf(n, hidden)),
    )
    heads, head_dim, length = setting.heads, setting.head_dim, setting.length
    q, k = (leaf(n // length or 1, heads, length, head_dim) for _ in range(2))
    angle = torch.rand(1, length, head_dim // 2, device=device)
    cos, sin = (torch.cat([t, t], dim=-1).to(dtype) for t in (angle.cos(), angle.sin()))
    rows += compare(
        "RoPE alone (ours: compiled; in attention it is part of the kernel)",
        both_ways(compiled(setting, lambda q, k: rotate_both(q, k, cos, sin)), q, k),
        # it makes copies of inputs that lie head by head, and works on these
        both_ways(lambda q, k: LigerRopeFunction.apply(q, k, cos, sin), q, k),
    )
    del q, k
    n_rows = 32 if setting.tiny else 16_384
    states, head = leaf(n_rows, dim), leaf(n_genes, dim)
    targets = torch.randint(0, n_genes, (n_rows,), device=device)
    weight = torch.full((n_rows,), 1.0 / n_rows, device=device)
    rows += compare(
        f"linear cross-entropy, {n_rows:,} rows × {n_genes:,} genes",
        both_ways(lambda h, w: masked_cross_entropy(h, w, targets, weight)[0], states, head),
        both_ways(lambda h, w: LigerFusedLinearCrossEntropyFunction.apply(h, w, targets)[0], states, head),
    )
    return rows
