"""What notebooks show besides pictures: prose with measured numbers in it, and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

NUMBER = re.compile(r"[-\d.,]+ ?(µs|%|[TG]?B(/s)?)?")


@dataclass(frozen=True)
class Prose:
    """Markdown text; a notebook renders it like the cells around it."""

    text: str

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        """The text itself."""
        return self.text


def say(text: str) -> Prose:
    """Prose whose numbers come from the results: `say(f"Rung 1 takes {lab.microseconds(t)}.")`."""
    return Prose(text)


@dataclass(frozen=True)
class Table:
    """A small table. Columns of numbers, with or without a unit, are aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        """Aligned text."""
        table = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        lines = [self._line(row, widths) for row in table]
        lines.insert(1, "─" * max(map(len, lines)))
        return "\n".join(lines)

    def _right(self, column: int) -> bool:
        cells = [r[column] for r in self.rows if r[column] not in ("", "–")]
        return bool(cells) and all(NUMBER.fullmatch(c) for c in cells)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = [
            c.rjust(w) if self._right(i) else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    def _repr_html_(self) -> str:
        def cell(tag: str, i: int, text: str) -> str:
            align = ' style="text-align:right"' if self._right(i) else ""
            return f"<{tag}{align}>{escape(text)}</{tag}>"

        head = "".join(cell("th", i, c) for i, c in enumerate(self.columns))
        body = "".join(
            "<tr>" + "".join(cell("td", i, c) for i, c in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
