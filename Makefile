# make demo   train a small Llama on Shakespeare, four processes, CPU or GPUs
# make test   the test suite; make test-long what takes minutes more; make test-slurm what needs a SLURM cluster, which it starts on this machine
# make test-pretrained   real weights (SmolLM2-135M, 93 MB) in, trained on, and out again; some 10 minutes on 2 cores
# PY=python3.12 picks another interpreter; TORCH_INDEX=URL takes torch from another package index, such as that of CPU
# builds (https://download.pytorch.org/whl/cpu). What is installed stays: a second call installs nothing.

PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_INDEX ?=
SLURM_TESTS ?= slurm
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-long test-slurm test-pretrained install clean

install: $(STAMP)-run
# Three workers for two cores: much of the time a worker waits for the processes that it started.
test: $(STAMP)-dev
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slurm and not long" --durations=20

test-long: $(STAMP)-dev
	$(BIN)/python -m pytest -q -m "long and not slurm"

# A SLURM cluster of several nodes on this machine, as root; apt install slurmctld slurmd munge.
test-slurm: $(STAMP)-dev
	$(BIN)/python -m pytest -q -m "$(SLURM_TESTS)"

# Opt-in: the weights are fetched once, into build/pretrained.
test-pretrained: $(STAMP)-dev
	$(BIN)/python -m pip install -q -c constraints.txt 'gguf>=0.17' 'accelerate>=1'
	$(BIN)/python scripts/check_pretrained.py build/pretrained

demo: $(STAMP)-run
	$(BIN)/hp-train recipe=llama_fsdp_pp
	@$(BIN)/hp-train sample last --prompt "ROMEO:" --max-tokens 400 | head -n 4

DOWNLOAD = To download: torch, about 190 MB in a CPU build and 2.7 GB in a CUDA build (what Linux gets unless TORCH_INDEX \
names an index of CPU builds); everything else, about 40 MB. It takes 1.1 GB of disk (CPU) or some 6 GB (CUDA) in $(VENV).

# torch goes first and alone: with it in place, pip resolves the rest without a second copy.
$(STAMP)-run: pyproject.toml constraints.txt
	$(PY) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"hp-train needs Python 3.11 to 3.13, not {v[0]}.{v[1]}: make PY=python3.12 ...")'
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || echo "$(DOWNLOAD)"
	$(BIN)/python -m pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	$(BIN)/python -m compileall -q hp_train  # pip compiles what it copies, not an editable install
	touch $@

$(STAMP)-dev: $(STAMP)-run
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
