"""A host's logs tell of everybody: only what is the run's own, and of its time, is evidence."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.diag import Evidence, Report, diagnose

START = 1_788_249_600.0  # 2026-09-01T08:00:00Z


def oom(group: str, pid: int, name: str = "python3", date: str = "[99.2]") -> str:
    return (
        f"{date} {name} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
        f"{date} oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=ns,mems_allowed=0,"
        f"oom_memcg={group},task_memcg={group}/ns,task={name},pid={pid},uid=100000\n"
        f"{date} Memory cgroup out of memory: Killed process {pid} ({name}) total-vm:812004kB\n"
        f"{date} oom_reaper: reaped process {pid} ({name}), now anon-rss:0kB"
    )


def report(log: str = "", **probes: Any) -> Report:
    return diagnose(Evidence.from_text(log, {"ct": 200, **probes}))


def quoted(found: Report) -> str:
    every = [*found.findings, *(c for f in found.findings for c in f.consequences)]
    return "\n".join(q.text for f in every for q in f.evidence)


KILLED = {"exit_record": {"exit_code": None, "signal": 9}, "memory_events": "oom 0\noom_kill 0"}
STEP = "step 1/9 | loss 8.1 | 15.1k tok/s\nKilled\n"


@pytest.mark.parametrize(
    "group", ["/lxc/207", "/lxc/2001", "/lxc.payload.207", "/system.slice/mysql.service"]
)
def test_a_kill_in_another_group_is_not_this_runs(group: str) -> None:
    found = report(STEP, host_dmesg=oom(group, 9912, "mysqld"), **KILLED)

    assert found.findings[0].code == "run.killed"
    assert "9912" not in quoted(found)


@pytest.mark.parametrize("group", ["/lxc/200", "/lxc.payload.200", "/lab-7/lxc/200"])
def test_of_two_kills_the_own_one_is_quoted(group: str) -> None:
    log = oom("/lxc/207", 9912, "mysqld") + "\n" + oom(group, 881)

    found = report(STEP, host_dmesg=log, **KILLED)

    assert found.findings[0].code == "mem.oom_killed"
    assert "881" in quoted(found)
    assert "9912" not in quoted(found)


def test_version_1_names_the_group_in_the_line_before() -> None:
    def task(number: int, pid: int) -> str:
        return (
            f"[99.1] Task in /lxc/{number}/ns killed as a result of limit of /lxc/{number}\n"
            f"[99.2] Memory cgroup out of memory: Kill process {pid} (python3) score 990"
        )

    assert report(STEP, dmesg=task(207, 9912), **KILLED).findings[0].code == "run.killed"
    assert report(STEP, dmesg=task(200, 881), **KILLED).findings[0].code == "mem.oom_killed"


def test_a_stopped_container_quotes_no_neighbour() -> None:
    found = report(
        pct_status="status: stopped",
        host_dmesg=oom("/lxc/207", 9912),
        tasks="UPID:pve1:0000A1:00B2:66F0:vzstop:207:root@pam: OK\n"
        "UPID:pve1:0000A1:00B2:66F0:vzshutdown:200:root@pam: OK",
    )

    assert found.findings[0].code == "ct.stopped"
    assert "vzshutdown:200" in quoted(found)
    assert "207" not in quoted(found)


def test_a_line_from_before_the_run_is_quoted_by_no_rule() -> None:
    before, during = (f"2026-09-01T{hour}:05:00,000000+00:00" for hour in ("07", "08"))
    stopped: dict[str, Any] = {"pct_status": "status: stopped", "run_started": START}

    old = report(**stopped, host_dmesg=oom("/lxc/200", 881, date=before))
    new = report(**stopped, host_dmesg=oom("/lxc/200", 881, date=during))

    assert "881" not in quoted(old)
    assert "oom-kill" in quoted(new)


CARDS = "minor 0, GPU-aaaa, 0000:41:00.0, NVIDIA H200\nminor 1, GPU-bbbb, 0000:c1:00.0, NVIDIA H200"
LOST = "[9.1] NVRM: Xid (PCI:0000:{bus}:00): 79, pid='<unknown>', GPU has fallen off the bus."
ONE = "crw-rw-rw- 1 root root 195,   0 /dev/nvidia0\ncrw-rw-rw- 1 root root 195, 255 /dev/nvidiactl"
BOTH = ONE + "\ncrw-rw-rw- 1 root root 195,   1 /dev/nvidia1"
DEAD = "step 1/9 | loss 8.1 | 15.1k tok/s\nRuntimeError: CUDA error: unknown error\n"


@pytest.mark.parametrize(
    ("bus", "nodes", "leased", "own"),
    [
        ("41", ONE, [], True),
        ("c1", ONE, [], False),
        ("c1", BOTH, [], True),
        ("c1", BOTH, ["GPU-aaaa"], False),  # the container has both cards, the run one of them
        ("c1", BOTH, ["GPU-bbbb"], True),
        ("c1", "", [], True),  # nobody knows which cards it holds
    ],
)
def test_a_card_that_the_run_does_not_hold_is_no_cause(
    bus: str, nodes: str, leased: list[str], own: bool
) -> None:
    found = report(
        DEAD, host_gpus=CARDS, host_dmesg=LOST.format(bus=bus), ls_dev=nodes, run_gpus=leased
    )

    assert (found.findings[0].code == "gpu.xid") is own


def test_a_raw_device_line_of_the_configuration_names_the_card() -> None:
    config = "cores: 8\ndev0: /dev/nvidia1,mode=0666\ndev1: /dev/nvidiactl"

    def root(bus: str) -> str:
        log = LOST.format(bus=bus)
        return report(DEAD, host_gpus=CARDS, host_dmesg=log, pct_config=config).findings[0].code

    assert root("c1") == "gpu.xid"
    assert root("41") != "gpu.xid"


def test_without_a_number_every_line_counts() -> None:
    found = diagnose(Evidence.from_text(STEP, {"host_dmesg": oom("/lxc/207", 9912), **KILLED}))

    assert found.findings[0].code == "mem.oom_killed"


def test_anothers_backup_holds_no_lock_of_ours() -> None:
    lines = "811 vzdump 207 --mode snapshot (running for 9 min)"
    locked = "dflashctl exec: pve1/200\nCT is locked (backup)\n"

    both = report(locked, ps_host=f"{lines}\n812 vzdump 200 --mode stop (running for 2 min)")
    other = report(locked, ps_host=lines)

    assert both.findings[0].code == other.findings[0].code == "ct.locked"
    assert "vzdump 200" in quoted(both)
    assert "207" not in quoted(both) + quoted(other)


@pytest.mark.parametrize(("ct", "alive"), [(200, False), (201, True)])
def test_a_trainer_of_another_container_in_the_hosts_list_is_not_this_runs(
    ct: int, alive: bool
) -> None:
    listed = "4242 1 Sl 1-02:03:04 0::/lxc/201/ns python -m trainer train config.yaml"
    log = "step 1/9 | loss 8.1 | 15.1k tok/s\n"

    outcome = Evidence.from_text(log, {"ct": ct, "ps_host": listed}).outcome

    assert outcome.alive is alive
