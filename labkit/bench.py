"""Time kernels on a GPU: CUDA events, cold L2, many runs, rungs interleaved. Seconds throughout.

Before each timed call a buffer larger than L2 is read. That does two things: the call finds none
of its data in the cache, and the GPU is still busy while the host prepares the launch, so the gap
between launches is never timed; `interleaved` makes sure of it. The buffer is read, not written:
dirty lines would have to be written back during the timed call. A simulator is never timed: there,
`bench` shows the recorded number.
"""

from __future__ import annotations

from labkit.check import dtype_name, errors_over_allowed
from labkit.device import DEVICE, SIMULATED
from labkit.ladder import Rung, find
from labkit.problem import Problem, Work, cloned
from labkit.results import Timing, results

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch

RUNS = 100
FLUSH_BYTES = 512 << 20  # several times the largest L2
COPY_BELOW = 64 << 20  # bytes
ROTATED_BYTES = 512 << 20  # of inputs, in a graph
GRAPH_CALLS = 50  # or as many as take GRAPH_S: then the launch of the graph does not count
GRAPH_S = 2e-3
MAX_BACKLOG = 20  # flushes in front of one call: 2 ms, more than any launcher needs
READ_BLOCK = 8192  # floats that a program of the read ceiling sums
COMPILE_MODE = "max-autotune-no-cudagraphs"


def bench(
    fn: Callable | Rung,
    problem: Problem | None = None,
    *,
    dtype: torch.dtype | None = None,
    runs: int = RUNS,
    **size: int,
) -> Timing:
    """Time one kernel at one size: by default the problem's first dtype and its `bench_size`.

    Without a GPU: the recorded number of the rung with this name, labelled with its device.
    """
    rung = fn if isinstance(fn, Rung) else Rung(fn, "cuda")
    problem = problem or rung.problem
    if problem is None:
        raise TypeError("bench: problem=None; pass the problem whose inputs to time it on")
    if runs < RUNS:
        raise ValueError(f"bench: runs={runs} is fewer than {RUNS}")
    dtype, size = dtype or problem.dtypes[0], dict(size or problem.bench_size)
    if SIMULATED:
        ladder, _ = find(problem.name)
        return results(ladder.slug).timing(rung.name, dtype_name(dtype), **size)
    return measure({rung.name: (rung.kind, rung.fn)}, problem, dtype, size, runs)[0]


def measure(
    versions: Mapping[str, tuple[str, Callable]],
    problem: Problem,
    dtype: torch.dtype,
    size: Mapping[str, int],
    runs: int = RUNS,
) -> list[Timing]:
    """Time several versions of one operation, interleaved, on the same inputs.

    `versions` maps a name to (kind, function). Each version's error is measured first, on the
    inputs that are timed. Needs a GPU.
    """
    if problem.measure:
        return problem.measure(versions, problem, dtype, size, runs)
    inputs = problem.inputs(dtype, **size)
    work = problem.work(dtype, **size)
    functions = {name: fn for name, (_, fn) in versions.items()}
    errors = errors_over_allowed(functions, problem, dtype, **size)
    torch.cuda.empty_cache()
    peaks = {name: _peak_memory(fn, inputs) for name, fn in functions.items()}
    inputs = problem.inputs(dtype, **size)
    # Peers get copies of their own, since some work in place. At small sizes every version does:
    # where its inputs lie in memory would otherwise decide half a microsecond.
    if problem.timing == "graph":
        times = _in_graphs(functions, inputs, work, runs)
    else:
        copied = {
            n for n, (kind, _) in versions.items() if kind == "peer" or work.bytes < COPY_BELOW
        }
        copies = {n: cloned(inputs) for n in copied}
        calls = {n: partial(fn, *copies.get(n, inputs)) for n, fn in functions.items()}
        times = interleaved(calls, runs)
    source = f"measured on {DEVICE.name}, {time.strftime('%Y-%m-%d')}"
    timings = []
    for name, (kind, _) in versions.items():
        p25, p50, p75 = statistics.quantiles(times[name], n=4)
        timings.append(
            Timing(
                problem.name,
                name,
                kind,
                dtype_name(dtype),
                dict(size),
                p25,
                p50,
                p75,
                len(times[name]),
                work.bytes,
                work.flops,
                peaks[name],
                errors[name],
                floor(work, dtype, problem.ceiling) / p50,
                source,
            )
        )
    return timings


def interleaved(calls: Mapping[str, Callable[[], object]], runs: int = RUNS) -> dict[str, list]:
    """Seconds of `runs` calls of each function, one of each per round, shuffled. Needs a GPU.

    Shuffled, because what ran before can cost a short kernel half a microsecond.

    A run counts only if the GPU had not reached its start when the host had enqueued its end:
    then no wait for the host is in it. Where that fails, the function gets a longer backlog.
    """
    flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    backlog = dict.fromkeys(calls, 1)  # flushes, of some 100 µs each, in front of a call
    events = {name: [] for name in calls}
    order, shuffle = list(calls.items()), random.Random(0).shuffle
    for _ in range(runs):
        shuffle(order)
        for name, call in order:
            for _ in range(MAX_BACKLOG):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(backlog[name]):
                    flush.sum()
                start.record()
                call()
                end.record()
                if not start.query():
                    break
                backlog[name] = min(backlog[name] + 1, MAX_BACKLOG)
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) * 1e-3 for start, end in pairs]
        for name, pairs in events.items()
    }


def captured(fn: Callable, inputs: list[tuple], calls: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `calls` calls of `fn`, going round the tuples of inputs. Needs a GPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in inputs:  # what compiles, packs or tunes on a first call does it here
            fn(*args)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            fn(*inputs[i % len(inputs)])
    return graph


def _in_graphs(functions: Mapping[str, Callable], inputs: tuple, work: Work, runs: int) -> dict:
    """Seconds per call of `runs` replays of a graph of each function; see `Problem.timing`."""
    sets = max(2, -(-ROTATED_BYTES // work.bytes))
    sets = [inputs] + [cloned(inputs) for _ in range(sets - 1)]
    graphs, calls = {}, {}
    for name, fn in functions.items():
        graphs[name], calls[name] = captured(fn, sets, len(sets)), len(sets)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in (start, end):
            graphs[name].replay()
            event.record()
        torch.cuda.synchronize()
        if start.elapsed_time(end) * 1e-3 < GRAPH_S:
            calls[name] = len(sets) * -(-GRAPH_CALLS // len(sets))
            graphs[name] = captured(fn, sets, calls[name])
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, runs)
    return {name: [t / calls[name] for t in took] for name, took in times.items()}


def _peak_memory(fn: Callable, inputs: tuple) -> int:
    fn(*inputs)
    torch.cuda.synchronize()
    gc.collect()  # what it frees between the next two lines would make the difference negative
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# Ceilings -------------------------------------------------------------------------------------


@cache
def ceilings() -> dict:
    """What this GPU can do, measured: copy and read bytes/s, FLOP/s by dtype. Needs a GPU."""
    n = 1 << 30
    source = torch.randn(n // 4, device="cuda")
    target = torch.empty_like(source)
    calls = {
        "copy": lambda: target.copy_(source),
        "read": lambda: _read(source),
        "empty": _empty,
    }
    medians = {k: statistics.median(v) for k, v in interleaved(calls).items()}
    flops = {}
    for dtype, m in ((torch.bfloat16, 8192), (torch.float16, 8192), (torch.float32, 4096)):
        a, b = (torch.randn(m, m, device="cuda").to(dtype) for _ in range(2))
        took = statistics.median(interleaved({"mm": lambda a=a, b=b: a @ b}, 100)["mm"])
        flops[dtype_name(dtype)] = 2 * m**3 / took
    return {
        "copy_bytes_per_s": 2 * n / medians["copy"],
        "read_bytes_per_s": n / medians["read"],
        "flops": flops,
        "empty_kernel_s": medians["empty"],
    }


def floor(work: Work, dtype: torch.dtype, ceiling: str = "copy") -> float:
    """The roofline's time in seconds: bytes over the ceiling, or FLOPs over theirs if longer."""
    c = ceilings()
    flops = c["flops"].get(dtype_name(dtype), c["flops"]["float32"])
    return max(work.bytes / c[f"{ceiling}_bytes_per_s"], work.flops / flops)


@cache
def _streams():
    """The read-only streaming kernel and the empty one, built on first use."""
    import triton
    import triton.language as tl

    @triton.jit
    def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
        """Program pid sums block pid of x; the store only keeps the loads alive."""
        pid = tl.program_id(0).to(tl.int64)
        tl.store(out_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK))))

    @triton.jit
    def empty_kernel():
        """Nothing."""

    return read_kernel, empty_kernel


def _read(x: torch.Tensor) -> torch.Tensor:
    # Eight 16-byte loads a thread: 64 KiB in flight on an SM is what a full read rate needs.
    programs = x.numel() // READ_BLOCK
    out = torch.empty(programs, device=x.device)
    _streams()[0][(programs,)](x, out, BLOCK=READ_BLOCK, num_warps=8)
    return out


def _empty() -> None:
    _streams()[1][(1,)](num_warps=1)
