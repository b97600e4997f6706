"""The loader: stores the program once, recovers when it is absent, and says why it cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from agent_peer import interpreters

from orchestrator.agent.frames import encode
from orchestrator.agent.loader import LOADER, argv, header
from orchestrator.agent.program import KEEP
from orchestrator.agent.protocol import MAGIC, REFUSAL
from orchestrator.agent_bundle import bundle

OLD_PYTHONS = interpreters("3.6", "3.7", "3.8", "3.9")


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A container that has never seen the agent."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def programs(workdir: Path) -> set[str]:
    return {path.name for path in (workdir / "dflashctl/agent").iterdir()}


def test_the_program_travels_once(agents: Any, workdir: Path) -> None:
    first = agents()
    assert first.hello()["version"] == bundle().digest
    assert first.close() == 0
    again = agents(send_program=False)
    assert again.hello()["stored"] == "workdir"
    assert f"{bundle().digest}.pyz" in programs(workdir)


def test_requests_need_not_wait_for_the_greeting(agents: Any) -> None:
    agent = agents()
    assert agent.call("ping")["time"] > 0


def test_an_absent_program_costs_one_round_trip_not_a_new_process(agents: Any) -> None:
    agent = agents(send_program=False)
    lost = agent.send("ping", bytes(100_000))
    head, _ = agent.receive(0)
    assert head["error"]["kind"] == "agent.absent"
    agent.resync()
    assert "hello" in agent.receive(0)[0]
    assert agent.call("ping")["time"] > 0
    assert agent.frames[lost].empty()


def test_a_program_that_was_pruned_while_we_trusted_it_counts_as_absent(
    agents: Any, workdir: Path
) -> None:
    assert agents().close() == 0
    (workdir / f"dflashctl/agent/{bundle().digest}.pyz").unlink()
    agent = agents(send_program=False)
    assert agent.receive(0)[0]["error"]["kind"] == "agent.absent"


def test_damaged_bytes_are_not_stored(workdir: Path) -> None:
    program = bundle()
    data = bytearray(program.data)
    data[1000] ^= 1
    sent = header(program.digest, len(data), str(workdir)) + bytes(data)
    done = subprocess.run(argv(sys.executable), input=sent, capture_output=True, timeout=30)
    assert done.stdout.startswith(MAGIC)
    assert b"agent.corrupt" in done.stdout
    assert not (workdir / "dflashctl").exists()


@pytest.mark.parametrize("cut", [0, 10, 80, 5000])
def test_a_link_cut_while_the_program_travels_leaves_nothing(workdir: Path, cut: int) -> None:
    program = bundle()
    sent = header(program.digest, len(program.data), str(workdir)) + program.data
    done = subprocess.run(argv(sys.executable), input=sent[:cut], capture_output=True, timeout=30)
    assert done.stdout == MAGIC
    assert not (workdir / "dflashctl").exists()


def test_what_a_login_shell_prints_comes_before_the_marker(workdir: Path) -> None:
    program = bundle()
    sent = header(program.digest, len(program.data), str(workdir)) + program.data
    script = 'echo "Welcome to pve1"; printf "\\033[0m\\0 noise"; exec "$@"'
    command = ["sh", "-c", script, "sh", *argv(sys.executable)]
    done = subprocess.run(command, input=sent, capture_output=True, timeout=30)
    noise, frames = done.stdout.split(MAGIC, 1)
    assert noise.startswith(b"Welcome to pve1\n")
    assert b'"hello"' in frames


def interpreter_without_json(folder: Path) -> Path:
    """This interpreter with a library that lacks json, as python3-minimal's does."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = folder / "lib" / version
    library.mkdir(parents=True)
    for path in Path(sysconfig.get_path("stdlib")).iterdir():
        if path.name not in ("json", "site-packages"):
            (library / path.name).symlink_to(path)
    (folder / "bin").mkdir()
    real = Path(os.path.realpath(sys.executable))
    shutil.copy(real, folder / "bin" / "python3")
    shared = real.parent.parent / "lib"
    for path in shared.glob("libpython*"):
        (folder / "lib" / path.name).symlink_to(path)
    return folder / "bin" / "python3"


def test_python3_minimal_is_named(tmp_path: Path) -> None:
    python = interpreter_without_json(tmp_path)
    done = subprocess.run(argv(str(python)), input=b"", capture_output=True, timeout=30)
    line = done.stdout.decode()
    assert line.startswith(f"{REFUSAL.decode()}json {sys.version.split()[0]} ")
    assert line.endswith(f"{python}\n")


@pytest.mark.skipif(not OLD_PYTHONS, reason="no Python older than 3.10 here")
@pytest.mark.parametrize("python", OLD_PYTHONS, ids=lambda path: path.parts[-3])
def test_an_old_python_is_named(python: Path) -> None:
    done = subprocess.run(argv(str(python)), input=b"", capture_output=True, timeout=30)
    assert done.stdout.startswith(REFUSAL + b"python 3.")
    assert done.stdout.count(b"\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="root writes everywhere, others need not")
def test_a_full_or_read_only_disk_does_not_keep_the_agent_away(agents: Any, tmp_path: Path) -> None:
    # A file where the folder should be: makedirs fails for root too.
    (tmp_path / "blocked").write_text("")
    agent = agents(workdir=tmp_path / "blocked")
    assert agent.hello()["stored"] == "temporary"
    assert agent.call("exec", command=["true"])["exit_code"] == 0
    before = set(Path("/dev/shm").glob("dflashctl-*"))
    assert agent.close() == 0
    assert len(before - set(Path("/dev/shm").glob("dflashctl-*"))) == 1


def test_the_loader_reads_no_byte_too_many(workdir: Path) -> None:
    program = bundle()
    sent = header(program.digest, len(program.data), str(workdir)) + program.data
    tail = encode({"id": 1, "op": "ping"})
    done = subprocess.run(argv(sys.executable), input=sent + tail, capture_output=True, timeout=30)
    assert b'{"id":1,"ok":true' in done.stdout


def test_old_programs_go_but_never_one_in_use(agents: Any, workdir: Path) -> None:
    folder = workdir / "dflashctl/agent"
    folder.mkdir(parents=True)
    for number in range(KEEP + 3):
        path = folder / f"{number:064}.pyz"
        path.write_bytes(b"")
        os.utime(path, (number, number))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / f"{0:064}.pyz")], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        assert agents().close() == 0
        left = {name for name in programs(workdir) if "-" not in name}
        newest = {f"{number:064}.pyz" for number in range(4, KEEP + 3)}
        assert left == {f"{0:064}.pyz", f"{bundle().digest}.pyz", *newest}
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "rb")
fcntl.flock(file, fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(60)
"""


def test_the_second_start_runs_compiled_code(agents: Any, workdir: Path) -> None:
    assert agents().close() == 0
    compiled = f"{bundle().digest}-{sys.implementation.cache_tag}.pyz"
    assert compiled in programs(workdir)
    agent = agents(send_program=False)
    agent.hello()
    wrong = agent.error(agent.send("exec", command=["true"], cwd=7))
    assert wrong["kind"] == "request.invalid"


@pytest.mark.parametrize("workdir_text", ["relative", "/a\nb", "/a\0b", ""])
def test_a_workdir_that_cannot_be_one_line_is_refused(workdir_text: str) -> None:
    with pytest.raises(ValueError, match="not an absolute folder"):
        header("00", 0, workdir_text)


def test_a_workdir_may_have_any_other_name(agents: Any, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"o'dd \"\xff name")
    odd.mkdir()
    assert agents(workdir=odd).hello()["workdir"] == str(odd)


def test_the_same_sources_give_the_same_bytes() -> None:
    from orchestrator import agent_bundle

    again = agent_bundle._archive(agent_bundle._sources())
    assert again == bundle().data
    assert len(again) < 150_000


def test_the_loader_needs_no_quoting_beyond_one_pair() -> None:
    # It passes through ssh's remote shell: a single quote would treble in length.
    assert "'" not in LOADER
    assert len(LOADER) < 2200


def test_folders_are_private(agents: Any, workdir: Path) -> None:
    old = os.umask(0o022)
    try:
        agents().hello()
    finally:
        os.umask(old)
    for path in (workdir / "dflashctl", workdir / "dflashctl/agent"):
        assert path.stat().st_mode & 0o777 == 0o700
