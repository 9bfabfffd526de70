# What head.sh and worker.sh share: sourced after their knobs.
# shellcheck shell=bash disable=SC2154
TEMP_MOST=40 # characters: below it Ray makes sockets, whose paths may have 107

refuse() {
  echo "$(basename "$0" .sh): $1" >&2
  exit 1
}

check_port() { # the name of a knob
  [[ ${!1} =~ ^[1-9][0-9]{3,4}$ ]] || refuse "$1=${!1}: must be a port from 1024 to 65535"
  ((${!1} >= 1024 && ${!1} <= 65535)) || refuse "$1=${!1}: must be a port from 1024 to 65535"
  ((${!1} < 10002 || ${!1} > 19999)) || refuse "$1=${!1}: Ray's workers have 10002 to 19999; choose another"
}

start() { # further words of ray start
  local words=("$RAY" start --block --disable-usage-stats "--node-name=$NAME" "--temp-dir=$TEMP" "$@")
  words+=(${GPUS:+"--num-gpus=$GPUS"} ${CPUS:+"--num-cpus=$CPUS"})
  if [[ $dry_run ]]; then
    printf '%q ' "${words[@]}"
    echo
    exit
  fi
  command -v "$RAY" >/dev/null || refuse "RAY=$RAY: no such program; name the ray of your environment, like .venv-cuda/bin/ray"
  exec "${words[@]}"
}

dry_run=
if [[ ${1:-} == --dry-run ]]; then dry_run=yes && shift; fi
(($# == 0)) || refuse "$1: takes --dry-run alone; the knobs are variables"
for count in GPUS CPUS; do
  [[ ${!count} =~ ^[0-9]*$ ]] || refuse "$count=${!count}: must be a whole number"
done
[[ $TEMP == /* ]] || refuse "TEMP=$TEMP: must be an absolute path"
((${#TEMP} <= TEMP_MOST)) || refuse "TEMP=$TEMP: has ${#TEMP} characters, Ray's sockets below it leave $TEMP_MOST; choose a shorter one"
