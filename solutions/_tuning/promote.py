"""Take the leading _ from drafts, or put it back: what was not recorded yet is a draft.

    python solutions/_tuning/promote.py 08_gemv 10_decode_attention
    python solutions/_tuning/promote.py --back 11_paged_kv

Moves module and notebook, and changes imports, _toc.yml and the row in book/intro.md.
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


back = sys.argv[1:2] == ["--back"]
for name in sys.argv[1 + back :]:
    number, slug = name.split("_", 1)
    module = (
        "" if Path(f"solutions/{slug}").is_dir() or Path(f"solutions/_{slug}").is_dir() else ".py"
    )
    pairs = [(f"solutions/_{slug}{module}", f"solutions/{slug}{module}")]
    pairs += [(f"chapters/_{name}.ipynb", f"chapters/{name}.ipynb")]
    for draft, done in pairs:
        subprocess.run(["git", "mv", *((done, draft) if back else (draft, done))], check=True)
    files = subprocess.run(["git", "ls-files", "*.py", "*.ipynb"], capture_output=True, text=True)
    for file in files.stdout.split():
        if Path(file).name == "promote.py":
            continue
        if back:
            edit(
                file,
                (rf"from solutions import {slug}( as|\n|\\n)", rf"from solutions import _{slug}\1"),
                (rf"(from solutions import _{slug})(\\?n|\n)", rf"\1 as {slug}\2"),
                (rf"(from|import) solutions\.{slug}\b", rf"\1 solutions._{slug}"),
            )
        else:
            edit(
                file,
                (rf"import _{slug} as {slug}\b", f"import {slug}"),
                (rf"import _{slug}\b", f"import {slug}"),
                (rf"solutions\._{slug}\b", f"solutions.{slug}"),
            )
    row, link = rf"\| {number} \| {slug} \|(.*)\| planned \|", f"[{slug}](../chapters/{name}.ipynb)"
    done = rf"\| {number} \| \[{slug}\]\(\.\./chapters/{name}\.ipynb\) \|(.*)\| here \|"
    line, caption = f"      - file: chapters/{name}\n", f"  - caption: {PARTS[number]}\n"
    if back:
        edit("book/intro.md", (done, rf"| {number} | {slug} |\1| planned |"))
        edit(
            "_toc.yml",
            (re.escape(line), ""),
            (re.escape(caption + "    chapters:\n") + r"(?=  - )", ""),
        )
    else:
        edit("book/intro.md", (row, rf"| {number} | {link} |\1| here |"))
        if caption not in Path("_toc.yml").read_text():
            edit(
                "_toc.yml",
                ("  - caption: Back matter", f"{caption}    chapters:\n  - caption: Back matter"),
            )
        edit(
            "_toc.yml",
            (
                re.escape(caption) + r"    chapters:\n((?:      - .*\n)*)",
                rf"{caption}    chapters:\n\1{line}",
            ),
        )
subprocess.run(["ruff", "check", "-q", "--fix", "."], check=False)
