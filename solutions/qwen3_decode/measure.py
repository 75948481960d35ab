"""How a decode step is timed: 64 tokens between two CUDA events, and Python sees none of them.

A step does not run alone: the next one follows it, and its first kernels can start while Python
prepares the rest. So what is timed is a loop of tokens, divided by their number. The weights are
twenty times as large as L2, so every token reads them from memory: nothing has to be flushed.

A version that takes longer than SLOW_S for a token gets fewer tokens in a loop; the results say how
many. Beside the time they hold, for each version and size,

    tokens       tokens of a loop
    host_loop_s  seconds a token if Python reads each one before it asks for the next
    launches     kernels that run for a token, counted by torch's profiler
"""

from __future__ import annotations

import labkit as lab
from labkit.bench import RUNS, floor
from labkit.check import allowance, dtype_name
from labkit.diagnose import error
from labkit.problem import Problem
from labkit.results import Timing

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from solutions import rope

from .reference import Cache
from .step import Step, count_kernels
from .weights import Model

TOKENS = 64  # of a loop, and slots that it needs
SLOW_S = 2e-3  # for a token. What is slower gets BUDGET_S for all its loops at one size
BUDGET_S = 3.0
HOST_TOKENS = 16


def device_loops(
    versions: Mapping[str, tuple[str, Callable]],
    problem: Problem,
    dtype: torch.dtype,
    size: Mapping[str, int],
    runs: int = RUNS,
    log: Callable = print,
) -> list[Timing]:
    """What labkit.bench.measure returns, for functions made by `decodes`. Needs a GPU.

    Each loop starts at the same token and position. One loop of each version per round, shuffled. A
    peer that does not run is left out and named through `log`.
    """
    torch.compiler.reset()
    inputs = problem.inputs(dtype, **size)
    token, position = inputs[1:3]
    truth = problem.truth(*inputs)
    wanted = list(zip(truth, allowance(problem, size, inputs, truth), strict=True))
    steps, peaks, errors = {}, {}, {}
    for name, (kind, fn) in versions.items():
        if not hasattr(fn, "build"):
            raise TypeError(f"{name} builds no step: wrap it in `decodes`")
        try:
            step, peaks[name] = built(fn, *problem.inputs(dtype, **size))
            step.start(token, position)
            step.decode_many(1)
            got = zip((step.logits, *step.kept()), wanted, strict=True)
            errors[name], steps[name] = max(error(g, t) / a for g, (t, a) in got), step
        except Exception as why:
            if kind != "peer":
                raise
            line = str(why).strip().partition("\n")[0][:120]
            log(f"  left out: {name}, {dtype_name(dtype)}, {size}: {type(why).__name__}: {line}")
    del inputs, truth, wanted
    counts = {name: tokens_of(step, token, position, runs) for name, step in steps.items()}
    took = {name: [] for name in steps}
    order, shuffle = list(steps.items()), random.Random(0).shuffle
    for _ in range(runs):
        shuffle(order)
        for name, step in order:
            took[name].append(loop(step, token, position, counts[name]))
    work, timings = problem.work(dtype, **size), []
    source = f"measured on {lab.DEVICE.name}, {time.strftime('%Y-%m-%d')}"
    for name, step in steps.items():
        p25, p50, p75 = statistics.quantiles(took[name], n=4)
        more = {
            "tokens": counts[name],
            "host_loop_s": host_loop(step, token, position),
            "launches": launches(step, token, position),
        }
        timings.append(
            Timing(
                problem.name,
                name,
                versions[name][0],
                dtype_name(dtype),
                dict(size),
                p25,
                p50,
                p75,
                runs,
                work.bytes,
                work.flops,
                peaks[name],
                errors[name],
                floor(work, dtype, problem.ceiling) / p50,
                source,
                more,
            )
        )
    return timings


def cache_over(model: Model, k: Tensor, v: Tensor) -> Cache:
    """A cache whose memory is k and v [L, S, H_kv, D]."""
    D, theta = model.config.head_dim, model.config.rope_theta
    return Cache(k, v, rope.cos_sin_table(k.shape[1], D, theta, k.device))


def built(
    fn: Callable, model: Model, token: int, position: int, k: Tensor, v: Tensor
) -> tuple[Step, int]:
    """A step, and the bytes that it takes beside the model's weights and its cache, k and v."""
    cache = cache_over(model, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = fn.build(model, cache)
    loop(step, token, position, 4)  # compiles what is not compiled
    return step, torch.cuda.max_memory_allocated() - before


def loop(step: Step, token: int, position: int, count: int) -> float:
    """Seconds a token of `count` tokens, from event to event."""
    step.start(token, position)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step.decode_many(count)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / count


def tokens_of(step: Step, token: int, position: int, runs: int) -> int:
    """Tokens of a loop: TOKENS, or of a slow step as many as `runs` loops have time for."""
    each = min(loop(step, token, position, 4) for _ in range(2))
    return TOKENS if each < SLOW_S else max(1, min(TOKENS, int(BUDGET_S / (runs * each))))


def host_loop(step: Step, token: int, position: int) -> float:
    """Median seconds from one token in Python to the next."""
    step.start(token, position)
    step.decode_many(1).item()
    seconds = []
    for _ in range(HOST_TOKENS):
        began = time.perf_counter()
        step.decode_many(1).item()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def launches(step: Step, token: int, position: int) -> int:
    """Kernels of one token, with those of torch around it: the least of three counts.

    Now and then the profiler sees one more than there are.
    """
    step.start(token, position)
    return min(count_kernels(lambda: step.decode_many(1)) for _ in range(3))
