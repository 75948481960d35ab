"""Inside the process that `compile.py` starts: record a launcher's launches, compile each.

Here Numba and Triton are the real ones, while labkit believes in its simulators, so that launchers
take CPU tensors. Nothing is executed on a device.
"""

from __future__ import annotations

from labkit.compile import (
    COUNTED,
    MEMORY,
    SHARED_RESERVED,
    ArchCard,
    CompileError,
    CudaKernel,
    KernelCard,
    compile_cuda,
    kernel_values,
    occupancy,
    rebuild,
    three,
)

import importlib.metadata
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import triton


@dataclass(frozen=True)
class _Launch:
    """A launch that was recorded: how to compile it, and what it asked for."""

    name: str
    kind: str
    grid: tuple[int, ...]
    threads: int
    shared: int
    compile: Callable[[str], tuple[bytes, str, dict]]  # arch -> cubin, symbol, corrections
    key: tuple  # launches with equal keys compile to the same code
    note: str = ""


def serve() -> None:
    """Answer requests, one folder a line on stdin, until it ends.

    Each gets a child process of its own, which starts with everything imported and leaves nothing
    behind. Its output goes to FOLDER/log.
    """
    for line in sys.stdin:
        folder = line.rstrip("\n")
        child = os.fork()
        if child == 0:
            log = os.open(Path(folder, "log"), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _work(folder)
            os._exit(0)
        os.waitpid(child, 0)
        print("done", flush=True)


def _work(folder: str) -> None:
    """Answer FOLDER/request.json with reply.pickle: KernelCards, or a traceback as a string."""
    try:
        request = json.loads(Path(folder, "request.json").read_text())
        Path(folder, "portable_kernel.py").write_text(request["text"])  # compilers read files
        sys.path[:] = [folder, *request["path"]]
        import portable_kernel

        launches: list[_Launch] = []
        _record_triton(launches)
        _record_numba(launches)
        _record_cuda(launches)
        getattr(portable_kernel, request["name"])(*rebuild(request["inputs"]))
        reply = _cards(launches, request["archs"], request["read"])
    except Exception:
        reply = traceback.format_exc()
    Path(folder, "reply.pickle").write_bytes(pickle.dumps(reply))


def _cards(launches: list[_Launch], archs: list[str], read: bool) -> tuple[KernelCard, ...]:
    distinct = list({launch.key: launch for launch in reversed(launches)}.values())[::-1]
    cards = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # disassembles while the next one compiles
        for launch in distinct:
            pending = {arch: _card(launch, arch, pool if read else None) for arch in archs}
            done = {arch: card() for arch, card in pending.items()}
            cards.append(
                KernelCard(launch.name, launch.kind, launch.grid, launch.threads, done, launch.note)
            )
    return tuple(cards)


def _card(launch: _Launch, arch: str, pool: ThreadPoolExecutor | None) -> Callable[[], ArchCard]:
    try:
        cubin, symbol, corrections = launch.compile(arch)
    except Exception as e:
        message = str(e) if isinstance(e, CompileError) else f"{type(e).__name__}: {e}"
        return lambda: ArchCard(error=f"{launch.name} for {arch}: {message}")
    if pool is None:
        return ArchCard
    disassembly = pool.submit(_disassemble, cubin)

    def card() -> ArchCard:
        usage, instructions = _read(disassembly.result(), symbol)
        static, dynamic = usage["SHARED"], corrections.get("shared", launch.shared)
        if b".nv.shared.reserved" in cubin and static >= SHARED_RESERVED:
            static -= SHARED_RESERVED  # from sm_90 on, it counts what the system takes
        return ArchCard(
            usage["REG"],
            usage["STACK"],
            static,
            dynamic,
            instructions,
            occupancy(arch, launch.threads, usage["REG"], static + dynamic),
        )

    return card


def _disassemble(cubin: bytes) -> str:
    """Resource usage and SASS, from the tools in Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (tools / "cuobjdump").exists():
        raise RuntimeError(f"triton {triton.__version__} has no cuobjdump in {tools}")
    path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"  # cuobjdump calls nvdisasm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools / "cuobjdump", "-res-usage", "-sass", file.name]
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed: {done.stderr}")
    return done.stdout


def _read(dump: str, symbol: str) -> tuple[dict[str, int], dict[str, int]]:
    """Resource usage and instruction counts of one function in cuobjdump's output.

    `symbol` is its name, or a part of it that no other function has.
    """
    names = re.findall(r"Function (\S+):\s*\n", dump)
    name = symbol if symbol in names else next(n for n in names if symbol in n)
    usage = re.search(rf"Function {re.escape(name)}:\s*\n(.*)", dump)[1]
    usage = {k: int(v) for k, v in re.findall(r"(\w+)(?:\[\d\])?:(\d+)", usage)}
    code = dump[re.search(rf"Function : {re.escape(name)}\n", dump).end() :]
    code = code.partition("Function : ")[0]
    counts = Counter()
    for opcode in re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*)", code):
        name, *modifiers = opcode.split(".")
        if name in MEMORY:
            counts[f"{name}.{_bits(modifiers)}"] += 1
        elif COUNTED.fullmatch(name):
            counts[name] += 1
    return usage, dict(sorted(counts.items()))


def _bits(modifiers: list[str]) -> int:
    """Width of an access: "LDG.E.128" moves 128 bits a thread, "LDG.E.U16" 16, "LDG.E" 32."""
    widths = [m.lstrip("USF") for m in modifiers]
    return next((int(w) for w in widths if w in ("8", "16", "64", "128", "256")), 32)


def _record_cuda(launches: list[_Launch]) -> None:
    def configure(kernel, grid, block, shared=0, **how):
        def run(*args):
            kernel_values(args)
            key = (id(kernel), three(block), shared)
            threads = math.prod(three(block))
            launches.append(_Launch(kernel.name, "cuda", three(grid), threads, shared, build, key))

        def build(arch: str):
            code = compile_cuda(kernel, arch)
            symbol = code.symbol_mapping[kernel.name]
            return code.code, symbol.decode() if isinstance(symbol, bytes) else symbol, {}

        return run

    CudaKernel.configure = configure


def _record_triton(launches: list[_Launch]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import jit

    binder_of = _hook(jit, "create_function_from_signature", "triton")
    pack = _hook(jit.JITFunction, "_pack_args", "triton")
    make_backend = _hook(triton.compiler, "make_backend", "triton")

    def bind(fn, target, args, kwargs):
        """What a launch with these arguments compiles: alignment and value specialisations."""
        backend = make_backend(target)
        bound, special, options = binder_of(fn.signature, fn.params, backend)(*args, **kwargs)
        packed = pack(fn, backend, dict(kwargs), bound, special, options)
        return bound, packed

    def run(fn, *args, grid, warmup, **kwargs):
        bound, (options, signature, constants, attrs) = bind(
            fn, GPUTarget("cuda", 90, 32), args, kwargs
        )
        grid = grid(bound) if callable(grid) else grid
        note = f", num_warps={options.num_warps}, num_stages={options.num_stages}"

        def build(arch: str):
            target = GPUTarget("cuda", int(arch[3:]), 32)
            _, (options, signature, constants, attrs) = bind(fn, target, args, kwargs)
            source = ASTSource(fn, signature, constants, attrs)
            binary = triton.compile(source, target=target, options=options.__dict__)
            return binary.asm["cubin"], binary.metadata.name, {"shared": binary.metadata.shared}

        key = (id(fn), str((signature, constants, attrs, kwargs)))
        threads = options.num_warps * 32
        launches.append(_Launch(fn.__name__, "triton", three(grid), threads, 0, build, key, note))

    jit.JITFunction.run = run


def _record_numba(launches: list[_Launch]) -> None:
    from cuda.bindings import nvjitlink
    from numba import cuda, types
    from numba.cuda import dispatcher

    _hook(dispatcher.CUDADispatcher, "configure", "numba-cuda")
    _hook(dispatcher, "get_current_device", "numba-cuda")
    compile_all = _hook(cuda, "compile_all", "numba-cuda")

    def type_of(kernel, value):
        if not isinstance(value, torch.Tensor):
            return kernel.typeof_pyval(value)
        name = str(value.dtype).removeprefix("torch.")
        turned = value.permute(*reversed(range(value.ndim)))
        layout = "C" if value.is_contiguous() else "F" if turned.is_contiguous() else "A"
        if name == "bfloat16":
            from numba.cuda.types import bfloat16 as element
        else:
            element = getattr(types, {"bool": "boolean"}.get(name, name))
        return types.Array(element, value.ndim, layout)

    def configure(kernel, griddim, blockdim, stream=0, sharedmem=0):
        def run(*args):
            signature = types.void(*(type_of(kernel, a) for a in args))
            key = (id(kernel), str(signature), three(blockdim), sharedmem)
            threads = math.prod(three(blockdim))
            name = kernel.py_func.__name__

            def build(arch: str):
                mangled = f"{len(name)}{name}"  # _ZN...8n_kernelB2v1...
                return link(kernel, signature, arch), mangled, {}

            launches.append(_Launch(name, "numba", three(griddim), threads, sharedmem, build, key))

        return run

    def link(kernel, signature, arch: str) -> bytes:
        given = kernel.targetoptions
        capability = (int(arch[3:-1]), int(arch[-1]))
        # Device functions ask the current device what to compile for.
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
        codes, _ = compile_all(
            kernel.py_func,
            signature,
            cc=capability,
            device=False,
            abi="numba",
            fastmath=given.get("fastmath", False),
            launch_bounds=given.get("launch_bounds"),
            output="ltoir",
        )
        flags = [f"-arch={arch}", "-lto"]
        if given.get("max_registers"):
            flags.append(f"-maxrregcount={given['max_registers']}")
        linker = nvjitlink.create(len(flags), flags)
        try:
            for i, code in enumerate(codes):
                data = bytes(getattr(code, "code", code))
                nvjitlink.add_data(linker, nvjitlink.InputType.LTOIR, data, len(data), f"{i}")
            nvjitlink.complete(linker)
            cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
            nvjitlink.get_linked_cubin(linker, cubin)
        except nvjitlink.nvJitLinkError:
            log = bytearray(nvjitlink.get_error_log_size(linker))
            nvjitlink.get_error_log(linker, log)
            raise CompileError(log.decode(errors="replace").strip("\0 \n")) from None
        finally:
            nvjitlink.destroy(linker)
        return bytes(cubin)

    dispatcher.CUDADispatcher.configure = configure


def _hook(owner, name: str, package: str):
    """A private function of Numba or Triton that recording relies on."""
    if not hasattr(owner, name):
        version = importlib.metadata.version(package)
        raise RuntimeError(
            f"compile cards do not know {package} {version}: {owner.__name__} has no {name}"
        )
    return getattr(owner, name)
