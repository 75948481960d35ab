"""Exercises: three states (⚪ 🔴 🟢), staged hints, the solution, and wrong versions on purpose.

An exercise is a rung whose kernel the reader writes. In a notebook:

    ex = LADDER.exercise("rms_norm_tiled")
    ...                                  # the skeleton cell, which the reader fills in
    ex.check(rms_norm_tiled)             # ⚪ not attempted, 🔴 raises CheckFailed, 🟢 right
    ex.kernel                            # the reader's launcher once 🟢, the solution until then

`LABKIT_MODE` says whose kernel is checked: `learner` (default), `solution`, `strict` (a skeleton
fails), `mutant:<name>` (a planted bug, which must be rejected).
"""

from __future__ import annotations

from labkit.check import CheckFailed, Verdict, check
from labkit.ladder import Rung, find
from labkit.notebook import Prose, say
from labkit.problem import Problem

import ast
import inspect
import linecache
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType


@dataclass(frozen=True)
class Mutant:
    """A wrong version of an exercise: `patches` maps text of the solution to text with the bug.

    `bug` is the class that the checker must name.
    """

    name: str
    bug: str
    patches: Mapping[str, str]


@dataclass(frozen=True)
class Exercise:
    """A rung whose body the reader writes: the function to write, hints, mutants, gates.

    `rung_name` names a rung of the ladder, `function` the definition whose body is removed.
    """

    rung_name: str
    function: str
    hints: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    gates: Mapping[str, float] = field(default_factory=dict)

    def mutant(self, name: str, rung: Rung) -> Callable:
        """The launcher of `rung` with one mutant's patches applied to its source."""
        chosen = [m for m in self.mutants if m.name == name]
        if not chosen:
            known = ", ".join(m.name for m in self.mutants)
            raise ValueError(f"mutant name={name!r} is not one of: {known}")
        module = inspect.getmodule(rung.fn)
        names = [self.function] + [rung.name] * (rung.name != self.function)
        source = "\n\n".join(definition(module, n) for n in names)
        source = patched(source, chosen[0].patches, f"mutant {name}")
        return define(source, dict(vars(module)), f"{module.__name__}.{name}")[rung.name]


@dataclass
class Attempt:
    """An exercise under way in a notebook."""

    exercise: Exercise
    rung: Rung
    problem: Problem
    kernel: Callable
    """The reader's launcher once it is 🟢, the solution until then."""
    state: str = "⚪"

    @property
    def whose(self) -> str:
        """Whose kernel it is, for legends: "yours" or "the solution's"."""
        return "yours" if self.state == "🟢" else "the solution's"

    def check(self, fn: Callable) -> Verdict:
        """Check the reader's launcher; raises `CheckFailed` when it is wrong."""
        mode = os.environ.get("LABKIT_MODE") or "learner"
        if mode == "solution":
            fn = self.rung.fn
        elif mode.startswith("mutant:"):
            name = mode.removeprefix("mutant:")
            every = [m.name for e in find(self.problem.name)[0].exercises for m in e.mutants]
            if name not in every:
                raise ValueError(f"LABKIT_MODE={mode!r}: there is no mutant {name!r}: {every}")
            if name in [m.name for m in self.exercise.mutants]:
                fn = self.exercise.mutant(name, self.rung)
        elif mode not in ("learner", "strict"):
            raise ValueError(f"LABKIT_MODE={mode!r} is not learner, solution, strict or mutant:…")
        self.state, self.kernel = "🔴", self.rung.fn
        verdict = check(fn, self.problem, gates=self.exercise.gates)
        if verdict.state == "⚪" and mode == "strict":
            tried = not verdict.note.startswith("not attempted")
            bug = "not checked" if tried else "not attempted"
            raise CheckFailed(self.rung.name, bug, "strict mode", verdict.note)
        self.state = verdict.state
        self.kernel = fn if verdict.state == "🟢" else self.rung.fn
        return verdict

    def hint(self, number: int = 1) -> Prose:
        """Hint 1, 2, …; each says more than the one before."""
        hints = self.exercise.hints
        if not 1 <= number <= len(hints):
            raise ValueError(f"hint number={number}: there are {len(hints)}, counted from 1")
        return say(f"Hint {number} of {len(hints)}: {hints[number - 1]}")

    def solution(self) -> None:
        """Print the solution's source."""
        print(definition(inspect.getmodule(self.rung.fn), self.exercise.function))

    def compare(self, fn: Callable, **size: int) -> object:
        """Compare a launcher with the solution, the library and the peers."""
        from labkit.compare import compare

        return compare(fn, self.problem.name, **size)


def patched(source: str, patches: Mapping[str, str], what: str) -> str:
    """The source with each key, which must occur once, replaced by its value."""
    for old, new in patches.items():
        if source.count(old) != 1:
            raise ValueError(
                f"{what}: {old!r} occurs {source.count(old)} times in the solution, wanted once"
            )
        source = source.replace(old, new)
    return source


def definition(module: ModuleType, name: str) -> str:
    """The source text of a top-level definition of a module, decorators and assignments too.

    Of a package: of the one imported module in it that has the name.
    """
    inside = [m for n, m in sys.modules.items() if n.startswith(f"{module.__name__}.")]
    found = [text for part in (module, *inside) if (text := _definition(part, name))]
    if len(found) != 1:
        count = "several" if found else "no"
        raise ValueError(f"{module.__name__} has {count} top-level definition name={name!r}")
    return found[0]


def _definition(module: ModuleType, name: str) -> str | None:
    source = inspect.getsource(module)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        named = getattr(node, "name", None) == name or any(
            isinstance(t, ast.Name) and t.id == name for t in getattr(node, "targets", [])
        )
        if named:
            first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
            return "\n".join(lines[first - 1 : node.end_lineno])
    return None


def skeleton(module: ModuleType, name: str) -> str:
    """The definition with its body replaced by `lab.todo`, which says how long an answer is."""
    source = definition(module, name)
    function = ast.parse(source).body[0]
    body = function.body
    docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    lines = source.splitlines()
    head = lines[: body[0].end_lineno if docstring else body[0].lineno - 1]
    rest = lines[len(head) :]
    count = sum(bool(s) and not s.startswith("#") for s in map(str.strip, rest))
    return "\n".join([*head, f'    lab.todo("about {count} lines")'])


def define(source: str, namespace: dict, label: str) -> dict:
    """Execute source text that compilers can still read back, and return its namespace."""
    source = textwrap.dedent(source)
    filename = f"<labkit {label}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), namespace)
    return namespace
