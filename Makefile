# Everything runs in .venv, made on first use. After that nothing needs the network.
PYTHON ?= python3
BIN := .venv/bin
# A test computes on one core.
PYTEST := -m pytest -n auto --dist worksteal
PROMPT := 'def open(self, path, mode="r"):\n    """Open the file named path'

.PHONY: demo test test-slow test-product torture histories check test-oldest clean

demo: .venv/installed
	@for cache in dynamic static; do \
		printf '\n--- cache=%s ---\n' $$cache; \
		printf $(PROMPT); \
		printf $(PROMPT) | $(BIN)/engine generate - --cache $$cache --max-new-tokens 96 --stream --stats \
			--temperature 0.7 --top-p 0.9 --seed 2 || exit 1; \
	done

test: .venv/installed
	$(BIN)/python $(PYTEST)

# What takes longer: rare architectures, compiling with a C++ compiler.
test-slow: .venv/installed
	$(BIN)/python $(PYTEST) -m "slow and not product"

# Every cell of what is tried pairwise otherwise: some three hours on two cores.
test-product: .venv/installed
	$(BIN)/python $(PYTEST) -m product

# Memory runs out at random, 20,000 times; 2,000 of them are among the tests.
torture: .venv/installed
	$(BIN)/python tests/support/torture.py 20000

# Random histories of live caches; 500 of them are among the tests.
histories: .venv/installed
	$(BIN)/python tests/support/histories.py 10000

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The same tests on the oldest transformers that pyproject.toml allows, but for those that take long and say nothing of it.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python $(PYTEST) -k "not test_benchmarks and not test_torture and not test_real_out_of_memory"

# torch first and alone: where a build for CPUs only is at hand, the rest must not replace it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[test]' -c constraints.txt
	@touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet torch -c constraints-oldest.txt
	.venv-oldest/bin/python -m pip install --quiet -e '.[test]' -c constraints-oldest.txt
	@touch $@

clean:
	rm -rf .venv .venv-oldest
