#!/usr/bin/env bash
# The head of a Ray cluster, started by hand on its own machine, without ssh; worker.sh joins the other machines to it.
#   BIND=10.0.0.1 scripts/launch/head.sh              the others reach it at that address of this machine; then here
#     RAY_ADDRESS=10.0.0.1:6379 make run …            or RAY_ADDRESS=http://127.0.0.1:8265 make submit …
#                                                     (and RAY_AUTH_MODE=token where there is a token)
#   scripts/launch/head.sh                            a cluster of only this machine, listening on loopback: make submit
#   BIND=10.0.0.1 scripts/launch/head.sh --dry-run    shows what would be run
# Stays in the foreground; Ctrl-C ends the node and all that runs on it. Its environment is that of the job's processes
# on this node: HF_TOKEN and the like belong there.
set -euo pipefail

# The knobs: set them here or in the environment.
BIND=${BIND:-127.0.0.1}                      # the address of this machine that nodes and jobs know the head by
PORT=${PORT:-6379}                           # the cluster's own port
DASHBOARD_BIND=${DASHBOARD_BIND:-127.0.0.1}  # where jobs are submitted: whoever reaches it runs commands here
DASHBOARD_PORT=${DASHBOARD_PORT:-8265}
NAME=${NAME:-$(hostname)}                    # this node's, in messages
GPUS=${GPUS:-}                               # default: all that Ray finds
CPUS=${CPUS:-}                               # the same
TEMP=${TEMP:-/tmp/ray}                       # on this machine's own disk: Ray's sockets and logs
RAY=${RAY:-ray}                              # of the environment that has torch and vLLM, like .venv-cuda/bin/ray

# shellcheck source=/dev/null
source "$(dirname "$0")/node.sh"
port PORT DASHBOARD_PORT
[[ $PORT != "$DASHBOARD_PORT" ]] || refuse "DASHBOARD_PORT=$DASHBOARD_PORT: must differ from PORT"
[[ $BIND != 0.0.0.0 && $BIND != localhost ]] ||
  refuse "BIND=$BIND: must be 127.0.0.1, or the address of this machine that the others reach"
if [[ $BIND == 127.0.0.1 ]]; then
  environment+=(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0) # or Ray takes this machine's outward address in its place
elif ((! ${#environment[@]})); then
  echo "head: Ray listens on every interface of this machine and accepts every client; unless the network is closed:" \
    "ray get-auth-token --generate, the same ~/.ray/auth_token on each machine, and RAY_AUTH_MODE=token make run …" >&2
fi
start --head "--node-ip-address=$BIND" "--port=$PORT" "--dashboard-host=$DASHBOARD_BIND" "--dashboard-port=$DASHBOARD_PORT"
