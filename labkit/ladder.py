"""Rungs and ladders: versions of one operation, in the order they are taught."""

from __future__ import annotations

from labkit.notebook import Table
from labkit.problem import Problem

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

KINDS = ("numba", "triton", "cuda", "torch")


@dataclass(frozen=True)
class Rung:
    """One version: a launcher with the signature of its problem's `library`.

    `kind` is the language: "numba", "triton", "cuda" (C++), or "torch" for one that has no kernel
    of its own. `simulates` is False for what needs a GPU (raw CUDA, warp shuffles, CUDA graphs).
    `problem` is None for the ladder's own problem.
    """

    fn: Callable
    kind: str
    problem: Problem | None = None
    simulates: bool = True
    dtypes: tuple[torch.dtype, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown kind."""
        if self.kind not in KINDS:
            raise ValueError(f"rung {self.name}: kind={self.kind!r} is not one of {KINDS}")

    @property
    def name(self) -> str:
        """The launcher's name."""
        return self.fn.__name__

    @property
    def idea(self) -> str:
        """The first line of the launcher's docstring."""
        return (inspect.getdoc(self.fn) or "").partition("\n")[0]

    def __call__(self, *args):
        """Launch it."""
        return self.fn(*args)


@dataclass(frozen=True)
class Ladder:
    """A problem, its rungs from the naive one up, the exercises, the attempts not kept."""

    problem: Problem
    rungs: tuple[Rung, ...]
    exercises: tuple = ()
    rejected: tuple = ()

    @property
    def slug(self) -> str:
        """Keys the notebook, the solution, the results and the page."""
        return self.problem.name

    def __iter__(self) -> Iterator[Rung]:
        """Rungs in order."""
        return iter(self.rungs)

    def problem_of(self, rung: Rung) -> Problem:
        """The rung's own problem, else the ladder's."""
        return rung.problem or self.problem

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every problem of the ladder, each once, in order."""
        return tuple(dict((p.name, p) for p in map(self.problem_of, self.rungs)).values())

    def rung(self, name: str) -> Rung:
        """The rung with this name."""
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise ValueError(f"rung name={name!r} is not one of: {[r.name for r in self.rungs]}")

    def exercise(self, rung_name: str) -> object:
        """Start the exercise on this rung."""
        from labkit.exercise import Attempt

        for exercise in self.exercises:
            if exercise.rung_name == rung_name:
                rung = self.rung(rung_name)
                return Attempt(exercise, rung, self.problem_of(rung), rung.fn)
        known = [e.rung_name for e in self.exercises]
        raise ValueError(f"exercise rung_name={rung_name!r} is not one of: {known}")

    def table(self, device: str | None = None) -> Table:
        """Every rung, the library and the peers at `bench_size`, from the recorded results.

        `device` is a folder of book/results; by default the one that the text quotes.
        """
        from labkit.results import microseconds, percent, rate, results

        measured, rows = results(self.slug, device), []
        numbers = {r.name: (str(n), r.idea) for n, r in enumerate(self.rungs, 1)}
        for problem in self.problems:
            dtype, size = str(problem.dtypes[0]).removeprefix("torch."), dict(problem.bench_size)
            for t in measured.timings:
                if t.problem != problem.name or t.dtype != dtype or dict(t.size) != size:
                    continue
                number, idea = numbers.get(t.rung, ("", f"{problem.name}, for comparison"))
                rows.append(
                    (
                        number,
                        t.rung,
                        t.kind,
                        idea,
                        microseconds(t.p50_s),
                        rate(t.bandwidth),
                        percent(t.fraction_of_ceiling),
                    )
                )
        columns = ("rung", "name", "kind", "idea", "time", "useful bandwidth", "% of ceiling")
        return Table(columns, tuple(rows))

    def bars(self, device: str | None = None) -> Table:
        """Every bar of the target, what was measured, and whether it is met; as `table`."""
        from labkit.results import in_unit_of, results

        rows = []
        for bar in results(self.slug, device).data["target"]["bars"]:
            numbers = (in_unit_of(bar["text"], bar[n]) for n in ("measured", "limit"))
            rows.append((bar["text"], *numbers, "yes" if bar["met"] else "no"))
        return Table(("bar", "measured", "limit", "met"), tuple(rows))

    def attempts(self, device: str | None = None) -> Table:
        """What was tried and rejected, with what was measured; as `table`."""
        from labkit.results import results

        columns = ("attempt", "expected", "measured", "cause")
        rows = results(self.slug, device).data["rejected"]
        return Table(columns, tuple(tuple(row[c] for c in columns) for row in rows))

    def plot(
        self, chart: str = "ladder", problem: Problem | None = None, device: str | None = None
    ) -> object:
        """One of the four standard charts: "ladder", "sweep", "roofline" or "dtypes".

        `problem` picks one of several for "sweep" and "dtypes"; the last rung's by default.
        `device` is as in `table`.
        """
        from labkit import plot
        from labkit.results import results

        measured = results(self.slug, device)
        problem = problem or self.problem_of(self.rungs[-1])
        charts = {
            "ladder": lambda: plot.ladder(self, measured),
            "sweep": lambda: plot.sweep(problem, measured),
            "roofline": lambda: plot.roofline(self, measured),
            "dtypes": lambda: plot.dtypes(problem, measured),
        }
        if chart not in charts:
            raise ValueError(f"plot: chart={chart!r} is not one of {sorted(charts)}")
        return charts[chart]()

    def record(self, **how) -> object:
        """Time everything on this GPU and write the results; see `labkit.record`."""
        from labkit.record import record

        return record(self, **how)


def find(name: str) -> tuple[Ladder, Problem]:
    """The ladder and problem of an operation by name, from the solutions package.

    ValueError lists the names there are.
    """
    known = {}
    for ladder in ladders():
        for problem in ladder.problems:
            if problem.name == name:
                return ladder, problem
            known[problem.name] = ladder
    raise ValueError(f"operation name={name!r} is not one of: {', '.join(known)}")


def ladders() -> list[Ladder]:
    """The ladder of every solutions module. Modules named `_…` are drafts and left out."""
    package = importlib.import_module("solutions")
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_"]
    modules = [importlib.import_module(f"solutions.{n}") for n in sorted(names)]
    return [m.LADDER for m in modules if hasattr(m, "LADDER")]
