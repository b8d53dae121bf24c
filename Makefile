# `make demo` and `make test` need only a fresh Debian or Ubuntu with git and make. Both are quick the second time.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help deps install constraints tree check types format docs docs-check man site proto proto-check protocol-release pythons promtool browser test test-with-probes test-unit test-patient test-times test-all torch-wheels frameworks hta jax-wheels nccl-wheels demo screens pictures bench probing-venv opentelemetry soak mutations attacks selects night crowd page-of-thousand timeline-frames group-faults coordination install-host uninstall-host deb rpm newer-deb package-test vm-needs vm-test vm-smoke vm-power-cut wheel wheel-test web gpu-kit vm-test-arm64 image image-test kubernetes verifier-record inject clean

# Where bytecode is not kept, each of twenty processes compiles all tests.
unexport PYTHONDONTWRITEBYTECODE

PYTHON := .venv/bin/python
TORCH := torch==2.13.0
# The versions with which all tests passed; Pythons other than 3.11 use the versions that pyproject.toml allows.
CONSTRAINTS := packaging/constraints.txt
# Runs a command as root, with a checkout that the daemon's users can read.
HOST := packaging/dev/as-daemon-host.sh
PACKAGES := client diagnosis federation groups launcher daemon
TREE := .build/tree/probing

help: ## the list of targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16

deps: ## system packages and users
	@packaging/dev/deps.sh

# The system's Python, not one in a home directory: the daemon's users must be able to run it.
.venv/bin/python:
	/usr/bin/python3 -m venv .venv

.build/install.stamp: pyproject.toml setup.py $(CONSTRAINTS) | .venv/bin/python
	@mkdir -p .build
	$(PYTHON) -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]' $(TORCH)
	@touch $@

install: | deps ## .venv with the package, and the BPF programs
	@$(MAKE) --no-print-directory .build/install.stamp
	@$(PYTHON) -m probing.daemon.bpf.build >/dev/null
# The daemon's users may not write here: without this, each of their processes would compile all its modules.
	@$(PYTHON) -m compileall -q sdk $(PACKAGES) api

constraints: install ## a new packaging/constraints.txt, with the newest versions that pyproject.toml allows
	$(PYTHON) -m pip install -q --disable-pip-version-check --dry-run --ignore-installed --report .build/newest.json -e '.[dev]' $(TORCH)
	$(PYTHON) packaging/constraints.py .build/newest.json >$(CONSTRAINTS)

# One folder that looks like the installed package, for the tools that read source.
tree:
	@rm -rf .build/tree && mkdir -p $(TREE)
	@ln -s $(addprefix ../../../,$(wildcard sdk/*.py sdk/py.typed)) $(TREE)/
	@ln -s $(addprefix ../../../,api $(PACKAGES)) $(TREE)/

check: install proto-check docs-check types ## style, types, import contracts
	@$(PYTHON) -m ruff check -q . && $(PYTHON) -m ruff format -q --check . || { echo "hint: make format fixes some of these"; exit 1; }

types: tree
	$(PYTHON) -m mypy -p probing
	@PYTHONPATH=.build/tree .venv/bin/lint-imports --no-logo || { echo "hint: [tool.importlinter] in pyproject.toml has the contracts"; exit 1; }

format: ## the layout of the code, sorted imports, and the other fixes of ruff
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs: install ## the pages that are generated from the code: commands, tables, verdicts
	$(PYTHON) packaging/docs/pages.py docs

# The committed pages must equal the pages that the code generates.
docs-check:
	@rm -rf .build/docs && mkdir -p .build/docs
	@$(PYTHON) packaging/docs/pages.py .build/docs
	@for page in .build/docs/*; do cmp -s $$page docs/$${page##*/} || { echo "error: docs/$${page##*/} differs from the code"; \
		echo "hint: make docs"; exit 1; }; done

man: install ## the man pages, made from docs, into .build/man
	$(PYTHON) packaging/docs/man.py .build/man

site: install ## the documentation as a site, into .build/site
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build -q --strict

proto: install ## the code of the protocol, generated anew
	$(PYTHON) api/proto/generate.py

# The committed code must equal the code that the committed .proto files generate.
proto-check:
	@rm -rf .build/proto && mkdir -p .build && cp -r api/proto .build/proto
	@$(PYTHON) .build/proto/generate.py
	@diff -r -x __pycache__ api/proto .build/proto

# The built files are committed, so only a change of the page needs node.
web: ## the page of probingctl web, by node, from web/ into client/web/static
	cd web && npm ci --no-audit --no-fund --silent && npm run --silent types && node build.mjs --checksums

verifier-record: install ## docs/verifier.md, from the running kernel and the counts of `make vm-test`: accepts programs that grew
	$(HOST) env PYTHONPATH=tests $(PYTHON) tests/verifier_record.py $(wildcard .build/vm-tests/verifier-*.json)

protocol-release: install ## the record of the released protocol: from then on, a change that breaks its clients fails a test
	$(PYTHON) tests/released_protocol.py

# Outside of CI the tests run without it, and say so.
pythons: | deps ## CPython 3.14 and newer, from Debian unstable, for the tests
	@packaging/dev/sid-python.sh || [ -z "$$CI" ]

promtool: | deps ## the program that checks the page of /metrics, for the tests
	@packaging/dev/promtool.sh || [ -z "$$CI" ]

browser: | deps ## Chromium and node, from Debian, for the tests of the page
	@packaging/dev/browser.sh || [ -z "$$CI" ]

# The costs of each run are kept for `make test-times`. In CI a few failed tests are run again, three times and alone;
# elsewhere a failed test is a failure at once.
TIMES = .build/test-times
PYTEST = $(HOST) $(PYTHON) -m pytest -o cache_dir=.build/pytest/$(1) --junitxml=$(TIMES)/$(1).xml
AGAIN = $(if $(CI),|| $(PYTHON) tests/run_again.py .build/pytest/$(1))
RUN = { $(call PYTEST,$(1)) $(2) $(call AGAIN,$(1)); }
# Integration tests that measure how the kernel treats their processes.
ALONE = $(addprefix tests/integration/,gpu_kit processes/test_condition_activity.py processes/test_condition_live.py)
# Integration tests without jobs, and without limits of time that other tests could make them miss: of the client all but
# TIMED.
TIMED = $(addprefix %/test_client_,commands.py eval.py flight_recorder.py interrupts.py python_commands.py top_screen.py) \
	$(addprefix %/test_web_,job.py panels.py service.py)
PATIENT = $(addprefix tests/integration/,collector diagnose job_rows labels query store user_probes) \
	$(addprefix tests/integration/service/test_,flight_adbc.py service_attempts.py service_statements.py) \
	$(filter-out $(TIMED),$(wildcard tests/integration/client/test_*.py))

test: install pythons promtool browser ## all checks, and the tests of the gate; TESTS=tests/unit/store for some
	@$(HOST) rm -rf $(TIMES) .build/pytest
ifeq ($(TESTS),)
	@packaging/dev/beside.sh "$(MAKE) --no-print-directory test-with-probes" "$(MAKE) --no-print-directory check test-unit test-patient"
	$(call RUN,integration,-n 5 --dist loadfile --no-loadscope-reorder tests/integration $(addprefix --ignore=,$(ALONE) $(PATIENT)))
else
	@$(MAKE) --no-print-directory check
	$(call RUN,some,$(if $(filter-out tests/unit%,$(TESTS)),,-n 2 --dist worksteal) $(TESTS))
endif

# A daemon sees all processes of the machine, so tests with daemons run one at a time. Tests of the kernel are grouped by
# what they probe.
test-with-probes:
	$(call RUN,e2e,$(ALONE) tests/e2e)
	$(call RUN,kernel,-n 3 --no-loadscope-reorder tests/kernel)

test-unit:
	$(call RUN,unit,-n 2 --dist worksteal tests/unit)

test-patient:
	$(call RUN,patient,-n 2 --dist loadfile $(PATIENT))

test-times: ## the costs of the last run of the tests: by folder, by fixture, and of the slowest tests
	@$(PYTHON) tests/costs.py

# Takes hours. A test that was unstable twice in CI fails here.
test-all: ## all tests, including those marked long, the package and the guests
	PROBINGD_TEST_LONG=1 $(MAKE) test
	$(PYTHON) tests/run_again.py --recorded
	$(MAKE) package-test vm-test

torch-wheels: install ## the probes' expectations against published builds of torch, 2 GB of downloads
	packaging/dev/torch-wheels.sh
	$(PYTHON) -m pytest tests/wheels/test_torch_symbols.py

frameworks: install ## real frameworks (Lightning, DeepSpeed, Ray, JAX, vLLM, ...), 3 GB of downloads, watched and hung
	packaging/dev/frameworks.sh
	$(HOST) $(PYTHON) -m pytest tests/frameworks

hta: install ## Holistic Trace Analysis reads what `timeline -o DIR` writes, 100 MB of downloads
	packaging/dev/hta.sh
	$(PYTHON) -m pytest tests/hta

jax-wheels: install ## the probes' expectations against published builds of jaxlib, 1 GB of downloads
	packaging/dev/jax-wheels.sh
	$(PYTHON) -m pytest tests/wheels/test_jax_symbols.py

nccl-wheels: install ## the probes' expectations against published builds of NCCL, 2 GB of downloads
	packaging/dev/nccl-wheels.sh
	$(HOST) $(PYTHON) -m pytest tests/wheels/test_*_wheels.py

demo: install ## a real training, watched
	$(HOST) examples/demo.sh

screens: install ## screens of probingctl with jobs that run, hang, died or are paused, by tmux, into .build/screens
	$(HOST) $(PYTHON) tests/screens/screens.py
	$(PYTHON) tests/screens/pictures.py

pictures: install browser ## the pictures in README and docs, by tests of the page before a real daemon
	@mkdir -p docs/assets
	PROBINGD_TEST_LONG=1 PROBINGD_PICTURES=$(CURDIR)/docs/assets $(HOST) $(PYTHON) -m pytest tests/e2e/test_page.py

bench: install ## the figures of docs/benchmarks.md
	$(HOST) $(PYTHON) -m bench $(BENCH)

# Not a part of `make bench`: for each CPython it takes minutes.
inject: install pythons ## code run a thousand times in a process of each CPython, with a debug allocator; the steps beside a control
	PYTHONMALLOC=debug PROBINGD_TEST_LONG=1 $(HOST) $(PYTHON) -m pytest --timeout 1800 tests/integration/inject
	$(HOST) $(PYTHON) bench/inject.py \
	    $(wildcard $(foreach minor,8 9 10 11 12 13,$(HOME)/.pyenv/versions/3.$(minor).*/bin/python) .build/sid-bin/python3.1[45])

opentelemetry: install ## the SDK of OpenTelemetry, for `make bench BENCH=job_rows` to compare with
	$(PYTHON) -m pip install -q --disable-pip-version-check --target .build/opentelemetry opentelemetry-sdk

# Probing has the import name of our sdk, so it gets a virtual environment of its own, which sees our torch.
probing-venv: install ## Probing 0.2.4, for `make bench BENCH=cost_to_job` to compare with
	/usr/bin/python3 -m venv .build/probing-0.2.4
	.build/probing-0.2.4/bin/python -m pip install -q --disable-pip-version-check probing==0.2.4
	@echo "$(CURDIR)/$$(echo .venv/lib/python3*/site-packages)" > "$$(echo .build/probing-0.2.4/lib/python3*/site-packages)/torch.pth"

soak: install ## an hour of kills, failing disks, attacks and load; each part alone: see CONTRIBUTING.md
	$(PYTHON) tests/soak/kills.py store --rounds 500
	PROBINGD_TEST_LONG=1 $(HOST) $(PYTHON) -m pytest -k test_kills_of_the_collector tests/e2e/test_operations.py
	$(HOST) $(PYTHON) tests/soak/kills.py collector --rounds 200 --rate 10000 --ring-bytes 67108864 --whole
	$(HOST) $(PYTHON) tests/soak/kills.py collector --seconds 120
	$(PYTHON) tests/soak/faults.py
	$(PYTHON) tests/soak/counting.py --seconds 300
	$(HOST) $(PYTHON) tests/soak/attack_workers.py
	$(PYTHON) tests/soak/fuzz_queries.py --minutes 5
	$(PYTHON) tests/soak/interrupts.py --rounds 200
	$(HOST) $(PYTHON) -m bench soak

corpus: install ## jobs with faults, and healthy jobs: what diagnosis reports, how often and how soon; about two hours
	$(HOST) $(PYTHON) tests/soak/corpus.py --rounds 10 --stall-s 10 --late 3 --healthy 10

mutations: install ## faults that were fixed, put back into a copy one at a time: the gate's tests must notice each
	$(PYTHON) tests/mutations.py

attacks: install ## all attacks of an ordinary user on the daemon; the gate runs some
	PROBINGD_TEST_LONG=1 $(HOST) $(PYTHON) -m pytest tests/e2e/test_attacks.py

selects: install ## thousands of SELECTs at random: many nodes answer as one database with all rows does
	$(PYTHON) tests/soak/selects.py

coordination: install ## three daemons in namespaces, with clocks apart and a dead one: how soon a hang is named
	PROBINGD_TEST_LONG=1 $(HOST) $(PYTHON) -m pytest -s -k names_the_culprit tests/e2e/test_coordination_of_nodes.py

night: install ## docs/night-on-call.md with real jobs on two nodes in namespaces: how soon each command names the fault
	PROBINGD_TEST_LONG=1 $(HOST) $(PYTHON) -m pytest -s tests/e2e/test_night_on_call.py

group-faults: install ## 50 random schedules of faults of groups of workers: four nodes in namespaces, no rank ever has two processes
	$(HOST) $(PYTHON) tests/soak/group_faults.py --schedules 50

crowd: install ## 100 clients at once for a minute on one service, some of which do not read or are half open
	$(HOST) $(PYTHON) tests/soak/crowd.py

page-of-thousand: install ## the page in a browser over 1,000 simulated nodes with a hung job of 8,000 ranks: what it shows, and how soon
	$(PYTHON) tests/soak/page_of_thousand.py

timeline-frames: install ## the timeline of the page with 1,000,000 operations in a browser: load, frames and memory
	$(PYTHON) tests/soak/timeline_frames.py

install-host: | deps ## probingd and probingctl for this host, with units, users and directories; also DESTDIR=, PREFIX=
	packaging/install-host.sh install

deb: | deps ## .build/packages/probingd_VERSION_ARCHITECTURE.deb
	packaging/package.sh deb

rpm: | deps ## .build/packages/probingd-VERSION-1.ARCHITECTURE.rpm
	@command -v rpmbuild >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends rpm; }
	packaging/package.sh rpm

# The deb with a newer version, for tests of upgrades.
newer-deb: deb
	VERSION=9999 packaging/package.sh deb .build/packages/tree

OLDER_DEB = $$(ls .build/packages/probingd_[!9]*.deb)
NEWER_DEB = $$(ls .build/packages/probingd_9999_*.deb)

# Not a part of `make test`: it takes some minutes, and makes a Debian in the user's cache.
package-test: newer-deb ## install, upgrade, remove and purge the deb in a Debian of its own
	packaging/package/test.sh $(OLDER_DEB) $(NEWER_DEB)

# Images are kept in the user's cache; only Debian's packages are needed.
VM_NEEDS = cpio debootstrap e2fsprogs kmod qemu-system-x86 qemu-utils
KERNELS ?= 5.10 6.1 6.12 7.2
CUTS ?= 1
VM_TESTS ?= vm-tests

vm-needs: install
	@[ "$$(dpkg-query -W -f '$${db:Status-Status}\n' $(VM_NEEDS) 2>&1 | sort -u)" = installed ] || { apt-get update -q && apt-get install -q -y --no-install-recommends $(VM_NEEDS); }

vm-test: vm-needs ## the deb in guests with systemd, by QEMU without KVM; KERNELS="5.10 6.1 6.12 7.2"
	@rm -f .build/vm-tests/figures-*
	@$(PYTHON) vm-tests/passed.py begin
	@$(MAKE) --no-print-directory newer-deb
	@$(MAKE) --no-print-directory --keep-going $(KERNELS:%=vm-test-%)
	@$(PYTHON) vm-tests/figures.py .build/vm-tests

# The power is cut on the last kernel only. Exit status 86: QEMU ended the guest's kernel.
IN_GUEST = $(PYTHON) -m pytest --timeout 1800 -o timeout_func_only=true --before $(OLDER_DEB)
ALL_IN_GUEST = $(IN_GUEST) --kernels $* --cuts $(if $(filter $*,$(lastword $(KERNELS))),$(CUTS),0) --deb $(NEWER_DEB) $(VM_TESTS)
vm-test-%:
	$(ALL_IN_GUEST) || { [ $$? = 86 ] && $(ALL_IN_GUEST); }

# 5.10 has no uprobe_multi, cookies or pinned links, so the oldest code runs there; in `make test` the newest runs.
KERNEL ?= 5.10
SMOKE_IN_GUEST = $(IN_GUEST) --kernels $(KERNEL) -m smoke vm-tests
# A guest needs half a minute to unpack zstd.
vm-smoke: export COMPRESSION = none
vm-smoke: deb vm-needs ## install, start, `ps`, a stall named and removal of the deb in one guest; KERNEL="5.10"
	$(SMOKE_IN_GUEST) || { [ $$? = 86 ] && $(SMOKE_IN_GUEST); }

vm-power-cut: ## 20 cuts of power in mid-write on one of KERNELS: each start has all rows up to the sync interval, each once
	$(MAKE) vm-test CUTS=20 VM_TESTS=vm-tests/test_power_cut.py

image: deb ## .build/image/probingd-VERSION.oci.tar, a container image, without a registry
	@command -v buildah >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends buildah crun; }
	packaging/container/image.sh archive

# Not a part of `make test`: it takes some minutes and runc.
image-test: install image ## the image as the pod of the DaemonSet, by runc, beside a job of this host
	@command -v runc >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends runc; }
	$(HOST) $(PYTHON) -m pytest tests/image/test_image.py

kubernetes: install ## packaging/kubernetes/probingd.yaml and the schema of the Helm chart's values, from both chart and daemon
	$(PYTHON) packaging/helm/generate.py

wheel: | deps ## .build/wheels/probingd-VERSION-py3-none-manylinux_2_28_MACHINE.whl with a libbpf; also MACHINE=aarch64
	packaging/wheel.sh $(MACHINE)

# Not a part of `make test`, which tests the kit against doubles (tests/integration/gpu_kit).
gpu-kit: | deps ## .build/gpu-kit, which checks probingd on a machine with a GPU and no registry: bash .build/gpu-kit/run
	packaging/gpu-kit.sh

# Not a part of `make test`: it makes a Debian in the user's cache and downloads compilers and dependencies.
wheel-test: wheel ## install the wheel where there is no compiler and no libbpf, and watch a job there
	packaging/wheel-test.sh $$(ls .build/wheels/probingd-*_$$(uname -m).whl)

ARM64_KERNELS ?= 6.12
# Not a part of `make test`: QEMU translates every instruction. Debian's files for the guest come into the user's cache.
vm-test-arm64: install ## the arm64 wheel on kernels of arm64 under QEMU; also ARM64_KERNELS="6.1 6.12"
	@command -v qemu-system-aarch64 qemu-img cpio depmod >/dev/null || { apt-get update -q && \
		apt-get install -q -y --no-install-recommends cpio kmod qemu-system-arm qemu-utils; }
	packaging/wheel.sh aarch64
	PYTHONPATH=tests $(PYTHON) -m pytest -s --timeout 3600 --kernels "$(ARM64_KERNELS)" vm-tests/arm64_tests.py

uninstall-host: ## removes what install-host made; rows and configuration stay
	packaging/install-host.sh uninstall

clean: ## removes all files that make made in the checkout
	rm -rf .venv .build build dist *.egg-info daemon/bpf/*.bpf.o
