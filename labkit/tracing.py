"""The trace: every load and store that a kernel makes under the simulators, written down.

Numba's CUDA simulator and Triton's interpreter run the reader's own kernel; `trace()` replaces a
few of their functions while it is active. `lens.py` reads what was collected.

- Numba: a block's threads run one after another, in order of index, each up to its next barrier, so
  that a trace is the same every time. A thread that waits for a later one without a barrier can
  never go on: after `LIMIT` accesses it is stopped.
- Triton: each tensor argument is given addresses of its own, so that a pointer says whose it is,
  however far outside it points. Such a lane is recorded, and sent to scratch memory.
- Out of bounds, a read returns NaN (0 for integers) and a store is dropped; the kernel goes on.
"""

from __future__ import annotations

from labkit.device import SIMULATED

import inspect
import itertools
import linecache
import operator
import os
import re
import sys
import threading
from array import array as packed
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

LIMIT = 300_000
_POISON = 0xFF  # in every byte of fresh shared memory: NaN as a float, -1 as an integer


class LensUnavailable(RuntimeError):
    """The simulators here are missing, or lack the hooks that the lens needs."""


# Private hooks ------------------------------------------------------------------------------------
# Everything that is not a public name of Numba or Triton is reached through these two functions.
# Read against numba 0.68 with and without numba-cuda (0.22, 0.30) and triton 3.6 and 3.9.

_NUMBA = ("numba.cuda.simulator.kernel", "numba.cuda.simulator.kernelapi")
_TRITON = ("triton.runtime.interpreter",)


def numba_hooks():
    """The simulator's kernel and kernelapi modules; numba-cuda's own ones where it is installed."""
    return _hooks(
        _NUMBA,
        "FakeCUDAKernel.__call__ _get_kernel_context BlockManager.run BlockThread.syncthreads",
        "FakeCUDAShared.array FakeCUDAAtomic.add numpy_support.as_dtype types.Type",
    )


def triton_hooks():
    """The interpreter's module."""
    return _hooks(
        _TRITON,
        "GridExecutor.__call__ _implicit_cvt InterpreterBuilder.create_masked_load TensorHandle "
        "InterpreterBuilder.create_masked_store InterpreterBuilder.create_atomic_rmw "
        "InterpreterBuilder.create_atomic_cas interpreter_builder.set_grid_dim _unwrap_tensor "
        "_get_np_dtype",
    )[0]


def _hooks(modules: tuple[str, ...], *needed: str) -> list:
    if not SIMULATED:
        raise LensUnavailable("this process runs kernels on a GPU; start it with LABKIT_DEVICE=sim")
    found = []
    try:
        for name, attributes in zip(modules, needed, strict=True):
            found.append(__import__(name, fromlist=["_"]))
            for attribute in attributes.split():
                operator.attrgetter(attribute)(found[-1])
    except (ImportError, AttributeError) as e:
        from importlib.metadata import PackageNotFoundError, version

        versions = []
        for package in ("numba", "numba-cuda", "triton"):
            try:
                versions.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                versions.append(f"no {package}")
        known = f"the lens does not know these versions: {', '.join(versions)}"
        raise LensUnavailable(f"{known} ({e})") from e
    return found


@contextmanager
def _patched(changes: list[tuple[object, str, object]]) -> Iterator[None]:
    saved = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
    try:
        for owner, name, new in changes:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in saved:
            setattr(owner, name, old)


# What is written down -----------------------------------------------------------------------------


class Array(NamedTuple):
    """An array that a kernel sees. `start`: byte offset of its first element in its allocation."""

    name: str
    space: str  # "global" or "shared"
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    itemsize: int
    start: int
    storage: int  # address of the allocation: tells whether two arrays overlap

    @property
    def extent(self) -> tuple[int, int]:
        """Bytes [low, high) of the allocation that the elements span."""
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        if 0 in self.shape:
            return self.start, self.start
        low = self.start + sum(s for s in steps if s < 0)
        return low, self.start + sum(s for s in steps if s > 0) + self.itemsize

    def element(self, offset: int) -> str:
        """Name of the element at a byte offset: `x[2, 5]`."""
        rest, index = int(offset) - self.start, [0] * len(self.shape)
        for d in sorted(range(len(self.shape)), key=lambda d: -abs(self.strides[d])):
            if self.strides[d] and self.shape[d] > 1:
                index[d], rest = divmod(rest, self.strides[d])
        return f"{self.name}[{', '.join(map(str, index))}]"


class Site(NamedTuple):
    """A place in the source that accesses one array in one way."""

    kind: str  # "read", "write", "atomic" or "barrier"
    array: int
    line: int  # in the function, whose `def` is line 1
    text: str
    itemsize: int


class Rows(NamedTuple):
    """Accesses of one launch, as columns. `occ`: how often this lane was at this site before."""

    block: np.ndarray
    lane: np.ndarray  # linear thread index in the block; for Triton, the element of the tile
    epoch: np.ndarray  # barriers met before; for Triton, operations of the program before
    pos: np.ndarray
    site: np.ndarray
    occ: np.ndarray
    offset: np.ndarray  # bytes, in the allocation

    def where(self, mask: np.ndarray) -> Rows:
        """The rows where `mask` holds."""
        return Rows(*(column[mask] for column in self))


class Launch:
    """One kernel launch while it is traced."""

    def __init__(self, kernel: str, backend: str, grid, block=()) -> None:
        self.kernel, self.backend = kernel, backend
        self.grid, self.block = tuple(grid), tuple(block)
        self.shared: dict[tuple, tuple[int, int]] = {}  # place -> array, line of a shared array
        self.parts: list[tuple] = []
        self.barriers: list[dict[int, tuple[int, ...]]] = []  # per block: thread -> barrier sites
        self.misses: dict[tuple[str, int], list] = {}  # (bug, site) -> [count, first example]

    def miss(self, bug: str, site: int, example: str) -> None:
        """Note an access that no array has room for."""
        self.misses.setdefault((bug, site), [0, example])[0] += 1

    def rows(self) -> Rows:
        """Every access so far, a row each."""
        if not self.parts:
            return Rows(*(np.zeros(0, np.int64) for _ in Rows._fields))
        rows = Rows(*map(np.concatenate, zip(*self.parts, strict=True)))
        if self.backend == "triton":
            return rows
        order = np.lexsort((rows.pos, rows.site, rows.lane, rows.block))
        key = np.stack([rows.block, rows.lane, rows.site])[:, order]
        starts = np.flatnonzero(np.append(True, (key[:, 1:] != key[:, :-1]).any(0)))
        occ = np.empty_like(rows.pos)
        occ[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
        return rows._replace(occ=occ)

    def who(self, block: int, lane: int | None = None) -> str:
        """`thread 3 of block 1`, with an index per dimension where there are several."""
        if self.backend == "triton":
            return f"program {_index(block, self.grid)}"
        where = f"block {_index(block, self.grid)}"
        return where if lane is None else f"thread {_index(lane, self.block)} of {where}"

    def __str__(self) -> str:
        """`copy_kernel: 2 blocks of 32 threads`."""
        grid, block = ("x".join(map(str, _used(sizes))) for sizes in (self.grid, self.block))
        if self.backend == "triton":
            return f"{self.kernel}: {grid} program{'s' * (grid != '1')}"
        return f"{self.kernel}: {grid} block{'s' * (grid != '1')} of {block} threads"


def _index(linear: int, sizes: tuple[int, ...]) -> str:
    index = [int(i) for i in np.unravel_index(int(linear), sizes, order="F")][: len(_used(sizes))]
    return str(index[0] if len(index) == 1 else tuple(index))


def _used(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes without the ones at the end."""
    return tuple(sizes[: max([d for d, n in enumerate(sizes) if n > 1], default=0) + 1])


class Trace:
    """Collects what kernels do while `trace()` is active; `report()` reads it."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.arrays: list[Array] = []
        self.sites: list[Site] = []
        self._ids: dict[tuple, int] = {}
        self._codes: list = []

    def site(self, frame, kind: str, array: int, itemsize: int = 0) -> int:
        """Number of the place that `frame` is at. One line may hold several."""
        key = (id(frame.f_code), frame.f_lasti, kind, array, itemsize)
        found = self._ids.get(key)
        if found is None:
            place = (id(frame.f_code), _column(frame), kind, array, itemsize)
            found = self._ids[key] = self._ids.setdefault(place, len(self.sites))
            if found == len(self.sites):
                self.keep(frame.f_code)
                size = itemsize or (self.arrays[array].itemsize if array >= 0 else 0)
                line, text = _place(frame.f_code, frame.f_lineno)
                self.sites.append(Site(kind, array, line, text, size))
        return found

    def keep(self, code) -> None:
        """Keep a code object alive, so that no other gets its id."""
        self._codes.append(code)

    def add(self, **fields) -> int:
        """Number of a new array."""
        self.arrays.append(Array(**fields))
        return len(self.arrays) - 1

    def report(self):
        """What was seen so far, as a LensReport."""
        from labkit.lens import report_of  # the lens imports this module

        return report_of(self)


def _column(frame) -> tuple:
    """Where in the source `frame` is. `f_lasti` alone moves when the interpreter specialises."""
    return next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))


def _place(code, lineno: int) -> tuple[int, str]:
    """Line number in the function (its `def` is line 1) and the text of that line."""
    start = code.co_firstlineno  # of the first decorator, if there is one
    while start < lineno and not re.match(r"\s*def ", linecache.getline(code.co_filename, start)):
        start += 1
    return lineno - start + 1, linecache.getline(code.co_filename, lineno).strip()


@contextmanager
def trace() -> Iterator[Trace]:
    """Trace every Numba and Triton kernel launched inside the `with`.

    LensUnavailable when neither simulator has the hooks. ValueError when a trace is active already.
    """
    if _active:
        raise ValueError("trace() is active already: one trace at a time")
    collected, changes, missing = Trace(), [], []
    for changes_of, hooks in ((_numba_changes, numba_hooks), (_triton_changes, triton_hooks)):
        try:
            changes += changes_of(collected, hooks())
        except LensUnavailable as e:
            missing.append(e)
    if not changes:
        raise missing[0]
    _active.append(collected)
    try:
        with _patched(changes):
            yield collected
    finally:
        _active.remove(collected)


_active: list[Trace] = []  # at most one: the simulators themselves run one kernel at a time


# Numba --------------------------------------------------------------------------------------------


class _Current:
    """What the running Numba thread writes to. One thread runs at a time."""

    launch: Launch
    block: int
    lane: int
    events: packed  # site, offset, site, offset, …; a barrier is -1, site
    shared: dict  # shared memory of the running block


_PARTS = {slice, type(...), type(None)}  # in an index: the result is an array


class _View:
    """A NumPy array inside a kernel; every element read or written is recorded."""

    __slots__ = ("_array", "_ary", "_dims", "_now", "_start", "_trace")

    def __init__(self, trace: Trace, now: _Current, ary: np.ndarray, array: int, start: int):
        self._trace, self._now, self._ary, self._array, self._start = trace, now, ary, array, start
        self._dims = tuple(zip(ary.shape, ary.strides, strict=True))

    def __getitem__(self, index):
        where = index if type(index) is tuple else (index,)
        if len(where) < len(self._dims) or not _PARTS.isdisjoint(map(type, where)):
            return self._wrap(self._ary[index])
        if self._touch(where, "read", sys._getframe(1)):
            return self._ary[index]
        return self._nothing()

    def __setitem__(self, index, value):
        where = index if type(index) is tuple else (index,)
        if len(where) < len(self._dims) or not _PARTS.isdisjoint(map(type, where)):
            part = self._wrap(self._ary[index])
            for each in np.ndindex(part._ary.shape):
                part._touch(each, "write", sys._getframe(1))
            part._ary[...] = value
        elif self._touch(where, "write", sys._getframe(1)):
            self._ary[index] = value

    def __getattr__(self, name):
        value = getattr(self._ary, name)
        if callable(value):  # reshape, ravel, view: results that share memory stay traced
            return lambda *args, **kwargs: self._wrap(value(*args, **kwargs))
        return self._wrap(value)

    def __len__(self):
        return len(self._ary)

    def _wrap(self, value):
        if not isinstance(value, np.ndarray):
            return value
        start = self._start + value.ctypes.data - self._ary.ctypes.data
        return _View(self._trace, self._now, value, self._array, start)

    def _nothing(self):
        kind = self._ary.dtype
        return kind.type(np.nan) if kind.kind == "f" else kind.type(0)

    def _touch(self, where: tuple, kind: str, frame) -> bool:
        """Record an access. False if it lies outside the array, so must not happen."""
        now, offset, bug = self._now, self._start, ""
        for i, (n, stride) in zip(map(operator.index, where), self._dims, strict=True):
            if i < 0:
                bug, i = bug or "negative index", i + n
            if not 0 <= i < n:
                bug = "out-of-bounds read" if kind == "read" else "out-of-bounds store"
            offset += i * stride
        site = self._trace.site(frame, kind, self._array)
        if bug:
            array, who = self._trace.arrays[self._array], now.launch.who(now.block, now.lane)
            verb = {"read": "reads", "write": "writes"}.get(kind, "updates")
            index = ", ".join(str(int(i)) for i in where)
            size = ", ".join(str(n) for n, _ in self._dims)
            now.launch.miss(bug, site, f"{who} {verb} {array.name}[{index}]; its shape is ({size})")
            if bug != "negative index":
                return False
        now.events.append(site)
        now.events.append(offset)
        if len(now.events) > 2 * LIMIT:
            raise RuntimeError(
                f"{now.launch.who(now.block, now.lane)} made {LIMIT} accesses and has not ended. "
                f"The lens runs threads one after another: does it wait for one not yet begun?"
            )
        return True


def _numba_changes(trace: Trace, hooks) -> list[tuple]:
    """(owner, name, function) of what the simulator must do instead while tracing."""
    kernel_module, api = hooks
    now, simulator = _Current(), os.path.dirname(kernel_module.__file__) + os.sep
    call, atomics = kernel_module.FakeCUDAKernel.__call__, api.FakeCUDAAtomic

    def launch(kernel, *args):
        if kernel._device or kernel_module._get_kernel_context():
            return call(kernel, *args)
        now.launch = Launch(kernel.fn.__name__, "numba", kernel.grid_dim, kernel.block_dim)
        trace.launches.append(now.launch)
        names = inspect.signature(kernel.fn).parameters
        return call(kernel, *(wrap(n, a) for n, a in zip(names, args, strict=False)))

    def wrap(name: str, arg):
        if isinstance(arg, torch.Tensor):
            if arg.dtype is torch.bfloat16:
                raise ValueError(f"{name} is bfloat16, which NumPy and so Numba's simulator lack")
            storage, arg = arg.untyped_storage().data_ptr(), arg.detach().numpy()
        else:
            arg = getattr(arg, "_ary", arg)  # a simulated device array
            if not isinstance(arg, np.ndarray) or arg.ndim == 0:
                return arg
            owner = arg
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            storage = owner.ctypes.data
        start = arg.ctypes.data - storage if arg.size else 0
        number = trace.add(
            name=name, space="global", shape=arg.shape, strides=arg.strides,
            itemsize=arg.itemsize, start=start, storage=storage,
        )  # fmt: skip
        return _View(trace, now, arg, number, start)

    class Thread(kernel_module.BlockThread):
        """A CUDA thread that runs only while it holds the turn."""

        def __init__(self, manager, block, point) -> None:
            super().__init__(None, manager, block, point, False)
            self.events, self.error, self.done = packed("q"), None, False
            self.go = threading.Lock()
            self.go.acquire()

        def run(self) -> None:
            self.go.acquire()
            try:
                if not self.abort:
                    self._manager._f(*self._manager.args)
            except _Stop:
                pass
            except BaseException as e:
                self.error = e
            self.done = True
            self._manager.turn.release()

        def syncthreads(self) -> None:
            frame = sys._getframe(1)
            while frame.f_code.co_filename.startswith(simulator):
                frame = frame.f_back
            self.events.append(-1)
            self.events.append(trace.site(frame, "barrier", -1))
            self._manager.turn.release()
            self.go.acquire()
            if self.abort:
                raise _Stop

    def run(manager, grid_point, *args):
        """One block: each thread up to its next barrier, in order of index, again and again."""
        manager.args, manager.turn = args, threading.Lock()
        manager.turn.acquire()
        now.block = int(np.ravel_multi_index(grid_point, manager._grid_dim, order="F"))
        now.shared = {}
        points = sorted(np.ndindex(*manager._block_dim), key=lambda p: p[::-1])
        threads = [Thread(manager, grid_point, point) for point in points]
        for t in threads:
            t.start()
        live, error = threads, None
        while live:
            for t in live:
                now.events, now.lane, t.abort = t.events, t.thread_id, error is not None
                t.go.release()
                manager.turn.acquire()
                if t.error and not error:
                    error = t.error
                    error.add_note(f"in {now.launch.who(now.block, t.thread_id)}")
            live = [t for t in live if not t.done]
        _collect(now.launch, now.block, [t.events for t in threads])
        if error:
            raise error

    def shared_array(self, shape, dtype, alignment=None):
        frame = sys._getframe(1)
        dtype = api.numpy_support.as_dtype(dtype) if isinstance(dtype, api.types.Type) else dtype
        place = (id(frame.f_code), _column(frame))  # the simulator mixes up two on one line
        if place not in now.shared:
            now.shared[place] = _View(
                trace, now, *fresh(self, frame, place, shape, np.dtype(dtype))
            )
        return now.shared[place]

    def fresh(self, frame, place: tuple, shape, dtype: np.dtype) -> tuple[np.ndarray, int, int]:
        """Poisoned shared memory of one block, its array's number, and where it starts."""
        if shape == 0:  # dynamic: every such array is the same memory
            raw = np.full(self._dynshared_size, _POISON, np.uint8)
            raw = now.shared.setdefault("dynamic", raw)
            ary = raw[: raw.size // dtype.itemsize * dtype.itemsize].view(dtype)
        else:
            count = int(np.prod(shape)) * dtype.itemsize
            ary = np.full(count, _POISON, np.uint8).view(dtype).reshape(shape)
        known = now.launch.shared  # the same array in every block, for the report
        if place not in known:
            trace.keep(frame.f_code)
            nth = sum(line == frame.f_lineno for _, line in known.values())
            number = trace.add(
                name=_assigned(frame, nth), space="shared", shape=ary.shape, strides=ary.strides,
                itemsize=ary.itemsize, start=0,
                storage=-1 if shape == 0 else -2 - len(trace.arrays),
            )  # fmt: skip
            known[place] = number, frame.f_lineno
        return ary, known[place][0], 0

    def atomic(name: str, method):
        def changed(self, ary, *args):
            if not isinstance(ary, _View):
                return method(self, ary, *args)
            index = (0,) * ary._ary.ndim if name == "compare_and_swap" else args[0]
            where = index if type(index) is tuple else (index,)
            inside = ary._touch(where, "atomic", sys._getframe(1))
            return method(self, ary._ary, *args) if inside else ary._nothing()

        return changed

    methods = [(n, m) for n, m in vars(atomics).items() if inspect.isfunction(m) and n[:2] != "__"]
    return [
        (kernel_module.FakeCUDAKernel, "__call__", launch),
        (kernel_module.BlockManager, "run", run),
        (api.FakeCUDAShared, "array", shared_array),
        *((atomics, name, atomic(name, method)) for name, method in methods),
    ]


class _Stop(BaseException):
    """Unwinds a simulated thread whose block failed."""


def _assigned(frame, nth: int) -> str:
    """Name that the n-th `cuda.shared.array` of a line is assigned to."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    names = re.findall(r"(\w+)\s*=\s*[\w.]*shared\.array", line)  # a = …; b = …
    if several := re.match(r"\s*(\w+(?:\s*,\s*\w+)+)\s*=", line):  # a, b = …
        names = re.findall(r"\w+", several[1])
    return names[nth] if nth < len(names) else "shared"


def _collect(launch: Launch, block: int, events: list[packed]) -> None:
    """Turn the event lists of one block's threads into columns, and keep their barriers."""
    barriers = {}
    for lane, flat in enumerate(events):
        site, offset = np.array(flat, np.int64).reshape(-1, 2).T
        at_barrier = site < 0
        barriers[lane] = tuple(offset[at_barrier].tolist())
        epoch, pos = np.cumsum(at_barrier), np.arange(len(site))
        columns = Rows(block + 0 * pos, lane + 0 * pos, epoch, pos, site, 0 * pos, offset)
        launch.parts.append(columns.where(~at_barrier))
    launch.barriers.append(barriers)


# Triton -------------------------------------------------------------------------------------------

_REGION = 48  # bits: argument k gets the addresses round (k + 1) << 48


def _triton_changes(trace: Trace, interpreter) -> list[tuple]:
    """(owner, name, function) of what the interpreter must do instead while tracing."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    call, convert = interpreter.GridExecutor.__call__, interpreter._implicit_cvt
    package = os.path.dirname(os.path.dirname(interpreter.__file__)) + os.sep
    scratch = np.empty(64, np.uint8)  # where lanes outside every argument are sent
    state: dict = {"atomic": False}

    def launch(executor, *args, **kwargs):
        fn = executor.fn
        names = [*inspect.signature(fn).parameters]
        given = inspect.getcallargs(fn, *args, **{k: v for k, v in kwargs.items() if k in names})
        state["names"] = [(n, t) for n, arg in given.items() for t in _tensors(arg)]
        state["launch"] = Launch(fn.__name__, "triton", (1, 1, 1))
        state["owners"], state["program"], state["count"] = [], None, {}
        trace.launches.append(state["launch"])
        return call(executor, *args, **kwargs)

    def implicit_cvt(arg):
        """A tensor argument as a pointer into the address range of its own."""
        out = convert(arg)
        if not hasattr(arg, "data_ptr"):
            return out
        tensor = interpreter._unwrap_tensor(arg)
        match = [i for i, (_, t) in enumerate(state["names"]) if _same(t, tensor)]
        if not match:
            return out
        size, storage = tensor.element_size(), tensor.untyped_storage().data_ptr()
        number = trace.add(
            name=state["names"].pop(match[0])[0], space="global", shape=tuple(tensor.shape),
            strides=tuple(s * size for s in tensor.stride()), itemsize=size,
            start=tensor.storage_offset() * size, storage=storage,
        )  # fmt: skip
        state["owners"].append(number)
        out.handle.data[0] = (len(state["owners"]) << _REGION) + trace.arrays[number].start
        return out

    def touch(self, ptrs, mask, kind: str):
        """Record the active lanes; the pointer to use instead, outside lanes sent to scratch."""
        launch, frame = state["launch"], sys._getframe(2)
        while frame.f_code.co_filename.startswith((package, __file__)):
            frame = frame.f_back
        if state["program"] != self.grid_idx:
            launch.grid = tuple(self.grid_dim)
            state["program"], state["count"], state["epoch"] = self.grid_idx, {}, 0
        program = int(np.ravel_multi_index(self.grid_idx, self.grid_dim, order="F"))
        state["epoch"] += 1
        itemsize = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        address = np.asarray(ptrs.data).astype(np.int64)
        active = True if mask is None else mask.data.astype(bool)
        lanes = _lanes(address)
        owner = (address + (1 << (_REGION - 1))) >> _REGION
        real = address.copy()
        scratch.fill(_POISON)
        for k in np.unique(owner).tolist():
            if not 1 <= k <= len(state["owners"]):
                continue  # a pointer that was loaded from memory: not the lens's
            number, offset = state["owners"][k - 1], address - (k << _REGION)
            array = trace.arrays[number]
            low, high = array.extent
            inside = (low <= offset) & (offset + itemsize <= high)
            target = np.where(inside, offset + array.storage, scratch.ctypes.data)
            real = np.where(owner == k, target, real)
            site = trace.site(frame, kind, number, itemsize)
            state["count"][site] = occ = state["count"].get(site, -1) + 1
            mine = (owner == k) & active
            for off in offset[mine & ~inside]:
                bug = "out-of-bounds read" if kind == "read" else "out-of-bounds store"
                verb = {"read": "reads", "write": "writes"}.get(kind, "updates")
                where = f"element {(int(off) - array.start) // array.itemsize} of {array.name}"
                count = int(np.prod(array.shape))
                launch.miss(bug, site, f"{launch.who(program)} {verb} {where}; it has {count}")
            lane, offset = lanes[mine & inside], offset[mine & inside]
            order = np.argsort(lane)
            same = [np.full(len(lane), v) for v in (program, state["epoch"], 0, site, occ)]
            launch.parts.append(Rows(same[0], lane[order], *same[1:], offset[order]))
        return handle(real.astype(ptrs.data.dtype), ptrs.dtype)

    def masked_load(self, ptrs, mask, *rest, **named):
        kind = "atomic" if state["atomic"] else "read"
        return load(self, touch(self, ptrs, mask, kind), mask, *rest, **named)

    def masked_store(self, ptrs, value, mask, *rest, **named):
        kind = "atomic" if state["atomic"] else "write"
        return store(self, touch(self, ptrs, mask, kind), value, mask, *rest, **named)

    def atomic_rmw(self, op, ptr, val, mask, *rest):
        return rmw(self, op, touch(self, ptr, mask, "atomic"), val, mask, *rest)

    def atomic_cas(self, ptr, *rest):
        return cas(self, touch(self, ptr, None, "atomic"), *rest)

    def as_atomic(method):
        def changed(*args):
            state["atomic"] = True
            try:
                return method(*args)
            finally:
                state["atomic"] = False

        return changed

    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    newer = [n for n in ("create_atomic_load", "create_atomic_store") if hasattr(builder, n)]
    return [
        (interpreter.GridExecutor, "__call__", launch),
        (interpreter, "_implicit_cvt", implicit_cvt),
        (builder, "create_masked_load", masked_load),
        (builder, "create_masked_store", masked_store),
        (builder, "create_atomic_rmw", atomic_rmw),
        (builder, "create_atomic_cas", atomic_cas),
        *((builder, n, as_atomic(getattr(builder, n))) for n in newer),
    ]


@contextmanager
def undefined_lanes() -> Iterator[None]:
    """Lanes that `tl.load` masks off without an `other` hold NaN.

    Triton leaves them undefined; its interpreter would make them 0, which hides their use.
    """
    try:
        interpreter = triton_hooks()
    except LensUnavailable:
        yield
        return
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def masked_load(self, ptrs, mask, other, *rest, **named):
        element = ptrs.get_element_ty()
        dtype = np.dtype(interpreter._get_np_dtype(element))
        if other is None and dtype.kind == "f":
            other = interpreter.TensorHandle(np.full(ptrs.data.shape, np.nan, dtype), element)
        return load(self, ptrs, mask, other, *rest, **named)

    with _patched([(builder, "create_masked_load", masked_load)]):
        yield


def _tensors(arg) -> list[torch.Tensor]:
    """Tensors in a kernel argument: itself, in a tuple, or under a wrapper or descriptor."""
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, (tuple, list)):
        return [t for a in arg for t in _tensors(a)]
    return _tensors(arg.base) if hasattr(arg, "base") else []


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _lanes(address: np.ndarray) -> np.ndarray:
    """Elements of a tile numbered so that the dimension with the smallest step runs fastest."""
    steps = []
    for axis in range(address.ndim):
        pair = np.moveaxis(address, axis, 0)[:2].reshape(-1, address.size // address.shape[axis])
        step = abs(int(pair[-1, 0]) - int(pair[0, 0]))
        steps.append((step > 0, -step, axis))  # no step at all: the same bytes, so slowest
    order = [axis for *_, axis in sorted(steps)]
    numbers = np.arange(address.size).reshape([address.shape[axis] for axis in order])
    return numbers.transpose(np.argsort(order)).reshape(address.shape)
