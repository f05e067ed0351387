# `make help` lists the targets. On a fresh machine (Python >= 3.10, a C linker, Rust) `make demo` and `make test` set
# everything up by themselves: the virtual environment in .venv/, the pinned requirements, the native module.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/dev.lock

# Environments that the project itself does without, each by the lock of its name: for `make docs`, `make wheel`,
# `make test-integrations`, `make test-launchers`.
TOOLS := .tools

LONG := test-long test-failures test-churn test-delays explore fuzz

ENVIRONMENT := $(VENV)/.requirements-installed
NATIVE := $(VENV)/.native-installed
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find crates -name '*.rs' -o -name Cargo.toml)

# Byte code is kept: hundreds of processes start in the tests, and each would compile every source anew.
unexport PYTHONDONTWRITEBYTECODE
export CARGO_TARGET_DIR := $(CURDIR)/target
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv build demo check test test-rust test-python test-gpu test-integrations long test-long test-failures test-churn test-launchers test-delays explore fuzz bench-wire bench-priority bench-overhead bench-allreduce bench-gpu lab-peers wheel docs lint format lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(ENVIRONMENT) ## Create .venv with the pinned requirements

# Remade when the lock changes. Every package is pinned in the lock, so none is resolved here.
$(ENVIRONMENT): $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Penstock needs Python >= 3.10; choose one with: make PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r $(LOCK)
	$(BIN)/python -m pip check
	@touch $@

build: $(NATIVE) ## Build the native module (release) into .venv

# An editable install: changes of Python files need no rebuild, `penstock` is on .venv/bin.
$(NATIVE): $(ENVIRONMENT) $(NATIVE_SOURCES)
	@command -v cargo >/dev/null || { echo "Penstock needs Rust: no cargo on the path"; exit 1; }
	PIP_QUIET=1 VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --locked --quiet
	@touch $@

# Remade when the lock changes, as .venv is.
$(TOOLS)/%/.installed: requirements/%.lock
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps -r $<
	$(@D)/bin/python -m pip check
	@touch $@

demo: build ## Train a CNN on handwritten digits with 4 workers on this machine
	$(BIN)/penstock demo $(ARGS)

check: lint ## Check formats, lints, types, the architecture, and run the fast tests: before each commit
	cargo test --workspace --locked --quiet --lib
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile -m "not slow and not long" --ignore tests/test_architecture.py $(ARGS)

test: ## Run the tests, Rust and Python at the same time, but for those marked long
	.ci/test

test-rust:
	cargo test --workspace --locked --quiet

# Six files at a time: tests wait, for processes to meet or a limit under test to pass, and two cores shall not. In the
# order of tests/conftest.py, which has those first that take longest. Then those that must be alone; ARGS may choose none of them.
test-python: build
	$(BIN)/python -m pytest --numprocesses 6 --dist loadfile --no-loadscope-reorder -m "not long and not alone" $(ARGS)
	$(BIN)/python -m pytest -m "alone and not long" $(ARGS) || test $$? -eq 5

test-gpu: build ## Train on this machine's accelerator, several ranks on one device; says "no device" without one
	$(BIN)/python -m pytest -rs tests/device/test_gpu.py tests/device/test_cuda_collectives.py $(ARGS)

# An environment of its own: frameworks bring along far more than the project needs, and say which torch they take.
$(TOOLS)/integrations/.native-installed: $(TOOLS)/integrations/.installed $(NATIVE)
	PIP_QUIET=1 VIRTUAL_ENV=$(CURDIR)/$(@D) $(BIN)/maturin develop --release --locked --quiet
	@touch $@

test-integrations: $(TOOLS)/integrations/.native-installed ## Train with Lightning, Accelerate, HF Trainer, Ray Train and FSDP2, the real ones, and name their versions
	$(TOOLS)/integrations/bin/python -m pip list | grep -E '^(torch|lightning|accelerate|transformers|ray) '
	$(TOOLS)/integrations/bin/python -m pytest -rs -m "long or not long" tests/integrations $(ARGS)

long: ## Run what takes too long for each change, all of it also if some fails; a line for each part at the end
	.ci/long $(LONG)

test-long: build ## The combinations that `make test` leaves out
	$(BIN)/python -m pytest --numprocesses 4 --dist loadgroup -m long --ignore tests/launchers $(ARGS)

test-failures: build ## Kill, freeze, hang or break a rank in 50 seeded runs; the others meet again; a table of it all
	PYTHONPATH=tests $(BIN)/python tests/failure/many_runs.py $(ARGS)

test-churn: build ## Kill, stop and cut off ranks of elastic jobs in 6 seeded runs, and let others come; a table of it all; needs root
	PYTHONPATH=tests/elastic:. $(BIN)/python tests/elastic/many_churns.py $(ARGS)

# Debian: apt-get install iproute2 util-linux mpich openmpi-bin slurmctld slurmd slurm-client munge. What is missing is skipped,
# with the package that has it. Slurm's and MUNGE's services need not run: tests start their own, in folders of their own.
test-launchers: build $(TOOLS)/launchers/.installed ## Start jobs by the real torchrun, mpirun and Slurm, on emulated hosts; check the files for Kubernetes; needs root
	$(BIN)/python -m pytest -rs -m long tests/launchers $(ARGS)

FIRST ?= $(shell date +%s)
SEEDS ?= 20
test-delays: ## Run the Rust tests of threads and sockets with threads delayed at random, SEEDS runs of each; from seed FIRST on (now)
	$(PYTHON) tests/delays/many_seeds.py --seeds $(SEEDS) --first-seed $(FIRST) $(ARGS)

LIVES ?= 500000
SCENARIOS ?= 100000
AGREEMENTS ?= 100000
ELASTIC ?= 10000
explore: ## Simulate jobs with losses: LIVES of life alone, SCENARIOS of everything, AGREEMENTS on members, ELASTIC that go on; from seed FIRST on (now)
	PENSTOCK_SIM_SEED=$(FIRST) PENSTOCK_SIM_LIVES=$(LIVES) cargo test --release --locked --quiet -p penstock-sim --test life -- --nocapture
	PENSTOCK_SIM_SEED=$(FIRST) PENSTOCK_SIM_SCENARIOS=$(SCENARIOS) cargo test --release --locked --quiet -p penstock-sim --test explore -- --nocapture
	PENSTOCK_SIM_SEED=$(FIRST) PENSTOCK_SIM_AGREEMENTS=$(AGREEMENTS) cargo test --release --locked --quiet -p penstock-sim --test agreement -- --nocapture --include-ignored
	PENSTOCK_SIM_SEED=$(FIRST) PENSTOCK_SIM_ELASTIC=$(ELASTIC) cargo test --release --locked --quiet -p penstock-sim --test elastic -- --nocapture

CASES ?= 200000
fuzz: ## Feed random bytes and frames to everything that parses them, CASES of each
	PROPTEST_CASES=$(CASES) cargo test --release --locked --quiet -p penstock-core --lib wire::
	PROPTEST_CASES=$(CASES) cargo test --release --locked --quiet -p penstock-core --lib agreement::
	PROPTEST_CASES=$(CASES) cargo test --release --locked --quiet -p penstock-core --lib recovery::
	PROPTEST_CASES=$(CASES) cargo test --release --locked --quiet -p penstock-core --test node any_events
	PROPTEST_CASES=$(CASES) cargo test --release --locked --quiet -p penstock-net --lib handshake::

# The first two make network namespaces: they need root and iproute2, and the first needs iperf3.
bench-wire: build ## Slice traffic beside iperf3, between two network namespaces
	$(BIN)/python -m benchmarks.wire $(ARGS)

bench-priority: build ## How soon an urgent slice is answered behind a backlog of 200 MB
	$(BIN)/python -m benchmarks.priority $(ARGS)

bench-overhead: build ## What distribute costs in time and memory, DDP beside it
	$(BIN)/python -m benchmarks.overhead $(ARGS)

bench-allreduce: build ## Sums of 4 KB to 53 MB by 2, 4 and 8 hosts without limits, beside gloo's
	$(BIN)/python -m benchmarks.allreduce $(ARGS)

bench-gpu: build ## Steps of ResNet-50 and a GPT on this machine's accelerator, and sums of tensors, DDP and gloo beside them; needs root
	$(BIN)/python -m benchmarks.device $(ARGS); steps=$$?; $(BIN)/python -m benchmarks.device_sums && exit $$steps

# Torch's own DDP needs none. A peer that cannot be installed is reported, with the reason, and the target fails.
lab-peers: $(ENVIRONMENT) ## Install the peers that the lab compares with: Horovod, MXNet, MPICH, torchft (3 GB, 10 minutes)
	$(BIN)/python -m lab.peers install $(ARGS)

# Those whose standard library this Rust does not have are left out: `rustup target add TARGET`.
WHEEL_TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
wheel: $(TOOLS)/wheel/.installed ## Build the sdist and manylinux_2_28 wheels into dist/; WHEEL_TARGETS says for which processors
	.ci/wheels $(TOOLS)/wheel/bin $(WHEEL_TARGETS)

# The theme would warn each time of a mkdocs 2, which the lock does not have.
docs: $(TOOLS)/docs/.installed ## Build the documentation site into build/site/
	NO_MKDOCS_2_WARNING=1 $(TOOLS)/docs/bin/mkdocs build --strict

lint: build ## Check formats, lints, types and the architecture
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --cache-dir .mypy_cache/project # stubtest, of other options, would empty the usual one each time
	$(BIN)/python -m mypy.stubtest penstock._native --mypy-config-file stubtest.ini
	$(BIN)/python -m pytest tests/test_architecture.py

format: $(ENVIRONMENT) ## Format the sources
	cargo fmt --all
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

LOCKS ?= dev docs integrations launchers wheel
lock: $(ENVIRONMENT) ## Resolve requirements/*.in anew into *.lock (needs uv); LOCKS=docs for one of them
	for name in $(LOCKS); do \
		uv pip compile --universal --python-version 3.10 --no-header --no-annotate requirements/$$name.in -o requirements/$$name.lock || exit; \
	done

clean: ## Remove builds and caches (environments stay: rm -r .venv .tools)
	rm -rf target dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis $(NATIVE)
	find python tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f python/penstock/_native*.so
