"""A loopback Proxmox host: real sshd, real containers, and a ``pct`` with the real one's habits."""

from __future__ import annotations

from orchestrator.lab.lab import Lab
from orchestrator.lab.spec import Container, LabSpec

__all__ = ["Container", "Lab", "LabSpec"]
