# Everything a developer does here. `make setup`, and `make demo` at first, need Python 3.11 to 3.14 and the internet.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What is installed: everything, or what the demo needs.
READY      := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo

.DEFAULT_GOAL := help
# Two targets may want to install into the same .venv.
.NOTPARALLEL:

# Tests and benchmarks start hundreds of Python processes: they would compile everything anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## Make .venv with everything that is needed, servers included

# Everything includes what the demo needs; the demo's part leaves what else is there alone.
$(READY): EXTRAS := dev
$(READY): STAMPS := $(READY) $(DEMO_READY)
$(DEMO_READY): EXTRAS := embedded,cli
$(DEMO_READY): STAMPS := $(DEMO_READY)
$(READY) $(DEMO_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
		{ echo "this needs Python 3.11 to 3.14 (of some packages there are no wheels for later ones yet); set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(STAMPS)

.PHONY: demo
demo: $(DEMO_READY) ## Run the demo: real servers, many writers, an outage of Postgres, a verified report
	$(BIN)/bufstore demo

# Most tests wait for servers, so several files run at a time, each process with servers of its own. What measures time is
# marked `alone` and runs after them, with one more beside it. xdist would wait for ever for the files of a worker that it
# has replaced; without another one it ends, and names the test.
WORKERS ?= 3
BY_FILE := --dist loadfile --max-worker-restart 0
SIDE_BY_SIDE := -n $(WORKERS) $(BY_FILE)
ALONE := -n 2 $(BY_FILE)
# The other files have no such test, and each process would import them all.
WITH_ALONE = tests/bench tests/spark $(shell grep -rl --include='*.py' 'mark\.alone' tests)
# A tenth of the examples of each property; `make test-long` tries all.
FEWER := BUFSTORE_THOROUGH=0.1
# Without servers nothing waits: as many as there are cores.
WITHOUT_SERVERS := -n logical --dist worksteal tests/unit

.PHONY: test
test: check ## Run the tests on real servers (lint, types and layers first; about 15 minutes)
	$(FEWER) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not alone and not long and not leaders"
	$(FEWER) $(BIN)/python -m pytest $(ALONE) -m "alone and not long and not leaders" $(WITH_ALONE)

.PHONY: test-long
test-long: $(READY) ## Run what `make test` leaves out, because it takes longest of its kind (half an hour)
	$(BIN)/python -m pytest $(WITHOUT_SERVERS)
	$(BIN)/python -m pytest $(ALONE) --ignore tests/unit -m long

.PHONY: leaders
leaders: $(READY) ## Check the whole contracts of mailbox and tokens on three replicas while leaders go (ten minutes)
	$(BIN)/python -m pytest -m leaders

SPARK ?= 4.2.1
SPARK_FILES := foreach_batch jobs bufstore_format threadlog_format tables_on_spark catalog
SPARK_TESTS ?= arrives_once or beside_a_flusher or back_into_an_empty or numbered or commit_fails or decoded or \
	where_it_stopped or questions or push_their or one_position or of_the_catalog
.PHONY: spark-version
spark-version: $(READY) ## Run some tests of tests/spark on PySpark SPARK=4.2.1 (some minutes; 1 GB of disk)
	rm -rf .venv-spark && $(BIN)/python -m venv .venv-spark
	.venv-spark/bin/python -m pip install --quiet --disable-pip-version-check pyspark==$(SPARK)
	@# All else as it is in $(VENV), behind the packages of its own.
	@echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages)')" \
		> "$$(ls -d .venv-spark/lib/python*/site-packages)/rest.pth"
	.venv-spark/bin/python -m pytest -rA -q -W default -k "$(SPARK_TESTS)" $(SPARK_FILES:%=tests/spark/test_%.py); \
		found=$$?; rm -rf .venv-spark; exit $$found

# What the lowest versions that pyproject.toml allows might lack, and the oldest nats-server.
LOWEST := tests/unit tests/integration/test_buffered_store.py tests/integration/test_faults.py \
	tests/integration/test_cli.py tests/integration/test_tokens.py tests/integration/test_mailbox.py \
	tests/integration/test_notify.py tests/langgraph/test_conformance.py
.PHONY: lowest
lowest: $(READY) ## Run some tests with the lowest versions of what bufstore needs, nats-server included (some minutes)
	rm -rf .venv-lowest && $(BIN)/python -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		$$($(BIN)/python tests/lowest_versions.py pyproject.toml)
	@# All else as it is in $(VENV), behind the packages of its own.
	@echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages)')" \
		> "$$(ls -d .venv-lowest/lib/python*/site-packages)/rest.pth"
	.venv-lowest/bin/python -m pytest $(SIDE_BY_SIDE) -W default -m "not long" $(LOWEST); \
		found=$$?; rm -rf .venv-lowest; exit $$found

# What LangGraph's own tests import besides what is installed.
LANGGRAPH_NEEDS := syrupy pytest-mock pytest-repeat aiosqlite sqlite-vec langgraph-checkpoint-sqlite pycryptodome
LANGGRAPH_TESTS ?= pregel pregel_async large_cases large_cases_async time_travel time_travel_async interruption \
	subgraph_persistence subgraph_persistence_async
.PHONY: langgraph-tests
langgraph-tests: $(READY) ## Run LangGraph's own tests of graphs on our savers; LANGGRAPH=folder of its repository
	@test -d "$(LANGGRAPH)/libs/langgraph/tests" || { echo "LANGGRAPH names no checkout of LangGraph"; exit 1; }
	rm -rf .venv-langgraph && $(BIN)/python -m venv .venv-langgraph
	.venv-langgraph/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(LANGGRAPH_NEEDS)
	@# All else as it is in $(VENV), behind the packages of its own.
	@echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages)')" \
		> "$$(ls -d .venv-langgraph/lib/python*/site-packages)/rest.pth"
	cd "$(LANGGRAPH)/libs/langgraph" && NO_DOCKER=true PYTHONPATH=$(CURDIR)/tests \
		$(CURDIR)/.venv-langgraph/bin/python -m pytest -q -rx -p langgraph_own_tests -p no:cacheprovider -W default \
		-k "(memory or sqlite) and not aes and not migrate" $(LANGGRAPH_TESTS:%=tests/test_%.py); \
		found=$$?; rm -rf $(CURDIR)/.venv-langgraph; exit $$found

.PHONY: unit
unit: $(READY) ## Run the tests that need no servers, with a tenth of their examples (a minute)
	$(FEWER) $(BIN)/python -m pytest -q $(WITHOUT_SERVERS) -m "not long"

.PHONY: check
check: $(READY) ## Lint, format, types, layers (no servers, under a minute)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The long versions of tests that `make test` runs for a few seconds. Their options: ARGS="--rounds 5 --seed 7".
SECONDS ?= 60
SEED ?= 1
LONG := PYTHONPATH=tests $(BIN)/python -m

.PHONY: crash-sweep
crash-sweep: $(READY) ## Kill a process at each crash point under load and check everything (some minutes)
	$(LONG) sweep.crash $(ARGS)

.PHONY: cluster
cluster: $(READY) ## Kill, wipe and cut off nodes of a three-node NATS cluster for SECONDS=60
	$(LONG) sweep.nodes --seconds $(SECONDS) $(ARGS)

.PHONY: powercut
powercut: $(READY) ## Cut the power of the servers' disks (needs root and loop mounts)
	$(LONG) sweep.powercut $(ARGS)

DOMAIN ?= threads
.PHONY: chaos
chaos: $(READY) ## Break things for SECONDS=60 as SEED=1 says; nothing may be lost, doubled or stale (DOMAIN=lanes; checkpoints, checkpoint_lanes: LangGraph)
	$(LONG) chaos.run --seconds $(SECONDS) --seed $(SEED) --on $(DOMAIN)

ITEMS ?= 10000
REPLICAS ?= 3
.PHONY: tokens
tokens: $(READY) ## Exclusive work of ITEMS=10000 on REPLICAS=3 (or 1) while things break as SEED=1 says (some minutes)
	$(LONG) sweep.tokens --items $(ITEMS) --seed $(SEED) --replicas $(REPLICAS)

ON ?= nats
DISPATCHES ?= 10000
.PHONY: mailbox-chaos
mailbox-chaos: $(READY) ## The same for the mailbox: DISPATCHES=10000 ON=nats (or replicas, postgres, redis) as SEED=1 says
	$(LONG) mailbox_chaos.run --on $(ON) --dispatches $(DISPATCHES) --seed $(SEED)

.PHONY: model
model: $(READY) ## Live through random worlds for SECONDS=60 from SEED=1 on, each against an oracle (no servers)
	PYTHONHASHSEED=0 $(LONG) store_model.run $(SECONDS) $(SEED)

TIMES ?= 10
.PHONY: thorough
thorough: $(READY) ## Try TIMES=10 as many examples of each property as `make test-long` (some minutes, no servers)
	BUFSTORE_THOROUGH=$(TIMES) $(BIN)/python -m pytest -q $(WITHOUT_SERVERS) -o faulthandler_timeout=3000

.PHONY: storm
storm: $(READY) ## Publish 10 000 poison entries among 100 000 good ones (some minutes; BUFSTORE_SEED=…)
	BUFSTORE_STORM=10000 $(BIN)/python -m pytest -s tests/integration/test_storm.py -o faulthandler_timeout=900

.PHONY: bench
bench: $(READY) ## Run all benchmarks, ours and every baseline side by side (about an hour; 20 GB of disk)
	$(BIN)/python -m bench

BEFORE ?= $(COMMIT)~1
.PHONY: reproduce
reproduce: $(READY) ## Show a bug of docs/TRACK_RECORD.md: TEST=… of COMMIT=… on the code of before it
	@git worktree add --quiet --detach .before $(COMMIT)
	@git -C .before checkout --quiet $(BEFORE) -- src
	-cd .before && PYTHONPATH=src $(CURDIR)/$(BIN)/python -m pytest -q -p no:cacheprovider --continue-on-collection-errors -k $(TEST)
	@git worktree remove --force .before

.PHONY: bench-quick
bench-quick: $(READY) ## Measure appends against every baseline, side by side (under ten minutes)
	$(BIN)/python -m bench --quick --rounds 3

.PHONY: format
format: $(READY) ## Let ruff format and mend what it can
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

.PHONY: constraints
constraints: ## Renew constraints.txt from the newest versions that pyproject.toml allows
	rm -rf .venv-new && $(PYTHON) -m venv .venv-new
	.venv-new/bin/python -m pip install --quiet --upgrade '.[dev]'
	{ head -n 1 constraints.txt; .venv-new/bin/python -m pip list --format=freeze | grep -viE '^(pip|setuptools|bufstore)='; } > constraints.new
	mv constraints.new constraints.txt && rm -rf .venv-new

.PHONY: clean
clean: ## Remove what make and the tools have made
	rm -rf $(VENV) .venv-new .venv-spark .venv-lowest .venv-langgraph build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
