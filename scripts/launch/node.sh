# shellcheck shell=bash disable=SC2154
# Shared by head.sh and worker.sh: each sources this after its knobs, with its own arguments.
[[ $# == 0 || $* == --dry-run ]] || { echo "$(basename "$0" .sh): $*: takes only --dry-run" >&2 && exit 1; }
# shellcheck source=/dev/null
source "$(dirname "$0")/knobs.sh"
temp_most=40 # characters: below it Ray makes sockets, whose paths may have 107
environment=()
# A head asks for the token that it finds, and a node shows it only in this mode (Ray 2.60).
if [[ -f ~/.ray/auth_token || ${RAY_AUTH_TOKEN_PATH-}${RAY_AUTH_TOKEN-} ]]; then environment+=(RAY_AUTH_MODE=token); fi

port() { # port NAME…: each must be one that Ray's head can have
  for number in "$@"; do
    [[ ${!number} =~ ^[1-9][0-9]{3,4}$ ]] || refuse "$number=${!number}: must be a port from 1024 to 65535"
    ((${!number} >= 1024 && ${!number} <= 65535)) || refuse "$number=${!number}: must be a port from 1024 to 65535"
    ((${!number} < 10002 || ${!number} > 19999)) || refuse "$number=${!number}: must not be from 10002 to 19999, the ports of Ray's workers"
  done
}

start() { # start WORD…: become `ray start` with these further words
  local ray=(env "${environment[@]}" "$RAY" start --block --disable-usage-stats "--node-name=$NAME" "--temp-dir=$TEMP" "$@")
  ray+=(${GPUS:+"--num-gpus=$GPUS"} ${CPUS:+"--num-cpus=$CPUS"})
  if [[ $dry_run ]]; then
    show "${ray[@]}"
    exit
  fi
  command -v "$RAY" >/dev/null || refuse "RAY=$RAY: there is no such program; give that of your environment, like .venv-cuda/bin/ray"
  exec "${ray[@]}"
}

for count in GPUS CPUS; do
  [[ ${!count} =~ ^[0-9]*$ ]] || refuse "$count=${!count}: must be a whole number"
done
[[ $TEMP == /* ]] || refuse "TEMP=$TEMP: must be an absolute path"
((${#TEMP} <= temp_most)) || refuse "TEMP=$TEMP: has ${#TEMP} characters; the paths of Ray's sockets below it allow at most $temp_most"
