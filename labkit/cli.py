"""The `lab` command: doctor, check, compare, bench, generate, record, sync, scorecard, validate."""

from __future__ import annotations

import labkit as lab
from labkit.results import REFERENCE, RESULTS, ROOT
from labkit.sync import notebooks, slug_of

import argparse
import importlib.util
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TIMEOUT = 300  # seconds a reader's kernel may take in `lab check` and `lab compare`


class Fault(Exception):
    """Something the user can mend; printed as one line, exit code 1."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    commands.add_parser("doctor", help="GPU or simulators, versions, what cannot be verified here")
    for name, what in (
        ("check", "is a kernel right, and if not, which bug does it have"),
        ("compare", "a kernel beside the solution, the naive rung, the library and the peers"),
        ("bench", "time a kernel (GPU), or show the recorded number"),
    ):
        p = commands.add_parser(name, help=what)
        p.add_argument("operation", help="for instance rms_norm")
        p.add_argument("kernel", help="FILE.py:NAME" if name != "bench" else "FILE.py:NAME or rung")
        p.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds, %(default)s")
        p.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
        if name == "compare":
            p.add_argument("--diff", action="store_true", help="show the source diff too")
    p = commands.add_parser(
        "generate", help="go on with a prompt, by the model of the last chapter"
    )
    p.add_argument("prompt")
    p.add_argument(
        "--model", default="small", help="small (default), a folder, or a hub id: Qwen/Qwen3-0.6B"
    )
    p.add_argument("--tokens", type=int, default=100, help="at most, %(default)s")
    p.add_argument("--dtype", help="bfloat16, float16 or float32; default: that of the files")
    p = commands.add_parser("record", help="re-record a chapter on this GPU")
    p.add_argument("chapter", help="number or slug: 03 or rms_norm")
    p = commands.add_parser("sync", help="write the notebooks' kernel cells from solutions")
    p.add_argument("--check", action="store_true", help="only report differences")
    p = commands.add_parser("scorecard", help="write the generated pages from the results")
    p.add_argument("--no-gallery", action="store_true", help="leave the bug gallery alone")
    p = commands.add_parser("validate", help="check results files against the schema")
    p.add_argument("files", nargs="*", type=Path, help="default: all of book/results")

    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except Fault as fault:
        print(fault, file=sys.stderr)
        return 1


def doctor(_) -> int:
    """What runs here, and what cannot be verified here."""
    from labkit.record import PEERS

    print(f"labkit {version('kernel-ladder')} in {ROOT}")
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "triton", "numba", "numba-cuda", "cuda-core", "numpy"):
        print(f"  {package} {_version(package)}")
    if lab.SIMULATED:
        print("\nNo GPU in use: kernels run under the simulators of Numba and Triton.")
        print("Not verified here: fp16 and bf16 kernels, warp shuffles, raw CUDA C++ (compiled")
        print("only), and every time. Times shown are recorded ones, labelled with their device.")
    else:
        d = lab.DEVICE
        print(f"\nGPU: {d.name}, compute capability {d.sm}, {d.sms} SMs, {d.l2_bytes >> 20} MiB L2")
        missing = "Triton kernels, which need 8.0" if float(d.sm) < 8 else "nothing"
        print(f"Not verified here: {missing}. LABKIT_DEVICE=sim asks for the simulators.")
    for peer in PEERS:
        print(f"  peer {peer} {_version(peer)}")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def load(spec: str):
    """The function that `FILE.py:NAME` names. Fault with a clear message otherwise."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise Fault(f"kernel={spec!r}: write FILE.py:NAME")
    if not path.is_file():
        raise Fault(f"{path}: no such file")
    module_spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if module_spec is None:
        raise Fault(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        module_spec.loader.exec_module(module)
    except BaseException as why:
        frames = traceback.extract_tb(why.__traceback__)
        own = [f.lineno for f in frames if f.filename == str(path.resolve())] or [0]
        where = f"line {why.lineno if isinstance(why, SyntaxError) else own[-1]}"
        raise Fault(f"{path} does not import: {type(why).__name__}: {why} ({where})") from why
    try:
        fn = getattr(module, name)
    except AttributeError:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        defined = ", ".join(names) or "nothing"
        raise Fault(f"{path} has no {name!r}; it defines: {defined}") from None
    if not callable(fn):
        raise Fault(f"{path}:{name} is not a function, but of type {type(fn).__name__}")
    return fn


def _find(operation: str):
    try:
        return lab.find(operation)
    except ValueError as why:
        raise Fault(str(why)) from None


def _on_a_reader_kernel(options) -> int:
    """Run check, compare or bench in a process of its own: a hang or a crash ends only that."""
    _find(options.operation)
    if not 0 < options.timeout < math.inf:
        raise Fault(f"timeout={options.timeout}: write a number of seconds above 0")
    if options.inner:
        finished = Path(os.environ["LABKIT_FINISHED"])
        try:
            code = _inner(options)
        except Fault:
            finished.touch()
            raise
        except KeyboardInterrupt:  # a process of its own gets no Ctrl-C
            finished.touch()
            raise Fault(f"🔴 {options.kernel}: it raised KeyboardInterrupt") from None
        finished.touch()
        return code
    # -P: files of the reader's folder must not stand in for installed packages.
    command = [sys.executable, "-P", "-m", "labkit.cli", options.command, options.operation]
    command += [options.kernel, "--inner"] + ["--diff"] * getattr(options, "diff", False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        finished = Path(folder) / "finished"
        child = subprocess.Popen(
            command, start_new_session=True, env={**os.environ, "LABKIT_FINISHED": str(finished)}
        )
        try:
            code = child.wait(options.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        ended = finished.exists()
    if code is None:
        raise Fault(
            f"🔴 {options.kernel}: hang: no answer within {options.timeout:g} s. A loop that never "
            "ends, or threads that wait for each other? --timeout gives it longer."
        )
    if code >= 0 and not ended:
        raise Fault(
            f"🔴 {options.kernel}: it ended the process, with exit code {code}, before the answer "
            "was out"
        )
    if code < 0:
        name = signal.Signals(-code).name
        raise Fault(f"🔴 {options.kernel}: crash: the process died of {name}")
    return code


def _inner(options) -> int:
    _, problem = _find(options.operation)
    if options.command == "bench" and ":" not in options.kernel:
        ladder, _ = _find(options.operation)
        try:
            fn = ladder.rung(options.kernel)
        except ValueError as why:
            raise Fault(str(why)) from None
        if (own := ladder.problem_of(fn)) is not problem:
            raise Fault(f"{fn.name} is a rung of {own.name}, not of {problem.name}")
    elif options.command == "bench" and lab.SIMULATED:
        raise Fault(
            f"{options.kernel}: there is no GPU, and a simulator is never timed. "
            f"`lab bench {options.operation} RUNG` shows a rung's recorded time"
        )
    else:
        fn = load(options.kernel)
    try:
        if options.command == "check":
            verdict = lab.check(fn, problem)
            print(verdict)
            return verdict.state != "🟢"
        if options.command == "compare":
            table = lab.compare(fn, options.operation, diff=options.diff)
            print(table)
            return not table.right
        print(lab.bench(fn, problem))
        return 0
    except (lab.CheckFailed, TypeError) as failure:
        raise Fault(str(failure)) from None
    except (KeyError, FileNotFoundError) as why:
        raise Fault(f"no recorded number: {why.args[0]}") from None


def generate(options) -> int:
    """Print a model's text."""
    try:
        import torch

        from solutions.qwen3_decode.config import ModelError
        from solutions.qwen3_decode.generate import write

        try:
            write(options.prompt, options.model, options.tokens, options.dtype)
        except ModelError as why:
            raise Fault(str(why)) from None
        except torch.OutOfMemoryError as why:
            said = str(why).partition(" If reserved")[0]
            raise Fault(f"the model does not fit: {said}") from None
        except BrokenPipeError:  # whoever reads the text, such as `head`, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt:  # the user has
            print()
            return 130
    except ModuleNotFoundError as why:
        raise Fault(f"{why.name} is not installed: pip install 'kernel-ladder[model]'") from None
    return 0


def record(options) -> int:
    """Run the chapter's GPU tests, record its results, execute its notebook, redraw the pages."""
    if lab.SIMULATED:
        raise Fault("lab record needs a CUDA GPU: a simulator is never timed")
    from labkit import pages
    from labkit.record import record as record_ladder

    ladder = _chapter(options.chapter)

    def gpu_tests() -> dict[str, int]:
        counts = _gpu_tests(ladder.slug)
        print(f"{ladder.slug}: {counts['passed']} GPU tests passed, {counts['failed']} failed")
        if counts["failed"]:
            raise Fault(f"{ladder.slug}: not recorded, since GPU tests fail")
        return counts

    path = record_ladder(ladder, gpu_tests=gpu_tests)
    print(f"wrote {path}")
    for notebook in (n for n in notebooks() if slug_of(n) == ladder.slug):
        execute(notebook)
        print(f"executed {notebook}")
    if path.parent.name == REFERENCE:
        pages.write(gallery=False)
    return 0


def _chapter(chapter: str):
    for notebook in notebooks():
        number, _, slug = notebook.stem.partition("_")
        if chapter in (number, slug, notebook.stem):
            return _find(slug)[0]
    return _find(chapter)[0]


def _gpu_tests(slug: str) -> dict[str, int]:
    """Counts of the chapter's tests in a run on this GPU: those of all chapters, and its own."""
    import xml.etree.ElementTree as ET

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-k",
                slug,
                "tests/test_solutions.py",
                "tests/test_arguments.py",
                *sorted(map(str, ROOT.glob(f"tests/test_{slug}*.py"))),  # a whole model has more
                f"--junitxml={report}",
                "-p",
                "no:cacheprovider",
            ],
            cwd=ROOT,
        )
        suite = ET.parse(report).getroot().find("testsuite").attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    skipped = int(suite["skipped"])
    return {
        "passed": int(suite["tests"]) - failed - skipped,
        "failed": failed,
        "skipped": skipped,
    }


def execute(notebook: Path) -> None:
    """Run a notebook in place and keep its outputs, without time stamps."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(notebook, as_version=4)
    NotebookClient(
        book, timeout=600, record_timing=False, resources={"metadata": {"path": notebook.parent}}
    ).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(book, notebook)


def sync(options) -> int:
    """Write or check the notebooks' kernel cells."""
    from labkit.sync import main as sync_main

    return sync_main(["--check"] * options.check)


def scorecard(options) -> int:
    """Write the generated pages."""
    from labkit import pages

    for path in pages.write(gallery=not options.no_gallery):
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def validate(options) -> int:
    """One line for each bad results file."""
    from labkit.results import validate as validate_file

    files = options.files or sorted(RESULTS.glob("*/*.json"))
    faults = [fault for f in files if (fault := validate_file(f))]
    for fault in faults:
        print(fault)
    print(f"{len(files) - len(faults)} of {len(files)} results files are good")
    return bool(faults)


COMMANDS = {
    "doctor": doctor,
    "check": _on_a_reader_kernel,
    "compare": _on_a_reader_kernel,
    "bench": _on_a_reader_kernel,
    "generate": generate,
    "record": record,
    "sync": sync,
    "scorecard": scorecard,
    "validate": validate,
}

if __name__ == "__main__":
    sys.exit(main())
