"""Notebook cells from the solutions, the one source: `python -m labkit.sync [--check]`.

A cell's metadata says what it shows of its chapter's solutions module:

    {"labkit": {"show": ["rms_norm_naive_kernel", "rms_norm_naive"]}}   whole definitions
    {"labkit": {"exercise": "rms_norm_tiled_kernel"}}                   signature and docstring
    {"labkit": {"hints": "rms_norm_tiled"}}                             folded hints (a text cell)
"""

from __future__ import annotations

from labkit.exercise import definition, skeleton
from labkit.results import ROOT

import importlib
import sys
from pathlib import Path

CHAPTERS = ROOT / "chapters"


def notebooks(folder: Path = CHAPTERS) -> list[Path]:
    """The chapters in order. Files named `_…` are drafts, like such modules of solutions."""
    return sorted(folder.glob("[0-9]*.ipynb"))


def slug_of(notebook: Path) -> str:
    """`chapters/03_rms_norm.ipynb` belongs to `rms_norm`."""
    return notebook.stem.partition("_")[2]


def cell_source(slug: str, metadata: dict) -> str | None:
    """What a cell with this metadata must contain; None if the solutions do not say."""
    marks = metadata.get("labkit", {})
    module = importlib.import_module(f"solutions.{slug}") if marks else None
    if "show" in marks:
        return "\n\n\n".join(definition(module, name) for name in marks["show"])
    if "exercise" in marks:
        return skeleton(module, marks["exercise"])
    if "hints" in marks:
        hints = module.LADDER.exercise(marks["hints"]).exercise.hints
        return "\n\n".join(
            f"<details><summary>Hint {n}</summary>\n\n{hint}\n\n</details>"
            for n, hint in enumerate(hints, 1)
        )
    return None


def sync(check: bool = False, folder: Path = CHAPTERS) -> list[str]:
    """Write the cells, or with `check` only list those that differ and solutions that leak."""
    import nbformat

    faults = []
    for path in notebooks(folder):
        notebook = nbformat.read(path, as_version=4)
        changed = False
        for number, cell in enumerate(notebook.cells):
            source = cell_source(slug_of(path), cell.metadata)
            if source is not None and cell.source != source:
                faults.append(f"{path.name}, cell {number}: differs from solutions")
                cell.source, changed = source, True
        faults += _leaks(path, notebook)
        if changed and not check:
            nbformat.write(notebook, path)
    return faults if check else [f for f in faults if "leaks" in f]


def _leaks(path: Path, notebook) -> list[str]:
    """Cells that give an exercise's answer away: they define a function that is an exercise."""
    asked = {
        c.metadata["labkit"]["exercise"]
        for c in notebook.cells
        if "exercise" in c.metadata.get("labkit", {})
    }
    return [
        f"{path.name}, cell {number}: leaks the solution of {name}"
        for number, cell in enumerate(notebook.cells)
        if "exercise" not in cell.metadata.get("labkit", {})
        for name in asked
        if f"def {name}(" in cell.source
    ]


def main(arguments: list[str]) -> int:
    """Exit code 1 when `--check` finds a difference."""
    faults = sync(check="--check" in arguments)
    for fault in faults:
        print(fault)
    if faults:
        print("run `make sync`" if "--check" in arguments else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
