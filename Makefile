# All commands work in .venv, which they make. `make` lists them.
.DEFAULT_GOAL := help
.PHONY: help venv install up test test-slow soak check bench proto images clean

BIN := .venv/bin
SOURCES := pyproject.toml constraints.txt core/_native.c router/_native.c $(wildcard kernels/_native*.[ch])
FAST := not slow and not soak and not gpu

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s%s\n", $$1, $$2}' Makefile

venv: .venv/.installed-dev ## everything that tests, checks and benchmarks need

install: .venv/.installed ## what `make up` needs

up: install ## serve the demo model on this machine until Ctrl-C; ARGS="--port 9000 …"
	@model=$$($(BIN)/paceline demo-model) && exec $(BIN)/paceline up --model "$$model" $(ARGS)

test: venv ## fast tests, on the CPU
	$(BIN)/pytest -m "$(FAST)" -n 3 --dist loadfile $(ARGS)

test-slow: venv ## real model, many processes
	$(BIN)/pytest -m slow $(ARGS)

soak: venv ## ten minutes of load and faults; PACELINE_SOAK_S=60 for one
	$(BIN)/pytest -m soak $(ARGS)

check: venv ## format, lint, types, import contracts, drift of what is generated, sizes
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	scripts/proto.sh --check
	$(BIN)/python -m deploy.observability.build --check
	$(BIN)/python scripts/check_sizes.py

bench: venv ## quick form of every benchmark that needs no device, as a table
	$(BIN)/python scripts/bench.py

proto: venv ## generate src/paceline/v1 from proto/
	scripts/proto.sh

images: ## build the three container images; IMAGE=registry.example/paceline
	scripts/images.sh $(or $(IMAGE),paceline)

clean: ## remove .venv, caches and built files
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf src/*.egg-info core/_native.*.so router/_native.*.so kernels/_native.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: $(SOURCES)
	@scripts/install.sh engine,demo,embedded
	@touch $@

.venv/.installed-dev: $(SOURCES)
	@scripts/install.sh engine,gpu,demo,embedded,nixl,otel,dashboards,clients,dev
	@touch .venv/.installed $@
