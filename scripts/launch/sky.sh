#!/usr/bin/env bash
# Training by SkyPilot, as a managed job of configs/launch/sky.yaml.
#   NNODES=4 IMAGE=registry/verl-precision:0.9.1 TRAIN=/shared/gsm8k/train.parquet scripts/launch/sky.sh
#   RECIPE=flowrl PRECISION=bf16 … scripts/launch/sky.sh --dry-run trainer.save_freq=10 …      further Hydra overrides
# The image is that of configs/launch/Dockerfile; models, data and OUT lie on sky.yaml's volume, /shared. docs/how-to/cluster.md
set -euo pipefail

# The knobs: set them here or in the environment.
EXPERIMENT=${EXPERIMENT:-gsm8k_8gpu} # configs/experiment
PRECISION=${PRECISION:-fp16}         # bf16 bf16_train_fp16_infer fp32
ALGO=${ALGO:-grpo}                   # ppo dr_grpo pg_is
RECIPE=${RECIPE:-}                   # flowrl flowrl_paper
MODEL=${MODEL:-}                     # a folder under /shared or a name on the Hub, default the experiment's
TRAIN=${TRAIN:-}                     # a parquet file under /shared
VAL=${VAL:-}                         # the same for validation, default TRAIN
STEPS=${STEPS:-}                     # default the experiment's
SEED=${SEED:-1}
OUT=${OUT:-}                         # default /shared/outputs/…; the same OUT resumes
RETRIES=${RETRIES:-}                 # resumes after a lost worker, within one cluster; default that of run
NNODES=${NNODES:-}                   # the experiment's file names the number that it is planned for
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
GPU=${GPU:-H100}                     # as `sky show-gpus` names it
IMAGE=${IMAGE:-}
INFRA=${INFRA:-}                     # k8s/…, aws/…; default: SkyPilot's choice
SKY_ARGS=${SKY_ARGS:-}               # further words of `sky jobs launch`: --use-spot …
PYTHON=${PYTHON:-}                   # on this machine, to check the knobs: default the first python3 of 3.10 or later on PATH

# shellcheck source=scripts/launch/knobs.sh
source "$(dirname "$0")/knobs.sh"
name=$EXPERIMENT-${RECIPE:-$ALGO}-$PRECISION-seed$SEED
OUT=${OUT:-/shared/outputs/$name}
export DEVICE=cuda
[[ $IMAGE ]] || refuse "IMAGE: is not set; build one with configs/launch/Dockerfile and push it"
shared /shared OUT TRAIN VAL MODEL
# shellcheck disable=SC2119 # paths in the cluster are not to be judged here
check
mapfile -d '' -t values < <(words "${job[@]}")
read -ra more <<<"$SKY_ARGS"
command=(sky jobs launch --name "${name//_/-}" --num-nodes "$NNODES" --gpus "$GPU:$GPUS_PER_NODE" --image-id "docker:$IMAGE"
  ${INFRA:+--infra "$INFRA"} "${more[@]}")
for word in "${values[@]}"; do command+=(--env "$word"); done
for secret in HF_TOKEN WANDB_API_KEY; do if [[ ${!secret-} ]]; then command+=(--secret "$secret"); fi; done # by name: sky reads the value
command+=("$checkout/configs/launch/sky.yaml")
if [[ $dry_run ]]; then show "${command[@]}"; else exec "${command[@]}"; fi
