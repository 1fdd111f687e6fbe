ifeq ($(wildcard armature/components/__init__.py),)
$(error armature/components should be a link to ../components. A ZIP download has text files in place of links: clone the repository with git, on Windows with core.symlinks=true)
endif
PYTHON ?= python3
SETUP  := $(wildcard armature/setup/*.py)
SERVED := $(wildcard components/inference/served/*.toml components/inference/served/*/*.py)
BIN    := .venv/bin
INTEROP := checkov cluster lerobot programs ray trl verifiers-legacy verifiers-v1

.DEFAULT_GOAL := help
.PHONY: help run test end-to-end long learns interop production lint size docs check up down fuzz chaos bench images test-images clean

help:  ## what each command does
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

run: environments  ## train a tiny vision-language model with GRPO on this machine, from dataset to evaluation
	$(BIN)/armature run train-vlm/colors

PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder  # on two cores: much of it waits

test: environments  ## the tests; choose with ARGS="-m 'not slow and not long'"
	$(PYTEST) $(ARGS)

end-to-end: environments  ## whole runs as users start them: recipes, examples, a newcomer's first hour, flows on Prefect, the platform and its pages
	$(PYTEST) tests/end_to_end tests/examples tests/first_hour tests/flows tests/platform $(ARGS)

long: environments .venv-trl/.made .venv-lerobot/.made  ## the tests that take long and that `make test` and `make end-to-end` leave out
	$(PYTEST) -m long -o norecursedirs="chaos images interop learns production .*" tests $(ARGS)
	$(BIN)/python -m pytest -m long tests/interop/trl tests/interop/lerobot $(ARGS)

learns: environments  ## whole curves: recipes with three seeds, held-out accuracy before and after; hours; choose with ARGS="-k zoom"
	$(BIN)/python -m pytest -s tests/learns $(ARGS)

interop: interop-cluster interop-ray interop-verifiers interop-openenv interop-lerobot interop-trl interop-vla-eval  ## tests against what others write: verifiers, OpenEnv, LeRobot, vla-eval, S3, Postgres's drivers, Prefect's Kubernetes worker, checkov, Ray, TRL

.PHONY: interop-cluster interop-ray interop-verifiers interop-openenv interop-lerobot interop-trl interop-vla-eval
interop-cluster: .venv-cluster/.made .venv-checkov/.made
	.venv-cluster/bin/python -m pytest tests/interop/cluster

interop-ray: .venv-ray/.made
	.venv-ray/bin/python -m pytest tests/machine/workers -k actor  # those in processes of this machine are in make test
	.venv-ray/bin/python -m pytest tests/rollouts/test_shards.py -k actor
	.venv-ray/bin/python -m pytest tests/inference/test_hosts.py
	.venv-ray/bin/python -m pytest tests/interop/ray_cluster

interop-verifiers: .venv-verifiers-legacy/.made .venv-verifiers-v1/.made
	.venv-verifiers-legacy/bin/python -m pytest tests/interop/verifiers/test_legacy.py
	.venv-verifiers-v1/bin/python -m pytest tests/interop/verifiers/test_v1.py

interop-lerobot interop-vla-eval: .venv-lerobot/.made
interop-trl: .venv-trl/.made
interop-openenv interop-vla-eval: .venv-programs/.made
interop-openenv interop-lerobot interop-trl interop-vla-eval: interop-%: .venv/.made
	$(BIN)/python -m pytest tests/interop/$(subst -,_,$*)

production: environments .venv-cluster/.made .venv-ray/.made  ## the platform on PostgreSQL and S3, jobs of SLURM, machines that are lost; as root, on Linux; choose with ARGS="-k lost_machine"
	.venv-cluster/bin/python -m pytest -s -o timeout=900 tests/production $(ARGS)

lint: .venv/.made  ## style, types and the layer rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples
	$(BIN)/lint-imports
	$(BIN)/python -m tests.words

size: .venv/.made  ## what the project weighs: code lines, files, packages, words
	@$(BIN)/python -m tests.size

docs: .venv/.made  ## the documentation site, in build/docs; a broken link or reference is an error
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet docs build/docs

check: environments  ## know before a run whether the machine and the model fit; choose with NAME=train-vlm/...
	$(BIN)/armature check $(or $(NAME),train-vlm/colors)

up: environments  ## the platform: Prefect server, worker and dashboard, MLflow
	$(BIN)/armature up

down: .venv/.made  ## stop the platform
	$(BIN)/armature down

fuzz: .venv/.made  ## damaged inputs at every door; choose with SECONDS=600 INPUTS=2000 and ARGS="--door images"
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),600) --inputs $(or $(INPUTS),2000) $(ARGS)

chaos: environments  ## kill, pause, cut off and fill up short trainings; choose with RUNS=30 and ARGS="--seed 1"
	$(BIN)/armature drill --minutes 600 --runs $(or $(RUNS),30) $(ARGS)
	$(BIN)/python -m pytest tests/chaos

bench: environments  ## measure, as ratios within one run; choose with NAMES="pool batches"
	$(BIN)/python -m benchmarks.run $(NAMES)

images:  ## build the images; choose with TOOL=docker BASE=debian:bookworm TORCH_BACKEND=cuda TAG=...
	infra/images/build.sh

test-images: environments  ## train and simulate in the images that `make images` has built, without a network; as root
	$(BIN)/python -m pytest tests/images

clean:  ## remove the environments; artifacts and runs stay
	rm -rf .venv .venv-vllm .venv-uv $(INTEROP:%=.venv-%)

.PHONY: environments
environments: .venv/.made .venv-vllm/.made

.venv/.made: pyproject.toml requirements/constraints.txt requirements/overrides.txt requirements/libero.txt requirements/gymnasium.txt requirements/cuda.txt $(SETUP)
	$(PYTHON) -m armature.setup project

.venv-vllm/.made: requirements/vllm-cpu.txt requirements/vllm-cuda.txt $(SETUP) $(SERVED)
	$(PYTHON) -m armature.setup vllm

.venv-ray/.made: .venv/.made
.venv-vllm/.made $(INTEROP:%=.venv-%/.made): | .venv/.made  # which brings uv for all

.venv-trl/.made: requirements/trl.txt $(SETUP)
	$(PYTHON) -m armature.setup trl

$(filter-out .venv-trl/.made,$(INTEROP:%=.venv-%/.made)): .venv-%/.made: requirements/interop-%.txt requirements/cluster.txt requirements/constraints.txt pyproject.toml $(SETUP)
	$(PYTHON) -m armature.setup $*
