"""Where the bytes and the microseconds of one token go, phase by phase.

    rows = ledger(step, context=512, rung="kernels")      # measured on a GPU
    table(rows), figure(rows)                             # from these, or from stored ones

Phases. `qkv`: norm and q, k, v (in layer 0 the embedding, too); `attention`: q/k-norm, rotation,
cache write, attention; `o`: projection and residual sum; `gate_up`: norm, projections, SwiGLU;
`down`: projection and residual sum; `head`: norm, logits, next token. Where one kernel adds the
residual and norms, it belongs to the phase of the sum. A step says where each begins; in a run of
its own, a kernel that does nothing is launched there: the profiler shows which kernels lie between.

Bytes are counted from shapes, at a context of so many keys in the cache: weights and gains once,
keys and values once and the new ones written, activations read and written. The floor is the
weights' and keys' time at the read ceiling. Activations are 0.1 % and stay in L2: not in the floor.

Time. torch's profiler gives the start and the end of each kernel. A kernel counts from its start,
or from the end of the kernel before it if that is later, to its own end. So what overlaps counts
once, to the kernel that ends first: with dependent launch, where kernels start early and wait, this
is what a phase adds to the clock. A step's time is measured apart, without the profiler. What it
has beyond the kernels is the row `gaps`: below zero, the profiler has slowed the kernels down.
"""

from __future__ import annotations

import labkit as lab
from labkit import plot
from labkit.bench import ceilings

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod

from .config import Qwen3Config
from .measure import SLOW_S, loop
from .step import PHASES, Step, kernels_of
from .weights import layer_names

OF_LAYER = {  # phase -> fields of Layer
    "qkv": ("input_norm", "q", "k", "v"),
    "attention": ("q_norm", "k_norm"),
    "o": ("o",),
    "gate_up": ("post_norm", "gate", "up"),
    "down": ("down",),
}
GAPS, ALL = "gaps", "all kernels"  # what no kernel takes; a step that names no phases
MARK = "ledger_mark_"  # and the phase: the name of a kernel
TOKENS, ROUNDS = 32, 9  # tokens of a timed loop, and loops
FEW = 4  # tokens of a step that takes longer than SLOW_S
SHADES = {  # phase -> colour of its parts of a bar, and of the number in them
    "qkv": ("#1d4ed8", "white"),
    "attention": (plot.ACCENT, "white"),
    "o": ("#93c5fd", plot.CEILING),
    "gate_up": ("#047857", "white"),
    "down": ("#6ee7b7", plot.CEILING),
    "head": ("#7c3aed", "white"),
    ALL: (plot.WASTE, plot.CEILING),
    GAPS: ("#d1d5db", plot.CEILING),
}


@dataclass(frozen=True)
class Row:
    """One phase of one token, all layers together: bytes, and seconds where they were measured."""

    rung: str
    context: int
    phase: str
    weights: int  # bytes
    kv: int
    activations: int
    floor_s: float | None  # of weights and kv; None without a ceiling
    measured_s: float | None  # None without a GPU


def bytes_of(config: Qwen3Config, context: int, itemsize: int) -> dict[str, tuple[int, int, int]]:
    """Phase -> bytes of weights, of keys and values, and of activations, for one token."""
    L, hidden, wide = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    H, H_kv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    V, qkv = config.vocab_size, (H + 2 * H_kv) * D
    numbers = {field: prod(shape) for field, (_, shape) in layer_names(config).items()}
    activations = {
        "qkv": hidden + qkv,
        "attention": qkv + H * D,
        "o": H * D + 2 * hidden,
        "gate_up": hidden + wide,
        "down": wide + 2 * hidden,
    }
    weights = {phase: L * sum(numbers[f] for f in fields) for phase, fields in OF_LAYER.items()}
    weights["head"] = (V + 1) * hidden
    moved = {phase: L * count for phase, count in activations.items()} | {"head": hidden + V}
    kv = {"attention": L * 2 * (context + 1) * H_kv * D}  # the new ones are written
    return {p: tuple(n * itemsize for n in (weights[p], kv.get(p, 0), moved[p])) for p in PHASES}


def ledger(
    step: Step, context: int, *, rung: str | None = None, read: float | None = None
) -> tuple[Row, ...]:
    """The phases of one token of `step` at a context of `context` keys, and the gaps.

    On a GPU, up to TOKENS tokens round that context are timed: the cache must have room for them,
    and holds theirs afterwards. The step is run as it is, captured or not. `read` is the read
    ceiling in bytes/s, by default this GPU's; `rung` names the step in tables. Without a GPU, times
    are None. A step that names no phases has all its kernels in one row.
    Weights are counted in the model's dtype. ValueError for a negative context, RuntimeError where
    the profiler sees nothing.
    """
    if context < 0:
        raise ValueError(f"{context=} must not be negative")
    gpu = step.position.is_cuda
    if read is None and gpu:
        read = ceilings()["read_bytes_per_s"]
    itemsize = step.model.embed.itemsize
    counted = bytes_of(step.model.config, context, itemsize)
    times = measured(step, context) if gpu else {}
    if ALL in times:
        counted = {ALL: tuple(map(sum, zip(*counted.values(), strict=True)))}
    counted[GAPS] = (0, 0, 0)
    return tuple(
        Row(
            rung or type(step).__name__,
            context,
            phase,
            *moved,
            (moved[0] + moved[1]) / read if read else None,
            times.get(phase),
        )
        for phase, moved in counted.items()
    )


def measured(step: Step, context: int) -> dict[str, float]:
    """Phase -> seconds of one token, with GAPS; ALL instead of the phases if they are not known."""
    slow = loop(step, 0, max(0, context - FEW // 2), FEW) > SLOW_S
    tokens = FEW if slow else TOKENS
    first = max(0, context - tokens // 2)  # so that the mean position is `context`
    took = statistics.median(loop(step, 0, first, tokens) for _ in range(ROUNDS))
    step.start(0, first)
    kernels = sorted(kernels_of(lambda: step.decode_many(tokens)))
    if not kernels:
        raise RuntimeError("torch's profiler saw no kernels: is CUPTI free for it?")
    seen = marked_run(step, first, tokens)
    if len(seen) == len(kernels):
        seen = [(*times, phase) for (*times, _), (*_, phase) in zip(kernels, seen, strict=True)]
    # Else torch chose other kernels in the two runs, and the times are those of the marked one.
    times = per_phase(seen, tokens)
    return {**times, GAPS: took - sum(times.values())}


def per_phase(kernels: Iterable[tuple[float, float, str]], tokens: int) -> dict[str, float]:
    """Phase -> seconds of one token, from start, end (in µs) and phase of the kernels of many."""
    kernels = sorted(kernels)
    known = all(phase in PHASES for *_, phase in kernels)
    times, done = dict.fromkeys(PHASES if known else (ALL,), 0.0), 0.0
    for start, end, phase in kernels:
        times[phase] += max(0.0, end - max(start, done)) * 1e-6 / tokens
        done = max(done, end)
    return times


def marked_run(step: Step, first: int, tokens: int) -> list[tuple[float, float, str]]:
    """Start and end in µs, and phase, of the kernels of `tokens` tokens from position `first` on.

    The phase is ALL if the step names none.
    """
    marks = {p: lab.cuda_kernel(f"__global__ void {MARK}{p}() {{}}", MARK + p) for p in PHASES}
    graph, named = step.graph, set()

    def mark(phase: str) -> None:
        named.add(phase)
        marks[phase][1, 1]()

    def run() -> None:
        for _ in range(tokens):
            marks[PHASES[0]][1, 1]()  # a step may look the embedding up before it names a phase
            step.decode_many(1)

    step.marker = mark
    try:
        step.start(0, first)
        if graph is not None:
            step.capture()  # another graph, with the marks in it
        kernels = kernels_of(run)
    finally:
        step.marker, step.graph = None, graph
    between = between_marks(kernels)
    return between if named else [(start, end, ALL) for start, end, _ in between]


def between_marks(kernels: Iterable[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Each kernel but the marks, with the phase of the last mark before it instead of its name."""
    found, phase = [], PHASES[0]
    for start, end, name in sorted(kernels):
        if MARK in name:
            phase = next(p for p in PHASES if MARK + p in name)
        else:
            found.append((start, end, phase))
    return found


# What a notebook shows -------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> lab.Table:
    """Bytes, floor and time of each phase, and their sum, for each rung."""
    lines = []
    for (rung, context), part in rungs_of(rows).items():
        for row in [*part, total(part)]:
            moved = row.weights, row.kv, row.activations
            size = (f"{n / 1e6:,.2f} MB" if n else "–" for n in moved)
            took = (lab.microseconds(s) if s else "–" for s in (row.floor_s, row.measured_s))
            lines.append((rung, f"{context:,}", row.phase, *size, *took))
    columns = ("rung", "context", "phase", "weights", "KV", "activations", "floor", "time")
    return lab.Table(columns, tuple(lines))


def recorded(steps: Iterable[tuple[str, Step]], context: int, log: Callable = print) -> list[dict]:
    """The ledgers of several steps, each with its rung's name, as the results keep them."""
    rows: list[Row] = []
    for rung, step in steps:
        own = ledger(step, context, rung=rung)
        log(f"  ledger {rung}: {lab.microseconds(total(own).measured_s)} a token")
        rows += own
    return [asdict(row) for row in rows]


def rungs_of(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rung and context -> its rows, in order."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.rung, row.context), []).append(row)
    return groups


def total(rows: Sequence[Row]) -> Row:
    """The sum of a rung's rows: one token. None where a time is missing."""

    def added(name: str):
        values = [getattr(row, name) for row in rows]
        return None if None in values else sum(values)

    names = ("weights", "kv", "activations", "floor_s", "measured_s")
    return Row(rows[0].rung, rows[0].context, "one token", *map(added, names))


def figure(rows: Sequence[Row]) -> plot.Picture:
    """A bar for each rung, whose parts are the shares of phases and gaps; ▾ marks its floor.

    Above them, the shares of the floor itself, with the bytes that make it: those of the last rung.
    From measured rows. ValueError where there is no time to draw.
    """
    groups, bars = rungs_of(rows), []  # of a bar: name, what its end says, floor, parts
    contexts = {context for _, context in groups}
    for (rung, context), part in groups.items():
        one = total(part)
        if one.measured_s is None or one.floor_s is None:
            raise ValueError(f"rung {rung!r} at {context} keys has no measured time to draw")
        name = rung if len(contexts) == 1 else f"{rung}, {context:,} keys"
        parts = [(row.phase, row.measured_s, lab.microseconds(row.measured_s)) for row in part]
        bars.append((name, lab.microseconds(one.measured_s), one.floor_s, parts))
    read = [(r.phase, r.floor_s, f"{(r.weights + r.kv) / 1e6:,.0f} MB") for r in part]
    bars.insert(0, ("floor, by bytes", lab.microseconds(one.floor_s), None, read))
    title = (
        f"{one.rung}: {lab.microseconds(one.measured_s)} a token, "
        f"and its bytes need {lab.percent(one.floor_s / one.measured_s)} of that"
    )
    drawing, axes = plot.new(title, 1.1 + 0.36 * len(bars))
    for i, (_, end, floor, parts) in enumerate(bars):
        whole, left = sum(max(0.0, seconds) for _, seconds, _ in parts), 0.0
        for phase, seconds, number in parts:
            share, (color, ink) = max(0.0, seconds) / whole, SHADES[phase]
            axes.barh([i], [share], left=left, color=color, height=0.66)
            if share > 0.018 * len(number):  # there is room for it
                at = left + share / 2
                axes.text(at, i, number, ha="center", va="center", fontsize=7, color=ink)
            left += share
        if floor is not None:
            axes.plot([floor / whole], [i - 0.44], "v", ms=5, color=plot.CEILING)
        axes.text(1.01, i, end, va="center", fontsize=8)
    seen, left = {phase for *_, parts in bars for phase, *_ in parts}, 0.0
    for phase, (color, _) in SHADES.items():  # over the bars, in their order
        if phase in seen:
            axes.text(left, -0.85, "■", color=color, fontsize=10, va="center")
            axes.text(left + 0.042, -0.85, phase, fontsize=8, va="center")
            left += 0.08 + 0.017 * len(phase)
    axes.text(left, -0.85, "▾ floor", fontsize=8, va="center")
    where = f", {contexts.pop():,} keys" if len(contexts) == 1 else ""
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.set_ylim(len(bars) - 0.5, -1.2)
    axes.set_xlim(0, 1.16)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel(f"share of a token's time{where}", fontsize=8)
    return plot.Picture(drawing, title)
