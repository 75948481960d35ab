"""Generated pages of the book: the scorecard from results, the bug gallery from mutants."""

from __future__ import annotations

from labkit import plot
from labkit.check import CheckFailed, check
from labkit.diagnose import BUGS
from labkit.exercise import Exercise, Mutant
from labkit.ladder import Ladder, ladders
from labkit.problem import Problem
from labkit.results import ROOT, Results, Timing, microseconds, percent, rate, results
from labkit.sync import notebooks, slug_of

import re
from collections.abc import Callable
from pathlib import Path

BOOK = ROOT / "book"
README = ROOT / "README.md"
BEGIN, END = "<!-- scorecard: begin -->", "<!-- scorecard: end -->"


def in_order() -> list[Ladder]:
    """The ladder of every chapter, in the order of the chapters."""
    known = {ladder.slug: ladder for ladder in ladders()}
    return [known[slug] for slug in map(slug_of, notebooks()) if slug in known]


def recorded() -> list[tuple[Ladder, Results]]:
    """Every ladder with recorded results on the device that the text quotes."""
    found = []
    for ladder in in_order():
        try:
            found.append((ladder, results(ladder.slug)))
        except FileNotFoundError:
            continue
    return found


def best_rows() -> list[tuple[Problem, Timing, Timing]]:
    """For each operation at its `bench_size`: the ladder's last rung and the fastest peer."""
    rows = []
    for ladder, measured in recorded():
        for problem in ladder.problems:
            mine = [r.name for r in ladder if ladder.problem_of(r) is problem][-1]
            dtype = str(problem.dtypes[0]).removeprefix("torch.")
            size = dict(problem.bench_size)
            peers = [
                t
                for t in measured.timings
                if t.problem == problem.name
                and t.kind in ("library", "peer")
                and t.dtype == dtype
                and dict(t.size) == size
            ]
            own = measured.timing(mine, dtype, **size)
            rows.append((problem, own, min(peers, key=lambda t: t.p50_s)))
    return rows


def scorecard_table() -> str:
    """The scorecard as a Markdown table."""
    lines = [
        "| operation | size | dtype | last rung | time | useful bandwidth | % of ceiling "
        "| fastest peer | its time |",
        "|:--|:--|:--|:--|--:|--:|--:|:--|--:|",
    ]
    for problem, mine, peer in best_rows():
        size = ", ".join(f"{k}={v:,}" for k, v in mine.size.items())
        cells = (
            problem.name,
            size,
            mine.dtype,
            f"`{mine.rung}`",
            microseconds(mine.p50_s),
            rate(mine.bandwidth),
            percent(mine.fraction_of_ceiling),
            peer.rung,
            microseconds(peer.p50_s),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bars_table() -> str:
    """Every bar, written before its measurement, and what was measured."""
    lines = ["| chapter | bar | measured | limit | met |", "|:--|:--|--:|--:|:--|"]
    for ladder, _ in recorded():
        lines += [f"| {' | '.join((ladder.slug, *row))} |" for row in ladder.bars().rows]
    return "\n".join(lines)


def scorecard_page() -> str:
    """`book/scorecard.md`."""
    (device,) = {m.data["device"]["name"] for _, m in recorded()}
    ran = f"{device}, {', '.join(sorted({m.data['date'] for _, m in recorded()}))}"
    return f"""# Scorecard

<!-- Generated from book/results by `lab scorecard`; do not edit. -->

Each line is one operation: its last rung at the size its chapter times, against the fastest of the
library, `torch.compile` and the other packages measured in the same run. Measured on {ran}.

The ceiling is the measured rate of a copy; for operations that write next to nothing, of a read;
and where arithmetic takes longer, of arithmetic. A call on a few kilobytes is bound by its start,
and its share is near zero: compare its time with the peer's.

```{{image}} _static/scorecard.png
:alt: For each operation a bar, the share of the ceiling reached, and a mark, the fastest peer.
:width: 100%
```

{scorecard_table()}

## The bars

A bar is written down before the first measurement. One that is missed stays here as missed; its
chapter says why, or that the reason is not known. Ratios of times are rounded to three digits.

{bars_table()}
"""


def said_to(ladder: Ladder, exercise: Exercise, mutant: Mutant) -> str:
    """What the checker says to a mutant."""
    rung = ladder.rung(exercise.rung_name)
    try:
        mutated = exercise.mutant(mutant.name, rung)
        check(mutated, ladder.problem_of(rung), gates=exercise.gates)
    except CheckFailed as failure:
        return str(failure)
    return "accepted: the checker is wrong"


def gallery_entry(mutant: Mutant, said: str) -> str:
    """One mutant: its class, its patch, and what the checker said."""
    changes = "\n".join(
        "\n".join(f"- {line}" for line in old.splitlines())
        + "\n"
        + "\n".join(f"+ {line}" for line in new.splitlines())
        for old, new in mutant.patches.items()
    )
    meaning = BUGS.get(mutant.bug, "")
    return (
        f"\n#### `{mutant.name}`: {mutant.bug}\n\n"
        + (f"{meaning[0].upper()}{meaning[1:]}.\n\n" if meaning else "")
        + f"```diff\n{changes}\n```\n\n"
        + f"````{{dropdown}} What the checker says\n```text\n{said}\n```\n````\n"
    )


def gallery_page(said: Callable[[Ladder, Exercise, Mutant], str] = said_to) -> str:
    """`book/bug_gallery.md`: every mutant, its patch, and what the checker says to it."""
    parts = [
        "# Bug gallery\n\n"
        "<!-- Generated from the mutants in solutions/ by `lab scorecard`; do not edit. -->\n\n"
        "Every exercise of the book ships with wrong versions of its own solution: one planted bug "
        "each. The tests demand that the checker rejects every one of them and names its class. "
        "This page shows them all: the change, and what the checker said under the simulators.\n\n"
        "Cover the class and guess it from the change. Then cover the change and guess it from the "
        "report.\n"
    ]
    for ladder in in_order():
        parts.append(f"\n## {ladder.slug}\n")
        for exercise in ladder.exercises:
            parts.append(f"\n### {exercise.rung_name}\n")
            parts += [gallery_entry(m, said(ladder, exercise, m)) for m in exercise.mutants]
    return "".join(parts)


def comparable(page: str) -> str:
    """A page without the digits that may differ between two versions of torch."""
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?|nan|inf", "#", page)


def readme_text(text: str) -> str:
    """README with the table between its markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{scorecard_table()}\n{END}{after}"


def write(gallery: bool = True) -> list[Path]:
    """Write the scorecard (page, picture, README's table) and the gallery."""
    written = [BOOK / "scorecard.md", BOOK / "_static" / "scorecard.png", README]
    written[0].write_text(scorecard_page())
    picture = plot.scorecard([(p.name, mine, peer) for p, mine, peer in best_rows()])
    written[1].write_bytes(picture.png())
    README.write_text(readme_text(README.read_text()))
    if gallery:
        written.append(BOOK / "bug_gallery.md")
        written[-1].write_text(gallery_page())
    return written
