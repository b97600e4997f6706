"""Collectives: rendezvous, NCCL's start, time-outs, lost peers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.flight import first_mismatch, read_dumps

TIMEOUT = (
    r"Watchdog caught collective operation timeout",
    r"ran for \d+ milliseconds before timing out",
    r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
    r"failed to pass monitoredBarrier in \d+ ms",
    r"monitoredBarrier.*timed out|Rank \d+ timed out in monitoredBarrier|"
    r"Detected mismatch between collectives",
    r"ProcessGroupNCCL watchdog hang|ProcessGroupNCCL's watchdog got stuck",
    r"[Hh]eartbeat monitor timed out",
    r"Received a (?:dump signal|timeout)[^\n]*(?:collective|timeout)[^\n]*(?:rank|from)",
    r"Observed flight recorder dump signal|First PG on this rank to signal dumping",
    r"Some NCCL operations have failed or timed out|due to collective timeout or exception",
    r"Collectives differ in the following aspects|collective mismatch",
    r"wait timeout after \d+ms.*(?:barrier|allreduce)",
    r"gloo.*[Tt]imed out",
)
INIT = (
    r"NCCL (?:error in: |Error \d+: )[^\n]*(?:unhandled (?:system|cuda) error|invalid usage|"
    r"internal error|invalid argument)",
    r"ncclInvalidUsage|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|"
    r"ncclInvalidArgument",
    r"Duplicate GPU detected",
    r"Bootstrap ?: no socket interface found|no (?:usable |suitable )?(?:socket |"
    r"network )?interface found",
    r"NCCL WARN (?:Error ?:|NET|Bootstrap|Could not find|Failed to find|Cuda failure|"
    r"Invalid)[^\n]*",
    r"(?:socketStartConnect|ncclSocket(?:Connect|PollConnect)|Net ?:? ?[Cc]onnect(?:ion)?)[^\n]*"
    r"(?:failed|refused|No route|timed out|unreachable)",
    r"NCCL WARN (?:socket|Connect|Call to connect|Timeout waiting)[^\n]*(?:failed|refused|"
    r"No route|timed)",
    r"[Mm]ismatched? (?:NCCL|collective) version|NCCL version mismatch",
    r"Unable to find (?:address|interface)[^\n]*(?:NCCL|IFNAME|interface)",
    r"[Uu]nable to find address for: \S+",
    r"NCCL WARN [^\n]*(?:NVLS|nvls|P2P|multicast)[^\n]*(?:fail|error|not supported)",
    r"Failed to CUDA calloc|NCCL communicator was aborted on rank \d+\.\s+Original reason.*init",
    r"ncclCommInitRank(?:Config)? failed|nccl(?:Comm)?Init\w* (?:failed|error)",
)
PEER = (
    r"ncclRemoteError",
    r"remote process exit(?:ing|ed) prematurely|remote process has exited|"
    r"NCCL Error \d+: remote process exited",
    r"[Cc]onnection (?:closed|reset) by (?:remote )?peer",
    r"NET/IB ?: Got completion (?:from peer [^\n]*)?with (?:status=|error )\s*[1-9]\d*",
    r"recvValue failed on SocketImpl|sendBytes failed on SocketImpl|recvBytes failed",
    r"Failed to recv, got 0 bytes|Did the remote server shutdown or crash",
    r"Failed to check the \"should dump\" flag on TCPStore",
    r"(?:TCPStore|store)[^\n]*(?:Broken pipe|Connection reset)",
    r"\[Rank \d+\][^\n]*(?:peer|rank) \d+ (?:left|exited|raised|died|went|is gone)",
    r"(?:peer|rank) \d+ (?:left|exited|died|went away|is gone|disconnected)",
    r"NCCL communicator was aborted",
)
RENDEZVOUS = (
    r"(?:EADDRINUSE|errno: 98|Address already in use)",
    r"The server socket has failed to (?:listen on|bind to) (?:any local network address|\S+)",
    r"client socket has (?:failed to connect|timed out after)",
    r"Rendezvous(?:Connection|Timeout|Closed|State|GracefulExit)?Error",
    r"(?:Timed out|timeout) after \d+ seconds? waiting for clients\. \d+/\d+ clients joined",
    r"Dist(?:Store|Network)Error",
    r"Timeout waiting for key|wait timeout after \d+ms, keys?:",
    r"StoreTimeoutError|Store(?: operation)? timed out|Socket Timeout",
    r"Error initializing torch\.distributed using (?:env|tcp)://",
    r"Timed out initializing process group in store based barrier",
    r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
    r"KeyError: '(?:LOCAL_RANK|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
    r"network addresses of \([^)]+\) cannot be retrieved",
    r"[Tt]he connection to the C10d store has failed",
    r"Gloo connectFullMesh failed",
    r"Failed to connect to (?:the )?(?:master|rendezvous|store|etcd)|"
    r"MASTER_ADDR[^\n]*(?:unreach|refused)",
    r"(?:waiting for|only) \d+(?:/| of )\d+ (?:nodes|ranks|clients|workers) (?:joined|to join|"
    r"present|arrived)",
)
_LATE = re.compile(r"recvValue|sendBytes|should dump|remote server|Broken pipe|HeartbeatMonitor")
_WORK = re.compile(r"WorkNCCL\((?:SeqNum|seq)=(\d+), OpType=(\w+)")


_UNRESOLVED = re.compile(r"(IPv[46]) network addresses of \(([^,)\s]+), \d+\) cannot be retrieved")
# torch asks again a second after, then ever later; a name that DNS is slow with comes within that.
TRIES = 3
STALLED_S = 60.0


def _unresolved(e: Evidence, name: str, hits: list[Hit]) -> Iterator[Finding]:
    """torchrun on one node without ``--master-port`` meets at the machine's own host name.

    A name has rarely addresses of both kinds, so a warning of one of them means nothing; and of a
    run that is still starting both may mean a name server that is slow.
    """
    warned = [m for h in hits if (m := _UNRESOLVED.search(h.line.text)) is not None]
    failed = e.outcome.state == "failed" or len(warned) < len(hits)
    tries = Counter(m[1] for m in warned)
    now, write = e.probes.now, e.probes.last_write
    silence = now - write if now is not None and write is not None else 0.0
    again = max(tries.values()) >= TRIES
    if not failed and len(tries) < 2 and not again:
        return
    stalled = again or silence >= STALLED_S
    yield e.found(
        "dist.rendezvous",
        f"the ranks did not find each other: nothing resolves the host name {name}",
        hits[:2],
        f"getent hosts {name}   # in the container; nothing printed: the name has no address\n"
        f"its own name: echo '127.0.1.1 {name}' >> /etc/hosts, or torchrun --local-addr 127.0.0.1\n"
        "another node's: its address in /etc/hosts of each node, or --rdzv-endpoint ADDRESS:PORT",
        severity="fatal" if failed or stalled else "warning",
        confidence=0.92 if failed or stalled else 0.6,
    )


def rendezvous(e: Evidence) -> Iterator[Finding]:
    """c10d's TCPStore and torchrun before the first collective: ``EADDRINUSE`` (errno 98, any
    locale of wording), ``client socket has timed out after 60000ms``, ``Timed out after 901
    seconds waiting for clients. 1/2 clients joined``, missing MASTER_ADDR."""
    if e.series.steps and e.outcome.state != "failed":
        return
    hits = [h for h in e.search(*RENDEZVOUS) if not _LATE.search(h.line.text)]
    hits = [h for h in hits if not _after_steps(e, h) and not _about_ssh(h)]
    hard = [h for h in hits if not e.recovered(h.line)]
    if not hard:
        return
    text = " ".join(h.line.text for h in hard)
    named = re.search(r"port[: ]+(\d{2,5})|\]?:(\d{4,5})\b|\([^,]+, (\d{4,5})\)", text)
    port = next((g for g in named.groups() if g), "29500") if named else "29500"
    in_use = re.search(r"EADDRINUSE|errno: 98|Address already in use|address in use", text)
    missing = re.search(r"(\d+)/(\d+) clients joined", text)
    if (name := _UNRESOLVED.search(text)) is not None and not in_use and not missing:
        yield from _unresolved(e, name[2], hard)
        return
    title = (
        f"port {port} is taken already"
        if in_use
        else f"only {missing[1]} of {missing[2]} nodes joined"
        if missing
        else "the ranks did not find each other: " + hard[0].line.text.strip()[:110]
    )
    advice = ""
    if "connectFullMesh" in text:
        advice = (
            "gloo meets at each machine's own name: getent hosts $(hostname) must not say 127.…\n"
            "ip -br addr; export GLOO_SOCKET_IFNAME=eth0   # one that reaches the other nodes\n"
        )
    yield e.found(
        "dist.rendezvous",
        title,
        hard[:4],
        advice + f"ss -ltnp | grep {port}   # who holds it: an earlier run's child? kill that PID\n"
        f"another port: torchrun --rdzv-endpoint HOST:29{(int(port) + 11) % 1000:03d} … or "
        "--standalone\n"
        f"from each node: nc -vz MASTER {port}; same --rdzv-id and --nnodes everywhere",
        confidence=0.9,
    )


def _after_steps(e: Evidence, hit: Hit) -> bool:
    steps = e.series.steps
    return (
        bool(steps)
        and hit.line.source == "log"
        and any(s.number < hit.line.number for s in steps if s.number > e.outcome.attempt_line)
    )


def _about_ssh(hit: Hit) -> bool:
    # OpenSSH's client says of its own connection what NCCL says of a rank's.
    client = r"Read from remote host|client_loop|kex_exchange|mux_client_"
    return re.search(rf"\bssh\b|port 22\b|paramiko|sshd|{client}", hit.line.text) is not None


def init(e: Evidence) -> Iterator[Finding]:
    """``NCCL error in: … unhandled system error | invalid usage`` with NCCL's own ``NCCL WARN``
    that says more: ``Duplicate GPU detected``, ``Bootstrap : no socket interface found``, a
    connect to another node's inner address. NCCL INFO lines about plugins that are not there
    mean nothing."""
    hits = [h for h in e.search(*INIT) if "NCCL INFO" not in h.line.text]
    hits = [h for h in hits if not _wrong_layer(h)]
    if not hits or all(e.recovered(h.line) for h in hits):
        return
    if _after_steps(e, hits[0]) and e.search(*PEER, *TIMEOUT):
        return  # it had worked: what broke it is elsewhere
    text = " ".join(h.line.text for h in hits)
    title = "NCCL could not start"
    advice = ""
    if "Duplicate GPU" in text:
        both = re.search(r"rank \d+ and rank \d+ both on CUDA device \w+", text)
        title += f": {both[0] if both else 'two ranks on one GPU'}"
        advice = "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); no more ranks than GPUs\n"
    elif re.search(r"interface|IFNAME|address for", text):
        name = re.search(
            r"(?:NCCL_SOCKET_IFNAME|GLOO_SOCKET_IFNAME)[ =a-z]*?([\w^,=.-]+)|for: (\S+)", text
        )
        title += ": the network interface it was told to use is not there"
        advice = (
            f"ip -br addr; export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0"
            f"   # was: {(name[1] or name[2]) if name else 'unset'}\n"
        )
    elif re.search(r"ersion", text) and "mismatch" in text.lower():
        title += ": the ranks have different NCCL versions"
        advice = "python -c 'import torch; print(torch.cuda.nccl.version())'   # on every node\n"
    else:
        title += ": " + hits[0].line.text.strip()[:120]
    yield e.found(
        "nccl.init",
        title,
        hits[:4],
        advice + "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET dflashctl launch …   # the reason in "
        "NCCL WARN\n"
        "several interfaces: NCCL_SOCKET_IFNAME=…; no InfiniBand: NCCL_IB_DISABLE=1; P2P "
        "trouble in a\n"
        "container: NCCL_P2P_DISABLE=1 as a test",
        confidence=0.85,
    )


def _wrong_layer(hit: Hit) -> bool:
    return re.search(r"Watchdog|ncclRemoteError|timed out after \d+ ms", hit.line.text) is not None


_HEARSAY = re.compile(
    r"Observed flight recorder dump signal|Received a (?:dump signal|timeout)|"
    r"First PG on this rank to signal dumping"
)


def timeout(e: Evidence) -> Iterator[Finding]:
    """torch 1.13 to 2.15 watchdogs (``Watchdog caught collective operation timeout:
    WorkNCCL(SeqNum=…, OpType=ALLREDUCE …)``), the heartbeat monitor, gloo's ``Timed out waiting``,
    ``monitoredBarrier``. The rank that does *not* complain is the suspect."""
    hits = e.search(*TIMEOUT)
    recorded = first_mismatch(read_dumps(e.probes))
    if not hits or all(e.recovered(h.line) for h in hits):
        return
    # One that only heard of it from the others has not waited itself.
    own = [h for h in hits if not _HEARSAY.search(h.line.text)] or hits
    ranks = {h.line.rank for h in own if h.line.rank is not None}
    work = Counter(m.groups() for h in hits if (m := _WORK.search(h.line.text)) is not None)
    world = _world(e, ranks | {h.line.rank for h in hits if h.line.rank is not None})
    silent = sorted(set(range(world)) - ranks) if world else []
    title = "a collective timed out"
    if work:
        (sequence, kind), _ = work.most_common(1)[0]
        title += f": {kind} number {sequence}"
    if recorded is not None:
        title += f"; {recorded.text}"
        silent = []
    odd = [k for k in work if k[1] != next(iter(work))[1]]
    if odd:
        title += f"; the ranks disagree on which: {', '.join(sorted({k[1] for k in work}))}"
    if ranks and silent and len(silent) <= max(2, world // 2):
        title += f"; rank {', '.join(map(str, silent))} never arrived"
    elif ranks and recorded is None:
        title += f"; waiting were ranks {', '.join(map(str, sorted(ranks)))}"
    yield e.found(
        "nccl.timeout",
        title,
        [
            *hits[:4],
            *(e.probes.named(r"flight|fr_?(?:dump|trace)|nccl_trace")[:1] if recorded else []),
        ],
        "what was the missing rank doing? look at its last lines and: py-spy dump --pid PID\n"
        "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1   # flight recorder, a dump a "
        "rank\n"
        "python -m torch.distributed.flight_recorder.fr_trace DIR   # or: dflashctl diag\n"
        "a rank that does long work alone (evaluation, checkpoint): barrier with a longer timeout",
        confidence=0.85,
    )


def _world(e: Evidence, ranks: set[int]) -> int:
    for hit in e.search(
        r"\bworld[_ ]?(?:size)?[ =:]+(\d+)",
        r"nproc[-_]per[-_]node[ =]+(\d+)",
        r"\b(\d+) ranks\b",
        quiet=True,
    ):
        return int(hit[1])
    others = {li.rank for li in e.lines if li.rank is not None}
    local = {int(h[1]) for h in e.search(r"local_rank: (\d+)")}
    top = max(ranks | {r for r in others if r is not None} | local, default=-1)
    return top + 1


def peer_lost(e: Evidence) -> Iterator[Finding]:
    """``ncclRemoteError``, gloo's ``Connection closed by peer``, IB completion with error 12, the
    store's ``Did the remote server shutdown or crash``: someone went first, and the first cause in
    time is there, not here."""
    hits = [h for h in e.search(*PEER) if not _about_ssh(h) and "HTTP" not in h.line.text]
    hits = [h for h in hits if not re.search(r"urllib3|requests\.|httpx|https?://", h.line.text)]
    if not hits or all(e.recovered(h.line) for h in hits):
        return
    ranks = sorted({h.line.rank for h in hits if h.line.rank is not None})
    peer = next(
        (
            m
            for h in hits
            if (
                m := re.search(
                    r"peer (?:ct\d+-?\w*|\[?[\d.]+\]?(?::\d+)?|\d+)|(?:rank|peer) \d+ (?:left|"
                    r"exited|died|went)"
                    r"|remote ?[Aa]ddr\S* ?\S+|[\d.]+<\d+>",
                    h.line.text,
                )
            )
        ),
        None,
    )
    yield e.found(
        "nccl.peer_lost",
        "a rank went first and the others lost it"
        + (f" ({peer[0]})" if peer else "")
        + (f"; reported by ranks {', '.join(map(str, ranks))}" if ranks else ""),
        hits[:4],
        "the cause is on the rank or node that is silent here: its log, its host's dmesg, its "
        "container\n"
        "dflashctl diag NODE; pct status CT; ping and ethtool of the link between the nodes\n"
        "InfiniBand completion errors: ibstat; perfquery; NCCL_IB_TIMEOUT=22",
        confidence=0.75,
    )


RULES = (rendezvous, init, timeout, peer_lost)
