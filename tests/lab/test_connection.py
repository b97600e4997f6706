"""Ways to a host: aliases, jump hosts, agents; one connection for all its containers."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import paramiko
import pytest
import yaml
from laptop import Cli, Terminal, free_port, until
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_DATA

from orchestrator.connection import HostConnection
from orchestrator.inventory import Host
from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy
from orchestrator.target import HostTarget

pytestmark = pytest.mark.lab


def inventory(cli: Cli, tmp_path: Path, host: dict[str, Any]) -> None:
    known = {"hosts": {"lab": host}, "containers": {"c": {"host": "lab", "ct": 201}}}
    known["containers"]["c"]["python"] = "/srv/python/bin/python"
    cli.inventory = tmp_path / "own.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))


def config(lab: Lab, tmp_path: Path, extra: str = "") -> str:
    """An ssh config that knows the lab under the name ``pve``."""
    path = tmp_path / "ssh_config"
    path.write_text(
        f"Host pve\n  HostName 127.0.0.1\n  Port {lab.spec.port}\n  User root\n"
        f"  IdentityFile {lab.layout.user_key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {lab.layout.known_hosts}\n{extra}"
    )
    return str(path)


def test_everything_comes_from_the_ssh_config(cli: Cli, lab: Lab, tmp_path: Path) -> None:
    inventory(cli, tmp_path, {"address": "pve", "ssh_config": config(lab, tmp_path)})
    assert cli("exec", "c", "--", "echo", "hi", code=0).stdout == "hi\n"


def test_compression_of_the_ssh_config_is_used(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, tmp_path: Path
) -> None:
    (code / "text").write_bytes(b"0123456789abcde\n" * 125_000)
    alias = f"  HostKeyAlias [127.0.0.1]:{lab.spec.port}\n"
    host = {"address": "pve", "port": proxied.port, "ssh_config": config(lab, tmp_path, alias)}
    inventory(cli, tmp_path, host)
    before = proxied.traffic()["up"]
    assert cli.json("push", "c", cwd=code)["bytes"] == 2_000_000
    plain = proxied.traffic()["up"] - before
    (code / "text").write_bytes(b"edcba9876543210\n" * 125_000)
    config(lab, tmp_path, f"{alias}  Compression yes\n")
    cli("push", "c", cwd=code, code=0)
    assert proxied.traffic()["up"] - before - plain < plain / 10


def test_a_jump_host_carries_the_connection(cli: Cli, lab: Lab, tmp_path: Path) -> None:
    extra = (
        f"Host far\n  HostName 127.0.0.1\n  Port {lab.spec.port}\n  User root\n  ProxyJump pve\n"
        f"  IdentityFile {lab.layout.user_key}\n  UserKnownHostsFile {lab.layout.known_hosts}\n"
    )
    inventory(cli, tmp_path, {"address": "far", "ssh_config": config(lab, tmp_path, extra)})
    assert cli("exec", "c", "--", "echo", "hi", code=0).stdout == "hi\n"


def test_a_jump_hosts_key_is_checked_too(cli: Cli, lab: Lab, tmp_path: Path) -> None:
    text = config(lab, tmp_path)
    Path(text).write_text(
        f"Host pve\n  HostName 127.0.0.1\n  Port {lab.spec.port}\n  User root\n"
        f"  IdentityFile {lab.layout.user_key}\n  UserKnownHostsFile {tmp_path}/none\n"
        f"Host far\n  HostName 127.0.0.1\n  Port {lab.spec.port}\n  User root\n  ProxyJump pve\n"
        f"  IdentityFile {lab.layout.user_key}\n  UserKnownHostsFile {lab.layout.known_hosts}\n"
    )
    inventory(cli, tmp_path, {"address": "far", "ssh_config": text})
    assert "is not known here" in cli("exec", "c", "--", "true", code=3).stderr


@pytest.fixture
def agent(cli: Cli, lab: Lab) -> Iterator[str]:
    """An ssh agent that holds the lab's key; its socket."""
    said = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(SSH_\w+)=([^;]+);", said))
    adding = {**os.environ, **found}
    subprocess.run(["ssh-add", "-q", lab.layout.user_key], env=adding, check=True)
    yield found["SSH_AUTH_SOCK"]
    os.kill(int(found["SSH_AGENT_PID"]), 15)


def test_the_ssh_agents_keys_are_offered(
    cli: Cli, lab: Lab, tmp_path: Path, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = {
        "address": "127.0.0.1",
        "port": lab.spec.port,
        "user": "root",
        "known_hosts": str(lab.layout.known_hosts),
    }
    inventory(cli, tmp_path, host)
    assert "refused user root" in cli("exec", "c", "--", "true", code=3).stderr
    cli.extra["SSH_AUTH_SOCK"] = agent
    cli("exec", "c", "--", "true", code=0)


@pytest.fixture
def locked(cli: Cli, lab: Lab, tmp_path: Path) -> Path:
    """The lab's key behind a passphrase, the only one that the inventory names."""
    key = tmp_path / "locked"
    key.write_bytes(lab.layout.user_key.read_bytes())
    key.chmod(0o600)
    command = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(key)]
    subprocess.run(command, check=True)
    known = yaml.safe_load(lab.inventory.read_text())
    known["hosts"]["lab"]["identity_file"] = str(key)
    cli.inventory = tmp_path / "locked.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))
    return key


def test_a_passphrase_is_asked_for_on_a_terminal_alone(
    cli: Cli, lab: Lab, code: Path, locked: Path
) -> None:
    (code / "start_training.sh").write_text("echo on\n")
    assert "ssh-add" in cli("exec", "lab-201", "--", "true", code=3).stderr
    terminal = Terminal(cli, "launch", "lab-201", "--wait", "--code", str(code))
    terminal.until(b"password or passphrase for root@")
    terminal.type(b"open sesame\n")
    terminal.until(b"finished")
    assert terminal.exit_code() == 0
    assert terminal.seen.count(b"passphrase for") == 1
    assert b"sesame" not in terminal.seen


def test_a_wrong_passphrase_is_refused_once(cli: Cli, locked: Path) -> None:
    terminal = Terminal(cli, "exec", "lab-201", "--", "true")
    terminal.until(b"passphrase for")
    terminal.type(b"wrong\n")
    terminal.until(b"next: ")
    assert terminal.exit_code() == 3


def test_a_verb_for_several_asks_for_a_passphrase_once(cli: Cli, locked: Path) -> None:
    terminal = Terminal(cli, "exec", "lab-200", "lab-201", "--", "echo", "hi")
    terminal.until(b"password or passphrase for root@")
    terminal.type(b"open sesame\n")
    for name in (b"lab-200", b"lab-201"):
        terminal.until(name + b" | hi")
    assert terminal.exit_code() == 0
    assert terminal.seen.count(b"passphrase for") == 1


@pytest.fixture
def by_password(cli: Cli, lab: Lab, tmp_path: Path) -> Iterator[None]:
    """A second sshd of the lab's host, that takes root's password and no key."""
    port = free_port()
    changed = {"Port": str(port), "PasswordAuthentication": "yes", "PermitRootLogin": "yes"}
    lines = [line.split(" ", 1) for line in lab.layout.sshd_config.read_text().splitlines()]
    text = "".join(f"{key} {changed.get(key, value)}\n" for key, value in lines)
    config = lab.layout.ssh / "by_password"
    config.write_text(text + "PubkeyAuthentication no\n")
    sealed = lab.host(["openssl", "passwd", "-6", "open sesame"]).stdout.strip()
    assert lab.host(["usermod", "-p", sealed, "root"]).returncode == 0
    server = subprocess.Popen(lab.host_argv(["/usr/sbin/sshd", "-D", "-f", str(config)]))
    known = yaml.safe_load(lab.inventory.read_text())
    aliases = tmp_path / "ssh_config"
    aliases.write_text(f"HostKeyAlias [127.0.0.1]:{lab.spec.port}\n")
    known["hosts"]["lab"] |= {"port": port, "ssh_config": str(aliases)}
    cli.inventory = tmp_path / "by_password.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))
    until(lambda: lab.host(["ss", "-Hltn", f"sport = :{port}"]).stdout)
    yield
    server.terminate()
    server.wait(10)
    lab.host(["usermod", "-p", "*", "root"])


@pytest.mark.usefixtures("by_password")
def test_a_password_is_asked_for_on_a_terminal_alone_and_shown_nowhere(cli: Cli) -> None:
    assert "refused user root" in cli("exec", "lab-201", "--", "true", code=3).stderr
    terminal = Terminal(cli, "exec", "lab-201", "--", "echo", "hi")
    terminal.until(b"password or passphrase for root@")
    terminal.type(b"open sesame\n")
    assert terminal.exit_code() == 0
    assert b"hi" in terminal.seen and b"sesame" not in terminal.seen


def test_a_locked_key_that_the_agent_holds_needs_no_passphrase(
    cli: Cli, agent: str, locked: Path
) -> None:
    cli.extra["SSH_AUTH_SOCK"] = agent
    cli("exec", "lab-201", "--", "true", code=0)


@pytest.fixture
def connection(lab: Lab) -> Iterator[HostConnection]:
    host = Host.model_validate(yaml.safe_load(lab.inventory.read_text())["hosts"]["lab"])
    with HostConnection(HostTarget(name="lab", settings=host)) as made:
        yield made


def test_the_cipher_is_one_that_authenticates_in_the_same_pass(connection: HostConnection) -> None:
    assert "gcm" in connection.open().transport.local_cipher


def test_what_is_sent_as_a_command_ends_leaves_the_connection_to_the_others(
    connection: HostConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = paramiko.Transport._send_user_message  # type: ignore[attr-defined]
    ended = threading.Event()

    def late(self: paramiko.Transport, message: paramiko.Message) -> None:
        """Data is overtaken by the answer to the command's end, as on a busy laptop."""
        kind = message.asbytes()[0]
        assert kind != MSG_CHANNEL_DATA or ended.wait(30)
        usual(self, message)
        if kind == MSG_CHANNEL_CLOSE:
            ended.set()

    with closing(connection.session(["cat"])) as other:
        with closing(connection.session(["sleep", "0.3"])) as brief:
            monkeypatch.setattr(paramiko.Transport, "_send_user_message", late)
            brief.send(b"too late")
            assert ended.is_set()
        other.send(b"still there")
        assert other.receive() == b"still there"


def test_a_command_that_ends_while_new_keys_are_exchanged_leaves_the_connection(
    cli: Cli, proxied: Proxy
) -> None:
    """As they are every 512 MB; it then ended 30 s later, with all its sessions."""
    settings = yaml.safe_load(cli.inventory.read_text())["hosts"]["lab"]
    host = HostTarget(name="lab", settings=Host.model_validate(settings))
    with HostConnection(host) as connection, closing(connection.session(["cat"])) as other:
        proxied.set(rtt_ms=600)
        with closing(connection.session(["sleep", "0.1"])) as brief:
            connection.open().transport.renegotiate_keys()
            assert brief.receive() == b""
        other.send(b"still there")
        assert other.receive() == b"still there"


def test_all_containers_of_a_host_share_one_connection(cli: Cli, proxied: Proxy) -> None:
    cli("exec", "lab-200", "lab-201", "--", "true", code=0)
    assert proxied.traffic()["connections"] == 1


def test_a_connection_begun_ahead_is_the_only_one(cli: Cli, proxied: Proxy) -> None:
    cli("exec", "lab-201", "--", "true", code=0)
    assert "lab-201" in (cli.home / ".cache/dflashctl/ways.json").read_text()
    before = proxied.traffic()["connections"]
    assert cli("exec", "lab-201", "--", "echo", "hi", code=0).stdout == "hi\n"
    assert proxied.traffic()["connections"] == before + 1


def test_wrong_usage_is_told_although_a_connection_was_begun(cli: Cli, lab: Lab) -> None:
    cli("exec", "lab-201", "--", "true", code=0)
    assert "--nonsense" in cli("exec", "lab-201", "--nonsense", "--", "true", code=2).stderr


def test_a_host_key_that_has_changed_is_refused_ahead_too(
    cli: Cli, lab: Lab, tmp_path: Path
) -> None:
    own = tmp_path / "known_hosts"
    own.write_text(lab.layout.known_hosts.read_text())
    settings = yaml.safe_load(lab.inventory.read_text())["hosts"]["lab"]
    inventory(cli, tmp_path, settings | {"known_hosts": str(own)})
    cli("exec", "c", "--", "true", code=0)
    own.write_text("")
    assert "is not known here" in cli("exec", "c", "--", "true", code=3).stderr


def test_more_containers_than_channels_take_turns(
    cli: Cli, lab: Lab, proxied: Proxy, tmp_path: Path
) -> None:
    known = yaml.safe_load(cli.inventory.read_text())
    one = known["containers"]["lab-201"]
    known["containers"] = {f"c{n}": {**one, "workdir": f"/workspace/{n}"} for n in range(20)}
    cli.inventory.write_text(yaml.safe_dump(known))
    found = cli.json("ps")
    assert found == {"runs": [], "unreachable": []}
    assert proxied.traffic()["connections"] == 1


def test_a_slow_connect_is_no_failure(cli: Cli, proxied: Proxy) -> None:
    proxied.set(rtt_ms=1000)
    assert cli("exec", "lab-201", "--", "echo", "hi", code=0).stdout == "hi\n"


def test_a_login_shell_that_prints_first_does_no_harm(cli: Cli, lab: Lab) -> None:
    profile = "/root/.bashrc"
    lab.host(["sh", "-c", f"test ! -e {profile} || mv {profile} {profile}.kept"])
    lab.host(["sh", "-c", f"echo 'echo Welcome to PVE; seq 5000' > {profile}"])
    try:
        assert lab.ssh("true").stdout.startswith("Welcome")
        assert cli("exec", "lab-201", "--", "echo", "hi", code=0).stdout == "hi\n"
    finally:
        lab.host(
            ["sh", "-c", f"rm {profile}; test ! -e {profile}.kept || mv {profile}.kept {profile}"]
        )
