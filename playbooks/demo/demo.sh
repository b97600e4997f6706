#!/bin/sh
# The whole story on one machine, with the commands a user types: a loopback Proxmox host, a launch
# into its container 200, the log, the diagnosis, the drafter back on the laptop.
# Called by `make demo`, which installs what it needs. About 12 minutes on two cores.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
# The acceptance length that a good run reaches with room to spare; see benchmarks/README.md.
: "${DEMO_MIN_TAU:=1.25}"
out=${DEMO_OUT:-$PWD/out/demo}

say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }
run() { say "$@"; "$@"; }

leave() {
    status=$?
    trap - EXIT
    [ "${KEEP_LAB:-}" = 1 ] || dflashctl lab down >/dev/null 2>&1 || true
    exit "$status"
}
trap leave EXIT
trap 'exit 130' INT TERM

run dflashctl lab up
run dflashctl launch --host lab --ct 200 --code "$here" --config "$here/config.yaml" --name demo
run dflashctl tail
run dflashctl status
run dflashctl diag
mkdir -p "$out"
run dflashctl pull --to "$out"
python3 "$here/verdict.py" "$out" "$DEMO_MIN_TAU"
