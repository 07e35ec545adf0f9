# make demo   train a small Llama on Shakespeare, four processes, CPU or GPUs
# make test   the test suite
# PY=python3.12 picks another interpreter.

PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export OMP_NUM_THREADS ?= 1

.PHONY: demo test install clean

install: $(STAMP)-run
test: $(STAMP)-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

demo: $(STAMP)-run
	$(BIN)/hp-train recipe=llama_fsdp_pp

# torch goes first and alone: with it in place, pip resolves the rest without a second copy.
$(STAMP)-run: pyproject.toml constraints.txt
	$(PY) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"hp-train needs Python 3.11 to 3.13, not {v[0]}.{v[1]}: make PY=python3.12 ...")'
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	$(BIN)/python -m compileall -q hp_train  # pip compiles what it copies, not an editable install
	touch $@

$(STAMP)-dev: $(STAMP)-run
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
