# Two commands: `make run` trains, `make test` proves. `make` alone lists every target.
# The path of the checkout must not contain spaces.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Tests take the CPU set unless told otherwise: it is the same on every machine.
DEVICE ?= $(if $(filter test% mutants,$(MAKECMDGOALS)),cpu,$(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu))
ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE=$(DEVICE): allowed are cpu and cuda)
endif

VENV := $(if $(filter cuda,$(DEVICE)),.venv-cuda,.venv)
BIN := $(VENV)/bin
SITE := $(VENV)/site-packages

# What touches a verl or an OAT elsewhere runs on Python 3.10 or later alone; the environments are made of 3.11 or 3.12.
# PYTHON names one for both. Without it the first on PATH that fits is taken; an environment that is there keeps its own.
FITS_TOOLS := sys.version_info >= (3, 10)
FITS_VENVS := (3, 11) <= sys.version_info[:2] <= (3, 12)
fits = "$(2)" -c 'import sys; sys.exit(not ($(1)))' 2>/dev/null
first = $(shell for python in $(2); do if $(call fits,$(1),$$python); then echo $$python; break; fi; done)
TOOLS_PYTHON := $(or $(PYTHON),$(call first,$(FITS_TOOLS),python3 python3.14 python3.13 python3.12 python3.11 python3.10))
# `make doctor PYTHON=…` names a Python to run in, not one to make .venv of.
VENVS_PYTHON := $(or $(if $(filter doctor,$(MAKECMDGOALS)),,$(PYTHON)),$(call first,$(FITS_VENVS),$(realpath $(BIN)/python) python3.11 python3.12))
VERSION := $(shell "$(VENVS_PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

# The stamp is written last and named after Python and the locks: an interrupted or outdated set-up starts anew.
LOCKS := $(wildcard $(addprefix requirements/$(DEVICE).,torch lock flash-attn))
READY := $(VENV)/ready-$(VERSION)-$(shell cat $(LOCKS) | cksum | cut -d' ' -f1)

# The second environment: the workers of every release. Neither verl nor OAT is in it; the tests put a release's tree on its path.
WORKERS := .venv-workers
WORKERS_READY := $(WORKERS)/ready-$(VERSION)-$(shell cat requirements/cpu.torch requirements/workers.lock | cksum | cut -d' ' -f1)

# What `make run` hands over: its own variables wherever they are set, and all that stands on the command line, so that
# a misspelt one is refused rather than ignored.
RUN_VARIABLES := EXPERIMENT PRECISION ALGO RECIPE STEPS SEED MODEL TRAIN VAL OUT ARGS RETRIES CARRY
COMMAND_LINE := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
GIVEN := $(filter-out PYTHON TORCH_INDEX_URL,$(sort DEVICE $(RUN_VARIABLES) $(COMMAND_LINE)))
quote = '$(subst ','\'',$(1))'
# `make preflight`, `make probe`, `make compare` and `make sanity` take what stands on the command line alone.
TYPED = $(foreach name,$(sort DEVICE $(filter-out PYTHON TORCH_INDEX_URL,$(COMMAND_LINE))),$(name)=$(call quote,$($(name))))
WORDS = $(foreach name,$(GIVEN),$(if $($(name)),$(name)=$(call quote,$($(name)))))

# These take few words; others are refused rather than ignored.
TAKES_bench := ARGS
TAKES_bench-amp := ARGS
TAKES_mutants := ONLY
TAKES_doctor := ARGS VERL
TAKES_pr-branch := VERL DIR
TAKES_port := FROM TO DIR FRAMEWORK
TAKES_apply-patches := VERL OAT
TAKES_unapply-patches := $(TAKES_apply-patches)
TAKES_status := $(TAKES_apply-patches)
TAKES_drift := $(TAKES_apply-patches)
FEW := bench bench-amp mutants doctor pr-branch port apply-patches unapply-patches status drift
$(foreach goal,$(filter $(FEW),$(MAKECMDGOALS)),$(foreach name,$(COMMAND_LINE),$(if \
  $(filter DEVICE PYTHON TORCH_INDEX_URL $(TAKES_$(goal)),$(name)),,$(error $(name)=$($(name)): make $(goal) takes $(TAKES_$(goal)) alone))))

##@ The two commands, in .venv (4 GB), which is set up with Python 3.11 or 3.12
.PHONY: run test
run: accept setup  ## set up and train in fp16 with verl, on this machine's GPU or CPU
	@exec $(BIN)/python scripts/run.py $(WORDS)

test: setup browser $(WORKERS_READY)  ## set up and run all tests
	@exec $(BIN)/python -m pytest $(TWO) -m "not slow and not gpu"

# Two processes; the end-to-end runs come first in the order of the folders, and are the longest.
TWO := -n 2 --no-loadscope-reorder

# VERL defaults to the verl of this environment; OAT takes its place.
VERL ?= $(SITE)
HOLDER = $(if $(filter undefined,$(origin OAT)),--framework verl $(call quote,$(VERL)),$(THE_OAT))
THE_OAT = $(if $(filter-out file,$(origin VERL)),$(error VERL=$(VERL) OAT=$(OAT): give one of the two))$(if \
  $(OAT),--framework oat $(call quote,$(OAT)),$(error OAT= is empty: it must be a folder that holds an OAT))
##@ Patching verl or OAT elsewhere (VERL or OAT: a git checkout, an unpacked release or a site-packages folder), with Python 3.10 or later and git alone
.PHONY: apply-patches unapply-patches status check port drift
apply-patches: python  ## apply the patches:  make apply-patches VERL=/path/to/verl   (or OAT=…)
	@$(TOOLS_PYTHON) scripts/patchset.py apply $(HOLDER)

unapply-patches: python  ## take them out again, to the byte
	@$(TOOLS_PYTHON) scripts/patchset.py unapply $(HOLDER)

status: python  ## say which release a tree holds, and whether it is patched
	@$(TOOLS_PYTHON) scripts/patchset.py status $(HOLDER)

check: python  ## check that every release's patches apply and reverse exactly
	@$(TOOLS_PYTHON) scripts/patchset.py check --all

# Where port leaves its git tree.
FRAMEWORK ?= verl
DIR ?= outputs/$(FRAMEWORK)-$(notdir $(TO:/=))
port: python  ## carry a release's patches to another:  make port FROM=0.9.1 TO=0.9.2   (TO: also a folder; DIR=…; FRAMEWORK=oat)
	$(foreach name,FROM TO,$(if $($(name)),,$(error $(name)= is missing: make port FROM=0.9.1 TO=0.9.2)))
	@$(TOOLS_PYTHON) scripts/patchset.py port --framework $(call quote,$(FRAMEWORK)) $(call quote,$(FROM)) $(call quote,$(TO)) $(call quote,$(DIR))

drift: python  ## say which files that the patches hook are others in a verl:  make drift VERL=/path/to/verl
	@$(TOOLS_PYTHON) scripts/patchset.py drift $(HOLDER)

##@ Which regime, on this model, on this cluster, in .venv
.PHONY: doctor preflight probe plan-memory compare report sanity
comma := ,
$(if $(filter doctor,$(MAKECMDGOALS)),$(if $(filter-out file,$(origin VERL)),$(if \
  $(shell test -d $(call quote,$(VERL)) && echo yes),,$(error VERL=$(VERL): is not a folder))))
# The doctor runs in the environment of the verl that it looks at, or in PYTHON where that is named, if it has what the
# doctor needs; only else in .venv.
THAT_VERL := $(if $(filter-out file,$(origin VERL)),$(VERL))
define find-python
site=$(call quote,$(THAT_VERL)); test ! -e "$$site/__init__.py" || site=$$site/..; \
case $$(realpath -m "$${site:-/}") in (*-packages) own=$$site/../../../bin/python3;; (*) own=; esac; \
for python in "$$own" $(if $(filter-out undefined file,$(origin PYTHON)),$(call quote,$(PYTHON))); do \
  if command -v "$$python" >/dev/null && PYTHONPATH=scripts "$$python" -m lib.doctor.requirements $${site:+"$$site"}; then echo "$$python"; break; fi; done
endef
DOCTOR_PYTHON := $(if $(filter doctor,$(MAKECMDGOALS)),$(shell $(find-python)))
$(if $(filter-out doctor,$(MAKECMDGOALS))$(DOCTOR_PYTHON)$(wildcard $(READY)),,$(if $(MAKECMDGOALS),$(info \
  setting up $(VENV) for the doctor (4 GB); PYTHON= of an environment with hydra-core and omegaconf$(comma) and torch if that verl is patched$(comma) spares it)))
doctor: $(if $(DOCTOR_PYTHON),,$(if $(filter $(SITE),$(VERL)),setup,$(READY)))  ## say which dtype holds at each hop of a verl:  make doctor ARGS='…' VERL=/path/to/verl   (PYTHON=its/python3)
	@exec $(call quote,$(or $(DOCTOR_PYTHON),$(BIN)/python)) scripts/doctor.py \
	  $(if $(THAT_VERL)$(if $(DOCTOR_PYTHON),,1),--verl $(call quote,$(VERL))) --args=$(call quote,$(ARGS))

probe: setup  ## measure the mismatch of a model for every regime, before training:  make probe MODEL=… DATA=….parquet
	@exec $(BIN)/python scripts/probe.py $(TYPED)

preflight: setup  ## predict what fp16 does to a model:  make preflight MODEL=… DATA=….parquet
	@exec $(BIN)/python scripts/preflight.py $(TYPED)

plan-memory: setup  ## plan what a job takes on each GPU, without one:  make plan-memory EXPERIMENT=dense_7b PRECISION='fp16 bf16'
	@exec $(BIN)/python scripts/plan_memory.py \
	  $(foreach name,$(sort $(filter-out PYTHON TORCH_INDEX_URL,$(COMMAND_LINE))),$(name)=$(call quote,$($(name))))

compare: setup  ## run and compare, as a report:  make compare PRECISION='fp16 bf16' SEED='1 2 3'  (or RUNS='fp16=FOLDER …')
	@exec $(BIN)/python scripts/compare.py $(TYPED)

report: setup  ## rebuild a report from the runs that it keeps:  make report FROM=docs/results/sanity/grpo  (OUT=…)
	@exec $(BIN)/python scripts/report.py $(TYPED)

# What is on the command line comes last and wins.
sanity: setup  ## the sanity test: four regimes, three seeds, three objectives; the same command goes on
	@exec $(BIN)/python scripts/compare.py EXPERIMENT=sanity_cpu PRECISION='fp16 bf16 bf16_train_fp16_infer fp32' \
	  SEED='1 2 3' ALGO='grpo pg_is ppo' THRESHOLD=0.95 OUT=outputs/sanity $(TYPED)

##@ The rest, in .venv; help, matrix, lock and clean without
.PHONY: help setup pr-branch bench bench-amp mutants submit gsm8k dapo-math sanity-math test-releases test-oat e2e-releases matrix test-quick lint lock clean
help: python  ## list the targets and the variables of `make run`, `make preflight`, `make probe` and `make compare`
	@awk -F ':.*## +' '/^##@ /{printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' Makefile
	@printf '\n%s\n' 'Variables of make run:  make run PRECISION=bf16 STEPS=20'
	@PYTHONPATH=scripts $(TOOLS_PYTHON) -c 'from lib.run import job; print(job.usage())'
	@printf '\n%s\n' 'Variables of make preflight:  make preflight MODEL=/path/to/model DATA=prompts.parquet'
	@PYTHONPATH=scripts $(TOOLS_PYTHON) -c 'import preflight; print(preflight.usage())'
	@printf '\n%s\n' 'Variables of make probe:  make probe MODEL=/path/to/model DATA=prompts.parquet'
	@PYTHONPATH=scripts $(TOOLS_PYTHON) -c 'import probe; print(probe.usage())'
	@printf '\n%s\n' 'Variables of make compare:  make compare PRECISION="fp16 bf16" SEED="1 2 3"'
	@PYTHONPATH=scripts $(TOOLS_PYTHON) -c 'import compare; print(compare.usage())'

setup: $(READY)  ## install what is missing and patch the installed verl
	@$(BIN)/python scripts/patchset.py apply --framework verl $(SITE)

# Where pr-branch works; what it leaves there is for a conflict to be finished in.
pr-branch: DIR = outputs/pr-branch
pr-branch: setup  ## make branches of a clone of verl for upstream, and check them:  make pr-branch VERL=/path/to/clone
	@exec $(BIN)/python scripts/pr_branch.py $(call quote,$(VERL)) --dir $(call quote,$(DIR))

bench: setup  ## measure what fp16 costs, into docs/results:  make bench ARGS='--sizes 10,100 --ranks 1'
	@exec $(BIN)/python scripts/bench.py $(ARGS)

bench-amp: setup  ## measure what fp16 and bf16 give outside verl, into docs/results:  make bench-amp ARGS='--only ppo'
	@exec $(BIN)/python scripts/bench_amp.py $(ARGS)

mutants: setup  ## put known defects into patched verl, one at a time: each must fail a test  (ONLY=name: one)
	@exec $(BIN)/python scripts/mutants.py $(if $(ONLY),$(call quote,$(ONLY)))

gsm8k: setup  ## download GSM8K and write data/gsm8k/{train,test}.parquet
	@$(BIN)/python -m recipes.gsm8k.prepare --out data/gsm8k

submit: accept setup  ## make run on a running Ray cluster:  RAY_ADDRESS=http://HEAD:8265 make submit …
	@exec $(BIN)/python scripts/submit.py $(WORDS)

dapo-math: setup  ## download DAPO-Math-17k and AIME 2024 and write data/dapo-math/{train,test}.parquet
	@$(BIN)/python -m recipes.dapo_math.prepare --out data/dapo-math

sanity-math: setup  ## download the 1460 MATH problems of the sanity test and write data/sanity-math/{train.parquet,oat}
	@$(BIN)/python -m recipes.sanity_math.prepare --out data/sanity-math

test-releases: setup $(WORKERS_READY)  ## the conformance suite on every release of verl, its outcome into tests/expected/releases.json
	@exec $(BIN)/python -m pytest tests/releases --write-results

test-oat: setup $(WORKERS_READY)  ## the same on every release of OAT, into tests/expected/oat.json
	@exec $(BIN)/python -m pytest tests/oat --write-results

e2e-releases: setup $(WORKERS_READY)  ## two steps of main_ppo in fp16 on every release, into tests/expected/releases-e2e.json
	@exec $(BIN)/python -m pytest -m slow tests/e2e/test_releases.py --write-results

matrix: python  ## write these outcomes into README.md as the support matrices
	@$(TOOLS_PYTHON) scripts/matrix.py

test-quick: setup browser  ## the tests without the end-to-end runs and the other releases
	@exec $(BIN)/python -m pytest $(TWO) -m "not slow and not gpu and not e2e and not releases"

lint: $(READY)  ## ruff and shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run scripts/launch/*.sh

lock: python  ## resolve requirements/*.in into *.lock again, for Python 3.11 and 3.12 alike; pins that still fit stay
	$(TOOLS_PYTHON) -m venv .cache/uv && .cache/uv/bin/pip install --quiet uv
	cd requirements && for set in cpu cuda workers; do \
	  resolve () { UV_CUSTOM_COMPILE_COMMAND='make lock' ../.cache/uv/bin/uv pip compile $$set.in --output-file $$2 \
	    --python-version $$1 --python-platform linux --no-emit-index-url --no-annotate --quiet \
	    $$(test ! -e $$set.overrides || echo --override $$set.overrides); }; \
	  resolve 3.11 $$set.lock; cp $$set.lock ../.cache/$$set.lock; resolve 3.12 ../.cache/$$set.lock; \
	  diff $$set.lock ../.cache/$$set.lock || \
	    { echo "$$set.in: Python 3.12 takes other versions (>); bound them so that one serves both" >&2; exit 1; }; done

clean:  ## remove the environments and the caches; runs and data stay
	rm -rf .venv .venv-cuda .venv-workers .cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# pip, not uv: pip's configuration names a machine's own indexes. TORCH_INDEX_URL is one more, of torch's CPU builds.
define install-cpu
$(BIN)/pip install --quiet -r requirements/cpu.torch -c requirements/cpu.lock $(TORCH_INDEX_URL:%=--extra-index-url %)
$(BIN)/pip install --quiet --no-deps -r requirements/cpu.lock
endef
define install-cuda
$(BIN)/pip install --quiet --no-deps -r requirements/cuda.lock
$(BIN)/pip install --quiet --no-deps --no-build-isolation -r requirements/cuda.flash-attn
endef

# `venv --clear` would empty the folder that a link points to, an environment which others may be using.
define refuse-link
@test ! -L $(1) || { echo "$(1) is a link and its environment is not up to date: run make where it points to, or remove the link" >&2; exit 1; }
endef

.PHONY: python venvs-python accept browser
python:
	@$(call fits,$(FITS_TOOLS),$(TOOLS_PYTHON)) || \
	  { echo "$(PYTHON:%=PYTHON=%: )Python 3.10 or later is needed; install it, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }

venvs-python:
	@$(call fits,$(FITS_VENVS),$(VENVS_PYTHON)) || \
	  { echo "$(PYTHON:%=PYTHON=%: )Python 3.11 or 3.12 is needed; install it, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }

browser:  # the tests look at a report's page in it
	@command -v chromium >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
	    { echo "chromium is missing, in which the tests look at a report: install your system's package chromium" >&2; exit 1; }; \
	  echo "installing chromium by apt-get, in which the tests look at a report: 400 MB on disk, a minute, once"; \
	  apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

accept: python  # bad input is refused before anything is installed
	@PYTHONPATH=scripts $(TOOLS_PYTHON) -m lib.run.job $(WORDS)

$(READY): | venvs-python
	$(call refuse-link,$(VENV))
	@echo "setting up $(VENV) from requirements/$(DEVICE).lock: torch, then the rest; 4 GB on disk, 3 to 6 minutes, once"
	@$(VENVS_PYTHON) -m venv --clear $(VENV)
	$(install-$(DEVICE))
	@ln -s lib/python$(VERSION)/site-packages $(SITE)
	@touch $@

$(WORKERS_READY): | venvs-python
	$(call refuse-link,$(WORKERS))
	@echo "setting up $(WORKERS) from requirements/workers.lock: torch, then the rest; 2 GB on disk, 2 minutes, once"
	@$(VENVS_PYTHON) -m venv --clear $(WORKERS)
	$(WORKERS)/bin/pip install --quiet -r requirements/cpu.torch -c requirements/workers.lock $(TORCH_INDEX_URL:%=--extra-index-url %)
	$(WORKERS)/bin/pip install --quiet --no-deps -r requirements/workers.lock
	@touch $@
