# The Kernel Ladder. `make` alone lists what it can do.
#
#   PYTHON=python3.12     which Python makes the environment (3.11 to 3.13)
#   VENV=$CONDA_PREFIX    use this environment instead of .venv (the conda route, environment.yml)
#   LABKIT_DEVICE=sim     use the simulators even where there is a GPU
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
READY := $(VENV)/.kernel-ladder-installed
HTML := _build/html
# Two processes: two cores are what CI has, and on a GPU each needs its memory. A notebook stays whole.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2
NBVAL := $(PYTEST) --dist loadfile --nbval chapters

.DEFAULT_GOAL := help
.PHONY: help book test lab record sync

help:
	@echo 'make book                build the book and print where it is'
	@echo 'make test                everything CI runs (15 to 30 minutes; no GPU needed)'
	@echo 'make lab                 open the chapters in JupyterLab'
	@echo 'make record CHAPTER=03   run a chapter on this GPU and keep its results and outputs'
	@echo 'make sync                write the kernels of solutions/ into the notebooks'

# Set-up: once, and again when pyproject.toml changes.
$(READY): pyproject.toml
	@if [ ! -x '$(BIN)/python' ]; then \
	  '$(PYTHON)' -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	    echo "The lab needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is $$('$(PYTHON)' --version 2>&1 | head -n 1)."; \
	    echo "Name another one:  make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12"; exit 1; }; \
	  '$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "Python's venv module is missing. On Debian and Ubuntu:  sudo apt install python3-venv"; exit 1; }; \
	  '$(PYTHON)' -m venv '$(VENV)' || exit 1; \
	fi
	@echo '== Set-up: installing into $(VENV). Once, 2 to 15 minutes: PyTorch for CUDA is a download of some GB.'
	@'$(BIN)/python' -m pip install -qq --disable-pip-version-check -e '.[all]' || { \
	  echo "The installation failed (pip's message is above). Run the same command again to retry."; exit 1; }
	@touch '$@'

# .complete comes last: tests/test_book.py reads this build only if it finished and no source is newer.
book: $(READY)
	@echo '== Building the book (under a minute)'
	@rm -rf _build
	@mkdir -p _build
	@'$(BIN)/jupyter-book' build . -W --keep-going -n --all -q > _build/log.txt 2>&1 || { cat _build/log.txt; \
	  echo 'The book has warnings or errors: see above.'; exit 1; }
	@touch $(HTML)/.complete
	@echo 'The book is in  $(CURDIR)/$(HTML)/index.html'
	@echo 'Open that file in a browser; from another machine:  $(BIN)/python -m http.server -d $(HTML)'

# Cheap steps first.
test: $(READY)
	@echo '== 1/8 ruff: lint and format'
	@'$(BIN)/ruff' check --quiet .
	@'$(BIN)/ruff' format --check --quiet . || { echo 'Not formatted: $(BIN)/ruff format .'; exit 1; }
	@echo '== 2/8 the notebooks show the kernels of solutions/'
	@'$(BIN)/python' -m labkit.sync --check
	@echo '== 3/8 packaging and notebook hygiene'
	@'$(BIN)/python' -m pytest -q tests/test_packaging.py tests/test_notebooks.py
	@echo '== 4/8 the book, warnings as errors'
	@$(MAKE) --no-print-directory book
	@echo '== 5/8 the pages, in a browser where there is one'
	@'$(BIN)/python' -m pytest -q tests/test_book.py
	@echo '== 6/8 labkit and the kernels'
	@$(PYTEST) --dist worksteal tests --ignore tests/test_packaging.py --ignore tests/test_notebooks.py --ignore tests/test_book.py
	@echo '== 7/8 the chapters as a learner finds them'
	@LABKIT_MODE=learner $(NBVAL)
	@echo '== 8/8 the chapters with the solutions filled in'
	@LABKIT_MODE=solution $(NBVAL)
	@echo 'All passed.'

lab: $(READY)
	@echo '== JupyterLab: open a notebook in chapters/ (Ctrl-C here stops it)'
	@'$(BIN)/python' -m jupyter lab

record: $(READY)
	@test -n '$(CHAPTER)' || { echo 'Which chapter?  make record CHAPTER=03'; exit 2; }
	@test -n '$(wildcard chapters/$(CHAPTER)_*.ipynb)' || { echo 'No chapters/$(CHAPTER)_*.ipynb'; exit 2; }
	@'$(BIN)/lab' record '$(CHAPTER)'

sync: $(READY)
	@'$(BIN)/python' -m labkit.sync
