"""Files in and out of containers, and commands inside them."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from laptop import Cli, new_name, tree, until

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]


@pytest.fixture
def odd(code: Path) -> Path:
    for name in ("a b", "it's", 'q"', "new\nline", "ünï", "-rf", "\udcff\udcfe", "$(id)", "*"):
        (code / name).write_text(name.encode(errors="surrogateescape").hex())
    (code / "run.sh").write_text("x")
    (code / "run.sh").chmod(0o755)
    (code / "link").symlink_to("missing/target")
    (code / "empty/inner").mkdir(parents=True)
    return code


def test_a_pushed_tree_is_the_same_there(cli: Cli, lab: Lab, odd: Path) -> None:
    answer = cli.json("push", "lab-201", cwd=odd)
    assert tree(lab.files(201) / answer["path"].lstrip("/")) == tree(odd)
    again = cli.json("push", "lab-201", cwd=odd)
    assert (again["release"], again["existing"]) == (answer["release"], True)


def test_only_what_is_missing_travels(cli: Cli, proxied: Proxy, code: Path) -> None:
    dice = random.Random(0)
    for n in range(20):
        (code / f"file{n}").write_bytes(dice.randbytes(50_000))
    cli("push", "lab-201", cwd=code, code=0)
    (code / "file3").write_bytes(dice.randbytes(50_000))
    before = proxied.traffic()["up"]
    cli("push", "lab-201", cwd=code, code=0)
    assert 50_000 < proxied.traffic()["up"] - before < 80_000


@pytest.fixture
def keeping(cli: Cli, lab: Lab, tmp_path: Path) -> Callable[[int], Path]:
    """``keeping(n)``: of container 201 the last n releases are kept, in a work folder of their own;
    returns where they lie."""

    def keep(count: int) -> Path:
        workdir = new_name("/workspace/keeping")
        known = yaml.safe_load(lab.inventory.read_text())
        known["containers"]["lab-201"] |= {"workdir": workdir, "keep_releases": count}
        cli.inventory = tmp_path / "keeping.yaml"
        cli.inventory.write_text(yaml.safe_dump(known))
        return lab.files(201) / workdir.lstrip("/") / "dflashctl/releases"

    return keep


@pytest.fixture
def push(cli: Cli, code: Path) -> Callable[[str], dict[str, Any]]:
    """Pushes the code with another text in it."""

    def change_and_push(text: str) -> dict[str, Any]:
        (code / "what").write_text(text)
        return cli.json("push", "lab-201", cwd=code)

    return change_and_push


def test_old_releases_go_but_those_that_a_run_or_its_results_need(
    cli: Cli, keeping: Callable[[int], Path], push: Callable[[str], dict[str, Any]], code: Path
) -> None:
    releases = keeping(2)
    (code / "what").write_text("lived in")
    run_id = cli.json("launch", "lab-201", "--", "sleep", "600", cwd=code)["run_id"]
    (lived_in,) = (path.stem for path in releases.glob("*.json"))
    written, plain = push("written into"), push("plain")
    (releases / written["release"] / "results.csv").write_text("dear")
    assert [push(text)["removed"] for text in "xy"] == [[], [plain["release"]]]
    assert (releases / lived_in / "what").read_text() == "lived in"
    assert (releases / written["release"] / "results.csv").read_text() == "dear"
    cli("stop", run_id, code=0)
    (code / "what").write_text("launched")
    # Nobody waits for it.
    cli("launch", "lab-201", "--wait", "--", "true", cwd=code, code=0)
    until(lambda: not (releases / lived_in).exists())
    assert (releases / written["release"]).exists()


def test_an_old_release_that_cannot_be_removed_fails_no_push(
    cli: Cli,
    lab: Lab,
    keeping: Callable[[int], Path],
    push: Callable[[str], dict[str, Any]],
    code: Path,
) -> None:
    """On one stands a mount, in the other too, somewhere below."""
    releases = keeping(1)
    (code / "scratch").mkdir()
    first = push("first")
    lab.pct("exec", 201, "--", "mount", "--bind", first["path"], first["path"])
    busy = {"path": first["path"], "why": "Device or resource busy"}
    second = push("second")
    assert (second["removed"], second["not_removed"]) == ([], [busy])
    lab.pct("exec", 201, "--", "mount", "-t", "tmpfs", "none", f"{second['path']}/scratch")
    third = push("third")
    assert (third["removed"], third["not_removed"]) == ([second["release"]], [busy])
    # Its files go after the answer, and what stays of them the next push tells.
    until(lambda: [path.name for path in releases.glob(".removed-*/*")] == ["scratch"])

    pushed = cli("push", "lab-201", cwd=code)

    assert " was there already on lab-201" in pushed.stdout
    (left,) = releases.glob(".removed-*")
    hidden = first["path"].replace(first["release"], left.name)
    for path in (first["path"], hidden):
        assert f"the old {path} could not be removed: Device or resource busy" in pushed.stderr
        assert f"dflashctl exec lab-201 -- ls -laR {path}" in pushed.stderr
    lab.pct("exec", 201, "--", "umount", first["path"], f"{hidden}/scratch")
    assert cli.json("push", "lab-201", cwd=code)["removed"] == [first["release"]]
    until(lambda: not [*releases.glob(".removed-*")])


@pytest.fixture
def run_id(cli: Cli, code: Path) -> str:
    """A finished run with two checkpoints."""
    (code / "start_training.sh").write_text(
        "mkdir -p $DFLASH_RUN_DIR/checkpoints/step-1 $DFLASH_RUN_DIR/checkpoints/step-2\n"
        "for n in 1 2; do\n"
        "  head -c 3000000 /dev/urandom > $DFLASH_RUN_DIR/checkpoints/step-$n/weights\n"
        "done\n"
        "ln -s /etc/passwd $DFLASH_RUN_DIR/checkpoints/step-2/outside\n"
        "ln -s weights $DFLASH_RUN_DIR/checkpoints/step-2/inside\n"
        "echo saved\n"
    )
    done = cli("launch", "lab-201", "--env", "PASSWORD=hush", "--wait", cwd=code, code=0)
    return done.stdout.splitlines()[0]


def same(lab: Lab, run_id: str, path: str, here: Path) -> bool:
    there = lab.files(201) / f"workspace/dflashctl/runs/{run_id}" / path
    return there.read_bytes() == (here / path).read_bytes()


def test_a_pull_brings_logs_and_records_and_no_secrets(
    cli: Cli, lab: Lab, run_id: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    cli("pull", run_id, "--all", "--to", out, code=0)
    assert not (out / ".gitignore").exists()
    for path in ("train.log", "run.json", "exit.json", "checkpoints/step-2/weights"):
        assert same(lab, run_id, path, out)
    assert not (out / "start.json").exists()
    for path in out.rglob("*"):
        assert not path.is_file() or b"hush" not in path.read_bytes(), path
    assert (out / "checkpoints/step-2/inside").readlink() == Path("weights")
    assert not (out / "checkpoints/step-2/outside").is_symlink()
    assert not (out / ".dflashctl-pull").exists()
    again = cli.json("pull", run_id, "--all", "--to", out)
    assert again["files"] == 0 and again["unchanged"] > 4


def test_a_folder_with_ignore_rules_of_its_own_is_not_pushed_back(
    cli: Cli, lab: Lab, code: Path
) -> None:
    there = lab.files(201) / "workspace/corpus"
    (there / "sub").mkdir(parents=True, exist_ok=True)
    (there / ".gitignore").write_text("*.tmp\n")
    (there / "sub/.gitignore").write_text("!*\n")
    (there / "sub/answers.jsonl").write_text("{}")
    (code / "train.py").write_text("")
    cli("launch", "lab-201", "--wait", "--", "true", cwd=code, code=0)
    for _ in range(2):
        told = cli("pull", "--path", "/workspace/corpus", "--to", "corpus", cwd=code, code=0)
        assert "left out .gitignore" in told.stderr
        assert (code / "corpus/sub/.gitignore").read_text() == "!*\n"
    for _ in ("plain", "git"):
        assert cli.json("push", "lab-201", "--dry-run", cwd=code)["paths"] == ["train.py"]
        subprocess.run(["git", "init", "-q"], cwd=code, check=True)
    (code / "mine").mkdir()
    cli("pull", "--path", "/workspace/corpus", "--to", "mine", cwd=code, code=0)
    assert (code / "mine/.gitignore").read_text() == "*.tmp\n"


def test_what_a_pull_brought_is_not_pushed_by_the_next_launch(
    cli: Cli, run_id: str, code: Path
) -> None:
    """Wherever it made a folder for it; in one that was there nothing but the run's files comes."""
    for to in ((), ("--to", "results/best")):
        cli("pull", run_id, "--all", *to, cwd=code, code=0)
    for folder in (code / run_id, code / "results/best"):
        assert (folder / "checkpoints/step-2/weights").is_file()
    for _ in ("plain", "git"):
        paths = cli.json("push", "lab-201", "--dry-run", cwd=code)["paths"]
        assert paths == ["start_training.sh"]
        subprocess.run(["git", "init", "-q"], cwd=code, check=True)


def test_one_path_alone(cli: Cli, lab: Lab, run_id: str, tmp_path: Path) -> None:
    cli("pull", run_id, "--path", "checkpoints/step-1/weights", "--to", tmp_path / "w", code=0)
    assert (tmp_path / "w/weights").stat().st_size == 3_000_000
    cli("pull", run_id, "--path", "/etc/hostname", "--to", tmp_path / "h", code=0)
    assert (tmp_path / "h/hostname").exists()
    assert "/no/such" in cli("pull", run_id, "--path", "/no/such", code=5).stderr


def test_without_more_words_the_newest_and_the_best_checkpoint_come(
    cli: Cli, lab: Lab, run_id: str, tmp_path: Path
) -> None:
    there = lab.files(201) / f"workspace/dflashctl/runs/{run_id}/checkpoints"
    shutil.copytree(there / "step-1", there / "step-0")
    (there / "best").symlink_to("step-1")
    out = tmp_path / "out"
    cli("pull", run_id, "--to", out, code=0)
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-1", "step-2", "best"}
    assert same(lab, run_id, "checkpoints/best/weights", out)
    cli("pull", run_id, "--path", "checkpoints/best", "--to", tmp_path / "served", code=0)
    assert (tmp_path / "served/weights").stat().st_size == 3_000_000


def test_a_link_best_that_leads_nowhere_is_left_out(
    cli: Cli, lab: Lab, run_id: str, tmp_path: Path
) -> None:
    there = lab.files(201) / f"workspace/dflashctl/runs/{run_id}/checkpoints"
    (there / "best").symlink_to("/etc")
    cli("pull", run_id, "--to", tmp_path / "out", code=0)
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["step-2"]


def test_a_run_that_writes_all_the_time_is_pulled_all_the_same(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    words = ("launch", "lab-201", "--", "sh", "-c", "while :; do seq 1000; sleep 0.01; done")
    run_id = cli.json(*words, cwd=code)["run_id"]
    for _ in range(3):
        cli("pull", run_id, "--to", tmp_path / "out", code=0)
    got = (tmp_path / "out/train.log").read_bytes()
    there = lab.files(201) / f"workspace/dflashctl/runs/{run_id}/train.log"
    assert got and there.read_bytes().startswith(got)


# Commands


def test_a_commands_streams_and_exit_code_are_its_own(cli: Cli) -> None:
    done = cli("exec", "lab-201", "--", "sh", "-c", "echo out; echo err >&2; exit 7", code=7)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert cli("exec", "lab-201", "--", "sh", "-c", "kill -9 $$").returncode == 137
    found = cli.json("exec", "lab-201", "--", "echo", "hi")
    assert (found["exit_code"], found["stdout"], found["ct"]) == (0, "hi\n", 201)


def test_input_that_is_not_handed_on_is_told(cli: Cli, tmp_path: Path) -> None:
    """It stays for whoever it was meant for: a `while read` loop goes on."""
    line = f"{sys.executable} -m orchestrator.cli exec lab-201"
    words = tmp_path / "words"
    words.write_text("one\ntwo\n")
    for script, got, rest, notices in (
        (f"echo one | {{ {line} -- cat; cat; }}", "", "one\n", 1),
        (f"echo one | {line} -i -- cat", "one\n", "", 0),
        (f"{line} -- cat < {words}", "", "", 1),
        (f"{line} -- cat < /dev/null", "", "", 0),
        (f": | {line} -- cat", "", "", 0),
    ):
        done = subprocess.run(
            ["sh", "-c", script],
            env=cli.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == got + rest, script
        assert done.stderr.count("the command got no input; exec -i hands it on") == notices, script


def test_ten_megabytes_on_both_streams_at_once(cli: Cli) -> None:
    flood = "head -c 10000000 /dev/zero & head -c 10000000 /dev/zero >&2; wait"
    done = cli("exec", "lab-201", "--", "sh", "-c", flood, code=0)
    assert len(done.stdout) == len(done.stderr) == 10_000_000


def test_a_command_that_takes_too_long_is_ended(cli: Cli, lab: Lab) -> None:
    done = cli("exec", "lab-201", "--timeout", "1s", "--", "sleep", "77")
    assert done.returncode == 143 and "ended when its time was over" in done.stderr
    assert "77" not in lab.pct("exec", 201, "--", "ps", "axww")
