"""Rung 6 of gemv on this GPU: rows and warps of a program, shape by shape.

PYTHONPATH=. python solutions/_tuning/gemv_w8.py        about 60 s, most of it for compiling
"""

from labkit.bench import _in_graphs, ceilings

import statistics

import torch
import triton

from solutions import gemv

BF16 = torch.bfloat16
SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (28672, 8192))
CUTS = [(rows, warps) for rows in (1, 2, 4) for warps in (1, 2, 4)]
CUTS += [(8, 1), (8, 2), (2, 8), (1, 8)]


def variant(rows: int, warps: int):
    """A function of x, w_q and scale, for one token."""

    def call(x, w_q, scale):
        N, K = len(w_q), x.shape[1]
        y = torch.empty((1, N), dtype=x.dtype, device=x.device)
        gemv.gemv_w8a16_fused_kernel[(triton.cdiv(N, rows),)](
            x,
            w_q.view(torch.int32),
            scale,
            y,
            *gemv.W8_BITS,
            N,
            M=1,
            K=K,
            ROWS=rows,
            LANES=gemv.WARP * warps,
            LANE=gemv.W8_LANE,
            num_warps=warps,
        )
        return y

    return call


def main() -> None:
    """The best cuts of each shape, beside the rung as it is."""
    read, problem = ceilings()["read_bytes_per_s"], gemv.GEMV_W8A16
    for N, K in SHAPES:
        args, work = (f(BF16, M=1, N=N, K=K) for f in (problem.inputs, problem.work))
        calls = {"the rung": gemv.gemv_w8a16_fused}
        calls |= {
            f"{rows} rows, {warps} warps": variant(rows, warps)
            for rows, warps in CUTS
            if warps * gemv.WARP * gemv.W8_LANE <= 2 * K
        }
        want = gemv.gemv_w8a16_fused(*args).float()
        most = 0.02 * want.abs().max()
        wrong = [n for n, f in calls.items() if (f(*args).float() - want).abs().max() > most]
        times = {n: statistics.median(t) for n, t in _in_graphs(calls, args, work, 20).items()}
        print(f"-- {N} × {K}: floor {work.bytes / read * 1e6:.2f} µs", wrong or "")
        for n in ["the rung", *sorted(times, key=times.get)[:5]]:
            print(f"  {n:18} {times[n] * 1e6:7.2f} µs", flush=True)


if __name__ == "__main__":
    main()
