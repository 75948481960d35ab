"""Attention of decoding over a paged cache: keys and values lie in pages, in any order.

    o[b, h] = Σ_s p[b, h, s] · v[slot(b, s), h']
    p[b, h] = softmax_s(q[b, h] · k[slot(b, s), h'] / sqrt(D))
    slot(b, s) = block_table[b, s // page_size] · page_size + s % page_size

over the context of b, s = 0 … context_lens[b] - 1, with h' = h // (H / H_kv). Table entries past a
context are holes, -1: no page is there, and none is read. Sequences may share pages.

The caches are chapter 04's [S, H_kv, D], S = num_pages · page_size, with the slots of a page side
by side: `k_cache.flatten(0, 1)` and slot_mapping mean the same there and here. Chapter 10's caches
[B, S, H_kv, D] are pages of S slots, with the table 0 … B - 1.

Shapes   q [B, H, D]; k_cache, v_cache [num_pages, page_size, H_kv, D]; block_table [B, max_pages]
         int32; context_lens [B] int32 -> o [B, H, D]
         write: k, v [T, H_kv, D] and slot_mapping [T] int64 -> rows of the caches
Cost     chapter 10's, 2·Σ_b context_lens[b]·H_kv·D·itemsize bytes, and 4 bytes a page of table
Source   Kwon et al. 2023, arXiv:2309.06180, §4.1
"""

import labkit as lab
from labkit import bars
from labkit.launch import kernels_of

import inspect
import math

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int32
from numba import cuda
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from solutions import decode_attention as contiguous
from solutions.decode_attention import (
    ATTEND,
    LOG2_E,
    QWEN_SMALL,
    Lengths,
    Queries,
    Workspace,
    attended,
    finish,
    memory,
    queries,
    sizes,
)

THREADS = 32  # threads of a block of rung 2, which copies a page
WRITE_WARPS = 4  # of a program that writes a token
INTS = (torch.int32, torch.int64)
Pages, BlockTable = Float[Tensor, "P page H_kv D"], Int32[Tensor, "B max_pages"]

# Problem -------------------------------------------------------------------------------------


def tables(B: int, max_pages: int, used: Tensor, seed: int) -> tuple[BlockTable, int]:
    """A table with `used[b]` pages for sequence b, shuffled, then holes; and how many exist."""
    count = B * max_pages + 2  # some belong to nobody
    generator = torch.Generator("cpu").manual_seed(seed)
    table = torch.randperm(count, generator=generator)[: B * max_pages].view(B, max_pages)
    holes = torch.arange(max_pages) >= used[:, None]
    return table.masked_fill(holes, -1).to(torch.int32), count


def inputs(
    dtype: torch.dtype,
    seed: int = 0,
    *,
    B: int,
    H: int,
    H_kv: int,
    S: int,
    D: int,
    page: int,
    ragged: int = 0,
) -> tuple[Tensor, ...]:
    """Standard normal q and caches, unused slots too; contexts of S tokens, or of 1 to S."""
    context_lens = contiguous.lengths(B, S, ragged, seed)
    table, count = tables(B, -(-S // page), (context_lens + page - 1) // page, seed)
    shape = (count, page, H_kv, D)
    q, k_cache, v_cache = lab.randn((B, H, D), shape, shape, dtype=dtype, seed=seed)
    return q, k_cache, v_cache, table.to(q.device), context_lens.to(q.device)


def gathered(cache: Pages, block_table: BlockTable) -> Float[Tensor, "B S H_kv D"]:
    """The pages of each sequence one after another; page 0 for a hole."""
    return cache[block_table.clamp(min=0).long()].flatten(1, 2)


def reference(
    q: Queries, k_cache: Pages, v_cache: Pages, block_table: BlockTable, context_lens: Lengths
) -> Queries:
    """Chapter 10's, on the gathered pages."""
    k, v = gathered(k_cache, block_table), gathered(v_cache, block_table)
    return contiguous.reference(q, k, v, context_lens)


def library(
    q: Queries, k_cache: Pages, v_cache: Pages, block_table: BlockTable, context_lens: Lengths
) -> Queries:
    """gather, SDPA mask: indexing, then F.scaled_dot_product_attention, in torch alone."""
    k, v = gathered(k_cache, block_table), gathered(v_cache, block_table)
    return contiguous.library(q, k, v, context_lens)


# The peers are timed on contexts that fill their pages, and the first is right for no others.


def full_sdpa(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Indexing, then F.scaled_dot_product_attention without a mask."""
    return contiguous.full_sdpa(q, gathered(k_cache, table), gathered(v_cache, table), lens)


# What peers prepare once for a cache.
PIECES, PLANS, SLOTS = WeakIdKeyDictionary(), WeakIdKeyDictionary(), WeakIdKeyDictionary()


def in_one_piece(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor
) -> Tensor:
    """Chapter 10's kernel on caches that were gathered beforehand."""
    if k_cache not in PIECES:
        PIECES[k_cache] = gathered(k_cache, table), gathered(v_cache, table)
    return contiguous.decode_attention(q, *PIECES[k_cache], lens)


def flashinfer_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor
) -> Tensor:
    """FlashInfer's batch decode over the same pages; its plan is made once."""
    if k_cache not in PLANS:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        page, H_kv, D = k_cache.shape[1:]
        used = (lens + page - 1) // page
        room = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        PLANS[k_cache] = BatchDecodeWithPagedKVCacheWrapper(room, "NHD")
        PLANS[k_cache].plan(
            torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(torch.int32),
            table[table >= 0],
            lens - (used - 1) * page,
            q.shape[1],
            H_kv,
            D,
            page,
            q_data_type=q.dtype,
        )
    return PLANS[k_cache].run(q, (k_cache, v_cache))


def fa3_paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """FlashAttention 3 over the same pages. Not every wheel of it was built with them."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    how = {"cache_seqlens": lens, "page_table": table}
    return flash_attn_with_kvcache(q[:, None], k_cache, v_cache, **how)[:, 0]


SMALL = {"B": 2, "H": 2, "H_kv": 1, "S": 90, "D": 8, "page": 16, "ragged": 1}
LARGE = contiguous.LARGE | {"page": 16}


def order_of_pages(kernel) -> str | None:
    """Where the pages lie does not change a bit."""
    for dtype, size, _ in contiguous.cases(kernel, SMALL, LARGE):
        q, k_cache, v_cache, table, context_lens = inputs(dtype, seed=1, **size)
        generator = torch.Generator("cpu").manual_seed(2)
        order = torch.randperm(len(k_cache), generator=generator).to(q.device)
        place = order.argsort().to(torch.int32)  # page p is now page place[p]
        moved = torch.where(table < 0, table, place[table.clamp(min=0).long()])
        here = kernel(q, k_cache, v_cache, table, context_lens)
        there = kernel(q, k_cache[order], v_cache[order], moved, context_lens)
        if not torch.equal(here, there):
            return "shuffled pages give other bits"
    return None


def shared_pages(kernel) -> str | None:
    """Two sequences with one prefix may have its pages in common."""
    for dtype, size, allowed in contiguous.cases(kernel, SMALL, LARGE):
        q, k_cache, v_cache, table, context_lens = inputs(dtype, seed=1, **size)
        table[1, :2], context_lens[1] = table[0, :2], 37
        table[1, 3:] = -1
        o = kernel(q, k_cache, v_cache, table, context_lens).double()
        truth = reference(q.double(), k_cache.double(), v_cache.double(), table, context_lens)
        if not (o - truth).abs().max().item() <= allowed:
            return "a shared prefix comes out wrong"
    return None


def unused_slots(kernel) -> str | None:
    """NaN in every slot that no token has changes nothing."""
    for dtype, size, _ in contiguous.cases(kernel, SMALL, LARGE):
        q, k_cache, v_cache, table, context_lens = inputs(dtype, seed=1, **size)
        used = torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=q.device)
        for b, length in enumerate(context_lens.tolist()):
            s = torch.arange(length, device=q.device)
            used[table[b, s // size["page"]].long(), s % size["page"]] = True
        spoilt = (x.masked_fill(~used[:, :, None, None], math.nan) for x in (k_cache, v_cache))
        got = contiguous.quietly(kernel, q, *spoilt, table, context_lens)
        wanted = contiguous.quietly(kernel, q, k_cache, v_cache, table, context_lens)
        if not torch.equal(got, wanted):
            return "what an unused slot holds changes the result"
    return None


def empty_context(kernel) -> str | None:
    """A sequence without tokens or pages gets zeros."""
    for dtype, size, _ in contiguous.cases(kernel, SMALL, LARGE):
        q, k_cache, v_cache, table, context_lens = inputs(dtype, seed=1, **size)
        table[1], context_lens[1] = -1, 0
        o = contiguous.quietly(kernel, q, k_cache, v_cache, table, context_lens)
        if o[1].any():
            return "a sequence without tokens does not get zeros"
    return None


def reads_what_was_written(kernel) -> str | None:
    """Tokens that paged_kv_write puts into their slots are those that the kernel finds."""
    for dtype, size, allowed in contiguous.cases(kernel, SMALL, LARGE):
        if wrong := written_and_read(kernel, inputs(dtype, seed=1, **size), size["S"], allowed):
            return wrong
    return None


def written_and_read(kernel, args: tuple[Tensor, ...], S: int, allowed: float) -> str | None:
    """The same, for these arguments, whose contexts are of up to S tokens."""
    q, k_cache, v_cache, table, context_lens = args
    page, H_kv, D = k_cache.shape[1:]
    wanted = reference(q.double(), k_cache.double(), v_cache.double(), table, context_lens)
    s = torch.arange(S, device=q.device)
    slots = table[:, s // page].long() * page + s % page  # [B, S]
    slots = torch.where(s < context_lens[:, None], slots, -1).flatten()
    k, v = (gathered(x, table)[:, :S].reshape(-1, H_kv, D) for x in (k_cache, v_cache))
    fresh = torch.full_like(k_cache, math.nan), torch.full_like(v_cache, math.nan)
    paged_kv_write(k, v, *fresh, slots)
    for name, new, old in zip(("k_cache", "v_cache"), fresh, (k_cache, v_cache), strict=True):
        written = ~new.isnan()
        if int(written.sum()) != int(context_lens.sum()) * H_kv * D:
            return f"paged_kv_write wrote {int(written.sum())} values of {name}"
        if not torch.equal(new[written], old[written]):
            return f"paged_kv_write put a token into another's slot of {name}"
    error = (contiguous.quietly(kernel, q, *fresh, table, context_lens) - wanted).abs().max().item()
    return None if error <= allowed else f"after paged_kv_write, o is wrong by {error:.2g}"


def same_as_contiguous(kernel) -> str | None:
    """A kernel that reads pages itself gives the bits that one of chapter 10's gives without."""
    if "max_context" not in inspect.signature(kernel).parameters:
        return None  # gathered pages go to SDPA
    cases = [
        (torch.float32, SMALL | size)
        for size in ({}, {"S": 150, "page": 64}, {"S": 77, "page": 4, "H": 4, "H_kv": 2})
    ]
    if not lab.SIMULATED and "cuda" in {k.kind for k in kernels_of(kernel)}:
        large = {"B": 5, "H": 8, "S": 1500, "ragged": 1}
        cases += [
            (dtype, large | {"H_kv": 8 // G, "D": D, "page": page})
            for dtype, D, page, G in (
                *((d, 128, 16, 2) for d in PAGED_KV.dtypes),
                *((torch.bfloat16, 128, 16, group) for group in (1, 4, 8)),
                (torch.bfloat16, 64, 64, 2),
                (torch.bfloat16, 128, 12, 2),
            )
        ]
    for dtype, size in cases:
        args = inputs(dtype, seed=1, **size)
        q, k_cache, v_cache, table, context_lens = args
        k, v = gathered(k_cache, table), gathered(v_cache, table)
        got = kernel(*args, max_context=k.shape[1])
        if not any(
            torch.equal(got, without(q, k, v, context_lens, max_context=k.shape[1]))
            for without in (contiguous.decode_attention, contiguous.decode_attention_fused)
        ):
            return f"{dtype}, {size}: other bits than from one piece of memory"
    return None


def given_memory(kernel) -> str | None:
    """With an output and a workspace of the caller's: the same bits, call after call."""
    if "workspace" not in inspect.signature(kernel).parameters:
        return None
    for dtype, size, _ in contiguous.cases(kernel, SMALL, LARGE):
        args = inputs(dtype, seed=1, **size)
        wanted, out = kernel(*args), torch.empty_like(args[0])
        workspace = paged_kv_workspace(args[0], args[1], args[3])
        for call in range(2):
            got = kernel(*args, out=out.fill_(7.0), workspace=workspace)
            if got is not out or not torch.equal(out, wanted):
                return f"call {call} with `out` and `workspace` differs from a call without"
    return None


def past_2_to_31(kernel) -> str | None:
    """A page that begins 2^31 numbers into the cache is found."""
    D, allowed = (64, 1e-5) if lab.SIMULATED else (128, 2**-6)
    last = 2**31 // (16 * D)
    if (cache := contiguous.far(last + 1, 16, 1, D)) is None:
        return None
    q, cache[-1] = lab.randn((1, 2, D), (16, 1, D), dtype=cache.dtype, seed=1)
    table, context_lens = (
        torch.tensor(x, dtype=torch.int32, device=q.device) for x in ([[last]], [3])
    )
    page = cache[-1:].double()
    wanted = contiguous.reference(q.double(), page, page, context_lens)
    error = contiguous.quietly(kernel, q, cache, cache, table, context_lens) - wanted
    error = error.abs().max().item()
    del cache
    contiguous.give_back()
    return (
        None if error <= allowed else f"page {last:,} is not found: a page has {16 * D:,} numbers"
    )


def wrong_heads(q: Queries, k_cache: Pages, v_cache: Pages, *rest: Tensor) -> Queries:
    """A suspect: query head h takes head h % H_kv, as if the heads of a group lay apart."""
    head = torch.arange(q.shape[1], device=q.device) % k_cache.shape[2]
    return reference(q, k_cache[:, :, head], v_cache[:, :, head], *rest)


def in_order(table: BlockTable) -> BlockTable:
    """A table of the first pages, in order, for every sequence."""
    return torch.arange(table.shape[1], device=table.device).to(torch.int32).expand(table.shape)


PAGES = (16, 64, 256)
CONTEXTS = (128, 512, 2048, 4096)


def pages_of(B: int, S: int, page: int, ragged: int) -> int:
    """Pages that contexts of the first seed use."""
    return int(((contiguous.lengths(B, S, ragged, 0) + page - 1) // page).sum())


PAGED_KV = lab.Problem(
    name="paged_kv",
    inputs=inputs,
    reference=reference,
    library=library,
    work=lambda dtype, B, H, H_kv, S, D, page, ragged=0: lab.Work(
        bytes=contiguous.DECODE_ATTENTION.work(dtype, B, H, H_kv, S, D, ragged).bytes
        + 4 * pages_of(B, S, page, ragged),
        flops=contiguous.DECODE_ATTENTION.work(dtype, B, H, H_kv, S, D, ragged).flops,
    ),
    terms=lambda B, H, H_kv, S, D, page, ragged=0: S + D,
    # One token; a page that is full, one token more, one less; several splits; page sizes that
    # are no power of two, or longer than the context; a head for all, three to a head.
    test_sizes=(
        *sizes((1, 1, 1, 1, 4, 16), (1, 4, 2, 16, 8, 16), (1, 4, 2, 33, 8, 16)),
        *sizes((1, 6, 2, 63, 12, 64), (2, 2, 1, 90, 8, 12)),
        *sizes((2, 2, 1, 300, 8, 64), (3, 2, 1, 130, 8, 256), ragged=1),
        *sizes((1, 2, 1, 40, 64, 16)),  # a head size that the C++ kernel takes
        *sizes((2, 4, 2, 180, 8, 16), (2, 2, 1, 77, 12, 128), ragged=1),
    ),
    empty_size={"B": 0, "H": 4, "H_kv": 2, "S": 8, "D": 8, "page": 4},
    huge_size={"B": 2, "H": 64, "H_kv": 64, "S": 2**18 + 1, "D": 128, "page": 64},
    bench_size={"B": 32, "S": 4096, **QWEN_SMALL, "page": 16},
    sweep=(
        *({"B": 1, "S": s, **QWEN_SMALL, "page": 16} for s in (*CONTEXTS, 32768)),
        *({"B": b, "S": 4096, **QWEN_SMALL, "page": p} for b in (1, 32) for p in PAGES[1:]),
        {"B": 64, "S": 4096, **QWEN_SMALL, "page": 16},
        *({"B": b, "S": 4096, "H": 32, "H_kv": 8, "D": 128, "page": 16} for b in (1, 32)),  # 8B
    ),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),  # bf16 first: it is what is swept
    ceiling="read",
    target=(
        *(
            bars.ratio(
                "paged_kv_pipelined", "gather, SDPA full", 0.59, dtype="bfloat16",
                B=1, S=s, **QWEN_SMALL, page=16,
            )
            for s in CONTEXTS
        ),
        *(
            bars.ratio(
                "paged_kv_pipelined", "contiguous", 1.10, dtype="bfloat16",
                B=b, S=4096, **QWEN_SMALL, page=16,
            )
            for b in (1, 32)
        ),
    ),
    peers={
        "gather, SDPA full": full_sdpa,
        "contiguous": in_one_piece,
        "flashinfer": flashinfer_paged,
        "fa3": fa3_paged,
    },
    suspects={
        "page-table aliasing": lambda q, k, v, table, n: reference(
            q, k, v, table[:1].expand(table.shape), n
        ),
        "ignores block_table": lambda q, k, v, table, n: reference(q, k, v, in_order(table), n),
        "slot off by one": lambda q, k, v, table, n: reference(
            q, k.roll(-1, 1), v.roll(-1, 1), table, n
        ),
        "wrong GQA head map": wrong_heads,
        "missing scale": lambda q, *rest: reference(q * q.shape[2] ** 0.5, *rest),
        "last key left out": lambda *args: reference(*args[:4], (args[4] - 1).clamp(min=1)),
    },
    properties=(
        lab.Property("shuffled pages change no bit", "depends on where pages lie", order_of_pages),
        lab.Property("sequences may share pages", "page-table aliasing", shared_pages),
        lab.Property("unused slots do not matter", "reads past the context", unused_slots),
        lab.Property("an empty context gives zeros", "empty context", empty_context),
        lab.Property(
            "it reads what paged_kv_write wrote", "slot off by one", reads_what_was_written
        ),
        lab.Property(
            "the bits are those of chapter 10", "another order of sums", same_as_contiguous
        ),
        lab.Property("a workspace can be used again", "workspace left dirty", given_memory),
        lab.Property("a cache may have 2^31 numbers and more", "int32 overflow", past_2_to_31),
    ),
)  # fmt: skip


def write_inputs(
    dtype: torch.dtype, seed: int = 0, *, T: int, H_kv: int, D: int, page: int
) -> tuple[Tensor, ...]:
    """Normal k, v and caches; a slot of its own for each token, never the last of the cache."""
    count = -(-T // page) + 1
    tokens, cache = (T, H_kv, D), (count, page, H_kv, D)
    k, v, k_cache, v_cache = lab.randn(tokens, tokens, cache, cache, dtype=dtype, seed=seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    slots = torch.randperm(count * page - 1, generator=generator)[:T]
    return k, v, k_cache, v_cache, slots.to(k.device)


def write_reference(
    k: Tensor, v: Tensor, k_cache: Pages, v_cache: Pages, slot_mapping: Tensor
) -> tuple[Pages, Pages]:
    """Token t goes to place slot_mapping[t] of the caches."""
    at = slot_mapping // k_cache.shape[1], slot_mapping % k_cache.shape[1]
    k_cache[at], v_cache[at] = k, v
    return k_cache, v_cache


def write_library(
    k: Tensor, v: Tensor, k_cache: Pages, v_cache: Pages, slot_mapping: Tensor
) -> tuple[Pages, Pages]:
    """Indexing, twice: once for keys, once for values."""
    return write_reference(k, v, k_cache, v_cache, slot_mapping)


def writes_its_slots_only(kernel) -> str | None:
    """A token with slot -1 is skipped, tokens may lie apart, and no other slot changes."""
    packed, _ = lab.randn((4, 6, 8), (1,), dtype=torch.float32, seed=1)
    k, v = packed[:, 2:4], packed[:, 4:]  # as in the output of a fused projection
    # Slot -1 would be the row before the cache: it belongs to the same allocation.
    rooms = [torch.full((4, 3, 2, 8), 9.0, device=k.device) for _ in range(2)]
    slots = torch.tensor([5, -1, 0, 3], device=k.device)
    kernel(k, v, *(room[1:-1] for room in rooms), slots)
    for name, room, x in zip(("k_cache", "v_cache"), rooms, (k, v), strict=True):
        want = torch.full_like(room, 9.0)
        want.flatten(0, 1)[3 + slots[slots >= 0]] = x[slots >= 0]
        wrong = (room != want).flatten(0, 1).flatten(1).any(dim=1).nonzero().flatten() - 3
        if len(wrong):
            return f"slots {slots.tolist()} of 6: wrong in {name}, slots {wrong.tolist()}"
    return None


PAGED_KV_WRITE = lab.Problem(
    name="paged_kv_write",
    inputs=write_inputs,
    reference=write_reference,
    library=write_library,
    work=lambda dtype, T, H_kv, D, page: lab.Work(
        bytes=4 * T * H_kv * D * dtype.itemsize + 8 * T, flops=0
    ),
    terms=lambda T, H_kv, D, page: 1,
    mutates=("k_cache", "v_cache"),
    # One token; some pages and a rest; a page for many tokens; rows that are no power of two.
    test_sizes=tuple(
        dict(zip(("T", "H_kv", "D", "page"), s, strict=True))
        for s in ((1, 1, 4, 16), (5, 2, 8, 2), (7, 2, 8, 16), (33, 3, 12, 16))
    ),
    empty_size={"T": 0, "H_kv": 2, "D": 8, "page": 4},
    huge_size={"T": 2**17 + 1, "H_kv": 128, "D": 128, "page": 64},
    bench_size={"T": 8192, "H_kv": 8, "D": 128, "page": 16},
    sweep=tuple({"T": t, "H_kv": 8, "D": 128, "page": 16} for t in (1, 64, 1024)),
    dtypes=PAGED_KV.dtypes,
    target=(
        bars.fraction("paged_kv_write", 0.85, dtype="bfloat16", T=8192, H_kv=8, D=128, page=16),
    ),
    suspects={
        "slot off by one": lambda *args: write_reference(*args[:4], args[4] + 1),
        "ignores slot_mapping": lambda *args: write_reference(
            *args[:4], torch.arange(len(args[0]), device=args[0].device)
        ),
        "swaps k and v": lambda k, v, *rest: write_reference(v, k, *rest),
    },
    properties=(
        lab.Property("slot -1 is skipped", "writes skipped tokens", writes_its_slots_only),
    ),
)


def check_args(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    max_context: int | None,
    validate: bool,
) -> tuple[int, int, int, int, int, int]:
    """What every rung needs; returns B, H, H_kv, D, page_size and max_pages.

    Lengths and tables in the GPU's memory are read only if `validate`: that waits for the GPU.
    """
    lab.check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    tables = {"block_table": block_table, "context_lens": context_lens}
    lab.check_tensors(dtypes=(torch.int32,), like=q, **tables)
    if q.ndim != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}, must be [B, H, D]")
    B, H, D = q.shape
    shape = tuple(k_cache.shape)
    if k_cache.ndim != 4 or shape[3] != D or 0 in shape[1:]:
        raise ValueError(f"k_cache has shape {shape}, must be (num_pages, page_size, H_kv, {D})")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache has shape {tuple(v_cache.shape)}, must be {shape} like k_cache")
    if block_table.ndim != 2 or len(block_table) != B or block_table.shape[1] == 0:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}, must be ({B}, max_pages)"
        )
    num_pages, page_size, H_kv, _ = shape
    max_pages = block_table.shape[1]
    most, place = max_pages * page_size, "slots of a table row"
    contiguous.check_heads(q, H_kv, most, place, max_context)
    contiguous.check_lengths(context_lens, B, most, validate)
    if B > 0 and (validate or not context_lens.is_cuda):
        first = torch.arange(max_pages, device=q.device) * page_size  # token of each table entry
        used = block_table[first < context_lens[:, None]]
        for value in (int(used.min()), int(used.max())) if used.numel() else ():
            if not 0 <= value < num_pages:
                raise ValueError(
                    f"block_table holds {value} within a context, must lie in 0 … {num_pages - 1}"
                )
    return B, H, H_kv, D, page_size, max_pages


# Rung 1 --------------------------------------------------------------------------------------


@triton.jit
def paged_kv_write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    stride_k,
    stride_v,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program `token` copies a token's keys and values, ROW = H_kv·D of each, into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < ROW
    k = tl.load(k_ptr + token * stride_k + offs, mask=mask)
    v = tl.load(v_ptr + token * stride_v + offs, mask=mask)
    if slot >= 0:  # a padded token has slot -1: nothing to keep
        tl.store(k_cache_ptr + slot * ROW + offs, k, mask=mask)
        tl.store(v_cache_ptr + slot * ROW + offs, v, mask=mask)


def paged_kv_write(
    k: Float[Tensor, "T H_kv D"],
    v: Float[Tensor, "T H_kv D"],
    k_cache: Pages,
    v_cache: Pages,
    slot_mapping: Int[Tensor, " T"],
    *,
    validate: bool = False,
) -> tuple[Pages, Pages]:
    """Put k and v of each token into its slot of the caches, in place; -1 skips a token.

    Nothing is allocated: a CUDA graph can hold the launch. TypeError or ValueError for arguments
    other than k and v [T, H_kv, D], whose tokens may lie apart, contiguous caches of their dtype
    and slot_mapping [T]. A slot outside the caches is undefined on a GPU, a ValueError with
    `validate` (which waits for the GPU) and under the simulators.
    """
    lab.check_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    lab.check_tensors(dtypes=INTS, like=k, slot_mapping=slot_mapping)
    if k.ndim != 3 or 0 in k.shape[1:] or v.shape != k.shape:
        shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(f"k and v have shapes {shapes}, must both be [T, H_kv, D]")
    T, H_kv, D = k.shape
    if k_cache.ndim != 4 or k_cache.shape[2:] != (H_kv, D) or v_cache.shape != k_cache.shape:
        shapes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise ValueError(
            f"k_cache and v_cache have shapes {shapes}, must be (num_pages, page_size, {H_kv}, {D})"
        )
    if slot_mapping.shape != (T,):
        raise ValueError(f"slot_mapping has shape {tuple(slot_mapping.shape)}, must be ({T},)")
    for name, x in (("k", k), ("v", v)):
        if (D > 1 and x.stride(2) != 1) or (H_kv > 1 and x.stride(1) != D):
            raise ValueError(f"{name} has strides {x.stride()}: the heads of a token must adjoin")
    lab.check_contiguous(k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    lab.check_apart(k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    lab.check_apart(v_cache=v_cache, k=k, v=v)
    slots = k_cache.shape[0] * k_cache.shape[1]
    if T > 0 and (validate or not slot_mapping.is_cuda):
        for value in (int(slot_mapping.min()), int(slot_mapping.max())):
            if not -1 <= value < slots:
                raise ValueError(f"slot_mapping holds {value}, must lie in -1 … {slots - 1}")
    if T > 0:
        paged_kv_write_kernel[(T,)](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            k.stride(0),
            v.stride(0),
            ROW=H_kv * D,
            BLOCK=triton.next_power_of_2(H_kv * D),
            num_warps=WRITE_WARPS,
        )
    return k_cache, v_cache


# Rung 2 --------------------------------------------------------------------------------------


@cuda.jit
def paged_kv_gathered_kernel(k_cache, v_cache, block_table, context_lens, k, v):
    """Block (i, b) copies page i of sequence b to k[b] and v[b]; slots past the context get 0."""
    i, b = cuda.blockIdx.x, cuda.blockIdx.y
    tx = cuda.threadIdx.x
    page_size, H_kv, D = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    length = context_lens[b]
    page = block_table[b, i]
    for e in range(tx, page_size * H_kv * D, THREADS):
        d, h, slot = e % D, e // D % H_kv, e // (D * H_kv)
        s = i * page_size + slot
        if s < length:
            k[b, s, h, d] = k_cache[page, slot, h, d]
            v[b, s, h, d] = v_cache[page, slot, h, d]
        else:  # the page may be a hole; attention's mask needs numbers there
            k[b, s, h, d] = 0
            v[b, s, h, d] = 0


def paged_kv_gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_lens: Tensor
) -> Tensor:
    """Pages copied into one piece for SDPA: keys and values go to memory and back."""
    args = q, k_cache, v_cache, block_table, context_lens
    B, H, H_kv, D, page_size, max_pages = check_args(*args, None, False)
    k = torch.empty((B, max_pages * page_size, H_kv, D), dtype=q.dtype, device=q.device)
    v = torch.empty((B, max_pages * page_size, H_kv, D), dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    paged_kv_gathered_kernel[(max_pages, B), THREADS, lab.stream()](
        k_cache, v_cache, block_table, context_lens, k, v
    )
    return contiguous.library(q, k, v, context_lens)


# Rung 3 --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["PAGES", "SPLITS"])
def paged_kv_direct_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    context_lens_ptr,
    o_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    scale,
    PAGES,
    SPLITS,
    PAGE: tl.constexpr,
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
    """Program (h, split, b) does what chapter 10's does; the block table says where each key is.

    Splits, tiles and the order of all sums are the same, and so is every bit of the result.
    """
    h, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(context_lens_ptr + b), PAGES * PAGE)
    share = tl.maximum(tl.cdiv(length, SPLITS), LEAST)
    used = tl.maximum(tl.cdiv(length, share), 1)
    if split < used:
        first = split * share
        end = tl.minimum(first + share, length)
        offs_r, offs_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        table_ptr = block_table_ptr + b * PAGES  # the table's row of this sequence
        q, m_i, l_i, acc = queries(q_ptr + (b * H_KV + h) * G * D, scale, G, D, BLOCK_D, ROWS)
        for start in range(first, end, UNROLL * ROWS):
            k = ()
            v = ()
            for u in tl.static_range(UNROLL):
                s = start + u * ROWS + offs_r
                mask = (s < end)[:, None] & (offs_d < D)[None, :]
                # A hole lies past the context, where the mask is False: it is never followed.
                page = tl.load(table_ptr + s // PAGE, mask=s < end, other=0).to(tl.int64)
                row = ((page * PAGE + s % PAGE) * H_KV + h) * D  # where the key's head h begins
                offs = row[:, None] + offs_d[None, :]
                k += (tl.load(k_cache_ptr + offs, mask=mask, other=0.0),)
                v += (tl.load(v_cache_ptr + offs, mask=mask, other=0.0),)
            m_i, l_i, acc = attended(q, k, v, m_i, l_i, acc, start, end, G, ROWS, UNROLL)
        finish(
            m_i, l_i, acc, h, split, used, b, o_ptr, partial_ptr, lse_ptr, counter_ptr, SPLITS,
            H_KV, G, D, BLOCK_D, MERGE_UNROLL, MERGE_ROWS,
        )  # fmt: skip


def paged_kv_workspace(
    q: Queries, k_cache: Pages, block_table: BlockTable, *, max_context: int | None = None
) -> Workspace:
    """What `paged_kv_attention` needs beside its output, for one call after another."""
    lab.check_tensors(q=q, k_cache=k_cache)
    lab.check_tensors(dtypes=(torch.int32,), like=q, block_table=block_table)
    if k_cache.ndim != 4 or 0 in k_cache.shape[1:]:
        shape = tuple(k_cache.shape)
        raise ValueError(f"k_cache has shape {shape}, must be (num_pages, page_size, H_kv, D)")
    if block_table.ndim != 2 or block_table.shape[1] == 0:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}, must be (B, max_pages)"
        )
    page_size, H_kv = k_cache.shape[1:3]
    most = block_table.shape[1] * page_size
    contiguous.check_heads(q, H_kv, most, "slots of a table row", max_context)
    splits = contiguous.splits_for(len(q), H_kv, max_context or most)
    return contiguous.new_workspace(q, H_kv, splits)


def launch(
    kernel,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    max_context: int | None,
    out: Tensor | None,
    workspace: Workspace | None,
    validate: bool,
) -> Tensor:
    """Launch rung 3's or rung 4's kernel, which take the same arguments."""
    args = q, k_cache, v_cache, block_table, context_lens
    B, H, H_kv, D, page_size, max_pages = check_args(*args, max_context, validate)
    lab.check_contiguous(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, context_lens=context_lens
    )
    most, caches = max_pages * page_size, {"k_cache": k_cache, "v_cache": v_cache}
    out, workspace = memory(q, H_kv, max_context or most, out, workspace, **caches)
    splits, BLOCK_D = workspace.lse.shape[2], triton.next_power_of_2(D)
    num_warps = contiguous.WARPS
    if out.numel() > 0:
        kernel[(H_kv, splits, B)](
            *args,
            out,
            *workspace[:3],
            D**-0.5 * LOG2_E,
            max_pages,
            splits,
            PAGE=page_size,
            H_KV=H_kv,
            G=H // H_kv,
            D=D,
            BLOCK_D=BLOCK_D,
            LEAST=contiguous.LEAST,
            UNROLL=contiguous.UNROLL,
            ROWS=contiguous.rows(BLOCK_D, q.itemsize, num_warps),
            MERGE_UNROLL=contiguous.MERGE_UNROLL,
            MERGE_ROWS=contiguous.rows(BLOCK_D, 4, num_warps),
            num_warps=num_warps,
        )
    return out


def paged_kv_direct(
    q: Queries,
    k_cache: Pages,
    v_cache: Pages,
    block_table: BlockTable,
    context_lens: Lengths,
    *,
    max_context: int | None = None,
    out: Queries | None = None,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> Queries:
    """Attention straight from the pages: a look-up in the block table takes the copy's place.

    Arguments and errors as in paged_kv_prefetched.
    """
    args = q, k_cache, v_cache, block_table, context_lens
    return launch(paged_kv_direct_kernel, *args, max_context, out, workspace, validate)


# Rung 4 --------------------------------------------------------------------------------------


@triton.jit
def page_ids(table_ptr, start, end, PAGE: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr):
    """The pages of the keys of UNROLL tiles, the first from key `start`; 0 from `end` on."""
    pages = ()
    for u in tl.static_range(UNROLL):
        s = start + u * ROWS + tl.arange(0, ROWS)
        pages += (tl.load(table_ptr + s // PAGE, mask=s < end, other=0),)
    return pages


@triton.jit
def paged_tiles(
    k_cache_ptr,
    v_cache_ptr,
    pages,
    start,
    end,
    PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Chapter 10's `tiles`, of keys that lie in `pages`; the pointers are those of a head."""
    offs_d = tl.arange(0, BLOCK_D)
    k = ()
    v = ()
    for u in tl.static_range(UNROLL):
        s = start + u * ROWS + tl.arange(0, ROWS)
        mask = (s < end)[:, None] & (offs_d < D)[None, :]
        offs = (pages[u].to(tl.int64) * PAGE + s % PAGE)[:, None] * STRIDE + offs_d[None, :]
        k += (tl.load(k_cache_ptr + offs, mask=mask, other=0.0),)
        v += (tl.load(v_cache_ptr + offs, mask=mask, other=0.0),)
    return k, v


@triton.jit(do_not_specialize=["PAGES", "SPLITS"])
def paged_kv_prefetched_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    context_lens_ptr,
    o_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    scale,
    PAGES,
    SPLITS,
    PAGE: tl.constexpr,
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
    """Program (h, split, b) does what rung 3's does, with everything asked for early.

    While it works on the keys of a round, those of the next are on their way, and the page ids of
    the one after that.
    """
    h, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(context_lens_ptr + b), PAGES * PAGE)
    share = tl.maximum(tl.cdiv(length, SPLITS), LEAST)
    used = tl.maximum(tl.cdiv(length, share), 1)
    if split < used:
        STEP: tl.constexpr = UNROLL * ROWS
        STRIDE: tl.constexpr = H_KV * D
        first = split * share
        end = tl.minimum(first + share, length)
        table_ptr = block_table_ptr + b * PAGES
        k_ptr, v_ptr = k_cache_ptr + h * D, v_cache_ptr + h * D
        pages = page_ids(table_ptr, first, end, PAGE, ROWS, UNROLL)
        k, v = paged_tiles(k_ptr, v_ptr, pages, first, end, PAGE, STRIDE, D, BLOCK_D, ROWS, UNROLL)
        pages = page_ids(table_ptr, first + STEP, end, PAGE, ROWS, UNROLL)
        q, m_i, l_i, acc = queries(q_ptr + (b * H_KV + h) * G * D, scale, G, D, BLOCK_D, ROWS)
        for start in range(first, end, STEP):
            k_next, v_next = paged_tiles(
                k_ptr, v_ptr, pages, start + STEP, end, PAGE, STRIDE, D, BLOCK_D, ROWS, UNROLL
            )
            pages = page_ids(table_ptr, start + 2 * STEP, end, PAGE, ROWS, UNROLL)
            m_i, l_i, acc = attended(q, k, v, m_i, l_i, acc, start, end, G, ROWS, UNROLL)
            k, v = k_next, v_next
        finish(
            m_i, l_i, acc, h, split, used, b, o_ptr, partial_ptr, lse_ptr, counter_ptr, SPLITS,
            H_KV, G, D, BLOCK_D, MERGE_UNROLL, MERGE_ROWS,
        )  # fmt: skip


def paged_kv_prefetched(
    q: Queries,
    k_cache: Pages,
    v_cache: Pages,
    block_table: BlockTable,
    context_lens: Lengths,
    *,
    max_context: int | None = None,
    out: Queries | None = None,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> Queries:
    """Keys are asked for a round ahead, and page ids two: no look-up is waited for.

    Lengths and tables are read on the GPU. `max_context` says how long contexts will be, a whole
    row of the table if it is not given, and only decides how many programs share one. With `out`
    and `workspace` (from paged_kv_workspace) nothing is allocated, so a CUDA graph can hold the
    launch; two launches that run at the same time need two workspaces.

    TypeError or ValueError for arguments other than contiguous q [B, H, D] and caches [num_pages,
    page_size, H_kv, D] of one dtype, block_table [B, max_pages] and context_lens [B] int32. A page
    outside the cache within a context is undefined on a GPU, a ValueError with `validate` (which
    waits for the GPU) and under the simulators. So is a length outside 0 … max_pages · page_size,
    which a GPU takes for 0 or for all.
    """
    args = q, k_cache, v_cache, block_table, context_lens
    return launch(paged_kv_prefetched_kernel, *args, max_context, out, workspace, validate)


# Rung 5 --------------------------------------------------------------------------------------

PIPELINED = (
    ATTEND
    + r"""
// The block table's row of a sequence says where its keys lie. A lane looks one of them up for its
// warp, a tile ahead. Entries past the context may be read, but nothing is copied from there.
struct Paged {
    const int* table;
    int page_size, most, page, slot_of_page;
    __device__ int readable(const int* context_len) const { return min(*context_len, most); }
    __device__ void look_up(int s) {
        const unsigned key = s + threadIdx.x % 32;
        slot_of_page = key % page_size;
        page = (int)key < most ? table[key / page_size] : 0;
    }
    __device__ int of(int s, int i) const {
        return __shfl_sync(~0u, page * page_size + slot_of_page, i);
    }
};

template <typename T, int D, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS) paged_kv_pipelined_kernel(
    const T* q, const T* k_cache, const T* v_cache, const int* block_table,
    const int* context_lens, T* o, unsigned* parts, float scale, int G, int max_pages,
    int page_size) {
    attend<T, D, WARPS, STAGES>(
        q, k_cache, v_cache, context_lens + blockIdx.z, o, parts, scale, G,
        Paged{block_table + (long long)blockIdx.z * max_pages, page_size, max_pages * page_size});
}
"""
)
PIPELINED_KERNELS = contiguous.instances(PIPELINED, "paged_kv_pipelined_kernel")


def paged_kv_pipelined(
    q: Queries,
    k_cache: Pages,
    v_cache: Pages,
    block_table: BlockTable,
    context_lens: Lengths,
    *,
    max_context: int | None = None,
    out: Queries | None = None,
    workspace: Workspace | None = None,
    validate: bool = False,
) -> Queries:
    """Chapter 10's last kernel, with page ids looked up a tile ahead of the copies they are for.

    Rung 4's kernel does the work for the sizes and the memory that chapter 10's does not take, and
    under the simulators. Arguments and errors are those of rung 4.
    """
    args = q, k_cache, v_cache, block_table, context_lens
    _, H, H_kv, D, page_size, max_pages = check_args(*args, max_context, validate)
    most = max_pages * page_size
    slots = max(len(k_cache) * page_size, most)
    if not contiguous.takes(q, H_kv, slots, k_cache, v_cache):
        return launch(paged_kv_prefetched_kernel, *args, max_context, out, workspace, False)
    lab.check_contiguous(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, context_lens=context_lens
    )
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    out, workspace = memory(q, H_kv, max_context or most, out, workspace, **caches)
    if out.numel() > 0:
        contiguous.ring_launcher(PIPELINED_KERNELS, q, H_kv, max_context or most)(
            *args,
            out,
            workspace.parts,
            np.float32(D**-0.5 * LOG2_E),
            np.int32(H // H_kv),
            np.int32(max_pages),
            np.int32(page_size),
        )
    return out


# Mutants -------------------------------------------------------------------------------------

GATHERED = lab.Exercise(
    "paged_kv_gathered",
    "paged_kv_gathered_kernel",
    hints=(
        "A block has one entry of the block table, block_table[b, i], and copies that page: "
        "page_size·H_kv·D numbers of k_cache and as many of v_cache. Thread tx takes the numbers "
        "tx, tx + THREADS, ...",
        "Number e of a page has column e % D of head e // D % H_kv of slot e // (D·H_kv). The slot "
        "is for token i·page_size + slot of the sequence.",
        "Past the context the entry is -1. Do not read there, but write zeros: a weight of 0 times "
        "what happens to be in memory may be NaN.",
    ),
    mutants=(
        lab.Mutant(
            "one_table", "page-table aliasing", {"block_table[b, i]": "block_table[0 * b, i]"}
        ),
        lab.Mutant(
            "no_table",
            "ignores block_table",
            {"block_table[b, i]": "i"},
        ),
        lab.Mutant(
            "next_slot",
            "slot off by one",
            {
                "= k_cache[page, slot,": "= k_cache[page, (slot + 1) % page_size,",
                "= v_cache[page, slot,": "= v_cache[page, (slot + 1) % page_size,",
            },
        ),
        lab.Mutant("holes", "reads past the context", {"if s < length:": "if s >= 0:"}),
    ),
)

DIRECT = lab.Exercise(
    "paged_kv_direct",
    "paged_kv_direct_kernel",
    hints=(
        "Begin with chapter 10's fused kernel. Only where a key lies is new: k_cache and v_cache "
        "have no place for sequence b, the block table has a row for it, PAGES entries long.",
        "Token s is in page table[s // PAGE], slot s % PAGE of it. Load an entry for each key of "
        "the tile, under the mask: entries past the context are -1.",
        "A slot is H_KV·D numbers long. There may be more than 2³¹ in a cache: make the page an "
        "int64 before it is multiplied.",
        "queries(…), attended(…) and finish(…) are chapter 10's. With the same tiles in the same "
        "order, not one bit of the result changes.",
    ),
    mutants=(
        lab.Mutant(
            "one_table", "page-table aliasing", {"block_table_ptr + b * PAGES": "block_table_ptr"}
        ),
        lab.Mutant(
            "no_table",
            "ignores block_table",
            {
                "tl.load(table_ptr + s // PAGE, mask=s < end, other=0).to(tl.int64)": (
                    "(s // PAGE).to(tl.int64)"
                )
            },
        ),
        lab.Mutant("next_slot", "slot off by one", {"s % PAGE": "(s + 1) % PAGE"}),
        lab.Mutant(
            "no_scale",
            "missing scale",
            {"G * D, scale, G": "G * D, scale * D**0.5, G"},
        ),
        lab.Mutant(
            "last_key",
            "last key left out",
            {"tl.load(context_lens_ptr + b)": "tl.maximum(tl.load(context_lens_ptr + b) - 1, 1)"},
        ),
        lab.Mutant("int32", "int32 overflow", {"other=0).to(tl.int64)": "other=0)"}),
    ),
)

# Attempts not kept ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=["PAGES", "SPLITS"])
def paged_kv_whole_pages_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    context_lens_ptr,
    o_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    scale,
    PAGES,
    SPLITS,
    PAGE: tl.constexpr,
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
    """Rung 3 with a page for a tile; PAGE is a power of two."""
    h, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(context_lens_ptr + b), PAGES * PAGE)
    share = tl.cdiv(tl.maximum(tl.cdiv(length, SPLITS), LEAST), PAGE) * PAGE
    used = tl.maximum(tl.cdiv(length, share), 1)
    if split < used:
        first = split * share
        end = tl.minimum(first + share, length)
        offs_p, offs_d = tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
        q, m_i, l_i, acc = queries(q_ptr + (b * H_KV + h) * G * D, scale, G, D, BLOCK_D, PAGE)
        for start in range(first, end, PAGE):
            page = tl.load(block_table_ptr + b * PAGES + start // PAGE).to(tl.int64)
            mask = (start + offs_p < end)[:, None] & (offs_d < D)[None, :]
            offs = ((page * PAGE + offs_p) * H_KV + h)[:, None] * D + offs_d[None, :]
            k = (tl.load(k_cache_ptr + offs, mask=mask, other=0.0),)
            v = (tl.load(v_cache_ptr + offs, mask=mask, other=0.0),)
            m_i, l_i, acc = attended(q, k, v, m_i, l_i, acc, start, end, G, PAGE, 1)
        finish(
            m_i, l_i, acc, h, split, used, b, o_ptr, partial_ptr, lse_ptr, counter_ptr, SPLITS,
            H_KV, G, D, BLOCK_D, MERGE_UNROLL, MERGE_ROWS,
        )  # fmt: skip


def paged_kv_whole_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_lens: Tensor
) -> Tensor:
    """Rung 3 with a page for a tile: one look-up for all of its keys."""
    args = q, k_cache, v_cache, block_table, context_lens
    return launch(paged_kv_whole_pages_kernel, *args, None, None, None, False)


def paged_kv_single_slots(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_lens: Tensor
) -> Tensor:
    """The last rung on pages of one slot each, with a table that was made once."""
    page_size = k_cache.shape[1]
    if block_table not in SLOTS:
        slot = torch.arange(page_size, dtype=torch.int32, device=block_table.device)
        SLOTS[block_table] = (block_table[:, :, None] * page_size + slot).flatten(1)
    caches = (x.flatten(0, 1)[:, None] for x in (k_cache, v_cache))
    return paged_kv_pipelined(q, *caches, SLOTS[block_table], context_lens)


LADDER = lab.Ladder(
    PAGED_KV,
    (
        lab.Rung(paged_kv_write, "triton", problem=PAGED_KV_WRITE),
        lab.Rung(paged_kv_gathered, "numba"),
        lab.Rung(paged_kv_direct, "triton"),
        lab.Rung(paged_kv_prefetched, "triton"),
        lab.Rung(paged_kv_pipelined, "cuda", simulates=False),
    ),
    exercises=(GATHERED, DIRECT),
    rejected=(
        lab.Rejected(
            paged_kv_whole_pages,
            against="paged_kv_direct",
            attempt="rung 3 with a page of 16 tokens for a tile: one look-up for all of its keys",
            expected="a sixteenth of the look-ups, and no division for each key: 3 to 8 % less "
            "time",
            cause="A page of 16 tokens is a quarter of the bytes that rung 3 asks for at once. By "
            "its compile card an SM could hold more of these programs, but the grid has no "
            "more. Fewer look-ups do not make up for that.",
        ),
        lab.Rejected(
            paged_kv_single_slots,
            against="paged_kv_pipelined",
            attempt="pages of one slot: none is left unused, and prefixes are shared to the token",
            expected="16 times as many entries, but still only 4 bytes for a key and a value of "
            "512: up to 3 % more time",
            cause="In time, no price shows. The table is the price: it is 16 times as long, and a "
            "server writes it.",
        ),
    ),
)

# The ops -------------------------------------------------------------------------------------

paged_kv = paged_kv_pipelined
paged_kv_attention = paged_kv

torch.library.custom_op(
    "kernel_ladder::paged_kv",
    paged_kv,
    mutates_args=(),
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens, *, "
    "int? max_context=None) -> Tensor",
).register_fake(lambda q, *_, **__: q.new_empty(q.shape))


def into_slots(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The op that writes into caches and returns nothing."""
    paged_kv_write(k, v, k_cache, v_cache, slot_mapping)


torch.library.custom_op(
    "kernel_ladder::paged_kv_write",
    into_slots,
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping)"
    " -> ()",
).register_fake(lambda *_: None)
