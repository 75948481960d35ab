"""Compare a kernel with the solution: is it right, how fast, how much traffic, what code."""

from __future__ import annotations

from labkit.check import CheckFailed, Verdict, check, error_over_allowed
from labkit.device import DEVICE, SIMULATED
from labkit.ladder import Ladder, Rung, find
from labkit.launch import kernels_of
from labkit.notebook import Table
from labkit.problem import Problem
from labkit.results import percent, rate

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape

import torch

COLUMNS_GPU = ("", "verdict", "error/allowed", "time", "useful bandwidth", "% of ceiling")
COLUMNS_SIM = ("", "verdict", "error/allowed", "traffic", "× ledger")
COLUMNS_CODE = ("registers", "spills")


@dataclass(frozen=True)
class Comparison:
    """A table of versions, the verdict on the reader's own, and the source diff."""

    operation: str
    verdict: Verdict | CheckFailed
    table: Table
    diff: str

    @property
    def right(self) -> bool:
        """Whether the reader's kernel is right."""
        return isinstance(self.verdict, Verdict) and self.verdict.state == "🟢"

    def __repr__(self) -> str:
        """The verdict, the table, the diff."""
        return "\n".join([str(self.verdict), "", str(self.table)] + [self.diff] * bool(self.diff))

    def _repr_html_(self) -> str:
        def pre(text):
            return f"<pre>{escape(text)}</pre>" if text else ""

        return pre(str(self.verdict)) + self.table._repr_html_() + pre(self.diff)


def compare(
    fn: Callable,
    operation: str,
    *,
    diff: bool = False,
    dtype: torch.dtype | None = None,
    **size: int,
) -> Comparison:
    """Compare `fn` with the solution, the naive rung, the library and each peer installed.

    `operation` names a problem of the book, for instance "rms_norm". On a GPU the table shows
    times at `size` (default: `bench_size`); elsewhere the traffic that the simulators count at
    the largest test size. `diff=True` adds the source diff against the solution.
    """
    ladder, problem = find(operation)
    if not callable(fn):
        raise TypeError(f"compare: fn={fn!r} is not a function")
    rungs = [r for r in ladder if ladder.problem_of(r) is problem]
    try:
        verdict = check(fn, problem)
    except CheckFailed as failure:
        verdict = failure
    mine = Rung(_named(fn), _kind(fn), simulates=True)
    versions: dict[str, object] = {"mine": mine, f"solution ({rungs[-1].name})": rungs[-1]}
    if len(rungs) > 1:
        versions[f"naive ({rungs[0].name})"] = rungs[0]
    dtype = dtype or (torch.float32 if SIMULATED else problem.dtypes[0])
    if SIMULATED and dtype != torch.float32:
        raise ValueError(f"compare: dtype={dtype}; the simulators run float32 only")
    if SIMULATED:
        size = size or dict(problem.test_sizes[-1])
        measured = {}
        columns = COLUMNS_SIM
    else:
        size = size or dict(problem.bench_size)
        measured = _times(versions, ladder, problem, dtype, size, verdict)
        columns = COLUMNS_GPU
    rows = []
    for who, version in versions.items():
        state = _state(verdict) if who == "mine" else _checked(version, problem)
        cells = (
            _gpu_cells(measured.get(who))
            if not SIMULATED
            else (_simulated_cells(version, problem, dtype, size, state))
        )
        rows.append((who, state, *cells, *_code_cells(version, problem, size)))
    for name, timing in measured.items():
        if name not in versions:
            rows.append((name, "", *_gpu_cells(timing), "–", "–"))
    if SIMULATED:
        rows.append(_library_row(problem, dtype, size))
    return Comparison(
        operation,
        verdict,
        Table(columns + COLUMNS_CODE, tuple(rows)),
        _diff(fn, rungs[-1].fn) if diff else "",
    )


def _named(fn: Callable) -> Callable:
    """`fn` as a function with a name: a partial and a callable object have none."""
    if hasattr(fn, "__name__"):
        return fn

    def called(*args):
        return fn(*args)

    called.__name__ = type(fn).__name__
    return called


def _kind(fn: Callable) -> str:
    kinds = [k.kind for k in kernels_of(fn)]
    return kinds[0] if kinds else "triton"


def _state(verdict: Verdict | CheckFailed) -> str:
    if isinstance(verdict, CheckFailed):
        return f"🔴 {verdict.bug}"
    return f"{verdict.state} right" if verdict.state == "🟢" else f"⚪ {verdict.note}"


def _checked(rung: Rung, problem: Problem) -> str:
    try:
        return _state(check(rung, problem))
    except CheckFailed as failure:
        return f"🔴 {failure.bug}"


def _times(versions, ladder: Ladder, problem: Problem, dtype, size, verdict) -> Mapping:
    from labkit.bench import measure
    from labkit.record import versions_of

    peers = {
        name: (kind, fn)
        for name, (kind, fn) in versions_of(ladder, problem, dtype, size, lambda _: None).items()
        if kind in ("library", "peer")
    }
    timed = {who: (v.kind, v.fn) for who, v in versions.items()}
    if isinstance(verdict, CheckFailed):
        del timed["mine"]  # a wrong kernel is worth no time
    return {t.rung: t for t in measure(timed | peers, problem, dtype, size)}


def _gpu_cells(timing) -> tuple[str, ...]:
    if timing is None:
        return ("–",) * 4
    return (
        f"{timing.error_over_allowed:.2f}",
        f"{timing.p50_s * 1e6:.4g} µs",
        rate(timing.bandwidth),
        percent(timing.fraction_of_ceiling),
    )


def _simulated_cells(version: Rung, problem: Problem, dtype, size, state: str) -> tuple[str, ...]:
    """Error over allowed, counted bytes and their ratio to the ledger."""
    if not version.simulates or state.startswith(("⚪", "🔴")):  # a wrong one may crash us
        return ("–", "–", "–")
    try:
        ratio = error_over_allowed(version.fn, problem, dtype, **size)
        cell = f"{ratio:.2f}" if math.isfinite(ratio) else "∞"
    except Exception:
        cell = "–"
    if not kernels_of(version.fn):
        return (cell, "–", "–")
    from labkit.lens import lens

    try:
        moved = lens(version.fn, problem, dtype=dtype, **size).bytes
    except Exception:
        return (cell, "–", "–")
    ledger = problem.work(dtype, **size).bytes
    return (cell, f"{moved:,} B", f"{moved / ledger:.2f}")


def _code_cells(version: Rung, problem: Problem, size: Mapping) -> tuple[str, str]:
    """Registers and spilled bytes of its kernels, on this GPU's architecture or sm_90."""
    from labkit.compile import compile_card

    if not kernels_of(version.fn):
        return ("–", "–")
    arch = f"sm_{DEVICE.sm.replace('.', '')}" if DEVICE.sm else "sm_90"
    try:
        card = compile_card(version.fn, problem, archs=(arch,), **size)
    except Exception:
        return ("–", "–")
    archs = [k.archs[arch] for k in card.kernels]
    return (
        " + ".join(str(a.registers) for a in archs),
        " + ".join(f"{a.stack_bytes} B" for a in archs),
    )


def _library_row(problem: Problem, dtype, size) -> tuple[str, ...]:
    from labkit.record import library_name

    ratio = error_over_allowed(problem.library, problem, dtype, **size)
    return (library_name(problem), "", f"{ratio:.2f}", "–", "–", "–", "–")


def _diff(fn: Callable, solution: Callable) -> str:
    mine, theirs = _source(fn), _source(solution)
    lines = difflib.unified_diff(theirs, mine, "solution", "mine", lineterm="")
    return "\n".join(lines) or "no difference in the source"


def _source(fn: Callable) -> list[str]:
    """The lines of a launcher's kernels and of the launcher."""
    functions = [k.function for k in kernels_of(fn) if k.function] + [fn]
    lines = []
    for function in functions:
        try:
            lines += [*inspect.getsource(function).rstrip().splitlines(), ""]
        except (OSError, TypeError):
            lines += [f"# no source for {getattr(function, '__name__', function)!r}", ""]
    return lines
