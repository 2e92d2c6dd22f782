# Everything that a fresh machine needs is installed into $(VENV); nothing outside it is touched.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
INSTALL = $(PIP) install --constraint constraints.txt

.PHONY: help precompile test lint docs clean

help:
	@echo "make precompile   set up and compile the plans for topk 128, 1024 and 2048"
	@echo "make test         set up and run the tests"
	@echo "make lint         set up and run ruff and mypy"
	@echo "make docs         write the generated pages of docs/ again"

# $(1) is a Python: ours as named, or that of an older $(VENV).
define require_python
@$(1) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	version=$$($(1) --version 2>&1) || version='which does not run'; \
	echo "$(1), $$version: Python 3.10 or newer is needed; make clean, then for example make PYTHON=python3.12" >&2; \
	exit 1; }
endef

$(VENV)/bin/python:
	$(call require_python,$(PYTHON))
	$(PYTHON) -m venv $(VENV)

$(VENV)/.compile: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call require_python,$(VENV)/bin/python)
	$(INSTALL) --editable '.[compile]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call require_python,$(VENV)/bin/python)
	$(INSTALL) --editable '.[compile,plot,test,torch,verify]'
	@touch $@ $(VENV)/.compile

$(VENV)/.lint: $(VENV)/.test
	$(INSTALL) --editable '.[compile,plot,test,torch,verify,lint]'
	@touch $@

precompile: $(VENV)/.compile
	$(VENV)/bin/dsa-plan precompile --topk 128,1024,2048

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -q

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror kernels/ptx/vm/*.[ch]
	$(VENV)/bin/mypy

docs: $(VENV)/.test
	$(VENV)/bin/python docs/generate.py

clean:
	rm -rf $(VENV)
