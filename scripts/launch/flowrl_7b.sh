#!/usr/bin/env bash
# FlowRL on DAPO-Math-17k with Qwen2.5-7B and the paper's settings: configs/experiment/flowrl_7b.yaml.
#   make dapo-math                                                         the data, once
#   scripts/launch/flowrl_7b.sh                                            on this node
#   RAY_ADDRESS=http://HEAD:8265 NNODES=4 OUT=/shared/flowrl scripts/launch/flowrl_7b.sh      on a running Ray cluster
#   PRECISION=bf16 scripts/launch/flowrl_7b.sh [--dry-run] trainer.save_freq=10 …      further Hydra overrides
# On Slurm, Kubernetes or SkyPilot: slurm.sh, kuberay.sh or sky.sh with EXPERIMENT=flowrl_7b RECIPE=flowrl_paper. docs/how-to/cluster.md
set -euo pipefail

# The knobs: set them here or in the environment.
MODEL=${MODEL:-Qwen/Qwen2.5-7B}          # or a folder
DATA=${DATA:-}                           # a folder with train.parquet and test.parquet, default data/dapo-math
RECIPE=${RECIPE:-flowrl_paper}           # or flowrl, with this project's defaults
PRECISION=${PRECISION:-fp16}             # bf16 bf16_train_fp16_infer fp32
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
STEPS=${STEPS:-}                         # default: the experiment's
SEED=${SEED:-1}
OUT=${OUT:-}                             # default on this node: under outputs/; on a cluster on shared storage. The same command resumes
RAY_ADDRESS=${RAY_ADDRESS:-}             # a running cluster's dashboard; none: Ray is started on this node
EXPERIMENT=${EXPERIMENT:-flowrl_7b}

# shellcheck source=scripts/launch/knobs.sh
source "$(dirname "$0")/knobs.sh"
whole NNODES GPUS_PER_NODE
DATA=${DATA:-$checkout/data/dapo-math}
for split in train test; do
  [[ -f $DATA/$split.parquet ]] || refuse "DATA=$DATA: contains no $split.parquet; make dapo-math writes data/dapo-math"
done
[[ $NNODES == 1 || $RAY_ADDRESS ]] || refuse "NNODES=$NNODES: requires RAY_ADDRESS, the dashboard of a running Ray cluster"
[[ ! $RAY_ADDRESS || $OUT ]] || refuse "OUT: is not set; on a cluster it must be an absolute path on storage that all nodes share"
if [[ -d $MODEL ]]; then MODEL=$(realpath "$MODEL"); fi
if [[ $OUT ]]; then OUT=$(realpath -m "$OUT"); fi

ARGS="trainer.nnodes=$NNODES trainer.n_gpus_per_node=$GPUS_PER_NODE ${ARGS-}"
export TRAIN VAL
TRAIN=$(realpath "$DATA/train.parquet")
VAL=$(realpath "$DATA/test.parquet")
read_variables
mapfile -d '' -t values < <(words "${run[@]}" CARRY)
if [[ $RAY_ADDRESS ]]; then goal=submit; else goal=run; fi
command=(make -C "$checkout" "$goal" "${values[@]}")
if [[ $dry_run ]]; then show "${command[@]}"; else exec "${command[@]}"; fi
