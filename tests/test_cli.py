"""The `lab` command, as a reader meets it: in a process of its own."""

import labkit as lab

import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

RIGHT = """
import labkit as lab
import torch
from numba import cuda

@cuda.jit
def add_kernel(x1, x2, y):
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = x1[i] + x2[i]

def mine(x1, x2):
    y = torch.empty(x1.shape, dtype=x1.dtype, device=x1.device)
    if y.numel():
        add_kernel[(y.numel() + 63) // 64, 64, lab.stream()](x1, x2, y)
    return y

def plain(x1, x2):
    return x1 + x2

def wrong(x1, x2):
    return x1 - x2

def three(x1, x2, x3):
    return x1

def throws(x1, x2):
    raise RuntimeError("out of coffee")

def hangs(x1, x2):
    while True:
        pass

def crashes(x1, x2):
    import os, signal
    os.kill(os.getpid(), signal.SIGSEGV)

number = 3
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "my_file.py"
    path.write_text(RIGHT)
    return path


def run(*arguments, timeout=120):
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_doctor_says_where_kernels_run():
    out = run("doctor")
    assert out.returncode == 0
    assert ("simulators" in out.stdout) == lab.SIMULATED
    assert "Not verified here" in out.stdout
    assert "torch" in out.stdout


def test_compare_shows_mine_beside_the_others(kernels):
    out = run("compare", "vector_add", f"{kernels}:mine", "--diff")
    assert out.returncode == 0, out.stderr
    for words in ("mine", "solution", "naive", "torch.add", "🟢 right", "registers", "-def "):
        assert words in out.stdout
    assert ("× ledger" if lab.SIMULATED else "useful bandwidth") in out.stdout


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf"])
def test_a_timeout_is_a_time(kernels, timeout):
    out = run("check", "vector_add", f"{kernels}:mine", f"--timeout={timeout}")
    assert out.returncode == 1
    assert out.stderr == f"timeout={float(timeout)}: write a number of seconds above 0\n"


def test_compare_takes_a_plain_torch_function(kernels):
    out = run("compare", "vector_add", f"{kernels}:plain")
    assert out.returncode == 0, out.stderr
    assert "🟢 right" in out.stdout


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("wrong", "subtracts"),
        ("three", "wrong signature"),
        ("throws", "out of coffee"),
        ("nothing", "it defines: .*mine"),
        ("number", "not a function"),
    ],
)
def test_compare_of_a_bad_kernel_ends_with_1_and_a_reason(kernels, kernel, words):
    out = run("compare", "vector_add", f"{kernels}:{kernel}")
    assert out.returncode == 1
    import re

    assert re.search(words, out.stdout + out.stderr), out.stdout + out.stderr
    assert "Traceback" not in out.stderr


def test_check_of_a_wrong_kernel_names_the_bug(kernels):
    out = run("check", "vector_add", f"{kernels}:wrong")
    assert out.returncode == 1
    assert "🔴 wrong: subtracts" in out.stderr


def test_a_hang_ends_at_the_timeout(kernels):
    out = run("check", "vector_add", f"{kernels}:hangs", "--timeout", "20")
    assert out.returncode == 1
    assert "hang" in out.stderr


def test_a_crash_ends_only_the_child(kernels):
    out = run("check", "vector_add", f"{kernels}:crashes")
    assert out.returncode == 1
    assert "SIGSEGV" in out.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [("import no_such_package\n", "no_such_package"), ("def f(:\n", "line 1")],
)
def test_a_file_that_does_not_import_is_reported(tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    out = run("check", "vector_add", f"{path}:f")
    assert out.returncode == 1
    assert words in out.stderr
    assert "does not import" in out.stderr
    assert "Traceback" not in out.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "vector_add", "no_file.py:f"), "no_file.py: no such file"),
        (("check", "vector_add", "no_colon"), "FILE.py:NAME"),
        (("check", "no_such_op", "x.py:f"), "no_such_op.*is not one of.*rms_norm"),
        (("bench", "vector_add", "no_such_rung"), "no_such_rung"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    import re

    out = run(*arguments)
    assert out.returncode == 1
    assert re.search(words, out.stderr), out.stderr


def test_bench_without_a_gpu_shows_the_recorded_number():
    out = run("bench", "vector_add", "vector_add_naive")
    assert out.returncode == 0, out.stderr
    assert "measured on NVIDIA" in out.stdout


def test_generate_prints_the_small_models_text():
    out = run("generate", "To be", "--tokens", "20")
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("To be")
    assert len(out.stdout.split()) > 5


def generate(capsys, *arguments):
    """Exit code, output and the one line of errors of `lab generate`, run in this process."""
    from labkit.cli import main

    code = main(["generate", *arguments])
    printed = capsys.readouterr()
    assert printed.err.count("\n") == (code != 0)
    return code, printed.out, printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), "prompt=''"),
        (("word " * 3000,), "tokens, the cache 2048 slots"),
        (("a", "--tokens", "-1"), "tokens=-1"),
        (("a", "--dtype", "int8"), "dtype='int8'"),
        (("a", "--model", "no_such_folder"), "model='no_such_folder'"),
    ],
    ids=["empty", "long", "tokens", "dtype", "model"],
)
def test_generate_names_what_is_wrong(arguments, words, capsys):
    code, out, error = generate(capsys, *arguments)
    assert (code, out) == (1, "")
    assert words in error


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("model.safetensors", None, None, "model.safetensors: no such file"),
        ("model.safetensors", b"}}", b"", "model.safetensors: cut short"),
        ("model.safetensors", b'"BF16"', b'"F16" ', "has dtype float16, config.json says bfloat16"),
        ("config.json", b'"qwen3"', b'"llama"', "config.json: model_type='llama'"),
        ("config.json", b'"hidden_size": 256', b'"hidden_size": 128', "has shape"),
        ("config.json", b'"vocab_size": 1024', b'"vocab_size": 64', "has shape"),
        ("tokenizer.json", b"{", b"", "tokenizer.json: not JSON"),
    ],
)
def test_generate_names_a_bad_file_and_leaves_the_folder_alone(
    file, old, new, words, tmp_path, capsys
):
    from solutions.qwen3_decode.weights import SMALL

    folder = Path(shutil.copytree(SMALL, tmp_path / "model"))
    data = (folder / file).read_bytes()
    (folder / file).unlink()
    if old is not None:
        (folder / file).write_bytes(data.replace(old, new))
    before = sorted(f.name for f in tmp_path.rglob("*"))
    code, out, error = generate(capsys, "a", "--model", str(folder))
    assert (code, out) == (1, "")
    assert words in error
    assert file in error or file == "config.json"
    assert sorted(f.name for f in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("package", ["safetensors", "tokenizers", "huggingface_hub"])
def test_generate_without_the_extra_says_what_to_install(package, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "solutions.qwen3_decode.generate", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    model = "lab/no-such-model" if package == "huggingface_hub" else "small"
    code, _, error = generate(capsys, "a", "--model", model)
    assert code == 1
    assert package in error
    assert "pip install 'kernel-ladder[model]'" in error


def test_generate_on_a_gpu_that_is_too_small_says_so(monkeypatch, capsys):
    import torch

    module = importlib.import_module("solutions.qwen3_decode.generate")
    said = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 2 GiB."

    def write(*arguments):
        raise torch.OutOfMemoryError(f"{said} If reserved but unallocated memory is large, try …")

    monkeypatch.setattr(module, "write", write)
    code, out, error = generate(capsys, "a")
    assert (code, out) == (1, "")
    assert error.count("\n") == 1
    assert error.endswith(f"the model does not fit: {said}\n")


def test_the_ladder_needs_no_extra():
    """`lab check` imports every chapter, and the lab is installed without extras."""
    code = "import sys; sys.modules.update(dict.fromkeys(('safetensors', 'tokenizers', 'jinja2',"
    code += " 'huggingface_hub', 'transformers'))); import solutions.qwen3_decode"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize("package", ["numba.cuda", "triton"])
def test_simulators_imported_too_late_is_an_import_error(package):
    environment = {
        k: v for k, v in os.environ.items() if k not in ("NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET")
    }
    out = subprocess.run(
        [sys.executable, "-c", f"import {package}\nimport labkit"],
        capture_output=True,
        text=True,
        env={**environment, "LABKIT_DEVICE": "sim"},
    )
    assert out.returncode == 1
    assert "ImportError" in out.stderr
    assert "import labkit as lab" in out.stderr


def test_labkit_imports_quickly():
    code = "import torch, time; t = time.time(); import labkit; print(time.time() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(2)
    ]
    assert min(times) < 2


def test_an_unknown_device_is_named():
    out = subprocess.run(
        [sys.executable, "-c", "import labkit"],
        capture_output=True,
        text=True,
        env={**os.environ, "LABKIT_DEVICE": "gpu"},
    )
    assert out.returncode == 1
    assert "LABKIT_DEVICE='gpu' is not auto or sim" in out.stderr


@pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
def test_an_empty_kernel_measures_under_5_microseconds():
    from labkit.bench import ceilings

    assert ceilings()["empty_kernel_s"] < 5e-6


@pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
def test_the_same_rung_timed_twice_differs_by_under_3_percent():
    ladder, problem = lab.find("vector_add")
    for rung in ladder.rungs[:4]:
        first, second = (lab.bench(rung, problem).p50_s for _ in range(2))
        assert abs(first - second) < 0.03 * first, (rung.name, first, second)


@pytest.mark.skipif(lab.SIMULATED, reason="needs a CUDA GPU")
def test_a_graph_of_long_calls_takes_as_long_as_the_calls():
    ladder, problem = lab.find("vector_add")
    assert problem.timing == "events"
    in_graph = replace(problem, timing="graph")
    rung = lab.Rung(ladder.rungs[1].fn, ladder.rungs[1].kind)
    alone, together = (lab.bench(rung, p).p50_s for p in (problem, in_graph))
    assert abs(alone - together) < 0.05 * alone, (alone, together)


BADLY_BEHAVED = """
import functools
import os

def right(x1, x2):
    return x1 + x2

partial = functools.partial(right)

def interrupts(x1, x2):
    raise KeyboardInterrupt

def dies(x1, x2):
    os._exit(5)
"""


@pytest.mark.parametrize(
    ("command", "name", "code", "words"),
    [
        ("compare", "partial", 0, "partial: right"),
        ("check", "interrupts", 1, "interrupts: it raised KeyboardInterrupt"),
        ("check", "dies", 1, "dies: it ended the process, with exit code 5"),
        ("bench", "right", 1, "a simulator is never timed"),
    ],
)
def test_a_badly_behaved_kernel_gets_one_clear_line(tmp_path, command, name, code, words):
    if command == "bench" and not lab.SIMULATED:
        pytest.skip("times it on a GPU")
    (tmp_path / "k.py").write_text(BADLY_BEHAVED)
    out = run(command, "vector_add", f"{tmp_path / 'k.py'}:{name}")
    assert out.returncode == code
    assert words in out.stdout + out.stderr
    assert "Traceback" not in out.stderr
