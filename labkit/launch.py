"""What a launcher launches: its kernels, found by name in the functions it refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType


class NotAttempted(Exception):
    """An exercise whose body is still the skeleton was called."""


def todo(hint: str) -> None:
    """Mark the body of an exercise as not written yet. `hint` says how long an answer is."""
    raise NotAttempted(f"not attempted yet: {hint}")


@dataclass(frozen=True)
class Kernel:
    """A kernel object and its language: "numba", "triton" or "cuda" (C++)."""

    name: str
    kind: str
    object: object
    function: FunctionType | None  # the Python function under the decorator; None for C++


def as_kernel(value: object) -> Kernel | None:
    """`value` as a Kernel, if it is one: real or simulated."""
    module, name = type(value).__module__, type(value).__name__
    if name == "CudaKernel" and module.startswith("labkit"):
        return Kernel(value.name, "cuda", value, None)
    function = getattr(value, "py_func", None) or getattr(value, "fn", None)
    if not isinstance(function, FunctionType):
        return None
    for kind in ("numba", "triton"):
        if module.startswith(kind):
            return Kernel(function.__name__, kind, value, function)
    return None


def reached(fn: Callable) -> Iterator[object]:
    """Every function and kernel that `fn` refers to, itself included, each once."""
    seen, queue = set(), [fn]
    while queue:
        value = queue.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):  # a kernel for each dtype, say
            queue += [v for v in value.values() if as_kernel(v)]
        kernel = as_kernel(value)
        function = kernel.function if kernel else value
        if kernel or isinstance(function, FunctionType):
            yield value
        if not isinstance(function, FunctionType):
            continue
        # Follow names in the same module only: what it imports from elsewhere is not its own.
        for name in _names(function.__code__):
            other = function.__globals__.get(name)
            own = getattr(other, "__module__", None) == function.__module__
            if own or as_kernel(other) or isinstance(other, dict):
                queue.append(other)
        for cell in function.__closure__ or ():
            queue.append(cell.cell_contents)


def _names(code: CodeType) -> list[str]:
    names = list(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names += _names(const)
    return names


def kernels_of(fn: Callable) -> list[Kernel]:
    """The kernels that `fn` and the functions it calls refer to."""
    return [kernel for value in reached(fn) if (kernel := as_kernel(value))]


def attempted(fn: Callable) -> bool:
    """False while `fn`, or a kernel or helper it uses, still calls `todo`."""
    for value in reached(fn):
        kernel = as_kernel(value)
        function = kernel.function if kernel else value
        if isinstance(function, FunctionType) and "todo" in _names(function.__code__):
            return False
    return True
