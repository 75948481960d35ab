"""What a launcher launches: its kernels, found by name in the functions it refers to."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

# Functions of these folders are not the reader's.
PACKAGES = (sysconfig.get_path("stdlib"), str(Path(__file__).parent))


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
    function: FunctionType | None  # the Python function under the decorators; None for C++

    @property
    def autotuned(self) -> bool:
        """Whether Triton would time configurations first, which needs a GPU."""
        return any(type(layer).__name__ == "Autotuner" for layer in _layers(self.object))


def _layers(value: object) -> Iterator[object]:
    """A decorated function from the outside in: autotuner, JIT function, Python function."""
    while value is not None and not isinstance(value, FunctionType):
        yield value
        value = getattr(value, "py_func", None) or getattr(value, "fn", None)
    if value is not None:
        yield value


def as_kernel(value: object) -> Kernel | None:
    """`value` as a Kernel, if it is one: real or simulated."""
    module, name = type(value).__module__, type(value).__name__
    if name == "CudaKernel" and module.startswith("labkit"):
        return Kernel(value.name, "cuda", value, None)
    for kind in ("numba", "triton"):
        if module.startswith(kind):
            *_, function = [None, *_layers(value)]
            if isinstance(function, FunctionType):
                return Kernel(function.__name__, kind, value, function)
    return None


def reached(fn: Callable) -> Iterator[object]:
    """Every function and kernel that `fn` refers to, itself included, each once.

    What it imports from the reader's own files is followed; installed packages are not.
    """
    seen, queue = set(), [fn]
    while queue:
        value = queue.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        kernel = as_kernel(value)
        function = kernel.function if kernel else value
        if isinstance(value, (dict, list, tuple)):  # a kernel for each dtype, say
            items = value.values() if isinstance(value, dict) else value
            queue += [v for v in items if as_kernel(v)]
        elif kernel or isinstance(function, FunctionType):
            yield value
        elif _own(call := vars(type(value)).get("__call__")):  # a callable object
            queue += [call, *getattr(value, "__dict__", {}).values()]
        if not isinstance(function, FunctionType):
            continue
        names = _names(function.__code__)
        others = [function.__globals__.get(name) for name in names]
        others += [cell.cell_contents for cell in function.__closure__ or ()]
        for other in others:
            if isinstance(other, ModuleType) and not packaged(getattr(other, "__file__", "") or ""):
                # `import k` and then `k.kernel[grid](...)`
                members = (getattr(other, n, None) for n in names)
                queue += [m for m in members if as_kernel(m) or _own(m)]
            elif as_kernel(other) or _own(other) or isinstance(other, (dict, list, tuple)):
                queue.append(other)


def _names(code: CodeType) -> list[str]:
    """Global names and attributes that code uses, those of functions inside it too."""
    inner = [n for c in code.co_consts if isinstance(c, CodeType) for n in _names(c)]
    return [*code.co_names, *inner]


def _own(value: object) -> bool:
    """Whether a value is a function of the reader's or of solutions, not of a package."""
    if not isinstance(value, FunctionType):
        return False
    return not packaged(value.__code__.co_filename)


def packaged(file: str) -> bool:
    """Whether a file is Python's, labkit's or an installed package's."""
    return file.startswith(PACKAGES) or "site-packages" in file


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
