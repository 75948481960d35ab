"""labkit: timing, correctness and plotting for The Kernel Ladder. Import it first."""

from labkit.args import FLOATS, check_apart, check_contiguous, check_count, check_tensors
from labkit.bench import bench
from labkit.check import CheckFailed, Verdict, check
from labkit.compare import compare
from labkit.compile import compile_card, cuda_kernel
from labkit.device import DEVICE, SIMULATED, stream  # first: it starts the simulators
from labkit.diagnose import BUGS
from labkit.exercise import Exercise, Mutant
from labkit.ladder import Ladder, Rung, find
from labkit.launch import NotAttempted, todo
from labkit.lens import LensUnavailable, lens
from labkit.notebook import Table, say
from labkit.problem import Bar, Problem, Property, Work, outputs, randn
from labkit.record import Rejected
from labkit.results import microseconds, percent, rate, results

__all__ = [
    "BUGS",
    "DEVICE",
    "FLOATS",
    "SIMULATED",
    "Bar",
    "CheckFailed",
    "Exercise",
    "Ladder",
    "LensUnavailable",
    "Mutant",
    "NotAttempted",
    "Problem",
    "Property",
    "Rejected",
    "Rung",
    "Table",
    "Verdict",
    "Work",
    "bench",
    "check",
    "check_apart",
    "check_contiguous",
    "check_count",
    "check_tensors",
    "compare",
    "compile_card",
    "cuda_kernel",
    "find",
    "lens",
    "microseconds",
    "outputs",
    "percent",
    "randn",
    "rate",
    "results",
    "say",
    "stream",
    "todo",
]
