"""One operation, said independently of how it is computed."""

from __future__ import annotations

from labkit.device import DEVICE

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

# Draws up to this many numbers come from the CPU, so that a GPU and a laptop see the same ones.
CPU_DRAW = 1 << 22


@dataclass(frozen=True)
class Work:
    """What any version must do at least: each input read once, each output written once.

    `bytes` and `flops` are counts, not rates.
    """

    bytes: int
    flops: int


@dataclass(frozen=True)
class Bar:
    """One line of a target: a number read from the results, and its limit.

    `value` takes the chapter's `Results` and returns the number; exactly one of `at_least` and
    `at_most` is given. `text` says it in words.
    """

    text: str
    value: Callable[[object], float]
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        """Refuse a bar with no limit, or with two."""
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"bar {self.text!r}: give at_least or at_most, not both or neither")

    def met(self, value: float) -> bool:
        """Whether `value` reaches the bar. NaN never does."""
        return value >= self.at_least if self.at_most is None else value <= self.at_most


@dataclass(frozen=True)
class Property:
    """Something true of every right kernel that no single reference value shows.

    `holds` takes the kernel and returns None, or a sentence that says what went wrong.
    `bug` is the class the checker names then.
    """

    text: str
    bug: str
    holds: Callable[[Callable], str | None]
    dtypes: tuple[torch.dtype, ...] | None = None  # needed ones; None: any


@dataclass(frozen=True)
class Problem:
    """An operation: its inputs, its truth, the bar, its cost, and where to look for bugs.

    Every rung takes exactly what `inputs` returns: `fn(*inputs(dtype, **size))`.
    """

    name: str
    inputs: Callable[..., tuple]  # (dtype, seed=0, **size) -> tensors and Python scalars
    reference: Callable  # the formula; run in float64 it is the truth
    library: Callable  # what a user would call instead; its error sets the tolerance
    work: Callable[..., Work]  # (dtype, **size)
    terms: Callable[..., int]  # (**size) -> terms summed into one output
    dtypes: tuple[torch.dtype, ...]
    test_sizes: tuple[Mapping[str, int], ...]  # small enough for the simulators
    bench_size: Mapping[str, int]
    sweep: tuple[Mapping[str, int], ...]
    target: tuple[Bar, ...]  # written down before the first measurement
    peers: Mapping[str, Callable] = field(default_factory=dict)
    suspects: Mapping[str, Callable] = field(default_factory=dict)
    """Bug class -> the formula that a kernel with this bug computes. It may raise ValueError where
    the bug has no meaning; an index out of bounds would stop a GPU for good.
    """
    properties: tuple[Property, ...] = ()
    empty_size: Mapping[str, int] | None = None
    huge_size: Mapping[str, int] | None = None
    """A size past 2³¹ elements, where 32-bit offsets wrap; tested on GPUs with the memory."""
    sweep_dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes that the sweep is recorded in; the first of `dtypes` if empty."""
    mutates: tuple[str, ...] = ()
    """Parameters of `library` that it writes to and returns among its outputs: caches."""
    ceiling: str = "copy"
    """The rate that bounds it: "copy", or "read" for an operation that writes next to nothing."""
    timing: str = "events"
    """"events" times one call at a time. "graph" times a CUDA graph of many, whose inputs rotate
    through more memory than L2 holds: for calls so short that the launch would hide the kernel."""
    measure: Callable[..., list] | None = None
    """Times versions in place of `labkit.bench.measure`, with its parameters: for a whole model,
    whose tokens come one after another."""
    facts: Mapping[str, Callable[[Callable], object]] = field(default_factory=dict)
    """What a recording keeps beside the times, under "model". Takes the function that logs."""

    def __post_init__(self) -> None:
        """Refuse unknown words."""
        for name, known in (("ceiling", ("copy", "read")), ("timing", ("events", "graph"))):
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ValueError(f"problem {self.name}: {name}={given!r} is not one of {known}")

    def truth(self, *args) -> tuple[torch.Tensor, ...]:
        """The reference in float64, whatever dtype the inputs have."""
        return outputs(self.reference(*(a.double() if is_float(a) else a for a in args)))


def is_float(value) -> bool:
    """Whether a value is a tensor of a floating type."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def cloned(inputs: tuple) -> list:
    """Inputs whose tensors are copies."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]


def outputs(result) -> tuple:
    """A kernel's result as a tuple, whether it returned one tensor or several."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def randn(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Standard normal tensors of these shapes, on the lab's device. Same seed, same numbers.

    Up to 4 Mi numbers are drawn on the CPU, the same on every machine; more than that on the
    device itself, where drawing is fast.
    """
    count = sum(torch.Size(s).numel() for s in shapes)
    where = "cpu" if count <= CPU_DRAW else DEVICE.torch
    generator = torch.Generator(where).manual_seed(seed)
    return [
        torch.randn(s, generator=generator, device=where).to(DEVICE.torch, dtype) for s in shapes
    ]
