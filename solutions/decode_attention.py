"""Attention of decoding: one query per sequence against the keys and values of its whole context.

    o[b, h] = Σ_s p[b, h, s] · v[b, s, h']      p[b, h] = softmax_s(q[b, h] · k[b, s, h'] / sqrt(D))
    over the context of b, s = 0 … context_lens[b] - 1, and with h' = h // (H / H_kv)

H / H_kv neighbouring query heads share a head of keys and values (GQA). An empty context gives
zeros. Slots of a cache past the context may hold anything, NaN too.

The caches are chapter 04's: token s of sequence b is row b·S + s of its caches [B·S, H_kv, D], so
`k.flatten(0, 1)` here is `k_cache` there.

Shapes   q [B, H, D]; k, v [B, S, H_kv, D] with S slots for each sequence; context_lens [B] int32,
         on the GPU -> o [B, H, D]
Cost     read the keys and values of every context once: 2·Σ_b context_lens[b]·H_kv·D·itemsize
         bytes, for 4·H / H_kv FLOPs an element of k: bandwidth bound
Source   Dao et al. 2023, pytorch.org/blog/flash-decoding (splits); Milakov & Gimelshein 2018,
         arXiv:1805.02867 (running maximum and sum); Ainslie et al. 2023, arXiv:2305.13245 (GQA)
"""

import labkit as lab
from labkit import bars
from labkit.launch import kernels_of

import inspect
import math
import tempfile
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from numba import config, cuda, float32
from torch import Tensor

THREADS = 32  # threads of a block of rung 1
TILE = 64  # rungs 2 and 3: keys that a program looks at together
SPLIT = 256  # rung 3: keys of a program
WARP = 32
VECTOR_BYTES = 16  # the widest load a thread can issue
LOG2_E = math.log2(math.e)  # exp(x) = 2^(x · log2 e), and the hardware has 2^x only
NEG_INF = -math.inf
LOWEST = tl.constexpr(-1e30)  # below every score, and unlike -inf it can be subtracted from itself
MAX_GROUP = 16  # query heads of a program; their sums must fit in registers
# Rung 4: a thread asks for 4 vectors of keys and 4 of values at once, a program for 32 KiB. Those
# and the round before are the 64 KiB in flight that an SM needs for its share of the bandwidth.
WARPS, UNROLL = 8, 4
LEAST = 32  # keys of a program; below that, merging costs more than it saves
MERGE_UNROLL = 4  # vectors of partial results that a thread asks for at once
# Rung 5: a warp has KEYS keys of a tile, rows of a product on the tensor cores, for up to COLUMNS
# query heads. With 8 warps a tile is 64 KiB; the next is on its way while one is used. Blocks of 4
# warps have two more tiles on their way, of 32 KiB each.
KEYS, COLUMNS = 16, 8
STAGES = {WARPS: 2, WARPS // 2: 3}
MERGED = 8  # parts of a head that a thread asks for at once
HEAD_SIZES = (64, 128)  # that rung 5 is written for
EMPTY = -1  # as a float32 a NaN that no arithmetic gives
MAX_SLOTS = 2**31 - 1  # it counts them in 32 bits
SMS = lab.DEVICE.sms or 132  # compile cards are made without a device, for an H200
SHARED = (lab.DEVICE.shared_bytes or 227 * 1024) - 8 * 1024  # for a ring; the rest is for less
SIMULATED = bool(config.ENABLE_CUDASIM)
Queries, Cache = Float[Tensor, "B H D"], Float[Tensor, "B S H_kv D"]
Lengths = Int32[Tensor, " B"]

# Problem -------------------------------------------------------------------------------------


def lengths(B: int, S: int, ragged: int, seed: int) -> Lengths:
    """Contexts of S tokens; if `ragged`, of 1 to S, the first with all S."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randint(1, S + 1, (B,), generator=generator, dtype=torch.int32)
    return drawn.index_fill_(0, torch.arange(min(B, 1) if ragged else B), S)


def inputs(
    dtype: torch.dtype, seed: int = 0, *, B: int, H: int, H_kv: int, S: int, D: int, ragged: int = 0
) -> tuple[Tensor, ...]:
    """Standard normal q, k and v, past the contexts too: scores are of size one."""
    q, k, v = lab.randn((B, H, D), (B, S, H_kv, D), (B, S, H_kv, D), dtype=dtype, seed=seed)
    return q, k, v, lengths(B, S, ragged, seed).to(lab.DEVICE.torch)


def scores_of(q: Queries, k: Cache, context_lens: Lengths) -> Float[Tensor, "B H_kv G S"]:
    """Scaled products of queries and keys; -inf past the context. G query heads share a kv head."""
    scores = (
        torch.einsum("bhgd,bshd->bhgs", q.unflatten(1, (k.shape[2], -1)), k) * q.shape[2] ** -0.5
    )
    past = torch.arange(k.shape[1], device=k.device) >= context_lens[:, None]  # [B, S]
    return scores.masked_fill(past[:, None, None], -math.inf)


def reference(q: Queries, k: Cache, v: Cache, context_lens: Lengths) -> Queries:
    """The formula, in the dtype it is given: the truth is this in float64."""
    p = torch.softmax(scores_of(q, k, context_lens), dim=3).nan_to_num()  # no keys: zeros
    return torch.einsum("bhgs,bshd->bhgd", p, v).flatten(1, 2)


def library(q: Queries, k: Cache, v: Cache, context_lens: Lengths) -> Queries:
    """SDPA, mask: F.scaled_dot_product_attention with enable_gqa and a mask for the contexts."""
    if q.numel() == 0:
        return torch.empty_like(q)  # on a GPU, SDPA gives None
    inside = torch.arange(k.shape[1], device=k.device) < context_lens[:, None]  # [B, S]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, H_kv, S, D]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q[:, :, None], k, v, attn_mask=inside[:, None, None], enable_gqa=True)[:, :, 0]


# The peers are timed on full caches, and two of them are right for no others.


def full_sdpa(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """F.scaled_dot_product_attention without a mask: FlashAttention's kernels, with splits."""
    if q.numel() == 0:
        return torch.empty_like(q)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def flashinfer_decode(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """FlashInfer's kernel for one sequence."""
    if len(q) != 1:
        raise NotImplementedError(f"{len(q)} sequences: single_decode takes one")
    from flashinfer import single_decode_with_kv_cache

    return single_decode_with_kv_cache(q[0], k[0], v[0], kv_layout="NHD")[None]


def fa3_decode(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """FlashAttention 3; it reads the lengths on the GPU."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    return flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=context_lens)[:, 0]


def quietly(kernel, *args: Tensor) -> Tensor:
    """o in float64. The simulators compute with numpy, which warns of what a GPU does silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return kernel(*args).double()


SMALL = {"B": 2, "H": 2, "H_kv": 1, "S": 90, "D": 8, "ragged": 1}
LARGE = {"B": 2, "H": 16, "H_kv": 8, "S": 1500, "D": 128, "ragged": 1}  # several blocks a context


def cases(kernel, small: dict, large: dict) -> list[tuple[torch.dtype, dict, float]]:
    """Dtype, size and allowed error: small ones, and such as a kernel's templates in C++ take."""
    found = [(torch.float32, small, 1e-5)]
    if not lab.SIMULATED and "cuda" in {k.kind for k in kernels_of(kernel)}:
        found.append((torch.bfloat16, large, 2**-6))
    return found


def large_scores(kernel) -> str | None:
    """Scores of size 1e3, whose exponentials overflow, come out as the reference says."""
    for dtype, size, allowed in cases(kernel, SMALL, LARGE):
        q, k, v, context_lens = inputs(dtype, seed=1, **size)
        q *= 1e3
        try:
            o = quietly(kernel, q, k, v, context_lens)
        except OverflowError:
            return "exp overflows"
        error = (o - reference(q.double(), k.double(), v.double(), context_lens)).abs().max().item()
        if not error <= max(1e-2, 2 * allowed):
            return f"values are wrong by {error:.2g}"
    return None


def past_does_not_matter(kernel) -> str | None:
    """NaN in every slot past the contexts changes nothing."""
    for dtype, size, _ in cases(kernel, SMALL, LARGE):
        q, k, v, context_lens = inputs(dtype, seed=1, **size)
        past = torch.arange(k.shape[1], device=k.device) >= context_lens[:, None]
        spoilt = (x.masked_fill(past[:, :, None, None], math.nan) for x in (k, v))
        got, wanted = (quietly(kernel, q, *kv, context_lens) for kv in (spoilt, (k, v)))
        if not torch.equal(got, wanted):
            return "what a slot past the context holds changes the result"
    return None


def empty_context(kernel) -> str | None:
    """A sequence without tokens gets zeros, and the one beside it what it should."""
    for dtype, size, allowed in cases(kernel, SMALL, LARGE):
        q, k, v, context_lens = inputs(dtype, seed=1, **size)
        context_lens[1] = 0
        o = quietly(kernel, q, k, v, context_lens)
        if o[1].any():  # also true for NaN
            return f"a sequence without tokens gets {o[1].abs().max().item():.3g}, wanted 0"
        error = (o - reference(q.double(), k.double(), v.double(), context_lens)).abs().max().item()
        if not error <= allowed:
            return "the sequence beside the empty one is wrong"
    return None


def given_memory(kernel) -> str | None:
    """With an output and a workspace of the caller's: the same bits, call after call."""
    if "workspace" not in inspect.signature(kernel).parameters:
        return None
    sizes = [(dtype, size) for dtype, size, _ in cases(kernel, SMALL, LARGE)]
    for dtype, size in (*sizes, (torch.float32, SMALL | {"H_kv": 2})):
        q, k, v, context_lens = inputs(dtype, seed=1, **size)
        wanted, out = kernel(q, k, v, context_lens), torch.empty_like(q)
        workspace = decode_attention_workspace(q, k)
        for call in range(2):
            got = kernel(q, k, v, context_lens, out=out.fill_(7.0), workspace=workspace)
            if got is not out or not torch.equal(out, wanted):
                return f"call {call} with `out` and `workspace` differs from a call without"
    return None


def templates_are_right(kernel) -> str | None:
    """C++ kernels have an instance for each dtype and head size: each is run, some for more groups.

    Contexts are empty, of one key, a little longer than a tile, and of several splits; NaN follows.
    With few sequences, and with so many that blocks are smaller.
    """
    if "cuda" not in {k.kind for k in kernels_of(kernel)}:
        return None
    lens = torch.tensor((0, 1, 31, 33, 1500, 1024, 777))
    many = SMS // (3 * len(lens)) + 1  # times that: more blocks than SMs, so the smaller ones
    for dtype, D, G, times in (
        *(
            (d, size, 2, n)
            for d in (torch.bfloat16, torch.float16)
            for size in HEAD_SIZES
            for n in (1, many)
        ),
        *((torch.bfloat16, 128, group, n) for group in (1, 3, 8) for n in (1, many)),
        (torch.float16, 64, 8, 1),
    ):
        size = {"B": times * len(lens), "H": 3 * G, "H_kv": 3, "S": 1500, "D": D}
        q, k, v, context_lens = inputs(dtype, seed=1, **size)
        context_lens.copy_(lens.repeat(times))
        truth = reference(q.double(), k.double(), v.double(), context_lens)
        allowed = max(torch.finfo(dtype).eps, 1e-5) * truth.abs().amax(dim=(1, 2))
        past = torch.arange(k.shape[1], device=k.device) >= context_lens[:, None]
        k, v = (x.masked_fill(past[:, :, None, None], math.nan) for x in (k, v))
        for max_context in (None, 1, 100):
            o = kernel(q, k, v, context_lens, max_context=max_context).double()
            worst = (o - truth).abs().amax(dim=(1, 2))
            if len(wrong := (~(worst <= allowed)).nonzero()):  # also true for NaN
                b = int(wrong[0])
                case = f"{dtype}, {D=}, {G=}, a context of {int(context_lens[b])}, {max_context=}"
                return f"{case}: wrong by {worst[b].item():.2g}"
    return None


def far(*shape: int) -> Tensor | None:
    """A cache of this shape with 2^31 numbers in front of it, where offsets that wrap find memory.

    Under the simulators float32 zeros in a file that holds none of them: memory is taken only for
    what is touched. On a GPU bfloat16, not set, of about 9 GB. None where there is no room.
    """
    count = 2**31 + math.prod(shape)
    if not lab.SIMULATED:
        if torch.cuda.mem_get_info()[0] < 3 * count:
            return None
        return torch.empty(count, dtype=torch.bfloat16, device="cuda")[2**31 :].view(shape)
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(4 * count)
            whole = np.memmap(file, np.float32, "r+", shape=(count,))
    except OSError:
        return None
    return torch.from_numpy(whole)[2**31 :].view(shape)


def past_2_to_31(kernel) -> str | None:
    """A sequence whose keys begin 2^31 numbers into the cache comes out right."""
    # The last of B sequences begins there. Kernels for a GPU take heads of 128.
    B, S, D, allowed = (2, 2**17, 2**14, 1e-5) if lab.SIMULATED else (9, 2**21, 128, 2**-6)
    if (cache := far(B, S, 1, D)) is None:
        return None
    q, near = lab.randn((B, 1, D), (B, 3, 1, D), dtype=cache.dtype, seed=1)
    cache[:, :3] = near
    context_lens = torch.full((B,), 3, dtype=torch.int32, device=q.device)
    wanted = reference(q.double(), near.double(), near.double(), context_lens)
    error = (quietly(kernel, q, cache, cache, context_lens) - wanted).abs().max().item()
    del cache
    give_back()
    return None if error <= allowed else f"sequence {B - 1} of {B} is wrong"


def give_back() -> None:
    """A GPU's memory that torch keeps for later: gigabytes would be missed elsewhere."""
    if not lab.SIMULATED:
        torch.cuda.empty_cache()


def of_head(x: Cache, head: Tensor) -> Cache:
    """The cache with a head for each query head, as `head` says."""
    return x[:, :, head]


def wrong_heads(q: Queries, k: Cache, v: Cache, context_lens: Lengths) -> Queries:
    """A suspect: query head h takes head h % H_kv, as if the heads of a group lay apart."""
    head = torch.arange(q.shape[1], device=q.device) % k.shape[2]
    return reference(q, of_head(k, head), of_head(v, head), context_lens)


def without_rescale(values: bool, total: bool) -> Callable[..., Queries]:
    """Suspects: what earlier tiles gave to o's values, or to their total, keeps its old maximum."""

    def formula(q: Queries, k: Cache, v: Cache, context_lens: Lengths) -> Queries:
        scores = scores_of(q, k, context_lens)
        tops = torch.stack([tile.amax(dim=3) for tile in scores.split(TILE, dim=3)], dim=3)
        tops = tops.cummax(dim=3).values.repeat_interleave(TILE, dim=3)[..., : k.shape[1]]
        stale, right = torch.exp(scores - tops), torch.exp(scores - tops[..., -1:])
        p = (stale if values else right) / (stale if total else right).sum(dim=3, keepdim=True)
        return torch.einsum("bhgs,bshd->bhgd", p, v).flatten(1, 2)

    return formula


def zeros_for_masked(q: Queries, k: Cache, v: Cache, context_lens: Lengths) -> Queries:
    """A suspect: the last tile is filled up with scores of 0."""
    past = torch.arange(k.shape[1], device=k.device) >= context_lens[:, None]
    k, v = (x.masked_fill(past[:, :, None, None], 0.0) for x in (k, v))
    filled = (0, 0, 0, 0, 0, -k.shape[1] % TILE)
    k, v = torch.nn.functional.pad(k, filled), torch.nn.functional.pad(v, filled)
    return reference(q, k, v, (context_lens + TILE - 1) // TILE * TILE)


def without_last_split(q: Queries, k: Cache, v: Cache, context_lens: Lengths) -> Queries:
    """A suspect: of several splits, the last is not merged."""
    whole = (context_lens - 1) // SPLIT * SPLIT
    return reference(q, k, v, torch.where(whole > 0, whole, context_lens))


def equal_splits(q: Queries, k: Cache, v: Cache, context_lens: Lengths) -> Queries:
    """A suspect: the mean of the splits, whatever they weigh."""
    starts = range(0, k.shape[1], SPLIT)
    parts = [reference(q, k[:, s:], v[:, s:], (context_lens - s).clamp(0, SPLIT)) for s in starts]
    count = (context_lens + SPLIT - 1) // SPLIT
    return sum(parts) / count[:, None, None]


def sizes(*each: tuple[int, ...], **more: int) -> tuple[dict[str, int], ...]:
    """(B, H, H_kv, S, D), in chapter 11 a page size too, as the dicts that a problem wants."""
    names = ("B", "H", "H_kv", "S", "D", "page")
    return tuple(dict(zip(names, s, strict=False)) | more for s in each)


QWEN_SMALL = {"H": 16, "H_kv": 8, "D": 128}  # Qwen3-0.6B
CONTEXTS = (512, 2048, 8192, 32768)
DECODE_ATTENTION = lab.Problem(
    name="decode_attention",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, B, H, H_kv, S, D, ragged=0: lab.Work(
        bytes=2 * (int(lengths(B, S, ragged, 0).sum()) * H_kv + B * H) * D * dtype.itemsize + 4 * B,
        flops=4 * int(lengths(B, S, ragged, 0).sum()) * H * D,
    ),
    terms=lambda B, H, H_kv, S, D, ragged=0: S + D,
    # One key; fewer keys than a warp has lanes, a tile and one beside, several splits and a rest;
    # one query head to a kv head, three (no power of two); D no power of two; one kv head for all;
    # a head size that the C++ kernel takes. The last is run most often, and seen by the lens: the
    # tiles of its last sequence, of 74 keys, reach past the cache, and D is no power of two.
    test_sizes=(
        *sizes((1, 1, 1, 1, 4), (1, 4, 2, 31, 8), (1, 2, 1, 64, 8), (1, 6, 2, 65, 12)),
        *sizes((2, 4, 2, 300, 12), (3, 2, 2, 130, 8), (2, 3, 1, 521, 8), ragged=1),
        *sizes((1, 2, 1, 777, 8), (1, 2, 1, 40, 64)),
        *sizes((2, 2, 1, 77, 12), ragged=1),
    ),
    empty_size={"B": 0, "H": 4, "H_kv": 2, "S": 8, "D": 16},
    huge_size={"B": 2, "H": 64, "H_kv": 64, "S": 2**18 + 1, "D": 128},
    bench_size={"B": 32, "S": 4096, **QWEN_SMALL},
    sweep=(
        *({"B": 1, "S": s, **QWEN_SMALL} for s in (128, *CONTEXTS)),
        *({"B": b, "S": 4096, **QWEN_SMALL} for b in (2, 8, 64)),
        *({"B": b, "S": 4096, "H": 32, "H_kv": 8, "D": 128} for b in (1, 32)),  # 8B models
    ),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),  # bf16 first: it is what is swept
    ceiling="read",
    target=(
        *(
            bars.ratio(
                "decode_attention_pipelined", "SDPA, full", 0.6, dtype="bfloat16",
                B=1, S=s, **QWEN_SMALL,
            )
            for s in CONTEXTS[:3]
        ),
        bars.seconds(
            "decode_attention_pipelined", 40e-6, dtype="bfloat16", B=1, S=32768, **QWEN_SMALL
        ),
        bars.fraction(
            "decode_attention_pipelined", 0.93, dtype="bfloat16", B=32, S=4096, **QWEN_SMALL
        ),
    ),
    peers={"SDPA, full": full_sdpa, "flashinfer": flashinfer_decode, "fa3": fa3_decode},
    suspects={
        "wrong GQA head map": wrong_heads,
        "missing scale": lambda q, k, v, n: reference(q * q.shape[2] ** 0.5, k, v, n),
        "ignores context_lens": lambda q, k, v, n: reference(q, k, v, 0 * n + k.shape[1]),
        "last key left out": lambda q, k, v, n: reference(q, k, v, (n - 1).clamp(min=1)),
        "reads past the context": lambda q, k, v, n: reference(
            q, k, v, (n + 1).clamp(max=k.shape[1])
        ),
        "wrong mask fill": zeros_for_masked,
        "missing rescale": without_rescale(values=True, total=True),
        "missing rescale of acc": without_rescale(values=True, total=False),
        "missing rescale of l_i": without_rescale(values=False, total=True),
        "exp in place of exp2": lambda q, *rest: reference(q * LOG2_E, *rest),
        "keys of another sequence": lambda q, k, v, n: reference(
            q, k[:1].expand(k.shape), v[:1].expand(v.shape), n
        ),
        "last partial split dropped": without_last_split,
        "splits weighed alike": equal_splits,
    },
    properties=(
        lab.Property("scores of size 1e3 give no NaN", "no max-subtraction", large_scores),
        lab.Property(
            "slots past the context do not matter", "reads past the context", past_does_not_matter
        ),
        lab.Property("an empty context gives zeros", "empty context", empty_context),
        lab.Property("a workspace can be used again", "workspace left dirty", given_memory),
        lab.Property("a cache may have 2^31 numbers and more", "int32 overflow", past_2_to_31),
        lab.Property(
            "every template is right",
            "an instance of a template is wrong",
            templates_are_right,
            dtypes=(torch.bfloat16,),  # so on GPUs only
        ),
    ),
)  # fmt: skip


def check_args(
    q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor, max_context: int | None, validate: bool
) -> tuple[int, int, int, int, int]:
    """What every rung needs; returns B, H, H_kv, S and D.

    Lengths in the GPU's memory are read only if `validate`: that waits for the GPU.
    """
    lab.check_tensors(q=q, k=k, v=v)
    lab.check_tensors(dtypes=(torch.int32,), like=q, context_lens=context_lens)
    if q.ndim != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}, must be [B, H, D]")
    B, H, D = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[3]) != (B, D) or 0 in k.shape[1:]:
        raise ValueError(f"k has shape {tuple(k.shape)}, must be ({B}, S, H_kv, {D}) to go with q")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, must be {tuple(k.shape)} like k")
    S, H_kv = k.shape[1:3]
    check_heads(q, H_kv, S, "slots of a sequence in k", max_context)
    check_lengths(context_lens, B, S, validate)
    return B, H, H_kv, S, D


def check_heads(q: Tensor, H_kv: int, most: int, place: str, max_context: int | None) -> None:
    """What chapter 11 needs too: q's heads go with H_kv, and contexts fit into `most` slots."""
    if q.ndim != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}, must be [B, H, D]")
    H = q.shape[1]
    if H % H_kv or not 1 <= H // H_kv <= MAX_GROUP:
        raise ValueError(f"{H=} query heads must be 1 to {MAX_GROUP} times {H_kv=}")
    if max_context is not None:
        lab.check_count(max_context=max_context)
        if not 1 <= max_context <= most:
            raise ValueError(f"{max_context=} must lie in 1 … {most}, the {place}")


def check_lengths(context_lens: Tensor, B: int, most: int, validate: bool) -> None:
    """A length for each sequence, of at most `most`; on a GPU that is looked at if `validate`."""
    if context_lens.shape != (B,):
        raise ValueError(f"context_lens has shape {tuple(context_lens.shape)}, must be ({B},)")
    if B > 0 and (validate or not context_lens.is_cuda):
        for value in (int(context_lens.min()), int(context_lens.max())):
            if not 0 <= value <= most:
                raise ValueError(f"context_lens holds {value}, must lie in 0 … {most}")


# Rung 1 --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rounded(value, y):
    """`value`, a float32, in the element type of y. The simulators run float32 only."""
    if SIMULATED:  # numba drops the branch that it does not take
        return value
    return y.dtype.type(value)


@cuda.jit
def decode_attention_naive_kernel(q, k, v, context_lens, scale, p, o):
    """Block (h, b) computes o[b, h, :]; its weights go to p[b, h, :], and come back.

    Thread tx has the keys tx, tx + THREADS, ..., then the columns tx, tx + THREADS, ... of o.
    """
    H, D = q.shape[1], q.shape[2]
    S, H_kv = k.shape[1], k.shape[2]
    h, b = cuda.blockIdx.x, cuda.blockIdx.y
    tx = cuda.threadIdx.x
    h_kv = h // (H // H_kv)
    length = min(context_lens[b], S)
    part_s = cuda.shared.array(THREADS, float32)
    m = float32(NEG_INF)
    for s in range(tx, length, THREADS):
        score = float32(0)
        for d in range(D):
            score += float32(q[b, h, d]) * float32(k[b, s, h_kv, d])
        score *= float32(scale)
        p[b, h, s] = score
        m = max(m, score)
    part_s[tx] = m
    cuda.syncthreads()
    # A tree: the upper half joins the lower until part_s[0] is the maximum of the context.
    half = THREADS // 2
    while half > 0:
        if tx < half:
            part_s[tx] = max(part_s[tx], part_s[tx + half])
        cuda.syncthreads()
        half //= 2
    m = part_s[0]
    cuda.syncthreads()  # all have read the maximum before sums come
    total = float32(0)
    for s in range(tx, length, THREADS):
        weight = math.exp(p[b, h, s] - m)
        p[b, h, s] = weight
        total += weight
    part_s[tx] = total
    cuda.syncthreads()  # and every weight is in p
    step = THREADS // 2
    while step > 0:
        if tx < step:
            part_s[tx] += part_s[tx + step]
        cuda.syncthreads()
        step //= 2
    total = part_s[0]
    for d in range(tx, D, THREADS):
        acc = float32(0)
        for s in range(length):
            acc += p[b, h, s] * float32(v[b, s, h_kv, d])
        if length > 0:
            acc /= total
        o[b, h, d] = rounded(acc, o)


def decode_attention_naive(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """One block per query head: heads of a group read the same keys, a few blocks fill no GPU."""
    B, H, _, S, D = check_args(q, k, v, context_lens, None, False)
    o = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    p = torch.empty((B, H, S), dtype=torch.float32, device=q.device)
    if o.numel() > 0:
        decode_attention_naive_kernel[(H, B), THREADS, lab.stream()](
            q, k, v, context_lens, D**-0.5, p, o
        )
    return o


# Rung 2 --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["S"])
def decode_attention_grouped_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    context_lens_ptr,
    o_ptr,
    scale,
    S,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (h, b) computes o of sequence b for the G query heads that share kv head h.

    The softmax is online: tile after tile, with a running maximum m_i and sum l_i for each of the
    G heads, and acc, the sum of what the keys so far weigh.
    """
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)  # in 32 bits, offsets would wrap
    length = tl.minimum(tl.load(context_lens_ptr + b), S)
    head = (b * H_KV + h) * G  # the first of the G, counted from the first of all B·H
    offs_s, offs_d = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    offs_kv = offs_s[:, None] * (H_KV * D) + offs_d[None, :]
    q = ()
    m_i = ()
    l_i = ()
    acc = ()
    for g in tl.static_range(G):
        q_g = tl.load(q_ptr + (head + g) * D + offs_d, mask=mask_d, other=0.0)
        q += (q_g.to(tl.float32) * scale,)
        m_i += (tl.full((), LOWEST, tl.float32),)
        l_i += (tl.full((), 0.0, tl.float32),)
        acc += (tl.zeros((BLOCK_D,), tl.float32),)
    for start in range(0, length, TILE):
        inside = start + offs_s < length
        mask = inside[:, None] & mask_d[None, :]
        row = ((b * S + start) * H_KV + h) * D
        k = tl.load(k_ptr + row + offs_kv, mask=mask, other=0.0).to(tl.float32)  # [TILE, BLOCK_D]
        v = tl.load(v_ptr + row + offs_kv, mask=mask, other=0.0).to(tl.float32)
        m_new = ()
        l_new = ()
        acc_new = ()
        for g in tl.static_range(G):
            s = tl.where(inside, tl.sum(q[g][None, :] * k, axis=1), -float("inf"))  # [TILE]
            m = tl.maximum(m_i[g], tl.max(s, axis=0))
            alpha = tl.exp2(m_i[g] - m)  # what was added so far shrinks when the maximum grows
            p = tl.exp2(s - m)
            m_new += (m,)
            l_new += (l_i[g] * alpha + tl.sum(p, axis=0),)
            acc_new += (acc[g] * alpha + tl.sum(p[:, None] * v, axis=0),)
        m_i, l_i, acc = m_new, l_new, acc_new
    for g in tl.static_range(G):
        o = acc[g] / tl.where(l_i[g] > 0, l_i[g], 1.0)  # an empty context: zeros, not 0 / 0
        tl.store(o_ptr + (head + g) * D + offs_d, o, mask=mask_d)


def decode_attention_grouped(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """One program per kv head: query heads that share keys and values read them once."""
    B, H, H_kv, S, D = check_args(q, k, v, context_lens, None, False)
    lab.check_contiguous(q=q, k=k, v=v, context_lens=context_lens)
    o = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    if o.numel() > 0:
        decode_attention_grouped_kernel[(H_kv, B)](
            q,
            k,
            v,
            context_lens,
            o,
            D**-0.5 * LOG2_E,
            S,
            H_KV=H_kv,
            G=H // H_kv,
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            TILE=TILE,
            num_warps=WARPS,
        )
    return o


# Rung 3 --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["S"])
def decode_attention_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    context_lens_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    S,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (h, split, b) leaves the softmax of SPLIT keys in partial, its weight in lse."""
    h, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = split * SPLIT
    end = tl.minimum(tl.minimum(tl.load(context_lens_ptr + b), S), first + SPLIT)
    if first < end:
        head = (b * H_KV + h) * G
        offs_s, offs_d = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
        mask_d = offs_d < D
        offs_kv = offs_s[:, None] * (H_KV * D) + offs_d[None, :]
        q = ()
        m_i = ()
        l_i = ()
        acc = ()
        for g in tl.static_range(G):
            q_g = tl.load(q_ptr + (head + g) * D + offs_d, mask=mask_d, other=0.0)
            q += (q_g.to(tl.float32) * scale,)
            m_i += (tl.full((), LOWEST, tl.float32),)
            l_i += (tl.full((), 0.0, tl.float32),)
            acc += (tl.zeros((BLOCK_D,), tl.float32),)
        for start in range(first, end, TILE):
            inside = start + offs_s < end
            mask = inside[:, None] & mask_d[None, :]
            row = ((b * S + start) * H_KV + h) * D
            k = tl.load(k_ptr + row + offs_kv, mask=mask, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + row + offs_kv, mask=mask, other=0.0).to(tl.float32)
            m_new = ()
            l_new = ()
            acc_new = ()
            for g in tl.static_range(G):
                s = tl.where(inside, tl.sum(q[g][None, :] * k, axis=1), -float("inf"))
                m = tl.maximum(m_i[g], tl.max(s, axis=0))
                alpha = tl.exp2(m_i[g] - m)
                p = tl.exp2(s - m)
                m_new += (m,)
                l_new += (l_i[g] * alpha + tl.sum(p, axis=0),)
                acc_new += (acc[g] * alpha + tl.sum(p[:, None] * v, axis=0),)
            m_i, l_i, acc = m_new, l_new, acc_new
        for g in tl.static_range(G):
            row = (head + g) * tl.num_programs(1) + split
            tl.store(partial_ptr + row * D + offs_d, acc[g] / l_i[g], mask=mask_d)
            tl.store(lse_ptr + row, m_i[g] + tl.log2(l_i[g]))


@triton.jit(do_not_specialize=["S", "SPLITS"])
def decode_attention_merge_kernel(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    o_ptr,
    S,
    SPLITS,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (h, b) computes o[b, h, :] from the splits of b: 2^lse weighs a split."""
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    used = tl.cdiv(tl.minimum(tl.load(context_lens_ptr + b), S), SPLIT)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    first = (b * H + h) * SPLITS
    m_i = LOWEST * 1.0
    l_i = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(0, used):
        lse = tl.load(lse_ptr + first + split)
        o = tl.load(partial_ptr + (first + split) * D + offs_d, mask=mask_d, other=0.0)
        m_new = tl.maximum(m_i, lse)
        alpha = tl.exp2(m_i - m_new)
        weight = tl.exp2(lse - m_new)
        l_i = l_i * alpha + weight
        acc = acc * alpha + weight * o
        m_i = m_new
    o = acc / tl.where(l_i > 0, l_i, 1.0)
    tl.store(o_ptr + (b * H + h) * D + offs_d, o, mask=mask_d)


def decode_attention_split(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """Contexts are split over programs: one sequence fills the chip; a second launch merges."""
    B, H, H_kv, S, D = check_args(q, k, v, context_lens, None, False)
    lab.check_contiguous(q=q, k=k, v=v, context_lens=context_lens)
    o = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    splits = triton.cdiv(S, SPLIT)
    partial = torch.empty((B, H, splits, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((B, H, splits), dtype=torch.float32, device=q.device)
    BLOCK_D = triton.next_power_of_2(D)
    if o.numel() > 0:
        decode_attention_split_kernel[(H_kv, splits, B)](
            q,
            k,
            v,
            context_lens,
            partial,
            lse,
            D**-0.5 * LOG2_E,
            S,
            H_KV=H_kv,
            G=H // H_kv,
            D=D,
            BLOCK_D=BLOCK_D,
            TILE=TILE,
            SPLIT=SPLIT,
            num_warps=WARPS,
        )
        decode_attention_merge_kernel[(H, B)](
            partial,
            lse,
            context_lens,
            o,
            S,
            splits,
            H=H,
            D=D,
            BLOCK_D=BLOCK_D,
            SPLIT=SPLIT,
            num_warps=1,
        )
    return o


# Rung 4 --------------------------------------------------------------------------------------


class Workspace(NamedTuple):
    """Memory that the programs of a launch meet in; every launch leaves the int32s as they were."""

    partial: Float[Tensor, "B H splits D"]  # float32
    lse: Float[Tensor, "B H splits"]  # float32
    counters: Int32[Tensor, " n"]  # rung 4: a 0 for each kv head of each sequence
    parts: Int32[Tensor, " m"]  # rung 5: EMPTY for each number that blocks send each other


KEPT: dict[tuple, Tensor] = {}


def kept(count: int, value: int, device: torch.device) -> Tensor:
    """At least `count` int32 of `value`, which the launches of a stream use one after another.

    New ones for every call would cost a launch. A CUDA graph, which may be replayed on another
    stream, does get its own.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.full((count,), value, dtype=torch.int32, device=device)
    which = device, torch.cuda.current_stream(device).cuda_stream, value
    if which not in KEPT or len(KEPT[which]) < count:
        KEPT[which] = torch.full((count,), value, dtype=torch.int32, device=device)
    return KEPT[which]


def splits_for(B: int, H_kv: int, max_context: int) -> int:
    """Programs that share a context: in all no more than SMs, and none with little to do.

    One program asks for enough to keep its SM's share of the bandwidth busy. Two would take turns,
    and leave twice as many results to merge.
    """
    room = SMS // max(1, B * H_kv)
    return max(1, min(room, triton.cdiv(max_context, LEAST)))


def new_workspace(q: Tensor, H_kv: int, splits: int, *, keep: bool = False) -> Workspace:
    """A workspace; with `keep`, its int32s are those of the stream."""
    B, H, D = q.shape
    partial = torch.empty((B, H, splits, D), dtype=torch.float32, device=q.device)
    lse = torch.empty((B, H, splits), dtype=torch.float32, device=q.device)
    values = (B * H_kv, 0), (B * H * splits * (D + 1), EMPTY)
    if keep:
        return Workspace(partial, lse, *(kept(*pair, q.device) for pair in values))
    full = (torch.full((n,), x, dtype=torch.int32, device=q.device) for n, x in values)
    return Workspace(partial, lse, *full)


def decode_attention_workspace(
    q: Queries, k: Cache, *, max_context: int | None = None
) -> Workspace:
    """What `decode_attention` needs beside its output, for calls with these shapes one by one."""
    lab.check_tensors(q=q, k=k)
    if k.ndim != 4 or 0 in k.shape[1:]:
        raise ValueError(f"k has shape {tuple(k.shape)}, must be (B, S, H_kv, D)")
    B, S, H_kv, _ = k.shape
    check_heads(q, H_kv, S, "slots of a sequence in k", max_context)
    return new_workspace(q, H_kv, splits_for(B, H_kv, max_context or S))


@triton.jit
def absorbed(m_i, l_i, acc, scores, values):
    """Every row's running softmax with more keys: no row waits for another.

    m_i and l_i [ROWS], acc [ROWS, D]; scores, a tuple of [ROWS]; values, as many [ROWS, D].
    """
    m = m_i
    for u in tl.static_range(len(scores)):
        m = tl.maximum(m, scores[u])
    alpha = tl.exp2(m_i - m)
    l_i *= alpha
    acc *= alpha[:, None]
    for u in tl.static_range(len(scores)):
        p = tl.exp2(scores[u] - m)
        l_i += p
        acc += p[:, None] * values[u]
    return m, l_i, acc


@triton.jit
def merged(m_i, l_i, acc):
    """The rows' softmax as one: log2 of the sum of all exponentials, and o [D]."""
    m = tl.max(m_i, axis=0)
    weight = tl.exp2(m_i - m)
    total = tl.sum(l_i * weight, axis=0)
    total = tl.where(total > 0, total, 1.0)  # an empty context: zeros, not 0 / 0
    o = tl.sum(acc * weight[:, None], axis=0) / total
    return m + tl.log2(total), o


@triton.jit
def merge_splits(
    head,
    used,
    o_ptr,
    partial_ptr,
    lse_ptr,
    SPLITS,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store o of the query heads head … head + G - 1, from `used` splits.

    This is attention once more: the splits are the keys, their lse the scores.
    """
    offs_r, offs_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    m_i = ()
    l_i = ()
    acc = ()
    for _ in tl.static_range(G):
        m_i += (tl.full((ROWS,), LOWEST, tl.float32),)
        l_i += (tl.zeros((ROWS,), tl.float32),)
        acc += (tl.zeros((ROWS, BLOCK_D), tl.float32),)
    for start in range(0, used, UNROLL * ROWS):
        m_new = ()
        l_new = ()
        acc_new = ()
        for g in tl.static_range(G):
            scores = ()
            values = ()
            for u in tl.static_range(UNROLL):
                split = start + u * ROWS + offs_r
                row = (head + g) * SPLITS + split
                # From L2, where the other programs' stores are: an SM's own L1 may be stale.
                lse = tl.load(lse_ptr + row, mask=split < used, other=0.0, cache_modifier=".cg")
                o = tl.load(
                    partial_ptr + row[:, None] * D + offs_d[None, :],
                    mask=(split < used)[:, None] & mask_d[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                scores += (tl.where(split < used, lse, -float("inf")),)
                values += (o,)
            m_g, l_g, acc_g = absorbed(m_i[g], l_i[g], acc[g], scores, values)
            m_new += (m_g,)
            l_new += (l_g,)
            acc_new += (acc_g,)
        m_i, l_i, acc = m_new, l_new, acc_new
    for g in tl.static_range(G):
        _, o = merged(m_i[g], l_i[g], acc[g])
        tl.store(o_ptr + (head + g) * D + offs_d, o, mask=mask_d)


@triton.jit
def finish(
    m_i,
    l_i,
    acc,
    h,
    split,
    used,
    b,
    o_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    SPLITS,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_UNROLL: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """Store the result of one of `used` splits; the last program to get here merges them all."""
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    head = (b * H_KV + h) * G  # of all B·H
    for g in tl.static_range(G):
        lse, o = merged(m_i[g], l_i[g], acc[g])
        if used == 1:
            tl.store(o_ptr + (head + g) * D + offs_d, o, mask=mask_d)
        else:
            row = (head + g) * SPLITS + split
            tl.store(partial_ptr + row * D + offs_d, o, mask=mask_d)
            tl.store(lse_ptr + row, lse)
    if used > 1:
        tl.debug_barrier()  # all threads have stored before one of them counts the program in
        counter_ptr += b * H_KV + h
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == used - 1:
            tl.atomic_xchg(counter_ptr, 0, sem="relaxed")  # ready for the next launch
            merge_splits(
                head, used, o_ptr, partial_ptr, lse_ptr, SPLITS,
                G, D, BLOCK_D, MERGE_UNROLL, MERGE_ROWS,
            )  # fmt: skip


@triton.jit
def queries(
    q_ptr, scale, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    """G scaled queries [D] in float32, and their m_i, l_i and acc before the first key."""
    offs_d = tl.arange(0, BLOCK_D)
    q = ()
    m_i = ()
    l_i = ()
    acc = ()
    for g in tl.static_range(G):
        q_g = tl.load(q_ptr + g * D + offs_d, mask=offs_d < D, other=0.0)
        q += (q_g.to(tl.float32) * scale,)
        m_i += (tl.full((ROWS,), LOWEST, tl.float32),)
        l_i += (tl.zeros((ROWS,), tl.float32),)
        acc += (tl.zeros((ROWS, BLOCK_D), tl.float32),)
    return q, m_i, l_i, acc


@triton.jit
def attended(
    q, k, v, m_i, l_i, acc, start, end, G: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr
):
    """m_i, l_i and acc of all G heads after UNROLL more tiles, the first from key `start`.

    q holds a scaled query [D] for each head; k and v hold the tiles [ROWS, D].
    """
    m_new = ()
    l_new = ()
    acc_new = ()
    values = ()
    for u in tl.static_range(UNROLL):
        values += (v[u].to(tl.float32),)
    for g in tl.static_range(G):
        scores = ()
        for u in tl.static_range(UNROLL):
            s = tl.sum(q[g][None, :] * k[u].to(tl.float32), axis=1)  # [ROWS]
            inside = start + u * ROWS + tl.arange(0, ROWS) < end
            scores += (tl.where(inside, s, -float("inf")),)
        m_g, l_g, acc_g = absorbed(m_i[g], l_i[g], acc[g], scores, values)
        m_new += (m_g,)
        l_new += (l_g,)
        acc_new += (acc_g,)
    return m_new, l_new, acc_new


@triton.jit
def tiles(
    k_ptr,
    v_ptr,
    start,
    end,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """UNROLL tiles [ROWS, D] of keys, and of values, from key `start`; nothing is read past `end`.

    k_ptr and v_ptr point to key `start` of the head; neighbouring keys are STRIDE numbers apart.
    """
    offs_d = tl.arange(0, BLOCK_D)
    k = ()
    v = ()
    for u in tl.static_range(UNROLL):
        offs_s = u * ROWS + tl.arange(0, ROWS)
        mask = (start + offs_s < end)[:, None] & (offs_d < D)[None, :]
        offs = offs_s[:, None] * STRIDE + offs_d[None, :]
        k += (tl.load(k_ptr + offs, mask=mask, other=0.0),)
        v += (tl.load(v_ptr + offs, mask=mask, other=0.0),)
    return k, v


@triton.jit(do_not_specialize=["S", "SPLITS"])
def decode_attention_fused_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    context_lens_ptr,
    o_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    scale,
    S,
    SPLITS,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_UNROLL: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """Program (h, split, b) attends to its share of the keys of sequence b and kv head h.

    A tile is [ROWS, D]: the threads of a program hold ROWS keys together, 16 bytes each, and UNROLL
    tiles at a time. Every row has a running maximum and sum, so the loop needs no barrier.
    """
    h, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(context_lens_ptr + b), S)
    share = tl.maximum(tl.cdiv(length, SPLITS), LEAST)  # the same for all of them but the last
    used = tl.maximum(tl.cdiv(length, share), 1)  # an empty context takes one, to store zeros
    if split < used:
        STEP: tl.constexpr = UNROLL * ROWS
        STRIDE: tl.constexpr = H_KV * D
        first = split * share
        end = tl.minimum(first + share, length)
        offs = (b * S + first) * STRIDE + h * D  # where the head's first key begins
        k, v = tiles(k_ptr + offs, v_ptr + offs, first, end, STRIDE, D, BLOCK_D, ROWS, UNROLL)
        q, m_i, l_i, acc = queries(q_ptr + (b * H_KV + h) * G * D, scale, G, D, BLOCK_D, ROWS)
        for start in range(first, end, STEP):
            # The next tiles are on their way while these are worked on.
            offs = (b * S + start + STEP) * STRIDE + h * D
            k_next, v_next = tiles(
                k_ptr + offs, v_ptr + offs, start + STEP, end, STRIDE, D, BLOCK_D, ROWS, UNROLL
            )
            m_i, l_i, acc = attended(q, k, v, m_i, l_i, acc, start, end, G, ROWS, UNROLL)
            k, v = k_next, v_next
        finish(
            m_i, l_i, acc, h, split, used, b, o_ptr, partial_ptr, lse_ptr, counter_ptr, SPLITS,
            H_KV, G, D, BLOCK_D, MERGE_UNROLL, MERGE_ROWS,
        )  # fmt: skip


def memory(
    q: Tensor,
    H_kv: int,
    max_context: int,
    out: Tensor | None,
    workspace: Workspace | None,
    **read: Tensor,
) -> tuple[Tensor, Workspace]:
    """`out` and `workspace`, or new ones. ValueError for a misfit, or if they lie in `read`."""
    B, H, D = q.shape
    splits = splits_for(B, H_kv, max_context)
    if out is None:
        out = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    lab.check_tensors(q=q, out=out)
    if out.shape != q.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, must be {tuple(q.shape)} like q")
    lab.check_contiguous(out=out)
    lab.check_apart(out=out, q=q, **read)
    if workspace is None:
        return out, new_workspace(q, H_kv, splits, keep=True)
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace is a {type(workspace).__name__}, must be a Workspace")
    wanted = [((B, H, splits, D), torch.float32), ((B, H, splits), torch.float32)]
    wanted += [((n,), torch.int32) for n in (B * H_kv, B * H * splits * (D + 1))]
    for (shape, dtype), (name, x) in zip(wanted, workspace._asdict().items(), strict=True):
        lab.check_tensors(dtypes=(dtype,), **{f"workspace.{name}": x})
        if (tuple(x.shape), x.device) != (shape, q.device):
            raise ValueError(
                f"workspace.{name} is {tuple(x.shape)} on {x.device}, must be {shape} on "
                f"{q.device}: make one with decode_attention_workspace or paged_kv_workspace, for "
                "this max_context"
            )
        lab.check_contiguous(**{f"workspace.{name}": x})
        lab.check_apart(**{f"workspace.{name}": x}, out=out)
    return out, workspace


def decode_attention_fused(
    q: Queries,
    k: Cache,
    v: Cache,
    context_lens: Lengths,
    *,
    max_context: int | None = None,
    out: Queries | None = None,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> Queries:
    """One launch: as many splits as fill the chip; the last program of a head merges them.

    The lengths are read on the GPU; a context may have up to S tokens. `max_context` says how long
    contexts will be, S if it is not given, and only decides how many programs share one. With `out`
    and `workspace` (from decode_attention_workspace) nothing is allocated, so a CUDA graph can hold
    the launch; two launches that run at the same time need two workspaces.

    TypeError or ValueError for arguments other than contiguous q [B, H, D] and k, v [B, S, H_kv, D]
    of one dtype and context_lens [B] int32. A length outside 0 … S counts as 0 or S on a GPU, and
    is a ValueError with `validate` (which waits for the GPU) and under the simulators.
    """
    B, H, H_kv, S, D = check_args(q, k, v, context_lens, max_context, validate)
    lab.check_contiguous(q=q, k=k, v=v, context_lens=context_lens)
    out, workspace = memory(q, H_kv, max_context or S, out, workspace, k=k, v=v)
    splits, BLOCK_D = workspace.lse.shape[2], triton.next_power_of_2(D)
    if out.numel() > 0:
        decode_attention_fused_kernel[(H_kv, splits, B)](
            q,
            k,
            v,
            context_lens,
            out,
            *workspace[:3],
            D**-0.5 * LOG2_E,
            S,
            splits,
            H_KV=H_kv,
            G=H // H_kv,
            D=D,
            BLOCK_D=BLOCK_D,
            LEAST=LEAST,
            UNROLL=UNROLL,
            ROWS=rows(BLOCK_D, q.itemsize, WARPS),
            MERGE_UNROLL=MERGE_UNROLL,
            MERGE_ROWS=rows(BLOCK_D, 4, WARPS),
            num_warps=WARPS,
        )
    return out


def rows(BLOCK_D: int, itemsize: int, num_warps: int) -> int:
    """Keys that all threads of a program hold together, 16 bytes each."""
    return max(1, num_warps * WARP * VECTOR_BYTES // (BLOCK_D * itemsize))


# Rung 5 --------------------------------------------------------------------------------------

# What Python and the kernels both need to know.
CONSTANTS = f"""
constexpr int KEYS = {KEYS}, MERGED = {MERGED};
constexpr unsigned EMPTY = {EMPTY & 0xFFFFFFFF:#x};
"""
# The last chapter's kernel has this too.
TENSOR_CORES = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <math_constants.h>

// Four 8 × 8 matrices of 16-bit numbers from shared memory, one a register: lane i gives the
// address of a row, of 16 bytes, of matrix i / 8, and gets two neighbours in row i / 4 of each;
// TRANSPOSED, in column i / 4.
template <bool TRANSPOSED> __device__ void load_matrices(unsigned (&m)[4], const void* row) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
}

// The transposed of an 8 × 8 matrix of which each lane has two numbers.
__device__ unsigned transposed(unsigned pair) {
    unsigned other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
    return other;
}

// c += a · b on the tensor cores: a [16, 16] as four matrices (upper left, lower left, upper right,
// lower right), b [16, 8] as two, each transposed, c [16, 8] in float32: lane i has two neighbours
// in row i / 4, and two in row i / 4 + 8.
__device__ void multiply(
    float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Blocks tell each other numbers through slots of global memory which hold EMPTY, the bits of a
// NaN that no arithmetic gives, until somebody writes there. So no flag and no fence is needed.
__device__ void put(unsigned* slot, unsigned bits) {
    __nv_atomic_store_n(slot, bits, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
}
// Waits for what `count` blocks, at most N, put into slots that are `step` apart.
template <int N>
__device__ void take(
    float (&value)[N], float (&lse)[N], unsigned* value_slot, unsigned* lse_slot, int step,
    int count) {
    auto look = [&](unsigned* slot, int n) {
        return n < count ? __nv_atomic_load_n(
                               slot + n * step, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE) : 0;
    };
    bool there;
    do {
        unsigned bits[2][N];
        #pragma unroll
        for (int n = 0; n < N; ++n) {  // all loads before the first is waited for
            bits[0][n] = look(value_slot, n);
            bits[1][n] = look(lse_slot, n);
        }
        there = true;
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            there = there && bits[0][n] != EMPTY && bits[1][n] != EMPTY;
            value[n] = __uint_as_float(bits[0][n]);
            lse[n] = __uint_as_float(bits[1][n]);
        }
    } while (!there);
}

// One number of o from some parts of the context: value, its part of the answer, and lse, log2 of
// the sum of the exponentials there. -1e30 is below every lse, and unlike -inf it can be subtracted
// from itself.
struct Merge {
    float m = -1e30f, l = 0, sum = 0;
    template <int N>
    __device__ void add(const float (&lse)[N], const float (&value)[N], int count) {
        float top = m;
        #pragma unroll
        for (int n = 0; n < N; ++n) top = n < count ? fmaxf(top, lse[n]) : top;
        const float alpha = exp2f(m - top);
        m = top;
        l *= alpha;
        sum *= alpha;
        #pragma unroll
        for (int n = 0; n < N; ++n) {
            const float weight = n < count ? exp2f(lse[n] - m) : 0;
            l += weight;
            sum = fmaf(weight, n < count ? value[n] : 0, sum);
        }
    }
    __device__ float value() const { return l > 0 ? sum / l : 0; }  // no keys: 0, not 0 / 0
    __device__ float lse() const { return m + log2f(l); }
};

// A tile of KEYS keys, or of values, in shared memory: a row is a key, D / 8 packs of 16 bytes.
// The packs of a row are shuffled by the key's number: eight lanes that read the same pack of eight
// keys find them in different banks.
template <int D> __device__ int place(int key, int pack) {
    return key * (D / 8) + (pack ^ key % 8);
}

// What a warp knows of up to 8 heads after the keys so far. Heads are the columns in both products:
// scores [KEYS, 8] = keys [KEYS, D] · queries [D, 8], and then
// acc [D, 8] += transposed values [D, KEYS] · weights [KEYS, 8].
template <typename T, int D> struct Heads {
    // Lane 4r + t has two numbers of each pack of the query of head r, and of heads 2t and 2t + 1
    // the largest score m, its part l of the sum of the weights 2^(score - m), and its part of acc.
    // -1e30 is below every score, and unlike -inf it can be subtracted from itself.
    unsigned query[D / 8];
    float m[2] = {-1e30f, -1e30f}, l[2] = {}, acc[D / 16][4] = {};

    // `count` of the tile's keys count. Values from there on must not be NaN: 0 · NaN is NaN.
    __device__ void attend(const uint4* keys, const uint4* values, int count, float scale) {
        const int lane = threadIdx.x % 32;
        float even[4] = {}, odd[4] = {};
        #pragma unroll
        for (int i = 0; i < D / 8; i += 4) {
            unsigned a[4];
            load_matrices<false>(a, keys + place<D>(lane % 16, i + lane / 16));
            multiply(even, a, query[i], query[i + 1], T());
            load_matrices<false>(a, keys + place<D>(lane % 16, i + 2 + lane / 16));
            multiply(odd, a, query[i + 2], query[i + 3], T());
        }
        float score[2][2], alpha[2];  // of keys r and r + 8, and of two heads
        unsigned weights[2];
        #pragma unroll
        for (int n = 0; n < 4; ++n)
            score[n / 2][n % 2] =
                lane / 4 + n / 2 * 8 < count ? scale * (even[n] + odd[n]) : -CUDART_INF_F;
        #pragma unroll
        for (int g = 0; g < 2; ++g) {
            float top = fmaxf(score[0][g], score[1][g]);
            #pragma unroll
            for (int offset = 4; offset < 32; offset *= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
            top = fmaxf(top, m[g]);
            alpha[g] = exp2f(m[g] - top);
            m[g] = top;
            l[g] *= alpha[g];
        }
        #pragma unroll
        for (int n = 0; n < 2; ++n) {
            alignas(4) T rounded[2];  // as the product takes them; so the sum does
            #pragma unroll
            for (int g = 0; g < 2; ++g) {
                rounded[g] = T(exp2f(score[n][g] - m[g]));
                l[g] += (float)rounded[g];
            }
            weights[n] = transposed(reinterpret_cast<const unsigned&>(rounded));
        }
        #pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            unsigned a[4];
            load_matrices<true>(
                a, values + place<D>(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
            #pragma unroll
            for (int n = 0; n < 4; ++n) acc[i][n] *= alpha[n % 2];
            multiply(acc[i], a, weights[0], weights[1], T());
        }
    }

    // Stores o [G, D], or tells the block that does. The block's warps meet in shared memory, acc_s
    // [WARPS, APART >= 8·D]; `used` blocks meet in `parts`, a slot for each of G·D numbers and of G
    // lse of each block. The last one waits for the others', and leaves their slots EMPTY again.
    // It can: there are no more blocks than SMs, so all run at once.
    template <int WARPS, int APART>
    __device__ void finish(T* o, float* acc_s, unsigned* parts, int G, int split, int used) {
        __shared__ float lse_s[8][WARPS];
        static_assert(8 * D <= APART);
        const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        #pragma unroll
        for (int g = 0; g < 2; ++g) {
            #pragma unroll
            for (int offset = 4; offset < 32; offset *= 2)
                l[g] += __shfl_xor_sync(~0u, l[g], offset);
            if (2 * t + g < G) {
                const float share = l[g] > 0 ? 1 / l[g] : 0;
                float* row = acc_s + warp * APART + (2 * t + g) * D + r;
                if (r == 0) lse_s[2 * t + g][warp] = m[g] + log2f(l[g]);  // without keys: -inf
                #pragma unroll
                for (int i = 0; i < D / 16; ++i) {
                    row[16 * i] = share * acc[i][g];
                    row[16 * i + 8] = share * acc[i][2 + g];
                }
            }
        }
        __syncthreads();
        const int part = G * (D + 1);
        #pragma unroll 1
        for (int i = threadIdx.x; i < G * D; i += 32 * WARPS) {
            const int g = i / D;
            Merge whole;
            float value[WARPS], lse[WARPS];
            #pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                value[w] = acc_s[w * APART + i];
                lse[w] = lse_s[g][w];
            }
            whole.add(lse, value, WARPS);
            if (split < used - 1) {
                unsigned* mine = parts + split * part;
                put(mine + i, __float_as_uint(whole.value()));
                if (i % D == 0) put(mine + G * D + g, __float_as_uint(whole.lse()));
                continue;
            }
            #pragma unroll 1
            for (int s = 0; s < used - 1; s += MERGED) {
                float sent[MERGED], sent_lse[MERGED];
                const int count = used - 1 - s;
                unsigned* from = parts + s * part;
                take(sent, sent_lse, from + i, from + G * D + g, part, count);
                whole.add(sent_lse, sent, count);
            }
            o[i] = T(whole.value());
        }
        if (split < used - 1 || used == 1) return;
        __syncthreads();  // all have taken what they wait for
        for (int i = threadIdx.x; i < (used - 1) * part; i += 32 * WARPS) put(parts + i, EMPTY);
    }
};
"""
# Chapter 11 puts a kernel of its own behind these two.
RING = r"""
// Block (h, split, b) attends to its share of the keys of sequence b and kv head h, for G <= 8
// query heads: to tile `split`, and to every gridDim.y-th after it. `slots` says where keys lie,
// and which may be read before the length is known.
//
// A warp has KEYS keys of a tile. It copies them STAGES - 1 tiles ahead into a ring of its own, in
// shared memory, and waits for no other warp before the end.
template <typename T, int D, int WARPS, int STAGES, typename Slots>
__device__ void attend(
    const T* q, const T* k, const T* v, const int* context_len, T* o, unsigned* parts, float scale,
    int G, Slots slots) {
    constexpr int PACKS = D / 8, COPIES = KEYS * PACKS / 32, TILE = KEYS * PACKS;
    const int h = blockIdx.x, split = blockIdx.y, H_kv = gridDim.x, splits = gridDim.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, t = lane % 4;
    const long long pair = (long long)blockIdx.z * H_kv + h;
    const uint4* k_head = reinterpret_cast<const uint4*>(k) + h * PACKS;
    const uint4* v_head = reinterpret_cast<const uint4*>(v) + h * PACKS;
    extern __shared__ __align__(16) unsigned char ring_bytes[];
    uint4* ring_s = reinterpret_cast<uint4*>(ring_bytes) + warp * (STAGES * 2 * TILE);

    auto first_key = [&](int tile) { return (tile * WARPS + warp) * KEYS; };  // of the warp
    auto ask = [&](int tile, int stage, int limit) {  // nothing is read from key `limit` on
        const int first = first_key(tile), last = limit - 1 - first;
        if (last >= 0) {
            #pragma unroll
            for (int u = 0; u < COPIES; ++u) {
                const int key = (32 * u + lane) / PACKS, pack = lane % PACKS;
                // Past the end, the last key once more.
                const long long at = (long long)slots.of(first, min(key, last)) * (H_kv * PACKS);
                uint4* to = ring_s + stage * 2 * TILE + place<D>(key, pack);
                __pipeline_memcpy_async(to, k_head + at + pack, 16);
                __pipeline_memcpy_async(to + TILE, v_head + at + pack, 16);
            }
        }
        __pipeline_commit();
        slots.look_up(first_key(tile + splits));
    };

    slots.look_up(first_key(split));
    int length = slots.readable(context_len);
    #pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
        ask(split + i * splits, i, length);
        // Volatile, or the load and the wait for it would come before the first tile is asked for.
        length = min((int)*(const volatile int*)context_len, slots.most);
    }
    unsigned* parts_here = parts + pair * splits * G * (D + 1);
    if (threadIdx.x * 32 < G * (D + 1))  // where this block's part will go, into L2
        asm volatile("prefetch.global.L2 [%0];" ::"l"(
            parts_here + split * G * (D + 1) + threadIdx.x * 32));
    Heads<T, D> heads;
    #pragma unroll
    for (int i = 0; i < PACKS; ++i)
        heads.query[i] = r < G ? reinterpret_cast<const unsigned*>(
                                     q + (pair * G + r) * D + 8 * i)[t] : 0;
    const int tiles = (length + WARPS * KEYS - 1) / (WARPS * KEYS);
    const int used = max(1, min(splits, tiles));  // an empty context takes one, to store zeros
    if (split >= used) {
        __pipeline_wait_prior(0);
        return;
    }
    int stage = 0;
    #pragma unroll 1
    for (int tile = split; tile < tiles; tile += splits) {
        __syncwarp();  // all lanes have read the stage that is filled next
        ask(tile + (STAGES - 1) * splits, stage == 0 ? STAGES - 1 : stage - 1, length);
        __pipeline_wait_prior(STAGES - 1);
        uint4 *keys = ring_s + stage * 2 * TILE, *values = keys + TILE;
        const int count = length - first_key(tile);
        if (count < KEYS)  // values past the end may be NaN
            #pragma unroll
            for (int u = 0; u < COPIES; ++u) {
                const int key = (32 * u + lane) / PACKS;
                if (key >= count) values[place<D>(key, lane % PACKS)] = uint4{};
            }
        __syncwarp();  // what the other lanes have copied is there
        heads.attend(keys, values, count, scale);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    __pipeline_wait_prior(0);  // an empty context leaves the first tile under way
    __syncwarp();
    heads.template finish<WARPS, STAGES * TILE * 8>(
        o + pair * G * D, reinterpret_cast<float*>(ring_bytes),
        parts_here, G, split, used);
}
"""
ATTEND = CONSTANTS + TENSOR_CORES + RING
PIPELINED = (
    ATTEND
    + r"""
// Sequence b has the slots first … first + most - 1 of the caches, key after key.
struct Contiguous {
    int first, most;
    // All of them may be read; what lies past the context is not used.
    __device__ int readable(const int* context_len) const { return most; }
    __device__ void look_up(int s) {}
    __device__ int of(int s, int i) const { return first + s + i; }
};

template <typename T, int D, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS) decode_attention_pipelined_kernel(
    const T* q, const T* k, const T* v, const int* context_lens, T* o, unsigned* parts, float scale,
    int G, int S) {
    attend<T, D, WARPS, STAGES>(
        q, k, v, context_lens + blockIdx.z, o, parts, scale, G,
        Contiguous{(int)blockIdx.z * S, S});
}
"""
)
CPP_TYPES = ((torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16"))


def instances(source: str, name: str) -> dict:
    """Dtype, D and warps -> the instance of a kernel template; what is launched is compiled."""
    return {
        (dtype, D, warps): lab.cuda_kernel(
            source,
            f"{name}<{T}, {D}, {warps}, {stages}>",
            options={"use_fast_math": True},  # exp2 in one instruction
        )
        for dtype, T in CPP_TYPES
        for D in HEAD_SIZES
        for warps, stages in STAGES.items()
    }


PIPELINED_KERNELS = instances(PIPELINED, "decode_attention_pipelined_kernel")


def takes(q: Tensor, H_kv: int, slots: int, *caches: Tensor) -> bool:
    """Whether rung 5's kernel can do it: sizes it has, and memory that begins with a vector."""
    _, H, D = q.shape
    late = any(x.data_ptr() % VECTOR_BYTES for x in (q, *caches))
    known = (q.dtype, D, WARPS) in PIPELINED_KERNELS and H // H_kv <= COLUMNS
    return known and slots <= MAX_SLOTS and not (SIMULATED or late)


def ring_bytes(warps: int, stages: int, row_bytes: int) -> int:
    """Shared memory for a block's ring; a key takes `row_bytes` in a head."""
    return stages * 2 * warps * KEYS * row_bytes


def warps_for(row_bytes: int) -> int:
    """Warps of a block that shares a context: 8, or 4 on GPUs with less shared memory."""
    return WARPS if ring_bytes(WARPS, STAGES[WARPS], row_bytes) <= SHARED else WARPS // 2


def ring_shape(B: int, H_kv: int, max_context: int, row_bytes: int) -> tuple[int, int]:
    """Warps of rung 5's blocks, and blocks that share a context.

    Where SMs get several blocks each, 4 warps will do, and with 3 stages two such blocks fill an
    SM. Otherwise 8, and contexts are shared out. One round of loads merges MERGED parts; more of
    them than that take another trip, so each should have 4 tiles to save it again.
    """
    if B * H_kv > SMS:
        return WARPS // 2, 1
    warps = warps_for(row_bytes)
    tiles = triton.cdiv(max_context, warps * KEYS)
    most = min(SMS // max(1, B * H_kv), tiles)
    return warps, min(most, max(MERGED, tiles // 4))


def ring_launcher(kernels: dict, q: Tensor, H_kv: int, max_context: int):
    """The instance of `kernels` for q, ready for its arguments."""
    B, _, D = q.shape
    warps, splits = ring_shape(B, H_kv, max_context, D * q.itemsize)
    shared = ring_bytes(warps, STAGES[warps], D * q.itemsize)
    return kernels[q.dtype, D, warps][(H_kv, splits, B), WARP * warps, shared]


def decode_attention_pipelined(
    q: Queries,
    k: Cache,
    v: Cache,
    context_lens: Lengths,
    *,
    max_context: int | None = None,
    out: Queries | None = None,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> Queries:
    """Products on the tensor cores, keys through a ring, and blocks that send each other numbers.

    Rung 4's kernel does the work for float32, where D is not 64 or 128 or H / H_kv more than 8,
    where q, k or v begin between two 16-byte vectors, and under the simulators. Arguments and
    errors are those of rung 4.
    """
    B, H, H_kv, S, D = check_args(q, k, v, context_lens, max_context, validate)
    if not takes(q, H_kv, B * S, k, v):
        how = {"max_context": max_context, "out": out, "workspace": workspace}
        return decode_attention_fused(q, k, v, context_lens, **how)
    lab.check_contiguous(q=q, k=k, v=v, context_lens=context_lens)
    out, workspace = memory(q, H_kv, max_context or S, out, workspace, k=k, v=v)
    scale = np.float32(D**-0.5 * LOG2_E)
    if out.numel() > 0:
        ring_launcher(PIPELINED_KERNELS, q, H_kv, max_context or S)(
            q, k, v, context_lens, out, workspace.parts, scale, np.int32(H // H_kv), np.int32(S)
        )
    return out


# Mutants -------------------------------------------------------------------------------------

GROUPED = lab.Exercise(
    "decode_attention_grouped",
    "decode_attention_grouped_kernel",
    hints=(
        "The program has kv head h of sequence b and the query heads h·G … h·G + G - 1. Key s of "
        "it begins ((b·S + s)·H_KV + h)·D elements in; its neighbour is H_KV·D further on. "
        "context_lens[b] keys count, and S is only how many there is room for. Make b an int64 "
        "before it is multiplied: a cache may have 2³¹ numbers and more.",
        "`scale` holds log2 e as well: multiply q by it once, and tl.exp2 of a score is exp of the "
        "scaled product. Masked keys need a score of -inf: with 0 they would weigh something.",
        "For each head, m = max(m_i, largest score of the tile), alpha = exp2(m_i - m) and p = "
        "exp2(s - m). Both l_i and acc shrink by alpha before the tile's p and p·v are added. m_i "
        "begins at LOWEST, with `tl.full`.",
        "A loop carries a tuple if every round makes a new one: m_new += (m,) for each head, then "
        "m_i = m_new. After the last tile o = acc / l_i; with an empty context l_i is 0.",
    ),
    mutants=(
        lab.Mutant(
            "no_max",
            "no max-subtraction",
            {"tl.maximum(m_i[g], tl.max(s, axis=0))": "0.0 * m_i[g]"},
        ),
        lab.Mutant(
            "no_rescale",
            "missing rescale",
            {"alpha = tl.exp2(m_i[g] - m)": "alpha = tl.exp2(m - m)"},
        ),
        lab.Mutant(
            "zeros",
            "wrong mask fill",
            {
                'tl.sum(q[g][None, :] * k, axis=1), -float("inf"))': (
                    "tl.sum(q[g][None, :] * k, axis=1), 0.0)"
                )
            },
        ),
        lab.Mutant(
            "no_scale",
            "missing scale",
            {"(q_g.to(tl.float32) * scale,)": ("(q_g.to(tl.float32) * scale * D**0.5,)")},
        ),
        lab.Mutant("whole_cache", "ignores context_lens", {"tl.load(context_lens_ptr + b)": "S"}),
        lab.Mutant(
            "last_key",
            "last key left out",
            {"tl.load(context_lens_ptr + b)": "tl.maximum(tl.load(context_lens_ptr + b) - 1, 1)"},
        ),
        lab.Mutant(
            "one_more",
            "reads past the context",
            {"tl.load(context_lens_ptr + b)": "tl.load(context_lens_ptr + b) + 1"},
        ),
        lab.Mutant(
            "head_map",
            "wrong GQA head map",
            {
                "q_ptr + (head + g) * D": "q_ptr + (b * H_KV * G + g * H_KV + h) * D",
                "o_ptr + (head + g) * D": "o_ptr + (b * H_KV * G + g * H_KV + h) * D",
            },
        ),
        lab.Mutant("sum_kept", "missing rescale of l_i", {"l_i[g] * alpha": "l_i[g]"}),
        lab.Mutant(
            "int32", "int32 overflow", {"tl.program_id(1).to(tl.int64)": "tl.program_id(1)"}
        ),
        lab.Mutant(
            "half",
            "low-precision accumulator",
            {
                "acc_new += (acc[g] * alpha + tl.sum(p[:, None] * v, axis=0),)": (
                    "a = acc[g] * alpha + tl.sum(p[:, None] * v, axis=0)\n"
                    "            acc_new += (a.to(tl.float16).to(tl.float32),)"
                )
            },
        ),
    ),
)

MERGE = lab.Exercise(
    "decode_attention_split",
    "decode_attention_merge_kernel",
    hints=(
        "Split i of query head h of sequence b left its result in row (b·H + h)·SPLITS + i of "
        "partial and of lse. Only the first cdiv(context_lens[b], SPLIT) splits were written.",
        "lse is log2 of a split's sum of exponentials. Of two splits with sums 2^x and 2^y, the "
        "whole is (2^x·o_x + 2^y·o_y) / (2^x + 2^y).",
        "2^lse may overflow: keep a running maximum, as in rung 2, with lse for the scores and the "
        "rows of partial for the values.",
    ),
    mutants=(
        lab.Mutant(
            "last_split",
            "last partial split dropped",
            {"for split in range(0, used)": "for split in range(0, tl.maximum(used - 1, 1))"},
        ),
        lab.Mutant(
            "mean",
            "splits weighed alike",
            {
                "weight = tl.exp2(lse - m_new)": ("weight = tl.exp2(0.0 * lse)"),
                "alpha = tl.exp2(m_i - m_new)": "alpha = tl.exp2(0.0 * m_i)",
            },
        ),
        lab.Mutant(
            "no_max",
            "no max-subtraction",
            {
                "m_new = tl.maximum(m_i, lse)": "m_new = 0.0 * lse",
                "m_i = LOWEST * 1.0": "m_i = 0.0",
            },
        ),
        lab.Mutant(
            "no_guard",
            "empty context",
            {"acc / tl.where(l_i > 0, l_i, 1.0)": "acc / l_i"},
        ),
        lab.Mutant(
            "half",
            "low-precision accumulator",
            {
                "acc = acc * alpha + weight * o": (
                    "acc = (acc * alpha + weight * o).to(tl.float16).to(tl.float32)"
                )
            },
        ),
    ),
)

# Attempts not kept ---------------------------------------------------------------------------


def decode_attention_wide(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """Rung 2 with four times as many keys in a tile."""
    B, H, H_kv, S, D = check_args(q, k, v, context_lens, None, False)
    lab.check_contiguous(q=q, k=k, v=v, context_lens=context_lens)
    o = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    if o.numel() > 0:
        decode_attention_grouped_kernel[(H_kv, B)](
            q,
            k,
            v,
            context_lens,
            o,
            D**-0.5 * LOG2_E,
            S,
            H_KV=H_kv,
            G=H // H_kv,
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            TILE=4 * TILE,
            num_warps=WARPS,
        )
    return o


def decode_attention_more_splits(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor) -> Tensor:
    """Rung 4 with eight programs for every kv head, however many there are."""
    B, H, H_kv, S, D = check_args(q, k, v, context_lens, None, False)
    lab.check_contiguous(q=q, k=k, v=v, context_lens=context_lens)
    o = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    splits, BLOCK_D = 8, triton.next_power_of_2(D)
    if o.numel() > 0:
        *workspace, _ = new_workspace(q, H_kv, splits, keep=True)
        decode_attention_fused_kernel[(H_kv, splits, B)](
            q,
            k,
            v,
            context_lens,
            o,
            *workspace,
            D**-0.5 * LOG2_E,
            S,
            splits,
            H_KV=H_kv,
            G=H // H_kv,
            D=D,
            BLOCK_D=BLOCK_D,
            LEAST=LEAST,
            UNROLL=UNROLL,
            ROWS=rows(BLOCK_D, q.itemsize, WARPS),
            MERGE_UNROLL=MERGE_UNROLL,
            MERGE_ROWS=rows(BLOCK_D, 4, WARPS),
            num_warps=WARPS,
        )
    return o


LADDER = lab.Ladder(
    DECODE_ATTENTION,
    (
        lab.Rung(decode_attention_naive, "numba"),
        lab.Rung(decode_attention_grouped, "triton"),
        lab.Rung(decode_attention_split, "triton"),
        lab.Rung(decode_attention_fused, "triton"),
        lab.Rung(decode_attention_pipelined, "cuda", simulates=False),
    ),
    exercises=(GROUPED, MERGE),
    rejected=(
        lab.Rejected(
            decode_attention_wide,
            against="decode_attention_grouped",
            attempt="rung 2 with tiles of 256 keys instead of 64",
            expected="four times the bytes under way in a program: 30 to 50 % less time",
            cause="Less than was hoped for. The compile card tells: a thread's registers are all "
            "in use and some numbers spill, so an SM holds one program and not two. Rung 4 "
            "has as much under way with half the registers: it asks for a round before it "
            "works on the last one.",
        ),
        lab.Rejected(
            decode_attention_more_splits,
            against="decode_attention_fused",
            attempt="rung 4 with eight programs for every kv head, also where the chip is full",
            expected="the last SMs to finish wait for a shorter program, and merging is cheap: "
            "3 to 5 % less time",
            cause="An SM holds two programs, so all of rung 4's run at once: there is no second "
            "wave to shorten. Eight times as many come in waves. Each begins with nothing "
            "under way, and ends with a store and an atomic.",
        ),
    ),
)

# The op --------------------------------------------------------------------------------------

decode_attention = decode_attention_pipelined

torch.library.custom_op(
    "kernel_ladder::decode_attention",
    decode_attention,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor context_lens, *, int? max_context=None)"
    " -> Tensor",
).register_fake(lambda q, k, v, context_lens, *, max_context=None: q.new_empty(q.shape))
