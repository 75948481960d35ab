"""Name the bug: from a wrong result to one of the classes in `BUGS` or the problem's suspects."""

from __future__ import annotations

from labkit.guard import Damage, Run, unwritten
from labkit.problem import Problem, cloned, is_float, outputs
from labkit.tracing import undefined_lanes

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

SMALL = 32  # numbers of a tensor that a report shows whole

BUGS = {
    "wrong signature": "it does not take the arguments of the problem",
    "raises": "it raises an exception",
    "does not compile": "Python runs it under the simulator, but the compiler does not take it",
    "hang": "it does not return",
    "writes nothing": "the output still holds the poison it was allocated with",
    "returns zeros": "every output is zero",
    "returns its input": "the output is a copy of an input",
    "stale output": "the output is that of an earlier call",
    "overwrites an earlier result": "its output is a buffer that the next call uses again",
    "NaN": "NaN or infinity where the truth is finite",
    "transposed": "rows and columns of the output are exchanged",
    "swapped indices": "an index is used for the wrong dimension",
    "off by one": "an index is one too high or one too low",
    "missing tail guard": "threads past the end of the data read or write",
    "tail not written": "part of the output still holds the poison it was allocated with",
    "out-of-bounds store": "it writes outside its output",
    "out-of-bounds read": "it reads outside its input",
    "negative index": "an index is negative; the simulator wraps it, a GPU does not",
    "missing barrier": "two threads use the same shared memory with no barrier between them",
    "barrier in a divergent branch": "some threads of a block wait where others do not",
    "uninitialised shared memory": "shared memory is read before anything wrote it",
    "local index used for global": "a thread's index in its block is used as its global index",
    "lost update": "threads read, change and write the same address without an atomic",
    "race between threads": "two threads use the same address with no barrier between them",
    "race between blocks": "two blocks use the same address, and at least one writes",
    "low-precision accumulator": "the sum is carried in too few bits",
    "wrong mask fill": "what masked lanes hold reaches the result",
    "wrong cast order": "values are rounded to the narrow type at another place than in the truth",
    "wrong dtype": "the output has another dtype",
    "wrong type": "it returns something else than tensors",
    "wrong shape": "the output has another shape",
    "wrong device": "the output is on another device",
    "assumes contiguous input": "wrong for strided or misaligned input, with no ValueError",
    "depends on the seed": "right for some random inputs only",
    "modifies its input": "an input is changed",
    "too much traffic": "it moves more bytes than the gate allows",
    "uncoalesced access": "neighbouring lanes do not touch neighbouring addresses",
    "wrong formula": "the values are wrong, and no bug that the checker knows explains them",
}
"""The bug classes any kernel can have. Problems add their own through `suspects`."""


@dataclass(frozen=True)
class Case:
    """One call under test: where it came from, what went in, what should come out."""

    problem: Problem
    stage: str
    dtype: torch.dtype
    size: Mapping[str, int]
    seed: int
    inputs: tuple
    truth: tuple
    allowed: list[float]
    layout: str = ""
    passed: frozenset = frozenset()  # (size, dtype) pairs that were right with another seed
    earlier: tuple = ()  # outputs of earlier calls
    retry: Callable | None = field(default=None, repr=False)  # runs it again, unguarded

    def __str__(self) -> str:
        size = ", ".join(f"{k}={v}" for k, v in self.size.items())
        where = f"{self.stage}: {size}, {str(self.dtype).removeprefix('torch.')}, seed {self.seed}"
        return where + (f", {self.layout}" if self.layout else "")


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest absolute difference; infinity when either side holds NaN or infinity."""
    if not truth.numel():
        return 0.0
    worst = (got.double() - truth.double()).abs().max().item()
    return worst if math.isfinite(worst) else math.inf


def wrong_form(case: Case, got: tuple) -> tuple[str, str] | None:
    """A result of the wrong kind: not tensors, or another count, shape, dtype or device."""
    like = next(t for t in case.inputs if isinstance(t, torch.Tensor))
    wanted = f"wanted {len(case.truth)} tensor(s)"
    for g in got:
        if not isinstance(g, torch.Tensor):
            hint = ": is a `return` missing?" if g is None else ""
            return "wrong type", f"it returned {type(g).__name__}; {wanted}{hint}"
    if len(got) != len(case.truth):
        return "wrong shape", f"it returned {len(got)} tensor(s); {wanted}"
    with torch.no_grad():
        library = outputs(case.problem.library(*cloned(case.inputs)))
    for i, (g, lib) in enumerate(zip(got, library, strict=True)):
        if g.shape != lib.shape:
            return "wrong shape", f"output {i} is {list(g.shape)}; wanted {list(lib.shape)}"
        if g.dtype != lib.dtype:
            return "wrong dtype", f"output {i} is {g.dtype}; wanted {lib.dtype}"
        if g.device.type != like.device.type:
            return "wrong device", f"output {i} is on {g.device}; wanted {like.device}"
    return None


def lens_bug(report) -> tuple[str, str] | None:
    """The lens's first finding as a class of ours, and its text."""
    if not report.findings:
        return None
    first = report.findings[0]
    bug = first.bug
    if bug.startswith("out-of-bounds") and first.count > 1:
        bug = "missing tail guard"  # one stray access is an index; many are threads too many
        if found := re.search(r"\[(\d+), (\d+)\]; its shape is \((\d+), (\d+)\)", first.example):
            i, j, rows, columns = map(int, found.groups())
            if rows != columns and i < columns and j < rows:
                bug = "swapped indices"  # the other way round it would have been inside
    same_line = first.line == first.other_line and first.example.count("writes") == 2
    if bug.startswith("race between") and same_line:
        bug = "local index used for global"  # two blocks write one output: its index lacks a block
    return bug, str(first)


def damage_bug(damage: Iterable[Damage]) -> tuple[str, str] | None:
    """Bands that were written."""
    for hit in damage:
        text = (
            f"{hit.count} item(s) {hit.side} the end of {hit.buffer} were overwritten"
            if hit.side == "after"
            else f"{hit.count} item(s) before the start of {hit.buffer} were overwritten"
        )
        beyond = hit.side == "after" and hit.distance == 0 and hit.count > 1
        return ("missing tail guard" if beyond else "out-of-bounds store"), text
    return None


def memory_bug(case: Case, run: Run) -> tuple[str, str] | None:
    """Bands that were written, inputs that changed, outputs that were not."""
    if found := damage_bug(run.damage):
        return found
    names = case.problem.mutates and list(inspect.signature(case.problem.library).parameters)
    allowed = [names.index(m) for m in case.problem.mutates]
    changed = [i for i in run.changed if i not in allowed]
    if changed:
        return "modifies its input", f"input {changed[0]} is not what it was before the call"
    for i, got in enumerate(run.outputs):
        left = unwritten(got)
        if not left.any():
            continue
        if left.all():
            return "writes nothing", f"output {i} was never written"
        count, total = int(left.sum()), left.numel()
        text = f"{count} of {total} values of output {i} were never written"
        written = total - count
        flat = left.flatten()
        if not flat[:written].any() and written % 32 == 0 and written <= 1024 and count >= written:
            return "local index used for global", text + f": only the first {written} were"
        ends = torch.zeros_like(left)
        ends[..., -1] = True
        if torch.equal(left, ends) or (count == 1 and flat[-1]):
            return "off by one", text + ": the last one"
        return "tail not written", text
    return None


def value_bug(case: Case, got: tuple, writers: tuple = ()) -> tuple[str, str]:
    """Wrong values: the class that explains them best. `writers`: see `LensReport.writers`."""
    i, g, want, allowed = next(
        (i, g, t, a)
        for i, (g, t, a) in enumerate(zip(got, case.truth, case.allowed, strict=True))
        if not error(g, t) <= a
    )
    who = writers[i] if i < len(writers) else {}
    which = f" of output {i}" if len(got) > 1 else ""
    return _value_class(case, got, g, want, allowed), _where(case, which, g, want, allowed, who)


def _value_class(case: Case, got: tuple, g, want, allowed: float) -> str:
    if not g.dtype.is_floating_point:
        return "wrong formula"
    flat, true = g.double().flatten(), want.double().flatten()
    if not torch.isfinite(flat[torch.isfinite(true)]).all():
        with undefined_lanes():
            if case.retry and _finite_without_bands(case):
                return "out-of-bounds read"
        if case.retry and _finite_without_bands(case):
            return "wrong mask fill"
        return "NaN"
    if not flat.any():
        return "returns zeros"
    if bug := _suspect(case, got):
        return bug
    tensors = [t for t in case.inputs if isinstance(t, torch.Tensor)]
    if any(t.shape == g.shape and torch.equal(t, g) for t in tensors):
        return "returns its input"
    same_form = [e for e in case.earlier if e.shape == g.shape and e.dtype == g.dtype]
    if any(torch.equal(e, g) for e in same_form):
        return "stale output"

    def near(a: torch.Tensor, b: torch.Tensor, share: float = 1.0) -> bool:
        if not a.numel() or a.shape != b.shape:
            return False
        return ((a - b).abs() <= 4 * allowed).double().mean().item() >= share

    if want.dim() == 2 and 1 not in want.shape and near(flat, want.double().T.flatten()):
        return "transposed"
    if flat.numel() > 2 and (
        near(flat[1:], true[:-1], 0.9)
        or near(flat[:-1], true[1:], 0.9)
        or (want.dim() > 1 and _shifted(g.double(), want.double(), near))
    ):
        return "off by one"
    wrong = ((flat - true).abs() > allowed).nonzero().flatten()
    if wrong.tolist() == [flat.numel() - 1] and flat.numel() > 2:
        return "off by one"
    for block in (32, 64, 128, 256, 512, 1024):
        if len(true) <= block:
            break
        later = torch.arange(block, len(true)) % block  # the first block is right either way
        if near(flat[block:], true[later], 0.99):
            return "local index used for global"
    scale = true.abs().max().item()
    small = (flat - true).abs().max().item() < 0.02 * scale
    if small and case.problem.terms(**case.size) > 1 and not _one_factor(g, want):
        return "low-precision accumulator"
    if (tuple(case.size.items()), case.dtype) in case.passed:
        return "depends on the seed"
    return "wrong formula"


def _one_factor(g, want) -> bool:
    """Whether all is off by the same factor: a formula does that, rounding does not."""
    got, true = g.double().abs(), want.double().abs()
    if true.dim() > 1 and true.shape[:-1].numel() > 1:
        got, true = got.amax(dim=-1), true.amax(dim=-1)  # of rows
    keep = true > 0.1 * true.max()  # rounding moves what is near zero
    off = got[keep] / true[keep] - 1
    return len(off) > 1 and bool(off.std() < 0.1 * off.mean().abs())


def _shifted(g, want, near) -> bool:
    return want.shape[-1] > 2 and (
        near(g[..., 1:], want[..., :-1], 0.9) or near(g[..., :-1], want[..., 1:], 0.9)
    )


def _suspect(case: Case, got: tuple) -> str | None:
    """The suspect whose formula gives `got`, if one is far nearer to it than the truth is."""
    args = tuple(a.double() if is_float(a) else a for a in case.inputs)
    best, best_gap = None, math.inf
    for bug, formula in case.problem.suspects.items():
        try:
            values = outputs(formula(*cloned(args)))
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
            continue  # the formula does not apply to these shapes
        rows = list(zip(got, values, case.truth, case.allowed, strict=True))
        if not any(error(v, t) > 4 * a for _, v, t, a in rows if v.shape == t.shape):
            continue  # at this size the bug does not show
        if any(v.shape != t.shape or v.numel() < 3 for _, v, t, _ in rows):
            continue
        gaps = [error(g, v) / max(a, 0.05 * error(g, t), 1e-300) for g, v, t, a in rows]
        if max(gaps) < min(best_gap, 1.0):
            best, best_gap = bug, max(gaps)
    return best


def _finite_without_bands(case: Case) -> bool:
    """Whether NaN goes away when the inputs have ordinary neighbours: it was read from a band."""
    zeros = []
    for value in case.inputs:
        if isinstance(value, torch.Tensor):
            room = torch.zeros(value.numel() + 8192, dtype=value.dtype, device=value.device)
            inner = room[4096 : 4096 + value.numel()].view(value.shape)
            value = inner.copy_(value)
        zeros.append(value)
    try:
        return all(bool(torch.isfinite(o).all()) for o in outputs(case.retry(*zeros)))
    except Exception:
        return False


def _where(case: Case, which: str, g, want, allowed: float, who: Mapping[int, str]) -> str:
    """How many values are wrong, the first of them and who wrote it, small tensors whole."""
    bad = ~((g.double() - want.double()).abs() <= allowed)
    first = tuple(bad.nonzero()[0].tolist())
    writer = who.get(int(bad.flatten().nonzero()[0]))
    got, wanted = (f"{x[first].item():.6g}" for x in (g, want))
    if got == wanted:
        got, wanted = (f"{x[first].item():.9g}" for x in (g, want))
    lines = [
        f"{int(bad.sum())} of {bad.numel()} values{which} are wrong; first at {first}: "
        f"got {got}, wanted {wanted}, "
        f"may differ by {allowed:.2g}" + (f"\nwritten by {writer}" if writer else "")
    ]
    if want.numel() <= SMALL:
        for i, value in enumerate(case.inputs):
            shown = _short(value) if isinstance(value, torch.Tensor) else value
            lines.append(f"input {i}: {shown}")
        lines += [f"got:     {_short(g)}", f"wanted:  {_short(want)}"]
    return "\n".join(lines)


def _short(x: torch.Tensor) -> str:
    if x.numel() > SMALL:
        return f"{list(x.shape)}, too large to show"

    def fmt(row):
        if isinstance(row, list):
            return "[" + ", ".join(map(fmt, row)) + "]"
        return f"{row:.4g}"

    return fmt(x.tolist())
