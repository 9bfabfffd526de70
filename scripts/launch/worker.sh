#!/usr/bin/env bash
# Joins this machine to a Ray cluster, without ssh: run it on each machine but the head's (head.sh), and on a machine
# that replaces a lost one.
#   HEAD=10.0.0.1:6379 scripts/launch/worker.sh
#   HEAD=10.0.0.1:6379 scripts/launch/worker.sh --dry-run    shows what would be run
# Stays in the foreground; Ctrl-C ends the node and all that runs on it. Its environment is that of the job's processes
# on this node: HF_TOKEN and the like belong there.
set -euo pipefail

# The knobs: set them here or in the environment.
HEAD=${HEAD:-}             # the head's BIND:PORT
BIND=${BIND:-}             # the address that the others know this machine by, default: the one it reaches the head from
NAME=${NAME:-$(hostname)}  # this node's, in messages
GPUS=${GPUS:-}             # default: all that Ray finds
CPUS=${CPUS:-}             # the same
TEMP=${TEMP:-/tmp/ray}     # on this machine's own disk: Ray's sockets and logs
RAY=${RAY:-ray}            # of the environment that has torch and vLLM, like .venv-cuda/bin/ray

# shellcheck source=/dev/null
source "$(dirname "$0")/node.sh"
[[ $HEAD =~ ^[^:/]+:[0-9]+$ ]] || refuse "HEAD=$HEAD: must be the address and port of the head, like 10.0.0.1:6379"
[[ ! $HEAD =~ ^(127\.0\.0\.1|localhost): ]] ||
  refuse "HEAD=$HEAD: is a loopback address; start the head with BIND=, an address that all machines reach"
((${HEAD##*:} <= 65535)) || refuse "HEAD=$HEAD: the port must be at most 65535"
if [[ ! $dry_run ]]; then
  # shellcheck disable=SC2016
  timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "${HEAD%:*}" "${HEAD##*:}" 2>/dev/null ||
    refuse "HEAD=$HEAD: nothing answers there; is head.sh running, with BIND=${HEAD%:*}, and no firewall between?"
fi
start "--address=$HEAD" ${BIND:+"--node-ip-address=$BIND"}
