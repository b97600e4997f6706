"""tail: every byte once, whole lines, exact cursors, whatever happens to the file."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_peer import seeds

Frames = list[tuple[dict[str, Any], bytes]]


def text(frames: Frames, file: int = 0) -> bytes:
    return b"".join(payload for head, payload in frames if head.get("file") == file)


def notices(frames: Frames) -> list[str]:
    return [head["notice"] for head, _ in frames if "notice" in head]


class Reader:
    """Follows in a thread; ``until`` waits for what it has read."""

    def __init__(self, agent: Any, **fields: Any) -> None:
        self.agent = agent
        self.frames: Frames = []
        self.number = agent.send("tail", **fields)
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            head, payload = self.agent.receive(self.number)
            if not head.get("more"):
                return
            with self._change:
                self.frames.append((head, payload))
                self._change.notify_all()

    def until(self, condition: Callable[[Frames], bool]) -> None:
        with self._change:
            assert self._change.wait_for(lambda: condition(self.frames), 30)

    def until_text(self, expected: bytes) -> None:
        self.until(lambda frames: text(frames).endswith(expected))

    def stop(self) -> Frames:
        self.agent.cancel(self.number)
        self._thread.join(30)
        return self.frames


def plain(agent: Any, path: Path, **fields: Any) -> Frames:
    head, frames = agent.finish(agent.send("tail", files=[str(path)], follow=False, **fields))
    assert head["ok"], head
    return list(frames)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "some.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(1000)))
    return path


def test_all_of_a_file(agent: Any, log: Path) -> None:
    assert text(plain(agent, log)) == log.read_bytes()


@pytest.mark.parametrize("count", [0, 1, 5, 999, 1000, 5000])
def test_the_last_lines(agent: Any, log: Path, count: int) -> None:
    expected = log.read_bytes().splitlines(keepends=True)
    assert text(plain(agent, log, lines=count)) == b"".join(expected[max(0, 1000 - count) :])


def test_the_last_lines_reach_into_rotated_files(agent: Any, tmp_path: Path) -> None:
    for name, numbers in (("a.2", range(4)), ("a.1", range(4, 8)), ("a", range(8, 10))):
        (tmp_path / name).write_bytes(b"".join(b"%d\n" % number for number in numbers))
    assert text(plain(agent, tmp_path / "a", lines=5)) == b"5\n6\n7\n8\n9\n"
    assert text(plain(agent, tmp_path / "a")) == b"".join(b"%d\n" % n for n in range(10))


def test_an_unfinished_line_comes_with_its_end_only(agent: Any, log: Path) -> None:
    reader = Reader(agent, files=[str(log)], lines=1)
    reader.until_text(b"line 999\n")
    with log.open("ab", buffering=0) as file:
        file.write(b"half")
        time.sleep(0.1)
        assert text(reader.frames) == b"line 999\n"
        file.write(b" and half\nbegun")
    reader.until_text(b"half and half\n")
    reader.stop()
    assert text(plain(agent, log)).endswith(b"begun")


def test_a_progress_bar_is_seen_while_it_moves(agent: Any, log: Path) -> None:
    reader = Reader(agent, files=[str(log)], lines=1)
    reader.until_text(b"line 999\n")
    with log.open("ab", buffering=0) as file:
        for percent in (10, 20, 30):
            file.write(b"\r%d%%\r" % percent)
            reader.until_text(b"%d%%\r" % percent)
    reader.stop()


def test_a_cursor_goes_on_to_the_byte(agent: Any, log: Path) -> None:
    frames = plain(agent, log)
    cursor = frames[0][0]["cursor"]
    with log.open("ab") as file:
        file.write(b"more\n")
    again = plain(agent, log, cursors=[cursor])
    assert len(frames) == 1
    assert text(again) == b"more\n"


def test_a_cursor_is_followed_into_a_rotated_file(agent: Any, log: Path) -> None:
    cursor = plain(agent, log)[-1][0]["cursor"]
    with log.open("ab") as file:
        file.write(b"last of the old\n")
    log.rename(f"{log}.1")
    log.write_bytes(b"first of the new\n")
    frames = plain(agent, log, cursors=[cursor])
    assert text(frames) == b"last of the old\nfirst of the new\n"
    assert notices(frames) == ["rotated"]


def test_a_cursor_into_a_file_that_is_gone_says_so(agent: Any, log: Path) -> None:
    cursor = plain(agent, log)[-1][0]["cursor"]
    log.unlink()
    log.write_bytes(b"X" * cursor["offset"] + b"\nanother file\n")
    # Even if it has the number of the old one.
    cursor["inode"] = log.stat().st_ino
    frames = plain(agent, log, cursors=[cursor])
    assert notices(frames) == ["gap"]
    assert text(frames) == log.read_bytes()


def test_a_truncated_file_is_read_anew(agent: Any, log: Path) -> None:
    reader = Reader(agent, files=[str(log)], lines=1)
    reader.until_text(b"line 999\n")
    log.write_bytes(b"new\n")
    reader.until_text(b"new\n")
    assert "truncated" in notices(reader.stop())


def test_a_removed_file_is_not_followed_by_an_older_one(agent: Any, log: Path) -> None:
    older = Path(f"{log}.1")
    older.write_bytes(b"older\n")
    os.utime(older, (1, 1))
    reader = Reader(agent, files=[str(log)], lines=1)
    reader.until_text(b"line 999\n")
    log.unlink()
    log.write_bytes(b"new\n")
    reader.until_text(b"new\n")
    frames = reader.stop()
    assert text(frames) == b"line 999\nnew\n"
    assert notices(frames) == ["gap"]


def test_a_file_that_is_not_there_yet_is_waited_for(agent: Any, tmp_path: Path) -> None:
    path = tmp_path / "later.log"
    reader = Reader(agent, files=[str(path)])
    reader.until(lambda frames: notices(frames) == ["waiting"])
    path.write_bytes(b"here\n")
    reader.until_text(b"here\n")
    reader.stop()


def test_several_files_at_once(agent: Any, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(path.name.encode() * 3 + b"\n")
    files = [str(path) for path in paths]
    head, frames = agent.finish(agent.send("tail", files=files, follow=False))
    assert (text(frames, 0), text(frames, 1)) == (b"aaa\n", b"bbb\n")
    assert [cursor["offset"] for cursor in head["result"]["cursors"]] == [4, 4]


def test_a_line_without_end_is_cut_rather_than_kept_in_memory(agent: Any, tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * 3_000_000)
    frames = plain(agent, path)
    assert text(frames) == path.read_bytes()
    assert max(len(payload) for _, payload in frames) <= 512 << 10


@pytest.mark.parametrize("seed", seeds(1, 50))
def test_nothing_is_lost_or_doubled_over_rotations_and_cut_links(
    agents: Any, tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "busy.log"
    path.touch()
    count = 20_000
    chance = random.Random(seed)

    def write() -> None:
        file = path.open("ab", buffering=0)
        for number in range(count):
            file.write(b"%d\n" % number)
            if chance.random() < 0.001:
                for rotated in range(99, 0, -1):
                    if Path(f"{path}.{rotated}").exists():
                        Path(f"{path}.{rotated}").rename(f"{path}.{rotated + 1}")
                path.rename(f"{path}.1")
                file.close()
                file = path.open("ab", buffering=0)
        file.write(b"end\n")
        file.close()

    writer = threading.Thread(target=write)
    writer.start()
    received = bytearray()
    cursor = None
    while not received.endswith(b"end\n"):
        agent = agents()
        number = agent.send("tail", files=[str(path)], cursors=[cursor])
        for _ in range(chance.randrange(5, 60)):
            head, payload = agent.receive(number)
            assert head.get("notice") in (None, "rotated"), head
            received += payload
            cursor = head["cursor"]
            if received.endswith(b"end\n"):
                break
        # What was read and not taken is lost with the link; the cursor still points before it.
        agent.process.kill()
        agent.process.wait()
    writer.join()
    assert received.split() == [*(b"%d" % number for number in range(count)), b"end"]


def test_a_runs_tail_ends_with_the_run(runs: Any) -> None:
    run = runs.python(
        "import time\nfor n in range(5): print(n); time.sleep(0.02)\nprint('!', end='')"
    )
    head, frames = runs.agent.finish(runs.agent.send("tail", run_id=run["run_id"]))
    assert text(frames) == b"0\n1\n2\n3\n4\n!"
    assert head["result"]["reason"] == "ended"
    states = [part["state"] for part, _ in frames if part.get("notice") == "state"]
    assert states[-1] == "finished"


def test_a_run_is_tailed_through_its_own_rotations(runs: Any) -> None:
    code = """
import time
for n in range(4000):
    print(f"{n:06}" * 5)
    if n % 100 == 0: time.sleep(0.005)
"""
    run = runs.python(code, log_bytes=10_000, log_files=50)
    _, frames = runs.agent.finish(runs.agent.send("tail", run_id=run["run_id"]))
    assert text(frames).split() == [f"{n:06}".encode() * 5 for n in range(4000)]
    assert notices(frames).count("rotated") > 3


@pytest.mark.slow
def test_since_gives_what_came_later(runs: Any) -> None:
    run = runs.python("import time\nprint('old')\ntime.sleep(2.5)\nprint('new')")
    runs.says(run, "old")
    # The index tells times to a second.
    middle = time.time() + 1.2
    ended = runs.ending(run)["ended"]
    fields = {"run_id": run["run_id"], "follow": False}

    def since(when: float) -> bytes:
        _, frames = runs.agent.finish(runs.agent.send("tail", since=when, **fields))
        return text(frames)

    assert since(middle) == since(ended - 0.5) == b"new\n"
    assert since(middle - 3600) == b"old\nnew\n"
    assert since(time.time() + 60) == b""


@pytest.mark.parametrize("files", [["../../etc/passwd"], [], [""], [3]])
def test_files_outside_a_run_are_not_named_through_it(runs: Any, files: list[Any]) -> None:
    run = runs.start("true")
    error = runs.agent.error(runs.agent.send("tail", run_id=run["run_id"], files=files))
    assert error["kind"] == "request.invalid"


def test_following_costs_nothing_while_nothing_comes(agent: Any, log: Path) -> None:
    reader = Reader(agent, files=[str(log)], lines=0)
    time.sleep(0.2)

    def ticks() -> int:
        fields = Path(f"/proc/{agent.process.pid}/stat").read_text().split()
        return int(fields[13]) + int(fields[14])

    before = ticks()
    time.sleep(1.0)
    assert (ticks() - before) / os.sysconf("SC_CLK_TCK") < 0.2
    reader.stop()
