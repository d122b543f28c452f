# Everything runs in a virtual environment in .venv, made on first use. `make help` lists the targets.

# The Python that the environment is made from, and the go command.
PYTHON ?= python3
GO ?= go
export GO

# The index of packages that PyTorch is installed from, where it is not installed yet; empty: the usual one.
TORCH_INDEX ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu
# Said before the download. The figures are those of torch 2.15 for Linux on x86-64, with all that it needs.
TORCH_FROM := $(TORCH_INDEX)
ifeq ($(TORCH_INDEX),)
TORCH_FROM := the usual index, with CUDA: 3 GB to download, 5.5 GB on disk (without CUDA: TORCH_INDEX=$(CPU_INDEX))
endif

# How long `make soak` runs.
SOAK ?= 1h
# How long `make test-all` may take, as 30m or 2h.
TIME ?= 2h
# How many parts of `make test` run at once: two more than there are cores, since each waits for half of its time.
LANES ?= 4
# Where `make wheel` puts the wheels, and for which machines.
DIST ?= dist
WHEELS ?= x86_64 aarch64
# What `make gpu-figures` runs: see its --help; empty: all.
PARTS ?=
# What `make chaos` does: see its --help.
CHAOS ?=

# Where `make test-kube` has its control plane: 375 MiB, built in some ten minutes of a processor.
KUBE_BINARIES ?= build/kube

VENV := .venv
PY := $(VENV)/bin/python
UV := $(shell command -v uv 2>/dev/null)
LIBRARY := torchft/_torchft_go.abi3.so
# The versions of all that make installs, but PyTorch.
LOCK := python/build/constraints.txt

# What the native library is made of.
SOURCES := setup.py pyproject.toml python/build/compilation.py python/build/toolchain.py $(wildcard csrc/*) go/go.mod go/go.sum \
	$(shell find go -name '*.go' -not -name '*_test.go' -o -name '*.[ch]' -o -path '*/web/*' -o -name '*.html' -o -name '*.json')

ifeq ($(UV),)
MAKE_VENV = $(PYTHON) -m venv $(VENV)
PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check
BUILD_WHEEL = $(PY) -m pip wheel --quiet --no-deps --wheel-dir $(DIST) .
else
MAKE_VENV = $(UV) venv --quiet --python "$$(command -v $(PYTHON))" $(VENV)
# Compiled ahead, as pip does: importing PyTorch from source takes five times as long.
PIP_INSTALL = VIRTUAL_ENV= $(UV) pip install --compile-bytecode --python $(PY)
BUILD_WHEEL = $(UV) build --quiet --wheel --python $(PY) --out-dir $(DIST) .
endif
INSTALL = $(PIP_INSTALL) --constraint $(LOCK)

# These read files outside of the module, which Go's cache of results does not notice: they always run.
GO_READERS := ./internal ./torchftpb
# Tools of a module of their own, so that its requirements are not those of the library.
GO_TOOL = $(GO) tool -modfile=tools/go.mod
GOLANGCI = $(GO_TOOL) golangci-lint
# In no module with others, since it needs an older YAML parser than they do.
ACTIONLINT = github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
# A failed test runs once more: python/build/lanes.py reads the report.
# -trimpath: the compiled packages are those that the library is built from, and those of a clone in another folder.
RERUNS ?= 1
GO_TESTS = $(GO_TOOL) gotestsum --format=standard-quiet --rerun-fails=$(RERUNS) --rerun-fails-max-failures=1 \
	--rerun-fails-run-root-test --rerun-fails-report=../build/test/flaky-$(1).txt \
	--packages="$(2)" -- -trimpath -vet=off -timeout 10m

# An install must not run beside a build.
.NOTPARALLEL:
# Every target with a plain name is a command.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "make %-16s %s\n", $$1, $$2 }'
	@echo "Settings: PYTHON=$(PYTHON) (3.10 or newer), GO=$(GO) (1.26 or newer), CC (gcc 9 or newer); without them, packages bring both"
	@echo "          TORCH_INDEX (where PyTorch comes from; builds without CUDA: $(CPU_INDEX))"

train: $(VENV)/with-train $(LIBRARY) ## train on two replica groups, kill one, see it heal
	$(PY) python/examples/demo.py

train-standby: $(VENV)/with-train $(LIBRARY) ## the same with a third group, which takes the place of the killed one
	$(PY) python/examples/demo.py --standby

minimal: $(VENV)/with-train $(LIBRARY) ## the README's example, in two replica groups
	$(VENV)/bin/torchft run --replicas 2 --min-replicas 2 python/examples/minimal.py

train-fsdp: $(VENV)/with-train $(LIBRARY) ## the same with FSDP2: groups of two ranks, one of which is killed
	$(PY) python/examples/demo.py --script train_fsdp --nproc 2 --kill rank --steps 600

train-total: $(VENV)/with-train $(LIBRARY) ## kill all groups, their launcher and the lighthouse at once, and see the job go on
	$(PY) python/examples/total_loss.py

train-diloco: $(VENV)/with-plot $(LIBRARY) ## a language model with streaming DiLoCo; one group is killed again and again
	$(PY) python/examples/demo.py --script train_diloco --steps 600 --kill-every 200 \
		--time-limit 240 --plot loss_curves.png

test: $(VENV)/with-test $(LIBRARY) ## the tests of Go and Python, side by side: five to six minutes on two cores
	$(PY) python/build/lanes.py --lanes $(LANES)

test-all: $(VENV)/with-test $(VENV)/with-ray $(VENV)/with-lock $(LIBRARY) ## all that ever found a mistake, with the seeds of today, for TIME=2h at most
	$(PY) python/build/night.py --time $(TIME)

test-go: $(PY) ## Go's tests; make test-all repeats them with the race detector
	mkdir -p build/test
	cd go && DOCS_SUM="$$(cat ../docs/*.md ../docs/*.json ../docs/internals/*.md ../docs/internals/*.json | cksum)" $(call GO_TESTS,all,./...)
	cd go && $(call GO_TESTS,readers,$(GO_READERS)) -count=1

test-gpu: $(VENV)/with-test $(LIBRARY) ## the tests that need CUDA devices, and a table of what ran; without a device none does
	$(PY) -m tests.gpu.run

test-slurm: $(VENV)/with-test $(LIBRARY) ## the tests on a Slurm of their own, in network namespaces: root, slurm-wlm and munge; twenty minutes
	RERUNS=0 $(PY) -m pytest -m slurm -s tests/slurm --durations 0

test-kube: $(VENV)/with-test $(LIBRARY) ## the tests on Kubernetes, which the first run builds, in ten minutes of a processor: root; twenty minutes
	sh tests/kube/cluster/build $(KUBE_BINARIES)
	RERUNS=0 KUBE_BINARIES=$(KUBE_BINARIES) $(PY) -m pytest -m kube -s tests/kube --durations 0

gpu-figures: $(VENV)/with-test $(LIBRARY) ## all that is measured on a GPU within eight minutes, or PARTS="tests gap", in gpu-figures.md
	$(PY) python/bench/gpu_figures.py $(PARTS)

soak: ## simulate for SOAK=1h, print progress, and a seed to replay if a rule breaks
	cd go && $(GO) test ./sim -count=1 -timeout 0 -run '^TestSoak$$' -v -soak $(SOAK)

chaos: $(VENV)/with-test $(LIBRARY) ## kill and stop real processes at random, CHAOS="--minutes=60 --kind=gloo --seed=1"
	$(PY) tests/process/chaos_faults.py $(CHAOS)

pictures: $(VENV)/with-test $(LIBRARY) ## the dashboard as docs/ shows it (needs chromium and chromedriver)
	DASHBOARD_PICTURES=docs $(PY) -m pytest tests/process/test_dashboard.py -k live

recovery-picture: $(VENV)/with-plot $(LIBRARY) ## the picture in the README: a group is killed and comes back
	$(PY) python/bench/recovery_picture.py docs/recovery-of-one.png

loss-picture: $(VENV)/with-plot $(LIBRARY) ## that of docs/data.md: how far 20 kills move the weights
	$(PY) python/bench/loss_picture.py docs/loss.png

join-picture: $(VENV)/with-plot $(LIBRARY) ## that of docs/healing.md: what others notice of a group that joins
	$(PY) python/bench/join_picture.py docs/join.png

docs: $(VENV)/with-docs ## these pages as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

build: $(VENV)/with-nothing $(LIBRARY) ## install the package into .venv, in place

proto: $(VENV)/with-generate ## regenerate go/torchftpb from proto/torchft.proto
	cd go && $(abspath $(PY)) -m grpc_tools.protoc -I ../proto \
		--plugin=protoc-gen-go="$$($(GO) tool -n protoc-gen-go)" --go_out=torchftpb --go_opt=paths=source_relative \
		--plugin=protoc-gen-go-grpc="$$($(GO) tool -n protoc-gen-go-grpc)" --go-grpc_out=torchftpb \
		--go-grpc_opt=paths=source_relative torchft.proto

bindings: $(VENV)/with-generate ## regenerate go/native/torchft_go.* from go/pyapi
	$(PY) python/binding/generate.py

lock: $(VENV)/with-lock ## move the versions of all tools to the newest, and run everything with them
	$(PY) python/build/lock.py
	$(MAKE) lint test docs wheel

lint: lint-go lint-style lint-spelling lint-imports lint-types lint-docker lint-workflows lint-docs lint-commits ## gofmt, go vet, golangci-lint, ruff, codespell, import-linter, pyrefly, hadolint, actionlint, links and settings of the pages, commit subjects (-k: all of them)

lint-go: $(PY)
	@unformatted="$$(gofmt -l go)" || exit; test -z "$$unformatted" || { echo "gofmt -w these: $$unformatted" >&2; exit 1; }
	cd go && $(GO) vet -trimpath ./...
	cd go && $(GOLANGCI) run ./...

lint-style: $(VENV)/with-lint
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

# The words that it accepts are in pyproject.toml.
lint-spelling: $(VENV)/with-lint
	$(VENV)/bin/codespell *.md *.py *.toml *.yml Makefile csrc docs go proto python tests torchft

lint-imports: $(VENV)/with-lint
	$(VENV)/bin/lint-imports --no-cache

# The checker looks into torch and pytest.
lint-types: $(VENV)/with-lint $(VENV)/with-test
	$(VENV)/bin/pyrefly check --python-interpreter-path $(PY)

lint-docker: $(VENV)/with-lint
	$(VENV)/bin/hadolint Dockerfile

lint-workflows:
	test ! -e .github || $(GO) run $(ACTIONLINT) -shellcheck= -pyflakes= .github/workflows/*.yml

# Links, the commands that pages name, and the tables of settings.
lint-docs: $(VENV)/with-test $(LIBRARY)
	$(PY) -m pytest -q -p no:cacheprovider tests/docs/test_site.py tests/docs/test_commands.py tests/docs/test_settings_page.py

# The commits since the rule. A source distribution has no history to check, and no workflows.
lint-commits:
	@test -e .git || exit 0; long="$$(git log --since=2026-11-23T00:00:00Z --format=%s | grep -E '^.{73}')" || exit 0; \
	echo "a commit's subject has at most 72 characters:" >&2; echo "$$long" >&2; exit 1

bench: $(VENV)/with-test $(LIBRARY) ## measure side by side with upstream
	$(PY) python/bench/run.py

bench-quorum: $(VENV)/with-test $(LIBRARY) ## how a quorum round grows with the number of groups
	$(INSTALL) matplotlib
	$(PY) python/bench/quorum.py

# zig compiles for the oldest glibc that PyTorch runs with, and for other machines; the build asks for it.
wheel: $(PY) ## build abi3 wheels for x86-64 and aarch64, glibc 2.28, into DIST=dist
	rm -f $(DIST)/torchft-*.whl
	$(foreach machine,$(WHEELS),TORCHFT_WHEEL_FOR=$(machine) $(BUILD_WHEEL) &&) true
	@ls -l $(DIST)/torchft-*.whl

sdist: $(PY) ## the source distribution, into dist/
	$(PY) setup.py --quiet sdist

clean: ## remove everything that make made
	rm -rf $(VENV) build dist site torchft-logs torchft.egg-info $(LIBRARY) .pytest_cache .ruff_cache .import_linter_cache

# The checks come first, so that the first line of an error says what to install.
check:
	@command -v $(PYTHON) >/dev/null || { echo "torchft: install Python 3.10 or newer, or set PYTHON; no \`$(PYTHON)\` on PATH." >&2; exit 1; }
	@$(PYTHON) python/build/toolchain.py

$(PY): | check
	@echo "Making the environment $(VENV). PyTorch comes from $(TORCH_FROM)."
	$(MAKE_VENV)
	$(INSTALL) --quiet 'setuptools>=77' $$($(PY) python/build/toolchain.py requires)

# The package, in place, with one of its extras ("nothing": none). An install builds the library too, but silently:
# so the library is built before it, and Go's cache then has the most of it.
$(VENV)/with-%: pyproject.toml setup.py $(LOCK) | check $(PY) $(LIBRARY)
# Without the lock: such an index has few versions of what PyTorch needs. The next install moves them to those of the lock.
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --index-url $(TORCH_INDEX) torch)
	@echo "Installing torchft into $(VENV)"
	$(INSTALL) --no-build-isolation --editable '.$(if $(filter-out nothing,$*),[$*])'
	@touch $(LIBRARY) $@

# Go's cache makes this take seconds.
$(LIBRARY): $(SOURCES) | check $(PY)
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@
