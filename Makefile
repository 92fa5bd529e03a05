# make serve     one command from a fresh clone to a served model
# make test      every check and test that needs no GPU
# make check     the checks of `make test`: ruff, import-linter, clang-format, house, docs/models.md, pyright
# make house     files and lines of each floor, and what breaks the layout's rules; installs nothing
# make sanitize  the kernels' tests with checks of addresses and undefined behavior, about three minutes of CPU
# make docs      the site of the documentation, in build/site
# make gpu-test  the tests that need CUDA devices
# make gpu-check everything that a machine with a GPU can show, without a network: tests, answers, speeds, one JSON
# make gpu-wheels fetches what such a machine's Python may lack, for make gpu-check
# make aot       compiles kernels for the A100, RTX 3090, L40 and H100 through the functions that launch them; needs none of
#                these. TRITON=3.6.0: with another version of Triton than the environment's
# make bench     this server beside those of vLLM, llama.cpp and transformers (bench/lab/peers/install.sh)
# make clean     removes the environment and everything that was built
#
# Variables: PYTHON (3.11 or newer), MODEL, TP, HOST, PORT, ARGS (more flags of `tightwire serve`, or of pytest),
# WORKERS (tests at once), PIP_FLAGS (such as --extra-index-url URL, where the default index offers no CPU build of torch).

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
TP ?= 2
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
WORKERS ?= 6
TRITON ?=
PIP_FLAGS ?=

bin := $(VENV)/bin
# A stamp is newer than what it was installed from, so an up-to-date environment costs nothing.
installed := $(VENV)/.installed
installed_dev := $(VENV)/.installed-dev
sources := pyproject.toml constraints.txt
# Workers and servers compile nothing twice: what they import is kept as bytecode, whatever the shell has set.
python := PYTHONDONTWRITEBYTECODE= $(bin)/python
pytest := $(python) -m pytest -q -rs
# In reverse order the files of training and servers, whose tests take longest, come first, and short ones last.
beside := $(or $(ARGS),$(shell find tests -name 'test_*.py' | sort -r))
alone := $(or $(ARGS),$(shell grep -rl 'mark\.alone' tests --include=test_*.py | sort -r))
# Runs tests; $(1): pytest's options. Its exit code 5: nothing was selected, where ARGS select. 1: tests failed; a deadline can be missed
# beside other tests, so those that failed run once more by themselves, and both reports are printed.
run_tests = $(pytest) --dist loadfile --no-loadscope-reorder $(1) || \
	$(if $(ARGS),[ $$? -eq 5 ],{ [ $$? -eq 1 ] && $(pytest) $(firstword $(1)) --last-failed --last-failed-no-failures none; })
# Gives way to other processes, with all that it starts.
yield := renice -n 19 $$$$ >/dev/null;
# Prints what a command printed, when it has ended; $(1): a file for it, $(2): the command.
print_after = { $(2); } >$(VENV)/$(1) 2>&1; code=$$?; cat $(VENV)/$(1); exit $$code

.DEFAULT_GOAL := help
.PHONY: help serve test types tests-alone tests-beside check quick-check house docs sanitize gpu-test gpu-check gpu-wheels aot bench clean

help:
	@awk '/^#/ {sub(/^# ?/, ""); print; next} {exit}' $(firstword $(MAKEFILE_LIST))

serve: $(installed)
	@echo "For tightwire in another terminal:  . $(abspath $(bin))/activate" >&2
	@exec $(bin)/tightwire serve $(MODEL) --tp $(TP) --host $(HOST) --port $(PORT) $(ARGS)

# Three jobs at once. Tests that are marked alone mostly wait; two of them run at a time, and the other jobs use the time that they
# leave. Workers wait for servers and timers, so there are more than cores.
test: quick-check
	$(bin)/tightwire pull
	@$(MAKE) --no-print-directory --keep-going -j3 types tests-alone tests-beside

types:
	@$(yield) $(call print_after,types.log,$(bin)/pyright)

tests-alone:
	@$(call print_after,alone.log,$(call run_tests,-ocache_dir=.pytest_cache/alone -n 2 -m "alone and not gpu and not multi_gpu" $(alone)))

tests-beside:
	@$(yield) $(call run_tests,-ocache_dir=.pytest_cache/beside -n $(WORKERS) -m "not gpu and not multi_gpu and not alone" $(beside))

check: quick-check
	$(bin)/pyright

quick-check: $(installed_dev)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/clang-format --dry-run --Werror $$(find kernels/cpu/native -name '*.cpp' -o -name '*.h')
	$(bin)/lint-imports
	$(bin)/python tools/house.py
	$(bin)/python tools/model_table.py --check

# Files and lines of each floor, and everything that breaks the layout's rules (docs/architecture.md). Installs nothing.
house:
	@$(PYTHON) tools/house.py

# The kernels' tests with a library that checks addresses and undefined behavior. Needs g++ with its libasan. libstdc++ is
# loaded with it, because libasan aborts at an exception of torch otherwise; pytest leaves stderr to its reports.
sanitize: $(installed_dev)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0 \
	  TIGHTWIRE_KERNELS=sanitize $(pytest) -n 2 --capture=sys tests/kernels/cpu tests/kernels/test_*.py \
	  tests/model/test_layer_program_fuzz.py tests/suites/comm/test_shared_sums_fuzz.py \
	  --ignore tests/kernels/cpu/test_library.py \
	  -m "not gpu and not multi_gpu and not alone" -k "not interpreter" $(ARGS)

# README.md, docs/ and what they link to as a site. Nothing is fetched.
docs: $(installed_dev)
	$(bin)/python tools/docs_site.py
	@echo "open build/site/index.html, or: $(PYTHON) -m http.server --directory build/site"

gpu-test: $(installed_dev)
	$(pytest) -m "gpu or multi_gpu" $(ARGS)

# Needs torch, Triton and transformers, and what gpu-wheels/ has. Results: gpu-check-out/ (or $OUT). ARGS="--rehearse" needs no GPU
gpu-check:
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) tools/gpu_check.py $(ARGS)

gpu-wheels:
	PYTHONPATH=src $(PYTHON) tools/gpu_check.py --wheels

# All cases of tests of which `make test` runs a few, also of servers on an emulated device; about fifteen minutes of CPU.
# TRITON=3.6.0: with that version, beside ours.
aot := gpu $(addprefix kernels/test_,host_functions.py compiles.py on_ptx.py)
triton := $(if $(TRITON),build/triton-$(TRITON))
$(triton): | $(installed_dev)
	$(bin)/python -m pip install -q --disable-pip-version-check --no-deps --target $@.new triton==$(TRITON)
	mv $@.new $@

aot: $(installed_dev) | $(triton)
	$(if $(TRITON),PYTHONPATH=$(abspath $(triton))$${PYTHONPATH:+:$$PYTHONPATH}) TIGHTWIRE_AOT=1 $(pytest) -n $(WORKERS) $(addprefix tests/suites/,$(aot)) $(ARGS)

# `tightwire serve` beside the servers of vLLM, llama.cpp and transformers that bench/lab/peers/install.sh installed.
bench: $(installed)
	$(bin)/tightwire pull
	$(bin)/tightwire bench lab peers $(ARGS)

clean:
	rm -rf $(VENV) kernels/cpu/built gpu-wheels gpu-check-out build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# $(call quietly,TEXT,COMMAND): one line that counts the seconds on a terminal. The command's output is kept in a log, and
# shown if it fails.
log := $(VENV)/install.log
define quietly
@mkdir -p $(VENV); printf '%s ...' '$(1)'; began=$$(date +%s); \
if [ -t 1 ]; then (while sleep 1 && kill -0 $$$$ 2>/dev/null; do \
  printf '\r%s ... %s s' '$(1)' $$(($$(date +%s) - began)); done) & counter=$$!; fi; \
if $(2) >$(log) 2>&1; then failed=0; else failed=$$?; fi; \
[ -z "$$counter" ] || kill $$counter; \
if [ $$failed = 0 ]; then printf "$${counter:+\r$(1) ...} %s s\n" $$(($$(date +%s) - began)); \
else printf '\n'; cat $(log); echo "failed; this log is $(log)"; exit $$failed; fi
endef
packages := PyTorch and its packages, usually 1 to 3 minutes

# pip is the last thing a new environment gets, so an interrupted one is made again.
$(bin)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$$($(PYTHON) --version 2>&1) is too old: Tightwire needs Python 3.11 or newer." \
	       "Name one, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(call quietly,creating $(VENV),$(PYTHON) -m venv $(VENV))

# pip would compile every module of every package, for a third of the whole time. A server imports one in seven; importing
# compiles those.
pip_install := $(python) -m pip install --no-compile --disable-pip-version-check --progress-bar off -c constraints.txt $(PIP_FLAGS)
serving := import tightwire.server.cli.http_process; import tightwire.server.ranks.rank_main
$(installed): $(sources) | $(bin)/pip
	$(call quietly,installing $(packages),{ $(pip_install) -e '.[structured]' && $(python) -c '$(serving)'; })
	@touch $@

# The extra contains the rest, so it satisfies both stamps.
$(installed_dev): $(sources) | $(bin)/pip
	$(call quietly,installing $(packages),{ $(pip_install) -e '.[dev]' && $(python) -c '$(serving); import tightwire.training.run.run'; })
	@touch $(installed) $@
