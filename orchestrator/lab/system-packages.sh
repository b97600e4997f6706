#!/bin/sh
# Installs what the lab and the tests need from the distribution, or says what is missing.
# Silent when everything is there.
set -eu

packages=""
need() { # COMMAND PACKAGE
    command -v "$1" >/dev/null 2>&1 || packages="$packages $2"
}
PATH="$PATH:/usr/sbin:/sbin"
need sshd openssh-server
need ssh openssh-client
need tmux tmux
need ip iproute2
need lxc-start lxc
need newuidmap uidmap
need busybox busybox-static
need git git
need zstd zstd
# Debian ships venv apart from python3; without ensurepip no environment can be made.
/usr/bin/python3 -c 'import ensurepip' 2>/dev/null || packages="$packages python3-venv"

[ -n "$packages" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "missing:$packages" >&2
    echo "  next: run as root, or: sudo apt-get install --no-install-recommends$packages" >&2
    exit 4
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "missing:$packages, and this system has no apt-get" >&2
    echo "  next: install the same programs with your own package manager" >&2
    exit 4
fi
echo "installing$packages"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # the list is meant to be split
apt-get install -y -qq --no-install-recommends $packages >/dev/null
