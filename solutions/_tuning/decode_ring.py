"""Rung 5 of decode_attention with other blocks: for batches that fill the SMs unevenly.

    PYTHONPATH=. python solutions/_tuning/decode_ring.py        about 60 s

With 8 kv heads, blocks of 8 warps (one an SM) leave 27 % of the SMs idle at B = 6 and 12, and 45 %
at B = 9. Blocks of 4 warps (two an SM) can be more. Each line: warps, blocks to a context, µs.
"""

import labkit as lab
from labkit.bench import _in_graphs, ceilings

import statistics

import numpy as np
import torch

from solutions import decode_attention as da


def launcher(warps: int, splits: int):
    """The kernel with this shape of blocks, and memory of its own for each sequence of calls."""
    parts = {}

    def run(q, k, v, context_lens):
        B, S, H_kv, D = k.shape
        H = q.shape[1]
        if B not in parts:
            size = B * H * splits * (D + 1)
            parts[B] = torch.full((size,), da.EMPTY, dtype=torch.int32, device=q.device)
        out = torch.empty_like(q)
        kernel = da.PIPELINED_KERNELS[q.dtype, D, warps]
        shared = da.ring_bytes(warps, da.STAGES[warps], D * q.itemsize)
        scale = np.float32(D**-0.5 * da.LOG2_E)
        kernel[(H_kv, splits, B), 32 * warps, shared](
            q, k, v, context_lens, out, parts[B], scale, np.int32(H // H_kv), np.int32(S)
        )
        return out

    return run


def main() -> None:
    """Batches whose blocks fill the SMs badly, and some that fill them well."""
    problem, read = da.DECODE_ATTENTION, ceilings()["read_bytes_per_s"]
    for B, ragged in ((1, 0), (3, 0), (4, 0), (6, 0), (8, 0), (9, 0), (11, 0), (12, 0), (16, 0),
                      (17, 0), (20, 0), (24, 0), (16, 1), (32, 1), (64, 1)):  # fmt: skip
        size = {"B": B, "S": 4096, **da.QWEN_SMALL, "ragged": ragged}
        inputs = problem.inputs(torch.bfloat16, **size)
        heads, shapes = 8 * B, set()
        for warps, slots in ((8, da.SMS), (4, 2 * da.SMS)):
            most = min(slots // heads, 4096 // (16 * warps))
            shapes |= {(warps, n) for n in (1, most, most // 2) if n >= 1}
        functions = {f"{w} warps x {n}": launcher(w, n) for w, n in sorted(shapes)}
        functions["rung 5"] = da.decode_attention_pipelined
        wanted = problem.reference(*(x.double() if x.is_floating_point() else x for x in inputs))
        for name, fn in list(functions.items()):
            error = (fn(*inputs).double() - wanted).abs().max().item()
            if not error < 0.02:
                print(f"{name}: wrong by {error:.2g}")
                del functions[name]
        del wanted
        work = problem.work(torch.bfloat16, **size)
        took = _in_graphs(functions, inputs, work, 20)
        print(f"-- B={B}{' ragged' if ragged else ''}, {heads} pairs; {lab.rate(read)} ceiling")
        for name, times in sorted(took.items(), key=lambda item: statistics.median(item[1])):
            t = statistics.median(times)
            print(f"   {name:14} {t * 1e6:7.1f} µs  {work.bytes / read / t:4.0%}", flush=True)


if __name__ == "__main__":
    main()
