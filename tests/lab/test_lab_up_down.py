"""`lab up`, `down`, `status`: what they make, and that nothing stays behind."""

from __future__ import annotations

import pytest

from orchestrator.lab import Lab

pytestmark = pytest.mark.lab


def test_containers_and_their_states(lab: Lab) -> None:
    states = {ct["ct"]: ct["state"] for ct in lab.status()["containers"]}
    assert states == {200: "running", 201: "running", 202: "stopped"}


def test_the_host_is_reached_by_ssh_with_its_key_checked(lab: Lab) -> None:
    assert lab.ssh("hostname; id -u").stdout.split() == ["pve1", "0"]
