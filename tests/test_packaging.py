"""Two commands on a fresh machine: the Makefile, the one list of pins, and who reads it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = [
    Requirement(line)
    for line in [*PROJECT["dependencies"], *(p for extra in EXTRAS.values() for p in extra)]
    if not line.startswith(PROJECT["name"])
]


def test_conda_route_has_no_second_list_of_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    python, pip, packages = environment["dependencies"]
    assert pip == "pip"
    assert packages == {"pip": ["-e .[all]"]}
    name, version = python.split("=")
    assert name == "python"
    assert SpecifierSet(PROJECT["requires-python"]).contains(version)


def test_all_means_what_the_book_the_lab_and_the_tests_need():
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == {"lab", "book", "test", "model"}


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_every_package_is_bounded_above(pin):
    """A release made tomorrow must not break a course that runs today."""
    bounded = {"<", "<=", "==", "~="} & {rule.operator for rule in pin.specifier}
    assert bounded, f"{pin} admits any future version"


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_installed_packages_satisfy_the_pins(pin):
    try:
        version = importlib.metadata.version(pin.name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{pin.name} is not installed")
    assert pin.specifier.contains(version, prereleases=True)


def test_torch_admits_cpu_and_cuda_builds():
    pins = {pin.name: pin.specifier for pin in PINS}
    for build in ("2.9.1+cpu", "2.11.0+cu130", "2.13.0+cpu", "2.13.0"):
        assert pins["torch"].contains(build)
    assert not pins["numpy"].contains("2.5.0"), "numba-cuda 0.30 fails beside numpy 2.5"


def test_readme_names_only_targets_that_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(re.findall(r"`+[^`]+`+", readme))))
    assert {"book", "test"} <= named <= targets


def test_ci_runs_the_test_command():
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert ci.read_text(encoding="utf-8").splitlines()[-1] == "make test"


# The Makefile, run where nothing can be installed ------------------------------------------------


def run_make(folder: Path, *args: str) -> subprocess.CompletedProcess:
    """`make` in a folder that holds only what set-up reads."""
    for name in ("Makefile", "pyproject.toml"):
        if not (folder / name).exists():
            shutil.copy(ROOT / name, folder)
    # Not the variables of a `make test` around this test.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    env = {k: v for k, v in env.items() if k not in ("PYTHON", "VENV", "CHAPTER")}
    return subprocess.run(
        ["make", *args], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_make_alone_lists_the_targets(tmp_path):
    made = run_make(tmp_path)
    assert made.returncode == 0
    for target in ("book", "test", "lab", "record", "sync"):
        assert f"make {target}" in made.stdout
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("found", ["Python 3.10.13", "Python 3.14.0", ""])
def test_a_python_that_will_not_do_is_named(tmp_path, found):
    python = script(tmp_path / "python", f'[ "$1" = --version ] && echo "{found}"; exit 1')
    made = run_make(tmp_path, "book", f"PYTHON={python}")
    assert made.returncode != 0
    assert "3.11, 3.12 or 3.13" in made.stdout
    assert f"is {found}" in made.stdout
    assert "make book PYTHON=" in made.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_not_there_is_named(tmp_path):
    made = run_make(tmp_path, "test", "PYTHON=python3.99")
    assert made.returncode != 0
    assert "python3.99" in made.stdout


def test_a_missing_venv_module_is_named_and_leaves_nothing(tmp_path):
    # As on Debian without python3-venv: the version will do, ensurepip does not import.
    python = script(tmp_path / "python", 'case "$2" in *ensurepip*) exit 1;; esac; exit 0')
    made = run_make(tmp_path, "book", f"PYTHON={python}")
    assert made.returncode != 0
    assert "python3-venv" in made.stdout
    assert not (tmp_path / ".venv").exists()


def test_an_interrupted_set_up_is_repeated(tmp_path):
    pip = script(tmp_path / "env" / "bin" / "python", 'echo "$@" >> pip.log; exit 1')
    made = run_make(tmp_path, "sync", "VENV=env")
    assert made.returncode != 0
    assert "installation failed" in made.stdout
    script(pip, 'echo "$@" >> pip.log')
    made = run_make(tmp_path, "sync", "VENV=env")
    assert made.returncode == 0, made.stdout + made.stderr
    made = run_make(tmp_path, "sync", "VENV=env")
    log = (tmp_path / "pip.log").read_text(encoding="utf-8").splitlines()
    install = "-m pip install -qq --disable-pip-version-check -e .[all]"
    assert log == [install, install, "-m labkit.sync", "-m labkit.sync"]


@pytest.mark.parametrize(("args", "wanted"), [((), "CHAPTER=03"), (("CHAPTER=99",), "chapters/99")])
def test_record_says_which_chapter_it_lacks(tmp_path, args, wanted):
    script(tmp_path / "env" / "bin" / "python", "exit 0")
    made = run_make(tmp_path, "record", "VENV=env", *args)
    assert made.returncode != 0
    assert wanted in made.stdout
