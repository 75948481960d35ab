"""Every chapter as it is committed: its form, its size, and where its numbers come from."""

import labkit as lab
from labkit.sync import notebooks

import base64
import re
import statistics
from functools import cache
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
FILES = [chapter["file"] for part in TOC["parts"] for chapter in part["chapters"]]
CHAPTERS = [file.removeprefix("chapters/") for file in FILES if file.startswith("chapters/")]

INTRO = ROOT / "book" / "intro.md"
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELLS = (45, 75)
WORDS = (1500, 3000)
CODE_LINES_MEDIAN, CODE_LINES_MAX = 8, 60
PNG_BYTES, NOTEBOOK_BYTES = 60_000, 300_000
ALT_CHARACTERS = 250
FROM_RESULTS = ("lab.say(", "LADDER.table(", "LADDER.plot(", "Table(", "DECODE.table(")
FROM_RESULTS += ("LADDER.bars(", "LADDER.attempts(", "DECODE.plot(")
FROM_RESULTS += ("ledger.table(", "ledger.figure(", "dispatch.table(")
MEASURED = re.compile(r"\d\s*((µs|us|ns|ms|GB/s|TB/s)\b|[GT]FLOP)")
# Written by tools into a cell's metadata at every run: noise in every diff.
NOISE = {"execution", "ExecuteTime", "collapsed", "scrolled", "vscode", "colab"}

each_chapter = pytest.mark.parametrize("chapter", CHAPTERS)


def path_of(chapter: str) -> Path:
    return ROOT / "chapters" / f"{chapter}.ipynb"


@cache
def read(chapter: str):
    return nbformat.read(path_of(chapter), as_version=4)


def code_cells(chapter: str) -> list:
    return [cell for cell in read(chapter).cells if cell.cell_type == "code"]


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def printed(cell) -> str:
    """The text of a cell's outputs, except what nbval never compares."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name != "stderr":
            texts.append(output.text)
        for mime, data in output.get("data", {}).items():
            if mime.startswith("text/"):
                texts.append(data)
    return "\n".join(texts)


def where(chapter: str, cell) -> str:
    return f"{chapter}, cell {read(chapter).cells.index(cell) + 1}: {cell.source[:60]!r}"


def test_every_chapter_is_in_the_book_in_order():
    committed = [path.stem for path in notebooks()]
    assert committed == CHAPTERS


@each_chapter
def test_one_slug_keys_notebook_solution_results_and_page(chapter):
    number, slug = chapter.split("_", 1)
    assert path_of(chapter).is_file()
    solution = ROOT / "solutions" / slug
    assert solution.with_suffix(".py").is_file() or (solution / "__init__.py").is_file()
    assert (ROOT / "book" / "results" / "h200" / f"{slug}.json").is_file()
    # The site shows no page numbers of its own: the title carries the file's.
    assert read(chapter).cells[0].source.startswith(f"# {number} · ")


@each_chapter
def test_form_is_canonical(chapter):
    """What `nbformat.write` writes, so that a diff shows only what somebody changed."""
    text = path_of(chapter).read_text(encoding="utf-8")
    notebook = read(chapter)
    nbformat.validate(notebook)
    assert text == nbformat.writes(notebook) + "\n"
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert set(notebook.metadata) <= {"kernelspec", "language_info", "labkit"}
    assert notebook.metadata.kernelspec == KERNELSPEC
    assert notebook.metadata.language_info.name == "python"
    assert notebook.metadata.language_info.pygments_lexer == "ipython3"
    for cell in notebook.cells:
        assert not NOISE & set(cell.metadata), where(chapter, cell)


@each_chapter
def test_cells_ran_once_from_top_to_bottom(chapter):
    counts = [cell.execution_count for cell in code_cells(chapter)]
    assert counts == list(range(1, len(counts) + 1))
    for cell in code_cells(chapter):
        assert cell.source.strip(), "an empty cell"
        assert "raises-exception" not in tags(cell), where(chapter, cell)
        errors = [o.ename for o in cell.outputs if o.output_type == "error"]
        assert not errors, where(chapter, cell)


@each_chapter
def test_outputs_are_those_of_the_device_that_was_recorded(chapter):
    device = lab.results(chapter.split("_", 1)[1]).data["device"]["name"]
    told = [o.text for cell in code_cells(chapter)[:1] for o in cell.outputs]
    assert told
    assert told[0].startswith(f"kernels run here on: {device}\n")


@each_chapter
def test_figures_have_alt_text_and_stay_small(chapter):
    figures = 0
    for cell in code_cells(chapter):
        for output in cell.outputs:
            assert "image/svg+xml" not in output.get("data", {}), "SVG has random ids: use PNG"
            if "image/png" not in output.get("data", {}):
                continue
            figures += 1
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert 0 < len(alt.strip()) <= ALT_CHARACTERS, where(chapter, cell)
            png = base64.b64decode(output.data["image/png"])
            assert len(png) <= PNG_BYTES, where(chapter, cell)
    assert figures, "a chapter without a figure"
    assert path_of(chapter).stat().st_size <= NOTEBOOK_BYTES


@each_chapter
def test_length_is_a_chapter(chapter):
    cells = read(chapter).cells
    assert CELLS[0] <= len(cells) <= CELLS[1], f"{len(cells)} cells"
    lines = [
        sum(1 for line in cell.source.splitlines() if line.strip()) for cell in code_cells(chapter)
    ]
    assert statistics.median(lines) <= CODE_LINES_MEDIAN
    assert max(lines) <= CODE_LINES_MAX
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    prose = re.sub(r"^(`{3,}).*?^\1", "", prose, flags=re.DOTALL | re.MULTILINE)  # directives, code
    words = len(re.findall(r"\w[\w'’-]*", prose))
    assert WORDS[0] <= words <= WORDS[1], f"{words} words"


@each_chapter
def test_measured_numbers_are_tagged_and_something_is_compared(chapter):
    for cell in code_cells(chapter):
        if any(word in cell.source for word in FROM_RESULTS):
            continue  # the results file fixes what it shows, so it must be compared
        if "device-output" not in tags(cell):
            found = MEASURED.search(printed(cell))
            assert not found, f"{found.group(0)} without the tag device-output: " + where(
                chapter, cell
            )
    assert any(
        printed(cell).strip() and not tags(cell) & {"device-output", "gpu-only"}
        for cell in code_cells(chapter)
    ), "no cell whose output is compared"


@each_chapter
def test_it_was_recorded_on_the_h200(chapter):
    assert any("H200" in printed(cell) for cell in code_cells(chapter))


def test_introduction_says_what_is_finished():
    rows = INTRO.read_text(encoding="utf-8").splitlines()
    here = [row for row in rows if row.endswith("| here |")]
    assert len(here) == len(CHAPTERS)
    for row, chapter in zip(here, CHAPTERS, strict=True):
        assert f"](../chapters/{chapter}.ipynb)" in row
