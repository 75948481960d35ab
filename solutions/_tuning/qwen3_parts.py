"""Prefill's plans, the ledger and swap-in on a GPU, in 120 s: python qwen3_parts.py [tokens...].

0.6B shape, random weights. Each part has its own time, and one that fails does not stop the next.
"""

import labkit  # noqa: F401 (first: it starts the simulators)
from labkit.bench import ceilings

import signal
import sys
import time
import traceback
from dataclasses import replace

import torch

from solutions import rms_norm
from solutions.qwen3_decode import dispatch, ledger, reference, weights
from solutions.qwen3_decode.config import QWEN3_0_6B
from solutions.qwen3_decode.prefill import CHOICES
from solutions.qwen3_decode.step import OPS, DecodeStep, OpsStep
from solutions.qwen3_decode.swap import swap

BEGAN, ALL_S = time.perf_counter(), 115
model = weights.random_model(QWEN3_0_6B)


class OutOfTime(BaseException):
    """Not an Exception: `tune` takes those for a candidate's."""


def stop(*_):
    """What the alarm calls."""
    raise OutOfTime


def part(name, seconds):
    """Run a function now, for at most so many seconds, and say what went wrong."""

    def run(fn):
        left = ALL_S - (time.perf_counter() - BEGAN)
        if left < 5:
            print(f"## {name}: skipped, {left:.0f} s left", flush=True)
            return
        signal.signal(signal.SIGALRM, stop)
        signal.alarm(max(1, int(min(seconds, left))))
        start = time.perf_counter()
        try:
            fn()
        except (Exception, OutOfTime):  # the other parts are still worth their time
            print(f"!! {name}:", *traceback.format_exc().splitlines()[-7:], sep="\n   ", flush=True)
        finally:
            signal.alarm(0)
        print(f"## {name}: {time.perf_counter() - start:.1f} s", flush=True)
        torch.cuda.empty_cache()

    return run


def cache_of(S):
    """A cache of random keys and values."""
    cache = reference.new_cache(QWEN3_0_6B, S, torch.bfloat16, model.embed.device)
    cache.k.normal_(), cache.v.normal_()
    return cache


@part("ledger at 512", 40)
def _():
    read, rows = ceilings()["read_bytes_per_s"], []
    print(f"read ceiling {read / 1e12:.3f} TB/s")
    for name, make, how, graph in (
        ("ops eager", OpsStep, {}, False),
        ("ops graph", OpsStep, {}, True),
        ("kernels eager", DecodeStep, {}, False),
        ("kernels graph", DecodeStep, {}, True),
        ("dependent eager", DecodeStep, {"dependent": True}, False),
        ("dependent graph", DecodeStep, {"dependent": True}, True),
    ):
        step = make(model, cache_of(560), **how)
        step.start(0, 500)
        if graph:
            step.capture()
        new = ledger.ledger(step, 512, rung=name, read=read)
        one = ledger.total(new)
        parts = " ".join(f"{r.phase} {r.measured_s * 1e6:.1f}/{r.floor_s * 1e6:.1f}" for r in new)
        whole, floor = one.measured_s * 1e6, one.floor_s * 1e6
        print(f"{name:16s} {whole:7.1f} us, floor {floor:.1f}: {parts}", flush=True)
        rows += new
    print(len(ledger.figure(rows).png()), "bytes of figure:", ledger.figure(rows))


@part("swap", 30)
def _():
    prompt = dispatch.random_tokens(model, 64, 1)[0].tolist()
    good = rms_norm.rms_norm
    for name, how, fn in (
        ("rms_norm", "library", rms_norm.library),
        ("rms_norm", "scaled by 1.01", lambda x, w, eps: good(x, w, eps) * 1.01),
        ("gemv", "F.linear", torch.nn.functional.linear),
        ("decode_attention", "itself", OPS["decode_attention"]),
    ):
        result = swap(model, prompt, name, fn)
        worst = max(d / a for d, a in zip(result.differences, result.allowed, strict=True))
        print(f"{how}, worst difference {worst:.2g} of what is allowed\n{result}", flush=True)


def plan_for(T):
    """Tune for T tokens, then compare."""
    plan = dispatch.tune(model, T, rounds=10)
    print(f"T={T}:", {p: getattr(plan, p) for p in CHOICES if getattr(plan, p) != CHOICES[p][0]})
    for t in plan.tried:
        times = (
            "" if t.before_s is None else f"{t.before_s * 1e3:7.3f} -> {t.after_s * 1e3:7.3f} ms"
        )
        print(f"  {t.part:9s} {t.candidate:22s} {times} {'KEPT' if t.kept else 'drop'} {t.why}")
    for row in dispatch.compare(model, plan, rounds=20):
        quartiles = f"{row.p25_s * 1e3:.3f} {row.p50_s * 1e3:.3f} {row.p75_s * 1e3:.3f}"
        print(f"  TTFT T={T} {row.name:20s} {quartiles} ms", flush=True)
    if plan.launch == "graph":  # what the graph alone is worth, at the end
        eager = dispatch.compare(model, replace(plan, launch="eager"), rounds=20)[1]
        print(f"  TTFT T={T} the plan, eager {eager.p50_s * 1e3:.3f} ms", flush=True)


for T in map(int, sys.argv[1:] or dispatch.CONTEXTS):
    part(f"prefill {T}", 30)(lambda T=T: plan_for(T))
