# Every target sets up what it needs, from nothing, in .venv; `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
IPYKERNEL_6 := $(VENV)/ipykernel-6.31.0
FLOOR := $(VENV)/floor
LEAST := $(VENV)/least
# Of $(LEAST). The least one is 2.8.0, on Linux a download of gigabytes.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
ENGINES := $(VENV)/engines
SCENE := $(VENV)/scene
TRITONS := $(addprefix $(VENV)/triton-,3.5.1 3.6.0 3.7.1 3.8.0)
CPU_RESULTS ?= benchmarks/results/cpu.json
GPU_RESULTS ?= benchmarks/results/gpu.json
OLD ?= 81363fe

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-slice test-floor test-engines lint scene bench lab books docs dist gpu gpu-smoke gpu-test gpu-bench gpu-repeated gpu-packed gpu-sanitize gpu-multi clean

help:
	@echo "make demo    train something small and look at it"
	@echo "make test    every test, of each parametrised one so many cases that each value of each parameter occurs"
	@echo "make test-full   all cases of all tests"
	@echo "make test-slice SLICE=3/40   the third of 40 parts of what test-full runs and test does not"
	@echo "make test-floor  the tests of numbers and files with the least versions of NumPy, numba, safetensors and tqdm,"
	@echo "             first a training with all least versions at once; TORCH=2.8.0 for torch's, too"
	@echo "make test-engines  two processes under Ray, DeepSpeed, torchft, Accelerate and Lightning; installs the first three"
	@echo "             JOBS=1 for one process; tests in a browser need Debian's chromium and chromium-driver"
	@echo "make lint    ruff, mypy and the rules of who imports whom"
	@echo "make scene   what draws in a browser: its types, its style, and the tests that need no browser; needs Node 20.19 and npm,"
	@echo "             and is skipped without them"
	@echo "make bench   time the updates against torch.optim on this machine's CPU; PARTS='steps clip' for some of it"
	@echo "make lab     JupyterLab on the tutorials"
	@echo "make books   run the tutorials and write their notebooks, after a change to one"
	@echo "make docs    build the documentation site into build/site, with all tutorials run"
	@echo "make dist    build wheel and sdist into dist/, and check them"
	@echo "make gpu     on a GPU machine, with its own python3, installing nothing: gpu-smoke, gpu-test and gpu-bench;"
	@echo "             gpu-smoke takes 3 minutes; gpu-test SHARD=1/4 is a part of the tests, gpu-bench PARTS='steps clip' of the"
	@echo "             benchmarks; what has passed for this commit is not repeated. gpu-sanitize needs compute-sanitizer;"
	@echo "             gpu-packed OLD=COMMIT times packed states by turns with those of a commit; gpu-repeated times what"
	@echo "             matters most in five processes each, 15 minutes"
	@echo "make gpu-multi   on a machine with several GPUs; CPU=1 tries it in two processes without one"
	@echo "make clean   remove .venv, builds and caches"

demo: $(VENV)/with-demo
	$(BIN)/python -m tristep demo

test: CASES := quick
test-full: CASES := full
test-slice: CASES = $(or $(SLICE),$(error SLICE is missing, such as SLICE=3/40))
test test-full test-slice: $(VENV)/with-test $(IPYKERNEL_6) $(TRITONS)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cases $(CASES)

# Files with the least safetensors apart: with it transformers cannot be imported, which other tests compare with.
test-floor: $(VENV)/with-test $(FLOOR) $(LEAST)
	$(LEAST)/bin/python tests/least_versions.py
	PYTHONPATH=$(CURDIR)/$(FLOOR) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(addprefix tests/,kernels trainer contrib)
	PYTHONPATH=$(CURDIR)/$(FLOOR):$(CURDIR)/$(FLOOR)/safetensors-only $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
	  tests/test_files.py $(wildcard tests/trainer/test_checkpoint*.py tests/trainer/test_*saving.py) -k 'not csv_of_lightning'

test-engines: $(VENV)/with-test $(ENGINES)
	PYTHONPATH=$(CURDIR)/$(ENGINES) $(BIN)/python -m pytest --cases full $(addprefix tests/integrations/test_,engines.py ray.py)

lint: $(VENV)/with-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

scene:
	@if node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)' 2>/dev/null \
	  && command -v npm >/dev/null; then $(MAKE) --no-print-directory scene-checks; \
	else echo "make scene: skipped, as it needs Node 20.19 or later, and npm"; fi

.PHONY: scene-checks
scene-checks: $(SCENE)/installed
	$(SCENE)/node_modules/.bin/tsc --project tests/scene
	$(SCENE)/node_modules/.bin/eslint --config $(SCENE)/eslint.config.js viz/render/static tests/scene
	node --test $(wildcard tests/scene/*.test.js)

bench: $(VENV)/with-demo
	$(BIN)/python benchmarks/run.py --out $(CPU_RESULTS) $(if $(PARTS),--only $(PARTS))

lab: $(VENV)/with-dev
	$(BIN)/jupyter lab tutorials

books: $(VENV)/with-test
	$(BIN)/python tutorials/build.py

docs: $(VENV)/with-docs
	$(BIN)/python docs/site/build.py

dist: $(VENV)/with-test
	rm -rf build dist *.egg-info
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# Nothing is installed there, and its versions are not ours. Each part can be run alone, and goes on where it was ended.
gpu:
	$(MAKE) --keep-going gpu-smoke gpu-test gpu-bench

gpu-smoke gpu-test gpu-bench gpu-repeated gpu-packed gpu-sanitize gpu-multi: export PYTHONPATH := $(CURDIR)/src

gpu-smoke:
	python3 tests/gpu/gpu_smoke.py

gpu-test:
	python3 tests/gpu/on_gpu.py $(if $(SHARD),--shard $(SHARD))

# On a machine with two GPUs or more; CPU=1 RANKS=3 tries it in three processes without one.
gpu-multi:
	python3 tests/gpu/gpu_multi.py $(if $(CPU),--cpu) $(if $(RANKS),--ranks $(RANKS)) $(if $(PARTS),--parts $(PARTS))

# With torch's kernels watched, too, no tool had ended after two minutes. initcheck has to see their writes, however.
gpu-sanitize:
	for tool in memcheck racecheck synccheck initcheck; do \
	  only=$$(test $$tool = initcheck || printf -- '--kernel-name kns=%s ' update_kernel sums_kernel totals_kernel); \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool $$only --error-exitcode 1 \
	    python3 tests/gpu/gpu_smoke.py --parts rules storage || exit 1; \
	done

gpu-bench:
	python3 benchmarks/run.py --gpu --out $(GPU_RESULTS) $(if $(PARTS),--only $(PARTS))

# DRY=--dry tries it without a GPU.
gpu-repeated:
	python3 benchmarks/repeated.py $(DRY)

# With versions of the kernels of packed states: OLD='COMMIT ...', or folders with a checkout. DRY=--dry tries it without a GPU.
gpu-packed:
	python3 benchmarks/packed_turns.py $(OLD) $(DRY)

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage htmlcov
	rm -rf .grimp_cache .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .test-cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The kernel before the present one, in a folder of its own, which tests in a browser put before the other; its dependencies
# are those of the present one.
$(IPYKERNEL_6): | $(VENV)/with-test
	$(PIP) --no-deps --target $@ ipykernel==$(patsubst ipykernel-%,%,$(notdir $@))

# The least versions of what tristep requires, but for torch, in a folder that is put before the others.
$(FLOOR): constraints-floor.txt | $(VENV)/with-test
	rm -rf $@
	grep -v '^safetensors' $< > $(VENV)/floor.txt
	$(PIP) --no-deps --target $@ --requirement $(VENV)/floor.txt
	$(PIP) --no-deps --target $@/safetensors-only $$(sed -n 's/^\(safetensors==[^ ]*\).*/\1/p' $<)

# All least versions at once, in an environment with nothing else: what tristep imports and does not declare is missing there.
$(LEAST): constraints-floor.txt pyproject.toml
	rm -rf $@ build
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-floor.txt torch==$(TORCH) .

# Engines that start processes by themselves, in a folder of their own: few need them, and they are large. DeepSpeed's setup
# imports torch, and compiles nothing here.
$(ENGINES): constraints-engines.txt | $(VENV)/with-test
	rm -rf $@
	DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation --target $@ --requirement $<

# ESLint reads its settings next to what they import.
$(SCENE)/installed: $(addprefix tests/scene/,.npmrc eslint.config.js package.json package-lock.json)
	mkdir -p $(SCENE)
	cp $^ $(SCENE)
	npm ci --prefix $(SCENE) --no-audit --no-fund
	touch $@

# Earlier Tritons, each in a folder of its own, whose compilers tests try. There are none for macOS and Windows.
$(TRITONS): | $(VENV)/with-test
	if $(BIN)/python -c 'import triton' 2>/dev/null; then \
	  $(PIP) --no-deps --target $@ triton==$(patsubst triton-%,%,$(notdir $@)); \
	else mkdir -p $@; fi

# One stamp for the extra `demo`, and for each dependency group of pyproject.toml with that extra. pip, which knows groups from 25.1
# on, adds what is missing and leaves the rest alone.
$(VENV)/with-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'
	$(PIP) --constraint constraints.txt --editable '.[demo]' $(if $(filter-out demo,$*),--group $*)
	touch $@
