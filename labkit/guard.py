"""Run a kernel on guarded memory: poisoned outputs, canary bands round every buffer.

Triton's undefined lanes are poisoned too, where the interpreter runs the kernel.
"""

from __future__ import annotations

from labkit.problem import outputs
from labkit.tracing import undefined_lanes

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BAND = 4096  # canary elements on each side of a buffer: more than any tile's overhang
LARGE = 2**24  # elements: what is larger gets no bands in a property, which keeps them all
MAKES = ("empty", "zeros", "ones", "full", "new_", "clone", "cat")  # torch's ops for a new tensor

# One bit pattern per item size. Read as a float (fp16 and bf16 alike) each is a quiet NaN that no
# arithmetic produces; read as an integer it is large and odd. Inputs and allocations differ,
# since a NaN read out of bounds keeps its bits on the way to an output.
_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INPUT = {1: 0x7D, 2: 0x7FD5, 4: 0x7FD5A5A5, 8: 0x7FFD5A5A5A5A5A5A}
_ALLOCATED = {1: 0x7F, 2: 0x7FE5, 4: 0x7FE5A5A5, 8: 0x7FFDA5A5A5A5A5A5}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers of the same width; NaNs compare equal there."""
    return x.view(_INT[x.element_size()])


def unwritten(x: torch.Tensor) -> torch.Tensor:
    """Where `x` still holds the pattern that guarded memory was allocated with."""
    return bits(x) == _ALLOCATED[x.element_size()]


@dataclass(frozen=True)
class Damage:
    """A band that was written: whose, on which side, how far from the buffer, how many items."""

    buffer: str
    side: str  # "before" or "after"
    distance: int
    count: int


@dataclass(frozen=True)
class Run:
    """What one guarded call returned, or the exception it raised, and what it damaged."""

    outputs: tuple = ()
    error: Exception | None = None
    damage: tuple[Damage, ...] = ()
    changed: tuple[int, ...] = ()  # positions of inputs that were modified


def _canary(dtype: torch.dtype, pattern: dict[int, int]) -> int:
    """What a band holds. An index read from one is followed, so those of inputs point nearby."""
    index = pattern is _INPUT and dtype in (torch.int32, torch.int64)
    return -1 if index else pattern[dtype.itemsize]


def _banded(like: torch.Tensor, pattern: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with the shape and strides of `like`, and the buffer round it, full of `pattern`."""
    extent = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    extent = extent if like.numel() else 0
    whole = torch.empty(extent + 2 * BAND, dtype=like.dtype, device=like.device)
    bits(whole).fill_(_canary(like.dtype, pattern))
    return whole.as_strided(like.shape, like.stride(), BAND), whole


def _damage(name: str, whole: torch.Tensor, pattern: dict[int, int]) -> list[Damage]:
    """Items of the two bands that no longer hold the pattern."""
    found = []
    raw = bits(whole)  # before flip, which makes every byte of a bool tensor 0 or 1
    for side, band in (("before", raw[:BAND].flip(0)), ("after", raw[-BAND:])):
        wrong = (band != _canary(whole.dtype, pattern)).nonzero()
        if wrong.numel():
            found.append(Damage(name, side, int(wrong[0]), wrong.numel()))
    return found


class _Bands(TorchDispatchMode):
    """While active, every tensor that Python code allocates gets bands and, if empty, poison."""

    def __init__(self, largest: float = math.inf) -> None:
        super().__init__()
        self.largest = largest  # elements
        self.buffers: list[tuple[torch.Size, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not (name.startswith(MAKES) and isinstance(out, torch.Tensor)):
            return out
        if out.layout != torch.strided or out.is_meta or out.numel() > self.largest:
            return out
        if out.element_size() not in _ALLOCATED:  # complex128
            return out
        inner, whole = _banded(out, _ALLOCATED)
        if "empty" not in name:
            inner.copy_(out)
        self.buffers.append((inner.shape, whole))
        return inner

    def damage(self) -> list[Damage]:
        """What was written round the buffers."""
        found = []
        for shape, whole in self.buffers:
            name = "the output" if len(self.buffers) == 1 else f"a tensor of shape {list(shape)}"
            found += _damage(name, whole, _ALLOCATED)
        return found


@contextmanager
def guarded_allocations() -> Iterator[list[Damage]]:
    """What MAKES allocate inside gets bands, for the caller too. At the end, the damage."""
    mode, found = _Bands(LARGE), []
    with undefined_lanes(), mode:
        yield found
    found += mode.damage()


def guarded(fn: Callable, inputs: tuple) -> Run:
    """Call `fn` on banded copies of `inputs` (strides kept) and look at every band after."""
    args, before = [], []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            inner, whole = _banded(value, _INPUT)
            inner.copy_(value)
            before.append((len(args), whole, whole.clone()))
            value = inner
        args.append(value)
    mode = _Bands()
    try:
        with undefined_lanes(), mode:
            result = outputs(fn(*args))
        if any(a.is_cuda for a in args if isinstance(a, torch.Tensor)):
            torch.cuda.synchronize()  # a fault inside the kernel surfaces here
    except SystemExit as stop:
        return Run(error=RuntimeError(f"it called sys.exit({stop.code})"))
    except Exception as error:
        return Run(error=error)
    damage, changed = [], []
    for position, whole, saved in before:
        damage += _damage(f"input {position}", whole, _INPUT)
        if not torch.equal(bits(whole[BAND:-BAND]), bits(saved[BAND:-BAND])):
            changed.append(position)
    damage += mode.damage()
    return Run(result, None, tuple(damage), tuple(changed))
