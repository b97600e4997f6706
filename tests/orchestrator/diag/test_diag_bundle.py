"""Bundles: whole, without secrets, and read again; the offline command line."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from orchestrator.cli.diag import diag
from orchestrator.diag import Evidence, diagnose
from orchestrator.diag.bundle import read_bundle, write_bundle
from orchestrator.diag.cli import offline
from orchestrator.diag.redact import MARK, redact
from orchestrator.errors import NotFoundError, UsageError

CASES = Path(__file__).parent / "cases"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "export HF_TOKEN=abcdef0123456789",
        'api_key: "s3cr3t-v4lue"',
        '{"password": "s3cr3t-v4lue"}',
        "{'wandb_api_key': 's3cr3t-v4lue'}",
        "https://anna:s3cr3t-v4lue@host/repo.git",
        "Authorization: Bearer s3cr3t-v4lue-long",
        "--hub-token s3cr3t-v4lue",
        "-----BEGIN OPENSSH PRIVATE KEY-----\ns3cr3t-v4lue\n-----END OPENSSH PRIVATE KEY-----",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "AKIAABCDEFGHIJKLMNOP",
        "machine api.wandb.ai login user password s3cr3t-v4lue",
        "PVEAPIToken=root@pam!x=s3cr3t-v4lue",
        "webhook: https://hooks.example/s3cr3t-v4lue",
        "['train.py', '--hub-token', 's3cr3t-v4lue']",
        '["--wandb-api-key",\n "s3cr3t-v4lue"]',
    ],
)
def test_secrets_go(secret: str) -> None:
    out = redact(f"before\n{secret}\nafter")

    assert MARK in out
    for part in ("s3cr3t-v4lue", "abcdef0123456789", "hf_abc", "ghp_abc", "AKIAABC"):
        assert part not in out
    assert out.startswith("before\n") and out.endswith("\nafter")


@pytest.mark.parametrize(
    "plain",
    [
        "max_tokens=4096 tokens/s 15000",
        "mask_token_id: 151669",
        "pad_token = '<pad>'",
        "use_auth_token=False",
        "step 10/400 | 15.5k tok/s",
        "tokenizer ok",
        "password: ",
        "Special tokens have been added",
        "keyboard",
        'File "/w/a.py", line 3',
        "token=None",
        "['--mask-token', '<mask>', '--max-tokens', '4096']",
    ],
)
def test_what_is_no_secret_stays(plain: str) -> None:
    assert redact(plain) == plain


def test_addresses_go_on_request() -> None:
    assert redact("at 10.1.2.6 now") == "at 10.1.2.6 now"
    assert redact("at 10.1.2.6 now", addresses=True) == "at [address] now"


@pytest.mark.parametrize("name", ["run.tar.zst", "run.tar.gz"])
def test_a_bundle_says_the_same_when_it_is_opened_again(name: str, tmp_path: Path) -> None:
    if name.endswith("zst"):
        pytest.importorskip("zstandard")
    case = CASES / "disk-inodes"
    probes = json.loads((case / "probes.json").read_text())
    probes["env"] = "HF_TOKEN=hf_abcdefghijklmnopqrstuvwx"
    report = diagnose(Evidence.from_log(case / "log.txt", probes))
    path = tmp_path / name

    write_bundle(path, log=case / "log.txt", probes=probes, report=report, about={"run_id": "r"})
    held = read_bundle(path)

    assert held.manifest["run_id"] == "r"
    assert held.probes["df_i"] == probes["df_i"]
    assert "hf_abc" not in held.probes["env"]
    again = diagnose(Evidence.from_text(held.log, held.probes))
    assert again.as_dict() == report.as_dict()
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("pipx", [True, False])
def test_without_zstandard_the_way_to_it_fits_the_installation(
    pipx: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None makes the import fail as it does where the package is absent.
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    if pipx:
        (tmp_path / "pipx_metadata.json").touch()
    report = diagnose(Evidence.from_text("step 1\n"))
    with pytest.raises(UsageError) as caught:
        write_bundle(tmp_path / "x.tar.zst", log=None, probes={}, report=report)
    step = caught.value.next_step
    assert ("pipx inject dflashctl zstandard" in step) == pipx
    assert (f"{sys.executable} -m pip install zstandard" in step) != pipx
    write_bundle(tmp_path / "x.tar.gz", log=None, probes={}, report=report)
    assert read_bundle(tmp_path / "x.tar.gz").probes == {}


@pytest.mark.parametrize("name", ["x.zip", "x.tar.zst"])
def test_a_bundle_that_cannot_be_packed_is_refused_before_anything_is_reached(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match="zstandard"):
        diag(host="no-such-host", ct=200, bundle=tmp_path / name)


def test_a_folder_is_no_bundle_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    with pytest.raises(UsageError, match="folder"):
        diag(host="no-such-host", ct=200, bundle=folder)
    with pytest.raises(UsageError, match="folder"):
        write_bundle(folder, log=None, probes={}, report=diagnose(Evidence.from_text("step 1\n")))
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_members_are_plain_files_for_any_tool(tmp_path: Path) -> None:
    case = CASES / "disk-inodes"
    report = diagnose(Evidence.from_log(case / "log.txt"))
    write_bundle(tmp_path / "b.tar.gz", log=case / "log.txt", probes={}, report=report)

    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        assert archive.getnames() == [
            "manifest.json",
            "log.txt",
            "probes.json",
            "report.json",
            "report.txt",
        ]


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no archive at all")

    with pytest.raises(UsageError, match="cannot be read"):
        read_bundle(tmp_path / "x")


def test_offline_prints_json_and_exits_by_gravity(capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES / "gpu-oom-own"

    assert offline(case / "log.txt", as_json=True) == 1

    printed = json.loads(capsys.readouterr().out)
    assert printed["findings"][0]["code"] == "gpu.oom"
    assert printed["healthy"] is False


def test_offline_on_a_healthy_log(capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES / "flags-only"

    assert offline(case / "log.txt", case / "probes.json") == 0
    assert capsys.readouterr().out == "Nothing wrong was found.\n"


def test_offline_saves_and_reads_a_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES / "disk-inodes"
    path = tmp_path / "b.tar.gz"

    first = offline(case / "log.txt", case / "probes.json", save=path)
    said = capsys.readouterr().out
    second = offline(bundle=path)

    assert first == second == 1
    assert capsys.readouterr().out == said


def test_files_that_are_not_there_or_no_json(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[1]")

    with pytest.raises(NotFoundError):
        offline(tmp_path / "none.txt")
    with pytest.raises(UsageError, match="no JSON object"):
        offline(CASES / "flags-only" / "log.txt", tmp_path / "p.json")


def test_what_changed_since_the_run_before_is_told_from_a_bundle_too(tmp_path: Path) -> None:
    slow = [
        json.dumps({"time": i * 6.0, "step": i + 1, "steps": 400, "tokens_per_s": 5_000.0})
        for i in range(30)
    ]
    probes = {
        "metrics": "\n".join(slow),
        "predecessor": {"run": "r-0", "tok_s": 15_400.0},
        "changes": "since r-0:\nenvironment: triton 3.6.0 → 3.5.0 (it compiles the kernels)",
    }
    report = diagnose(Evidence.from_text("", probes))
    path = tmp_path / "run.tar.gz"
    write_bundle(path, log=None, probes=probes, report=report)

    held = read_bundle(path)
    again = diagnose(Evidence.from_text(held.log, held.probes))

    assert again == report
    assert again.findings[0].title.endswith("; since r-0 changed: environment")
    assert "triton 3.6.0 → 3.5.0" in str(again.findings[0].evidence)


def test_the_runs_own_records_are_kept_without_their_secrets(tmp_path: Path) -> None:
    path = tmp_path / "run.tar.gz"
    records = {
        "run.json": {"command": ["train", "--hub-token", "s3cr3t-v4lue"], "release": "abcd"},
        "environment.json": {"torch": {"version": "2.13.0"}},
    }
    write_bundle(
        path, log=None, probes={}, report=diagnose(Evidence.from_text("")), records=records
    )

    with tarfile.open(path) as archive:
        texts = {one.name: archive.extractfile(one).read().decode() for one in archive}  # type: ignore[union-attr]
    assert '"release": "abcd"' in texts["run.json"]
    assert "2.13.0" in texts["environment.json"]
    assert "s3cr3t-v4lue" not in "".join(texts.values())
    assert read_bundle(path).probes == {}
