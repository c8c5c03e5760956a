# `make demo` and `make test` need nothing but Python 3.10 or newer; both install what they use into
# .venv. PYTHON picks the interpreter, PIP_FLAGS is passed to every `pip install`.
PYTHON ?= python3
PIP_FLAGS ?=
MESH ?= dp=2, tp=2
RANKS ?= 4
TESTS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)

.PHONY: demo test lint bench clean

demo: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone \
		--nproc-per-node $(RANKS) examples/train_gpt.py --mesh "$(MESH)"

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict autopar

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/optimizer.py
	$(BIN)/python benchmarks/compile_time.py

clean:
	rm -rf $(VENV) build runs *.egg-info

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "autopar needs Python 3.10 or newer: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone, so that no other package's wish picks a different build of it
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing into $(VENV), about a minute the first time"
	$(PIP) -c constraints.txt torch==2.13.0
	$(PIP) -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -c constraints.txt -e '.[test,dev]'
	@touch $@
