# shellcheck shell=bash disable=SC2034
# Shared by the launch scripts: each sources this after its knobs, with its own arguments.
#   [--dry-run] [Hydra override …]
# The knobs travel to the job in the environment; train.sh turns them into options of `verl-precision run`.
checkout=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")

refuse() { # one line
  echo "$(basename "$0" .sh): $1" >&2
  exit 1
}

whole() { # whole NAME…: each must be a whole number of at least 1
  for number in "$@"; do
    [[ ${!number-} =~ ^[1-9][0-9]*$ ]] || refuse "$number=${!number-}: must be a whole number of at least 1"
  done
}

shared() { # shared FOLDER NAME…: each that has a value must lie under FOLDER; MODEL may be a name on the Hub
  local folder=$1 path
  for path in "${@:2}"; do
    [[ ! ${!path} || ${!path} == "$folder"/* || ($path == MODEL && ${!path} =~ ^[A-Za-z0-9]) ]] ||
      refuse "$path=${!path}: must lie under $folder, which all nodes share"
  done
}

words() { # words NAME…: print those that have a value, as NAME=VALUE with a NUL after each
  for word in "$@"; do if [[ ${!word-} ]]; then printf '%s\0' "$word=${!word}"; fi; done
}

options() { # options NAME…: the same as --name=VALUE
  local option
  for word in "$@"; do
    option=${word//_/-}
    if [[ ${!word-} ]]; then printf -- '--%s=%s\0' "${option,,}" "${!word}"; fi
  done
}

find_python() { # set PYTHON: as it is, else the first on PATH that scripts/ runs on
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

job_module() { # job_module WORD…: scripts/verl_precision/run/job.py, which parses the variables of `make run`
  PYTHONPATH=$checkout/scripts "$PYTHON" -m verl_precision.run.job "$@"
}

read_variables() { # set run to the names of the variables of `make run`, and job to these and the cluster's
  local name names
  find_python
  names=$(job_module --names) || exit 1
  run=()
  for name in $names; do if [[ $name != CARRY ]]; then run+=("$name"); fi; done # only make submit takes it
  job=("${run[@]}" NNODES GPUS_PER_NODE)
}

check() { # check NAME…: refuse as `make run` would, before anything is queued; takes the paths that this machine can judge
  local name generated judged=()
  [[ $NNODES ]] || refuse "NNODES: is not set; give the number of nodes with GPUS_PER_NODE=$GPUS_PER_NODE GPUs each"
  whole NNODES GPUS_PER_NODE
  [[ $OUT == /* ]] || refuse "OUT=$OUT: must be an absolute path on storage that all nodes share"
  read_variables
  for name in "${run[@]}"; do
    case $name in
      DEVICE) ;; # the GPUs are elsewhere: any device will do for the check
      MODEL | TRAIN | VAL | OUT) if [[ " $* " == *" $name "* ]]; then judged+=("$name"); fi ;;
      *) judged+=("$name") ;;
    esac
  done
  mapfile -d '' -t judged < <(words "${judged[@]}")
  job_module "${judged[@]}" DEVICE=cpu || exit 1
  generated=$(job_module --generated) || exit 1
  [[ $TRAIN || " $generated " == *" $EXPERIMENT "* ]] ||
    refuse "TRAIN: is not set; EXPERIMENT=$EXPERIMENT needs a parquet file on storage that all nodes share"
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
  [[ $word == [!-]*=* || $word == '~'* ]] || refuse "$word: must be --dry-run, in the first place, or a Hydra override (key=value)"
done
mark="'" quoted="'\\''"
for word in "$@"; do ARGS="${ARGS:+$ARGS }'${word//$mark/$quoted}'"; done # %q would write what Python's shlex does not read
