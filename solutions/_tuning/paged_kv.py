"""Check the rungs of paged_kv on this GPU, compare bits with chapter 10, then time page sizes.

PYTHONPATH=. python solutions/_tuning/paged_kv.py        at most 75 s, at most 45 lines
"""

import labkit as lab
from labkit.bench import ceilings, interleaved

import statistics
import subprocess
import sys
import time
import traceback

import torch

from solutions import decode_attention as da
from solutions import paged_kv as pk

START, LIMIT, CHECKS_END = time.time(), 72, 50
P, MODEL = pk.PAGED_KV, pk.QWEN_SMALL
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_one(name: str, dtype: str) -> None:
    """In a process of its own: one verdict, one line."""
    import labkit.lens

    def off(*_, **__):
        raise RuntimeError("races were looked at without a GPU")

    labkit.lens.lens = off
    rung = pk.LADDER.rung(name)
    try:
        problem = pk.LADDER.problem_of(rung)
        verdict = lab.check(lab.Rung(rung.fn, rung.kind, dtypes=(DTYPES[dtype],)), problem)
        print(f"{verdict.state} {name} {dtype} worst {verdict.worst:.2f}")
    except lab.CheckFailed as failure:
        print(f"🔴 {name} {dtype}:", " | ".join(str(failure).splitlines()[:4])[:400])
    except Exception:
        print(f"💥 {name} {dtype}:", " | ".join(traceback.format_exc().splitlines()[-3:])[:400])


def guarded(what, fn) -> None:
    """What `fn` says, or what went wrong in one line; printed."""
    try:
        print(what, fn())
    except Exception:
        print("💥", what, " | ".join(traceback.format_exc().splitlines()[-3:])[:400])


def same_bits() -> str:
    """Pages of three sizes against chapter 10 on one piece, ragged, bf16, several splits."""
    found = []
    for page in pk.PAGES:
        for B, S in ((1, 700), (3, 3000), (32, 900)):
            args = P.inputs(torch.bfloat16, seed=3, B=B, S=S, page=page, ragged=1, **MODEL)
            k, v = (pk.gathered(x, args[3]) for x in args[1:3])
            for fn, without in (
                (pk.paged_kv_pipelined, da.decode_attention_pipelined),
                (pk.paged_kv_direct, da.decode_attention_fused),
                (pk.paged_kv_prefetched, da.decode_attention_fused),
            ):
                if not torch.equal(fn(*args), without(args[0], k, v, args[4])):
                    found.append((fn.__name__, page, B, S))
    return f"🔴 differ: {found}" if found else "🟢 the bits of chapter 10 at every size"


def graph_holds() -> str:
    """Capture with out and workspace, change all inputs, replay."""
    size = {"B": 3, "S": 3000, "page": 64, "ragged": 1, **MODEL}
    args = P.inputs(torch.bfloat16, seed=1, **size)
    out, ws = torch.empty_like(args[0]), pk.paged_kv_workspace(args[0], args[1], args[3])
    pk.paged_kv(*args, out=out, workspace=ws)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pk.paged_kv(*args, out=out, workspace=ws)
    for seed in (2, 3):
        fresh = P.inputs(torch.bfloat16, seed=seed, **size)
        for old, new in zip(args, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(out, pk.paged_kv(*fresh)):
            return f"🔴 replay with seed {seed} differs from a call"
    return "🟢 replays equal calls"


def time_size(B: int, S: int, page: int) -> None:
    """All rungs of attention, and what they are compared with, in one line."""
    args = P.inputs(torch.bfloat16, B=B, S=S, page=page, **MODEL)
    out, ws = torch.empty_like(args[0]), pk.paged_kv_workspace(args[0], args[1], args[3])
    one = [pk.gathered(x, args[3]) for x in args[1:3]]
    calls = {
        "pipelined": lambda: pk.paged_kv_pipelined(*args, out=out, workspace=ws),
        "prefetched": lambda: pk.paged_kv_prefetched(*args, out=out, workspace=ws),
        "direct": lambda: pk.paged_kv_direct(*args, out=out, workspace=ws),
        "contiguous": lambda: da.decode_attention(args[0], *one, args[4], out=out, workspace=ws),
        "gather, SDPA": lambda: pk.full_sdpa(*args),
    }
    try:
        pk.flashinfer_paged(*args)
        calls["flashinfer"] = lambda: pk.flashinfer_paged(*args)
    except Exception as why:
        if (B, S, page) == (1, 128, 16):
            print("flashinfer:", type(why).__name__, str(why).splitlines()[:1])
    t = {k: statistics.median(v) * 1e6 for k, v in interleaved(calls, 40).items()}
    read = P.work(torch.bfloat16, B=B, S=S, page=page, **MODEL).bytes
    share = read / (t["pipelined"] * 1e-6) / ceilings()["read_bytes_per_s"]
    line = "  ".join(f"{k} {v:.2f}" for k, v in t.items())
    ratios = t["pipelined"] / t["contiguous"], t["gather, SDPA"] / t["pipelined"]
    found = f"{ratios[0]:.2f} contiguous, gather {ratios[1]:.1f}x, {share:.0%} of read"
    print(f"B={B} S={S} page={page}: {line} µs; {found}", flush=True)


def time_write(T: int) -> None:
    """Writing T tokens, and indexing."""
    problem = pk.PAGED_KV_WRITE
    args = problem.inputs(torch.bfloat16, T=T, H_kv=8, D=128, page=16)
    calls = {f.__name__: lambda f=f: f(*args) for f in (pk.paged_kv_write, pk.write_library)}
    t = {k: statistics.median(v) for k, v in interleaved(calls, 40).items()}
    work = problem.work(torch.bfloat16, T=T, H_kv=8, D=128, page=16).bytes
    share = work / t["paged_kv_write"] / ceilings()["copy_bytes_per_s"]
    print(f"T={T}:", {k: round(v * 1e6, 2) for k, v in t.items()}, f"{share:.0%} of copy")


def main() -> None:
    """Checks in processes of their own, then times."""
    jobs = [
        (r.name, d, subprocess.Popen([sys.executable, __file__, "check", r.name, d],
                                     stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        for r in reversed(pk.LADDER.rungs) for d in DTYPES
    ]  # fmt: skip
    guarded("bits:", same_bits)
    guarded("graph:", graph_holds)
    for name, dtype, job in jobs:
        try:
            print(job.communicate(timeout=max(1, CHECKS_END - (time.time() - START)))[0].strip())
        except subprocess.TimeoutExpired:
            job.kill()
            print(f"⏱ {name} {dtype}: stopped")
    print(f"{time.time() - START:.0f} s", flush=True)
    for B, S, page in (
        *((1, s, 16) for s in pk.CONTEXTS), (32, 4096, 16),
        (1, 4096, 64), (1, 4096, 256), (32, 4096, 64), (32, 4096, 256), (1, 32768, 16),
    ):  # fmt: skip
        if LIMIT - (time.time() - START) < 3:
            print("out of time")
            break
        try:
            time_size(B, S, page)
        except Exception:
            print("💥", B, S, page, " | ".join(traceback.format_exc().splitlines()[-3:])[:400])
    if LIMIT - (time.time() - START) > 2:
        for T in (1, 8192):
            guarded("write:", lambda T=T: time_write(T))
    print(f"{time.time() - START:.0f} s")


if __name__ == "__main__":
    check_one(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else main()
