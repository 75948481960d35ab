"""Where kernels run: a CUDA GPU, or the simulators of Numba and Triton on the CPU.

The choice is made once, when `labkit` is imported, because Numba and Triton read their simulator
switches at import. That is why every file of the lab imports `labkit` first.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import torch

if (_WISH := os.environ.get("LABKIT_DEVICE") or "auto") not in ("auto", "sim"):
    raise ValueError(f"LABKIT_DEVICE={_WISH!r} is not auto or sim")
SIMULATED = _WISH == "sim" or not torch.cuda.is_available()
"""True when kernels run under the simulators. `LABKIT_DEVICE=sim` forces it on a GPU machine."""

LAUNCHED: set[str] = set()
"""Languages of the kernels that the simulators have started since it was last cleared."""

TURN_S = 1e-4  # of a thread under Numba's simulator
_SWITCHES = {"numba": "NUMBA_ENABLE_CUDASIM", "triton": "TRITON_INTERPRET"}


def _start_simulators() -> None:
    """Turn the simulators on. ImportError when numba or triton was imported without them."""
    for package, switch in _SWITCHES.items():
        if os.environ.get(switch) == "1":
            continue
        if package in sys.modules:
            raise ImportError(
                f"{package} was imported before labkit, so its simulator cannot start any more. "
                f"Restart Python and put `import labkit as lab` above `import {package}` "
                f"(or set {switch}=1 before Python starts)."
            )
        os.environ[switch] = "1"


def _numba_simulator() -> None:
    """Make it quicker, right about shared arrays, and index tensors; note its launches.

    It hands tensors to the kernel as they are, and torch refuses `y[i] = numpy.float32(…)`, which a
    GPU takes. The hooks are private: where they are missing, it works as it does by itself.
    """
    try:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
        from numba.cuda.simulator.kernel import FakeCUDAKernel, _get_kernel_context
        from numba.cuda.simulator.kernelapi import FakeCUDAShared, swapped_cuda_module

        launch, new_array = FakeCUDAKernel.__call__, FakeCUDAShared.array
    except (ImportError, AttributeError):
        return

    def array(value):
        is_plain = isinstance(value, torch.Tensor) and value.dim() and value.dtype != torch.bfloat16
        return FakeCUDAArray(value.detach().numpy()) if is_plain else value

    def call_device_function(kernel, *args):
        # `cuda` in its module must mean the simulator's. That takes a search of the module, so it
        # stays so until the launch ends, and not only for this call.
        module = id(kernel.fn.__globals__)
        if module not in entered:
            with one_at_a_time:
                if module not in entered:
                    launched.enter_context(swapped_cuda_module(kernel.fn, _get_kernel_context()))
                    entered.add(module)
        return kernel.fn(*args)

    def call(kernel, *args):
        if getattr(kernel, "_device", False):
            return call_device_function(kernel, *args)
        LAUNCHED.add("numba")
        # The simulator's own thread asks the threads of a block all the time whether they wait.
        # Python would let it go on for 5 ms before a thread of the block gets its turn.
        before = sys.getswitchinterval()
        sys.setswitchinterval(TURN_S)
        try:
            with launched:
                return launch(kernel, *map(array, args))
        finally:
            entered.clear()
            sys.setswitchinterval(before)

    def shared_array(memory, *args, **how):
        # The simulator looks whether there is an array of this line, and makes one if not. Two
        # threads that look at the same time would get one each.
        frame = sys._getframe(1)
        line = frame.f_code.co_filename, frame.f_lineno
        with one_at_a_time:
            arrays = vars(memory).setdefault("arrays", {})
            if line not in arrays:
                memory._allocations.clear()  # to it, all calls come from the next line
                arrays[line] = new_array(memory, *args, **how)
            return arrays[line]

    one_at_a_time, entered, launched = threading.Lock(), set(), ExitStack()
    FakeCUDAKernel.__call__, FakeCUDAShared.array = call, shared_array


def _triton_simulator() -> None:
    """Make it take masks like `tile & (number >= 0)`; note its launches.

    A comparison of single numbers comes out as an integer there, and so does the mask, which its
    loads and stores refuse; a GPU takes it. The hook is private: see `_numba_simulator`.
    """
    try:
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

        launch = GridExecutor.__call__
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    except (ImportError, AttributeError):
        return

    def as_bools(mask):
        if mask is not None:
            mask.data = mask.data.astype(bool)
        return mask

    def call(executor, *args, **how):
        LAUNCHED.add("triton")
        return launch(executor, *args, **how)

    GridExecutor.__call__ = call
    InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *rest: load(
        self, ptrs, as_bools(mask), *rest
    )
    InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(
        self, ptrs, value, as_bools(mask), *rest
    )


if SIMULATED:
    _start_simulators()
    _numba_simulator()
    _triton_simulator()
# Small grids warn on a GPU and not on the simulator; outputs must be the same in both places.
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")


@dataclass(frozen=True)
class Device:
    """The device that kernels run on in this process. Sizes in bytes."""

    name: str
    torch: str  # "cuda" or "cpu": what torch calls it
    sm: str = ""  # compute capability, for instance "9.0"
    sms: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    shared_bytes: int = 0  # of shared memory, at most, for one block

    @property
    def slug(self) -> str:
        """Folder of its results: "NVIDIA GeForce RTX 4090" gives "rtx4090"."""
        words = self.name.lower().replace("nvidia", "").replace("geforce", "").split()
        return "".join("".join(words).replace("/", "-").split()) or "unknown"


def _find_device() -> Device:
    if SIMULATED:
        return Device("simulators", "cpu")
    p = torch.cuda.get_device_properties(0)
    return Device(
        p.name,
        "cuda",
        f"{p.major}.{p.minor}",
        p.multi_processor_count,
        p.L2_cache_size,
        p.total_memory,
        p.shared_memory_per_block_optin,
    )


DEVICE = _find_device()


@cache
def _external_stream(handle: int):
    from numba import cuda

    return cuda.external_stream(handle)


def stream():
    """Torch's current stream, as Numba wants it in `kernel[grid, block, lab.stream()]`."""
    if SIMULATED:
        return 0
    return _external_stream(torch.cuda.current_stream().cuda_stream)
