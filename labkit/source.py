"""The text of a function and of everything it uses, as a module that another process can import.

The lens and the compile card run a reader's kernel in a process of their own, where Numba and
Triton start with other switches. A function from a file is imported there by name. A function from
a notebook, or from inside another function, has no such name: its source travels, with the source
of what it refers to.
"""

from __future__ import annotations
import __future__

from labkit.launch import as_kernel

import builtins
import enum
import inspect
import symtable
import sys
import textwrap
import types

import torch

# Where values without a module of their own, such as numba.float32, are usually imported from.
_COMMON = ("numba", "numba.types", "triton", "triton.language", "torch", "math", "numpy")
_LITERALS = (int, float, complex, str, bytes, bool, type(None), type(...), slice)


def portable(fn) -> tuple[str, str]:
    """Module text that defines `fn`, and the name it has there.

    `fn` is a function, or what Numba, Triton (compiled or simulated) or `lab.cuda_kernel` made of
    one; a Rung stands for its launcher. The text starts with `import labkit as lab` (after a
    `__future__` import, where the source needs one).

    Importable objects become `from module import name`. Source comes from `inspect.getsource`,
    which reads notebook cells too. What the source refers to is followed: modules, functions,
    kernels, classes, plain values, closure variables and objects that a loaded module of the lab
    holds under some name.

    ValueError names the object that cannot travel.
    """
    if hasattr(fn, "kind") and hasattr(fn, "fn"):  # a Rung
        fn = fn.fn
    writer = _Writer()
    wanted = getattr(fn, "__name__", None) or getattr(fn, "name", "")
    name = wanted if wanted.isidentifier() else "portable"
    writer.define(name, fn)
    head = ["from __future__ import annotations"] if writer.future else []
    return "\n".join([*head, "import labkit as lab", *writer.lines, ""]), name


def python_function(obj):
    """The plain Python function behind a Numba or Triton kernel; `obj` itself if it is none."""
    kernel = as_kernel(obj)
    return kernel.function if kernel and kernel.function else obj


class _Writer:
    """Collects the lines of one module, each name defined before it is used."""

    def __init__(self):
        self.lines: list[str] = []
        self.names: dict[str, object] = {"lab": sys.modules.get("labkit")}
        self.future = False

    def define(self, name: str, obj) -> None:
        """Add what gives `name` the meaning it has for the function being copied."""
        if name in self.names:
            if not _same(self.names[name], obj):
                raise ValueError(f"{name!r} means two things: {self.names[name]!r} and {obj!r}")
            return
        self.names[name] = obj
        self.lines.append(self._statement(name, obj))

    def _statement(self, name: str, obj) -> str:
        if isinstance(obj, types.ModuleType):
            return _import_module(name, obj)
        if home := _home(name, obj):
            module, there = home
            return f"from {module} import {there}" + (f" as {name}" if there != name else "")
        if _is_cuda_kernel(obj):
            options = f", options={obj.options!r}" if obj.options else ""
            return f"{name} = lab.cuda_kernel({obj.source!r}, {obj.name!r}{options})"
        inner = python_function(obj)
        if isinstance(inner, (types.FunctionType, type)):
            text = self._source(name, inner)
            return text if inner.__name__ == name else f"{text}\n{name} = {inner.__name__}"
        return f"{name} = {self._value(name, obj)}"

    def _source(self, name: str, fn) -> str:
        try:
            text = textwrap.dedent(inspect.getsource(fn))
        except (OSError, TypeError) as e:
            raise ValueError(f"{name!r} has no source that Python can find: {e}") from None
        if isinstance(fn, types.FunctionType):
            self.future |= bool(fn.__code__.co_flags & __future__.annotations.compiler_flag)
            closure = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
            scope = {**fn.__globals__, **{k: c.cell_contents for k, c in closure}}
        else:
            scope = vars(sys.modules.get(fn.__module__, builtins))
        if not text.lstrip().startswith(("def", "class", "@", "#")):
            raise ValueError(f"{name!r} is a lambda; write it with def")
        for used in _globals(symtable.symtable(text, name, "exec")):
            if used in scope and scope[used] is not fn and used != fn.__name__:
                self.define(used, scope[used])
        return "\n" + text.rstrip()

    def _value(self, name: str, obj) -> str:
        """An expression for a plain value. Containers may hold anything that can travel."""
        if isinstance(obj, enum.Enum) or type(obj) in _LITERALS:
            if obj in (float("inf"), -float("inf")) or obj != obj:
                return f'float("{obj}")'
            if type(obj) in _LITERALS:
                return repr(obj)
        if isinstance(obj, (torch.dtype, torch.device, torch.Size)):
            self.define("torch", torch)
            return f"torch.Size({list(obj)})" if isinstance(obj, torch.Size) else _torch(obj)
        if _is_cuda_kernel(obj):
            return self._statement(name, obj).partition(" = ")[2]
        if type(obj) in (list, tuple, set, frozenset):
            parts = [self._value(name, o) for o in obj]
            inside = ", ".join(parts)
            if type(obj) is tuple:
                return f"({inside}{',' * (len(parts) == 1)})"
            return f"[{inside}]" if type(obj) is list else f"{type(obj).__name__}([{inside}])"
        if type(obj) is dict:
            pairs = (f"{self._value(name, k)}: {self._value(name, v)}" for k, v in obj.items())
            return "{" + ", ".join(pairs) + "}"
        if type(obj).__module__ == "numpy" and hasattr(obj, "dtype") and obj.shape == ():
            return f"__import__('numpy').{type(obj).__name__}({obj.item()!r})"
        if type(obj).__name__ == "constexpr":  # tl.constexpr
            return f"__import__('triton').language.constexpr({self._value(name, obj.value)})"
        if type(obj).__module__ == "triton.language.core" and type(obj).__name__ == "dtype":
            return f"__import__('triton').language.dtype({obj.name!r})"
        if _home(name, obj) or isinstance(python_function(obj), (types.FunctionType, type)):
            self.define(inner := f"_{name}_{len(self.names)}", obj)
            return inner
        raise ValueError(f"{name!r} cannot be copied to another process: {obj!r:.80} {type(obj)}")


def _globals(table: symtable.SymbolTable) -> list[str]:
    """Names that a piece of code takes from outside itself, each once."""
    outer = table.get_type() == "module"
    here = [
        s.get_name() for s in table.get_symbols() if s.is_referenced() and (outer or s.is_global())
    ]
    return list(dict.fromkeys([*here, *(n for c in table.get_children() for n in _globals(c))]))


def _torch(obj) -> str:
    return str(obj) if isinstance(obj, torch.dtype) else f"torch.device({str(obj)!r})"


def _same(a, b) -> bool:
    if a is b:
        return True
    if isinstance(a, types.ModuleType) or callable(a):
        return False
    return type(a) is type(b) and bool(a == b)


def _is_cuda_kernel(obj) -> bool:
    return type(obj).__module__ == "labkit.compile" and hasattr(obj, "source")


def _import_module(name: str, module: types.ModuleType) -> str:
    path = module.__name__
    if path.endswith("numba.cuda") or "numba.cuda.simulator" in path:  # one name, two modules
        return "from numba import cuda" + (f" as {name}" if name != "cuda" else "")
    return f"import {path} as {name}" if path != name else f"import {path}"


def _home(name: str, obj) -> tuple[str, str] | None:
    """(module, name) under which another process can import `obj`, or None."""
    if type(obj) in _LITERALS:
        return None
    module = getattr(obj, "__module__", None)
    there = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", name)
    if not isinstance(there, str):
        there = name
    if isinstance(module, str) and _importable(module) and _found(module, there) is obj:
        return module, there
    # Objects without a name of their own (a Problem, a CudaKernel) are found where they are kept.
    for path, loaded in list(sys.modules.items()):
        ours = path.partition(".")[0] in ("solutions", "labkit") or path in _COMMON
        if ours and _importable(path) and vars(loaded).get(name) is obj:
            return path, name
    return None


def _importable(module: str) -> bool:
    """Whether a fresh process can import this module: it has a file, and is not a script."""
    loaded = sys.modules.get(module)
    if module == "builtins":
        return True
    return module != "__main__" and getattr(loaded, "__spec__", None) is not None


def _found(module: str, qualname: str):
    """The object at module.qualname; None for nested functions, which nothing can import."""
    return vars(sys.modules[module]).get(qualname)
