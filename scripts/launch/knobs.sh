# shellcheck shell=bash disable=SC2034
# What the launch scripts share: each sources this after its knobs, with its own arguments.
#   [--dry-run] [Hydra override …]
# The knobs travel to the job in the environment; train.sh makes the words of `make run` of them.
checkout=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
run=(EXPERIMENT PRECISION ALGO RECIPE DEVICE STEPS SEED MODEL TRAIN VAL OUT RETRIES ARGS) # what run.py takes
job=("${run[@]}" NNODES GPUS_PER_NODE)

refuse() { # one line
  echo "$(basename "$0" .sh): $1" >&2
  exit 1
}

whole() { # whole NAME…: each must be a whole number
  for number in "$@"; do
    [[ ${!number-} =~ ^[1-9][0-9]*$ ]] || refuse "$number=${!number-}: must be a whole number of at least 1"
  done
}

shared() { # shared FOLDER NAME…: each that has a value must lie under FOLDER; MODEL may be a name on the Hub
  local folder=$1 path
  for path in "${@:2}"; do
    [[ ! ${!path} || ${!path} == "$folder"/* || ($path == MODEL && ${!path} =~ ^[A-Za-z0-9]) ]] ||
      refuse "$path=${!path}: must lie under $folder, which every node sees"
  done
}

words() { # words NAME…: those that have a value, as NAME=VALUE with a NUL after each
  for word in "$@"; do if [[ ${!word-} ]]; then printf '%s\0' "$word=${!word}"; fi; done
}

find_python() { # PYTHON as it is set, else the first on PATH that scripts/ runs on
  local python names=("${PYTHON-}")
  [[ ${PYTHON-} ]] || names=(python3 python3.{14,13,12,11,10})
  for python in "${names[@]}"; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      PYTHON=$python
      return
    fi
  done
  refuse "PYTHON${PYTHON:+=$PYTHON}: must be Python 3.10 or later"
}

check() { # check NAME…: refuse as `make run` would, before anything is queued; takes the names that this machine can judge
  [[ $NNODES ]] || refuse "NNODES: is not set; how many nodes of GPUS_PER_NODE=$GPUS_PER_NODE GPUs?"
  whole NNODES GPUS_PER_NODE
  [[ $OUT == /* ]] || refuse "OUT=$OUT: must be an absolute path, on storage that every node sees"
  find_python
  mapfile -d '' -t given < <(words EXPERIMENT PRECISION ALGO RECIPE STEPS SEED RETRIES ARGS "$@")
  # The GPUs are elsewhere: any device will do for the check.
  PYTHONPATH=$checkout/scripts "$PYTHON" -m lib.run.job "${given[@]}" DEVICE=cpu || exit 1
  if [[ ! $TRAIN ]] && ! PYTHONPATH=$checkout/scripts "$PYTHON" -c "from lib.run import job; job.MADE['$EXPERIMENT']" 2>/dev/null; then
    refuse "TRAIN: is not set; EXPERIMENT=$EXPERIMENT needs a parquet file that every node sees"
  fi
}

show() { # a command as one line for a shell
  printf '%q ' "$@"
  echo
}

ARGS=${ARGS-}
dry_run='' # this file shares the positional parameters of the script that sources it
if [[ ${1-} == --dry-run ]]; then
  dry_run=yes
  shift
fi
for word in "$@"; do
  [[ $word == [!-]*=* || $word == '~'* ]] || refuse "$word: takes --dry-run, then Hydra overrides (key=value)"
done
mark="'" quoted="'\\''"
for word in "$@"; do ARGS="${ARGS:+$ARGS }'${word//$mark/$quoted}'"; done # %q would write what Python's shlex does not read
