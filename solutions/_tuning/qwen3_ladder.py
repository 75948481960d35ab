"""The ladder of chapter 21 on this GPU: errors, times, launches, gate, peers.

    PYTHONPATH=. python solutions/_tuning/qwen3_ladder.py        at most 150 s, at most 75 lines

A line for each rung and part; a part that fails is a line with 💥, and the rest goes on. What the
time does not allow is named at the end.
"""

import labkit as lab
from labkit.bench import ceilings, floor
from labkit.check import error_over_allowed

import statistics
import time
import traceback

import torch

from solutions.qwen3_decode import gate, measure
from solutions.qwen3_decode.ladder import DECODE, QWEN3_DECODE, model_of

START, LIMIT = time.time(), 145
BF16 = torch.bfloat16
left_out = []


def left() -> float:
    """Seconds until the limit."""
    return LIMIT - (time.time() - START)


def part(what: str, seconds: float, fn) -> None:
    """Print what `fn` returns, if there are `seconds` left for it."""
    if left() < seconds:
        left_out.append(what)
        return
    try:
        print(f"{time.time() - START:5.0f} s  {what}  {fn()}", flush=True)
    except Exception:
        last = " | ".join(line.strip() for line in traceback.format_exc().splitlines()[-4:])
        print(f"💥 {what}  {last[:500]}", flush=True)
        torch.cuda.synchronize()


def errors(fn) -> str:
    """Error over what is allowed at the test sizes, two seeds each."""
    found = [
        error_over_allowed(fn, QWEN3_DECODE, BF16, seed, **size)
        for size in QWEN3_DECODE.test_sizes
        for seed in (0, 1)
    ]
    return " ".join(f"{e:.2f}" for e in found)


def times(fn, context: int, seconds: float) -> str:
    """Quartiles of µs a token in loops for some `seconds`, host loop, launches, memory."""
    args = QWEN3_DECODE.inputs(BF16, context=context)
    token, position = args[1:3]
    step, peak = measure.built(fn, *args)
    each = measure.loop(step, token, position, 2)
    count = max(1, min(measure.TOKENS, int(seconds / 10 / each)))
    took = [measure.loop(step, token, position, count) for _ in range(9)]
    p25, p50, p75 = (1e6 * t for t in statistics.quantiles(took, n=4))
    host = 1e6 * measure.host_loop(step, token, position)
    bound = 1e6 * floor(QWEN3_DECODE.work(BF16, context=context), BF16, "read")
    return (
        f"{p50:8.1f} us/token ({p25:.1f} to {p75:.1f}, {count} a loop), host loop {host:.1f}, "
        f"{measure.launches(step, token, position)} launches, {bound / p50:.0%} of read, "
        f"peak {peak / 2**20:.0f} MiB"
    )


def gates(prompts: int, last: int) -> str:
    """All rungs on a few prompts, a line each; then how long it took."""
    began, model = time.time(), model_of(BF16)
    builds = {r.name: r.fn.build for r in DECODE}
    fewer = {r.name: 2 for r in DECODE if r.kind == "numba"}
    found = gate.gates(
        builds, model, gate.random_prompts(model.config, prompts), last=last, free=256, fewer=fewer
    )
    for result in found.values():
        print(f"   {result!r}", flush=True)
    return f"{time.time() - began:.1f} s"


def main() -> None:
    """All parts, the most needed first."""
    print(lab.DEVICE.name, torch.__version__, f"read {ceilings()['read_bytes_per_s'] / 1e12:.2f}")
    for rung in DECODE:
        part(f"error {rung.name}", 20, lambda fn=rung.fn: errors(fn))
    for rung in DECODE:
        part(f"512 {rung.name}", 15, lambda fn=rung.fn: times(fn, 512, 1.5))
    part("gate", 30, lambda: gates(8, 8))
    for rung in reversed(DECODE.rungs):
        part(f"8192 {rung.name}", 10, lambda fn=rung.fn: times(fn, 8192, 1.0))
    part("512 reference", 8, lambda: times(QWEN3_DECODE.library, 512, 1.0))
    for name, fn in QWEN3_DECODE.peers.items():
        part(f"512 {name}", 25, lambda fn=fn: times(fn, 512, 1.0))
    if left_out:
        print("no time for:", ", ".join(left_out))
    print(f"{time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
