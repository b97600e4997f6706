#!/bin/sh
# Installs what the loopback lab and its interpreter need from the system, if anything is missing.
# Prints nothing when all is there. Keep the list in step with orchestrator/lab/requirements.py.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
missing=
need() { # program package
    command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need sshd openssh-server
need ssh openssh-client
need hostname hostname
need perl perl-base
need ip iproute2
need tmux tmux
need git git
need python3 python3
need lxc-start lxc
need newuidmap uidmap
need nft nftables # loses packets on purpose (loss.py)
python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
[ -n "$missing" ] || exit 0

command="apt-get install -y --no-install-recommends$missing"
if [ "$(id -u)" != 0 ]; then
    echo "missing system packages:$missing" >&2
    echo "run as root: $command" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "missing system packages (Debian's names):$missing" >&2
    echo "this machine has no apt: install them its own way" >&2
    exit 1
fi
echo "installing system packages:$missing"
export DEBIAN_FRONTEND=noninteractive
# A fresh machine has no package lists, and an old list names files that are gone.
apt-get update -qq
# The lab's sshd has a configuration and a port of its own. Debian would also start the system's, on
# port 22 of a laptop that never had one: its policy hook (invoke-rc.d: 101 is "not allowed") keeps
# new services from starting.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
mkdir -p /run/sshd
$command -qq >/dev/null
