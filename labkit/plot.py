"""Pictures: the four charts of a chapter, the lens pictures, the scorecard. One style.

Each picture carries one message, its title, with the number in it. Series are labelled where they
are, not in a legend; a ceiling is a line; bars start at 0. Every function returns a `Picture`,
which a notebook shows as a PNG.
"""

from __future__ import annotations

from labkit.check import listed
from labkit.ladder import Ladder
from labkit.lens import BANK, BANKS, SECTOR, WARP, LensReport
from labkit.problem import Problem
from labkit.results import Results, Timing, microseconds, percent

import io
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 6.2, 3.2  # inches: labels stay readable on a phone
DPI = 113
ACCENT, RUNG, GREY, CEILING = "#c2410c", "#1d4ed8", "#6b7280", "#111827"
WASTE = "#fdba74"  # memory that a request touches
COLORS = 64  # of a picture's palette: a third of the bytes, and no difference to the eye


@dataclass(frozen=True)
class Picture:
    """A finished figure. Its text form is its title, so stored outputs can be compared."""

    figure: object
    title: str

    def png(self) -> bytes:
        """The picture as PNG bytes."""
        from PIL import Image

        drawn, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, format="png", dpi=DPI, facecolor="white")
        image = Image.open(drawn).convert("RGB").quantize(COLORS)
        image.save(small, format="png", optimize=True)
        return small.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()

    def __repr__(self) -> str:
        """The title."""
        return f"[picture: {self.title}]"


def new(title: str, height: float = HEIGHT) -> tuple[object, object]:
    """A figure and its axes in the book's style."""
    from matplotlib.figure import Figure  # not pyplot: no global state, nothing shown twice

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left", wrap=True)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _color(t: Timing, last: str) -> str:
    if t.kind in ("library", "peer"):
        return GREY
    return ACCENT if t.rung == last else RUNG


def _at(results: Results, problem: Problem, dtype: str, size: dict) -> list[Timing]:
    return [
        t
        for t in results.timings
        if t.problem == problem.name and t.dtype == dtype and dict(t.size) == size
    ]


def _dtype(problem: Problem) -> str:
    return str(problem.dtypes[0]).removeprefix("torch.")


def ladder(chapter: Ladder, results: Results) -> Picture:
    """Useful bandwidth of every rung, the library and the peers at `bench_size`."""
    rows = []
    for problem in chapter.problems:
        rows += _at(results, problem, _dtype(problem), dict(problem.bench_size))
    last = chapter.rungs[-1].name
    first, final = (next(t for t in rows if t.rung == chapter.rungs[i].name) for i in (0, -1))
    title = (
        f"{final.rung} reaches {percent(final.fraction_of_ceiling)} of the ceiling, "
        f"{first.rung} {percent(first.fraction_of_ceiling)}"
    )
    figure, axes = new(title, 0.8 + 0.26 * len(rows))
    labels = [t.rung for t in rows]
    axes.barh(
        range(len(rows)), [t.bandwidth / 1e12 for t in rows], color=[_color(t, last) for t in rows]
    )
    axes.set_yticks(range(len(rows)), labels)
    for tick, t in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_color(_color(t, last))
    bound = chapter.problem.ceiling
    ceiling = results.ceilings[f"{bound}_bytes_per_s"] / 1e12
    for i, t in enumerate(rows):
        end = t.bandwidth / 1e12
        near = end > 0.7 * ceiling  # inside the bar, clear of the ceiling's line
        at = min(end, 0.98 * ceiling) if near else end
        axes.text(at, i, f" {microseconds(t.p50_s)} ", va="center", fontsize=8,
                  ha="right" if near else "left", color="white" if near else CEILING)  # fmt: skip
    axes.axvline(ceiling, color=CEILING, lw=1, ls="--")
    axes.text(
        ceiling, len(rows) - 0.4, f"{bound} {ceiling:.2f} ", ha="right", va="center", fontsize=7
    )
    axes.set_ylim(len(rows) - 0.1, -0.6)
    axes.set_xlim(0, ceiling * 1.22)
    axes.set_xlabel(
        f"useful bandwidth, TB/s ({rows[0].dtype}, {_size(rows[0])})", fontsize=8, loc="right"
    )
    return Picture(figure, title)


def _size(t: Timing) -> str:
    return ", ".join(f"{k}={v:,}" for k, v in t.size.items())


def sweep(problem: Problem, results: Results, names: Sequence[str] = ()) -> Picture:
    """% of the ceiling over size, for the last rung (or `names`), the library and the peers."""
    dtype = _dtype(problem)
    rows = [t for t in results.timings if t.problem == problem.name and t.dtype == dtype]
    rungs = [t.rung for t in rows if t.kind not in ("library", "peer")]
    names = list(names) or [rungs[-1]]
    peers = list(dict.fromkeys(t.rung for t in rows if t.kind in ("library", "peer")))
    sizes = sorted({tuple(t.size.items()) for t in rows}, key=lambda s: _bytes(rows, s))
    best = max((t for t in rows if t.rung == names[-1]), key=lambda t: t.fraction_of_ceiling)
    title = (
        f"{names[-1]} peaks at {percent(best.fraction_of_ceiling)} of the ceiling, at {_size(best)}"
    )
    figure, axes = new(title)
    ends = []
    for name in peers + names:
        line = [t for t in rows if t.rung == name]
        line.sort(key=lambda t: sizes.index(tuple(t.size.items())))
        xs = [sizes.index(tuple(t.size.items())) for t in line]
        ys = [100 * t.fraction_of_ceiling for t in line]
        mine = name in names
        color = ACCENT if name == names[-1] else RUNG if mine else GREY
        axes.plot(xs, ys, color=color, lw=2 if mine else 1, marker="o", ms=3)
        ends.append((ys[-1], name, color))
    for y, name, color in _spread(ends, 7.0, 103):
        axes.text(len(sizes) - 0.8, y, name, color=color, fontsize=8, va="center")
    axes.axhline(100, color=CEILING, lw=1, ls="--")
    axes.set_xlim(-0.3, len(sizes) + 2.2)
    axes.set_ylim(0, max(105, axes.get_ylim()[1]))
    ticks = ["×".join(_short(v) for _, v in s) for s in sizes]
    axes.set_xticks(range(len(sizes)), ticks, rotation=40, ha="right")
    axes.set_ylabel("% of the ceiling", fontsize=8)
    axes.set_xlabel(f"{' × '.join(k for k, _ in sizes[0])} ({dtype})", fontsize=8)
    return Picture(figure, title)


def _bytes(rows: list[Timing], size: tuple) -> tuple:
    return next(t.bytes for t in rows if tuple(t.size.items()) == size), size


def _short(n: int) -> str:
    for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if n >= unit and n % unit == 0:
            return f"{n // unit}{name}"
    return str(n)


def _spread(ends: list[tuple], gap: float, top: float) -> list[tuple]:
    """Labels moved apart until none overlaps the next, and none is above `top`."""
    placed, limit = [], top
    for y, name, color in sorted(ends, reverse=True):
        placed.append((min(y, limit), name, color))
        limit = placed[-1][0] - gap
    return placed


def roofline(chapter: Ladder, results: Results) -> Picture:
    """Every rung as a point under the bandwidth and arithmetic ceilings, log-log."""
    rows = [
        t
        for problem in chapter.problems
        for t in _at(results, problem, _dtype(problem), dict(problem.bench_size))
        if t.kind not in ("library", "peer")
    ]
    bound = chapter.problem.ceiling
    rate = results.ceilings[f"{bound}_bytes_per_s"]
    flops = results.ceilings["flops"]
    peak = flops.get(rows[0].dtype, flops["float32"])
    intensity = rows[-1].flops / rows[-1].bytes
    ridge = peak / rate
    title = (
        f"{intensity:.2g} FLOP per byte: {ridge / intensity:,.0f} times too few "
        "to leave the bandwidth slope"
    )
    figure, axes = new(title)
    xs = [intensity / 8, ridge, ridge * 8]
    axes.plot(xs, [min(peak, rate * x) / 1e12 for x in xs], color=CEILING, lw=1)
    label = f"{peak / 1e12:.0f} TFLOP/s"
    axes.text(ridge * 8, peak / 1e12, label, ha="right", va="bottom", fontsize=8)
    middle = (intensity * ridge) ** 0.5
    label = f"{bound} {rate / 1e12:.2f} TB/s"
    axes.text(middle, rate * middle / 1e12 * 1.4, label, ha="right", fontsize=8)
    last = chapter.rungs[-1].name
    for t in rows:
        x, y = t.flops / t.bytes, t.flops / t.p50_s / 1e12
        axes.plot([x], [y], "o", color=_color(t, last), ms=5)
    floor = 0.0
    for t in sorted(rows, key=lambda t: t.flops / t.p50_s):
        x, y, name, color = t.flops / t.bytes, t.flops / t.p50_s / 1e12, t.rung, _color(t, last)
        at = max(y, floor * 1.55)
        floor = at
        axes.annotate(name, (x, y), (x * 1.5, at), color=color, fontsize=8, va="center",
                      arrowprops={"arrowstyle": "-", "lw": 0.4, "color": color})  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of the ledger", fontsize=8)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    return Picture(figure, title)


def dtypes(problem: Problem, results: Results) -> Picture:
    """% of the ceiling of every rung and the library, for each dtype at `bench_size`."""
    size = dict(problem.bench_size)
    names = [str(d).removeprefix("torch.") for d in problem.dtypes]
    groups = {n: _at(results, problem, n, size) for n in names}
    labels = list(dict.fromkeys(t.rung for ts in groups.values() for t in ts))
    last = [t.rung for t in groups[names[0]] if t.kind not in ("library", "peer")][-1]
    low = min(t.fraction_of_ceiling for ts in groups.values() for t in ts if t.rung == last)
    title = f"{last}: at least {percent(low)} of the ceiling in {listed(names)}"
    figure, axes = new(title, 0.9 + 0.24 * len(labels))
    marks = {0: "o", 1: "s", 2: "D", 3: "^"}
    for j, name in enumerate(names):
        for t in groups[name]:
            i = labels.index(t.rung)
            axes.plot([100 * t.fraction_of_ceiling], [i], marks[j], color=_color(t, last),
                      ms=6, mfc="white" if j else _color(t, last))  # fmt: skip
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.axvline(100, color=CEILING, lw=1, ls="--")
    axes.set_xlim(0, max(105, axes.get_xlim()[1]))
    axes.grid(axis="y", lw=0.3)
    key = "   ".join(f"{symbol} {name}" for symbol, name in zip("●□◇△", names, strict=False))
    shape = ", ".join(f"{k}={v:,}" for k, v in size.items())
    axes.set_xlabel(f"% of the ceiling ({shape});   {key}", fontsize=8, loc="right")
    return Picture(figure, title)


def request(
    report: LensReport, arg: str, kind: str = "read", warp: int = 0, request: int = 0
) -> Picture:
    """Draw one request: its lanes on top, below them the memory that they reach, and lines between.

    Global memory is drawn as 32-byte sectors, the touched ones filled, with the bytes that lanes
    want in blue; shared memory as 32 banks, filled where lanes want different words of one bank.
    ValueError when there is no such request.
    """
    from matplotlib.patches import Rectangle

    lanes, itemsize = report.pattern(arg, kind, warp, request), report.requests[arg, kind][0]
    shared = any(a.arg == arg and a.space == "shared" for a in report.accesses)
    verb = {"read": "load", "write": "store"}.get(kind, kind)
    if shared:
        cells = {bank: float(bank) for bank in range(BANKS)}
        words = {
            bank: {o // BANK for o in lanes.values() if o // BANK % BANKS == bank} for bank in cells
        }
        ways = max(map(len, words.values()))
        filled = [bank for bank in cells if len(words[bank]) > 1]
        title = f"One warp's {verb} is a {ways}-way bank conflict" if ways > 1 else (
            f"One warp's {verb} has no bank conflict")  # fmt: skip
        below = f"{arg}: {BANKS} banks of {BANK} bytes"
        ends = {lane: o // BANK % BANKS + 0.5 for lane, o in lanes.items()}
    else:
        filled = sorted({b // SECTOR for o in lanes.values() for b in (o, o + itemsize - 1)})
        fewest = -(-len(set(lanes.values())) * itemsize // SECTOR)
        verdict = f"{fewest} would do" if len(filled) > fewest else "no fewer would do"
        plural = "s" * (len(filled) > 1)
        title = f"One warp's {verb} touches {len(filled)} sector{plural}; {verdict}"
        below = f"{arg}: sectors of {SECTOR} bytes"
        span = range(filled[0], filled[-1] + 1)
        shown = list(span) if len(span) <= 2 * WARP else filled  # far apart: only the touched
        cells, x = {}, 0.0
        for before, sector in zip([None, *shown], shown, strict=False):
            x += 0.5 * (before is not None and sector > before + 1)  # a gap is half a sector wide
            cells[sector], x = x, x + 1
        ends = {
            n: cells[o // SECTOR] + (o % SECTOR + itemsize / 2) / SECTOR for n, o in lanes.items()
        }
    scale = WARP / (max(cells.values()) + 1)
    figure, ax = new(title, 2.4)
    for cell, x in cells.items():
        color = WASTE if cell in filled else "white"
        ax.add_patch(
            Rectangle((x * scale, 0), scale, 0.5, facecolor=color, edgecolor="#555555", lw=0.6)
        )
        if x and cell - 1 not in cells:
            ax.text((x - 0.25) * scale, 0.22, "…", ha="center", va="center", fontsize=7)
    for lane in range(WARP):
        color = RUNG if lane in lanes else "#d1d5db"
        ax.add_patch(Rectangle((lane + 0.1, 2), 0.8, 0.5, facecolor=color))
        if lane not in lanes:
            continue
        ax.plot([lane + 0.5, ends[lane] * scale], [2, 0.5], color=RUNG, lw=0.7)
        if not shared:  # what the lane wants of its sector; the rest of the sector is waste
            width = itemsize / SECTOR * scale
            corner = ends[lane] * scale - width / 2
            ax.add_patch(Rectangle((corner, 0.08), width, 0.34, facecolor=RUNG))
    ax.text(0, 2.6, f"{WARP} lanes of one warp", fontsize=8)
    ax.text(0, -0.12, below, fontsize=8, va="top")
    ax.set(xlim=(-0.2, WARP + 0.2), ylim=(-0.6, 3))
    ax.axis("off")
    return Picture(figure, title)


def scorecard(rows: list[tuple[str, Timing, Timing]]) -> Picture:
    """One bar for each operation: % of the ceiling, with the best peer marked."""
    won = sum(mine.p50_s <= 1.01 * peer.p50_s for _, mine, peer in rows)
    title = f"{won} of {len(rows)} operations are as fast as the fastest peer, or faster (to 1 %)"
    figure, axes = new(title, 1.0 + 0.32 * len(rows))
    for i, (_, mine, peer) in enumerate(rows):
        axes.barh([i], [100 * mine.fraction_of_ceiling], color=ACCENT, height=0.6)
        axes.plot([100 * peer.fraction_of_ceiling] * 2, [i - 0.4, i + 0.4], color=CEILING, lw=2)
        color = "white" if mine.fraction_of_ceiling > 0.1 else CEILING  # on the bar, or beside it
        axes.text(1, i, microseconds(mine.p50_s), color=color, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{name} ({m.dtype})" for name, m, _ in rows])
    axes.invert_yaxis()
    axes.axvline(100, color=CEILING, lw=1, ls="--")
    axes.set_xlim(0, 112)
    axes.set_xlabel("% of the measured ceiling; black mark: the fastest peer", fontsize=8)
    return Picture(figure, title)
