"""Environments of real containers: frozen, compared, recorded by runs, and mended."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from laptop import Cli

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]


def test_a_container_does_not_differ_from_its_own_lock_file(cli: Cli, tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    cli("env", "freeze", "lab-201", "-o", lock, code=0)
    found = json.loads(lock.read_text())
    assert found["python"]["executable"].startswith("/srv/python/")
    assert cli("env", "diff", lock, "lab-201", code=0).stdout == "no difference\n"


def test_two_containers_are_compared_and_what_breaks_comes_first(cli: Cli) -> None:
    done = cli("env", "diff", "lab-201", "lab-200", "--json")
    found = json.loads(done.stdout)
    weights = [d["weight"] for d in found["differences"]]
    assert weights == sorted(weights, key=["breaks", "may matter", "harmless"].index)
    assert done.returncode == (1 if found["worst"] == "breaks" else 0)


def test_a_run_records_the_environment_it_began_with_and_no_secret(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("HF_TOKEN=hf_s3cr3t\n")
    words = ("--env", "NCCL_DEBUG=INFO", "--env", "MY_KEY=x", "--env-file", secrets)
    run_id = cli.json("launch", "lab-201", *words, "--", "sleep", "60", cwd=code)["run_id"]
    path = f"/workspace/dflashctl/runs/{run_id}/environment.json"
    for _ in range(100):
        if lab.pct("exec", 201, "--", "sh", "-c", f"test -e {path} && echo yes || true").strip():
            break
        time.sleep(0.1)
    assert cli("env", "diff", "lab-201", run_id, "--all", code=0).stdout.splitlines()[0] == (
        "may matter $NCCL_DEBUG: none → INFO"
    )
    text = lab.pct("exec", 201, "--", "cat", path)
    assert "hf_s3cr3t" not in text and "MY_KEY" not in text
    assert lab.pct("exec", 201, "--", "stat", "-c", "%a", path).strip() == "600"


def test_two_runs_are_compared_by_what_each_began_with(cli: Cli, code: Path) -> None:
    ids = []
    for level in ("INFO", "WARN"):
        words = ("--env", f"NCCL_DEBUG={level}", "--wait", "--", "sleep", "2")
        ids.append(cli("launch", "lab-201", *words, cwd=code, code=0).stdout.split()[0])
    found = json.loads(cli("env", "diff", *ids, "--json", code=0).stdout)
    changed = [(d["key"], d["before"], d["after"]) for d in found["differences"]]
    assert changed == [("$NCCL_DEBUG", "INFO", "WARN")]


def wheel(folder: Path, name: str, version: str) -> Path:
    """The smallest wheel that pip installs."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    rows = []
    for file, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{file},sha256={digest.decode()},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join(rows) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def index(lab: Lab, tmp_path: Path) -> Iterator[None]:
    """Container 201's pip looks for packages in a folder, which has one; what a test installs from
    there is gone afterwards."""
    made = wheel(tmp_path, "tinypackage", "1.2.3")
    lab.pct("exec", 201, "--", "mkdir", "-p", "/srv/wheels")
    put(lab, made.read_bytes(), f"/srv/wheels/{made.name}")
    put(lab, b"[global]\nno-index = true\nfind-links = /srv/wheels\n", "/etc/pip.conf")
    yield
    installed = "/srv/python/lib/python*/site-packages/*package*"
    gone = f"rm -r /srv/wheels /etc/pip.conf; rm -rf /etc/uv {installed}"
    lab.pct("exec", 201, "--", "sh", "-c", gone)


def put(lab: Lab, data: bytes, path: str) -> None:
    """`pct push` would look for the file on the lab's host, which has a /tmp of its own."""
    text = base64.b64encode(data).decode()
    lab.pct("exec", 201, "--", "sh", "-c", 'echo "$1" | base64 -d > "$2"', "sh", text, path)


@pytest.mark.usefixtures("index")
def test_sync_installs_what_the_lock_file_has_and_shows_it_first(cli: Cli, tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    cli("env", "freeze", "lab-201", "-o", lock, code=0)
    wanted = json.loads(lock.read_text())
    wanted["packages"]["tinypackage"] = "1.2.3"
    wanted["sources"].pop("tinypackage", None)
    lock.write_text(json.dumps(wanted))
    shown = cli("env", "sync", "lab-201", "--lock", lock, "--dry-run", code=0).stdout
    assert shown.endswith("tinypackage==1.2.3\n")
    assert cli("env", "diff", lock, "lab-201", "--json").stdout.count("tinypackage") == 1
    cli("env", "sync", "lab-201", "--lock", lock, code=0)
    assert cli("env", "diff", lock, "lab-201", code=0).stdout == "no difference\n"


@pytest.fixture
def uv(lab: Lab, index: None) -> Iterator[None]:
    """Container 201 has uv too, which takes no notice of pip's configuration."""
    tool = Path(sys.executable).with_name("uv")
    if not tool.exists():
        pytest.skip("uv is not beside this interpreter: pip install -e '.[dev]'")
    there = lab.files(201) / "usr/local/bin/uv"
    shutil.copy(tool, there)
    lab.pct("exec", 201, "--", "mkdir", "-p", "/etc/uv")
    put(lab, b"no-index = true\nfind-links = ['/srv/wheels']\n", "/etc/uv/uv.toml")
    yield
    there.unlink()


@pytest.mark.usefixtures("uv")
def test_where_uv_is_in_the_container_sync_goes_through_it(
    cli: Cli, lab: Lab, tmp_path: Path
) -> None:
    made = wheel(tmp_path, "uvpackage", "4.5.6")
    put(lab, made.read_bytes(), f"/srv/wheels/{made.name}")
    lock = tmp_path / "lock.json"
    cli("env", "freeze", "lab-201", "-o", lock, code=0)
    wanted = json.loads(lock.read_text())
    wanted["packages"]["uvpackage"] = "4.5.6"
    lock.write_text(json.dumps(wanted))
    shown = cli("env", "sync", "lab-201", "--lock", lock, "--dry-run", code=0).stdout
    assert shown.startswith("/usr/local/bin/uv pip install --python /srv/python/")
    cli("env", "sync", "lab-201", "--lock", lock, code=0)
    assert cli("env", "diff", lock, "lab-201", code=0).stdout == "no difference\n"


@pytest.mark.usefixtures("index")
def test_a_package_that_cannot_be_had_fails_with_the_installers_own_words(
    cli: Cli, tmp_path: Path
) -> None:
    lock = tmp_path / "lock.json"
    cli("env", "freeze", "lab-201", "-o", lock, code=0)
    wanted = json.loads(lock.read_text())
    wanted["packages"]["nowhere"] = "9"
    lock.write_text(json.dumps(wanted))
    done = cli("env", "sync", "lab-201", "--lock", lock, code=1)
    assert "nowhere==9" in done.stdout
    assert "its own words are above" in done.stderr
