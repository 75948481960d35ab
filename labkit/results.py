"""Measured numbers as data: `book/results/<device>/<slug>.json`, for tables, prose, plots."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "book" / "results"
REFERENCE = "h200"  # the device whose numbers the text quotes


@dataclass(frozen=True)
class Timing:
    """How long one rung took at one size: quartiles of many cold-cache runs, in seconds.

    `bytes` and `flops` are the ledger's: what any version must move and compute. `kind` is the
    language of a rung ("numba", "triton", "cuda", "torch"), "library" or "peer".
    `error_over_allowed` is that of the outputs it computed on these very inputs. `more` holds what
    else a problem's own `measure` counted, by name.
    """

    problem: str
    rung: str
    kind: str
    dtype: str
    size: Mapping[str, int]
    p25_s: float
    p50_s: float
    p75_s: float
    runs: int
    bytes: int
    flops: int
    peak_memory_bytes: int
    error_over_allowed: float
    fraction_of_ceiling: float
    source: str = ""  # device and date
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        """Useful bytes per second: the ledger's bytes over the median time."""
        return self.bytes / self.p50_s

    def __repr__(self) -> str:
        """One line: time, useful bandwidth, % of the ceiling, and where that was measured."""
        size = ", ".join(f"{k}={v:,}" for k, v in self.size.items())
        return (
            f"{self.rung}, {self.dtype}, {size}: {microseconds(self.p50_s)} "
            f"(quartiles {microseconds(self.p25_s)} to {microseconds(self.p75_s)})\n"
            f"   {rate(self.bandwidth)} useful, {percent(self.fraction_of_ceiling)} of the "
            f"ceiling, {self.source}"
        )


def microseconds(seconds: float) -> str:
    """Seconds as "1,310 µs" or "12.3 µs": four digits at most."""
    us = seconds * 1e6
    return f"{us:,.0f} µs" if us >= 1000 else f"{us:.3g} µs" if us < 100 else f"{us:.0f} µs"


def rate(bytes_per_s: float) -> str:
    """Bytes/s as "4.25 TB/s" or "310 GB/s"; powers of ten."""
    if bytes_per_s >= 1e12:
        return f"{bytes_per_s / 1e12:.2f} TB/s"
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def percent(fraction: float) -> str:
    """A fraction as "93 %"; one decimal under 10 %."""
    return f"{100 * fraction:.1f} %" if fraction < 0.0995 else f"{100 * fraction:.0f} %"


def in_unit_of(bar: str, value: float) -> str:
    """A number in the unit that the text of its bar has: µs, bytes/s, %, or none for a ratio."""
    if " µs " in bar:
        return f"{1e6 * value:,.4g} µs"  # so that 2.897 is seen to be under 2.9
    if "B/s" in bar:
        return rate(value)
    return f"{100 * value:.3g} %" if "%" in bar else f"{value:.3g}"


@dataclass(frozen=True)
class Results:
    """One chapter's recorded run."""

    data: Mapping

    @property
    def timings(self) -> list[Timing]:
        """Every timing of the run."""
        source = f"measured on {self.data['device']['name']}, {self.data['date']}"
        return [Timing(**t, source=source) for t in self.data["timings"]]

    def timing(self, name: str, dtype: str | None = None, **size: int) -> Timing:
        """The timing of a rung or peer ("library" for the library) at this dtype and size.

        Without a dtype or size, the first recorded: that of `bench_size`. KeyError if absent.
        `problem="…"` picks one where a peer serves several problems of the chapter.
        """
        problem = size.pop("problem", None)
        for t in self.timings:
            if (
                name in (t.rung, t.kind if t.kind == "library" else None)
                and dtype in (None, t.dtype)
                and (not size or dict(t.size) == size)
                and problem in (None, t.problem)
            ):
                return t
        raise KeyError(f"{self.data['slug']}: no timing of {name}, {dtype or 'any dtype'}, {size}")

    def time(self, name: str, dtype: str | None = None, **size: int) -> float:
        """Median seconds; see `timing`."""
        return self.timing(name, dtype, **size).p50_s

    def fraction(self, name: str, dtype: str | None = None, **size: int) -> float:
        """The roofline's time over the measured time; see `timing`."""
        return self.timing(name, dtype, **size).fraction_of_ceiling

    def sizes(self, name: str, dtype: str | None = None) -> list[dict]:
        """Sizes at which a rung or peer was timed."""
        return [dict(t.size) for t in self.timings if name == t.rung and dtype in (None, t.dtype)]

    def best_peer(self, problem: str, dtype: str | None = None, **size: int) -> float:
        """Median seconds of the fastest of library, torch.compile and the peers."""
        times = [
            t.p50_s
            for t in self.timings
            if t.problem == problem
            and t.kind in ("library", "peer")
            and dtype in (None, t.dtype)
            and dict(t.size) == size
        ]
        if not times:
            raise KeyError(f"{self.data['slug']}: no peer of {problem} at {dtype}, {size}")
        return min(times)

    @property
    def ceilings(self) -> Mapping:
        """Measured in the same run: copy and read bytes/s, FLOP/s by dtype."""
        return self.data["device"]["ceilings"]


def results(slug: str, device: str | None = None) -> Results:
    """The recorded results of a chapter, by default those that the text quotes.

    FileNotFoundError if the chapter was not recorded on that device.
    """
    path = RESULTS / (device or REFERENCE) / f"{slug}.json"
    if not path.exists():
        raise FileNotFoundError(f"no results for slug={slug!r} on device={path.parent.name!r}")
    return _load(path, path.stat().st_mtime_ns)


@cache
def _load(path: Path, _changed: int) -> Results:
    return Results(json.loads(path.read_text()))


def save(data: Mapping, folder: Path = RESULTS) -> Path:
    """Write one run's results, sorted and indented; ValueError names what is wrong with them."""
    path = folder / _folder_of(data["device"]["name"]) / f"{data['slug']}.json"
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if problem := _problem_in(path, text):
        raise ValueError(problem)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def validate(path: Path | str) -> str | None:
    """None if a results file is good, else one line that names the file and what is wrong."""
    path = Path(path)
    try:
        text = path.read_text()
    except IsADirectoryError:
        return f"{path}: a folder; name files, or none for all of book/results"
    except (OSError, UnicodeDecodeError) as why:
        return f"{path}: cannot be read: {why}"
    problem = _problem_in(path, text)
    return f"{path}: {problem}" if problem else None


def _problem_in(path: Path, text: str) -> str | None:
    import jsonschema

    def refuse(name: str):
        raise ValueError(f"{name} is not a number")

    try:
        data = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as why:
        return f"not JSON: {why}"
    schema = json.loads((files("labkit") / "results.schema.json").read_text())
    errors = jsonschema.Draft202012Validator(schema).iter_errors(data)
    for fault in sorted(errors, key=lambda e: list(map(str, e.absolute_path))):
        where = "/".join(map(str, fault.absolute_path)) or "top level"
        return f"{where}: {fault.message[:200]}"
    if data["slug"] != path.stem:
        return f"slug is {data['slug']!r}, but the file is {path.name}"
    if _folder_of(data["device"]["name"]) != path.parent.name:
        return f"device {data['device']['name']!r} is unknown to folder {path.parent.name!r}"
    seen = set()
    for i, t in enumerate(data["timings"]):
        if not t["p25_s"] <= t["p50_s"] <= t["p75_s"]:
            return f"timings/{i}: quartiles are not in order"
        for name, value in t.items():
            if isinstance(value, float) and not math.isfinite(value):
                return f"timings/{i}: {name} is not finite"
        key = (t["problem"], t["rung"], t["dtype"], tuple(sorted(t["size"].items())))
        if key in seen:
            return f"timings/{i}: {t['rung']} was timed before at this dtype and size"
        seen.add(key)
    return None


def _folder_of(device_name: str) -> str:
    from labkit.device import Device

    return Device(device_name, "cuda").slug
