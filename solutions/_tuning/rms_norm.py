"""Cache hints and warps for rms_norm's rung 4, beside torch.compile and then beside everything.

    PYTHONPATH=. python solutions/_tuning/rms_norm.py        about 30 s
"""

import labkit as lab
from labkit.bench import COMPILE_MODE, ceilings, interleaved
from labkit.problem import cloned

import itertools
import statistics

import torch
import triton
import triton.language as tl

from solutions import rms_norm as m

P = m.RMS_NORM


@triton.jit
def hinted_kernel(x_ptr, w_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr, LOAD: tl.constexpr,
                  STORE: tl.constexpr, TWICE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0, eviction_policy=LOAD)
    w = tl.load(w_ptr + offs, mask=mask, eviction_policy="evict_last")
    h = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h) / N + eps)
    if TWICE:
        x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0, eviction_policy="evict_first")
        h = x.to(tl.float32)
    y = w * (h * rstd).to(x.dtype)
    tl.store(y_ptr + row * N + offs, y, mask=mask, eviction_policy=STORE)


def hinted(load, store, twice, warps):
    def call(x, w):
        y = torch.empty_like(x)
        hinted_kernel[(len(x),)](x, w, y, x.shape[1], m.EPS, BLOCK_N=x.shape[1], LOAD=load,
                                 STORE=store, TWICE=twice, num_warps=warps)  # fmt: skip
        return y

    return call


def main() -> None:
    for M, N in ((16384, 4096), (4096, 4096), (16384, 1024)):
        args = P.inputs(torch.bfloat16, M=M, N=N)
        torch.compiler.reset()
        functions = {"rung 4": m.rms_norm_fused}
        functions["compile"] = torch.compile(P.library, mode=COMPILE_MODE, dynamic=False)
        for load, store, (twice, warps) in itertools.product(
            ("", "evict_first", "evict_last"), ("", "evict_first"),
            ((False, 1), (False, 2), (False, 4), (False, 8), (True, 4), (True, 8), (True, 16)),
        ):  # fmt: skip
            functions[f"{load or '-'}, {store or '-'}, {twice}, {warps}"] = hinted(
                load, store, twice, warps
            )
        copies = {n: cloned(args) if n == "compile" else args for n in functions}
        floor = P.work(torch.bfloat16, M=M, N=N).bytes / ceilings()["copy_bytes_per_s"]
        calls = {n: lambda f=f, a=copies[n]: f(*a) for n, f in functions.items()}
        t = {n: statistics.median(v) for n, v in interleaved(calls, 25).items()}
        print(f"-- {M}×{N}: floor {floor * 1e6:.2f} µs, all {len(t)} interleaved")
        for n in ["rung 4", "compile", *sorted(t, key=t.get)[:8]]:
            print(f"  {n:34} {t[n] * 1e6:7.2f} {floor / t[n]:.3f}", flush=True)
        few = ["rung 4", "compile", *[n for n in sorted(t, key=t.get) if "," in n][:2]]
        for what, more in (("alone", {}), ("beside the naive rung and the library", {
            "naive": lambda: m.rms_norm_naive(*args), "library": lambda: P.library(*args)})):  # fmt: skip
            t = interleaved({**{n: calls[n] for n in few}, **more}, 60)
            line = (f"{n} {statistics.median(v) * 1e6:.2f}" for n, v in t.items())
            print(f"  {what}: {'; '.join(line)}", flush=True)
    print(lab.DEVICE.name)


if __name__ == "__main__":
    main()
