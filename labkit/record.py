"""Record a chapter on this GPU: every rung, the library and the peers in one run, as data."""

from __future__ import annotations

from labkit.bench import COMPILE_MODE, captured, ceilings, floor, measure
from labkit.check import dtype_name
from labkit.device import DEVICE, SIMULATED
from labkit.ladder import Ladder
from labkit.problem import Problem, Work
from labkit.results import RESULTS, ROOT, Results, microseconds, save

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "numba", "numba-cuda", "cuda-core", "numpy")
PEERS = (
    "liger-kernel", "flashinfer-python", "cupy-cuda13x", "torchao", "gemlite", "fa3-fwd",
    "transformers",
)  # fmt: skip


@dataclass(frozen=True)
class Rejected:
    """An attempt that was measured and not kept.

    `fn` is timed against the rung named `against` at the problem's `bench_size`; `expected` was
    written before, `cause` after.
    """

    fn: Callable
    against: str
    attempt: str
    expected: str
    cause: str


def library_name(problem: Problem) -> str:
    """How tables call the library: its docstring's first line, up to a colon."""
    line = (problem.library.__doc__ or "library").partition("\n")[0]
    return line.partition(":")[0].rstrip(".")


def versions_of(
    ladder: Ladder, problem: Problem, dtype: torch.dtype, size: dict, log: Callable = print
) -> dict[str, tuple[str, Callable]]:
    """Name -> (kind, function): the rungs of a problem, its library, torch.compile, the peers.

    A peer that is absent, or refuses this dtype or size, is left out and said so through `log`.
    """
    found = {
        r.name: (r.kind, r.fn)
        for r in ladder
        if ladder.problem_of(r) is problem and dtype in (r.dtypes or problem.dtypes)
    }
    found[library_name(problem)] = ("library", problem.library)
    if problem.measure:  # which tries the peers itself
        return found | {name: ("peer", fn) for name, fn in problem.peers.items()}
    torch.compiler.reset()  # or the ninth size would silently run uncompiled
    compiled = torch.compile(problem.library, mode=COMPILE_MODE, dynamic=False)
    for name, fn in {"torch.compile": compiled, **problem.peers}.items():
        try:
            inputs = problem.inputs(dtype, **size)
            fn(*inputs)
            if problem.timing == "graph":
                captured(fn, [inputs])
            torch.cuda.synchronize()
        except Exception as why:
            reason = str(why).strip().partition("\n")[0][:120]
            log(f"  left out: {name}, {dtype_name(dtype)}, {size}: {type(why).__name__}: {reason}")
            continue
        found[name] = ("peer", fn)
    return found


def cases(problem: Problem) -> list[tuple[torch.dtype, dict]]:
    """What is recorded: every dtype at `bench_size`, and the sweep in `sweep_dtypes`."""
    at_bench = [(d, dict(problem.bench_size)) for d in problem.dtypes]
    swept = problem.sweep_dtypes or problem.dtypes[:1]
    sweep = [(d, dict(s)) for d in swept for s in problem.sweep]
    return at_bench + [c for c in sweep if c not in at_bench]


def record(
    ladder: Ladder,
    *,
    folder: Path = RESULTS,
    gpu_tests: Callable[[], dict[str, int]],
    log: Callable = print,
) -> Path:
    """Test and time everything, and write `<device>/<slug>.json`. Needs a GPU.

    `gpu_tests` runs the chapter's tests and returns their counts, or raises. These, and what is
    timed at one size, go to `<device>/<slug>.part` at once. A recording that was stopped starts
    again with those, if the code, the GPU's name and driver and the packages are still the same;
    `starts` says how often it was started, and the ceilings are those of the last time.
    """
    if SIMULATED:
        raise RuntimeError("record needs a GPU: a simulator is never timed")
    device, versions = _device(), _versions()
    part = folder / DEVICE.slug / f"{ladder.slug}.part"
    same = {"code": _code(), "gpu": [device["name"], device["driver"]], "versions": versions}
    before = _resumed(part, same, ladder)
    if before:
        log(f"  tests: {before['gpu_tests']['passed']} passed before the stop")
    tests = before["gpu_tests"] if before else gpu_tests()
    timings, model = (before["timings"], before["model"]) if before else ([], {})
    starts = 1 + before["starts"] if before else 1

    def keep() -> None:
        done = {"same": same, "starts": starts, "gpu_tests": tests}
        done |= {"timings": timings, "model": model}
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(done))

    keep()
    for problem in ladder.problems:
        for dtype, size in cases(problem):
            if any(_is(t, problem, dtype, size) for t in timings):
                log(f"  {problem.name} {dtype_name(dtype)} {size}: timed before the stop")
                continue
            began = time.monotonic()
            tried = versions_of(ladder, problem, dtype, size, log)
            group = measure(tried, problem, dtype, size)
            best = min(group, key=lambda t: t.p50_s)
            took = f"{time.monotonic() - began:.0f} s"
            log(f"  {problem.name} {dtype_name(dtype)} {size}: best {best.rung}, {took}")
            timings += [_as_json(t) for t in group]
            keep()
    for name, found in {n: f for p in ladder.problems for n, f in p.facts.items()}.items():
        if name not in model:
            began = time.monotonic()
            model[name] = found(log)
            log(f"  {name}: {time.monotonic() - began:.0f} s")
            keep()
    data = {
        "schema": 1,
        "slug": ladder.slug,
        "device": device,
        "versions": versions,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "starts": starts,
        "target": {"text": "", "met": False, "bars": []},
        "timings": timings,
        "rejected": [_rejected(ladder, r) for r in ladder.rejected],
        "gpu_tests": tests,
    }
    if model:
        data["model"] = model
    data["target"] = target(ladder, Results(data))
    path = save(data, folder)
    part.unlink(missing_ok=True)
    return path


def _code() -> str:
    """Changes when any code of the lab or of a solution does."""
    files = sorted(f for name in ("labkit", "solutions") for f in (ROOT / name).rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _is(timing: Mapping, problem: Problem, dtype: torch.dtype, size: Mapping) -> bool:
    case = problem.name, dtype_name(dtype), dict(size)
    return (timing["problem"], timing["dtype"], timing["size"]) == case


def _resumed(part: Path, same: Mapping, ladder: Ladder) -> dict | None:
    """Tests and timings of a stopped recording, these compared with the ceilings of this one."""
    try:
        before = json.loads(part.read_text())
    except (OSError, ValueError):  # none, or stopped while it was written
        return None
    if before["same"] != same:
        return None
    problems = {p.name: p for p in ladder.problems}
    for t in before["timings"]:
        work, dtype = Work(t["bytes"], t["flops"]), getattr(torch, t["dtype"])
        t["fraction_of_ceiling"] = floor(work, dtype, problems[t["problem"]].ceiling) / t["p50_s"]
    return before


def target(ladder: Ladder, measured: Results) -> dict:
    """The bars of the ladder's problems against what was measured."""
    bars = []
    for bar in (b for p in ladder.problems for b in p.target):
        value = float(bar.value(measured))
        limit = bar.at_least if bar.at_most is None else bar.at_most
        bars.append({"text": bar.text, "measured": value, "limit": limit, "met": bar.met(value)})
    text = "; ".join(b["text"] for b in bars)
    return {"text": text, "met": all(b["met"] for b in bars), "bars": bars}


def _rejected(ladder: Ladder, attempt: Rejected) -> dict:
    rung = ladder.rung(attempt.against)
    problem = ladder.problem_of(rung)
    dtype, size = problem.dtypes[0], dict(problem.bench_size)
    both = {"attempt": (rung.kind, attempt.fn), rung.name: (rung.kind, rung.fn)}
    mine, kept = (microseconds(t.p50_s) for t in measure(both, problem, dtype, size))
    shape = ", ".join(f"{k}={v:,}" for k, v in size.items())
    return {
        "attempt": attempt.attempt,
        "expected": attempt.expected,
        "measured": f"{mine} against {kept} for {rung.name} ({dtype_name(dtype)}, {shape})",
        "cause": attempt.cause,
    }


def _as_json(timing) -> dict:
    data = asdict(timing)
    del data["source"]
    if not data["more"]:
        del data["more"]
    data["error_over_allowed"] = round(data["error_over_allowed"], 4)
    return data


def _device() -> dict:
    driver, power = "unknown", 0.0
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit"]
        out = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
        ).stdout
        driver, watts = (s.strip() for s in out.splitlines()[0].split(","))
        power = float(watts)
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        pass
    return {
        "name": DEVICE.name,
        "sm": DEVICE.sm,
        "sms": DEVICE.sms,
        "l2_bytes": DEVICE.l2_bytes,
        "driver": driver,
        "power_limit_w": power,
        "ceilings": ceilings(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES + PEERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    if given := os.environ.get("LABKIT_COMMIT"):
        return given
    try:
        out = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return out.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
