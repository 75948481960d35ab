"""Rung 5 of paged_kv on this GPU: other shapes of its launch and of its ring.

PYTHONPATH=. python solutions/_tuning/paged_kv.py        about 40 s
"""

import labkit as lab
from labkit.bench import ceilings, interleaved
from labkit.compile import compile_cuda

import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from solutions import decode_attention as da
from solutions import paged_kv as pk

P, MODEL = pk.PAGED_KV, pk.QWEN_SMALL
SIZES = {  # B, S, page -> warps, stages, blocks for a context
    (1, 512, 16): ((8, 2, 4), (8, 3, 4)),
    (1, 2048, 16): ((8, 2, 8), (8, 3, 8), (8, 2, 16), (8, 3, 16)),
    (1, 4096, 16): ((8, 2, 8), (8, 3, 8), (8, 2, 16), (8, 3, 16)),
    (1, 4096, 256): ((8, 2, 8), (8, 3, 8), (8, 2, 16), (8, 3, 16)),
    (1, 8192, 16): ((8, 2, 16), (8, 3, 16), (8, 3, 8)),
    (1, 32768, 16): ((8, 2, 16), (8, 3, 16)),
    (32, 4096, 16): ((4, 2, 1), (4, 3, 1), (8, 2, 1), (8, 3, 1)),
    (32, 4096, 256): ((4, 2, 1), (4, 3, 1), (8, 2, 1), (8, 3, 1)),
    (64, 4096, 16): ((4, 2, 1), (4, 3, 1), (8, 2, 1), (8, 3, 1)),
}


def kernel(warps: int, stages: int):
    """The kernel for bf16 and heads of 128."""
    name = f"paged_kv_pipelined_kernel<__nv_bfloat16, 128, {warps}, {stages}>"
    return lab.cuda_kernel(pk.PIPELINED, name, options={"use_fast_math": True})


KERNELS = {(warps, stages): kernel(warps, stages) for warps in (4, 8) for stages in (2, 3)}


def variant(warps: int, stages: int, splits: int, args: tuple):
    """A function of the inputs, with memory of its own."""
    q, k_cache, _, table, _ = args
    (_, H, D), (page, H_kv), (B, pages) = q.shape, k_cache.shape[1:3], table.shape
    ring = da.ring_bytes(warps, stages, D * q.itemsize)
    run = KERNELS[warps, stages].configure((H_kv, splits, B), warps * da.WARP, ring)
    out, parts = torch.empty_like(q), da.new_workspace(q, H_kv, splits).parts
    numbers = np.float32(D**-0.5 * da.LOG2_E), *map(np.int32, (H // H_kv, pages, page))

    def call(*args):
        run(*args, out, parts, *numbers)
        return out

    return call


def main() -> None:
    """A line for each variant; those that differ from chapter 10 are named."""
    torch.zeros(1, device="cuda")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: compile_cuda(k, "sm_90"), KERNELS.values()))
    read = ceilings()["read_bytes_per_s"]
    for (B, S, page), shapes in SIZES.items():
        args = P.inputs(torch.bfloat16, B=B, S=S, page=page, **MODEL)
        one = [pk.gathered(x, args[3]) for x in args[1:3]]
        functions = {f"{s}": variant(*s, args) for s in shapes}
        ragged = P.inputs(torch.bfloat16, seed=1, B=B, S=S, page=page, ragged=1, **MODEL)
        pieces = (pk.gathered(x, ragged[3]) for x in ragged[1:3])
        want = da.decode_attention(ragged[0], *pieces, ragged[4]).float()
        gaps = {n: (f(*ragged).float() - want).abs().max() for n, f in functions.items()}
        wrong = [n for n, g in gaps.items() if not g <= 0.02 * want.abs().max()]
        calls = {"contiguous": lambda a=args, o=one: da.decode_attention(a[0], *o, a[4])}
        calls["rung 5"] = lambda a=args: pk.paged_kv_pipelined(*a)
        try:
            pk.flashinfer_paged(*args)
            calls["flashinfer"] = lambda a=args: pk.flashinfer_paged(*a)
        except Exception as why:
            print("flashinfer:", type(why).__name__)
        calls |= {n: lambda f=f, a=args: f(*a) for n, f in functions.items()}
        times = {n: statistics.median(t) for n, t in interleaved(calls, 100).items()}
        work = P.work(torch.bfloat16, B=B, S=S, page=page, **MODEL).bytes
        print(f"-- B={B} S={S} page={page}", f"WRONG {wrong}" * bool(wrong))
        for name, t in times.items():
            share = f"{t / times['contiguous']:5.2f} {work / t / read:4.0%}"
            print(f"  {name:18} {t * 1e6:7.2f} µs {share}", flush=True)


if __name__ == "__main__":
    main()
