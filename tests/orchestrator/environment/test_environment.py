"""What the collector tells, which differences break a run, and what is installed to mend them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.environment import collector
from orchestrator.environment.compare import compare, faults, numbers, worst
from orchestrator.environment.lock import Environment, parse, read_lock
from orchestrator.environment.remote import IN_BACKGROUND, collector_argv
from orchestrator.environment.sync import plan
from orchestrator.errors import NotFoundError, RefusedError, UsageError

SOURCE = Path(collector.__file__).read_text(encoding="utf-8")


def environment(**changes: Any) -> Environment:
    base: dict[str, Any] = {
        "python": {"version": "3.11.2", "executable": "/venv/bin/python", "virtual": True},
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0"},
        "driver": {"version": "580.95.05", "nvidia_smi": "/usr/bin/nvidia-smi"},
        "gpus": [{"name": "NVIDIA H200"}] * 8,
        "packages": {
            "torch": "2.11.0+cu130",
            "transformers": "5.24.0",
            "safetensors": "0.6.0",
            "numpy": "2.1.0",
            "pydantic": "2.11.0",
            "rich": "13.9.0",
        },
        "tools": {"uv": "/usr/bin/uv", "pip": "25.0"},
        "caches": {"inductor": {"path": "/tmp/torchinductor_root", "files": 900}},
        "variables": {"OMP_NUM_THREADS": "8"},
        "system": {"machine": "x86_64", "libc": "glibc 2.36", "kernel": "6.8"},
    }
    return Environment.model_validate(base | changes)


def packages(**changes: str | None) -> dict[str, str]:
    merged: dict[str, str | None] = dict(environment().packages) | changes
    return {name: version for name, version in merged.items() if version is not None}


def collected(variables: dict[str, str], *arguments: str) -> Environment:
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", **variables},
        capture_output=True,
        check=True,
    )
    return parse(done.stdout, "the collector")


def test_the_collector_runs_alone_and_tells_this_interpreters_packages() -> None:
    found = collected({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_secret", "MY_SECRETS": "x"})
    assert found.python.version == ".".join(map(str, sys.version_info[:3]))
    assert found.packages["pydantic"]
    assert found.variables["NCCL_DEBUG"] == "INFO"
    assert found.variables["HF_TOKEN"] == "(set)"
    assert "MY_SECRETS" not in found.variables
    assert "hf_secret" not in found.lock_text()


def test_in_the_background_it_writes_a_private_file_by_rename(tmp_path: Path) -> None:
    target = tmp_path / "environment.json"
    subprocess.run([*IN_BACKGROUND, *collector_argv(sys.executable, str(target))], check=True)
    deadline = time.monotonic() + 60
    while not target.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert read_lock(target).python.executable
    assert target.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["environment.json"]


def test_it_imports_only_the_standard_library_of_python_3_10() -> None:
    compile(SOURCE, "collector", "exec")
    imported = {
        line.split()[1].partition(".")[0]
        for line in SOURCE.splitlines()
        if line.strip().startswith(("import ", "from "))
    }
    assert imported <= sys.stdlib_module_names


def test_a_lock_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(environment().lock_text())
    assert read_lock(path) == environment()
    assert compare(read_lock(path), environment()) == []


def test_a_file_that_is_no_lock_file_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"lock file .* does not exist"):
        read_lock(tmp_path / "none")
    with pytest.raises(UsageError, match=r"x is no environment: python: Field required"):
        parse("{}", "x")
    with pytest.raises(UsageError, match="not JSON"):
        parse("[", "x")


@pytest.mark.parametrize(
    ("changes", "key", "weight"),
    [
        ({"python": {"version": "3.12.1"}}, "python", "breaks"),
        ({"python": {"version": "3.11.9"}}, "python", "harmless"),
        ({"torch": {"version": "2.13.0+cu130", "cuda": "13.0"}}, "torch", "breaks"),
        ({"torch": {"version": "2.11.1+cu130", "cuda": "13.0"}}, "torch", "may matter"),
        ({"torch": {"version": "2.11.0+cu126", "cuda": "12.6"}}, "torch CUDA", "breaks"),
        ({"torch": {"version": "2.11.0+cpu", "cuda": None}}, "torch build", "breaks"),
        ({"torch": None}, "torch", "breaks"),
        ({"driver": None}, "driver", "breaks"),
        ({"driver": {"version": "550.54.14"}}, "driver", "breaks"),
        ({"driver": {"version": "580.95.05"}}, "nvidia-smi", "may matter"),
        ({"driver": {"version": "580.65.06", "nvidia_smi": "/x"}}, "driver", "harmless"),
        ({"gpus": [{"name": "NVIDIA H100"}] * 8}, "GPUs", "may matter"),
        ({"gpus": []}, "GPUs", "breaks"),
        ({"packages": packages(transformers=None)}, "transformers", "breaks"),
        ({"packages": packages(transformers="4.57.0")}, "transformers", "breaks"),
        ({"packages": packages(transformers="5.23.0")}, "transformers", "may matter"),
        ({"packages": packages(rich="14.0")}, "rich", "harmless"),
        ({"caches": {"inductor": {"path": "/tmp/t"}}}, "inductor cache", "may matter"),
        ({"variables": {}}, "$OMP_NUM_THREADS", "may matter"),
        ({"variables": {"OMP_NUM_THREADS": "8", "LANG": "C"}}, "$LANG", "harmless"),
        ({"system": {"machine": "aarch64", "libc": "glibc 2.36"}}, "machine", "breaks"),
        ({"system": {"machine": "x86_64", "libc": "glibc 2.31"}}, "libc", "may matter"),
    ],
)
def test_each_difference_has_its_weight(changes: dict[str, Any], key: str, weight: str) -> None:
    found = [d for d in compare(environment(), environment(**changes)) if d.key == key]
    assert worst(found) == weight
    assert all(d.why for d in found)


def test_a_driver_too_old_for_torchs_cuda_is_named_with_the_one_it_needs() -> None:
    old = environment(driver={"version": "550.54.14", "nvidia_smi": "/x"})
    why = "torch 2.11.0+cu130 is built for CUDA 13.0, which needs a driver from 580.65.6 on"
    assert [d.why for d in faults(old)] == [why]
    assert why in [d.why for d in compare(environment(), old)]


def test_what_is_wrong_in_both_alike_is_no_difference() -> None:
    bare = environment(torch=None)
    assert compare(bare, bare) == []


def test_differing_nccl_breaks_because_nodes_hang() -> None:
    one, other = (
        environment(packages=packages() | {"nvidia-nccl-cu13": v}) for v in ("2.27.3", "2.28.9")
    )
    assert worst(compare(one, other)) == "breaks"


def test_the_heaviest_comes_first() -> None:
    found = compare(
        environment(), environment(torch=None, variables={}, packages=packages(rich="1"))
    )
    weights = [d.weight for d in found]
    assert weights == sorted(weights, key=["breaks", "may matter", "harmless"].index)
    assert worst([]) is None


@given(st.text())
def test_any_version_text_has_numbers(text: str) -> None:
    assert all(isinstance(part, int) for part in numbers(text))
    assert numbers("580.65.06") < numbers("580.95")


def test_sync_installs_exactly_what_differs_through_uv() -> None:
    now = environment(packages=packages(transformers="4.57.0", numpy=None, rich="14.0"))
    assert plan(environment(), now).commands == [
        [
            *("/usr/bin/uv", "pip", "install", "--python", "/venv/bin/python"),
            *("numpy==2.1.0", "rich==13.9.0", "transformers==5.24.0"),
        ]
    ]


def test_without_uv_pip_does_it_and_torch_comes_from_its_own_index() -> None:
    now = environment(packages=packages(torch="2.10.0"), tools={"pip": "25.0"})
    assert plan(environment(), now).commands == [
        [
            *("/venv/bin/python", "-m", "pip", "install"),
            *("--extra-index-url", "https://download.pytorch.org/whl/cu130"),
            "torch==2.11.0+cu130",
        ]
    ]


def test_nothing_to_do_is_no_command() -> None:
    assert plan(environment(), environment()).commands == []


def test_what_no_index_has_is_installed_from_its_commit_or_told() -> None:
    lock = environment(
        packages=packages(dflash="0.1", mine="1.0"),
        sources={"dflash": "git+https://example.org/dflash@abc", "mine": "file:///root/mine"},
    )
    found = plan(lock, environment())
    assert found.commands[0][-1] == "dflash @ git+https://example.org/dflash@abc"
    assert found.left == ["mine 1.0: it was installed from file:///root/mine"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": {}}, "neither uv nor pip"),
        (
            {"python": {"version": "3.11.2", "executable": "/usr/bin/python3", "managed": True}},
            "belongs to the distribution",
        ),
    ],
)
def test_an_interpreter_that_cannot_be_changed_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RefusedError, match=said):
        plan(environment(), environment(packages=packages(numpy=None), **changes))


def test_another_python_cannot_be_installed_and_is_told() -> None:
    found = plan(environment(), environment(python={"version": "3.12.1", "executable": "/p"}))
    assert found.left == ["Python 3.11.2: this interpreter is 3.12.1"]


def test_the_lock_text_is_json_with_sorted_keys() -> None:
    keys = list(json.loads(environment().lock_text()))
    assert keys == sorted(keys)
