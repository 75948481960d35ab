"""Rung 5 of paged_kv on this GPU: entries looked up two tiles ahead, and other shapes of a block.

PYTHONPATH=. python solutions/_tuning/paged_kv.py        about 40 s
"""

import labkit as lab
from labkit.bench import ceilings, interleaved
from labkit.compile import compile_cuda
from labkit.exercise import patched

import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from solutions import decode_attention as da
from solutions import paged_kv as pk

P, MODEL = pk.PAGED_KV, pk.QWEN_SMALL
# Each lane keeps the slots of its keys in the next two tiles. The first two look-ups go out
# together, so the second tile does not wait for an entry when the first has just arrived.
AHEAD = {
    "    auto ask = [&]": "    int here = slots.look_up(first_key(split));\n"
    "    int next = slots.look_up(first_key(split + splits));\n"
    "    auto ask = [&]",
    "slots.of(first, min(key, last))": "slots.of(here, first, min(key, last))",
    "        slots.look_up(first_key(tile + splits));\n": "        here = next;\n"
    "        next = slots.look_up(first_key(tile + 2 * splits));\n",
    "    slots.look_up(first_key(split));\n    int length": "    int length",
    "    int page_size, most, page, slot_of_page;\n": "    int page_size, most;\n",
    "    __device__ void look_up(int s) {\n": "    __device__ int look_up(int s) const {\n",
    "        slot_of_page = key % page_size;\n"
    "        page = (int)key < most ? table[key / page_size] : 0;\n": "        return (int)key < most "
    "? table[key / page_size] * page_size + key % page_size : 0;\n",
    "    __device__ int of(int s, int i) const {\n"
    "        return __shfl_sync(~0u, page * page_size + slot_of_page, i);\n": "    __device__ int "
    "of(int mine, int s, int i) const {\n        return __shfl_sync(~0u, mine, i);\n",
}
TEXTS = {"": pk.PIPELINED, "two ahead ": patched(pk.PIPELINED, AHEAD, "two ahead")}
RINGS = ((4, 2), (4, 3), (8, 2), (8, 3))  # warps, stages
SIZES = {  # B, S, page -> rings, and blocks for a context as ring_shape has them
    (1, 128, 16): ((8, 2),),
    (1, 512, 16): ((8, 2),),
    (1, 4096, 16): ((8, 2), (8, 3)),
    (1, 4096, 256): ((8, 2), (8, 3)),
    (1, 32768, 16): ((8, 2), (8, 3)),
    (32, 4096, 16): RINGS,
    (64, 4096, 16): RINGS,
}


def kernel(text: str, warps: int, stages: int):
    """The kernel for bf16 and heads of 128."""
    name = f"paged_kv_pipelined_kernel<__nv_bfloat16, 128, {warps}, {stages}>"
    return lab.cuda_kernel(TEXTS[text], name, options={"use_fast_math": True})


KERNELS = {(text, *ring): kernel(text, *ring) for text in TEXTS for ring in RINGS}


def variant(text: str, warps: int, stages: int, args: tuple):
    """A function of the inputs, with memory of its own."""
    q, k_cache, _, table, _ = args
    (B, H, D), (page, H_kv), pages = q.shape, k_cache.shape[1:3], table.shape[1]
    splits = da.ring_shape(B, H_kv, pages * page, D * q.itemsize)[1]
    ring = da.ring_bytes(warps, D * q.itemsize) // da.STAGES * stages
    run = KERNELS[text, warps, stages].configure((H_kv, splits, B), warps * da.WARP, ring)
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
    for (B, S, page), rings in SIZES.items():
        args = P.inputs(torch.bfloat16, B=B, S=S, page=page, **MODEL)
        one = [pk.gathered(x, args[3]) for x in args[1:3]]
        functions = {f"{t}{r}": variant(t, *r, args) for r in rings for t in TEXTS}
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
