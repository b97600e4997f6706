"""Releases: whole or absent, sent once, verified, and no job can spoil another's code."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_peer import seeds

from orchestrator.agent import release_store
from orchestrator.agent.blobs import _SYNC_EARLY, BlobStore, _copy_all
from orchestrator.agent.manifest import Entry, dump
from orchestrator.paths import ContainerPaths

ODD = {
    os.fsencode("with space/it's.py"): b"1",
    os.fsencode("new\nline"): b"2",
    b"not-utf8-\xff\xfe/\x80.bin": b"3",
    os.fsencode("-rf"): b"4",
    os.fsencode("ünï/文"): b"5",
    b'quote"`$(touch oops)': b"6",
    b"twin a": b"same",
    b"twin b": b"same",
    b"empty": b"",
}


def entries_of(files: Mapping[bytes, bytes], *others: Entry) -> list[Entry]:
    made = [
        Entry("f", os.fsdecode(name), hashlib.sha256(data).hexdigest(), len(data))
        for name, data in files.items()
    ]
    return sorted([*made, *others], key=lambda entry: os.fsencode(entry.path))


class Pusher:
    """The laptop's side of a push."""

    def __init__(self, agent: Any, files: Mapping[bytes, bytes], *others: Entry) -> None:
        self.agent = agent
        self.files = files
        self.entries = entries_of(files, *others)
        self.begun = agent.stream("release.begin", dump(self.entries))
        self.answer = agent.result(self.begun)

    def blobs(self, agent: Any = None) -> int:
        """On ``agent``'s channel, or on that of the begin."""
        wanted = [self.entries[index] for index in self.answer["missing"]]
        data = b"".join(self.files[os.fsencode(entry.path)] for entry in wanted)
        names = [[entry.digest, entry.size] for entry in wanted]
        stamp = self.answer["stamp"]
        return int((agent or self.agent).stream("release.blobs", data, blobs=names, stamp=stamp))

    def commit(self, *after: int) -> dict[str, Any]:
        number = self.agent.send("release.commit", begin=self.begun, after=list(after))
        return dict(self.agent.result(number))

    def run(self) -> dict[str, Any]:
        return self.commit(self.blobs())


def push(agent: Any, files: Mapping[bytes, bytes], *others: Entry) -> dict[str, Any]:
    return Pusher(agent, files, *others).run()


def content(path: str) -> dict[bytes, bytes]:
    found = {}
    root = os.fsencode(path)
    for folder, _, names in os.walk(root):
        for name in names:
            full = os.path.join(folder, name)
            if not os.path.islink(full):
                found[os.path.relpath(full, root)] = Path(os.fsdecode(full)).read_bytes()
    return found


def test_every_kind_of_entry_arrives_as_it_was(agent: Any) -> None:
    program = Entry("f", "run.sh", hashlib.sha256(b"x").hexdigest(), 1, executable=True)
    others = [
        program,
        Entry("l", "link", target="run.sh"),
        Entry("l", "dangling", target=os.fsdecode(b"/no/\xff")),
        Entry("d", "empty folder"),
    ]
    pusher = Pusher(agent, {**ODD, b"twin x": b"x"}, *others)
    pusher.files = {**pusher.files, b"run.sh": b"x"}
    done = pusher.run()
    root = Path(done["path"])
    assert content(done["path"]) == {**ODD, b"twin x": b"x", b"run.sh": b"x"}
    assert os.access(root / "run.sh", os.X_OK) and not os.access(root / "twin x", os.X_OK)
    assert os.readlink(root / "link") == "run.sh"
    assert os.readlink(os.fsencode(root / "dangling")) == b"/no/\xff"
    assert list((root / "empty folder").iterdir()) == []


def test_only_what_changed_travels(agent: Any) -> None:
    files = {b"%d.py" % number: os.urandom(100) for number in range(50)}
    first = push(agent, files)
    files[b"7.py"] = b"changed"
    second = Pusher(agent, files)
    assert second.answer["bytes"] == len(b"changed")
    assert len(second.answer["missing"]) == 1
    done = second.run()
    assert content(done["path"]) == files
    assert content(first["path"])[b"7.py"] != b"changed"


def test_the_same_code_is_the_same_release(agent: Any) -> None:
    first = push(agent, ODD)
    again = Pusher(agent, ODD)
    nothing = {"release": first["release"], "present": True, "missing": [], "bytes": 0}
    assert again.answer == nothing | {"stamp": again.answer["stamp"]}
    assert again.commit()["existing"]


def test_deleted_files_do_not_linger_and_older_content_comes_back(agent: Any) -> None:
    push(agent, {b"a": b"new", b"gone": b"1"})
    done = push(agent, {b"a": b"old"})
    assert content(done["path"]) == {b"a": b"old"}


def test_a_whole_launch_needs_no_answer_in_between(agent: Any, workdir: Path) -> None:
    """begin, then everything else at once: two round trips."""
    pusher = Pusher(agent, {b"a": b"1"})
    blobs = pusher.blobs()
    commit = agent.send("release.commit", begin=pusher.begun, after=[blobs])
    manifest = ContainerPaths(str(workdir)).release_manifest(pusher.answer["release"])
    reading = agent.send("pull.read", path=manifest, after=[commit])
    assert agent.result(reading)["size"] == len(dump(pusher.entries))


@pytest.mark.parametrize(
    "spoil",
    [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"X" + data[1:]],
    ids=["short", "long", "changed"],
)
def test_blobs_that_do_not_verify_are_refused(agent: Any, spoil: Any) -> None:
    data = b"0123456789"
    digest = hashlib.sha256(data).hexdigest()
    bad = agent.stream("release.blobs", spoil(data), blobs=[[digest, len(data)]])
    assert agent.error(bad)["kind"] == "release.corrupt"


def test_a_commit_without_its_blobs_names_what_is_missing(agent: Any, workdir: Path) -> None:
    pusher = Pusher(agent, {b"a": b"1", b"b": b"2"})
    error = agent.error(agent.send("release.commit", begin=pusher.begun))
    assert error["kind"] == "release.missing"
    assert error["detail"]["indices"] == [0, 1]
    assert release_store.names(ContainerPaths(str(workdir))) == []


def test_a_hostile_manifest_leaves_nothing(agent: Any, workdir: Path) -> None:
    line = f'["f", "../../escape", "{"ab" * 32}", 1, 0]\n'.encode()
    assert agent.error(agent.stream("release.begin", line))["kind"] == "release.manifest"
    assert not (workdir / "dflashctl/releases").exists()


@pytest.mark.parametrize("age_s", [0, 3600])
def test_a_job_that_edits_its_files_in_place_spoils_no_other_release(
    agent: Any, age_s: int
) -> None:
    files = {b"shared.py": b"print('good')", b"a": b"1"}
    first = push(agent, files)
    # In place, through the same inode, as `sed -i` does not but an editor may.
    with Path(first["path"], "shared.py").open("r+b") as file:
        file.write(b"print('EVIL')")
    # Some editors, and rsync, set the time of a file to an older one.
    os.utime(file.name, (time.time() - age_s, time.time() - age_s))
    other = Pusher(agent, {**files, b"a": b"2"})
    blobs = other.blobs()
    error = agent.error(agent.send("release.commit", begin=other.begun, after=[blobs]))
    assert error["kind"] == "release.missing"
    done = push(agent, {**files, b"a": b"2"})
    assert content(done["path"])[b"shared.py"] == b"print('good')"


@pytest.mark.parametrize("spoilt", ["the release itself", "a blob of another"])
def test_a_file_that_a_job_copied_over_another_with_its_time_is_not_taken_for_it(
    agent: Any, spoilt: str
) -> None:
    """`cp -p configs/b.yaml config.yaml`, of one length: size and modification time are those of a
    file that was pushed."""
    files = {b"config.yaml": b"lr: 1e-4", b"configs/b.yaml": b"lr: 9e-4"}
    source = target = push(agent, files)["path"]
    if spoilt == "a blob of another":
        target = push(agent, {b"config.yaml": b"lr: 5e-4"})["path"]
        files = {b"config.yaml": b"lr: 5e-4", b"more": b""}
    subprocess.run(["cp", "-p", f"{source}/configs/b.yaml", f"{target}/config.yaml"], check=True)
    with pytest.raises(AssertionError, match=r"release\.missing"):
        push(agent, files)
    assert content(push(agent, files)["path"]) == files


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EXDEV])
def test_what_the_kernel_cannot_copy_is_copied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    data = random.Random(1).randbytes((2 << 20) + 5)
    (tmp_path / "a").write_bytes(data)

    def refuse(*given: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("wb") as target:
        assert _copy_all(source.fileno(), target.fileno()) == len(data)
    assert (tmp_path / "b").read_bytes() == data


@pytest.mark.parametrize("dirty", [0, 2 << 30])
def test_a_blob_that_cannot_be_brought_to_the_disk_fails_the_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dirty: int
) -> None:
    """Told by ``syncfs``, or beside somebody's checkpoint, for which it would wait."""
    data = random.Random(0).randbytes(_SYNC_EARLY)
    blob = (hashlib.sha256(data).hexdigest(), len(data))
    store = BlobStore(ContainerPaths(str(tmp_path)))
    monkeypatch.setattr("orchestrator.agent.files._dirty_memory", lambda: dirty)
    monkeypatch.setattr("orchestrator.agent.files._syncfs", lambda path: False)
    assert store.receive([blob], iter([data]), None) == len(data)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        store.receive([blob], iter([data]), None)


def test_releases_share_no_file(agent: Any) -> None:
    first = push(agent, {b"shared": b"1", b"a": b"1"})
    second = push(agent, {b"shared": b"1", b"a": b"2"})
    Path(second["path"], "shared").write_bytes(b"X")
    assert content(first["path"])[b"shared"] == b"1"
    third = push(agent, {b"shared": b"1", b"a": b"3"})
    assert content(third["path"])[b"shared"] == b"1"


@pytest.mark.parametrize("change", ["edit", "delete", "mode", "add"])
def test_an_altered_release_is_not_used_again(agent: Any, change: str) -> None:
    first = push(agent, {b"a": b"1", b"b": b"2"})
    path = Path(first["path"], "a")
    if change == "edit":
        path.write_bytes(b"9")
    elif change == "delete":
        path.unlink()
    elif change == "mode":
        path.chmod(0o755)
    else:
        Path(first["path"], "result.txt").write_text("mine")
    for attempt in range(2):
        try:
            again = push(agent, {b"a": b"1", b"b": b"2"})
        except AssertionError:
            assert attempt == 0 and change == "edit"
    assert again["release"] == f"{first['release']}-2"
    assert content(again["path"]) == {b"a": b"1", b"b": b"2"}


def test_byte_code_beside_the_sources_does_not_make_a_release_another(agent: Any) -> None:
    first = push(agent, {b"p/a.py": b"x = 1"})
    cache = Path(first["path"], "p/__pycache__")
    cache.mkdir()
    (cache / "a.cpython-311.pyc").write_bytes(b"")
    assert push(agent, {b"p/a.py": b"x = 1"})["release"] == first["release"]


def leftovers(workdir: Path) -> list[str]:
    base = workdir / "dflashctl"
    folders = [base / "releases", base / "blobs"]
    found = [path.name for folder in folders if folder.exists() for path in folder.iterdir()]
    return [name for name in found if name.startswith((".staging", ".in-", ".removed"))]


@pytest.mark.parametrize("seed", seeds(4, 200))
def test_a_push_cut_at_any_byte_leaves_the_old_release_and_nothing_half_made(
    agents: Any, workdir: Path, seed: int
) -> None:
    chance = random.Random(seed)
    old_files = {b"a": b"old", b"b": b"old too"}
    first = agents()
    old = push(first, old_files)
    first.close()
    new_files = {b"%d" % number: chance.randbytes(20_000) for number in range(60)}
    victim = agents()
    pusher = Pusher(victim, new_files)
    if seed % 2:
        # While the blobs travel.
        names = [[entry.digest, entry.size] for entry in pusher.entries]
        data = b"".join(new_files[os.fsencode(entry.path)] for entry in pusher.entries)
        victim.send("release.blobs", data[: chance.randrange(1 << 20)], blobs=names, more=True)
    else:
        # While the release is built.
        blobs = pusher.blobs()
        victim.result(blobs)
        victim.send("release.commit", begin=pusher.begun)
    time.sleep(chance.random() * 0.02)
    victim.process.kill()
    victim.process.wait()
    survivor = agents()
    releases = set(release_store.names(ContainerPaths(str(workdir))))
    assert old["release"] in releases
    assert content(old["path"]) == old_files
    for name in releases - {old["release"]}:
        assert content(str(workdir / "dflashctl/releases" / name)) == new_files
    done = push(survivor, new_files)
    assert content(done["path"]) == new_files
    assert leftovers(workdir) == []


def test_a_cut_push_goes_on_where_it_was(agents: Any) -> None:
    files = {b"%d" % number: os.urandom(10_000) for number in range(20)}
    victim = agents()
    pusher = Pusher(victim, files)
    names = [[entry.digest, entry.size] for entry in pusher.entries]
    data = b"".join(files[os.fsencode(entry.path)] for entry in pusher.entries)
    number = victim.send("release.blobs", data[:105_000], blobs=names, more=True)
    head, _ = victim.frames[number].get(timeout=30)
    assert head["ack"] == 105_000
    victim.close()
    again = Pusher(agents(), files)
    assert len(again.answer["missing"]) == 10


@pytest.mark.parametrize("touched", [False, True])
def test_what_came_on_another_channel_is_taken_unless_somebody_touched_it(
    agents: Any, workdir: Path, touched: bool
) -> None:
    one, two = agents(), agents()
    pushed = Pusher(one, {b"a": b"right"})
    two.result(pushed.blobs(two))
    if touched:
        (blob,) = (workdir / "dflashctl/blobs").glob("*/*")
        blob.write_bytes(b"wrong")
        error = one.error(one.send("release.commit", begin=pushed.begun))
        assert (error["kind"], error["detail"]["indices"]) == ("release.missing", [0])
        two.result(pushed.blobs(two))
    assert content(pushed.commit()["path"]) == {b"a": b"right"}


def test_two_people_push_the_same_code_at_once(agents: Any) -> None:
    files = {b"%d" % number: os.urandom(1000) for number in range(50)}
    one, two = agents(), agents()
    numbers = []
    for agent in (one, two):
        pusher = Pusher(agent, files)
        numbers.append(agent.send("release.commit", begin=pusher.begun, after=[pusher.blobs()]))
    first, second = one.result(numbers[0]), two.result(numbers[1])
    assert first["release"] == second["release"]
    assert content(first["path"]) == files


def test_a_commit_reads_no_blob_again_that_its_push_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(source: int) -> str:
        read.append(digest)
        return digest

    monkeypatch.setattr("orchestrator.agent.blobs._digest", counted)
    for stamp in (1, 2):
        data = b"%d" % stamp
        digest = hashlib.sha256(data).hexdigest()
        store = BlobStore(ContainerPaths(str(tmp_path)))
        store.receive([(digest, 1)], iter([data]), stamp)
        assert store.place(digest, 1, os.fsencode(tmp_path / digest), 0o644, 1)
    # Only that of another push.
    assert read == [hashlib.sha256(b"2").hexdigest()]


def test_a_blob_that_another_push_puts_in_its_place_while_it_is_linked_is_dressed_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two people push one script at once: it stays executable, and known by its time."""
    digest = hashlib.sha256(b"x").hexdigest()
    store, stamp = BlobStore(ContainerPaths(str(tmp_path))), 1_000_000_000
    store.receive([(digest, 1)], iter([b"x"]), stamp)
    link = os.link

    def late(source: str, target: bytes) -> None:
        store.receive([(digest, 1)], iter([b"x"]), 2 * stamp)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert store.place(digest, 1, os.fsencode(tmp_path / "run.sh"), 0o755, stamp)
    status = (tmp_path / "run.sh").stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o755, stamp)


def test_a_push_that_begins_does_not_clean_away_another_that_goes_on(agents: Any) -> None:
    one, two = agents(), agents()
    data = os.urandom(100)
    name = [[hashlib.sha256(data).hexdigest(), len(data)]]
    stored, begun = [], []
    for _ in range(60):
        stored.append(one.stream("release.blobs", data, blobs=name))
        begun.append(two.stream("release.begin", b""))
    assert all(one.result(number)["stored"] == 1 for number in stored)
    assert all(two.result(number)["missing"] == [] for number in begun)


def test_the_manifest_can_be_had_back(agent: Any, workdir: Path) -> None:
    done = push(agent, ODD)
    manifest = ContainerPaths(str(workdir)).release_manifest(done["release"])
    _, frames = agent.finish(agent.send("pull.read", path=manifest))
    assert b"".join(payload for _, payload in frames) == dump(entries_of(ODD))


@pytest.fixture
def small_disk(make_disk: Callable[[str], Path]) -> Path:
    return make_disk("1m")


def test_a_full_disk_is_named_and_leaves_the_old_release(agents: Any, small_disk: Path) -> None:
    agent = agents(workdir=small_disk)
    old = push(agent, {b"a": b"old"})
    pusher = Pusher(agent, {b"big": os.urandom(2_000_000)})
    error = agent.error(pusher.blobs())
    assert error["kind"] == "disk.full"
    assert leftovers(small_disk) == []
    assert content(old["path"]) == {b"a": b"old"}
    assert shutil.disk_usage(small_disk).free > 500_000
