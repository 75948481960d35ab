"""The lens: what a kernel did to memory, seen without a GPU.

One call of the reader's own launcher is traced under the simulators. The report counts reads and
writes of each argument, the 32-byte sectors that one request of 32 lanes touches, and bank
conflicts, and names what is wrong: races with both source lines, unequal barriers, accesses
outside an array.

What stands for the hardware, and where it is only a model:
- Numba: a warp is 32 threads of consecutive linear index. Its n-th request at one place in the
  source is made of each lane's n-th access there.
- Triton: a request is 32 consecutive elements of the tile, counted along its contiguous dimension:
  one element per lane. The compiler may give a lane 16 bytes: fewer and wider requests.
- Two accesses are ordered by a barrier (one block), or by an atomic on one address that follows the
  first and precedes the second. Memory fences are not checked, nor the order of the operations of
  one Triton program. Two writes of the same value count as a race.
- Addresses count from the start of the allocation, which a GPU aligns to 256 bytes.
"""

from __future__ import annotations

from labkit.device import SIMULATED
from labkit.launch import kernels_of
from labkit.problem import Problem, outputs
from labkit.source import portable
from labkit.tracing import Launch, LensUnavailable, Rows, Trace, numba_hooks, trace, triton_hooks

import html
import itertools
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

__all__ = [
    "Access",
    "Finding",
    "LensReport",
    "LensUnavailable",
    "Use",
    "lens",
    "trace",
]

SMALL = 4096  # elements: results up to this size are listed with who wrote each
WARP = 32  # lanes of one request
SECTOR = 32  # bytes: what one transaction between L2 and an SM moves
BANKS, BANK = 32, 4  # shared memory: banks, and bytes of one bank's word


# What the rows say --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """How often a kernel read and wrote the elements of one argument. An atomic does both."""

    kernel: str
    arg: str
    elements: int
    itemsize: int
    reads: int
    writes: int
    bytes: int

    @property
    def reads_per_element(self) -> float:
        """Mean over the argument's elements."""
        return self.reads / max(self.elements, 1)

    @property
    def writes_per_element(self) -> float:
        """Mean over the argument's elements."""
        return self.writes / max(self.elements, 1)


@dataclass(frozen=True)
class Access:
    """One source line's requests of one kind to one array.

    `sectors` is how many 32-byte sectors the requests touch in all, `needed` how many would hold
    the same bytes. Shared memory: `ways`, the worst request's passes over the fewest that its width
    needs; 1 is free of bank conflicts.
    """

    kernel: str
    arg: str
    kind: str
    space: str
    line: int
    text: str
    requests: int
    sectors: int
    needed: int
    ways: int


@dataclass(frozen=True)
class Finding:
    """Something wrong. `bug` is one of `ORDER`; `other_*` is the second line of a race."""

    bug: str
    kernel: str
    arg: str
    line: int
    text: str
    example: str
    other_line: int | None = None
    other_text: str | None = None
    count: int = 1

    def __str__(self) -> str:
        """Two or three lines: what, where, an example."""
        head = f"{self.bug}: {self.arg}" if self.arg else self.bug
        lines = [f"{head} in {self.kernel}", f"  line {self.line}: {self.text}"]
        if self.other_line is not None and self.other_line != self.line:
            lines.append(f"  line {self.other_line}: {self.other_text}")
        more = f"; {self.count} such cases" if self.count > 1 else ""
        return "\n".join([*lines, f"  {self.example}{more}"])


def report_of(trace: Trace) -> LensReport:
    """Read a trace. Launches of one kernel are added up."""
    args, accesses, findings, requests = {}, {}, {}, {}
    for launch in trace.launches:
        rows = launch.rows()
        for use in _uses(trace, launch, rows):
            _add(args, (use.kernel, use.arg), use, "reads", "writes", "bytes")
        fresh: dict = {}
        for a in _accesses(trace, launch, rows, fresh):
            key = (a.kernel, a.arg, a.kind, a.line, a.text)
            ways = max(a.ways, accesses[key].ways if key in accesses else 0)
            _add(accesses, key, a, "requests", "sectors", "needed")
            accesses[key] = replace(accesses[key], ways=ways)
        requests = {**fresh, **requests}  # pictures show the first launch
        for f in _findings(trace, launch, rows):
            _add(findings, (f.bug, f.kernel, f.arg, f.line, f.other_line), f, "count")
    launches = [f"{n} × {text}" if n > 1 else text
                for text, n in Counter(map(str, trace.launches)).items()]  # fmt: skip
    shared_last = sorted(accesses.values(), key=lambda a: a.space == "shared")
    return LensReport(
        launches=tuple(launches),
        args=tuple(args.values()),
        accesses=tuple(shared_last),
        findings=tuple(sorted(findings.values(), key=lambda f: ORDER.index(f.bug))),
        requests=requests,
    )


def _add(table: dict, key: tuple, item, *fields: str) -> None:
    """Put `item` into the table, or add its counts to the one that is there."""
    old = table.get(key)
    sums = {f: getattr(old, f) + getattr(item, f) for f in fields} if old else {}
    table[key] = replace(old or item, **sums)


def _uses(trace: Trace, launch: Launch, rows: Rows) -> list[Use]:
    found: list[Use] = []
    for number in np.unique(rows.site).tolist():
        site, array = trace.sites[number], trace.arrays[trace.sites[number].array]
        if array.space == "global":
            count, size = int((rows.site == number).sum()), int(np.prod(array.shape))
            reads, writes = count * (site.kind != "write"), count * (site.kind != "read")
            moved = (reads + writes) * site.itemsize
            found.append(Use(launch.kernel, array.name, size, array.itemsize, reads, writes, moved))
    return sorted(found, key=lambda u: [a.name for a in trace.arrays].index(u.arg))


def _accesses(trace: Trace, launch: Launch, rows: Rows, requests: dict) -> list[Access]:
    """Requests of each site; adds each one's lanes to `requests`."""
    warps = int(rows.lane.max(initial=0)) // WARP + 1
    warp, lane = rows.block * warps + rows.lane // WARP, rows.lane % WARP
    found = []
    for number in np.unique(rows.site).tolist():
        site, mask = trace.sites[number], rows.site == number
        array, part, size = trace.arrays[site.array], rows.where(mask), site.itemsize
        total, request = _group(warp[mask], part.occ)
        last = (part.offset + size - 1) // SECTOR  # an element may straddle two sectors
        ends = np.concatenate([part.offset // SECTOR, last])
        touched = np.unique(np.stack([np.tile(request, 2), ends]), axis=1)
        elements = np.unique(np.stack([request, part.offset]), axis=1)[0]
        needed = np.ceil(np.bincount(elements) * size / SECTOR).sum()
        ways = _ways(request, lane[mask], part.offset, size) if array.space == "shared" else 0
        found.append(
            Access(launch.kernel, array.name, site.kind, array.space, site.line, site.text,
                   total, touched.shape[1], int(needed), ways)
        )  # fmt: skip
        lanes = np.stack([warp[mask], part.epoch, part.pos, request, lane[mask], part.offset])
        requests.setdefault((array.name, site.kind), (size, []))[1].append(lanes)
    return sorted(found, key=lambda a: (a.line, a.kind, a.arg))


def _group(*columns: np.ndarray) -> tuple[int, np.ndarray]:
    """How many different rows the columns have, and the number of each row among them."""
    names, number = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return names.shape[1], number.ravel()


def _ways(request: np.ndarray, lane: np.ndarray, offset: np.ndarray, itemsize: int) -> int:
    """Worst number of different words that one request wants from one bank.

    Items of 8 and 16 bytes are served in groups of 16 and 8 lanes, each group a pass of its own.
    """
    words = max(itemsize // BANK, 1)
    group = lane // (WARP // words)
    every = [np.stack([request, group, offset // BANK + w]) for w in range(words)]
    distinct = np.unique(np.concatenate(every, axis=1), axis=1)
    distinct[2] %= BANKS
    return int(np.unique(distinct, axis=1, return_counts=True)[1].max(initial=1))


# What is wrong ------------------------------------------------------------------------------------

ORDER = (
    "out-of-bounds store",
    "out-of-bounds read",
    "negative index",
    "barrier in a divergent branch",
    "uninitialised shared memory",
    "missing barrier",
    "lost update",
    "race between threads",
    "race between blocks",
)
"""Bugs that the lens can see; the first found is the likeliest cause of the others."""


def _findings(trace: Trace, launch: Launch, rows: Rows) -> list[Finding]:
    if not len(rows.site):
        return _misses(trace, launch) + _unequal_barriers(trace, launch)
    arrays = np.array([s.array for s in trace.sites])[rows.site]
    shared = np.array([a.space == "shared" for a in trace.arrays])[arrays]
    # One number per byte of memory: shared arrays lie far from each other, below zero.
    base = np.array([a.storage << (0 if a.space == "global" else 20) for a in trace.arrays])
    address = base[arrays] + rows.offset
    inner, outer = rows.where(shared), rows.where(~shared)
    threads = _races(trace, launch, outer, address[~shared], "thread", "race between threads")
    blocks = _races(trace, launch, outer, address[~shared], "block", "race between blocks")
    seen = {(f.arg, f.line, f.other_line) for f in threads}
    return [
        *_misses(trace, launch),
        *_unequal_barriers(trace, launch),
        *_uninitialised(trace, launch, inner, address[shared]),
        *_races(trace, launch, inner, address[shared], "thread", "missing barrier"),
        *threads,
        *(f for f in blocks if (f.arg, f.line, f.other_line) not in seen),
    ]


def _misses(trace: Trace, launch: Launch) -> list[Finding]:
    found = []
    for (bug, number), (count, example) in launch.misses.items():
        site = trace.sites[number]
        name = trace.arrays[site.array].name
        found.append(Finding(bug, launch.kernel, name, site.line, site.text, example, count=count))
    return found


def _unequal_barriers(trace: Trace, launch: Launch) -> list[Finding]:
    """Threads of one block that met other barriers than the one that met the most."""
    for block, met in enumerate(launch.barriers):
        lines = {lane: [trace.sites[s].line for s in sites] for lane, sites in met.items()}
        most = max(met, key=lambda lane: (len(met[lane]), -lane))
        others = [lane for lane in met if lines[lane] != lines[most]]
        if not others:
            continue
        pairs = enumerate(itertools.zip_longest(lines[most], lines[others[0]]))
        site = trace.sites[met[most][next(i for i, (a, b) in pairs if a != b)]]
        counts = [
            f"{launch.who(block, lane)} meets {len(met[lane])} barrier{'s' * (len(met[lane]) != 1)}"
            for lane in (most, others[0])
        ]
        bug = "barrier in a divergent branch"
        example = ", ".join(counts)
        return [Finding(bug, launch.kernel, "", site.line, site.text, example, count=len(others))]
    return []


def _uninitialised(trace: Trace, launch: Launch, rows: Rows, address: np.ndarray) -> list[Finding]:
    """Reads of shared cells that nothing wrote before, in an earlier epoch or the same thread.

    A write by another thread in the same epoch makes it a race, which is reported as one.
    """
    if not len(rows.site):
        return []
    written = np.array([s.kind == "write" for s in trace.sites])[rows.site]
    cells, cell = _group(rows.block, address)
    never = np.iinfo(np.int64).max
    first, low, high, pos = (np.full(cells, v) for v in (never, never, -1, never))
    np.minimum.at(first, cell[written], rows.epoch[written])  # epoch of a cell's first write
    opening = written & (rows.epoch == first[cell])  # who wrote it then
    np.minimum.at(low, cell[opening], rows.lane[opening])
    np.maximum.at(high, cell[opening], rows.lane[opening])
    np.minimum.at(pos, cell[opening], rows.pos[opening])
    own = (low == high)[cell] & (low[cell] == rows.lane) & (pos[cell] > rows.pos)
    bad = ~written & ((rows.epoch < first[cell]) | ((rows.epoch == first[cell]) & own))
    found = []
    for number in np.unique(rows.site[bad]).tolist():
        at = np.flatnonzero(bad & (rows.site == number))
        site, array = trace.sites[number], trace.arrays[trace.sites[number].array]
        who = launch.who(rows.block[at[0]], rows.lane[at[0]])
        example = f"{who} reads {array.element(rows.offset[at[0]])} before anything wrote it"
        bug = "uninitialised shared memory"
        found.append(
            Finding(bug, launch.kernel, array.name, site.line, site.text, example, count=len(at))
        )
    return found


def _races(trace, launch, rows: Rows, address: np.ndarray, by: str, bug: str) -> list[Finding]:
    """Pairs of sites that meet at one address, at least one writing, not both atomic.

    `by` is "thread" (two threads of one block, no barrier between) or "block" (two blocks).
    """
    if not len(rows.site):
        return []
    who = rows.lane if by == "thread" else rows.block
    _, cell = _group(rows.block, address, rows.epoch) if by == "thread" else _group(address)
    ends = {}  # per site: its cells, and for each the rows of the lowest and the highest `who`
    for number in np.unique(rows.site).tolist():
        at = np.flatnonzero(rows.site == number)
        at = at[np.lexsort((rows.pos[at], rows.epoch[at], who[at], cell[at]))]
        cells, first = np.unique(cell[at], return_index=True)
        ends[number] = cells, at[first], at[np.append(first[1:], len(at)) - 1]
    atomic = np.flatnonzero(np.array([s.kind == "atomic" for s in trace.sites])[rows.site])
    clashes: dict[tuple, list] = {}
    for a, b in itertools.combinations_with_replacement(ends, 2):
        sites = trace.sites[a], trace.sites[b]
        if {s.kind for s in sites} in ({"read"}, {"atomic"}):
            continue
        pairs = _meetings(who, ends[a], ends[b])
        if len(atomic):
            pairs = [p for p in pairs if not _ordered(rows, address, atomic, *p)]
        if pairs:
            key = (trace.arrays[sites[0].array].name, *sorted({s.line for s in sites}))
            clashes.setdefault(key, []).append((sites, *pairs[0], len(pairs)))
    found = []
    for (name, *lines), every in clashes.items():
        kinds = [{s.kind for s in sites} for sites, *_ in every]
        update = len(lines) == 1 and {"write"} in kinds and {"read", "write"} in kinds
        (one, two), i, j, _ = every[0]
        verbs = {"read": "reads", "write": "writes", "atomic": "updates"}
        where = trace.arrays[one.array].element(rows.offset[i])
        first, second = (launch.who(rows.block[k], rows.lane[k]) for k in (i, j))
        example = f"{first} {verbs[one.kind]} {where}, {second} {verbs[two.kind]} it"
        if first == second:  # two elements of one Triton tile
            example = f"{first} {verbs[two.kind]} {where} more than once in one operation"
        found.append(
            Finding("lost update" if update else bug, launch.kernel, name, one.line, one.text,
                    example, two.line, two.text, max(n for *_, n in every))
        )  # fmt: skip
    return found


def _meetings(who: np.ndarray, a: tuple, b: tuple) -> list[tuple[int, int]]:
    """Pairs of rows of two sites, one per cell that different threads (or blocks) use."""
    _, ia, ib = np.intersect1d(a[0], b[0], assume_unique=True, return_indices=True)
    (low_a, high_a), (low_b, high_b) = (a[1][ia], a[2][ia]), (b[1][ib], b[2][ib])
    two = np.where(who[low_a] != who[low_b], low_b, high_b)
    one = np.where(who[low_a] != who[two], low_a, high_a)
    differ = who[one] != who[two]
    return list(zip(one[differ].tolist(), two[differ].tolist(), strict=True))


def _ordered(rows: Rows, address: np.ndarray, atomic: np.ndarray, one: int, two: int) -> bool:
    """Whether one of the `atomic` rows follows the first access and one precedes the second.

    Both on one address: the second then waits for, or learns of, what the first did.
    """
    first, second = sorted((one, two), key=lambda i: (rows.block[i], rows.lane[i]))
    known = rows.where(atomic)

    def near(i: int, sign: int) -> np.ndarray:
        later = sign * (known.epoch - rows.epoch[i]) > 0
        same = (known.lane == rows.lane[i]) & (known.epoch == rows.epoch[i])
        same &= sign * (known.pos - rows.pos[i]) > 0
        return address[atomic][(known.block == rows.block[i]) & (later | same)]

    return bool(np.intersect1d(near(first, 1), near(second, -1)).size)


# The report ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LensReport:
    """What one call of a launcher did to memory. Prints as tables, the same on every machine.

    `bytes` counts what the kernels asked for: each load and store of an element, times its size.
    `ledger_bytes` is the least that the operation must move (None without a problem and a size).
    """

    launches: tuple[str, ...]
    args: tuple[Use, ...]
    accesses: tuple[Access, ...]
    findings: tuple[Finding, ...]
    name: str = ""
    setting: str = ""
    ledger_bytes: int | None = None
    requests: dict = field(default_factory=dict, repr=False, compare=False)
    writers: tuple[dict[int, str], ...] = field(default=(), repr=False, compare=False)
    """For each output: flat index -> who wrote it last, "thread 3 of block 1"."""

    @property
    def bytes(self) -> int:
        """Bytes loaded and stored, element by element."""
        return sum(use.bytes for use in self.args)

    @property
    def ratio(self) -> float | None:
        """Bytes counted over the ledger's; None without a ledger."""
        return self.bytes / self.ledger_bytes if self.ledger_bytes else None

    def use(self, arg: str, kernel: str | None = None) -> Use:
        """Counts of one argument, in the first kernel that uses it. ValueError if none does."""
        for use in self.args:
            if use.arg == arg and kernel in (None, use.kernel):
                return use
        raise ValueError(f"{arg=} was not used; the kernels used {[u.arg for u in self.args]}")

    def sectors(self, arg: str, kind: str = "read") -> float:
        """Mean 32-byte sectors per request of `kind` ("read", "write", "atomic") to `arg`."""
        found = self._find(arg, kind, "global")
        return sum(a.sectors for a in found) / sum(a.requests for a in found)

    def ways(self, arg: str, kind: str = "read") -> int:
        """Worst bank conflict of a request to the shared array `arg`; 1 means none."""
        return max(a.ways for a in self._find(arg, kind, "shared"))

    def _find(self, arg: str, kind: str, space: str) -> list[Access]:
        found = [a for a in self.accesses if (a.arg, a.kind, a.space) == (arg, kind, space)]
        if not found:
            seen = sorted({(a.arg, a.kind) for a in self.accesses if a.space == space})
            raise ValueError(f"no {kind} of {arg!r} in {space} memory; seen: {seen}")
        return found

    def pattern(
        self, arg: str, kind: str = "read", warp: int = 0, request: int = 0
    ) -> dict[int, int]:
        """Lane -> byte offset in the allocation, for the `request`-th request of one warp.

        Warps count on over the blocks. Lanes that were off are absent. ValueError when there is no
        such request.
        """
        if (arg, kind) not in self.requests:
            raise ValueError(f"no {kind} of {arg!r}; seen: {sorted(self.requests)}")
        found = []
        for site, rows in enumerate(self.requests[arg, kind][1]):
            rows = rows[:, rows[0] == warp]  # warp, epoch, position, request, lane, offset
            for number in np.unique(rows[3]):
                one = rows[:, rows[3] == number]
                found.append((one[1].min(), one[2].min(), site, number, one[4:].T.tolist()))
        found.sort(key=lambda each: each[:4])
        if not 0 <= request < len(found):
            raise ValueError(f"{request=}: warp {warp} made {len(found)} requests to {arg!r}")
        return {lane: offset for lane, offset in sorted(found[request][4])}

    def plot(self, arg: str, kind: str = "read", warp: int = 0, request: int = 0):
        """Draw one request: its lanes and the memory that they reach; see `plot.request`."""
        from labkit import plot

        return plot.request(self, arg, kind, warp, request)

    def _tables(self) -> list[list[tuple[str, ...]]]:
        """Tables of text cells: a header, then rows."""
        many = len({u.kernel for u in self.args}) > 1

        def cells(a: Access, *numbers: str) -> tuple[str, ...]:
            line = a.text if len(a.text) <= 60 else a.text[:59] + "…"
            return (f"{a.kernel} " * many + f"line {a.line}", f"{a.kind} {a.arg}", *numbers, line)

        uses = [
            (f"{u.kernel} " * many + u.arg, f"{u.elements:,}", f"{u.reads_per_element:.2f}",
             f"{u.writes_per_element:.2f}")
            for u in self.args
        ]  # fmt: skip
        outer = [
            cells(a, f"{a.sectors / a.requests:.1f}", f"{a.needed / a.requests:.1f}")
            for a in self.accesses if a.space == "global"
        ]  # fmt: skip
        inner = [cells(a, str(a.ways)) for a in self.accesses if a.space == "shared"]
        heads = (
            ("argument", "elements", "reads each", "writes each"),
            ("where", "global access", "sectors/request", "would do", "source"),
            ("where", "shared access", "bank ways", "source"),
        )
        return [[h, *rows] for h, rows in zip(heads, (uses, outer, inner), strict=True) if rows]

    def _title(self) -> str:
        what = ", ".join(filter(None, (self.name, self.setting)))
        return f"{what}: {'; '.join(self.launches)}" if what else "; ".join(self.launches)

    def _notes(self) -> list[str]:
        notes = [f"✗ {f}" for f in self.findings] or ["no findings"]
        if self.ledger_bytes:
            moved = f"{self.bytes:,} bytes loaded and stored"
            notes.insert(0, f"{moved}, {self.ratio:.2f} times the ledger's {self.ledger_bytes:,}")
        return notes

    def __str__(self) -> str:
        """Title, tables, findings."""
        lines = [self._title()]
        for table in self._tables():
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for row in table:
                cells = [c.rjust(w) if _number(c, h) else c.ljust(w)
                         for c, h, w in zip(row, table[0], widths, strict=True)]  # fmt: skip
                lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join([*lines, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same as HTML."""
        parts = [f"<p><b>{html.escape(self._title())}</b></p>"]
        for head, *rows in self._tables():
            top = "".join(f"<th>{html.escape(c)}</th>" for c in head)
            body = "".join(
                "<tr>" + "".join(f"<td>{_cell(c, h)}</td>" for c, h in zip(r, head, strict=True))
                + "</tr>" for r in rows
            )  # fmt: skip
            parts.append(f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>")
        return "\n".join([*parts, *(f"<pre>{html.escape(note)}</pre>" for note in self._notes())])


def _number(cell: str, head: str) -> bool:
    return head not in ("argument", "where", "global access", "shared access", "source")


def _cell(cell: str, head: str) -> str:
    text = html.escape(cell)
    return f"<code>{text}</code>" if head in ("argument", "source") else text


class NothingLaunched(ValueError):
    """What was run launched no Numba or Triton kernel."""


def lens(
    fn: Callable,
    problem: Problem | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    inputs: tuple | None = None,
    seed: int = 0,
    **size: int,
) -> LensReport:
    """Run a launcher once under the simulators and report what it did to memory.

    `fn` is a Rung or a launcher of Numba or Triton kernels. Its arguments are `inputs`, or
    `problem.inputs(dtype, seed, **size)`; without a size, the largest of `problem.test_sizes`.
    Keep it under about 2,000 threads: the simulator runs one OS thread for each.

    It works on copies of the inputs. On a GPU it runs in another process, under the simulators.

    Errors: ValueError for a launcher of raw CUDA, or one that launches nothing (NothingLaunched),
    or when neither `problem` nor `inputs` is given; LensUnavailable where the simulators lack the
    hooks; what the launcher itself raises.
    """
    launcher, name = getattr(fn, "fn", fn), getattr(fn, "__name__", getattr(fn, "name", "kernel"))
    kinds = {getattr(fn, "kind", None), *(k.kind for k in kernels_of(launcher))}
    if "cuda" in kinds:
        raise ValueError(f"{name} launches CUDA C++: the lens needs Numba or Triton kernels")
    setting, ledger = "", None
    if inputs is None:
        if problem is None:
            raise ValueError(f"lens({name}) needs a problem or inputs")
        size = size or max(problem.test_sizes, key=lambda s: np.prod([*s.values()]))
        inputs = problem.inputs(dtype, seed, **size)
    if problem is not None and size:
        ledger = problem.work(dtype, **size).bytes
        setting = ", ".join(
            [str(dtype).removeprefix("torch."), *(f"{k}={v}" for k, v in size.items())]
        )
    run = _here if SIMULATED else _elsewhere
    return replace(run(launcher, _copies(inputs)), name=name, setting=setting, ledger_bytes=ledger)


def _here(launcher: Callable, inputs: tuple) -> LensReport:
    with trace() as t:
        try:
            results = outputs(launcher(*inputs))
        except Exception:
            report = t.report()
            if report.findings:  # they are the cause: an index read out of bounds, say
                return report
            raise
    if not t.launches:
        for hooks in (numba_hooks, triton_hooks):
            hooks()  # LensUnavailable, if that is why nothing was seen
        name = getattr(launcher, "__name__", launcher)
        raise NothingLaunched(
            f"{name} launched no Numba or Triton kernel: the lens has nothing to show"
        )
    writers = tuple(_writers(t, r) for r in results if isinstance(r, torch.Tensor))
    return replace(t.report(), writers=writers)


def _writers(trace: Trace, result: torch.Tensor) -> dict[int, str]:
    """Who wrote each element of a small result last, by its flat index."""
    if not result.is_contiguous() or result.numel() > SMALL:
        return {}
    start, size, found = result.data_ptr(), result.element_size(), {}
    writes = np.array([s.kind != "read" for s in trace.sites] or [False])
    base = np.array([trace.arrays[s.array].storage if s.array >= 0 else 0 for s in trace.sites])
    for launch in trace.launches:
        rows = launch.rows()
        index = (base[rows.site] + rows.offset - start) // size
        hit = np.flatnonzero(writes[rows.site] & (index >= 0) & (index < result.numel()))
        for i in hit.tolist():
            found[int(index[i])] = launch.who(int(rows.block[i]), int(rows.lane[i]))
    return found


def _elsewhere(launcher: Callable, inputs: tuple) -> LensReport:
    """Trace in a process that runs the simulators."""
    text, name = portable(launcher)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "under_the_lens.py").write_text(text)
        torch.save((name, inputs), Path(folder) / "call.pt")
        switches = {"LABKIT_DEVICE": "sim", "NUMBA_ENABLE_CUDASIM": "1", "TRITON_INTERPRET": "1"}
        path = os.pathsep.join([folder, *filter(None, sys.path)])
        child = subprocess.run(
            [sys.executable, "-c", f"from labkit.lens import _child; _child({folder!r})"],
            env={**os.environ, **switches, "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        answer = Path(folder) / "report.pickle"
        if not answer.exists():
            raise RuntimeError(f"the lens's process failed:\n{child.stderr[-2000:]}")
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def _child(folder: str) -> None:
    """The other process: run the call in `folder`, and leave a report or an exception there."""
    name, inputs = torch.load(Path(folder) / "call.pt", weights_only=False)
    try:
        module = __import__("under_the_lens")
        launcher = getattr(module, name)
        result = _here(getattr(launcher, "fn", launcher), inputs)
        answer = pickle.dumps(result)
    except Exception as e:
        try:
            answer = pickle.dumps(e)
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps(RuntimeError(f"{type(e).__name__}: {e}"))
    (Path(folder) / "report.pickle").write_bytes(answer)


def _copies(inputs: tuple) -> tuple:
    """Copies on the CPU: the same strides and places in their allocations, shared where shared."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value):
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.detach().untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.cpu() if value.is_cuda else storage.clone()
        same = torch.empty(0, dtype=value.dtype)
        there = storages[storage.data_ptr()]
        return same.set_(there, value.storage_offset(), value.size(), value.stride())

    return tuple(map(copy, inputs))
