"""Rotary position embedding of queries and keys, then fused with q/k-norm and the KV-cache write.

    y[t, h, i]       = x[t, h, i] · cos - x[t, h, i + D/2] · sin
    y[t, h, i + D/2] = x[t, h, i + D/2] · cos + x[t, h, i] · sin
    of the angle positions[t] · theta^(-2·i/D),   i = 0 … D/2 - 1

Element i is paired with i + D/2, the halves of a head, as in Llama and Qwen (the paper pairs
neighbours). Cosines and sines come from a float32 table, as in vLLM and FlashInfer. Transformers
rounds them to the dtype of x, rounds each product, and rounds the sum. So do all rungs here.

Shapes   q [T, H, D], k [T, H_kv, D], cos_sin [P, D] float32: row p holds the D/2 cosines of
         position p, then its sines; positions [T] int32 or int64 -> q [T, H, D], k [T, H_kv, D]
         fused: also v [T, H_kv, D], weights [D], slot_mapping [T], and caches [S, H_kv, D], whose
         rows slot_mapping it writes; -1 skips a token
Cost     read and write q and k, read a row of the table per token:
         2·T·(H + H_kv)·D·itemsize + 4·T·D bytes, for 3 FLOPs an element: bandwidth bound
Source   Su et al. 2021, arXiv:2104.09864, §3.4.2; the casts are those of apply_rotary_pos_emb and
         Qwen3RMSNorm in Hugging Face Transformers
"""

import labkit as lab
from labkit import bars
from labkit.problem import cloned

import inspect
import math

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from numba import config, cuda, float32
from torch import Tensor

THETA = 1e6  # Qwen3, config.json: rope_theta; Llama 3 has 5e5
EPS = 1e-6  # Qwen3, config.json: rms_norm_eps
THREADS = 128  # threads of a block of rung 1
MAX_PAIRS = 1024  # rungs 2 and 3: a thread for each pair of a head, and 1,024 is a block's limit
VECTOR_BYTES = 16  # the widest load a thread can issue
THIN, THICK = 16, 64  # rungs 4 and 5: elements of a token in a thread, few tokens and many
ONE_WAVE = 2**20  # elements; half of what 132 SMs with 2,048 threads hold at 8 a thread
# A fused multiply-add rounds once where Transformers rounds twice. On sm_90 LLVM would make one of
# a bf16 product and a bf16 sum, although the casts in between are written down.
EACH_ROUNDED = False  # rungs 4 and 5: enable_fp_fusion
INTS = (torch.int32, torch.int64)
SIMULATED = bool(config.ENABLE_CUDASIM)
Queries, Keys = Float[Tensor, "T H D"], Float[Tensor, "T H_kv D"]
Table, Tokens = Float[Tensor, "P D"], Int[Tensor, " T"]
Gain, Cache = Float[Tensor, " D"], Float[Tensor, "S H_kv D"]

# Problems ------------------------------------------------------------------------------------


def cos_sin_table(
    P: int, D: int, theta: float = THETA, device: torch.device | str = lab.DEVICE.torch
) -> Table:
    """Cosines and sines of positions 0 … P - 1, computed in float32 as Transformers does.

    On `device` itself: a GPU's cosines and a CPU's differ in their last bits.
    """
    # 1 / theta^x and not theta^-x: they differ in the last bit, which a large position magnifies.
    frequencies = 1 / theta ** (torch.arange(0, D, 2, device=device).float() / D)
    angles = torch.arange(P, device=device).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def draw(high: int, count: int, seed: int) -> Tensor:
    """`count` random integers below `high`, drawn on the CPU: the same on every machine."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(high, (count,), generator=generator).to(lab.DEVICE.torch)


def inputs(
    dtype: torch.dtype, seed: int = 0, *, T: int, H: int, H_kv: int, D: int
) -> tuple[Tensor, ...]:
    """Standard normal q and k; a table for 2·T + 2 positions, and T of them, never the last."""
    q, k = lab.randn((T, H, D), (T, H_kv, D), dtype=dtype, seed=seed)
    return q, k, cos_sin_table(2 * T + 2, D), draw(2 * T + 1, T, seed)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each half-split pair of x [T, H, D], turned by the angle of cos and sin [T, D/2]."""
    x1, x2 = x.chunk(2, dim=2)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, D/2]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=2)


def reference(q: Queries, k: Keys, cos_sin: Table, positions: Tokens) -> tuple[Queries, Keys]:
    """The formula, in the dtype it is given: the truth is this in float64."""
    cos, sin = cos_sin[positions].chunk(2, dim=1)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate_half(x: Tensor) -> Tensor:
    """Transformers' helper: (x1, x2) becomes (-x2, x1)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def library(q: Queries, k: Keys, cos_sin: Table, positions: Tokens) -> tuple[Queries, Keys]:
    """Transformers' apply_rotary_pos_emb: table look-up, then its operations, a kernel each."""
    cos, sin = cos_sin[positions].to(q.dtype).chunk(2, dim=1)
    cos, sin = cos.repeat(1, 2)[:, None], sin.repeat(1, 2)[:, None]  # [T, 1, D]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def liger_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Liger's kernel, in place, and the table look-up; it rounds once."""
    from liger_kernel.ops.rope import LigerRopeFunction

    cos, sin = cos_sin[positions].to(q.dtype).chunk(2, dim=1)
    cos, sin = cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]  # [1, T, D]
    by_head = (x.transpose(0, 1)[None] for x in (q, k))  # [1, H, T, D]
    return tuple(y[0].transpose(0, 1) for y in LigerRopeFunction.apply(*by_head, cos, sin))


def flashinfer_rope(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """FlashInfer's kernel; it takes the same table, and rounds once."""
    from flashinfer.rope import apply_rope_with_cos_sin_cache

    D = q.shape[2]
    flat = apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), D, cos_sin)
    return flat[0].view(q.shape), flat[1].view(k.shape)


def casts_like(library, inputs):
    """A property: in bf16, all but a few values are the library's to the last bit."""

    def holds(kernel) -> str | None:
        args = inputs(torch.bfloat16, seed=1, T=5, H=8, H_kv=4, D=64)
        both = (lab.outputs(fn(*cloned(args))) for fn in (kernel, library))
        for got, want in zip(*both, strict=True):
            same = (got == want).double().mean().item()
            if same < 0.99:
                return f"{same:.0%} of the values have the library's bits, wanted 99 %"
        return None

    return holds


def another_table(kernel) -> str | None:
    """Models have bases of their own: the angles are the caller's."""
    q, k, cos_sin, positions = inputs(torch.float32, seed=1, T=3, H=4, H_kv=2, D=8)
    other = cos_sin_table(len(cos_sin), 8, theta=1e4)
    for got, want in zip(
        kernel(q, k, other, positions), reference(q, k, other, positions), strict=True
    ):
        if not (got - want).abs().max() <= 1e-5 * want.abs().max():  # also true for NaN
            return "with the table of another base the result is not that of this table"
    return None


def position_zero(kernel) -> str | None:
    """At position 0 every angle is 0, and nothing changes."""
    q, k, cos_sin, positions = inputs(torch.float32, seed=1, T=3, H=4, H_kv=2, D=8)
    got = kernel(q, k, cos_sin, 0 * positions)
    if torch.equal(got[0], q) and torch.equal(got[1], k):
        return None
    return "position 0 changes q or k"


def keeps_norms(kernel) -> str | None:
    """A rotation changes the length of no head."""
    q, k, cos_sin, positions = inputs(torch.float32, seed=1, T=3, H=4, H_kv=2, D=8)
    for name, x, y in zip("qk", (q, k), kernel(q, k, cos_sin, positions), strict=True):
        change = (y.norm(dim=2) / x.norm(dim=2) - 1).abs().max().item()
        if not change <= 1e-5:  # also true for NaN
            return f"the length of a head of {name} changes by {change:.2g} of itself"
    return None


def relative(kernel) -> str | None:
    """q·k depends on how far the two tokens are apart, not on where they are."""
    q, k, cos_sin, _ = inputs(torch.float32, seed=1, T=6, H=2, H_kv=2, D=8)
    here = torch.arange(6, device=q.device)
    q0, k0 = kernel(q, k, cos_sin, here)
    q1, k1 = kernel(q, k, cos_sin, here + 7)
    scores = [torch.einsum("thd,shd->hts", *qk) for qk in ((q0, k0), (q1, k1))]
    change = (scores[1] - scores[0]).abs().max().item()
    if not change <= 1e-4:
        return f"7 positions further on, a score changes by {change:.2g}"
    return None


def sizes(*each: tuple[int, int, int, int]) -> tuple[dict[str, int], ...]:
    """(T, H, H_kv, D) as the dicts that a problem wants."""
    return tuple(dict(zip(("T", "H", "H_kv", "D"), s, strict=True)) for s in each)


QWEN_SMALL = (16, 8, 128)  # H, H_kv and D of Qwen3-0.6B
LARGE = (32, 8, 128)  # of Qwen3-8B, and of Llama-3-8B
SIZES = {
    # One pair; H and D no powers of two; a model's heads; as many of k as of q; one for all of q.
    "test_sizes": sizes(
        (1, 1, 1, 2), (5, 4, 2, 16), (2, 6, 3, 32), (1, 16, 8, 128), (3, 4, 2, 6), (1, 2, 1, 258),
        (4, 5, 5, 10), (3, 7, 1, 64), (4, 6, 2, 8),
    ),
    "empty_size": {"T": 0, "H": 4, "H_kv": 2, "D": 8},
    "bench_size": sizes((16384, *QWEN_SMALL))[0],
    "sweep": sizes(*((t, *model) for model in (QWEN_SMALL, LARGE) for t in (1, 64, 1024, 16384))),
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),  # bf16 first: it is what is swept
}  # fmt: skip


def shared(k: Tensor, H: int) -> Tensor:
    """k with head h // (H / H_kv) where head h belongs: attention's map, where none is wanted."""
    return k[:, torch.arange(k.shape[1], device=k.device) // (H // k.shape[1])]


def interleaved(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Neighbours 2·i and 2·i + 1 as a pair, as in the paper."""
    halves = torch.cat((x[..., ::2], x[..., 1::2]), dim=2)
    y1, y2 = rotate(halves, *cos_sin[positions].chunk(2, dim=1)).chunk(2, dim=2)
    return torch.stack((y1, y2), dim=3).flatten(2)


def minus(cos_sin: Tensor) -> Tensor:
    """The table of the opposite angles."""
    cos, sin = cos_sin.chunk(2, dim=1)
    return torch.cat((cos, -sin), dim=1)


def row_of(x: Tensor) -> Tensor:
    """0 … T - 1."""
    return torch.arange(len(x), device=x.device)


ROPE = lab.Problem(
    name="rope",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, T, H, H_kv, D: lab.Work(
        bytes=2 * T * (H + H_kv) * D * dtype.itemsize + T * (4 * D + 8),
        flops=3 * T * (H + H_kv) * D,
    ),
    terms=lambda T, H, H_kv, D: 2,
    **SIZES,
    huge_size={"T": 2**17 + 1, "H": 128, "H_kv": 1, "D": 128},
    target=(bars.fraction("rope_tiled", 0.85, dtype="bfloat16", **SIZES["bench_size"]),),
    peers={"liger": liger_rope, "flashinfer": flashinfer_rope},
    suspects={
        "interleaved pairing": lambda q, k, c, p: (interleaved(q, c, p), interleaved(k, c, p)),
        "wrong sign": lambda q, k, c, p: reference(q, k, minus(c), p),
        "cos and sin swapped": lambda q, k, c, p: reference(q, k, c.roll(c.shape[1] // 2, 1), p),
        "position off by one": lambda q, k, c, p: reference(q, k, c, p + 1),
        "row used as position": lambda q, k, c, p: reference(q, k, c, row_of(q)),
        "wrong GQA head map": lambda q, k, c, p: reference(q, shared(k, q.shape[1]), c, p),
        "k is not rotated": lambda q, k, c, p: (reference(q, k, c, p)[0], k),
        "swaps the halves": lambda q, k, c, p: tuple(
            x.roll(x.shape[2] // 2, 2) for x in reference(q, k, c, p)
        ),
    },
    properties=(
        lab.Property("angles come from the table", "does not read cos_sin", another_table),
        lab.Property("position 0 changes nothing", "position off by one", position_zero),
        lab.Property("a rotation keeps norms", "not a rotation", keeps_norms),
        lab.Property("scores depend on distance only", "q and k turned differently", relative),
        lab.Property(
            "bf16 is rounded where Transformers rounds it",
            "wrong cast order",
            casts_like(library, inputs),
            dtypes=(torch.bfloat16,),
        ),
    ),
)


def cache_inputs(
    dtype: torch.dtype, seed: int = 0, *, T: int, H: int, H_kv: int, D: int
) -> tuple[Tensor, ...]:
    """Normal q, k, v and caches; weights 1 + normal/10; a slot for each token, never the last."""
    S = T + T // 4 + 2  # more slots than tokens: what the others hold must survive
    tokens, cache = (T, H_kv, D), (S, H_kv, D)
    q, k, v, q_weight, k_weight, k_cache, v_cache = lab.randn(
        (T, H, D), tokens, tokens, (D,), (D,), cache, cache, dtype=dtype, seed=seed
    )
    slots = torch.randperm(S - 1, generator=torch.Generator("cpu").manual_seed(seed))[:T]
    table, positions = cos_sin_table(2 * T + 2, D), draw(2 * T + 1, T, seed)
    weights = 1 + 0.1 * q_weight, 1 + 0.1 * k_weight
    return q, k, v, *weights, table, positions, k_cache, v_cache, slots.to(lab.DEVICE.torch)


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """Transformers' Qwen3RMSNorm over the last dimension, in float32 or better."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def stored(q, k, v, k_cache, v_cache, slots) -> tuple[Tensor, Tensor, Tensor]:
    """q, and the caches with k and v of token t written into slot slots[t]."""
    return q, k_cache.index_copy_(0, slots, k), v_cache.index_copy_(0, slots, v)


def cache_reference(q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots):
    """Norm, rotation, slots."""
    q, k = reference(norm(q, q_weight), norm(k, k_weight), cos_sin, positions)
    return stored(q, k, v, k_cache, v_cache, slots)


def cache_library(q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots):
    """Transformers' operations: q_norm, k_norm, apply_rotary_pos_emb, cache update, one by one."""
    q, k = library(norm(q, q_weight), norm(k, k_weight), cos_sin, positions)
    return stored(q, k, v, k_cache, v_cache, slots)


def run_apart(q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots):
    """Chapter 03's norm twice, rung 4, torch's copy twice: five kernels."""
    from solutions.rms_norm import rms_norm

    q_norm = rms_norm(q.flatten(0, 1), q_weight, EPS).view(q.shape)
    k_norm = rms_norm(k.flatten(0, 1), k_weight, EPS).view(k.shape)
    q, k = rope_tiled(q_norm, k_norm, cos_sin, positions)
    return stored(q, k, v, k_cache, v_cache, slots)


def flashinfer_apart(q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots):
    """FlashInfer's norm twice and its rope, torch's copy twice."""
    from flashinfer.norm import rmsnorm

    q_norm = rmsnorm(q.flatten(0, 1), q_weight, EPS).view(q.shape)
    k_norm = rmsnorm(k.flatten(0, 1), k_weight, EPS).view(k.shape)
    q, k = flashinfer_rope(q_norm, k_norm, cos_sin, positions)
    return stored(q, k, v, k_cache, v_cache, slots)


def of_four_tokens(slots=(0, 1, 2, 3), rooms: list[Tensor] | None = None) -> tuple:
    """Arguments with caches of seven slots, which lie inside `rooms` and hold 9."""
    args = cache_inputs(torch.float32, seed=1, T=4, H=4, H_kv=2, D=16)
    caches = (room[1:-1] for room in rooms or rooms_of_nine())
    return *args[:7], *caches, torch.tensor(slots, device=args[0].device)


def rooms_of_nine() -> list[Tensor]:
    """Slot -1 would be the row before the cache: it belongs to the same allocation."""
    return [torch.full((9, 2, 16), 9.0, device=lab.DEVICE.torch) for _ in range(2)]


def tokens_may_lie_apart(kernel) -> str | None:
    """q, k and v each have a stride of their own. A clear refusal is right."""
    wanted = kernel(*of_four_tokens())
    args = of_four_tokens()
    # Other heads lie between, as in the output of a fused projection.
    views = (
        torch.cat((x, x.new_zeros(4, more, 16)), dim=1)[:, : x.shape[1]]
        for x, more in zip(args[:3], (1, 2, 4), strict=True)
    )
    try:
        got = kernel(*views, *args[3:])
    except ValueError:
        return None
    for name, g, want in zip(("q", "k_cache", "v_cache"), got, wanted, strict=True):
        if not torch.equal(g, want):
            return f"{name} is not what it is where tokens follow each other without a gap"
    return None


def skipped_token_has_q(kernel) -> str | None:
    """Slot -1 says that k and v are not kept. Attention still needs q."""
    wanted = kernel(*of_four_tokens())[0]
    got = kernel(*of_four_tokens([5, -1, 2, 3]))[0]
    wrong = (got != wanted).flatten(1).any(dim=1).nonzero().flatten().tolist()
    return f"slots 5, -1, 2, 3: the q of tokens {wrong} are others" if wrong else None


def writes_its_slots_only(kernel) -> str | None:
    """A token's slot is written, -1 writes nothing, all else stays; q is in `out`, if given."""
    slots = [5, -1, 2, 3]
    wanted_q, k_rows, v_rows = kernel(*of_four_tokens())
    rooms = rooms_of_nine()
    wanted = [room.clone() for room in rooms]
    given = {"out": torch.empty_like(wanted_q)}
    if "out" not in inspect.signature(kernel).parameters:
        given = {}
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[0][1 + slot], wanted[1][1 + slot] = k_rows[token], v_rows[token]
    got = kernel(*of_four_tokens(slots, rooms), **given)
    if not torch.equal(given.get("out", got[0]), wanted_q):
        return "q is not in the output that was given"
    for name, room, want in zip(("k_cache", "v_cache"), rooms, wanted, strict=True):
        wrong = (room != want).flatten(1).any(dim=1).nonzero().flatten() - 1
        if len(wrong):
            return f"slots {slots} of 7: wrong in {name}, slots {wrong.tolist()}"
    return None


def of_cache(change):
    """A suspect: the right result for changed arguments."""
    return lambda *args: cache_reference(*change(*args))


def norm_after_rope(q, k, v, qw, kw, cos_sin, positions, k_cache, v_cache, slots):
    """The rotation first, then the norm."""
    q, k = reference(q, k, cos_sin, positions)
    q, k = norm(q, qw), norm(k, kw)
    return stored(q, k, v, k_cache, v_cache, slots)


def leaves(i: int):
    """A suspect: output i, a cache, stays as it was."""

    def formula(*args):
        before = args[6 + i].clone()
        got = cache_reference(*args)
        return *got[:i], before, *got[i + 1 :]

    return formula


def k_without_norm(q, k, v, qw, kw, cos_sin, positions, *rest):
    """The rotation alone, for k."""
    q, k = reference(norm(q, qw), k, cos_sin, positions)
    return stored(q, k, v, *rest)


def k_without_rotation(q, k, v, qw, kw, cos_sin, positions, *rest):
    """The norm alone, for k."""
    q, _ = reference(norm(q, qw), k, cos_sin, positions)
    return stored(q, norm(k, kw), v, *rest)


QK_NORM_ROPE_CACHE = lab.Problem(
    name="qk_norm_rope_cache",
    inputs=cache_inputs,
    reference=cache_reference,
    library=cache_library,
    work=lambda dtype, T, H, H_kv, D: lab.Work(
        bytes=2 * (T * (H + 2 * H_kv) + 1) * D * dtype.itemsize + T * (4 * D + 16),
        flops=7 * T * (H + H_kv) * D,
    ),
    terms=lambda T, H, H_kv, D: D,
    mutates=("k_cache", "v_cache"),
    **SIZES,
    huge_size={"T": 2**17 + 1, "H": 128, "H_kv": 128, "D": 128},
    target=tuple(
        bars.ratio(
            "qk_norm_rope_cache_fused", "norm, rope, copy apart", 0.5, dtype="bfloat16", **size
        )
        for size in (SIZES["bench_size"], {**SIZES["bench_size"], "T": 1})
    ),
    peers={"norm, rope, copy apart": run_apart, "flashinfer apart": flashinfer_apart},
    suspects={
        "norm after rope": norm_after_rope,
        "forgets the q weight": of_cache(lambda q, k, v, qw, *rest: (q, k, v, 0 * qw + 1, *rest)),
        "forgets the k weight": of_cache(
            lambda q, k, v, qw, kw, *rest: (q, k, v, qw, 0 * kw + 1, *rest)
        ),
        "norms k with q's weight": of_cache(
            lambda q, k, v, qw, kw, *rest: (q, k, v, qw, qw, *rest)
        ),
        "slot off by one": of_cache(lambda *args: (*args[:9], args[9] + 1)),
        "ignores slot_mapping": of_cache(lambda *args: (*args[:9], row_of(args[0]))),
        "position off by one": of_cache(lambda *args: (*args[:6], args[6] + 1, *args[7:])),
        "row used as position": of_cache(lambda *args: (*args[:6], row_of(args[0]), *args[7:])),
        "k is not normed": k_without_norm,
        "k is not rotated": k_without_rotation,
        "does not write k_cache": leaves(1),
        "does not write v_cache": leaves(2),
        "wrong sign": of_cache(lambda *args: (*args[:5], minus(args[5]), *args[6:])),
        "wrong GQA head map": of_cache(lambda q, k, *rest: (q, shared(k, q.shape[1]), *rest)),
        "rotates v": of_cache(
            lambda q, k, v, qw, kw, c, p, *rest: (
                *(q, k, reference(v, v, c, p)[0], qw, kw, c, p),
                *rest,
            )
        ),
        "swaps k and v": lambda *args: tuple(
            cache_reference(*args[:7], args[8], args[7], args[9])[i] for i in (0, 2, 1)
        ),
    },
    properties=(
        lab.Property("tokens may lie apart", "ignores a stride", tokens_may_lie_apart),
        lab.Property("a skipped token has a q", "skips q, too", skipped_token_has_q),
        lab.Property("slot -1 is skipped", "writes skipped tokens", writes_its_slots_only),
        lab.Property(
            "bf16 is rounded where Transformers rounds it",
            "wrong cast order",
            casts_like(cache_library, cache_inputs),
            dtypes=(torch.bfloat16,),
        ),
    ),
)


def check_args(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[int, int, int, int]:
    """What every rung needs; returns T, H, H_kv and D."""
    lab.check_tensors(q=q, k=k)
    lab.check_tensors(dtypes=(torch.float32,), like=q, cos_sin=cos_sin)
    lab.check_tensors(dtypes=INTS, like=q, positions=positions)
    if q.ndim != 3 or q.shape[2] % 2 or 0 in q.shape[1:]:
        raise ValueError(f"q has shape {tuple(q.shape)}, must be [T, H, D] with an even D")
    T, H, D = q.shape
    if k.ndim != 3 or (k.shape[0], k.shape[2]) != (T, D) or k.shape[1] == 0:
        raise ValueError(f"k has shape {tuple(k.shape)}, must be ({T}, H_kv, {D}) to go with q")
    if cos_sin.ndim != 2 or cos_sin.shape[1] != D:
        raise ValueError(f"cos_sin has shape {tuple(cos_sin.shape)}, must be (P, {D})")
    if positions.shape != (T,):
        raise ValueError(f"positions has shape {tuple(positions.shape)}, must be ({T},)")
    if H % k.shape[1]:
        raise ValueError(f"{H=} heads of q are no multiple of H_kv={k.shape[1]} heads of k")
    return T, H, k.shape[1], D


def check_heads(**tensors: Tensor) -> None:
    """ValueError where the heads of a token do not lie one after another; tokens may be apart."""
    for name, t in tensors.items():
        _, heads, D = t.shape
        if (D > 1 and t.stride(2) != 1) or (heads > 1 and t.stride(1) != D):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)} and strides {t.stride()}, must have its heads "
                f"one after another: pass {name}.contiguous()"
            )


def check_cache_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """What rung 5 needs besides; q and k have been through check_args."""
    T, H_kv, D = k.shape
    lab.check_tensors(
        q=q, v=v, q_weight=q_weight, k_weight=k_weight, k_cache=k_cache, v_cache=v_cache, out=out
    )
    lab.check_tensors(dtypes=INTS, like=q, slot_mapping=slot_mapping)
    wanted = {
        "v": (v, k.shape),
        "q_weight": (q_weight, (D,)),
        "k_weight": (k_weight, (D,)),
        "slot_mapping": (slot_mapping, (T,)),
        "k_cache": (k_cache, (*k_cache.shape[:1], H_kv, D)),
        "v_cache": (v_cache, k_cache.shape),
        "out": (out, q.shape),
    }
    for name, (t, shape) in wanted.items():
        if t.shape != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, must be {tuple(shape)}")
    if not isinstance(eps, (int, float)):
        raise TypeError(f"eps is a {type(eps).__name__}, must be a number")
    if not 0 < eps < math.inf:
        raise ValueError(f"{eps=} must be positive: a head of zeros would be divided by zero")
    check_heads(q=q, k=k, v=v)
    lab.check_contiguous(
        q_weight=q_weight, k_weight=k_weight, slot_mapping=slot_mapping, out=out,
        k_cache=k_cache, v_cache=v_cache,
    )  # fmt: skip
    lab.check_apart(out=out, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    lab.check_apart(k_cache=k_cache, v_cache=v_cache, q=q, k=k, v=v)
    lab.check_apart(v_cache=v_cache, q=q, k=k, v=v)


def check_range(validate: bool, **tables: tuple[Tensor, int, int]) -> None:
    """ValueError for a number outside lowest … end - 1 in one of name=(numbers, lowest, end).

    Numbers in the GPU's memory are read only if `validate`: that waits for the GPU.
    """
    for name, (numbers, lowest, end) in tables.items():
        if numbers.numel() == 0 or (numbers.is_cuda and not validate):
            continue
        for value in (int(numbers.min()), int(numbers.max())):
            if not lowest <= value < end:
                raise ValueError(f"{name} holds {value}, must lie in {lowest} … {end - 1}")


# Rung 1 --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rounded(value, y):
    """`value`, a float32, in the element type of y. The simulators run float32 only."""
    if SIMULATED:  # numba drops the branch that it does not take
        return value
    return y.dtype.type(value)


@cuda.jit
def rope_naive_kernel(q, k, cos_sin, positions, q_out, k_out):
    """Thread t turns one pair of one head of token t % T; the heads of q come before those of k."""
    T, H, D = q.shape
    half = D // 2
    t = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    token, rest = t % T, t // T
    i, head = rest % half, rest // half
    if head < H + k.shape[1]:
        p = positions[token]
        cos = float32(rounded(cos_sin[p, i], q))
        sin = float32(rounded(cos_sin[p, i + half], q))
        if head < H:
            x1, x2 = float32(q[token, head, i]), float32(q[token, head, i + half])
        else:
            x1, x2 = float32(k[token, head - H, i]), float32(k[token, head - H, i + half])
        # Transformers rounds each product, then their sum.
        y1 = rounded(float32(rounded(x1 * cos, q)) - float32(rounded(x2 * sin, q)), q)
        y2 = rounded(float32(rounded(x2 * cos, q)) + float32(rounded(x1 * sin, q)), q)
        if head < H:
            q_out[token, head, i] = y1
            q_out[token, head, i + half] = y2
        else:
            k_out[token, head - H, i] = y1
            k_out[token, head - H, i + half] = y2


def rope_naive(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One thread per pair, neighbouring threads a token apart; each looks its angle up."""
    T, H, H_kv, D = check_args(q, k, cos_sin, positions)
    check_range(False, positions=(positions, 0, len(cos_sin)))
    q_out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    k_out = torch.empty((T, H_kv, D), dtype=q.dtype, device=q.device)
    pairs = T * (H + H_kv) * D // 2
    if pairs > 0:
        blocks = (pairs + THREADS - 1) // THREADS
        rope_naive_kernel[blocks, THREADS, lab.stream()](q, k, cos_sin, positions, q_out, k_out)
    return q_out, k_out


# Rung 2 --------------------------------------------------------------------------------------


@cuda.jit
def rope_coalesced_kernel(q, k, cos_sin, positions, q_out, k_out):
    """Block `token` turns all heads of one token; thread tx turns pair tx of each."""
    H, D = q.shape[1], q.shape[2]
    half = D // 2
    token = cuda.blockIdx.x
    tx = cuda.threadIdx.x
    i, j = tx, tx + half  # the two elements of the pair
    p = positions[token]
    cos = float32(rounded(cos_sin[p, tx], q))  # once for all heads
    sin = float32(rounded(cos_sin[p, half + tx], q))
    for head in range(H + k.shape[1]):
        if head < H:  # the whole block takes the same side
            x1, x2 = float32(q[token, head, i]), float32(q[token, head, j])
        else:
            x1, x2 = float32(k[token, head - H, i]), float32(k[token, head - H, j])
        y1 = rounded(float32(rounded(x1 * cos, q)) - float32(rounded(x2 * sin, q)), q)
        y2 = rounded(float32(rounded(x2 * cos, q)) + float32(rounded(x1 * sin, q)), q)
        if head < H:
            q_out[token, head, i] = y1
            q_out[token, head, j] = y2
        else:
            k_out[token, head - H, i] = y1
            k_out[token, head - H, j] = y2


def rope_coalesced(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """One block per token: neighbours read neighbours, and an angle serves every head."""
    T, H, H_kv, D = check_args(q, k, cos_sin, positions)
    check_range(False, positions=(positions, 0, len(cos_sin)))
    if D // 2 > MAX_PAIRS:
        raise ValueError(
            f"{D=} must be at most {2 * MAX_PAIRS}: a block has a thread for each pair"
        )
    q_out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    k_out = torch.empty((T, H_kv, D), dtype=q.dtype, device=q.device)
    if T > 0:
        rope_coalesced_kernel[T, D // 2, lab.stream()](q, k, cos_sin, positions, q_out, k_out)
    return q_out, k_out


# Rung 3 --------------------------------------------------------------------------------------

VECTORIZED = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// W elements: with 16 bytes, the compiler loads and stores a Pack with one instruction.
template <typename T, int W> struct alignas(sizeof(T) * W) Pack { T v[W]; };

// Block `token` turns one token. Thread (x, y) turns W pairs of the heads y, y + blockDim.y, ...
template <typename T, typename P, int W>
__global__ void rope_vectorized_kernel(
    const T* __restrict__ q, const T* __restrict__ k, const float* __restrict__ cos_sin,
    const P* __restrict__ positions, T* __restrict__ q_out, T* __restrict__ k_out,
    int H, int H_kv, int D) {
    const int half = D / 2, i = threadIdx.x * W;
    if (i >= half) return;
    const long long token = blockIdx.x;
    const float* angle = cos_sin + (long long)positions[token] * D + i;
    float cos[W], sin[W];
    #pragma unroll
    for (int j = 0; j < W; ++j) {
        cos[j] = (float)T(angle[j]);
        sin[j] = (float)T(angle[half + j]);
    }
    for (int head = threadIdx.y; head < H + H_kv; head += blockDim.y) {
        const long long at =
            (head < H ? token * H + head : token * H_kv + head - H) * D + i;
        const T* x = (head < H ? q : k) + at;
        T* y = (head < H ? q_out : k_out) + at;
        Pack<T, W> x1 = *reinterpret_cast<const Pack<T, W>*>(x);
        Pack<T, W> x2 = *reinterpret_cast<const Pack<T, W>*>(x + half);
        #pragma unroll
        for (int j = 0; j < W; ++j) {
            const float a = (float)x1.v[j], b = (float)x2.v[j];
            x1.v[j] = T((float)T(a * cos[j]) - (float)T(b * sin[j]));
            x2.v[j] = T((float)T(b * cos[j]) + (float)T(a * sin[j]));
        }
        *reinterpret_cast<Pack<T, W>*>(y) = x1;
        *reinterpret_cast<Pack<T, W>*>(y + half) = x2;
    }
}
"""
CPP_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.int32: "int",
    torch.int64: "long long",
}
VECTORIZED_KERNELS = {
    (x, p, w): lab.cuda_kernel(
        VECTORIZED, f"rope_vectorized_kernel<{CPP_TYPES[x]}, {CPP_TYPES[p]}, {w}>"
    )
    for x in SIZES["dtypes"]
    for p in INTS
    for w in (1, VECTOR_BYTES // x.itemsize)
}


def rope_vectorized(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Sixteen bytes a load: a thread takes eight neighbours at once, in the block of rung 2."""
    T, H, H_kv, D = check_args(q, k, cos_sin, positions)
    check_range(False, positions=(positions, 0, len(cos_sin)))
    lab.check_contiguous(q=q, k=k, cos_sin=cos_sin, positions=positions)
    for name, x in (("q", q), ("k", k)):
        late = x.data_ptr() % VECTOR_BYTES
        if late:
            raise ValueError(f"{name} starts {late} bytes after a multiple of 16: clone it")
    if D // 2 > MAX_PAIRS:
        raise ValueError(
            f"{D=} must be at most {2 * MAX_PAIRS}: a block has a thread for each pair"
        )
    q_out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    k_out = torch.empty((T, H_kv, D), dtype=q.dtype, device=q.device)
    if T > 0:
        wide = VECTOR_BYTES // q.itemsize
        W = wide if D % (2 * wide) == 0 else 1  # a head of another size has no whole packs
        kernel = VECTORIZED_KERNELS[q.dtype, positions.dtype, W]
        heads = np.int32(H), np.int32(H_kv), np.int32(D)
        kernel[T, D // 2](q, k, cos_sin, positions, q_out, k_out, *heads)
    return q_out, k_out


# Rung 4 --------------------------------------------------------------------------------------


def warps(T: int, elements: int) -> int:
    """Warps of a program that holds one of T tokens, of `elements` elements."""
    # Work that fits on the chip at once is spread thin: a short chain of instructions per thread.
    # Under four warps, the table's row takes a detour through shared memory.
    lanes = elements // (THIN if T * elements <= ONE_WAVE else THICK)
    return min(triton.next_power_of_2(max(lanes, 4 * 32)) // 32, 16)


@triton.jit
def turned(x1, x2, cos, sin):
    """The pairs (x1, x2), turned; rounds cos, sin, the products and the sums to the type of x."""
    cos = cos.to(x1.dtype).to(tl.float32)[None, :]
    sin = sin.to(x1.dtype).to(tl.float32)[None, :]
    a, b = x1.to(tl.float32), x2.to(tl.float32)
    a_cos, a_sin = (a * cos).to(x1.dtype), (a * sin).to(x1.dtype)
    b_cos, b_sin = (b * cos).to(x1.dtype), (b * sin).to(x1.dtype)
    y1 = (a_cos.to(tl.float32) - b_sin.to(tl.float32)).to(x1.dtype)
    y2 = (b_cos.to(tl.float32) + a_sin.to(tl.float32)).to(x1.dtype)
    return y1, y2


@triton.jit
def rope_tiled_kernel(
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_q,
    stride_k,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_KV: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Program `token` turns one token: tiles [HEADS, PAIRS] of q and of k, half by half."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)  # in 32 bits, offsets would wrap at 2³¹ elements
    position = tl.load(positions_ptr + token).to(tl.int64)
    offs_h, offs_h_kv, offs_i = tl.arange(0, HEADS), tl.arange(0, HEADS_KV), tl.arange(0, PAIRS)
    mask_i = offs_i < HALF
    mask_q = (offs_h < H)[:, None] & mask_i[None, :]
    mask_k = (offs_h_kv < H_KV)[:, None] & mask_i[None, :]
    offs_q = offs_h[:, None] * D + offs_i[None, :]
    offs_k = offs_h_kv[:, None] * D + offs_i[None, :]
    # q and k do not wait for the position; the table's row does.
    q1 = tl.load(q_ptr + token * stride_q + offs_q, mask=mask_q)
    q2 = tl.load(q_ptr + token * stride_q + offs_q + HALF, mask=mask_q)
    k1 = tl.load(k_ptr + token * stride_k + offs_k, mask=mask_k)
    k2 = tl.load(k_ptr + token * stride_k + offs_k + HALF, mask=mask_k)
    cos = tl.load(cos_sin_ptr + position * D + offs_i, mask=mask_i)
    sin = tl.load(cos_sin_ptr + position * D + offs_i + HALF, mask=mask_i)
    q1, q2 = turned(q1, q2, cos, sin)
    k1, k2 = turned(k1, k2, cos, sin)
    tl.store(q_out_ptr + token * H * D + offs_q, q1, mask=mask_q)
    tl.store(q_out_ptr + token * H * D + offs_q + HALF, q2, mask=mask_q)
    tl.store(k_out_ptr + token * H_KV * D + offs_k, k1, mask=mask_k)
    tl.store(k_out_ptr + token * H_KV * D + offs_k + HALF, k2, mask=mask_k)


def rope_tiled(
    q: Queries, k: Keys, cos_sin: Table, positions: Tokens, *, validate: bool = False
) -> tuple[Queries, Keys]:
    """The right block: a tile of all heads of a token, cut so that every lane has its share.

    TypeError or ValueError for arguments of another form. Tokens of q and k may lie apart, as in a
    fused projection's output. A position past the table is undefined on a GPU, a ValueError with
    `validate` (which waits for the GPU) and under the simulators.
    """
    T, H, H_kv, D = check_args(q, k, cos_sin, positions)
    check_heads(q=q, k=k)
    lab.check_contiguous(cos_sin=cos_sin, positions=positions)
    check_range(validate, positions=(positions, 0, len(cos_sin)))
    q_out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    k_out = torch.empty((T, H_kv, D), dtype=q.dtype, device=q.device)
    if T > 0:
        rope_tiled_kernel[(T,)](
            *(q, k, cos_sin, positions, q_out, k_out),
            *(q.stride(0), k.stride(0)),
            H=H,
            H_KV=H_kv,
            D=D,
            HEADS=triton.next_power_of_2(H),
            HEADS_KV=triton.next_power_of_2(H_kv),
            PAIRS=triton.next_power_of_2(D // 2),
            num_warps=warps(T, (H + H_kv) * D),
            enable_fp_fusion=EACH_ROUNDED,
        )
    return q_out, k_out


# Rung 5 --------------------------------------------------------------------------------------


@triton.jit
def normed(x1, x2, w1, w2, eps, D: tl.constexpr):
    """RMSNorm of heads given as two halves; rounds before the weight, and again in the product."""
    h1, h2 = x1.to(tl.float32), x2.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h1 * h1 + h2 * h2, axis=1) / D + eps)[:, None]
    return w1[None, :] * (h1 * rstd).to(x1.dtype), w2[None, :] * (h2 * rstd).to(x1.dtype)


@triton.jit
def qk_norm_rope_cache_fused_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    stride_q,
    stride_k,
    stride_v,
    eps,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_KV: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Program `token` norms and turns q and k of one token, and puts k and v into its slot."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    offs_h, offs_h_kv, offs_i = tl.arange(0, HEADS), tl.arange(0, HEADS_KV), tl.arange(0, PAIRS)
    mask_i = offs_i < HALF
    mask_q = (offs_h < H)[:, None] & mask_i[None, :]
    mask_k = (offs_h_kv < H_KV)[:, None] & mask_i[None, :]
    offs_q = offs_h[:, None] * D + offs_i[None, :]
    offs_k = offs_h_kv[:, None] * D + offs_i[None, :]
    # All loads are issued before the first use; masked lanes add nothing to a sum of squares.
    q1 = tl.load(q_ptr + token * stride_q + offs_q, mask=mask_q, other=0.0)
    q2 = tl.load(q_ptr + token * stride_q + offs_q + HALF, mask=mask_q, other=0.0)
    k1 = tl.load(k_ptr + token * stride_k + offs_k, mask=mask_k, other=0.0)
    k2 = tl.load(k_ptr + token * stride_k + offs_k + HALF, mask=mask_k, other=0.0)
    v1 = tl.load(v_ptr + token * stride_v + offs_k, mask=mask_k)
    v2 = tl.load(v_ptr + token * stride_v + offs_k + HALF, mask=mask_k)
    qw1 = tl.load(q_weight_ptr + offs_i, mask=mask_i)
    qw2 = tl.load(q_weight_ptr + offs_i + HALF, mask=mask_i)
    kw1 = tl.load(k_weight_ptr + offs_i, mask=mask_i)
    kw2 = tl.load(k_weight_ptr + offs_i + HALF, mask=mask_i)
    cos = tl.load(cos_sin_ptr + position * D + offs_i, mask=mask_i)
    sin = tl.load(cos_sin_ptr + position * D + offs_i + HALF, mask=mask_i)
    q1, q2 = normed(q1, q2, qw1, qw2, eps, D)
    k1, k2 = normed(k1, k2, kw1, kw2, eps, D)
    q1, q2 = turned(q1, q2, cos, sin)
    k1, k2 = turned(k1, k2, cos, sin)
    tl.store(q_out_ptr + token * H * D + offs_q, q1, mask=mask_q)
    tl.store(q_out_ptr + token * H * D + offs_q + HALF, q2, mask=mask_q)
    if slot >= 0:  # a padded token has slot -1: nothing to keep
        row = slot * H_KV * D
        tl.store(k_cache_ptr + row + offs_k, k1, mask=mask_k)
        tl.store(k_cache_ptr + row + offs_k + HALF, k2, mask=mask_k)
        tl.store(v_cache_ptr + row + offs_k, v1, mask=mask_k)
        tl.store(v_cache_ptr + row + offs_k + HALF, v2, mask=mask_k)


def qk_norm_rope_cache_fused(
    q: Queries,
    k: Keys,
    v: Keys,
    q_weight: Gain,
    k_weight: Gain,
    cos_sin: Table,
    positions: Tokens,
    k_cache: Cache,
    v_cache: Cache,
    slot_mapping: Tokens,
    eps: float = EPS,
    *,
    out: Queries | None = None,
    validate: bool = False,
) -> tuple[Queries, Cache, Cache]:
    """Norm, rotation and cache write while a token is in registers: q, k and v move once.

    Writes k and v of token t into row slot_mapping[t] of the caches, in place; -1 skips a token,
    and no other row changes. Returns (q, k_cache, v_cache): q is `out`, if given.

    TypeError or ValueError for arguments of another form. Tokens of q, k and v may lie apart, as
    in a fused projection's output. A position past the table or a slot past the cache is undefined
    on a GPU, a ValueError with `validate` (which waits for the GPU) and under the simulators.
    """
    T, H, H_kv, D = check_args(q, k, cos_sin, positions)
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device) if out is None else out
    check_cache_args(q, k, v, q_weight, k_weight, k_cache, v_cache, slot_mapping, eps, out)
    lab.check_contiguous(cos_sin=cos_sin, positions=positions)
    slots = slot_mapping, -1, len(k_cache)
    check_range(validate, positions=(positions, 0, len(cos_sin)), slot_mapping=slots)
    if T > 0:
        qk_norm_rope_cache_fused_kernel[(T,)](
            *(q, k, v, q_weight, k_weight, cos_sin, positions, slot_mapping),
            *(out, k_cache, v_cache),
            *(q.stride(0), k.stride(0), v.stride(0), eps),
            H=H,
            H_KV=H_kv,
            D=D,
            HEADS=triton.next_power_of_2(H),
            HEADS_KV=triton.next_power_of_2(H_kv),
            PAIRS=triton.next_power_of_2(D // 2),
            num_warps=warps(T, (H + 2 * H_kv) * D),
            enable_fp_fusion=EACH_ROUNDED,
        )
    return out, k_cache, v_cache


# Mutants -------------------------------------------------------------------------------------

COALESCED = lab.Exercise(
    "rope_coalesced",
    "rope_coalesced_kernel",
    hints=(
        "A block has one token and a thread for each pair: thread tx has the elements tx and "
        "tx + D/2 of every head, the halves of a pair.",
        "The angle depends on the token's position and on tx, not on the head. positions[token] "
        "says which row of cos_sin to read: D/2 cosines, then D/2 sines. Read them once.",
        "Loop over H heads of q and then H_kv heads of k: k has its own heads, and fewer.",
        "y1 = x1·cos - x2·sin and y2 = x2·cos + x1·sin. Pass cos, sin, each product and each sum "
        "through rounded(…, q), and compute in float32 in between.",
    ),
    mutants=(
        lab.Mutant(
            "interleaved",
            "interleaved pairing",
            {"i, j = tx, tx + half": "i, j = 2 * tx, 2 * tx + 1"},
        ),
        lab.Mutant(
            "sign",
            "wrong sign",
            {"sin = float32(rounded(": "sin = -float32(rounded("},
        ),
        lab.Mutant(
            "swapped",
            "cos and sin swapped",
            {"[p, tx]": "[p, half - -tx]", "[p, half + tx]": "[p, tx]"},
        ),
        lab.Mutant("position", "position off by one", {"positions[token]": "positions[token] + 1"}),
        lab.Mutant("row", "row used as position", {"p = positions[token]": "p = token"}),
        lab.Mutant(
            "gqa",
            "wrong GQA head map",
            {
                "x1, x2 = float32(k[token, head - H, i]), float32(k[token, head - H, j])": (
                    "x1 = float32(k[token, (head - H) * k.shape[1] // H, i])\n"
                    "            x2 = float32(k[token, (head - H) * k.shape[1] // H, j])"
                )
            },
        ),
        lab.Mutant("q_heads", "missing tail guard", {"range(H + k.shape[1])": "range(H + H)"}),
    ),
)

SLOT = "slot = tl.load(slot_mapping_ptr + token).to(tl.int64)"
NORMS = (
    "    q1, q2 = normed(q1, q2, qw1, qw2, eps, D)\n    k1, k2 = normed(k1, k2, kw1, kw2, eps, D)\n"
)
TURNS = "    q1, q2 = turned(q1, q2, cos, sin)\n    k1, k2 = turned(k1, k2, cos, sin)\n"
FUSED = lab.Exercise(
    "qk_norm_rope_cache_fused",
    "qk_norm_rope_cache_fused_kernel",
    hints=(
        "Load q and k as in rung 4, v at `token * stride_v` with k's `offs_k`, and both weights by "
        "halves. Masked lanes of q and k must hold zeros: a sum of squares runs over them.",
        "normed(x1, x2, w1, w2, eps, D) and turned(x1, x2, cos, sin) do the arithmetic. Which "
        "comes first? Qwen stores the norm's result, then rotates it.",
        "A cache row holds the H_KV heads of one token: row `slot` begins slot·H_KV·D elements in. "
        "Where slot is -1, nothing may be stored to either cache. q is stored all the same. `slot` "
        "is one number, so a plain `if slot >= 0:` round the stores will do.",
    ),
    mutants=(
        lab.Mutant("norm_last", "norm after rope", {NORMS + TURNS: TURNS + NORMS}),
        lab.Mutant(
            "no_q_weight",
            "forgets the q weight",
            {"normed(q1, q2, qw1, qw2,": "normed(q1, q2, 0 * qw1 + 1, 0 * qw2 + 1,"},
        ),
        lab.Mutant(
            "q_weight_twice",
            "norms k with q's weight",
            {"normed(k1, k2, kw1, kw2,": "normed(k1, k2, qw1, qw2,"},
        ),
        lab.Mutant(
            "next_slot",
            "slot off by one",
            {SLOT: "slot = 1 + tl.load(slot_mapping_ptr + token)"},
        ),
        lab.Mutant(
            "no_slots",
            "ignores slot_mapping",
            {SLOT: "slot = token"},
        ),
        lab.Mutant("no_skip", "writes skipped tokens", {"if slot >= 0:": "if slot >= -1:"}),
        lab.Mutant(
            "stride",
            "ignores a stride",
            {
                "v1 = tl.load(v_ptr + token * stride_v": "v1 = tl.load(v_ptr + token * stride_k",
                "v2 = tl.load(v_ptr + token * stride_v": "v2 = tl.load(v_ptr + token * stride_k",
            },
        ),
        lab.Mutant(
            "cache_stride", "ignores a stride", {"row = slot * H_KV * D": "row = slot * stride_k"}
        ),
        lab.Mutant(
            "early_end",
            "skips q, too",
            {"    mask_q = (": "    if slot < 0:\n        return\n    mask_q = ("},
        ),
        lab.Mutant("sign", "wrong sign", {"sin = tl.load(": "sin = -tl.load("}),
        lab.Mutant(
            "position",
            "position off by one",
            {"position = tl.load(": "position = 1 + tl.load("},
        ),
    ),
)

# Attempts not kept ---------------------------------------------------------------------------


def rope_vectorized_filled(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rung 3's kernel in a block with a thread for each pack of each head; whole packs only."""
    T, H, H_kv, D = check_args(q, k, cos_sin, positions)
    lab.check_contiguous(q=q, k=k, cos_sin=cos_sin, positions=positions)
    W = VECTOR_BYTES // q.itemsize
    packs = D // (2 * W)  # in half a head
    if D % (2 * W) or packs * (H + H_kv) > 1024 or T == 0:
        raise ValueError(f"{T=}, {H=}, {H_kv=}, {D=}: a block has a thread for each pack")
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    kernel = VECTORIZED_KERNELS[q.dtype, positions.dtype, W]
    heads = np.int32(H), np.int32(H_kv), np.int32(D)
    kernel[T, (packs, H + H_kv)](q, k, cos_sin, positions, q_out, k_out, *heads)
    return q_out, k_out


def qk_norm_rope_cache_thin(
    q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping
) -> tuple[Tensor, Tensor, Tensor]:
    """Rung 5's kernel with 16 warps for each token, however many tokens there are."""
    T, H, H_kv, D = check_args(q, k, cos_sin, positions)
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    check_cache_args(q, k, v, q_weight, k_weight, k_cache, v_cache, slot_mapping, EPS, out)
    lab.check_contiguous(cos_sin=cos_sin, positions=positions)
    tile = [triton.next_power_of_2(n) for n in (H, H_kv, D // 2)]
    qk_norm_rope_cache_fused_kernel[(T,)](
        *(q, k, v, q_weight, k_weight, cos_sin, positions, slot_mapping),
        *(out, k_cache, v_cache),
        *(q.stride(0), k.stride(0), v.stride(0), EPS),
        *(H, H_kv, D, *tile),
        num_warps=16,
        enable_fp_fusion=EACH_ROUNDED,
    )
    return out, k_cache, v_cache


LADDER = lab.Ladder(
    ROPE,
    (
        lab.Rung(rope_naive, "numba"),
        lab.Rung(rope_coalesced, "numba"),
        lab.Rung(rope_vectorized, "cuda", simulates=False),
        lab.Rung(rope_tiled, "triton"),
        lab.Rung(qk_norm_rope_cache_fused, "triton", problem=QK_NORM_ROPE_CACHE),
    ),
    exercises=(COALESCED, FUSED),
    rejected=(
        lab.Rejected(
            rope_vectorized_filled,
            against="rope_tiled",
            attempt="rung 3's CUDA kernel in the right block: a thread for each pack of each head",
            expected="the same loads as rung 4, and no idle lane: within 3 % either way",
            cause="One thing differs by the compile cards: a thread of this kernel reads its "
            "cosines and sines 4 bytes at a time, 16 loads, and Triton reads them 16 bytes at a "
            "time. Whether that is all was not tested.",
        ),
        lab.Rejected(
            qk_norm_rope_cache_thin,
            against="qk_norm_rope_cache_fused",
            attempt="16 warps for a token instead of 4, so that an SM is full of warps",
            expected="more warps to switch to while one waits: 1 to 5 % less time",
            cause="There are more warps: the compile card's occupancy goes from 62 % to 100 %. But "
            "a thread's share is now so small that its loads shrink from 16 bytes to between "
            "2 and 8, and the norm needs a barrier.",
        ),
    ),
)

# The ops -------------------------------------------------------------------------------------

rope = rope_tiled
qk_norm_rope_cache = qk_norm_rope_cache_fused

_TABLES = "Tensor cos_sin, Tensor positions"
torch.library.custom_op(
    "kernel_ladder::rope",
    rope,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, {_TABLES}) -> (Tensor, Tensor)",
).register_fake(lambda q, k, cos_sin, positions: (q.new_empty(q.shape), k.new_empty(k.shape)))


def into_caches(
    q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, eps=EPS
) -> Tensor:
    """The op returns q alone: one that writes to its inputs may not return them."""
    args = q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, eps
    return qk_norm_rope_cache(*args)[0]


torch.library.custom_op(
    "kernel_ladder::qk_norm_rope_cache",
    into_caches,
    mutates_args=("k_cache", "v_cache"),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, {_TABLES}, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, float eps=1e-6) -> Tensor",
).register_fake(lambda q, *_, **__: q.new_empty(q.shape))
