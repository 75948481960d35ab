"""pytest and nbval here: `pytest` runs tests/, `pytest --nbval chapters` the notebooks.

nbval compares every cell's output with the committed one. Two cell tags say where that cannot be:
`device-output` (times, device names: run, not compared) and `gpu-only` (skipped without a GPU).
"""

import os
import sys

import pytest

collect_ignore_glob = ["chapters/_*"]  # drafts

CELL_TIMEOUT_S = 120  # nbval's 2000 would let a dead kernel hold a run for half an hour
OUTPUT_TIMEOUT_S = (
    30  # between a cell's end and its last output; nbval's 5 is short on a busy machine
)


def pytest_configure(config):
    nbval = config.getoption("nbval", default=False)
    # Before matplotlib and any kernel start. Kernels inherit it, and their figures are outputs.
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline" if nbval else "Agg"
    if nbval:
        # The environment pytest runs in, whatever a notebook's kernelspec says.
        if not config.option.nbval_kernel_name:
            config.option.nbval_current_env = True
        if config.option.nbval_cell_timeout == 2000:
            config.option.nbval_cell_timeout = CELL_TIMEOUT_S


def pytest_runtest_teardown():
    """Give a GPU's memory back: tests that run beside this one need it."""
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def pytest_collectstart(collector):
    """Take stderr (a GPU's warnings) and SVG (random ids) out of nbval's comparison."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr", "image/svg+xml")


def pytest_collection_modifyitems(items):
    cells = [item for item in items if getattr(item, "cell", None) is not None]
    if not cells:
        return
    import labkit as lab  # here, so that tests without notebooks do not wait for torch

    for item in cells:
        item.output_timeout = OUTPUT_TIMEOUT_S
        tags = item.cell.metadata.get("tags", [])
        if "device-output" in tags:
            item.options["check"] = False
        if "gpu-only" in tags and lab.SIMULATED:
            item.add_marker(pytest.mark.skip(reason="gpu-only cell: no GPU here"))
