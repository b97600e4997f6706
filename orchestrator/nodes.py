"""Several containers as one torchrun run: that they can meet is made sure of before any starts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator import launch as launching
from orchestrator import meeting, preflight
from orchestrator.channel import AgentChannel
from orchestrator.errors import DflashctlError, RefusedError
from orchestrator.fanout import each
from orchestrator.fleet import Fleet, Notice
from orchestrator.launch import Order, Started
from orchestrator.reconnect import reconnecting
from orchestrator.release import Release
from orchestrator.request import Request
from orchestrator.target import Target

# How long the first node answers and another may knock: a firewall that drops says nothing.
LISTEN_S = 60.0
VISIT_S = 8.0
# Nodes whose sibling failed to start have done nothing yet.
GRACE_S = 5


@dataclass(frozen=True)
class Meeting:
    """Where the nodes meet, and the interface of each that leads there."""

    address: str
    port: int
    interfaces: tuple[str | None, ...]


UNMET = Meeting("FIRST", 0, ())
"""Stands for the meeting where nothing was reached: ``--dry-run``."""


def meet(targets: Sequence[Target], channels: Sequence[AgentChannel]) -> Meeting:
    """Let every node reach the first one, for real.

    :raises RefusedError: one of them cannot; nothing was started.
    """
    first, *others = targets
    door = _ask(channels[0], first, "listen", str(LISTEN_S))
    try:
        offered = _first_line(door, first)
        addresses = list(offered["addresses"])
        visits = [
            _ask(channel, target, "visit", str(offered["port"]), str(VISIT_S), *addresses)
            for target, channel in zip(others, channels[1:], strict=True)
        ]
        answers = [_first_line(visit, target) for visit, target in zip(visits, others, strict=True)]
    finally:
        door.cancel()
        with contextlib.suppress(DflashctlError):
            # Its port must be free again before the run takes it.
            door.result()
    address = common(first, others, addresses, answers)
    ways = [offered["addresses"][address], *(answer["reached"][address] for answer in answers)]
    return Meeting(address, int(offered["port"]), tuple(ways))


def common(
    first: Target,
    others: Sequence[Target],
    addresses: Sequence[str],
    answers: Sequence[Mapping[str, Any]],
) -> str:
    """The address of the first node that every other one reached. Pure.

    :raises RefusedError: there is none; names the node that reached none, or the disagreement.
    """
    for target, answer in zip(others, answers, strict=True):
        if not answer["reached"]:
            why = "; ".join(f"{a}: {e}" for a, e in answer["failed"].items()) or "it has no address"
            raise RefusedError(
                f"it cannot reach the first node, {first.name} ({why})",
                next_step="put both on one bridge or network, and let TCP through between them "
                "(Proxmox: firewall=1 on net0)",
                **target.place,
            )
    for address in addresses:
        if all(address in answer["reached"] for answer in answers):
            return address
    raise RefusedError(
        "no one of its addresses is reached by all other nodes",
        next_step="give the nodes one network in common",
        **first.place,
    )


def node_orders(
    orders: Sequence[Order], meeting_point: Meeting, ranks: Sequence[int]
) -> list[Order]:
    """Each node's order: the run ids differ by the node, the trainer goes through torchrun. Pure.

    :param ranks: processes of each node.
    """
    count = len(orders)
    ids = [node_id(order.run_id, rank) for rank, order in enumerate(orders)]
    found = []
    for rank, order in enumerate(orders):
        variables = {
            "MASTER_ADDR": meeting_point.address,
            "MASTER_PORT": str(meeting_point.port),
            "NNODES": str(count),
            "NODE_RANK": str(rank),
        }
        interface = dict(enumerate(meeting_point.interfaces)).get(rank)
        if interface:
            variables |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
        found.append(
            replace(
                order,
                run_id=ids[rank],
                name=f"{order.name}-n{rank}",
                command=torchrun(order, count, rank, ranks[rank], meeting_point),
                # What the user set holds.
                environment={**variables, **order.environment},
                nodes={"rank": rank, "of": count, "run_ids": ids, "meet": meeting_point.address},
            )
        )
    return found


def torchrun(
    order: Order, count: int, rank: int, ranks: int, meeting_point: Meeting
) -> tuple[str, ...]:
    """The trainer's command under torchrun; any other command as it is (it has the variables)."""
    if order.config is None:
        return order.command
    python, *rest = order.command
    return (
        *(python, "-m", "trainer.torchrun"),
        *("--nnodes", str(count), "--node-rank", str(rank), "--nproc-per-node", str(ranks)),
        *("--master-addr", meeting_point.address, "--master-port", str(meeting_point.port)),
        *rest,
    )


def node_id(run_id: str, rank: int) -> str:
    """The run id of one node: ``night-20260101-…`` is ``night-n0-20260101-…``."""
    name, day, clock, mark = run_id.rsplit("-", 3)
    return f"{name}-n{rank}-{day}-{clock}-{mark}"


def launch(
    fleet: Fleet,
    targets: Sequence[Target],
    orders: Sequence[Order],
    release: Release | None,
    *,
    notice: Notice,
    ranks: int | None = None,
) -> list[Started]:
    """Preflight everywhere, the meeting, then every node at once; all of them start, or none stays.

    :param ranks: processes of each node; default: its GPUs, or one.
    :raises RefusedError: a node is not fit, or does not reach the first.
    """
    openings = [fleet.opening(target) for target in targets]
    channels = [opening.result() for opening in openings]
    looks = [
        channel.request("preflight", **launching.preflight_fields(target, order, release))
        for target, order, channel in zip(targets, orders, channels, strict=True)
    ]
    counts = [
        ranks or _gpus(look.result(), target) for target, look in zip(targets, looks, strict=True)
    ]
    place = meet(targets, channels)
    notice(f"all nodes reach {targets[0].name} at {place.address}, port {place.port}")
    for channel in channels:
        channel.close()
    return _start(fleet, targets, node_orders(orders, place, counts), release, notice)


def _gpus(answer: dict[str, Any], target: Target) -> int:
    """How many GPUs a node brings. :raises RefusedError: its preflight failed."""
    refused = preflight.refusal(preflight.read(answer, target), target)
    if refused is not None:
        raise refused
    cards = (answer["checks"].get("gpu") or {}).get("value") or {}
    return len(target.settings.gpus) or len(cards.get("visible") or []) or 1


def _start(
    fleet: Fleet,
    targets: Sequence[Target],
    orders: Sequence[Order],
    release: Release | None,
    notice: Notice,
) -> list[Started]:
    wanted = {target.name: order for target, order in zip(targets, orders, strict=True)}

    def start(target: Target) -> Started:
        return launching.launch(fleet, target, wanted[target.name], release, notice=notice)

    answers = {target.name: answer for target, answer in each(fleet, targets, start)}
    # In the nodes' order, whichever answered first.
    found = [answers[target.name] for target in targets]
    started = [one for one in found if isinstance(one, Started)]
    errors = [one for one in found if isinstance(one, DflashctlError)]
    if not errors:
        return started
    for node in started:
        _take_back(fleet, node, notice)
    raise errors[0]


def _take_back(fleet: Fleet, node: Started, notice: Notice) -> None:
    notice(f"{node.target.name}: stopping {node.run_id}, because another node did not start")

    def stop(channel: AgentChannel) -> None:
        channel.call("run.stop", run_id=node.run_id, grace_s=GRACE_S, who=launching.whoami())

    try:
        reconnecting(fleet, partial(fleet.container, node.target), stop, notice)
    except DflashctlError as error:
        notice(f"{node.target.name}: {error.what}; stop it by hand: dflashctl stop {node.run_id}")


def _ask(channel: AgentChannel, target: Target, *words: str) -> Request:
    source = Path(meeting.__file__).read_text(encoding="utf-8")
    command = [target.settings.python, "-c", source, *words]
    return channel.request("exec", command=command, cwd="/", timeout_s=LISTEN_S)


def _first_line(request: Request, target: Target) -> dict[str, Any]:
    """The first JSON line that the far side prints."""
    heard = bytearray()
    words = bytearray()
    for head, payload in request.frames():
        (heard if head.get("stream") == "stdout" else words).extend(payload)
        if b"\n" in heard:
            found: dict[str, Any] = json.loads(bytes(heard).split(b"\n")[0])
            return found
    last = bytes(words).decode(errors="replace").strip().splitlines()
    raise RefusedError(
        f"its interpreter could not look at the network: {last[-1] if last else 'no answer'}",
        next_step="`dflashctl doctor` looks at the interpreter",
        **target.place,
    )
