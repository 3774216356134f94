# Two commands do everything on a fresh machine with Python, git and make: `make demo` runs the main
# job, `make test` passes the tests. Each sets up its environment once and again when setup.cfg changes.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo benchmark-mnist docs check check-contrib test test-all test-fast test-262 test-262-cpu test-gpu test-gpu-262 test-libraries test-libraries-short test-paddlenlp-short test-paddleformers-short environments test-models test-whole test-next benchmarks benchmarks-short release types lint clean distclean

PYTHON ?= $(shell for name in python3.11 python3; do $$name -c '' 2>/dev/null && echo $$name && break; done)
# Where an environment has its programs: on Windows, make and bash are those of Git's shell.
BIN := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
# A crashed worker ends the run: xdist would wait for ever for the last tests of the one in its place.
# tests/conftest.py gives the files to the workers, in the order in which it sorts the tests.
PYTEST := -m pytest -n 2 --no-loadscope-reorder --max-worker-restart=0
PYTEST_ARGS ?=
# Least level of Paddle's own log lines that the demo shows.
LOG_LEVEL ?= WARNING

# More threads would change the bits of a product, and the ranks share the cores.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@echo 'make demo      train AlexNet on two CPU ranks and compare with the single-device model'
	@echo 'make benchmark-mnist  a multilayer perceptron on two CPU ranks under four schedules: a table'
	@echo 'make check     ruff, mypy and the tests of the core and the standard ring that start no processes, on 3.3'
	@echo 'make check-contrib  those of the extras'
	@echo 'make test      ruff, mypy and the tests on paddlepaddle 3.3, three rows of each table (ROWS=0: all)'
	@echo 'make test-all  all tests on paddlepaddle 3.3, every row: what CI runs'
	@echo 'make test-262  the tests that depend on the version of Paddle, on paddlepaddle-gpu 2.6.2'
	@echo 'make test-262-cpu  the examples, on paddlepaddle 2.6.2'
	@echo 'make test-gpu-262  what trains, saves and plans, on a CPU that says it is a GPU; make test-gpu: on 3.3'
	@echo 'make test-libraries  PaddleNLP and PaddleFormers on fleetpipe, beside themselves'
	@echo 'make test-models  every model of paddle.vision as a pipeline, beside itself: a table'
	@echo 'make test-whole  every example in all ways of fleetpipe parity --whole: a table'
	@echo 'make test-next  what the newest Paddle of PyPI would break: a report that never fails'
	@echo 'make benchmarks  every benchmark: a table and a JSON, within 40 minutes of an idle machine'
	@echo 'make benchmarks-short  those of the GPT under three schedules, and of plans: five minutes'
	@echo 'make release   the wheel and the source archive in dist, tried in empty environments'
	@echo 'make docs      the documentation as a site, in build/site'
	@echo 'make lint      ruff alone;  make types: mypy alone'
	@echo 'make test-fast: the tests of make check and check-contrib, every row, all that Windows runs'
	@echo 'make clean     remove what was built;  make distclean: the environments too'

# What runs the demo, and what tests need besides: two steps of one environment, each by itself.
.venv/.demo: REQUIREMENTS = --editable '.[cpu,examples]'
# Modules are compiled when the demo imports them, which it does with few. The processes of tests are
# many, and may be told to write no bytecode.
.venv/.demo: COMPILE = --no-compile
.venv/.installed: REQUIREMENTS = --editable '.[cpu,examples,dev]'
# 2.6.2 imports setuptools itself, and breaks with newer protobuf and numpy than it was built for.
# On a machine without a GPU as well, the newest package for GPUs is what is tested of it.
FOR_262 := 'numpy<2' 'protobuf==3.20.3' 'setuptools<80' --editable '.[examples,test]'
.venv-262/.installed: REQUIREMENTS = 'paddlepaddle-gpu==2.6.2' $(FOR_262)
.venv-262-cpu/.installed: REQUIREMENTS = 'paddlepaddle==2.6.2' $(FOR_262)
.venv-next/.installed: REQUIREMENTS = --upgrade paddlepaddle --editable '.[examples,test]'
# A site is built from text and needs neither Paddle nor what tests need.
.venv-docs/.installed: REQUIREMENTS = --editable '.[docs]'

# The tools, pinned. It names nothing that Paddle needs.
CONSTRAINTS := .ci/constraints.txt

.venv/.demo .venv/.installed .venv-262/.installed .venv-262-cpu/.installed .venv-next/.installed .venv-docs/.installed: setup.cfg $(CONSTRAINTS)
	@echo 'setting up $(@D): the first time this takes a minute or two, most of it for Paddle'
	$(@D)/$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(@D)
	@echo '$(@D)/$(BIN)/python -m pip install -c $(CONSTRAINTS) $(subst ','\'',$(REQUIREMENTS))'
	@while sleep 15 >&- 2>&-; do echo "  still installing after $$SECONDS s"; done & \
	trap "kill $$! || true" EXIT; \
	$(@D)/$(BIN)/python -m pip install --progress-bar off $(COMPILE) -c $(CONSTRAINTS) $(REQUIREMENTS) \
	    | sed -unE '/^ *(Downloading|Using cached|Installing) /p'
	@touch $@ $(if $(filter .venv/.installed,$@),.venv/.demo)

demo: .venv/.demo
	@rm -rf build/demo demo && mkdir -p build/demo
	@status=0; \
	.venv/$(BIN)/python -m fleetpipe run --nproc 2 --log-dir build/demo/log --log-level $(LOG_LEVEL) \
	    examples/dygraph_alexnet.py --batch-size 16 --report build/demo/report.json --trace demo \
	    || status=$$?; \
	for log in build/demo/log/workerlog.*; do \
	    echo "rank $${log##*.}: $$(grep '^parity:' "$$log" | tail -n 1)"; \
	done; \
	if test $$status -eq 0; then \
	    echo 'pictures of the run: demo/predicted.png and demo/measured.png'; \
	    echo 'demo: PASSED: AlexNet on two ranks has the bits of the single-device model'; \
	else \
	    echo "demo: FAILED (exit code $$status): see build/demo/log"; \
	fi; \
	exit $$status

# MNIST=FOLDER: that of its .gz files, in the place of the digits.
benchmark-mnist: .venv/.demo
	.venv/$(BIN)/python -m fleetpipe run --nproc 2 --log-dir build/benchmark-mnist \
	    --log-level $(LOG_LEVEL) examples/mnist_mlp_benchmark.py $(if $(MNIST),--data $(MNIST))

lint: .venv/.installed
	.venv/$(BIN)/python -m ruff check .
	.venv/$(BIN)/python -m ruff format --check .

types: .venv/.installed
	.venv/$(BIN)/python tests/check_types.py

# What starts no process. An extra that fails stops nobody who works on what it stands on.
FAST := $(PYTEST) -m 'not processes and not libraries'

check: lint types
	.venv/$(BIN)/python $(FAST) --ignore tests/contrib $(PYTEST_ARGS)

check-contrib: .venv/.installed
	.venv/$(BIN)/python $(FAST) $(PYTEST_ARGS) tests/contrib

test-fast: .venv/.installed
	.venv/$(BIN)/python $(FAST) $(PYTEST_ARGS)

# Rows of tables that name nothing of Paddle's are left out, beyond three of each table: the first,
# the last and one between. ROWS=0 runs them all, as test-all does, which CI runs.
ROWS ?= 3
test: lint types
	.venv/$(BIN)/python $(PYTEST) --rows $(ROWS) $(PYTEST_ARGS)

test-all: .venv/.installed
	.venv/$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

# What is marked as saying nothing about the version of Paddle is left out, and rows as in make test.
test-262: .venv-262/.installed
	.venv-262/$(BIN)/python $(PYTEST) -m 'not libraries and not once' --rows $(ROWS) $(PYTEST_ARGS)

# The package for CPUs, which shares all but its kernels with that for GPUs, by the examples.
test-262-cpu: .venv-262-cpu/.installed
	.venv-262-cpu/$(BIN)/python $(PYTEST) $(PYTEST_ARGS) \
	    tests/processes/examples/test_examples.py tests/static/run/test_epochs.py

# The branches for GPUs, by a CPU that says it is one. What this shows is that they run, not what a
# card makes of them; tests/gpu/pretending.py names what is left out.
PRETENDING = --rows $(ROWS) -p tests.gpu.pretending -m 'not processes and not libraries and not once' \
    $(addprefix tests/,gpu dygraph checkpoint parity profiling static capture fit engine \
    $(addprefix contrib/,clusters experts fast_leaves formats guards sequences shadow slices vocabulary view))

test-gpu: .venv/.installed
	.venv/$(BIN)/python $(PYTEST) $(PRETENDING) $(PYTEST_ARGS)

test-gpu-262: .venv-262/.installed
	.venv-262/$(BIN)/python $(PYTEST) $(PRETENDING) $(PYTEST_ARGS)

# The newest Paddle of PyPI, within the range of setup.cfg or beyond it: a report, not a failure.
test-next: .venv-next/.installed
	-.venv-next/$(BIN)/python -m tests.paddle_names
	-.venv-next/$(BIN)/python $(PYTEST) -m 'not libraries and not once' $(PYTEST_ARGS)

# The link that the site has to its repository; none where that is no address of the web.
export REPOSITORY_URL ?= $(patsubst %.git,%,$(filter https://%,$(shell git remote get-url origin 2>/dev/null)))
# NO_MKDOCS_2_WARNING: the theme's advice not to move to mkdocs 2, which setup.cfg excludes.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/$(BIN)/python -m mkdocs build --strict
	@echo 'the site is in build/site; its search needs a server: python3 -m http.server -d build/site'

# PaddleNLP on both versions of Paddle, and two versions of PaddleFormers; none can share one.
LIBRARIES := libraries libraries-262 libraries-formers-0.4.1 libraries-formers-1.2.0

$(LIBRARIES:%=.venv-%/.installed): .venv-%/.installed: .ci/%.txt
	@echo 'setting up $(@D): the first time this takes a few minutes'
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/$(BIN)/python -m pip install --progress-bar off --quiet --no-deps --requirement $<
	$(@D)/$(BIN)/python -m pip install --progress-bar off --quiet --no-deps --editable .
	@touch $@

# Each environment skips, and says so, the tests of the libraries that it does not have.
test-libraries: $(LIBRARIES:%=.venv-%/.installed)
	for name in $(filter-out libraries-262,$(LIBRARIES)); do \
	    .venv-$$name/$(BIN)/python -m pytest -m libraries tests/libraries $(PYTEST_ARGS); \
	done
	.venv-libraries-262/$(BIN)/python -m pytest -m libraries $(PYTEST_ARGS) \
	    tests/libraries/test_models.py

# For CI: a dense family of each library, and a mixture.
test-libraries-short: test-paddlenlp-short test-paddleformers-short

test-paddlenlp-short: .venv-libraries/.installed
	FLEETPIPE_TEST_FAMILIES=llama,qwen2moe \
	    .venv-libraries/$(BIN)/python -m pytest -m libraries \
	    tests/libraries/test_models.py tests/libraries/generation tests/libraries/hugging_face

test-paddleformers-short: .venv-libraries-formers-1.2.0/.installed
	FLEETPIPE_TEST_FAMILIES=llama .venv-libraries-formers-1.2.0/$(BIN)/python -m pytest \
	    -m libraries tests/libraries/formers/test_formers_models.py \
	    tests/libraries/generation

# What CI needs, one after another: each writes the folder of this package's metadata.
environments:
	$(MAKE) -j1 $(patsubst %,.venv-%/.installed,262 262-cpu docs libraries libraries-formers-1.2.0)

# Every model of paddle.vision, for as long as that takes.
test-models: .venv/.installed
	.venv/$(BIN)/python -m tests.capture.vision

# Every example beside itself, a few steps of each, for about ten minutes.
test-whole: .venv/.installed
	.venv/$(BIN)/python -m tests.parity.whole_examples

# They want an idle machine. PEER: a Python that has torch, whose pipeline is then measured too.
benchmarks benchmarks-short: .venv/.installed
	.venv/$(BIN)/python benchmarks/run.py $(if $(filter %-short,$@),--short) \
	    $(if $(PEER),--peer $(PEER))

# The wheel and the source archive, as strangers install them, with each Python on the PATH.
release: .venv/.installed
	.venv/$(BIN)/python -m tests.packaging.release --extras

clean:
	rm -rf build demo dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find fleetpipe static dygraph examples tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-262 .venv-262-cpu .venv-next .venv-docs $(LIBRARIES:%=.venv-%)
