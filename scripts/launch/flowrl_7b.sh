#!/usr/bin/env bash
# FlowRL on DAPO-Math-17k with Qwen2.5-7B and the paper's settings: configs/experiment/flowrl_7b.yaml.
#   make dapo-math                                                         the data, once
#   scripts/launch/flowrl_7b.sh                                            on this node
#   RAY_ADDRESS=http://HEAD:8265 NNODES=4 scripts/launch/flowrl_7b.sh      on a running Ray cluster
#   PRECISION=bf16 scripts/launch/flowrl_7b.sh trainer.save_freq=10 …      further Hydra overrides
# What each node of a cluster must have: scripts/submit.py.
set -euo pipefail
checkout=$(realpath "$(dirname "$0")/../..")

# The knobs: set them here or in the environment.
MODEL=${MODEL:-Qwen/Qwen2.5-7B}          # or a folder
DATA=${DATA:-$checkout/data/dapo-math}   # a folder with train.parquet and test.parquet
RECIPE=${RECIPE:-flowrl_paper}           # or flowrl, with this project's defaults
PRECISION=${PRECISION:-fp16}             # bf16 bf16_train_fp16_infer fp32
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
STEPS=${STEPS:-}                         # default: the experiment's
SEED=${SEED:-1}
OUT=${OUT:-}                             # default: a folder under outputs/; the same command resumes what stands there
RAY_ADDRESS=${RAY_ADDRESS:-}             # a running cluster's dashboard; none: Ray is started on this node
EXPERIMENT=${EXPERIMENT:-flowrl_7b}

refuse() {
  echo "flowrl_7b: $1" >&2
  exit 1
}
for count in NNODES GPUS_PER_NODE; do
  [[ ${!count} =~ ^[1-9][0-9]*$ ]] || refuse "$count=${!count}: must be a whole number of at least 1"
done
for split in train test; do
  [[ -f $DATA/$split.parquet ]] || refuse "DATA=$DATA: has no $split.parquet; make dapo-math writes data/dapo-math"
done
[[ $NNODES == 1 || $RAY_ADDRESS ]] || refuse "NNODES=$NNODES: RAY_ADDRESS is needed, the dashboard of a running Ray cluster"
if [[ -d $MODEL ]]; then MODEL=$(realpath "$MODEL"); fi
if [[ $OUT ]]; then OUT=$(realpath -m "$OUT"); fi

overrides=$(printf '%q ' "trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$GPUS_PER_NODE" "$@")
words=("EXPERIMENT=$EXPERIMENT" "RECIPE=$RECIPE" "PRECISION=$PRECISION" "MODEL=$MODEL" "STEPS=$STEPS" "SEED=$SEED" "OUT=$OUT"
  "TRAIN=$(realpath "$DATA/train.parquet")" "VAL=$(realpath "$DATA/test.parquet")" "ARGS=$overrides")
if [[ $RAY_ADDRESS ]]; then goal=submit; else goal=run; fi
exec make -C "$checkout" "$goal" "${words[@]//\$/\$\$}" # $ is make's own
