RUN ?= 1k
PYTHON ?= python3.11
CONFIGFILE ?=

# In the environment, ENV may be the startup file of sh; only cpu and cuda are taken from there.
ENV := $(or $(filter cpu cuda,$(ENV)),$(if $(wildcard /proc/driver/nvidia/version),cuda,cpu))
LOCK := envs/$(ENV).lock
ifeq ($(wildcard $(LOCK)),)
$(error ENV is '$(ENV)'; it can be cpu or cuda)
endif

# Its name holds the hash of the lock, and it is made last: a changed lock or an interrupted
# install is seen by the next make.
INSTALLED := .venv/installed-$(ENV)-$(firstword $(shell cat $(LOCK) envs/slurm.txt envs/s3.txt | sha256sum))
PIP := .venv/bin/python -m pip install --no-deps
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# snakefmt looks for shfmt on the PATH, and what vllm compiles on a GPU's machine for ninja.
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

define CHECK_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	|| { echo "Eyrie needs Python 3.11, and $(PYTHON) is not: set PYTHON=/path/to/python3.11" >&2; exit 1; }
@test $(ENV) = cuda || test "$$(uname -sm)" = 'Linux x86_64' \
	|| { echo "envs/cpu.lock is for Linux x86-64, and this is $$(uname -sm)" >&2; exit 1; }
endef

# Where the config puts what it makes.
RESULTS = $(if $(CONFIGFILE),"$$(.venv/bin/python -c '$(READ_RESULTS)' '$(CONFIGFILE)')",results)
READ_RESULTS = import sys, yaml; print(yaml.safe_load(open(sys.argv[1])).get("results", "results"))

.PHONY: help
help:
	@echo 'make run     install, make report_$$RUN.html in results/ and print its table'
	@echo 'make plan    what that will take: tokens, bytes, memory, hours; writes plan_$$RUN.json there'
	@echo 'make test    install, check format and style, run the tests'
	@echo 'make lock    remake envs/*.lock from envs/*.in'
	@echo 'make clean   remove .venv; results/ stays'
	@echo
	@echo 'RUN=10             the draft of 10 conversations (1k, a thousand, when not given); sweep'
	@echo '                   trains and compares those that the config lists'
	@echo 'CONFIGFILE=FILE    keys of FILE go over those of config.yaml'
	@echo 'ENV=cpu|cuda       which lock; cuda where an NVIDIA driver is loaded, else cpu'
	@echo 'PYTHON=python3.11  the Python that .venv is made with'

.PHONY: run
run: $(INSTALLED)
	results=$(RESULTS) && page="$$results/report_$(RUN).html" && \
	$(IN_VENV) .venv/bin/snakemake -j 8 "$$page" $(if $(CONFIGFILE),--configfile='$(CONFIGFILE)') && \
	.venv/bin/python scripts/table.py "$$results/$(if $(filter sweep,$(RUN)),report,bench)_$(RUN).json" --report "$$page"

# Whatever was planned before: by what has been counted and measured since.
.PHONY: plan
plan: $(INSTALLED)
	.venv/bin/python scripts/plan.py --run '$(RUN)' $(if $(CONFIGFILE),--config '$(CONFIGFILE)')

.PHONY: test
test: $(INSTALLED)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	$(IN_VENV) .venv/bin/snakefmt --check Snakefile rules
	.venv/bin/snakemake --lint
	$(IN_VENV) .venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/workflow tests/unit

# A .venv of the other ENV, or one only half made, is made anew. torch+cpu is not on PyPI.
$(INSTALLED):
	$(CHECK_PYTHON)
	rm -f .venv/installed-*
	test -e .venv/$(ENV) || $(PYTHON) -m venv --clear .venv
	touch .venv/$(ENV)
ifeq ($(ENV),cpu)
	torch=$$(grep '^torch==' $(LOCK)) && { $(PIP) $$torch || $(PIP) --index-url $(TORCH_CPU_INDEX) $$torch; }
endif
	$(PIP) -r $(LOCK) -r envs/slurm.txt -r envs/s3.txt
	touch $@

.PHONY: lock
lock:
	$(CHECK_PYTHON)
	$(PYTHON) envs/lock.py

.PHONY: clean
clean:
	rm -rf .venv
