"""Take the leading _ from drafts, which are chapters that were not recorded yet.

    python solutions/_tuning/promote.py 08_gemv 10_decode_attention

Moves module and notebook, and changes imports, _toc.yml and the row in book/intro.md. Then come
`ruff check --fix`, `ruff format` and `python -m labkit.sync`. Commit before: git takes it back.
"""

import re
import subprocess
import sys
from pathlib import Path

PARTS = {"08": "Part II. Matrices", "10": "Part III. Attention", "11": "Part III. Attention"}
PARTS |= {"21": "Part V. Whole models"}


def edit(path, *pairs) -> None:
    """Replace patterns in a file."""
    text = Path(path).read_text()
    for pattern, new in pairs:
        text = re.sub(pattern, new, text)
    Path(path).write_text(text)


for name in sys.argv[1:]:
    number, slug = name.split("_", 1)
    module = "" if Path(f"solutions/_{slug}").is_dir() else ".py"
    for draft in (f"solutions/_{slug}{module}", f"chapters/_{name}.ipynb"):
        subprocess.run(["git", "mv", draft, draft.replace("/_", "/")], check=True)
    files = subprocess.run(["git", "ls-files", "*.py", "*.ipynb"], capture_output=True, text=True)
    for file in files.stdout.split():
        if Path(file).name != "promote.py":
            edit(
                file,
                (rf"import _{slug} as {slug}\b", f"import {slug}"),
                (rf"import _{slug}\b", f"import {slug}"),
                (rf"solutions\._{slug}\b", f"solutions.{slug}"),
            )
    link = f"[{slug}](../chapters/{name}.ipynb)"
    row = rf"\| {number} \| {slug} \|(.*)\| planned \|"
    edit("book/intro.md", (row, rf"| {number} | {link} |\1| here |"))
    caption, line = f"  - caption: {PARTS[number]}\n", f"      - file: chapters/{name}\n"
    if caption not in Path("_toc.yml").read_text():
        parts = re.findall(r"  - caption: (?:Part|Back).*", Path("_toc.yml").read_text())
        later = next(p for p in parts if p.startswith("  - caption: Back") or p > caption)
        edit("_toc.yml", (re.escape(later), f"{caption}    chapters:\n{later}"))
    part = re.escape(caption) + r"    chapters:\n((?:      - .*\n)*)"
    edit("_toc.yml", (part, rf"{caption}    chapters:\n\1{line}"))
