"""The checker: is this kernel right, and if not, which bug does it have?

`check` runs stages and stops at the first that fails: the call itself, tiny and edge sizes,
an empty input, layouts, races, barriers and traffic under the simulators, properties of the
operation, numbers for each dtype and several seeds. Every call runs on guarded memory:
outputs poisoned with NaN, canary bands round every buffer. Time is never a gate.

The tolerance has no constant per operation:
`allowed = 2·error(library, same dtype) + (1 + √K)·eps32·max|truth|`, errors against the reference
in float64, K the number of terms summed into one output. The book derives it in "How to check".
"""

from __future__ import annotations

from labkit.device import DEVICE, LAUNCHED, SIMULATED
from labkit.diagnose import (
    BUGS,
    Case,
    damage_bug,
    error,
    lens_bug,
    memory_bug,
    value_bug,
    wrong_form,
)
from labkit.guard import bits, guarded, guarded_allocations
from labkit.ladder import Rung
from labkit.launch import NotAttempted, as_kernel, attempted, kernels_of, packaged
from labkit.problem import Problem, cloned, is_float, outputs

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

EPS32 = torch.finfo(torch.float32).eps
# Symptoms of many bugs: another size may tell which.
VAGUE = (
    "wrong formula",
    "writes nothing",
    "returns zeros",
    "NaN",
    "low-precision accumulator",
)
SEEDS = 3  # random inputs tried per dtype at the largest size
COMPILE_FOR = "sm_90"  # a kernel that is right under the simulators must compile, too


class CheckFailed(AssertionError):
    """A kernel was rejected. `bug` is its class, `stage` where it showed, `text` the report."""

    def __init__(self, name: str, bug: str, stage: str, text: str) -> None:
        """Compose the report."""
        self.name, self.bug, self.stage, self.text = name, bug, stage, text
        why = f" ({BUGS[bug]})" if bug in BUGS else ""
        body = "\n".join("   " + line for line in text.splitlines())
        super().__init__(f"🔴 {name}: {bug}{why}\n   in {stage}\n{body}")


@dataclass(frozen=True)
class Verdict:
    """What a check found: "🟢" right or "⚪" not run, and where it was verified.

    `worst` is the largest error over what is allowed, seen over all sizes, seeds and dtypes.
    """

    state: str
    name: str
    worst: float = math.nan
    verified: tuple[str, ...] = ()
    not_verified: tuple[str, ...] = ()
    note: str = ""
    kernels: bool = True  # False: a plain torch function

    def __repr__(self) -> str:
        """One line, and one more for what could not be verified here."""
        if self.state == "🟢":
            where = f"on {DEVICE.name}"
            if SIMULATED:
                where = "under the simulators" if self.kernels else "on the CPU"
            line = (
                f"🟢 {self.name}: right in {listed(self.verified)} {where}\n"
                f"   worst error {self.worst:.2f} of what is allowed"
            )
        else:
            line = f"{self.state} {self.name}: {self.note}"
        if self.not_verified:
            line += f"\n   not verified here: {'; '.join(self.not_verified)}"
        return line


def listed(words: tuple[str, ...] | list[str]) -> str:
    """Words as English: "a, b and c"."""
    words = list(words)
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check(
    fn: Callable | Rung,
    problem: Problem | None = None,
    *,
    seed: int = 0,
    gates: Mapping[str, float] | None = None,
) -> Verdict:
    """Check a kernel against its problem; raise `CheckFailed`, naming the bug, when it is wrong.

    `fn` is a rung, a launcher, or any function with the signature of `problem.library`. Without a
    GPU it runs in float32 under the simulators, or in every dtype if it launches no kernel.
    `gates` bounds what the lens counts: `{"bytes": 1.1}` allows 1.1 times the ledger's bytes,
    `{"sectors": 1.5}` that many times the 32-byte sectors which would hold what each request reads
    or writes of global memory.
    """
    rung = fn if isinstance(fn, Rung) else None
    problem = problem or (rung and rung.problem)
    if not isinstance(problem, Problem):
        raise TypeError(f"check: problem={problem!r} is not a Problem")
    launcher = rung.fn if rung else fn
    if not callable(launcher):
        raise TypeError(f"check: fn={fn!r} is not a function")
    name = getattr(launcher, "__name__", type(launcher).__name__)
    if kernel := as_kernel(launcher):
        raise TypeError(f"check: fn={kernel.name} is a kernel; pass the function that launches it")
    if not attempted(launcher):
        return Verdict("⚪", name, note="not attempted yet")

    kernels = kernels_of(launcher)
    kinds = {k.kind for k in kernels}
    if SIMULATED and any(k.autotuned for k in kernels):
        note = "triton.autotune needs a GPU; launch one configuration to check it here"
        return Verdict("⚪", name, note=note)
    if SIMULATED and problem.measure and rung and not rung.simulates:
        return Verdict("⚪", name, note="a whole model on a GPU: the simulators cannot run it")
    if SIMULATED and ("cuda" in kinds or (rung and not rung.simulates)):
        return _compiled_only(launcher, name, problem)
    dtypes, skipped = (rung and rung.dtypes) or problem.dtypes, []
    if SIMULATED and not kinds:
        kinds = _launches(launcher, problem)
    if SIMULATED and kinds:
        others = listed([dtype_name(d) for d in dtypes if d != torch.float32])
        skipped = [*filter(None, [others]), "a real GPU"]
        dtypes = (torch.float32,)
    run = _Run(launcher, name, problem, seed, kinds, skipped)
    try:
        run.signature()
        # One or two elements tell little about a bug, so those sizes come last.
        sizes = sorted(problem.test_sizes, key=lambda s: _numel(problem, s) < 3)
        for dtype in dtypes:
            for size in sizes:
                run.call("sizes", dtype, size)
        run.empty(dtypes[0])
        run.layouts(dtypes[0])
        run.lens(gates or {})
        run.properties(dtypes)
        for dtype in dtypes:
            run.numbers(dtype)
        if SIMULATED and kinds and not problem.measure:
            run.compiled()
    except NotAttempted:
        return Verdict("⚪", name, note="not attempted yet")
    return Verdict(
        "🟢", name, run.worst, tuple(map(dtype_name, dtypes)), tuple(skipped), "", bool(kinds)
    )


def _launches(launcher: Callable, problem: Problem) -> set[str]:
    """Kinds of the kernels that it launches when it runs: a search by name cannot find them all."""
    LAUNCHED.clear()
    guarded(launcher, problem.inputs(torch.float32, **problem.test_sizes[-1]))
    return set(LAUNCHED)


def _compiled_only(launcher: Callable, name: str, problem: Problem) -> Verdict:
    from labkit.compile import compiles

    try:
        archs = compiles(launcher, problem)
    except Exception as failure:
        raise CheckFailed(name, "raises", "compiling", str(failure)) from failure
    return Verdict(
        "⚪",
        name,
        not_verified=("everything that needs a GPU",),
        note=f"compiles for {listed(archs)}, but the simulators cannot run it",
    )


@dataclass
class _Run:
    """One check under way."""

    launcher: Callable
    name: str
    problem: Problem
    seed: int
    kinds: set[str]
    skipped: list[str]
    worst: float = 0.0
    passed: set = field(default_factory=set)
    earlier: list = field(default_factory=list)
    kept: list = field(default_factory=list)  # the last call's outputs, and copies of them
    failed: bool = False

    def fail(self, bug: str, stage: object, text: str) -> None:
        raise CheckFailed(self.name, bug, str(stage), text)

    def signature(self) -> None:
        inputs = self.problem.inputs(torch.float32, **self.problem.test_sizes[0])
        try:
            inspect.signature(self.launcher).bind(*inputs)
        except TypeError as why:
            wanted = inspect.signature(self.problem.library)
            self.fail("wrong signature", "the call", f"{why}; wanted {self.problem.name}{wanted}")
        except ValueError:
            pass  # a builtin without a signature: calling it will tell

    def call(self, stage, dtype, size, seed=None, change=None, layout="") -> None:
        """One guarded call on fresh inputs, judged. `change` re-lays the inputs in memory."""
        seed = self.seed if seed is None else seed
        inputs = self.problem.inputs(dtype, seed=seed, **size)
        truth = self.problem.truth(*inputs)
        if change:
            inputs = tuple(change(x) if isinstance(x, torch.Tensor) else x for x in inputs)
        case = Case(
            self.problem,
            stage,
            dtype,
            size,
            seed,
            inputs,
            truth,
            allowance(self.problem, size, inputs, truth),
            layout,
            frozenset(self.passed),
            tuple(self.earlier),
            self.launcher,
        )
        run = guarded(self.launcher, inputs)
        if isinstance(run.error, NotAttempted):
            raise run.error
        if layout and isinstance(run.error, ValueError):
            return  # a clear refusal is a right answer to a layout
        found = self._judge(case, run)
        if found:
            bug, text = found
            if layout:
                bug = "assumes contiguous input"
            elif bug in VAGUE and stage == "sizes" and not self.failed:
                self._fail_elsewhere(dtype, size)
            self.fail(bug, case, text)
        for old, saved in self.kept:
            if not torch.equal(bits(old), bits(saved)):
                self.fail("overwrites an earlier result", case, "the last call's output changed")
        self.kept = [(o, o.clone()) for o in run.outputs if o.numel()]
        self.passed.add((tuple(size.items()), dtype))
        self.earlier = (self.earlier + [o.detach().clone() for o in run.outputs])[-8:]
        for got, true, allowed in zip(run.outputs, truth, case.allowed, strict=True):
            if true.is_floating_point() and allowed:
                self.worst = max(self.worst, error(got, true) / allowed)

    def _fail_elsewhere(self, dtype: torch.dtype, seen: Mapping[str, int]) -> None:
        """Fail with another size's report, if one names the bug better than `seen` does."""
        self.failed = True
        for size in self.problem.test_sizes:
            if size == seen or _numel(self.problem, size) < 3:
                continue
            try:
                self.call("sizes", dtype, size)
            except CheckFailed as failure:
                if failure.bug not in VAGUE:
                    raise

    def _judge(self, case: Case, run) -> tuple[str, str] | None:
        """The bug and its report, or None when the call was right."""
        if run.error is not None:
            report = self._lens(case)
            return (report and lens_bug(report)) or _exception(run.error)
        if bug := wrong_form(case, run.outputs):
            return bug
        bug = memory_bug(case, run)
        if bug is None and all(
            error(g, t) <= a for g, t, a in zip(run.outputs, case.truth, case.allowed, strict=True)
        ):
            return None
        # The lens sees causes (a race, a missing barrier); wrong values are only a symptom.
        report = self._lens(case)
        seen = report and lens_bug(report)
        return seen or bug or value_bug(case, run.outputs, report.writers if report else ())

    def _lens(self, case: Case) -> object:
        """The lens's report on this call, or None where it cannot look."""
        if not self.kinds & {"numba", "triton"}:
            return None
        from labkit.lens import lens

        try:
            # The simulators run float32 only, and these bugs do not depend on the dtype.
            args = [x.float() if is_float(x) else x for x in case.inputs]
            return lens(self.launcher, inputs=tuple(args))
        except Exception:  # it raises what the kernel raises; that is reported by the caller
            return None

    def empty(self, dtype: torch.dtype) -> None:
        if self.problem.empty_size is not None:
            self.call("empty input", dtype, self.problem.empty_size)

    def layouts(self, dtype: torch.dtype) -> None:
        """Strided and misaligned inputs: right, or a clean ValueError."""
        size = self.problem.test_sizes[-1]
        self.call("layouts", dtype, size, change=_every_other, layout="every other element")
        self.call("layouts", dtype, size, change=_wide_rows, layout="rows of a wider matrix")
        self.call("layouts", dtype, size, change=_shifted, layout="starts one element late")

    def properties(self, dtypes: tuple[torch.dtype, ...]) -> None:
        for prop in self.problem.properties:
            if prop.dtypes and not set(prop.dtypes) & set(dtypes):
                self.skipped.append(prop.text)
                continue
            try:
                with guarded_allocations() as damage:
                    trouble = prop.holds(self.launcher)
            except Exception as why:
                bug, text = _exception(why)
                self.fail(bug, f"property: {prop.text}", text)
            bug, stray = damage_bug(damage) or ("", "")
            if trouble or bug:
                text = "\n".join(filter(None, (trouble, stray)))
                self.fail(prop.bug if trouble else bug, f"property: {prop.text}", text)

    def lens(self, gates: Mapping[str, float]) -> None:
        """Races, barriers and traffic, seen by the simulators on the largest test size.

        On a GPU, a launcher of no known kernel may still have some: a search by name does not find
        them all.
        """
        hidden = not (self.kinds or SIMULATED or self.problem.measure)
        if not (hidden or self.kinds & {"numba", "triton"}):
            return
        from labkit.lens import NothingLaunched, lens

        size = self.problem.test_sizes[-1]
        try:
            report = lens(self.launcher, self.problem, seed=self.seed, **size)
        except NothingLaunched:
            return
        except Exception:  # the kernel just ran, so it is the simulator that cannot run it
            self.skipped.append("races and traffic (the simulators cannot run this kernel)")
            return
        if found := lens_bug(report):
            self.fail(found[0], f"races and barriers: {dict(size)}", found[1])
        ledger = self.problem.work(torch.float32, **size).bytes
        if "bytes" in gates and report.bytes > gates["bytes"] * ledger:
            self.fail(
                "too much traffic",
                "structural gates",
                f"it moves {report.bytes} bytes, {report.bytes / ledger:.2f} times the ledger "
                f"of {ledger}; the gate is {gates['bytes']:.2f}",
            )
        moves = [a for a in report.accesses if a.space == "global"]
        touched, needed = sum(a.sectors for a in moves), sum(a.needed for a in moves)
        if "sectors" in gates and touched > gates["sectors"] * needed:
            self.fail(
                "uncoalesced access",
                "structural gates",
                f"its requests touch {touched:,} sectors of 32 bytes where {needed:,} would do, "
                f"{touched / needed:.1f} times as many; the gate is {gates['sectors']:.2f}",
            )

    def numbers(self, dtype: torch.dtype) -> None:
        """More seeds; on a GPU, the size that is timed too, and the one with most columns."""
        for seed in range(1, SEEDS):
            self.call("numbers", dtype, self.problem.test_sizes[-1], seed=self.seed + seed)
        if not SIMULATED:
            sizes = (self.problem.bench_size, *self.problem.sweep)
            for size in (sizes[0], max(sizes, key=lambda size: list(size.values())[1:])):
                self.call("numbers", dtype, size, seed=self.seed + SEEDS)

    def compiled(self) -> None:
        """A simulator runs any Python; a compiler may not take it."""
        from labkit.compile import CompileError, compiles

        try:
            compiles(self.launcher, self.problem, (COMPILE_FOR,), **self.problem.test_sizes[-1])
        except CompileError as why:
            self.fail("does not compile", f"compiling for {COMPILE_FOR}", str(why))
        except Exception:  # the compilers' process cannot have this launcher, or not run it
            self.skipped.append("whether it compiles")


def _numel(problem: Problem, size: Mapping[str, int]) -> int:
    return min(o.numel() for o in outputs(problem.library(*problem.inputs(torch.float32, **size))))


def _exception(why: BaseException) -> tuple[str, str]:
    """What went wrong first, and the last line of the reader's own that led there."""
    frames = traceback.extract_tb(why.__traceback__)
    while why.__cause__:  # Triton's interpreter wraps what the kernel raised
        why = why.__cause__
        frames += traceback.extract_tb(why.__traceback__)
    own = [f for f in frames if f.line and not packaged(f.filename)]
    at = f"\nat `{own[-1].line}`" if own else ""
    return "raises", f"{type(why).__name__}: {why}{at}"


def _every_other(x: torch.Tensor) -> torch.Tensor:
    room = x.new_empty((*x.shape[:-1], 2 * x.shape[-1])) if x.dim() else x.new_empty(2)
    return room[..., ::2].copy_(x) if x.dim() else x


def _wide_rows(x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 2:
        return x
    return x.new_empty((*x.shape[:-1], x.shape[-1] + 16))[..., :-16].copy_(x)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


# The tolerance --------------------------------------------------------------------------------


@contextmanager
def strict_math() -> Iterator[None]:
    """TF32 and reduced-precision reductions off, so that the library cannot lower the bar."""
    switches = (
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    )
    saved = [getattr(owner, name) for owner, name in switches]
    try:
        for owner, name in switches:
            setattr(owner, name, False)
        yield
    finally:
        for (owner, name), value in zip(switches, saved, strict=True):
            setattr(owner, name, value)


def allowance(
    problem: Problem, size: Mapping[str, int], inputs: tuple, truth: tuple
) -> list[float]:
    """What each output may be wrong by (module docstring); 0 for integers, which must be equal."""
    with strict_math():
        library = outputs(problem.library(*cloned(inputs)))
    noise = (1 + math.sqrt(problem.terms(**size))) * EPS32
    return [
        2 * error(lib, true) + noise * true.abs().max().item()
        if true.is_floating_point() and true.numel()
        else 0.0
        for lib, true in zip(library, truth, strict=True)
    ]


def error_over_allowed(
    fn: Callable, problem: Problem, dtype: torch.dtype, seed: int = 0, **size: int
) -> float:
    """The largest error of `fn` over what is allowed; at most 1 is right."""
    return errors_over_allowed({"": fn}, problem, dtype, seed, **size)[""]


def errors_over_allowed(
    versions: Mapping[str, Callable], problem: Problem, dtype: torch.dtype, seed: int = 0, **size
) -> dict[str, float]:
    """The same for several functions, by name, on the same inputs."""
    inputs = problem.inputs(dtype, seed=seed, **size)
    truth = problem.truth(*inputs)
    allowed = allowance(problem, size, inputs, truth)

    def worst(fn: Callable) -> float:
        got = zip(outputs(fn(*cloned(inputs))), truth, allowed, strict=True)
        errors = ((error(g, t), a) for g, t, a in got)
        return max(e / a if a else (0.0 if e == 0 else math.inf) for e, a in errors)

    return {name: worst(fn) for name, fn in versions.items()}
