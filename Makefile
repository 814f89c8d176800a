# `make demo` and `make test` set everything up on a fresh machine; the rest builds on .venv.
VENV := .venv
BIN  := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench venv wheel check-gpu-schedule clean
.DEFAULT_GOAL := test

venv: $(STAMP)

$(STAMP): pyproject.toml requirements.lock tools/find_python.sh
	python=$$(PYTHON="$(PYTHON)" ./tools/find_python.sh) && "$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/train_packed_lm.py --demo --out demo_output

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

bench: $(STAMP)
	$(BIN)/python -m benchmarks.planner

# Compiles for H200s and reads the schedules; needs no GPU, but the 4 GB of the CUDA plugin.
check-gpu-schedule:
	python=$$(PYTHON="$(PYTHON)" ./tools/find_python.sh) && "$$python" -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --requirement requirements.lock "jax[cuda13]==0.11.2"
	.venv-gpu/bin/python -m pip install --quiet --no-deps --editable .
	.venv-gpu/bin/python -m pytest -m gpu_schedule tests

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) demo_output dist build *.egg-info
