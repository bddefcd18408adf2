# The five things that a developer does; `make` lists them.
PYTHON = .venv/bin/python
FILE = tests

.PHONY: help install test one lint docs

help:
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

install: ## make .venv with everything that tests, pages and checks need (6.3 GB)
	./launch.sh test --version

test: ## run the test suite on four workers: about half an hour on two cores
	./launch.sh test -n 4

one: ## run one test file: make one FILE=tests/cli/test_main.py
	$(PYTHON) -m pytest -x -q $(FILE)

lint: ## format, then run all checks of .pre-commit-config.yaml
	$(PYTHON) -m ruff check --fix --quiet .
	$(PYTHON) -m ruff format --quiet .
	$(PYTHON) -m pytest -q tests/test_hooks.py tests/test_structure.py

docs: ## build the documentation into build/site; a broken link is an error
	$(PYTHON) docs/site.py
