"""CUDA C++ kernels through NVRTC, and compile cards: what the compilers made of a kernel.

`cuda_kernel` compiles a source string on its first launch and launches on torch's current stream.
`compile_card` needs no GPU: it runs a launcher once with every launch recorded instead of executed,
compiles the recorded kernels for several architectures, and reads registers, shared memory and
instructions from the binaries with the tools in Triton's wheel.
"""

from __future__ import annotations

from labkit.device import SIMULATED
from labkit.source import portable

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
ALL_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class CompileError(RuntimeError):
    """A kernel that its compiler rejects. The message carries the compiler's log."""


# ---------------------------------------------------------------------------------- CUDA C++


def cuda_kernel(source: str, name: str, *, options=()) -> CudaKernel:
    """The `__global__` function `name` of a CUDA C++ source, compiled on its first launch.

    `name` may be a template instance, such as "scale<float>". `options` are keywords of
    `cuda.core.ProgramOptions`, as a dict or as pairs: {"use_fast_math": True}.
    """
    return CudaKernel(source, name, dict(options))


@dataclass(frozen=True, eq=False)
class CudaKernel:
    """A CUDA C++ kernel. Launch it with `kernel[grid, block, shared_bytes](*args)`.

    Arguments are CUDA tensors (their data pointers) and numpy or ctypes scalars of the parameter's
    exact type. TypeError for a bare Python number: `np.int32(n)` says how wide it is, `n` does not.
    ValueError for a tensor on another device, RuntimeError where there is no GPU, CompileError
    with NVRTC's log, whose line numbers are those of the source string. Launch once before the
    capture of a CUDA graph: a first launch compiles.
    """

    source: str
    name: str
    options: dict = field(default_factory=dict)

    def __getitem__(self, config: tuple) -> Callable[..., None]:
        """A launcher for (grid, block) or (grid, block, dynamic shared memory in bytes)."""
        return self.configure(*config)

    def launch(self, grid, block, *args, **how) -> None:
        """Launch with attributes: the keywords of `configure`."""
        self.configure(grid, block, **how)(*args)

    def configure(
        self, grid, block, shared=0, *, cooperative=False, cluster=None, programmatic=False
    ) -> Callable[..., None]:
        """A launcher, made once for each configuration.

        `grid` counts blocks and `block` threads; `cluster` counts blocks and must divide the grid.
        `cooperative` allows a grid barrier, `programmatic` lets the kernel start before the one
        ahead of it in the stream has finished (programmatic dependent launch).
        """
        if SIMULATED:
            return self._launch_nowhere
        return _launcher(self, grid, block, shared, cooperative, cluster, programmatic)

    def _launch_nowhere(self, *args) -> None:
        kernel_values(args)
        raise RuntimeError(
            f"{self.name}: raw CUDA needs a GPU, and Python here runs the simulators. "
            "lab.compile_card still compiles it."
        )


@lru_cache(maxsize=4096)
def _launcher(kernel: CudaKernel, grid, block, shared, cooperative, cluster, programmatic):
    from cuda.core import LaunchConfig, launch

    attributes = {"is_cooperative": True} if cooperative else {}
    if programmatic:
        attributes["programmatic_stream_serialization"] = True
    if cluster is not None:  # cuda.core counts the grid in clusters
        grid, cluster = three(grid), three(cluster)
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise ValueError(f"{kernel.name}: {cluster=} does not divide {grid=}")
        attributes["cluster"] = cluster
        grid = tuple(g // c for g, c in zip(grid, cluster, strict=True))
    config = LaunchConfig(grid=grid, block=block, shmem_size=shared, **attributes)
    loaded = {}  # device index -> kernel, which keeps the work per launch small
    checked = set()

    def run(*args) -> None:
        where = torch.cuda.current_stream()
        function = loaded.get(where.device_index)
        if function is None:
            function = loaded[where.device_index] = _load(kernel, where.device_index, shared)
        values = kernel_values(args, where.device_index)
        if (types := tuple(map(type, args))) not in checked:
            _check_sizes(kernel.name, function, args)
            checked.add(types)
        launch(_stream(where.device_index, where.cuda_stream), config, function, *values)

    return run


def kernel_values(args: tuple, device: int | None = None) -> list:
    """What the driver gets: data pointers and scalars of known width."""
    values = []
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            if device is not None and a.get_device() != device:
                raise ValueError(f"argument {i} is on {a.device}; this launch is on cuda:{device}")
            values.append(a.data_ptr())
        elif isinstance(a, (np.generic, ctypes._SimpleCData)):
            values.append(a)
        else:
            raise TypeError(
                f"argument {i} is {a!r}, a {type(a).__name__}; a kernel takes tensors and "
                "scalars of a known width, such as np.int32(n) or np.float32(eps)"
            )
    return values


def _check_sizes(name: str, function, args: tuple) -> None:
    """TypeError when the number of arguments or a scalar's width is not the kernel's."""
    sizes = [info.size for info in function.arguments_info]
    if len(sizes) != len(args):
        raise TypeError(f"{name} takes {len(sizes)} arguments, got {len(args)}")
    for i, (a, size) in enumerate(zip(args, sizes, strict=True)):
        given = 8 if isinstance(a, torch.Tensor) else _width(a)
        if given != size:
            raise TypeError(
                f"{name}: argument {i} is a {type(a).__name__} of {given} bytes; "
                f"the kernel's parameter has {size}"
            )


def _width(scalar) -> int:
    return scalar.nbytes if isinstance(scalar, np.generic) else ctypes.sizeof(scalar)


@cache
def _stream(device: int, handle: int):
    """cuda.core's view of one of torch's streams."""
    from cuda.core import Device

    class TorchStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, handle

    return Device(device).create_stream(TorchStream())


def _load(kernel: CudaKernel, device: int, shared: int):
    """The kernel on one device, allowed to use as much shared memory as the device has."""
    from cuda.bindings import driver
    from cuda.core import Device

    here = Device(device)
    here.set_current()  # torch's own context: both use the primary one
    major, minor = here.compute_capability
    function = compile_cuda(kernel, f"sm_{major}{minor}").get_kernel(kernel.name)
    attribute = driver.CUfunction_attribute
    cu_device = _checked(driver.cuDeviceGet(device))
    static_size = attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    static = _checked(driver.cuKernelGetAttribute(static_size, function.handle, cu_device))
    if static + shared > 48 * 1024:  # more than that is granted only when asked for
        most = here.properties.max_shared_memory_per_block_optin - static
        if shared > most:
            raise ValueError(f"{kernel.name}: {shared=} bytes, {here.name} has {most} for a block")
        dynamic = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuKernelSetAttribute(dynamic, most, function.handle, cu_device))
    return function


def _checked(result: tuple):
    """The value of a driver call. RuntimeError when the call failed."""
    if result[0]:
        raise RuntimeError(f"CUDA driver: {result[0]!r}")
    return result[1] if len(result) > 1 else None


@cache
def compile_cuda(kernel: CudaKernel, arch: str):
    """A cuda.core ObjectCode for "sm_90" and the like. CompileError with NVRTC's log."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as e:
        raise ImportError('CUDA C++ kernels need cuda.core: pip install "cuda-core>=1,<2"') from e
    # Architecture-specific code ("sm_90a") may use everything the chip has, such as wgmma.
    full = arch + "a" * (int(arch[3:]) >= 90)
    settings = {"std": "c++17", "include_path": _headers(kernel), **kernel.options}
    program_options = ProgramOptions(name=f"{kernel.name}.cu", arch=full, **settings)
    program = Program(kernel.source, code_type="c++", options=program_options)
    try:
        return program.compile("cubin", name_expressions=(kernel.name,))
    except Exception as e:  # cuda.core's error class is private
        log = str(e).replace("\0", "").strip()
        raise CompileError(f"{kernel.name} does not compile for {full}:\n{log}") from None


def _headers(kernel: CudaKernel) -> list[str]:
    """Folders of the CUDA headers: the pip packages' first, then an installed toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    folders = [d for root in roots for d in sorted(root.glob("*/include"), reverse=True)]
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders += [Path(home, "include") for home in homes if home]
    found = [str(d) for d in folders if (d / "cuda_bf16.h").exists() and (d / "crt").exists()]
    if not found and "#include" in kernel.source:
        raise RuntimeError(
            f"{kernel.name}: no CUDA headers (cuda_bf16.h and crt/) in {[str(d) for d in folders]}"
            '; pip install "nvidia-cuda-runtime>=13,<14" "nvidia-cuda-crt>=13,<14"'
        )
    return found[:1]


def three(n) -> tuple[int, int, int]:
    """A grid or block size, given as a number or a tuple, with all its dimensions."""
    n = (n,) if isinstance(n, int) else tuple(n)
    return (*n, 1, 1)[:3]


# --------------------------------------------------------------------------------- occupancy


@dataclass(frozen=True)
class Limits:
    """What one SM can hold at once. Shared memory in bytes."""

    warps: int
    blocks: int
    shared: int
    shared_per_block: int
    registers: int = 65536


# "Technical Specifications per Compute Capability", CUDA C++ Programming Guide 13.
LIMITS = {
    "sm_80": Limits(64, 32, 164 * 1024, 163 * 1024),
    "sm_86": Limits(48, 16, 100 * 1024, 99 * 1024),
    "sm_89": Limits(48, 24, 100 * 1024, 99 * 1024),
    "sm_90": Limits(64, 32, 228 * 1024, 227 * 1024),
    "sm_100": Limits(64, 32, 228 * 1024, 227 * 1024),
    "sm_120": Limits(48, 24, 100 * 1024, 99 * 1024),
}
PARTITIONS = 4  # of an SM; each holds a quarter of its registers and warps
REGISTER_UNIT = 256  # a warp's registers are allocated in multiples of this
SHARED_UNIT = 128  # bytes
SHARED_RESERVED = 1024  # bytes the system takes of each block, from compute capability 8.0 on


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel one SM holds, and what stops it from holding more."""

    blocks: int
    warps: int
    fraction: float  # of the warps an SM can hold
    limiter: str  # "warps", "blocks", "registers" or "shared memory"


def occupancy(arch: str, threads: int, registers: int, shared: int) -> Occupancy:
    """Occupancy of blocks of `threads` threads, with `shared` bytes (static and dynamic) each.

    `registers` is per thread. Zero blocks means that the kernel cannot launch.
    """
    sm = LIMITS[arch]
    warps = -(-threads // 32)
    warp_registers = _round_up(max(registers, 1) * 32, REGISTER_UNIT)
    register_warps = sm.registers // PARTITIONS // warp_registers * PARTITIONS
    bounds = {
        "warps": sm.warps // warps if threads <= 1024 else 0,
        "blocks": sm.blocks,
        "registers": register_warps // warps,
        "shared memory": sm.shared // _round_up(shared + SHARED_RESERVED, SHARED_UNIT),
    }
    if shared > sm.shared_per_block:
        bounds["shared memory"] = 0
    if warp_registers * _round_up(warps, PARTITIONS) > sm.registers:  # warps spread evenly
        bounds["registers"] = 0
    limiter = min(bounds, key=bounds.get)  # the first of equals
    blocks = bounds[limiter]
    return Occupancy(blocks, blocks * warps, blocks * warps / sm.warps, limiter)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


# ------------------------------------------------------------------------------ compile cards


@dataclass(frozen=True)
class ArchCard:
    """One kernel compiled for one architecture. Sizes in bytes, registers per thread.

    `stack_bytes` is a thread's local memory: spilled registers and local arrays.
    `instructions` counts SASS instructions in the code (not executed ones) by name and width in
    bits: {"LDG.128": 2, "STG.128": 1, "HMMA": 16}. `error` is the compiler's message, or "".
    """

    registers: int = 0
    stack_bytes: int = 0
    static_shared: int = 0
    dynamic_shared: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    occupancy: Occupancy | None = None
    error: str = ""

    def widths(self, *names: str) -> dict[int, int]:
        """Counts of some instructions by width in bits, widest first: `card.widths("LDG")`."""
        split = ((k.partition("."), n) for k, n in self.instructions.items())
        total = Counter()
        for (name, _, bits), n in split:
            if name in names and bits:
                total[int(bits)] += n
        return dict(sorted(total.items(), reverse=True))


@dataclass(frozen=True, repr=False)
class KernelCard:
    """One launched kernel on several architectures. `threads` is per block."""

    name: str
    kind: str  # "numba", "triton" or "cuda"
    grid: tuple[int, ...]
    threads: int
    archs: dict[str, ArchCard]
    note: str = ""  # Triton's num_warps and num_stages

    def __repr__(self) -> str:
        """A table, architectures side by side."""
        good = [c for c in self.archs.values() if not c.error]
        rows = [("", list(self.archs))]
        rows += [(label, [cell(c) for c in self.archs.values()]) for label, cell in _ROWS]
        for label, names in _ACCESSES:
            if any(c.widths(*names) for c in good):
                rows.append((label, [_by_width(c.widths(*names)) for c in self.archs.values()]))
        for name in sorted({n for c in good for n in c.instructions if "." not in n}):
            rows.append((name, [str(c.instructions.get(name, 0)) for c in self.archs.values()]))
        for _, cells in rows[1:]:
            for i, card in enumerate(self.archs.values()):
                if card.error:
                    cells[i] = "-"
        width = [max(len(r[1][i]) for r in rows) for i in range(len(self.archs))]
        title = f"{self.name} ({self.kind}): grid {self.grid}, {self.threads} threads{self.note}"
        lines = [
            f"{label:<24}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, width, strict=True))
            for label, cells in rows
        ]
        errors = [f"{a}: {c.error.splitlines()[0]}" for a, c in self.archs.items() if c.error]
        return "\n".join([title, *lines, *errors])


@dataclass(frozen=True, repr=False)
class CompileCard:
    """What the compilers made of the kernels that one launcher starts, in launch order."""

    name: str
    kernels: tuple[KernelCard, ...]

    def __repr__(self) -> str:
        """One table for each kernel."""
        return "\n\n".join(map(str, self.kernels))


_ROWS = (
    ("registers", lambda c: str(c.registers)),
    ("stack (spills), bytes", lambda c: str(c.stack_bytes)),
    ("shared memory, bytes", lambda c: str(c.static_shared + c.dynamic_shared)),
    ("blocks per SM", lambda c: str(c.occupancy and c.occupancy.blocks)),
    ("occupancy", lambda c: f"{c.occupancy.fraction:.0%}" if c.occupancy else ""),
    ("limited by", lambda c: c.occupancy.limiter if c.occupancy else ""),
)
_ACCESSES = (  # generic LD and ST are what is left when the compiler cannot tell the space
    ("global loads, bits", ("LDG", "LD")),
    ("global stores, bits", ("STG", "ST")),
    ("async copies, bits", ("LDGSTS",)),
    ("shared loads, bits", ("LDS",)),
    ("shared stores, bits", ("STS",)),
    ("local loads, bits", ("LDL",)),
    ("local stores, bits", ("STL",)),
)
# Matrix fragments, bulk copies, tensor cores, exp and friends, atomics, shuffles, barriers.
COUNTED = re.compile(
    "LDSM|STSM|UBLKCP|UTMALDG|UTMASTG|[HIQOD]MMA|[HIQ]GMMA|UTC[A-Z]*MMA|MUFU|ATOM[GS]?|REDG?|SHFL|BAR"
)
MODERATE = 1 << 28  # bytes
MEMORY = {name for _, names in _ACCESSES for name in names}


def _by_width(widths: dict[int, int]) -> str:
    return " + ".join(f"{n}×{bits}" for bits, n in widths.items()) or "0"


def compile_card(fn, problem=None, *, dtype=None, archs=ARCHS, **size) -> CompileCard:
    """Compile every kernel that `fn(*problem.inputs(dtype, **size))` launches, without a GPU.

    `fn` is a launcher or a Rung (whose own problem is the default). `dtype` defaults to bfloat16,
    or the problem's first dtype where it has no bfloat16; `size` to the largest benchmarked size
    that moves at most 256 MiB.

    An architecture that a kernel does not compile for shows its compiler's message.
    CompileError when a kernel compiles for none, ValueError when `fn` launches nothing.
    """
    name, kernels = _compile(fn, problem, dtype, archs, size, read=True)
    for kernel in kernels:
        if all(c.error for c in kernel.archs.values()):
            raise CompileError(_errors(kernel))
    return CompileCard(name, kernels)


def compiles(fn, problem=None, archs=ALL_ARCHS, *, dtype=None, **size) -> list[str]:
    """Architectures that all kernels of `fn` compile for. CompileError when there is none."""
    _, kernels = _compile(fn, problem, dtype, archs, size, read=False)
    good = [a for a in archs if not any(k.archs[a].error for k in kernels)]
    if not good:
        raise CompileError("\n".join(map(_errors, kernels)))
    return good


def _errors(kernel: KernelCard) -> str:
    return "\n".join(c.error for c in kernel.archs.values() if c.error)


def _compile(fn, problem, dtype, archs, size: dict, read: bool) -> tuple[str, tuple]:
    """The launcher's name and a KernelCard per kernel, without resource usage unless `read`."""
    if unknown := set(archs) - set(LIMITS):
        raise ValueError(f"{archs=}: {sorted(unknown)} not among {list(LIMITS)}")
    problem = problem or getattr(fn, "problem", None)
    if problem is None:
        raise TypeError(f"{fn!r} has no problem of its own: pass one")
    if dtype is None:
        known = getattr(fn, "dtypes", None) or problem.dtypes
        dtype = torch.bfloat16 if torch.bfloat16 in known else known[0]
    inputs = _describe(problem.inputs(dtype, **(size or _moderate(problem, dtype))))
    text, name = portable(fn)
    request = {"text": text, "name": name, "inputs": inputs, "path": _path(), "read": read}
    kernels = _in_a_worker(json.dumps(request | {"archs": list(archs)}), _sources(text))
    if not kernels:
        raise ValueError(f"{name} launched no kernel")
    return name, kernels


def _moderate(problem, dtype) -> dict:
    """The largest benchmarked size whose inputs are quickly drawn."""
    sizes = (problem.bench_size, *problem.sweep, problem.test_sizes[-1])
    cost = {i: problem.work(dtype, **s).bytes for i, s in enumerate(sizes)}
    fitting = [i for i in cost if cost[i] <= MODERATE] or [len(sizes) - 1]
    return dict(sizes[max(fitting, key=cost.get)])


def _describe(value):
    """JSON for one input: tensors by layout; small ones, which may index, by value too."""
    if isinstance(value, torch.Tensor):
        by_value = value.numel() <= (16 if value.is_floating_point() else 1 << 16)
        shown = value.tolist() if by_value else None
        offset = value.storage_offset() * value.element_size() % 16 // value.element_size()
        return {
            "tensor": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "offset": offset,  # what is left of the alignment
            "values": shown,
        }
    if isinstance(value, (list, tuple)):
        return [_describe(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(f"an input of type {type(value).__name__} cannot travel: {value!r:.80}")


def rebuild(d):
    """The input that `_describe` wrote down, on the CPU."""
    if isinstance(d, list):
        return tuple(rebuild(v) for v in d)
    if "value" in d:
        return d["value"]
    if "dtype" in d:
        return getattr(torch, d["dtype"])
    dtype, shape, stride = getattr(torch, d["tensor"]), d["shape"], d["stride"]
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else -1
    flat = torch.empty(d["offset"] + last + 1, dtype=dtype)
    tensor = flat.as_strided(shape, stride, d["offset"])
    if d["values"] is not None:
        return tensor.copy_(torch.tensor(d["values"]))
    return tensor if dtype.is_floating_point else tensor.zero_()  # untouched memory costs nothing


def _sources(text: str) -> tuple:
    """Versions of the files a module text imports, so that an edited kernel compiles again."""
    modules = re.findall(r"^(?:from|import) ([\w.]+)", text, re.MULTILINE)
    files = [getattr(sys.modules.get(m), "__file__", None) for m in modules]
    return tuple((f, os.stat(f).st_mtime_ns) for f in files if f and os.path.exists(f))


# The real numba and triton come first. Then labkit may ask for the simulators: it gets CPU tensors,
# and the decorators that run later, which read the switches, find them off.
_BOOT = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
import numba.cuda, triton
switches = {"NUMBA_ENABLE_CUDASIM": "1", "TRITON_INTERPRET": "1"}
os.environ.update(switches)
import labkit
for switch in switches:
    del os.environ[switch]
from labkit.compile_worker import serve
serve()
"""


@cache
def _server() -> subprocess.Popen:
    """The process that compiles, without simulators and without a GPU. It ends with this one."""
    switches = ("NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET")
    env = {k: v for k, v in os.environ.items() if k not in switches}
    env |= {"LABKIT_DEVICE": "sim", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _BOOT, json.dumps(_path())]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _path() -> list[str]:
    return [str(p) or os.getcwd() for p in sys.path]


@lru_cache(maxsize=256)
def _in_a_worker(request: str, sources: tuple) -> tuple[KernelCard, ...]:
    """What the server answers; `sources` tells edited files apart."""
    server = _server()
    with _ONE_AT_A_TIME, tempfile.TemporaryDirectory() as folder:
        Path(folder, "request.json").write_text(request)
        try:
            print(folder, file=server.stdin, flush=True)
            answered = server.stdout.readline()
        except BrokenPipeError:
            answered = ""
        if not answered:
            _server.cache_clear()
            raise RuntimeError(f"the compile server did not start:\n{server.stderr.read()}")
        reply = Path(folder, "reply.pickle")
        if not reply.exists():
            raise RuntimeError(f"compiling ended early:\n{Path(folder, 'log').read_text()}")
        kernels = pickle.loads(reply.read_bytes())
    if isinstance(kernels, str):
        raise RuntimeError(f"the launcher failed while its launches were recorded:\n{kernels}")
    return kernels


_ONE_AT_A_TIME = threading.Lock()
