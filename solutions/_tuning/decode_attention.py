"""Rung 5 of decode_attention on this GPU: other shapes of its launch and of its ring.

PYTHONPATH=. python solutions/_tuning/decode_attention.py        about 25 s

Each size is timed with events and a cold L2, as the bars are, and in a CUDA graph.
"""

import labkit as lab
from labkit.bench import _in_graphs, ceilings, interleaved
from labkit.compile import compile_cuda

import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from solutions import decode_attention

da = decode_attention
P, MODEL = da.DECODE_ATTENTION, da.QWEN_SMALL
SHAPES = {  # B, S -> warps, stages, blocks for a context
    (1, 512): ((8, 2, 4), (8, 3, 4), (8, 2, 2)),
    (1, 2048): ((8, 2, 8), (8, 3, 8), (8, 2, 16)),
    (1, 4096): ((8, 2, 8), (8, 3, 8), (8, 2, 16)),
    (1, 8192): ((8, 2, 8), (8, 2, 16), (8, 3, 8), (8, 3, 16)),
    (1, 32768): ((8, 2, 16), (8, 3, 16)),
    (32, 4096): ((4, 2, 1), (4, 3, 1), (8, 2, 1), (8, 3, 1)),
    (64, 4096): ((4, 2, 1), (4, 3, 1), (8, 2, 1), (8, 3, 1)),
}


def kernel(warps: int, stages: int):
    """Rung 5's kernel for bf16 and heads of 128."""
    name = f"decode_attention_pipelined_kernel<__nv_bfloat16, 128, {warps}, {stages}>"
    return lab.cuda_kernel(da.PIPELINED, name, options={"use_fast_math": True})


KERNELS = {(warps, stages): kernel(warps, stages) for warps in (4, 8) for stages in (2, 3)}


def variant(warps: int, stages: int, splits: int, q, k):
    """A function of q, k, v and context_lens, with memory of its own."""
    (B, H, D), (S, H_kv) = q.shape, k.shape[1:3]
    ring = da.ring_bytes(warps, stages, D * q.itemsize)
    run = KERNELS[warps, stages].configure((H_kv, splits, B), warps * da.WARP, ring)
    scale, out = np.float32(D**-0.5 * da.LOG2_E), torch.empty_like(q)
    parts = da.new_workspace(q, H_kv, splits).parts

    def call(q, k, v, n):
        run(q, k, v, n, out, parts, scale, np.int32(H // H_kv), np.int32(S))
        return out

    return call


def main() -> None:
    """A table for each size; variants that differ from SDPA are named."""
    torch.zeros(1, device="cuda")
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda k: compile_cuda(k, "sm_90"), KERNELS.values()))
    read = ceilings()["read_bytes_per_s"]
    print(f"read {read / 1e12:.2f} TB/s, empty {ceilings()['empty_kernel_s'] * 1e6:.2f} µs")
    for (B, S), shapes in SHAPES.items():
        args = P.inputs(torch.bfloat16, B=B, S=S, **MODEL)
        functions = {"SDPA, full": da.full_sdpa}
        functions["rung 5"] = da.decode_attention_pipelined
        functions |= {f"{s}": variant(*s, *args[:2]) for s in shapes}
        truth = da.full_sdpa(*args).float()
        gap = {x: (f(*args).float() - truth).abs().max().item() for x, f in functions.items()}
        wrong = [x for x, g in gap.items() if not g <= 0.02 * truth.abs().max().item()]
        cold = interleaved({x: lambda f=f, a=args: f(*a) for x, f in functions.items()}, 100)
        work = P.work(torch.bfloat16, B=B, S=S, **MODEL)
        graph = _in_graphs(functions, args, work, 20)
        cold, graph = ({x: statistics.median(t) for x, t in ts.items()} for ts in (cold, graph))
        print(
            f"-- B={B} S={S}: µs, of SDPA, of read: cold | in a graph",
            f"WRONG {wrong}" * bool(wrong),
        )
        for x in functions:
            line = (
                f"{t[x] * 1e6:7.2f} {t[x] / t['SDPA, full']:5.2f} {work.bytes / t[x] / read:4.0%}"
                for t in (cold, graph)
            )
            print(f"  {x:26}", " | ".join(line), flush=True)


if __name__ == "__main__":
    main()
