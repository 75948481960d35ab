"""Argument checks that launchers share: one line, one clear message, about a microsecond.

A launcher says itself what its kernel needs of shapes and sizes. What every kernel of the lab
needs (tensors of the lab's device, one dtype, memory without gaps) is said here.
"""

from __future__ import annotations

from labkit.device import DEVICE

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensors(*, dtypes: tuple[torch.dtype, ...] = FLOATS, **tensors: torch.Tensor) -> None:
    """Refuse tensors that no kernel could take together, naming the argument.

    `lab.check_tensors(x=x, w=w)`: all are tensors of one dtype, one of `dtypes`, on the lab's
    device. Tensors of another dtype (indices, say) take a call of their own.

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


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


def _why() -> str:
    if DEVICE.torch == "cpu":
        return "kernels run under the simulators in this process"
    return f"kernels run on {DEVICE.name}"
