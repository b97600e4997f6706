"""`pct exec` in the lab behaves as the real one was measured to, with either backend."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from orchestrator.lab import Lab
from orchestrator.lab.processes import Process

pytestmark = pytest.mark.lab


def wait_for(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


def run(lab: Lab, command: str) -> subprocess.CompletedProcess[str]:
    """A shell command on the host, without SSH, in root's home as sshd would have it."""
    return lab.host(["sh", "-c", f"cd /root && {command}"], stdin=subprocess.DEVNULL)


# --- arguments --------------------------------------------------------------------------------


def test_argv_goes_straight_through_no_shell_sees_it(each_lab: Lab) -> None:
    done = run(each_lab, "pct exec 200 -- printf '[%s]' '' '*' '$HOME' 'a b' -- --keep-env")
    assert done.stdout == "[][*][$HOME][a b][--][--keep-env]"


def test_only_the_remote_shell_of_ssh_parses_the_line_again(each_lab: Lab) -> None:
    assert each_lab.ssh("pct exec 200 -- echo '$HOSTNAME'").stdout == "$HOSTNAME\n"
    assert each_lab.ssh("pct", "exec", "200", "--", "echo", "a  b").stdout == "a b\n"


def test_without_the_double_dash_options_are_eaten(each_lab: Lab) -> None:
    done = run(each_lab, "pct exec 200 ls -la /")
    assert done.stderr.splitlines()[:2] == ["Unknown option: la", "400 unable to parse option"]
    assert done.returncode == 2


def test_without_options_no_double_dash_is_needed(each_lab: Lab) -> None:
    assert run(each_lab, "pct exec 200 echo hello").stdout == "hello\n"


# --- environment ------------------------------------------------------------------------------


def environment(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def test_the_callers_environment_leaks_in_and_path_is_short(each_lab: Lab) -> None:
    line = "LANG=de_DE.UTF-8 pct exec 200 -- env"
    inside = environment(each_lab.ssh(line).stdout)
    assert inside["PATH"] == "/sbin:/bin:/usr/sbin:/usr/bin"
    assert inside["HOME"] == "/root"
    assert inside["LANG"] == "de_DE.UTF-8"
    assert inside["TERM"] == "linux"
    assert "SSH_CONNECTION" in inside


def test_a_login_shell_brings_usr_local_back(each_lab: Lab) -> None:
    assert "/usr/local/bin" in run(each_lab, "pct exec 200 -- bash -lc 'echo $PATH'").stdout


@pytest.mark.parametrize("spelling", ["--keep-env 0", "--keep-env=0", "-keep-env no", "--keep 0"])
def test_keep_env_0_leaves_path_container_and_term(each_lab: Lab, spelling: str) -> None:
    inside = environment(run(each_lab, f"X=1 HOME=/root pct exec 200 {spelling} -- env").stdout)
    assert inside.keys() == {"PATH", "TERM", "container"}
    assert "/usr/local/bin" in inside["PATH"].split(":")


def test_keep_env_takes_only_a_boolean(each_lab: Lab) -> None:
    done = run(each_lab, "pct exec 200 --keep-env perhaps -- env")
    assert done.stderr.startswith("400 Parameter verification failed.\n")
    assert done.returncode == 2


# --- working directory, user, terminal --------------------------------------------------------


def test_the_callers_folder_where_the_container_has_it_else_the_root(each_lab: Lab) -> None:
    assert run(each_lab, "cd /usr/bin && pct exec 200 -- pwd").stdout == "/usr/bin\n"
    assert run(each_lab, "cd /etc/pve && pct exec 200 -- pwd").stdout == "/\n"


def test_the_user_is_the_containers_root(each_lab: Lab) -> None:
    assert run(each_lab, "pct exec 200 -- id -un").stdout == "root\n"


def test_no_terminal_unless_the_caller_has_one(each_lab: Lab) -> None:
    done = run(each_lab, "pct exec 200 -- tty")
    assert (done.stdout, done.returncode) == ("not a tty\n", 1)


def terminal_argv(lab: Lab, command: str) -> list[str]:
    argv = lab.ssh_argv(command)
    return [argv[0], "-tt", *argv[1:]]


def on_a_terminal(lab: Lab, command: str) -> subprocess.CompletedProcess[str]:
    argv = terminal_argv(lab, command)
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def test_with_a_terminal_the_command_gets_one_of_the_containers(each_lab: Lab) -> None:
    done = on_a_terminal(each_lab, "pct exec 200 -- sh -c 'ls -l $(tty)'")
    assert re.search(r" /dev/(pts/\d+|console)\s*$", done.stdout), done
    assert done.returncode == 0


def test_one_stream_on_a_terminal_is_enough(each_lab: Lab) -> None:
    done = on_a_terminal(each_lab, "pct exec 200 -- sh -c 'test -t 1' </dev/null")
    assert done.returncode == 0


def test_what_is_typed_reaches_the_command(each_lab: Lab) -> None:
    script = "pct exec 200 -- sh -c 'echo ready; read line; echo got:$line; exit 3'"
    pipe = subprocess.PIPE
    argv = terminal_argv(each_lab, script)
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as client:
        assert client.stdin and client.stdout
        assert client.stdout.readline().strip() == "ready"  # what is typed earlier is flushed
        client.stdin.write("hello\n")
        client.stdin.flush()
        assert "got:hello" in client.stdout.read()
        assert client.wait(timeout=20) == 3


# --- streams and exit codes -------------------------------------------------------------------


def test_stdin_is_inherited_so_a_read_loop_loses_lines(each_lab: Lab) -> None:
    loop = "printf '1\\n2\\n3\\n' | while read n; do echo host:$n; pct exec 200 -- cat; done"
    assert run(each_lab, loop).stdout.split() == ["host:1", "2", "3"]


def test_both_outputs_stay_apart(each_lab: Lab) -> None:
    done = run(each_lab, "pct exec 200 -- sh -c 'echo out; echo err >&2; exit 7'")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 7)


def test_a_binary_stream_passes_unchanged(each_lab: Lab) -> None:
    data = bytes(range(256)) * 4096
    argv = each_lab.host_argv(["pct", "exec", "200", "--", "cat"])
    assert subprocess.run(argv, input=data, capture_output=True, check=True).stdout == data


def test_a_command_killed_by_a_signal(each_lab: Lab) -> None:
    done = run(each_lab, "pct exec 200 -- sh -c 'kill -9 $$'")
    assert (done.returncode, done.stderr) == (128 + signal.SIGKILL, "")


FAILURES = {
    "stopped": ("pct exec 202 -- true", r"container '202' not running!\n", 255),
    "missing": (
        "pct exec 999 -- true",
        r"Configuration file 'nodes/pve1/lxc/999.conf' does not exist\n",
        2,
    ),
    "not found": (
        "pct exec 200 -- nosuch",
        r"lxc-attach: 200: ../src/lxc/attach.c: lxc_attach_run_command: \d+ "
        r'No such file or directory - Failed to exec "nosuch"\n',
        127,
    ),
    "not executable": (
        "pct exec 200 -- /etc/passwd",
        r'.* Permission denied - Failed to exec "/etc/passwd"\n',
        126,
    ),
    "no command": ("pct exec 200", r"missing command at \S*pct\.pm line 246\.\n", 255),
    "bad vmid": ("pct exec abc -- true", r"400 Parameter verification failed\.\n.*", 2),
    "low vmid": ("pct exec 99 -- true", r"400 Parameter verification failed\.\n.*", 2),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_of_pct_itself(each_lab: Lab, case: str) -> None:
    command, message, code = FAILURES[case]
    done = run(each_lab, command)
    assert re.fullmatch(message, done.stderr, re.DOTALL), done.stderr
    assert done.returncode == code
    assert done.stdout == ""


# --- what keeps running -----------------------------------------------------------------------


def waiting_inside(lab: Lab, name: str) -> int | None:
    """The number, inside 200, of a `sleep` with that argument."""
    script = f"for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q '^sleep {name} ' && "
    script += "echo ${p#/proc/}; done 2>/dev/null"
    found = lab.host(["pct", "exec", "200", "--", "sh", "-c", script]).stdout.split()
    return int(found[0]) if found else None


def end_inside(lab: Lab, name: str) -> None:
    if pid := waiting_inside(lab, name):
        lab.host(["pct", "exec", "200", "--", "kill", "-9", str(pid)])


def background(argv: list[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet)


def test_without_a_terminal_the_command_outlives_the_ssh_client(each_lab: Lab) -> None:
    client = subprocess.Popen(
        each_lab.ssh_argv("pct exec 200 -- sleep 4001"), stdin=subprocess.DEVNULL
    )
    wait_for(lambda: waiting_inside(each_lab, "4001"))
    client.kill()
    client.wait()
    wait_for(lambda: not each_lab.sessions())
    assert waiting_inside(each_lab, "4001")
    end_inside(each_lab, "4001")


def test_with_a_terminal_the_command_dies_with_the_ssh_client(each_lab: Lab) -> None:
    client = background(terminal_argv(each_lab, "pct exec 200 -- sleep 4002"))
    wait_for(lambda: waiting_inside(each_lab, "4002"))
    client.kill()
    client.wait()
    wait_for(lambda: not waiting_inside(each_lab, "4002"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_pct_ends_its_direct_child_only(each_lab: Lab, number: int) -> None:
    script = "sleep 4003 & wait"
    pct = background(each_lab.host_argv(["pct", "exec", "200", "--", "sh", "-c", script]))
    wait_for(lambda: waiting_inside(each_lab, "4003"))
    pct.send_signal(number)
    pct.wait()
    assert waiting_inside(each_lab, "4003")
    end_inside(each_lab, "4003")


def test_a_background_child_that_holds_stdout_keeps_ssh_waiting(each_lab: Lab) -> None:
    command = "pct exec 200 -- sh -c 'sleep 4004 & echo started'"
    client = subprocess.Popen(
        each_lab.ssh_argv(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "started\n"
    with pytest.raises(subprocess.TimeoutExpired):
        client.wait(timeout=0.5)
    end_inside(each_lab, "4004")
    assert client.wait(timeout=20) == 0
    client.stdout.close()


def test_a_detached_tmux_session_returns_at_once_and_lives_on(each_lab: Lab) -> None:
    tmux = "pct exec 200 -- tmux -L t1"
    assert each_lab.ssh(f"{tmux} new-session -d -s one sleep 4005").returncode == 0
    assert run(each_lab, f"{tmux} ls").stdout.startswith("one: 1 windows")
    run(each_lab, f"{tmux} kill-server")


def test_the_short_path_reaches_into_tmux_too(each_lab: Lab) -> None:
    tmux = "pct exec 200 -- tmux -L t2"
    show = "sh -c 'echo \\$PATH > /workspace/path; sleep 4006'"
    each_lab.ssh(f'{tmux} new-session -d "{show}"')
    wait_for(lambda: run(each_lab, "pct exec 200 -- test -s /workspace/path").returncode == 0)
    assert run(each_lab, "pct exec 200 -- cat /workspace/path").stdout == (
        "/sbin:/bin:/usr/sbin:/usr/bin\n"
    )
    run(each_lab, f"{tmux} kill-server; pct exec 200 -- rm /workspace/path")


# --- frozen -----------------------------------------------------------------------------------


def test_in_a_frozen_container_status_is_running_and_exec_hangs(each_lab: Lab) -> None:
    each_lab.freeze(201)
    try:
        assert each_lab.pct("status", 201) == "status: running\n"
        argv = each_lab.host_argv(["pct", "exec", "201", "--", "echo", "through"])
        pct = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            pct.communicate(timeout=0.5)
    finally:
        each_lab.thaw(201)
    assert pct.communicate(timeout=20) == ("through\n", None)


def test_neither_a_lock_in_the_configuration_nor_the_flock_blocks_exec(each_lab: Lab) -> None:
    conf = "/etc/pve/lxc/200.conf"
    command = (
        f"cp -p {conf} saved && echo 'lock: backup' >> {conf};"
        " flock /run/lock/lxc/pve-config-200.lock pct exec 200 -- echo through;"
        f" cat saved > {conf}; rm saved"
    )
    assert run(each_lab, command).stdout == "through\n"


def test_orphans_are_reaped(each_lab: Lab) -> None:
    before = Process.of(each_lab.init_pid(200))
    run(each_lab, "pct exec 200 -- sh -c '(sleep 0.1 &) ; :'")
    # Whoever's they are: a tmux server of another test may have a zombie of its own.
    script = "grep -lz '^Name:.sleep.*State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l"
    wait_for(lambda: run(each_lab, f'pct exec 200 -- sh -c "{script}"').stdout.strip() == "0")
    assert Process.of(each_lab.init_pid(200)) == before
