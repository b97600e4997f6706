"""Many requests on one channel: order, cancelling, floods, limits, and the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import serve
from orchestrator.agent.frames import Decoder, encode
from orchestrator.agent.loader import argv, header
from orchestrator.agent.protocol import PAYLOAD_LIMIT, WINDOW
from orchestrator.agent.serve import Server
from orchestrator.agent_bundle import bundle


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return b") Z" in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return True


def test_the_greeting_says_who_answers(agent: Any) -> None:
    assert agent.call("ping")["time"] > 0
    assert agent.process.poll() is None


def test_pings_are_answered_while_others_work(agent: Any) -> None:
    slow = [agent.send("exec", command=["sleep", "30"]) for _ in range(20)]
    assert agent.call("ping")["time"] > 0
    for number in slow:
        agent.cancel(number)
    assert {agent.error(number)["kind"] for number in slow} == {"cancelled"}


def test_ten_megabytes_on_both_outputs_at_once_arrive_whole(agent: Any) -> None:
    script = "head -c 10000000 /dev/zero & head -c 10000000 /dev/zero | tr '\\0' x >&2; wait"
    head, frames = agent.finish(agent.send("exec", command=["sh", "-c", script]))
    assert head["result"]["exit_code"] == 0
    for stream, byte in (("stdout", b"\0"), ("stderr", b"x")):
        data = b"".join(payload for part, payload in frames if part["stream"] == stream)
        assert len(data) == 10_000_000
        assert data.strip(byte) == b""
    assert max(len(payload) for _, payload in frames) <= PAYLOAD_LIMIT


def test_a_request_can_wait_for_others(agent: Any, tmp_path: Path) -> None:
    script = "sleep 0.3; echo first > order"
    first = agent.send("exec", command=["sh", "-c", script], cwd=str(tmp_path))
    second = agent.send("exec", command=["cat", "order"], cwd=str(tmp_path), after=[first])
    head, frames = agent.finish(second)
    assert head["ok"] and frames[0][1] == b"first\n"


def test_what_waits_for_a_failure_fails_with_its_cause(agent: Any) -> None:
    first = agent.send("exec", command=["/no/such/program"])
    second = agent.send("exec", command=["true"], after=[first])
    third = agent.send("exec", command=["true"], after=[second])
    assert agent.error(second)["detail"] == {"id": first, "kind": "command.not_found"}
    assert agent.error(third)["kind"] == "dependency"


def test_unknown_operations_and_wrong_fields_are_answered(agent: Any) -> None:
    assert agent.error(agent.send("run.fly"))["kind"] == "op.unknown"
    missing = agent.error(agent.send("exec"))
    assert (missing["kind"], missing["detail"]["field"]) == ("request.invalid", "command")
    wrong = agent.error(agent.send("run.list", limit=True))
    assert (wrong["kind"], wrong["detail"]["field"]) == ("request.invalid", "limit")


def test_input_is_acknowledged_and_reaches_the_command(agent: Any) -> None:
    data = os.urandom(3 * WINDOW)
    number = agent.stream("exec", data, command=["wc", "-c"])
    _, frames = agent.finish(number)
    assert frames[-1][1].strip() == str(len(data)).encode()


def test_more_than_the_window_ends_the_channel(agent: Any) -> None:
    number = agent.send("exec", command=["sleep", "30"], more=True)
    piece = encode({"id": number, "more": True}, bytes(PAYLOAD_LIMIT))
    try:
        for _ in range(2 * WINDOW // PAYLOAD_LIMIT):
            agent.write(piece)
    except BrokenPipeError:
        pass
    head, _ = agent.receive(0)
    assert head["error"]["kind"] == "protocol"


def test_noise_instead_of_a_frame_ends_the_channel_with_words(agent: Any) -> None:
    agent.write(b"GET / HTTP/1.1\r\n\r\n")
    head, _ = agent.receive(0)
    assert head["error"]["kind"] == "protocol"
    assert agent.process.wait(30) == 0


def test_the_end_of_input_ends_the_agent_and_its_commands(agent: Any) -> None:
    number = agent.send("exec", command=["sh", "-c", "echo $$; exec sleep 600"])
    _, payload = agent.receive(number)
    assert agent.close() == 0
    wait_until(lambda: gone(int(payload)))


@pytest.mark.slow
def test_a_command_that_ignores_its_end_is_killed_with_the_channel(agent: Any) -> None:
    number = agent.send("exec", command=["sh", "-c", "trap '' TERM; echo $$; sleep 600; sleep 600"])
    _, payload = agent.receive(number)
    assert agent.close() == 0
    wait_until(lambda: gone(int(payload)))


def test_a_laptop_that_reads_nothing_does_not_fill_our_memory(workdir: Path) -> None:
    program = bundle()
    sent = header(program.digest, len(program.data), str(workdir)) + program.data
    flood = ["head", "-c", "300000000", "/dev/zero"]
    for number in range(1, 6):
        sent += encode({"id": number, "op": "exec", "command": flood})
    pipe = subprocess.PIPE
    with subprocess.Popen(argv(sys.executable), stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        process.stdin.write(sent)
        process.stdin.flush()
        time.sleep(1)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.kill()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 120_000, f"{peak} kB"


def test_a_channel_that_is_asked_for_a_week_does_not_remember_every_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "REMEMBERED", remembered := 200)
    there, here = os.pipe(), os.pipe()
    server = Server(there[0], here[1], str(tmp_path), "", lambda name: lambda request: {})
    thread = threading.Thread(target=server.run, args=({},), daemon=True)
    thread.start()
    decoder = Decoder()
    answered = 0
    for number in range(1, 2 * remembered):
        os.write(there[1], encode({"id": number, "op": "any"}))
        while answered < number:
            answered += sum("ok" in head for head, _ in decoder.feed(os.read(here[0], 1 << 16)))
    assert server.request(1) is None
    assert server.request(2 * remembered - 1) is not None
    os.close(there[1])
    thread.join(10)
    for descriptor in (there[0], *here):
        os.close(descriptor)
