"""Between the laptop and the host: SSH."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import answered, host_asked
from orchestrator.diag.text import Line

WAY = r"ssh|connect|^pct|agent|tcp|ping|tail|exec"  # probes that tell of our own way in
UNREACHABLE = (
    r"ssh: connect to host \S+ port \d+: (?:Connection timed out|Connection refused|"
    r"No route to host"
    r"|Network is unreachable|Operation timed out|Host is down|Invalid argument)",
    r"ssh: Could not resolve hostname",
    r"Connection timed out during banner exchange",
    r"Error reading SSH protocol banner",
    r"Connection to \S+ port \d+ timed out",
    r"(?:kex|ssh)_exchange_identification: (?:read: )?(?:Connection|banner|Not allowed)",
    r"Unable to connect to port \d+ on",
    r"NoValidConnectionsError",
    r"Timeout, server \S+ not responding",
    r"client_loop: send disconnect: (?:Broken pipe|Connection reset)",
    r"Connection (?:reset|closed) by \S+ port \d+\s*$",
    r"Connection closed by (?:remote host|UNKNOWN port \d+)",
    r"stdio forwarding failed|channel \d+: open failed: connect failed",
    r"paramiko\.ssh_exception\.SSHException: (?:No existing session|Server connection dropped"
    r"|Timeout opening channel|SSH session not active|Unable to open channel)",
    r"paramiko.*EOFError",
    r"drop connection #\d+ .*(?:MaxStartups|past)|Exceeded MaxStartups",
    r"ssh_dispatch_run_fatal: Connection to",
)
AUTH = (
    r"Permission denied \((?:publickey|password|keyboard-interactive|gssapi|hostbased)[^)]*\)",
    r"Permission denied, please try again",
    r"Too many authentication failures",
    r"(?:Bad)?Authentication(?:Exception|Type)?: ?(?:Authentication failed|"
    r"Bad authentication type|\(')",
    r"AuthenticationException",
    r"No authentication methods available",
    r"No supported authentication methods available",
    r'Load key "[^"]*": (?:error in libcrypto|invalid format|bad permissions|incorrect passphrase)',
    r"WARNING: UNPROTECTED PRIVATE KEY FILE",
    r"sign_and_send_pubkey: (?:signing failed|no mutual signature)",
    r"PasswordRequiredException",
    r"[Nn]ot a valid (?:OPENSSH|RSA|DSA|EC) private key file",
    r"This account is currently not available",
    r"agent refused operation",
)
HOST_KEY = (
    r"REMOTE HOST IDENTIFICATION HAS CHANGED",
    r"Host key verification failed",
    r"BadHostKeyException|Host key for server '?[^']+'? does not match",
    r"Offending (?:\S+ )?key in",
    r"host key for \S+ has changed",
    r"No \S+ host key is known for \S+ and you have requested strict checking",
    r"Server '[^']+' not found in known_hosts",
    r"DNS SPOOFING",
)


def host_key(e: Evidence) -> Iterator[Finding]:
    """OpenSSH 7 to 10 (``REMOTE HOST IDENTIFICATION HAS CHANGED``, ``Host key verification
    failed``), paramiko 2 to 5 (``BadHostKeyException``, RejectPolicy's ``not found in
    known_hosts``)."""
    hits = e.search(*HOST_KEY, named=WAY)
    if hits:
        host = host_asked(e, hits)
        yield e.found(
            "ssh.host_key",
            f"the host key of {host.title} is not the one that is known",
            hits[:4],
            f"compare on the host's console: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub\n"
            f"only if the host was reinstalled: ssh-keygen -R {host.known_as} && ssh "
            f"{host.ssh_options}-o StrictHostKeyChecking=accept-new {host.ssh_host} true",
            lasting=_lost(e, hits),
        )


def authentication(e: Evidence) -> Iterator[Finding]:
    """OpenSSH (``Permission denied (publickey)``; ``Load key … error in libcrypto`` is a damaged
    file), paramiko (``AuthenticationException``, ``No authentication methods available``). Not the
    bare ``Permission denied`` of files and devices."""
    hits = e.search(*AUTH, named=WAY)
    if hits and not _went_in(e):
        host = host_asked(e, hits)
        yield e.found(
            "ssh.auth",
            f"{host.title} refused the key or the user",
            hits[:4],
            f"ssh -v {host.ssh_options}{host.ssh_host} true   # which keys are offered\n"
            f"ssh-add -l; chmod 600 ~/.ssh/id_*; ssh-keygen -yf ~/.ssh/id_ed25519 >/dev/null\n"
            f"ssh-copy-id {host.ssh_options}{host.ssh_host}   # from a machine that still gets in",
            lasting=_lost(e, hits),
        )


def _raised_by_client(e: Evidence) -> list[Line]:
    """Last lines of exceptions that passed through fabric or paramiko, whatever they say."""
    return [
        f.line
        for f in e.errors
        if any(re.search(r"/(?:fabric|paramiko)/", frame.file) for frame in f.frames)
    ]


def unreachable(e: Evidence) -> Iterator[Finding]:
    """OpenSSH and paramiko before any key is exchanged: DNS, TCP, banner. A key that is refused or
    differs proves that the host was reached, so those rules win."""
    hits = e.search(*UNREACHABLE, named=WAY)
    hits += [
        h
        for h in e.search(r"gaierror|Name or service not known|Temporary failure in name resol")
        if _about_ssh(h.line.text) or "ssh" in h.line.source or h.line in _raised_by_client(e)
    ]
    hits += [
        h
        for h in e.search(r"Connection refused|No route to host|timed out", log=False)
        if h.line.source in ("probe:ssh", "probe:tcp_22", "probe:connect", "probe:ping")
    ]
    if not hits or e.search(*AUTH, named=WAY) or e.search(*HOST_KEY, named=WAY) or answered(e):
        return
    host = host_asked(e, hits)
    yield e.found(
        "ssh.unreachable",
        f"{host.title} was not reached over SSH; what runs there is unknown, not failed",
        hits[:4],
        f"ping -c 3 {host.address}; nc -vz {host.address} {host.port or 22}; "
        f"getent hosts {host.address}\n"
        f"on the host's console: systemctl status ssh; journalctl -u ssh -n 50; df -h /",
        lasting=_lost(e, hits),
    )


def _about_ssh(text: str) -> bool:
    return "ssh" in text.lower() or "paramiko" in text or "port 22" in text


def _lost(e: Evidence, hits: list[Hit]) -> bool:
    """Not reached to the end. Steps after it come from the local copy and prove nothing; a later
    word of the controller that it is connected does."""
    last = max((h.line.number for h in hits if h.line.source == "log"), default=0)
    back = e.search(
        r"(?i)\b(?:reconnected|connected|connection (?:is )?(?:back|restored|established|ok)|"
        r"connect: ok|channel open|"
        r"link (?:is )?(?:back|up|restored)|(?:succeeded|ok) (?:after|on) (?:retry|attempt)|"
        r"agent answered)\b",
        probes=False,
    )
    return not any(h.line.number > last for h in back) and e.outcome.state != "finished"


def _went_in(e: Evidence) -> bool:
    """A later key or password worked: the run was reached after all."""
    return bool(e.series) and e.outcome.state in ("finished", "running")


RULES = (host_key, authentication, unreachable)
