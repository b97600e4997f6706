"""What a push takes from a folder, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from orchestrator import release as releases
from orchestrator import snapshot, transfer
from orchestrator.errors import RefusedError, UsageError
from orchestrator.paths import LaptopPaths
from orchestrator.release import Release
from orchestrator.snapshot import Root


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def laptop(tmp_path: Path) -> LaptopPaths:
    return LaptopPaths({"HOME": str(tmp_path / "home")})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "code"
    path.mkdir()
    return path


@pytest.fixture
def repository(folder: Path) -> Path:
    git(folder, "init", "-q", "-b", "main")
    (folder / ".gitignore").write_text("*.log\nout/\n")
    (folder / "a.py").write_text("a")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def build(path: Path, laptop: LaptopPaths, config: Path | None = None) -> Release:
    return releases.build(snapshot.find_root(path, path), laptop, config)


def listed(release: Release) -> dict[str, str]:
    return {entry.path: entry.line[0] for entry in release.entries}


@pytest.fixture(params=["git", "plain"])
def tree(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The same files as a repository and as a plain folder: a push takes the same from both."""
    if request.param == "git":
        git(folder, "init", "-q")
    return folder


def test_ignored_files_stay_and_untracked_ones_come(tree: Path, laptop: LaptopPaths) -> None:
    (tree / ".gitignore").write_text("*.log\nout/\n!keep.log\n")
    (tree / "sub").mkdir()
    (tree / "sub/.gitignore").write_text("secret*\n!secret-not\n")
    for name in ("a.py", "x.log", "keep.log", "sub/secret1", "sub/secret-not", "sub/b.log"):
        (tree / name).write_text(name)
    (tree / "out").mkdir()
    (tree / "out/big").write_text("x")
    assert set(listed(build(tree, laptop))) == {
        *(".gitignore", "a.py", "keep.log", "sub/.gitignore", "sub/secret-not")
    }


def test_dflashignore_leaves_out_what_git_keeps(tree: Path, laptop: LaptopPaths) -> None:
    (tree / ".dflashignore").write_text("/data/\n*.bin\n")
    (tree / "data").mkdir()
    for name in ("data/x", "w.bin", "a.py"):
        (tree / name).write_text("x")
    assert set(listed(build(tree, laptop))) == {".dflashignore", "a.py"}


def test_what_was_pulled_is_not_pushed_back(tree: Path, laptop: LaptopPaths) -> None:
    (tree / "train.py").write_text("")
    pulled = tree / "results" / "run-20260101-000000-00aa"
    transfer.ignore_itself(pulled)
    (pulled / "checkpoints/step-3").mkdir(parents=True)
    (pulled / "checkpoints/step-3/model.safetensors").write_bytes(b"x")
    (pulled / "stacks").mkdir()
    (pulled / "train.log").write_text("")
    assert listed(build(tree, laptop)) == {"train.py": "f"}


def test_a_pull_leaves_an_ignore_file_that_is_there_alone(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.bin\n")
    transfer.ignore_itself(tmp_path)
    assert (tmp_path / ".gitignore").read_text() == "*.bin\n"


def test_a_path_too_long_for_a_container_is_refused_by_its_name(
    tree: Path, laptop: LaptopPaths
) -> None:
    deep = tree / "first" / "/".join(["d" * 200] * 15)
    deep.mkdir(parents=True)
    (deep / "last.py").write_text("x")
    with pytest.raises(
        RefusedError, match=r"first/.*/last\.py is too long to push: 3028 bytes"
    ) as e:
        build(tree, laptop)
    assert e.value.exit_code == 4 and ".dflashignore" in e.value.next_step
    (tree / ".dflashignore").write_text("/first/\n")
    assert set(listed(build(tree, laptop))) == {".dflashignore"}


def test_so_is_a_link_to_one(tree: Path, laptop: LaptopPaths) -> None:
    (tree / "link").symlink_to("x" * 3001)
    with pytest.raises(RefusedError, match="the target of link is too long to push: 3001 bytes"):
        build(tree, laptop)


def test_odd_names_links_modes_and_empty_folders_survive(tree: Path, laptop: LaptopPaths) -> None:
    names = ["a b", "it's", 'q"', "new\nline", "ünï", "-rf", "\udcff\udcfe", "*"]
    for name in names:
        (tree / name).write_text("x")
    (tree / "run.sh").write_text("x")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("missing/target")
    (tree / "empty/inner").mkdir(parents=True)
    release = build(tree, laptop)
    lines = [json.loads(line) for line in release.manifest.splitlines()]
    assert {line[1] for line in lines} == {*names, "run.sh", "link", "empty/inner"}
    by_path = {line[1]: line for line in lines}
    assert by_path["run.sh"][4] == 1 and by_path["a b"][4] == 0
    assert by_path["link"] == ["l", "link", "missing/target"]
    assert by_path["empty/inner"] == ["d", "empty/inner"]
    assert [line[1] for line in lines] == sorted((line[1] for line in lines), key=os.fsencode)


def test_pipes_and_sockets_are_no_code(tree: Path, laptop: LaptopPaths) -> None:
    os.mkfifo(tree / "pipe")
    (tree / "a").write_text("x")
    assert set(listed(build(tree, laptop))) == {"a"}


def test_a_deleted_file_and_a_submodules_files(repository: Path, laptop: LaptopPaths) -> None:
    (repository / "a.py").unlink()
    inner = repository / "vendored"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "v.py").write_text("v")
    assert set(listed(build(repository, laptop))) == {".gitignore", "vendored/v.py"}


def test_the_whole_work_tree_is_pushed_from_any_folder_below_it(repository: Path) -> None:
    below = repository / "deep"
    below.mkdir()
    assert snapshot.find_root(None, below) == Root(repository, True)


def test_a_folder_that_git_ignores_is_pushed_as_a_plain_one(repository: Path) -> None:
    out = repository / "out"
    out.mkdir()
    assert snapshot.find_root(out, repository) == Root(out, False)


@pytest.mark.parametrize("where", ["/", "~"])
def test_a_home_folder_is_no_project(where: str) -> None:
    with pytest.raises(UsageError, match="no project folder"):
        snapshot.find_root(None, Path(where).expanduser())


def test_nor_is_what_holds_a_home_folder_or_the_work_tree_of_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "homes/me"
    project = home / "project"
    project.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(UsageError, match="no project folder"):
        snapshot.find_root(None, tmp_path / "homes")
    subprocess.run(["git", "init", "-q", home], check=True)
    with pytest.raises(UsageError, match="no project folder"):
        snapshot.find_root(None, home)
    assert snapshot.find_root(None, project) == Root(project, True)
    assert snapshot.find_root(home, project).path == home  # whoever names it means it


@pytest.mark.parametrize("git", [False, True])
def test_our_own_folders_and_virtual_environments_stay(tmp_path: Path, git: bool) -> None:
    laptop = LaptopPaths({"HOME": str(tmp_path)})
    for path in (
        *(laptop.inventory, laptop.ways, laptop.run("r1"), tmp_path / ".cache/other"),
        *(tmp_path / "env/pyvenv.cfg", tmp_path / "env/lib/torch.so", tmp_path / "environ.py"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    if git:
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
    release = releases.build(snapshot.find_root(tmp_path, tmp_path), laptop)
    assert [entry.path for entry in release.entries] == [".cache/other", "environ.py"]


def test_gigabytes_are_pushed_only_from_a_folder_that_was_named(
    tmp_path: Path, laptop: LaptopPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    (code / "data").mkdir(parents=True)
    (code / "train.py").write_text("x")
    with (code / "data/tokens.bin").open("wb") as stream:
        stream.truncate(snapshot.MOST_BYTES)  # a hole: it takes no room
    with pytest.raises(UsageError, match=r"2 files, 2\.0 GB.*data/ 2\.0 GB") as raised:
        snapshot.collect(snapshot.find_root(None, code))
    assert ".dflashignore" in raised.value.next_step
    assert f"--code {code}" in raised.value.next_step
    assert len(snapshot.collect(snapshot.find_root(code, code))) == 2
    (code / ".dflashignore").write_text("data/\n")
    assert len(snapshot.collect(snapshot.find_root(None, code))) == 2
    monkeypatch.setattr(snapshot, "MOST_FILES", 1)
    with pytest.raises(UsageError, match="1 files"):
        snapshot.collect(snapshot.find_root(None, code))


def test_commit_and_uncommitted_changes_are_recorded(repository: Path, laptop: LaptopPaths) -> None:
    clean = build(repository, laptop).git
    assert clean is not None and clean.commit and clean.branch == "main"
    assert not clean.dirty and clean.diff == b""
    (repository / "a.py").write_text("changed")
    dirty = build(repository, laptop).git
    assert dirty is not None and dirty.dirty
    assert b"+changed" in dirty.diff


def test_a_huge_diff_is_cut(repository: Path, laptop: LaptopPaths) -> None:
    (repository / "a.py").write_text("long line\n" * 100_000)
    state = build(repository, laptop).git
    assert state is not None
    assert len(state.diff) < snapshot.DIFF_LIMIT + 100
    assert b"[cut:" in state.diff


def test_the_same_content_has_the_same_id_wherever_it_lies(
    tmp_path: Path, laptop: LaptopPaths
) -> None:
    ids = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("x")
        ids.add(build(tmp_path / name, laptop).id)
    assert len(ids) == 1


def test_older_times_after_a_switch_of_branches_are_seen(
    repository: Path, laptop: LaptopPaths
) -> None:
    path = repository / "a.py"
    first = build(repository, laptop).id
    os.utime(path, (1000, 1000))
    assert build(repository, laptop).id == first
    path.write_text("b")
    os.utime(path, (500, 500))
    assert build(repository, laptop).id != first


def test_the_cache_answers_only_for_the_very_same_file(
    folder: Path, laptop: LaptopPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator import digests

    # As if the files had been there for long: young ones are never remembered.
    monkeypatch.setattr(digests, "YOUNG_NS", -1)
    (folder / "a").write_text("one")
    first = build(folder, laptop)
    assert laptop.digests.exists()
    assert laptop.digests.stat().st_mode & 0o777 == 0o600
    stat = (folder / "a").stat()
    (folder / "a").write_text("two")
    os.utime(folder / "a", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert build(folder, laptop).id != first.id


# The trainer beside a config


def test_a_config_takes_the_trainer_along(folder: Path, laptop: LaptopPaths) -> None:
    (folder / "config.yaml").write_text("x: 1")
    release = build(folder, laptop, folder / "config.yaml")
    paths = listed(release)
    assert "trainer/telemetry.py" in paths and "config.yaml" in paths
    assert not [path for path in paths if "__pycache__" in path]


def test_a_config_from_elsewhere_comes_along(
    folder: Path, tmp_path: Path, laptop: LaptopPaths
) -> None:
    (folder / "a").write_text("x")
    config = tmp_path / "mine.yaml"
    config.write_text("x: 1")
    assert ".dflashctl/mine.yaml" in listed(build(folder, laptop, config))


@pytest.mark.parametrize("name", ["trainer/x.py", "trainer.py"])
def test_a_users_own_trainer_beside_a_config_is_refused(
    folder: Path, laptop: LaptopPaths, name: str
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    config = folder / "config.yaml"
    config.write_text("x: 1")
    with pytest.raises(UsageError, match="of its own"):
        build(folder, laptop, config)
    assert name in listed(build(folder, laptop))
