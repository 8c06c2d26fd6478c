# Everything runs in .venv, made on first use. After that nothing needs the network.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check test-oldest clean

demo: .venv/installed
	@for cache in dynamic static; do \
		printf '\n--- cache=%s ---\ndef read_lines(path' $$cache; \
		$(BIN)/engine generate 'def read_lines(path' --cache $$cache --max-new-tokens 96 --stream --stats || exit 1; \
	done

test: .venv/installed
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The same tests on the oldest transformers that pyproject.toml allows.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest

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
