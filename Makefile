# `make help` lists the targets. Each creates the environment that it needs: .venv (everything),
# .venv-demo (no linters, no test tools), .venv-core (no torch, no Keras), .venv-docs (the site),
# .venv-dist (build, twine), .venv-hub (keras-hub), .venv-tensorflow, .venv-loggers (Weights & Biases, MLflow),
# .venv-orbax, .venv-keras-tests (what the tests of Keras import). The text after `##` is the help of a
# target; after `###`, below the others.

PYTHON ?= python3
VENV := .venv
CORE_VENV := .venv-core
DOCS_VENV := .venv-docs
DIST_VENV := .venv-dist
# The demo needs no development tools, and takes an environment that is there.
DEMO_VENV := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-demo)
HUB_VENV := .venv-hub
TENSORFLOW_VENV := .venv-tensorflow
LOGGERS_VENV := .venv-loggers
ORBAX_VENV := .venv-orbax
KERAS_TESTS_VENV := .venv-keras-tests
PIP_INSTALL := -m pip install --disable-pip-version-check -c constraints.txt

# Python compiles the modules that the tests import; to compile all that pip installs takes 20 seconds.
COMPILED_LATER := --no-compile
unexport PYTHONDONTWRITEBYTECODE

# These need torch; every other unit test and doctest must pass in .venv-core.
NEEDS_TORCH := src/shardcore/adapters src/shardcore/binding src/shardcore/api.py src/shardcore/callback_api.py src/shardcore/checkpoint_api.py src/shardcore/files_api.py src/shardcore/plan_api.py \
	src/shardcore/tensor_api.py src/shardcore/testing tests/unit/adapters tests/unit/binding tests/unit/gpu tests/unit/testing

# Two tests at a time, and three of those on ranks: one computes while the ranks of another wait, or a compiler runs.
# Of targets that run side by side each takes one core: no second process loads torch and the tests.
AT_A_TIME := $(if $(SIDE_BY_SIDE),-n 0,-n 2 --dist worksteal)
RANKS_AT_A_TIME := -n 3 --dist worksteal

# The distributed tests that are run under strategy manual too: they train, and take little time.
UNDER_MANUAL := functions loops lora train_step views
# One thread: the ranks are forked from this process.
FAULTS := KERAS_BACKEND=torch OMP_NUM_THREADS=1 $(VENV)/bin/python -m

.DEFAULT_GOAL := demo

# Targets take both cores, except those that `make test` runs side by side.
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif
.PHONY: help demo test lines test-fast test-long lint faults hosts checks unit unit-core unit-torch \
	distributed distributed-dtensor distributed-manual matrix-full \
	bench bench-jax examples hub states fuzz keras-tests tensorflow loggers orbax compat compat-all gpu docs dist traffic clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.* ## /{printf "make %-12s %s\n", $$1, $$2}' Makefile
	@echo; awk -F ':.*### ' '/^[a-z-]+:.* ### /{printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: $(DEMO_VENV)/.installed ## trains a model sharded over two processes, beside one device
	$(DEMO_VENV)/bin/python examples/demo.py

# Side by side, since none of them keeps both cores busy: installations, linters, the site and short tests.
test: ## runs everything that CI runs on two cores
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target SIDE_BY_SIDE=1 \
		lint docs unit-core unit-torch checks distributed-manual
	$(MAKE) --no-print-directory distributed-dtensor

# Not part of `make test`: measured steps take an eighth more time.
lines: export SHARDCORE_LINES = 1
lines: ### runs make test, and shows the lines that no test ran; fails below 90 %
	@rm -rf build/lines
	$(MAKE) --no-print-directory test
	$(call show_lines,90)

test-fast: export SHARDCORE_LINES = 1
test-fast: lint ## lints, runs the unit tests and doctests: two minutes at most
	$(call headline,unit tests and doctests with torch and Keras; the lines that they run)
	@rm -rf build/lines
	$(VENV)/bin/python -m pytest $(AT_A_TIME) tests/unit src --doctest-modules
	$(call show_lines,0)

lint: $(VENV)/.installed ## ruff, mypy, pyright and import-linter
	$(call headline,ruff check)
	$(VENV)/bin/ruff check .
	$(call headline,ruff format --check)
	$(VENV)/bin/ruff format --check .
	$(call headline,mypy --strict; the example plug-in too, and the lane for GPUs)
	$(VENV)/bin/mypy --strict
	$(call headline,pyright on the example plug-in)
	$(VENV)/bin/pyright
	$(call headline,import-linter)
	$(VENV)/bin/lint-imports --no-logo

checks: $(VENV)/.installed ### the linters bite; words, names, the tree; the wheel works elsewhere
	$(call headline,the linters bite; the wheel works elsewhere)
	$(VENV)/bin/python -m pytest $(AT_A_TIME) tests/checks

unit: unit-core unit-torch ## unit tests and doctests, without torch and Keras and with them

unit-core: $(CORE_VENV)/.installed
	$(call headline,unit tests and doctests without torch and Keras)
	$(CORE_VENV)/bin/python -c 'from importlib.util import find_spec; exit("the core may not have torch or Keras" if find_spec("torch") or find_spec("keras") else 0)'
	$(CORE_VENV)/bin/python -m pytest $(AT_A_TIME) tests/unit src --doctest-modules $(NEEDS_TORCH:%=--ignore=%)

unit-torch: $(VENV)/.installed
	$(call headline,unit tests and doctests that need torch and Keras)
	$(VENV)/bin/python -m pytest $(AT_A_TIME) $(NEEDS_TORCH) --doctest-modules

distributed: distributed-dtensor distributed-manual ## the tests on real ranks

# The matrices first: a test of theirs takes long, and none such is to be the last.
distributed-dtensor: $(VENV)/.installed
	$(call headline,distributed tests on real ranks and a part of the matrices of operators and layers)
	$(VENV)/bin/python -m pytest $(RANKS_AT_A_TIME) -m "not long" tests/matrix tests/distributed --durations=20

test-long: $(VENV)/.installed ## the tests that `make test` leaves out: a quarter of an hour
	$(call headline,the distributed tests that make test leaves out and a dozen random programs: a quarter of an hour)
	$(VENV)/bin/python -m pytest $(RANKS_AT_A_TIME) -m long tests/matrix tests/distributed --durations=20
	$(VENV)/bin/python -m pytest $(AT_A_TIME) tests/fuzz

distributed-manual: $(VENV)/.installed
	$(call headline,some distributed tests under strategy manual)
	SHARDCORE_TEST_STRATEGY=manual $(VENV)/bin/python -m pytest $(RANKS_AT_A_TIME) -m "not long" $(UNDER_MANUAL:%=tests/distributed/*/test_%.py)

matrix-full: $(VENV)/.installed ### compares every Keras layer and operator with one device, captured steps with eager ones: hours
	$(call headline,the whole of the matrices, which takes an hour or two, and docs/reference/coverage.md)
	$(VENV)/bin/python -m tests.matrix run; found=$$?; $(VENV)/bin/python -m tests.matrix page && exit $$found

faults: $(VENV)/.installed ### kills ranks, sends signals, damages files, trains for an hour: hours; PARTS="kills saves" AMOUNTS="--save-kills 3"
	$(call headline,faults on real processes and docs/reference/faults.md: hours)
	$(FAULTS) tests.faults $(PARTS:%=--part %) $(AMOUNTS)

hosts: $(VENV)/.installed ### trains on network namespaces as hosts, and cuts them off: six minutes, needs root
	$(call headline,two to four hosts that are network namespaces; links and hosts fail: six minutes)
	$(FAULTS) tests.hosts

bench: $(VENV)/.installed ## measures steps beside steps written by hand, and Keras on JAX after `make bench-jax`
	$(call headline,benchmarks: nothing else should run on this machine)
	$(VENV)/bin/python -m benchmarks $(BENCH)

bench-jax: build/bench-jax/.installed

hub: $(HUB_VENV)/.installed ### models of keras-hub over two ranks, beside one device; PART=policies: each policy on each family: hours
	$(call headline,models of keras-hub over two ranks beside one device)
	$(HUB_VENV)/bin/python -m $(if $(PART),tests.hub.$(PART),pytest $(AT_A_TIME) tests/hub --durations=10)

examples: $(VENV)/.installed ### runs the programs of examples/gallery whole on one and two ranks, and draws them: docs/gallery.md
	$(call headline,the programs of the gallery on one device and on two ranks and docs/gallery.md: ten minutes)
	$(VENV)/bin/python examples/pictures.py $(PROGRAMS)

states: $(VENV)/.installed ### changes Python state between captured steps in some 290 ways: two minutes; SEEDS=10
	$(call headline,changes of Python state between captured steps; none may be missed)
	$(VENV)/bin/python -m tests.distributed.capture.states $(SEEDS)

SECONDS ?= 600
fuzz: $(VENV)/.installed ### random programs over ranks and on one device: ten minutes; SECONDS=60 SEED=17
	$(call headline,random programs over two to four ranks beside one device: $(SECONDS) seconds)
	$(VENV)/bin/python -m tests.fuzz --seconds $(SECONDS) $(SEED:%=--seed %)

keras-tests: $(KERAS_TESTS_VENV)/.installed ### the tests of Keras itself over two ranks: hours; VARIANT=installed ONLY=layers/core
	$(call headline,the tests of Keras itself over two ranks)
	OMP_NUM_THREADS=1 $(KERAS_TESTS_VENV)/bin/python -m tests.keras_tests $(VARIANT:%=--variant "%") $(ONLY:%=--only %)

tensorflow: $(TENSORFLOW_VENV)/.installed ### what needs TensorFlow beside torch: tf.data, TensorBoard, exports
	$(call headline,tests that need TensorFlow)
	$(TENSORFLOW_VENV)/bin/python -m pytest -n 0 tests/distributed/guides/test_tensorflow.py

loggers: $(LOGGERS_VENV)/.installed ### callbacks of Keras, Weights & Biases and MLflow, offline: docs/reference/callbacks.md
	$(call headline,tests of callbacks of Keras and of loggers and docs/reference/callbacks.md)
	$(LOGGERS_VENV)/bin/python -m tests.loggers

orbax: $(ORBAX_VENV)/.installed ### folders of OrbaxCheckpoint, written by Keras on torch and on JAX: three minutes
	$(call headline,folders of OrbaxCheckpoint on one and on several ranks)
	OMP_NUM_THREADS=1 $(ORBAX_VENV)/bin/python -m pytest -n 0 tests/orbax

# The environments are in a cache folder, since torch for CUDA takes 5 GB: see tests/compat.
TORCH ?= newest
KERAS ?= newest
compat: ### a part of the tests with other releases: TORCH=2.15.0 KERAS=3.15.1, or newest
	$(call headline,tests with torch $(TORCH) and Keras $(KERAS))
	$(PYTHON) -m tests.compat --torch $(TORCH) --keras $(KERAS) $(COMPAT)

compat-all: ### the same for the table of pairs: docs/reference/compatibility.md
	$(call headline,tests with every pair of the table and docs/reference/compatibility.md: hours)
	$(PYTHON) -m tests.compat --all $(COMPAT)

gpu: $(VENV)/.installed ## tests and a benchmark on the GPUs of this machine: docs/reference/gpu.md
	$(call headline,tests and a benchmark on the GPUs of this machine and docs/reference/gpu.md: half an hour)
	$(VENV)/bin/python -m tests.gpu $(PART:%=--part %)

docs: $(DOCS_VENV)/.installed ## builds the documentation site into build/site
	$(call headline,the documentation site: build/site/index.html)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

dist: $(DIST_VENV)/.installed ## builds the wheel and the sdist into dist, and checks them with twine
	$(call headline,the wheel and the sdist: dist)
	@rm -rf dist
	$(DIST_VENV)/bin/python -m build
	$(DIST_VENV)/bin/twine check --strict dist/*

traffic: $(VENV)/.installed build/bench-jax/.installed ### bytes that a rank sends in a step, beside those of Keras on JAX: half an hour
	$(call headline,bytes that a rank sends in a training step beside those that XLA sends: half an hour or more)
	$(VENV)/bin/python -m benchmarks.traffic $(TRAFFIC)

clean: ## deletes environments, builds and caches
	rm -rf $(VENV) .venv-demo $(CORE_VENV) $(DOCS_VENV) $(DIST_VENV) $(HUB_VENV) $(TENSORFLOW_VENV) $(LOGGERS_VENV) $(ORBAX_VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call headline,installing shardcore with torch and Keras into $(VENV))
	$(create_venv)
	$(VENV)/bin/python $(PIP_INSTALL) $(COMPILED_LATER) -e '.[torch,dev]'
	@touch $@

.venv-demo/.installed: pyproject.toml constraints.txt
	$(call headline,installing shardcore with torch and Keras into .venv-demo: a minute or two)
	$(create_venv)
	$(@D)/bin/python $(PIP_INSTALL) -e '.[torch]'
	@touch $@

$(CORE_VENV)/.installed: pyproject.toml constraints.txt
	$(call headline,installing shardcore alone into $(CORE_VENV))
	$(create_venv)
	$(CORE_VENV)/bin/python $(PIP_INSTALL) $(COMPILED_LATER) -e . pytest pytest-xdist hypothesis numpy
	@touch $@

$(DOCS_VENV)/.installed: pyproject.toml constraints-docs.txt
	$(call headline,installing what builds the documentation site into $(DOCS_VENV))
	$(create_venv)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c constraints-docs.txt $(COMPILED_LATER) -e '.[docs]'
	@touch $@

$(DIST_VENV)/.installed: constraints-dist.txt
	$(call headline,installing what builds and checks the wheel into $(DIST_VENV))
	$(create_venv)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c constraints-dist.txt build twine
	@touch $@

# keras-hub asks for TensorFlow, of 600 MB, and imports it only if it is there; its own fit needs Grain.
$(HUB_VENV)/.installed: pyproject.toml constraints-hub.txt
	$(call headline,installing keras-hub without TensorFlow into $(HUB_VENV))
	$(create_venv)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c constraints-hub.txt -e '.[torch]' \
		pytest pytest-xdist hypothesis grain kagglehub regex safetensors sentencepiece tokenizers
	$(@D)/bin/python -m pip install --disable-pip-version-check -c constraints-hub.txt --no-deps keras-hub
	@touch $@

$(TENSORFLOW_VENV)/.installed: pyproject.toml constraints.txt
	$(call headline,installing shardcore beside TensorFlow into $(TENSORFLOW_VENV))
	$(create_venv)
	$(@D)/bin/python $(PIP_INSTALL) $(COMPILED_LATER) -e '.[torch,dev]' 'tensorflow-cpu==2.20.*' 'tensorboard==2.20.*'
	@touch $@

# MLflow writes into a database by default: its small package does not ask for what that needs.
$(LOGGERS_VENV)/.installed: pyproject.toml constraints.txt
	$(call headline,installing shardcore beside TensorFlow with Weights & Biases and MLflow into $(LOGGERS_VENV))
	$(create_venv)
	$(@D)/bin/python $(PIP_INSTALL) $(COMPILED_LATER) -e '.[torch,dev]' 'tensorflow-cpu==2.20.*' 'tensorboard==2.20.*' \
		'wandb==0.31.*' 'mlflow-skinny==3.17.*' 'sqlalchemy==2.*' 'alembic==1.*'
	@touch $@

$(ORBAX_VENV)/.installed: pyproject.toml constraints.txt
	$(call headline,installing shardcore beside Orbax and JAX into $(ORBAX_VENV))
	$(create_venv)
	$(@D)/bin/python $(PIP_INSTALL) $(COMPILED_LATER) -e '.[torch,dev]' 'orbax-checkpoint==0.12.*' 'jax==0.10.*'
	@touch $@

# What Keras' own tests compare with, or read files by.
$(KERAS_TESTS_VENV)/.installed: pyproject.toml constraints.txt
	$(call headline,installing shardcore and what the tests of Keras import into $(KERAS_TESTS_VENV))
	$(create_venv)
	$(@D)/bin/python $(PIP_INSTALL) $(COMPILED_LATER) -e '.[torch,dev]' 'tensorflow-cpu==2.20.*' 'jax==0.10.*' \
		grain pandas pillow scikit-learn scipy
	@touch $@

build/bench-jax/.installed: benchmarks/constraints-jax.txt
	$(call headline,installing Keras on JAX into build/bench-jax)
	$(create_venv)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c $< attrs jax keras numpy
	@touch $@

# Prints a line that names the step.
define headline
@printf '\n== %s ==\n' '$(1)'
endef

# Fails if tests ran a smaller percentage of the lines.
define show_lines
$(call headline,the lines of src that no test ran)
@$(VENV)/bin/python -m tests.line_coverage $(1)
endef

# Creates the environment that holds the target's stamp file.
define create_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "shardcore needs Python 3.11 or newer, and '$(PYTHON)' is not: $$($(PYTHON) --version 2>&1)."; \
	echo "Name another one: make PYTHON=/path/to/python3.11 $(if $(SIDE_BY_SIDE),test,$(MAKECMDGOALS))"; exit 1; } >&2
$(PYTHON) -m venv $(@D)
endef
