# `make demo` and `make test` need nothing but a Python of 3.10, 3.11 or 3.12 and the network, once.
# Everything is installed into .venv; no environment has to be active, and none outside .venv is changed.

VENV   := .venv
# The interpreter to make .venv with; by default the first of python3, python3.12, python3.11, python3.10 that will do.
PYTHON ?=
# A directory with PyTorch for `make bench`.
TORCH  ?=
OUTPUT ?= demo_out
# How many processes share the tests; each may start four ranks of its own, of some 300 MB.
WORKERS ?= 2

BIN    := $(VENV)/bin
# Installed again when, and only when, what is to be installed changes.
STAMP  := $(VENV)/.installed-$(shell cat setup.py constraints.txt | cksum | cut -d' ' -f1)
# The environment of PaddleNLP, which cannot be that of PaddleFormers.
NLP_VENV  := .venv-nlp
NLP_STAMP := $(NLP_VENV)/.installed-$(shell cat setup.py constraints-nlp.txt | cksum | cut -d' ' -f1)

# An interpreter's environment of the caller must not leak into .venv.
unexport PYTHONPATH
unexport PYTHONHOME
# Hundreds of processes import this package; each would compile it.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu test-nlp stats matrix verification-long lint docs guarantees optimizers semi-auto families plan-pictures mutants soak bench bench-async bench-mapping bench-planning scale format install clean

help:
	@echo "make demo     train, resume under other layouts, export; a table and a picture in $(OUTPUT)/"
	@echo "make test     all checks, and every test but the slow ones; of tests that start ranks, a fifth of the cases"
	@echo "make test-all all checks and all tests"
	@echo "make test-gpu the tests of device memory on a GPU, by an environment that has one: PYTHON=python"
	@echo "make test-nlp the tests of PaddleNLP's Trainer, in $(NLP_VENV), which it makes (Python 3.11)"
	@echo "make stats    lines of code, tests and documents by package, and the imports between packages"
	@echo "make matrix   the verification matrices again: tables in docs/results"
	@echo "make verification-long  50 steps, then 200 under other layouts: losses and a picture"
	@echo "make lint     the checks alone: ruff, mypy, the import contracts"
	@echo "make docs     the documents as a site in site/, which needs no network"
	@echo "make guarantees  write docs/results/guarantees.md from what the tests of known faults see"
	@echo "make optimizers  write the table of docs/optimizers.md from what the tests of optimizers see"
	@echo "make families  write docs/families.md from what the tests of families compare"
	@echo "make plan-pictures  the pictures of docs/plan.md, with Chromium"
	@echo "make semi-auto  write docs/results/semi-auto.md: hybrid runs, and semi-automatic ones that resume them"
	@echo "make mutants  300 random faults in the sources, one at a time: the share that the tests notice"
	@echo "make soak     10,000 random mutations, 30,000 hostile documents, every instant at which a save can meet an accident"
	@echo "make bench    saving, loading and exporting, first and later calls beside other systems: docs/results/performance.md"
	@echo "make bench-async  for how long training stands still for a save: docs/async.md"
	@echo "make bench-mapping  binding and proving 100,000 tensors, beside stock's engine"
	@echo "make bench-planning  planning a load of 100,000 stored tensors for 8 ranks"
	@echo "make scale    what a rank does in jobs of 64 to 10,240 ranks, counted: docs/results/scale.md"
	@echo "make format   let ruff format the sources"
	@echo "make install  only what demo and test do first: .venv with everything in it"
	@echo "make clean    remove .venv, the demo's output and every cache"

install: $(STAMP)

$(STAMP):
	@PYTHON='$(PYTHON)' VENV='$(VENV)' STAMP='$(STAMP)' sh tools/install.sh

demo: $(STAMP)
	@$(BIN)/python -m verification.demo '$(OUTPUT)'

# Resumes at the first cell without a result; `rm -rf out/matrix` starts again. The exit code is that of the last failure.
matrix: $(STAMP)
	@code=0; for recipe in recipes/verification/*.yaml; do $(BIN)/python -m verification.matrix $$recipe || code=$$?; done; exit $$code

# Resumes at the first run without a result; `rm -rf out/long_run` starts again.
verification-long: $(STAMP)
	@$(BIN)/python -m verification.long_run docs/results out/long_run

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

# Strict: a link or an anchor that leads nowhere is an error. With --quiet MkDocs would not count them.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo site/index.html

# The tests of a file stay together: they share the ranks that were started for them.
test: lint
	@$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --sample

# Every case of every test, before a release.
test-all: lint
	@$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# With the interpreter of an environment in which Paddle has CUDA; `make install` installs Paddle for CPUs.
test-gpu:
	@FLEX_TEST_DEVICE=gpu $(or $(PYTHON),$(BIN)/python) -m pytest -ra tests/device

$(NLP_STAMP):
	@PYTHON='$(or $(PYTHON),python3.11)' VENV='$(NLP_VENV)' STAMP='$(NLP_STAMP)' CONSTRAINTS=constraints-nlp.txt EXTRAS=nlp,nlptest sh tools/install.sh

# Checkpoints are exchanged with PaddleFormers, in whose environment the other side runs. No other conftest.py is read:
# those import what only that environment has.
test-nlp: $(STAMP) $(NLP_STAMP)
	@FLEX_FORMERS_PYTHON=$(BIN)/python $(NLP_VENV)/bin/python -m pytest --confcutdir tests/nlp tests/nlp

stats: $(STAMP)
	@$(BIN)/python tools/stats.py

guarantees: $(STAMP)
	@$(BIN)/python -m pytest -q -p tests.corruption.writing tests/corruption tests/crash

optimizers: $(STAMP)
	@FLEX_WRITE_OPTIMIZERS=1 $(BIN)/python -m pytest -q tests/trainer/test_optimizers.py -k table

families: $(STAMP)
	@FLEX_WRITE_FAMILIES=1 $(BIN)/python -m pytest -q tests/parity/test_families.py -k page

# With Chromium, such as Debian's.
plan-pictures: $(STAMP)
	@FLEX_WRITE_PICTURES=1 $(BIN)/python -m pytest -q tests/cli/test_plan_page.py -k window

semi-auto: $(STAMP)
	@FLEX_WRITE_SEMI_AUTO=1 $(BIN)/python -m pytest -q tests/trainer/test_semi_auto.py -k continues

# In copies of the last commit, by two processes. Continues where it was interrupted.
mutants: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py

soak: $(STAMP)
	@FLEX_MUTATIONS=10000 $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 tests/corruption/test_mutations.py
	@FLEX_ALL_INSTANTS=1 $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 -o timeout=7200 tests/crash/test_sweeps.py
	@FLEX_HOSTILE=3000 FLEX_HOSTILE_SEED=2 $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 tests/corruption/test_hostile_documents.py

# PyTorch takes part where it is installed, or from a directory of its own: pip install --target DIR torch==2.13.0, TORCH=DIR
bench: $(STAMP)
	@$(BIN)/python -m benchmarks.performance --torch '$(TORCH)' --write docs/results/performance.md
	@$(BIN)/python -m benchmarks.asynchronous --write docs/async.md
	@$(BIN)/python -m benchmarks.averaging --write docs/ema.md

bench-async: $(STAMP)
	@$(BIN)/python -m benchmarks.asynchronous --write docs/async.md

bench-mapping: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mapping.py --write docs/results/mapping-performance.md

bench-planning: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/planning.py --write docs/results/planning-performance.md

scale: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m verification.scale

format: $(STAMP)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(NLP_VENV) demo_out site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
