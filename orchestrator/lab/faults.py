"""Fault switches: files in the lab's ``faults`` folder, read by ``pct`` at every call.

Faults of a container are set where a user would make them, in /etc/pve/lxc/N.conf: a ``lock:``
line, a ``dev0:`` that does not exist, a bad ``lxc.mount.entry``. Faults of the link are in
``proxy.py``; a full disk is a container with a small ``workdir_size``.
"""

from __future__ import annotations

CLUSTER_DOWN = "cluster-down"
"""pmxcfs does not answer: every ``pct`` call fails with exit code 111."""
NOT_ROOT = "not-root"
"""What a caller without root sees, exit code 255."""
NO_QUORUM = "no-quorum"
"""``pct start`` is refused."""
PCT_DELAY = "pct-delay"
"""Its content is seconds of computing before every ``pct`` call."""
