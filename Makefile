# Every target installs what it needs first. PYTHON chooses the interpreter for a new .venv.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
export DO_NOT_TRACK = 1

.PHONY: install demo test test-slow check bench ui serve lock clean

install: $(VENV)/.installed

# The marker is written last: an interrupted install is taken up again.
$(VENV)/.installed: requirements.lock pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	touch $@

demo: install
	./run -m flows experiment

# Two files at a time, on any machine: a test may start four ranks and wait for most of its time.
PYTEST := $(PY) -m pytest -n 2 --dist loadfile

test: install
	$(PYTEST) -m "not slow"

test-slow: install
	$(PYTEST) -m slow

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell

bench: install
	./run -m benchmarks

ui: install
	./run -m flows ui

serve: install
	./run -m flows serve

# The exact versions for Linux, of all extras but `gym`, which needs a compiler for C; `+cpu` would
# tie the lock to one build of torch.
lock: install
	CUSTOM_COMPILE_COMMAND='make lock' $(VENV)/bin/pip-compile --quiet --extra flow,hf,rl,dev --strip-extras --no-emit-index-url \
	  --no-emit-find-links --no-emit-trusted-host --no-emit-options -o requirements.lock pyproject.toml
	sed -i 's/^\(torch==[0-9.]*\)+cpu/\1/' requirements.lock

# Outputs stay: DVC locks and MLflow runs point to them.
clean: install
	./run -m flows gc
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
