#!/usr/bin/env bash
# Training on Kubernetes by KubeRay: fills in configs/launch/rayjob.yaml and creates it.
#   NNODES=4 IMAGE=registry/verl-precision:0.9.1 TRAIN=/shared/gsm8k/train.parquet scripts/launch/kuberay.sh
#   RECIPE=flowrl PRECISION=bf16 … scripts/launch/kuberay.sh --dry-run trainer.save_freq=10 …      further Hydra overrides
# The image is that of configs/launch/Dockerfile; models, data and OUT lie on the volume of CLAIM. docs/how-to/cluster.md
set -euo pipefail

# The knobs: set them here or in the environment.
EXPERIMENT=${EXPERIMENT:-gsm8k_8gpu}    # configs/experiment
PRECISION=${PRECISION:-fp16}            # bf16 bf16_train_fp16_infer fp32
ALGO=${ALGO:-grpo}                      # ppo dr_grpo pg_is
RECIPE=${RECIPE:-}                      # flowrl flowrl_paper
MODEL=${MODEL:-}                        # a folder under SHARED or a name on the Hub, default the experiment's
TRAIN=${TRAIN:-}                        # a parquet file under SHARED
VAL=${VAL:-}                            # the same for validation, default TRAIN
STEPS=${STEPS:-}                        # default the experiment's
SEED=${SEED:-1}
OUT=${OUT:-}                            # default SHARED/outputs/…; the same OUT resumes
RETRIES=${RETRIES:-}                    # resumes after a lost worker, within one cluster; default that of run
BACKOFF=${BACKOFF:-2}                   # new clusters after that
NNODES=${NNODES:-}                      # worker pods; the experiment's file names the number that it is planned for
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
CPUS=${CPUS:-64}                        # of a worker pod
MEMORY=${MEMORY:-1024Gi}
HEAD_CPUS=${HEAD_CPUS:-4}               # verl-precision run is there, nothing of verl
HEAD_MEMORY=${HEAD_MEMORY:-16Gi}
SHM=${SHM:-128Gi}                       # /dev/shm, Ray's object store
IMAGE=${IMAGE:-}
NAMESPACE=${NAMESPACE:-default}
CLAIM=${CLAIM:-verl-precision}          # a PersistentVolumeClaim, ReadWriteMany
SHARED=${SHARED:-/shared}               # where it is mounted
SECRET=${SECRET:-verl-precision}        # a Secret with HF_TOKEN and WANDB_API_KEY, if any
PYTHON=${PYTHON:-}                      # on this machine, to check and to fill in: default the first python3 of 3.10 or later on PATH

# shellcheck source=scripts/launch/knobs.sh
source "$(dirname "$0")/knobs.sh"
OUT=${OUT:-$SHARED/outputs/$EXPERIMENT-${RECIPE:-$ALGO}-$PRECISION-seed$SEED}
export DEVICE=cuda
[[ $IMAGE ]] || refuse "IMAGE: is not set; build one with configs/launch/Dockerfile and push it"
[[ $BACKOFF =~ ^[0-9]+$ ]] || refuse "BACKOFF=$BACKOFF: must be a whole number of at least 0"
shared "$SHARED" OUT TRAIN VAL MODEL
# shellcheck disable=SC2119 # paths in the cluster are not to be judged here
check
export "${job[@]}" BACKOFF CPUS MEMORY HEAD_CPUS HEAD_MEMORY SHM IMAGE NAMESPACE CLAIM SHARED SECRET
manifest=$("$PYTHON" "$checkout/scripts/launch/fill.py" "$checkout/configs/launch/rayjob.yaml")
if [[ $dry_run ]]; then
  echo "$manifest"
else
  kubectl create -f - <<<"$manifest"
fi
