"""Results files: the schema, one clear line for each bad file, and what reads them."""

import labkit as lab
from labkit import pages
from labkit.results import RESULTS, Results, in_unit_of, save, validate

import json
import re

import pytest

FILES = sorted(RESULTS.glob("*/*.json"))


def good() -> dict:
    timing = {
        "problem": "blend",
        "rung": "blend_naive",
        "kind": "numba",
        "dtype": "float32",
        "size": {"N": 1024},
        "p25_s": 1.0e-5,
        "p50_s": 1.1e-5,
        "p75_s": 1.2e-5,
        "runs": 100,
        "bytes": 12288,
        "flops": 1024,
        "peak_memory_bytes": 4096,
        "error_over_allowed": 0.5,
        "fraction_of_ceiling": 0.3,
    }
    return {
        "schema": 1,
        "slug": "blend",
        "device": {
            "name": "NVIDIA H200",
            "sm": "9.0",
            "sms": 132,
            "l2_bytes": 62914560,
            "driver": "1",
            "power_limit_w": 700.0,
            "ceilings": {
                "copy_bytes_per_s": 4e12,
                "read_bytes_per_s": 4.5e12,
                "flops": {"float32": 5e13},
                "empty_kernel_s": 3e-6,
            },
        },
        "versions": dict.fromkeys(
            ("python", "torch", "triton", "numba", "numba-cuda", "cuda-core"), "1"
        ),
        "commit": "0123456789",
        "date": "2026-12-01",
        "target": {
            "text": "fast",
            "met": True,
            "bars": [{"text": "fast", "measured": 1.0, "limit": 1.0, "met": True}],
        },
        "timings": [timing, {**timing, "rung": "torch.add", "kind": "library"}],
        "rejected": [],
        "gpu_tests": {"passed": 1, "failed": 0, "skipped": 0},
    }


def write(folder, data, device="h200", slug="blend"):
    path = folder / device / f"{slug}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_good_file_is_accepted_and_read_back(tmp_path):
    path = save(good(), tmp_path)
    assert path == tmp_path / "h200" / "blend.json"
    assert validate(path) is None
    read = Results(json.loads(path.read_text()))
    assert read.time("blend_naive", "float32", N=1024) == 1.1e-5
    assert read.timing("library").rung == "torch.add"
    assert read.best_peer("blend", "float32", N=1024) == 1.1e-5
    assert read.sizes("blend_naive") == [{"N": 1024}]
    with pytest.raises(KeyError, match="blend_fused"):
        read.time("blend_fused")


def changed(**change):
    data = good()
    for where, value in change.items():
        *path, last = where.split("__")
        part = data
        for key in path:
            part = part[int(key) if key.isdigit() else key]
        if value is KeyError:
            del part[last]
        else:
            part[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed(timings__0__p50_s=KeyError), "timings/0.*'p50_s' is a required property"),
        (changed(commit=KeyError), "'commit' is a required property"),
        (changed(timings__0__p50_s=-1e-5), "timings/0/p50_s: -1e-05"),
        (changed(timings__0__p50_s=0), "timings/0/p50_s: 0"),
        (changed(timings__0__p50_s=float("nan")), "NaN is not a number"),
        (changed(timings__0__p50_s=float("inf")), "Infinity is not a number"),
        (changed(timings__0__runs=99), "timings/0/runs: 99"),
        (changed(timings__0__kind="rust"), "timings/0/kind: 'rust'"),
        (changed(timings__0__p25_s=2e-5), "timings/0: quartiles"),
        (changed(device__name="NVIDIA H100"), "device 'NVIDIA H100' is unknown to folder 'h200'"),
        (changed(slug="softmax"), "slug is 'softmax'"),
        (changed(schema=2), "schema: 1 was expected"),
        (changed(surprise=1), "'surprise' was unexpected"),
        (json.dumps(good())[:-200], "not JSON"),
        ("", "not JSON"),
    ],
)
def test_a_bad_file_gets_one_clear_line(tmp_path, data, words):
    path = write(tmp_path, data)
    fault = validate(path)
    assert fault is not None
    assert str(path) in fault
    assert "\n" not in fault
    import re

    assert re.search(words, fault), fault


def test_save_refuses_what_validate_refuses(tmp_path):
    with pytest.raises(ValueError, match="p50_s"):
        save(changed(timings__0__p50_s=-1.0), tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        save(changed(timings__0__p50_s=float("nan")), tmp_path)
    assert not list(tmp_path.glob("*/*.json"))


def test_a_missing_chapter_is_named():
    with pytest.raises(FileNotFoundError, match="no_such_chapter"):
        lab.results("no_such_chapter")


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_committed_results_are_valid_and_whole(path):
    assert validate(path) is None
    ladder, _ = lab.find(path.stem)
    read = Results(json.loads(path.read_text()))
    for problem in ladder.problems:
        kinds = {t.kind for t in read.timings if t.problem == problem.name}
        assert {"library", "peer"} <= kinds
        names = {t.rung for t in read.timings if t.problem == problem.name}
        assert {r.name for r in ladder if ladder.problem_of(r) is problem} <= names
        assert "torch.compile" in names
    assert all(
        t.error_over_allowed <= 1 for t in read.timings if t.kind in ("numba", "triton", "cuda")
    )
    assert read.data["rejected"]
    assert read.data["gpu_tests"]["passed"] > 0
    assert read.data["gpu_tests"]["failed"] == 0


def test_generated_pages_are_in_step_with_the_results():
    assert (pages.BOOK / "scorecard.md").read_text() == pages.scorecard_page()
    assert pages.README.read_text() == pages.readme_text(pages.README.read_text())


def test_the_bug_gallery_is_in_step_with_the_mutants():
    """But for what the checker says to them: test_solutions.py asks it."""
    stored = (pages.BOOK / "bug_gallery.md").read_text()
    fresh = pages.gallery_page(said=lambda *_: "")
    assert re.sub(r"(?s)(```text\n).*?(\n```\n)", r"\1\2", stored) == fresh


def test_a_stopped_recording_goes_on_where_it_was(tmp_path, monkeypatch):
    from labkit import record
    from labkit.results import Timing

    ladder, _ = lab.find("vector_add")
    timed, tested, lines = [], [], []

    def gpu_tests():
        tested.append(ladder.slug)
        return {"passed": 7, "failed": 0, "skipped": 1}

    def measure(versions, problem, dtype, size, runs=100):
        if len(timed) == stop_after:
            raise KeyboardInterrupt
        timed.append((problem.name, dtype, tuple(size.items())))
        timing = {**good()["timings"][0], "problem": problem.name, "size": dict(size)}
        timing["dtype"] = str(dtype).removeprefix("torch.")
        return [Timing(**{**timing, "rung": n, "kind": k}) for n, (k, _) in versions.items()]

    def versions_of(ladder, problem, dtype, size, log=print):
        rungs = {r.name: (r.kind, r.fn) for r in ladder if ladder.problem_of(r) is problem}
        return {**rungs, record.library_name(problem): ("library", problem.library)}

    monkeypatch.setattr(record, "SIMULATED", False)
    monkeypatch.setattr(record, "DEVICE", lab.device.Device("NVIDIA H200", "cuda"))
    monkeypatch.setattr(record, "_device", lambda: good()["device"])
    monkeypatch.setattr(record, "_versions", lambda: good()["versions"])
    monkeypatch.setattr(record, "floor", lambda work, dtype, ceiling: 5e-6)
    monkeypatch.setattr(record, "measure", measure)
    monkeypatch.setattr(record, "versions_of", versions_of)

    def started():
        return record.record(ladder, folder=tmp_path, gpu_tests=gpu_tests, log=lines.append)

    stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        started()
    assert not list(tmp_path.glob("*/*.json"))
    stop_after = None
    path = started()
    everything = [
        (p.name, d, tuple(s.items())) for p in ladder.problems for d, s in record.cases(p)
    ]
    assert timed[: len(everything)] == everything, "each size once, in spite of the stop"
    assert sum("before the stop" in line for line in lines) == 1 + 3, "the tests, and three sizes"
    assert len(tested) == 1
    assert json.loads(path.read_text())["gpu_tests"]["passed"] == 7
    assert validate(path) is None
    assert list(path.parent.iterdir()) == [path], "nothing else is left behind"
    assert json.loads(path.read_text())["starts"] == 2
    first = json.loads(path.read_text())["timings"][0]
    assert first["fraction_of_ceiling"] == pytest.approx(5e-6 / first["p50_s"])

    timed.clear()
    stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        started()
    monkeypatch.setattr(record, "_code", lambda: "other code")
    timed.clear()
    stop_after = None
    started()
    assert timed[: len(everything)] == everything, "other code: all over again"
    assert len(tested) == 3


@pytest.mark.parametrize(
    ("bar", "value", "text"),
    [
        ("takes at most 2.9 µs at N=1", 2.8965e-6, "2.897 µs"),
        ("takes at most 650 µs at context=512", 682.27e-6, "682.3 µs"),
        ("reads at least 2.6 TB/s at N=1", 3.0519e12, "3.05 TB/s"),
        ("reaches 92% of the ceiling", 0.92, "92 %"),
        ("reaches 92% of the ceiling", 0.9816, "98.2 %"),
        ("takes at most 0.60 times as long as SDPA", 0.665, "0.665"),
    ],
)
def test_a_bars_number_has_its_unit(bar, value, text):
    assert in_unit_of(bar, value) == text


def test_bars_and_attempts_are_those_of_the_recording():
    ladder, _ = lab.find("softmax")
    data = lab.results("softmax").data
    bars, attempts = ladder.bars().rows, ladder.attempts().rows
    assert [b[0] for b in bars] == [b["text"] for b in data["target"]["bars"]]
    assert [b[3] for b in bars] == ["yes" if b["met"] else "no" for b in data["target"]["bars"]]
    assert [a[2] for a in attempts] == [r["measured"] for r in data["rejected"]]


def test_a_folder_is_no_results_file(tmp_path):
    assert validate(tmp_path).startswith(f"{tmp_path}: a folder; name files")
