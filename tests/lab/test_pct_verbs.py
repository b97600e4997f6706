"""`pct list`, `status`, `config`, `start`, `stop` and the rest, and the lab's fault switches."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator

import pytest

from orchestrator.lab import Lab
from orchestrator.lab.faults import CLUSTER_DOWN, NO_QUORUM, NOT_ROOT, PCT_DELAY

pytestmark = pytest.mark.lab

AddLine = Callable[[str], None]
HEADER = f"{'VMID':10} {'Status':10} {'Lock':12} {'Name':20}\n"


def run(lab: Lab, command: str) -> subprocess.CompletedProcess[str]:
    return lab.host(["sh", "-c", command], stdin=subprocess.DEVNULL)


def refused(lab: Lab, command: str) -> tuple[str, int]:
    done = run(lab, command)
    assert done.stdout == ""
    return done.stderr, done.returncode


@pytest.fixture
def conf_202(each_lab: Lab) -> Iterator[AddLine]:
    """Adds a line to 202's configuration; all is as before afterwards."""
    path = each_lab.layout.pve_conf(202)
    before = path.read_text()

    def add(line: str) -> None:
        path.write_text(f"{before}{line}\n")

    yield add
    path.write_text(before)
    if each_lab.pct("status", 202) == "status: running\n":
        each_lab.stop(202)


# --- reading -------------------------------------------------------------------------------------


def test_list_has_columns_of_fixed_width(each_lab: Lab) -> None:
    assert each_lab.pct("list") == HEADER + "".join(
        f"{vmid:<10} {state:10} {'':12} {f'ct{vmid}':20}\n"
        for vmid, state in [(200, "running"), (201, "running"), (202, "stopped")]
    )


def test_a_lock_shifts_what_splits_on_spaces(each_lab: Lab, conf_202: AddLine) -> None:
    conf_202("lock: snapshot-delete")
    last = each_lab.pct("list").splitlines()[-1]
    assert last.split() == ["202", "stopped", "snapshot-delete", "ct202"]


def test_without_containers_list_prints_nothing_at_all(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(())
    lab.up()
    assert lab.pct("list") == ""


def test_status(each_lab: Lab) -> None:
    assert each_lab.pct("status", 200) == "status: running\n"
    assert each_lab.pct("status", 202) == "status: stopped\n"


def test_verbose_status_is_sorted_key_value_lines(each_lab: Lab) -> None:
    lines = each_lab.pct("status", 200, "--verbose").splitlines()
    pairs = dict(line.split(": ", 1) for line in lines)
    assert list(pairs) == sorted(pairs)
    assert pairs["status"] == "running"
    assert pairs["vmid"] == "200"
    if each_lab.state()["memory_limits"]:
        assert int(pairs["mem"]) > 0


def test_config_is_sorted_and_raw_lines_come_last(each_lab: Lab, conf_202: AddLine) -> None:
    conf_202("lxc.idmap: u 0 100000 65536\naaa: 1\nlxc.cap.drop: sys_time")
    lines = each_lab.pct("config", 202).splitlines()
    assert lines[0] == "aaa: 1"
    assert lines[-2:] == ["lxc.idmap: u 0 100000 65536", "lxc.cap.drop: sys_time"]
    assert lines[:-2] == sorted(lines[:-2])


def test_the_configuration_is_where_proxmox_keeps_it(each_lab: Lab) -> None:
    paths = ["/etc/pve/lxc/200.conf", "/etc/pve/nodes/pve1/lxc/200.conf"]
    for path in [*paths, "/etc/pve/local/lxc/200.conf"]:
        assert "hostname: ct200\n" in run(each_lab, f"cat {path}").stdout


def test_a_containers_processes_are_found_by_their_cgroup(each_lab: Lab) -> None:
    pid = each_lab.init_pid(201)
    lines = run(each_lab, f"cat /proc/{pid}/cgroup").stdout.splitlines()
    assert any(re.fullmatch(r"\d+:[^:]*:/lxc/201/ns", line) for line in lines)


def test_processes_of_other_labs_are_outside_of_the_hosts_groups(lab: Lab, each_lab: Lab) -> None:
    pid = str(os.getpid() if lab is each_lab else lab.init_pid(200))
    lines = run(each_lab, f"cat /proc/{pid}/cgroup").stdout.splitlines()
    assert not any(line.split(":", 2)[2].startswith("/lxc/") for line in lines)


def test_the_hosts_groups_are_mounted_where_their_paths_point(each_lab: Lab) -> None:
    paths = "/sys/fs/cgroup/lxc/200/ns /sys/fs/cgroup/unified/lxc/200/ns"
    procs = run(each_lab, f"for p in {paths}; do cat $p/cgroup.procs 2>/dev/null; done").stdout
    assert str(each_lab.init_pid(200)) in procs.split()


@pytest.mark.parametrize("verb", ["status", "config", "start", "stop", "shutdown", "reboot"])
def test_a_missing_container(each_lab: Lab, verb: str) -> None:
    message = "Configuration file 'nodes/pve1/lxc/999.conf' does not exist\n"
    assert refused(each_lab, f"pct {verb} 999") == (message, 2)


def test_an_unknown_command(each_lab: Lab) -> None:
    message, code = refused(each_lab, "pct frobnicate")
    assert message.startswith("ERROR: unknown command 'pct frobnicate'\n")
    assert code == 255


# --- power ---------------------------------------------------------------------------------------


def test_start_stop_start(each_lab: Lab, conf_202: AddLine) -> None:
    each_lab.start(202)
    assert each_lab.pct("exec", 202, "--", "hostname") == "ct202\n"
    assert refused(each_lab, "pct start 202") == ("CT 202 already running\n", 255)
    each_lab.stop(202)
    for verb in ("stop", "shutdown", "reboot", "suspend"):
        assert refused(each_lab, f"pct {verb} 202") == ("CT 202 not running\n", 255)


def test_shutdown_lets_the_init_end_in_peace(each_lab: Lab) -> None:
    each_lab.pct("shutdown", 201)
    assert each_lab.pct("status", 201) == "status: stopped\n"
    each_lab.start(201)


def test_a_reboot_gives_a_new_boot_id_and_a_new_init(each_lab: Lab) -> None:
    def identity() -> tuple[str, int]:
        path = "/proc/sys/kernel/random/boot_id"
        return each_lab.pct("exec", 201, "--", "cat", path), each_lab.init_pid(201)

    before = identity()
    assert before == identity()
    each_lab.reboot(201)
    after = identity()
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_the_disk_outlives_a_reboot_and_tmp_does_not(each_lab: Lab) -> None:
    each_lab.pct("exec", 201, "--", "sh", "-c", "echo a > /root/a; echo b > /workspace/b; >/tmp/c")
    each_lab.reboot(201)
    script = "cat /root/a /workspace/b; ls /tmp; rm /root/a /workspace/b"
    assert each_lab.pct("exec", 201, "--", "sh", "-c", script) == "a\nb\n"


def test_a_frozen_container_can_be_stopped(each_lab: Lab, conf_202: AddLine) -> None:
    each_lab.start(202)
    each_lab.freeze(202)
    each_lab.stop(202)
    assert each_lab.pct("status", 202) == "status: stopped\n"


LOCKS = "backup create destroyed disk fstrim migrate mounted rollback snapshot snapshot-delete"


def test_a_locked_container_is_not_started(each_lab: Lab, conf_202: AddLine) -> None:
    for lock in LOCKS.split():
        conf_202(f"lock: {lock}")
        assert refused(each_lab, "pct start 202") == (f"CT is locked ({lock})\n", 255)


@pytest.mark.parametrize("verb", ["stop", "shutdown"])
def test_a_locked_container_is_not_stopped(each_lab: Lab, conf_202: AddLine, verb: str) -> None:
    conf_202("lock: backup")
    assert refused(each_lab, f"pct {verb} 202") == ("CT is locked (backup)\n", 255)


def test_unlock(each_lab: Lab, conf_202: AddLine) -> None:
    conf_202("lock: backup")
    each_lab.pct("unlock", 202)
    each_lab.start(202)


# --- faults --------------------------------------------------------------------------------------


def test_a_missing_device_is_named(each_lab: Lab, conf_202: AddLine) -> None:
    conf_202("dev0: /dev/nvidia9,gid=44")
    assert refused(each_lab, "pct start 202") == ("Device /dev/nvidia9 does not exist\n", 255)


def test_a_bad_mount_entry_puts_its_detail_on_stdout(each_lab: Lab, conf_202: AddLine) -> None:
    conf_202("lxc.mount.entry: /nosuch mnt none bind,create=dir 0 0")
    done = run(each_lab, "pct start 202")
    assert done.stderr == "startup for container '202' failed\n"
    assert "nosuch" in done.stdout
    assert done.returncode == 255
    assert each_lab.pct("status", 202) == "status: stopped\n"


def test_without_quorum_nothing_starts(each_lab: Lab) -> None:
    with each_lab.fault(NO_QUORUM):
        assert refused(each_lab, "pct start 202") == ("cluster not ready - no quorum?\n", 255)


@pytest.mark.parametrize("verb", ["list", "exec 200 -- true"])
def test_the_cluster_file_system_is_down(each_lab: Lab, verb: str) -> None:
    with each_lab.fault(CLUSTER_DOWN):
        message, code = refused(each_lab, f"pct {verb}")
    assert message.startswith("ipcc_send_rec[1] failed: Connection refused\n")
    assert message.endswith("Unable to load access control list: Connection refused\n")
    assert code == 111


def test_the_caller_is_not_root(each_lab: Lab) -> None:
    with each_lab.fault(NOT_ROOT):
        message, code = refused(each_lab, "pct list")
    assert message.startswith("ipcc_send_rec[1] failed: Unknown error -1\n")
    assert code == 255


def test_really_not_root(each_lab: Lab) -> None:
    message, code = refused(each_lab, "setpriv --reuid daemon --clear-groups pct list")
    assert message.startswith("ipcc_send_rec[1] failed: Unknown error -1\n")
    assert code == 255


def test_the_start_up_cost_of_the_real_one_can_be_switched_on(each_lab: Lab) -> None:
    cpu = "bash -c 'TIMEFORMAT=%U; time pct list >/dev/null'"
    with each_lab.fault(PCT_DELAY, "0.3"):
        assert float(run(each_lab, cpu).stderr) >= 0.25
