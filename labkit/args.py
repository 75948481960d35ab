"""Argument checks that launchers share: one line, one clear message, about a microsecond.

A launcher says itself what its kernel needs of shapes and sizes. What every kernel of the lab
needs (tensors of the lab's device, one dtype, memory without gaps) is said here.
"""

from __future__ import annotations

from labkit.device import DEVICE

from numbers import Integral

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensors(
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    like: torch.Tensor | None = None,
    **tensors: torch.Tensor,
) -> None:
    """Refuse tensors that no kernel could take together, naming the argument.

    `lab.check_tensors(x=x, w=w)`: all are tensors of one dtype, one of `dtypes`, on the lab's
    device. Tensors of another dtype (indices, say) take a call of their own; with `like`, a tensor
    of the first call, they must be on its device.

    TypeError for what is not a tensor or has the wrong dtype, ValueError for the wrong device.
    """
    first = None
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, is {type(t).__name__}")
        if first is None:
            first, dtype, device = name, t.dtype, t.device
            if dtype not in dtypes:
                raise TypeError(f"{name} is {dtype}, must be {_either(dtypes)}")
            if device.type != DEVICE.torch:
                raise ValueError(f"{name} is on {device}, must be on {DEVICE.torch}: {_why()}")
            if like is not None and device != like.device:
                raise ValueError(f"{name} is on {device}, the other tensors are on {like.device}")
            continue
        if t.dtype != dtype:
            raise TypeError(f"{name} is {t.dtype}, must be {dtype} like {first}")
        if t.device != device:
            raise ValueError(f"{name} is on {t.device}, must be on {device} like {first}")


def check_contiguous(**tensors: torch.Tensor) -> None:
    """ValueError, naming the argument, for a tensor that is not contiguous.

    For kernels that read memory from front to back: `lab.check_contiguous(x1=x1, x2=x2)`.
    """
    for name, t in tensors.items():
        if not t.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(t.shape)} and strides {t.stride()}, must be contiguous: "
                f"pass {name}.contiguous()"
            )


def check_apart(*, in_place: bool = False, **tensors: torch.Tensor) -> None:
    """ValueError where the first tensor, which a kernel writes, shares memory with another.

    `lab.check_apart(out=out, x=x)`: the kernel would read what it has just written. `in_place`:
    it reads a number before it writes it, so exactly the same memory is fine, for contiguous
    tensors. Between its first byte and its last, all memory counts as a tensor's own.
    """
    (first, out), *others = tensors.items()
    begin, end = _extent(out)
    for name, t in others:
        same = in_place and t.data_ptr() == out.data_ptr() and t.shape == out.shape
        first_byte, past = _extent(t)
        if max(begin, first_byte) < min(end, past) and not same:
            raise ValueError(f"{first} shares memory with {name}: it needs its own")


def check_count(**numbers: int) -> None:
    """TypeError, naming the argument, for what is not an int: a tensor would wait for the GPU."""
    for name, n in numbers.items():
        if not isinstance(n, Integral) or isinstance(n, bool):
            raise TypeError(f"{name} is a {type(n).__name__}, must be an int")


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of that after its last; the same if it has none."""
    begin = t.data_ptr()
    if t.is_contiguous():  # so is one without numbers
        return begin, begin + t.nbytes
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return begin, begin + (last + 1) * t.element_size()


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


def _why() -> str:
    if DEVICE.torch == "cpu":
        return "kernels run under the simulators in this process"
    return f"kernels run on {DEVICE.name}"
