"""A path that is not there is told with the nearest one that is, whichever option names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm_cli import dflashctl

from orchestrator.errors import UsageError
from orchestrator.laptop_path import did_you_mean
from orchestrator.orders import take_code
from orchestrator.paths import LaptopPaths


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With a folder ``configs`` that holds ``train.yaml``, and an inventory of one container."""
    project = tmp_path / "project"
    (project / "configs").mkdir(parents=True)
    (project / "configs/train.yaml").write_text("x: 1\n")
    (project / "inventory.yaml").write_text(
        "hosts: {h: {address: 127.0.0.1, port: 1}}\ncontainers: {c: {host: h, ct: 200}}\n"
    )
    return project


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("configs/trian.yaml", "configs/train.yaml"),
        ("config/train.yaml", "configs/train.yaml"),
        ("confgs/train.yml", "configs/train.yaml"),
        ("configs/../configs/tain.yaml", "configs/../configs/train.yaml"),
        ("configs/evaluate.py", None),
        ("elsewhere/train.yaml", None),
        ("configs/train.yaml/x", None),
    ],
)
def test_the_nearest_file_is_found_past_a_wrong_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, near: str | None
) -> None:
    monkeypatch.chdir(project)
    assert did_you_mean(Path(wrong)) == (f"; did you mean {near}?" if near else "")
    absolute = did_you_mean(project / wrong)
    assert absolute == (f"; did you mean {project / near}?" if near else "")


def test_a_folder_is_no_file_and_a_file_no_folder(project: Path) -> None:
    assert did_you_mean(project / "config") == ""
    assert did_you_mean(project / "config", folder=True) == f"; did you mean {project / 'configs'}?"
    assert did_you_mean(project / "configs/trian.yaml", folder=True) == ""


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "c", "--config", "configs/trian.yaml"),
        ("launch", "c", "--no-push", "--env-file", "configs/trian.yaml", "--", "true"),
        ("launch", "c", "--code", "config"),
        ("push", "c", "--code", "config"),
        ("play", "configs/trian.yaml"),
        ("env", "sync", "c", "--lock", "configs/trian.yaml"),
        ("diag", "--log", "configs/trian.yaml"),
        ("diag", "--from", "configs/trian.yaml"),
        ("diag", "--log", "configs/train.yaml", "--probes", "configs/trian.yaml"),
        ("ps", "--inventory", "configs/trian.yaml"),
    ],
)
def test_every_option_that_takes_a_path_offers_it(project: Path, words: tuple[str, ...]) -> None:
    variables = {
        "HOME": str(project.parent / "own"),
        "DFLASHCTL_INVENTORY": str(project / "inventory.yaml"),
    }
    done = dflashctl(words, cwd=project, variables=variables)
    assert done.returncode in {2, 5}, done.stderr
    near = "configs" if "--code" in words else "configs/train.yaml"
    assert f"did you mean {near}?" in done.stderr and "next: " in done.stderr


def test_a_config_that_is_named_from_the_folder_to_push_is_found_there(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    laptop = LaptopPaths({"HOME": str(project.parent)})
    with pytest.raises(
        UsageError, match=r"config train\.yaml: no such file; did you mean confi.*/tr"
    ):
        take_code(laptop, Path("configs"), "train.yaml")
