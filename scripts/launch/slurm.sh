#!/usr/bin/env bash
# Training on Slurm: this script puts itself into the queue, and in the job starts Ray on every node by `ray symmetric-run`.
#   NNODES=4 EXPERIMENT=gsm8k_8gpu TRAIN=/shared/gsm8k/train.parquet scripts/launch/slurm.sh
#   RECIPE=flowrl PRECISION=bf16 … scripts/launch/slurm.sh --dry-run trainer.save_freq=10 …      further Hydra overrides
# The checkout, its environment, MODEL, TRAIN, VAL and OUT lie on storage that all nodes share. docs/how-to/cluster.md
set -euo pipefail

# The knobs: set them here or in the environment.
EXPERIMENT=${EXPERIMENT:-gsm8k_8gpu}   # configs/experiment
PRECISION=${PRECISION:-fp16}           # bf16 bf16_train_fp16_infer fp32
ALGO=${ALGO:-grpo}                     # ppo dr_grpo pg_is
RECIPE=${RECIPE:-}                     # flowrl flowrl_paper
MODEL=${MODEL:-}                       # a folder or a name on the Hub, default the experiment's
TRAIN=${TRAIN:-}                       # a parquet file
VAL=${VAL:-}                           # the same for validation, default TRAIN
STEPS=${STEPS:-}                       # default the experiment's
SEED=${SEED:-1}
OUT=${OUT:-}                           # default outputs/slurm/…; the same OUT resumes
RETRIES=${RETRIES:-}                   # resumes after a lost worker, within one job; default that of run
NNODES=${NNODES:-}                     # the experiment's file names the number that it is planned for
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
DEVICE=${DEVICE:-cuda}                 # cpu: GPUS_PER_NODE counts the trainer's workers on a node
CPUS_PER_NODE=${CPUS_PER_NODE:-}       # default: what Slurm gives and Ray counts
TIME_LIMIT=${TIME_LIMIT:-}             # as sbatch --time takes it, default the partition's
REQUEUES=${REQUEUES:-20}               # how often the job goes back into the queue: time limit, lost cluster
SBATCH_ARGS=${SBATCH_ARGS---exclusive} # further words: --exclusive --partition=… --account=…
SRUN_ARGS=${SRUN_ARGS:-}               # further words: --container-image=… --container-mounts=…
VENV=${VENV-.venv-cuda}                # of this checkout, made by `make setup`; empty: what is on PATH, as in a container
PORT=${PORT:-6379}                     # of Ray's head
DASHBOARD_HOST=${DASHBOARD_HOST:-127.0.0.1}
HEAD_IP=${HEAD_IP:-}                   # of the first node, default the first that `hostname -I` has there
START_S=${START_S:-300}                # how long a node may take to join

# shellcheck source=scripts/launch/knobs.sh
source "$(dirname "$0")/knobs.sh"
whole PORT START_S ${CPUS_PER_NODE:+CPUS_PER_NODE}
[[ $REQUEUES =~ ^[0-9]+$ ]] || refuse "REQUEUES=$REQUEUES: must be a whole number of at least 0"
((PORT >= 1024 && PORT <= 65535 && (PORT < 10002 || PORT > 19999))) ||
  refuse "PORT=$PORT: must be a port from 1024 to 65535, but not from 10002 to 19999, the ports of Ray's workers"
[[ $DEVICE == cpu || $DEVICE == cuda ]] || refuse "DEVICE=$DEVICE: must be one of cpu, cuda"
name=$EXPERIMENT-${RECIPE:-$ALGO}-$PRECISION-seed$SEED
OUT=${OUT:-$checkout/outputs/slurm/$name}
if [[ $VENV ]]; then
  [[ $VENV == /* ]] || VENV=$checkout/$VENV
  [[ -x $VENV/bin/ray ]] || refuse "VENV=$VENV: has no bin/ray; make setup DEVICE=$DEVICE creates it, and VENV= uses the PATH instead"
  PATH=$VENV/bin:$PATH # ray symmetric-run calls ray by its name
fi
unset RAY_ADDRESS # of another cluster
# A head asks for the token that it finds, and Ray's other commands show it only in this mode (2.60).
if [[ -f ~/.ray/auth_token || ${RAY_AUTH_TOKEN_PATH-}${RAY_AUTH_TOKEN-} ]]; then export RAY_AUTH_MODE=token; fi

training() { # training IP: the command that runs on every node; train.sh only on the head
  local step=(srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --cpu-bind=none
    --kill-on-bad-exit=0 --wait=0) # or the killed workers' code would hide the head's; without a head they end by themselves
  local ray=(ray symmetric-run --address "$1:$PORT" --min-nodes "$NNODES" --num-gpus="$GPUS_PER_NODE"
    --dashboard-host="$DASHBOARD_HOST" --disable-usage-stats)
  local more
  read -ra more <<<"$SRUN_ARGS"
  if [[ $CPUS_PER_NODE ]]; then
    step+=(--cpus-per-task="$CPUS_PER_NODE")
    ray+=(--num-cpus="$CPUS_PER_NODE")
  fi
  command=("${step[@]}" "${more[@]}" "${ray[@]}" -- env "RAY_ADDRESS=$1:$PORT" "$checkout/scripts/launch/train.sh")
}

if [[ ! ${IN_JOB-} || $dry_run ]]; then # into the queue, from within another job, too
  check MODEL TRAIN VAL OUT
  export "${job[@]}" CPUS_PER_NODE REQUEUES SRUN_ARGS VENV PORT DASHBOARD_HOST HEAD_IP START_S
  read -ra more <<<"$SBATCH_ARGS"
  # --wrap: Slurm runs a copy of a script, which would not find this checkout.
  command=(sbatch --job-name="$name" --nodes="$NNODES" --ntasks-per-node=1 --export=ALL --requeue --open-mode=append
    --signal=B:USR1@120 ${TIME_LIMIT:+--time="$TIME_LIMIT"} ${CPUS_PER_NODE:+--cpus-per-task="$CPUS_PER_NODE"} "${more[@]}")
  if [[ $DEVICE == cuda ]]; then command+=(--gpus-per-node="$GPUS_PER_NODE"); fi
  command+=(--wrap="exec env IN_JOB=yes $(printf %q "$checkout/scripts/launch/slurm.sh")")
  [[ $dry_run ]] || exec "${command[@]}"
  show "${command[@]}"
  training "${HEAD_IP:-HEAD}"
  show "${command[@]}"
  RAY_ADDRESS=${HEAD_IP:-HEAD}:$PORT exec "$checkout/scripts/launch/train.sh" --dry-run
fi

# In the job, on its first node.
requeue() {
  ((${SLURM_RESTART_COUNT:-0} < REQUEUES)) || refuse "$1, and all REQUEUES=$REQUEUES are used up; a run with the same OUT=$OUT resumes"
  echo "slurm: $1: requeued, to resume from OUT=$OUT"
  exec scontrol requeue "$SLURM_JOB_ID"
}
summary() { stat -c '%i %Y' "$OUT/summary.json" 2>/dev/null || true; }

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes%%$'\n'*}
HEAD_IP=${HEAD_IP:-$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname -I | awk '{print $1}')}
[[ $HEAD_IP ]] || refuse "HEAD_IP: is not set, and hostname -I lists no address of $head; give one"
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=$START_S
training "$HEAD_IP"
before=$(summary)
trap 'requeue "the time limit is near"' USR1
"${command[@]}" & # in the background: a shell takes a signal only while it waits
code=0
wait $! || code=$?
# run writes a new summary.json at the end. symmetric-run exits with 0, too, when it could not start Ray at all.
if [[ $(summary) && $(summary) != "$before" ]]; then exit 0; fi
if ((code == 75)); then requeue "the cluster was lost"; fi # of verl-precision run
((code)) || refuse "Ray did not start on $head; see above"
exit "$code"
