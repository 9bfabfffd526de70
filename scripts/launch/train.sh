#!/usr/bin/env bash
# The last step of every launched job, on one node of a running Ray cluster: `verl-precision run` with the options that
# the knobs in the environment amount to.
#   RAY_ADDRESS=HEAD:6379 NNODES=2 GPUS_PER_NODE=8 EXPERIMENT=… TRAIN=… OUT=… scripts/launch/train.sh [--dry-run]
set -euo pipefail
# shellcheck source=scripts/launch/knobs.sh
source "$(dirname "$0")/knobs.sh"

whole NNODES GPUS_PER_NODE
[[ ${RAY_ADDRESS-} ]] || refuse "RAY_ADDRESS: is not set; it is the running cluster's HEAD:PORT"
ARGS="trainer.nnodes=$NNODES trainer.n_gpus_per_node=$GPUS_PER_NODE ${ARGS-}"
PYTHON="" read_variables # by a Python of this node: PYTHON may name one of the node that submitted the job
mapfile -d '' -t values < <(options "${run[@]}")
command=(python3 "$checkout/scripts/verl_precision" run "${values[@]}")
if [[ $dry_run ]]; then
  show "${command[@]}"
else
  exec "${command[@]}"
fi
