# Every target sets up what it needs. ARGS go to the program: make demo ARGS="--steps 50",
# make test ARGS="-k torn".

ARGS ?=
RANKS ?= 1
SEEDS ?= 1000
SECONDS ?= 600
STATES ?= 5000
FAULTS ?= 1000
MINUTES ?= 120
bin := .venv/bin
# vLLM is in an environment of its own, once `make serving` has made it.
serving := $(or $(SERVING_VENV),.venv-serving)/bin/python
# Two workers for each core; a run of one test is quicker without: ARGS="-n0 -k torn".
pytest := PYTHONHASHSEED=0 $(bin)/python -m pytest -q -n auto --dist worksteal
# Pytest compiles each test file once and keeps the result. Otherwise every worker compiles all: 12 s.
compile_tests := $(bin)/python -m pytest -q --collect-only >build/collect.log 2>&1
native_sources := $(wildcard native/*.h native/*.cpp native/test/*.h native/test/*.cpp)

# All warnings are errors but two that torch gives, of itself and of views that a test net returns.
warnings := 'error,ignore:FSDP2-wrapped module:UserWarning,ignore:`torch.jit:DeprecationWarning'

# The tests start many processes, and each would compile again what it may not keep.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup build demo test thorough campaigns integrations serving infra sim replicas powerloss modes sanitize arm fuzz soak check bench gpu docs release clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

setup:  ## .venv, system packages where you may install them, native module
	@tools/setup_env.sh

build: setup  ## the same; after a change in native/ it takes seconds

demo: setup  ## train a small Llama, kill it during a save, resume, compare; RANKS=4, OFFLOAD=1, REPLICAS=4, LOWRANK=1, SERVING=1: others
	@$(if $(SERVING),$(or $(wildcard $(serving)),$(bin)/python),$(bin)/python) examples/llama/demo.py --ranks $(if $(LOWRANK),2 --low-rank 32,$(RANKS)) \
	  $(if $(OFFLOAD),--offload) $(if $(SERVING),--serving) $(if $(REPLICAS),--replicas $(REPLICAS)) $(ARGS)

test:  ## the everyday suite, C++ and Python: minutes
	@tools/setup_env.sh --tests
	@$(compile_tests) & $(bin)/ctest --test-dir build/dev --output-on-failure --no-tests=error && wait
	@$(pytest) -m "not thorough" $(ARGS)

thorough:  ## the tests that the everyday suite leaves out, because each takes seconds
	@tools/setup_env.sh --tests
	@$(pytest) -m thorough $(ARGS)

campaigns: export STATEHOLD_SEED := $(or $(STATEHOLD_SEED),$(shell date +%s))
campaigns: export STATEHOLD_CRASH_KILLS = 1000
campaigns: export STATEHOLD_CRASH_STATES = 32
campaigns: export STATEHOLD_SIM_SEEDS = 50
campaigns: export STATEHOLD_SIM_REPLAYS = 200
campaigns: export STATEHOLD_REPLICATED_SEEDS = 5000
campaigns: export STATEHOLD_AGENT_KILLS = 100
campaigns: export STATEHOLD_UPDATES = 2000
campaigns: export STATEHOLD_LEAVES = 1000
campaigns: export STATEHOLD_READERS = 5000
campaigns: export STATEHOLD_PAGE_KILLS = 1000
campaigns: export STATEHOLD_PAGE_FAULTS = 10000
campaigns: export STATEHOLD_ENDPOINT_MESSAGES = 20000
campaigns: export STATEHOLD_FLIPS = all
campaigns: export STATEHOLD_ALL_BYTES = 1
campaigns: export STATEHOLD_DEVICE_SCHEDULES = 10000
campaigns: export STATEHOLD_RECOGNITION = 5000
campaigns: export STATEHOLD_OFFLOAD = 1000
campaigns: export STATEHOLD_OFFLOAD_KILLS = 500
campaigns: export STATEHOLD_OFFLOAD_FAULTS = 1000
campaigns: export STATEHOLD_OFFLOAD_STEPS = 200
campaigns: export STATEHOLD_GROUP_KILLS = 1000
campaigns: export STATEHOLD_GROUP_FAILURES = 1000
campaigns: export STATEHOLD_REPLICA_FAULTS = 1000
campaigns: export STATEHOLD_PLANNER_RUNS = 20000
campaigns: export STATEHOLD_PLANNER_TABLES = all
campaigns: export STATEHOLD_BENCH = all
campaigns: export STATEHOLD_BUILDS = 1
campaigns: export STATEHOLD_OFFLOAD_DEMO = 1
campaigns: export STATEHOLD_REPLICAS_DEMO = 1
campaigns: export STATEHOLD_LOWRANK_KILLS = 20
campaigns: export STATEHOLD_LOWRANK_DEMO = 1
campaigns: setup  ## the tests of which `make test` takes a sample, whole: hours
	@echo "STATEHOLD_SEED=$$STATEHOLD_SEED repeats these campaigns"
	@$(pytest) -o time_limit=0 tests/crash tests/sim tests/ranks tests/agent tests/preemption tests/hostile tests/cli \
	  tests/checkpointer tests/devices tests/tensors tests/bench tests/offload tests/packaging tests/resilience tests/examples \
	  tests/unit/test_redundancy.py tests/unit/test_plan_resilience.py tests/kv tests/lowrank $(ARGS)

integrations: setup  ## tests/frameworks beside other people's frameworks, in .venv-integrations
	@tools/integrations.sh $(ARGS)

serving: setup  ## tests/serving beside a serving engine, in .venv-serving
	@tools/serving.sh $(ARGS)

infra: setup  ## tests/infra beside real servers: SLURM, launchers, object stores, file systems, containers; what is missing is skipped
	@tools/infra.sh $(ARGS)

sim: setup  ## SEEDS=n seeds of the simulation: faults, crashes, ranks that die
	@$(bin)/python tests/sim/campaign.py --seeds $(SEEDS) $(ARGS)

replicas: setup  ## FAULTS=1000 faults of real replicas and their coordinator: killed, stopped, started again
	@$(bin)/python tests/resilience/campaign.py --faults $(FAULTS) $(ARGS)

powerloss: setup  ## STATES=5000 states of a real block device after losses of power; needs root
	@PYTHONPATH=tests $(bin)/python -m powerloss --states $(STATES) $(ARGS)

modes: setup  ## the Python tests under python -O, without io_uring, with warnings as errors
	@PYTHONOPTIMIZE=1 $(pytest) -W "ignore:assertions not in test:pytest.PytestConfigWarning" $(ARGS)
	@$(pytest) --no-io-uring $(ARGS)
	@PYTHONWARNINGS=$(warnings) $(pytest) $(ARGS)

sanitize: setup  ## the C++ and the Python tests of the native code under ASan, UBSan and TSan
	@tools/sanitize.sh

fuzz: setup  ## hostile steps, guided by coverage, for SECONDS=600
	@$(bin)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	@PYTHONPATH=tests $(bin)/python -m fuzz --seconds $(SECONDS) $(ARGS)

soak: setup  ## saves and restores in a loop for MINUTES=120: nothing may grow
	@PYTHONPATH=tests $(bin)/python -m soak --minutes $(MINUTES) $(ARGS)

arm:  ## the C++ tests, built for arm64, in an emulator
	@tools/aarch64.sh

check: setup  ## formatting, lint, types, the figures that may only fall, accesses without their mutex
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy --strict -p statehold
	$(bin)/python -m pytest -q -n0 tests/api/test_house.py
	$(bin)/clang-format --dry-run -Werror $(native_sources)
	tools/tidy.sh

bench: setup  ## all benchmarks; see bench/README.md
	@$(bin)/python -m bench $(ARGS)

gpu:  ## on a machine with a GPU: build for PYTHON=python3, bench.gpu, tests/gpu; under ten minutes
	@tools/gpu.sh bench/out/gpu $(ARGS)

docs:  ## the site, in build/site; links are checked. ARGS=serve shows it
	@tools/docs.sh $(ARGS)

release: setup  ## dist/: sdist and wheels of HEAD, the same bytes each time; ARGS=--manylinux: in containers
	@tools/release.sh $(ARGS)
	@tools/try_wheel.sh dist

clean:  ## remove what was built; .venv stays
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/statehold/_*.so
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
