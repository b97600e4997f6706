"""The wire contract between the laptop and the agent.

The door
========
The laptop runs ``<python> -I -S -c LOADER`` (``orchestrator.agent.loader.argv``) inside the
container through one ``pct exec``, or over plain ssh on a host, and writes one header line to its
standard input::

    <hash> <length> <workdir>\\n

``hash`` is the bundle's sha256 in hex, ``length`` the number of bytes of the bundle (a zipapp) that
follow, 0 when the laptop believes the program is there already; ``workdir`` is the rest of the line
(any bytes but newline). Frames follow at once: the laptop need not wait for anything.

The agent's standard output begins with whatever a noisy login shell printed, then one of

* ``\\x00DFLASH1\\n``: frames follow;
* ``\\x00DFLASH0 <word> <text>\\n``: the program cannot run; nothing follows. ``word`` is ``json``
  (python3-minimal: ``apt install python3``, or name another interpreter) or ``python`` (older than
  3.10); ``text`` is Python's version and path.

Program absent (``length`` 0): the loader writes the magic and the frame ``{"id": 0, "ok": false,
"error": {"kind": "agent.absent", …}}``, skips every frame that was sent on trust, and waits for 8
bytes ``ff`` (``RESYNC``) followed by a new header line, now with the bundle; then it goes on as
above (the magic is not repeated) and the laptop sends its requests again. One round trip, no second
``pct``. Bundle damaged on its way: the same frame with kind ``agent.corrupt``, and the loader ends.
Work folder not writable or full: the program runs from a private folder in /dev/shm or /tmp;
``hello`` says so in ``stored``.

Frames
======
``>II`` (length of JSON, length of payload), the JSON in ASCII (names that are not UTF-8 travel as
``surrogateescape`` code points, ``\\udcff``), the raw payload. JSON ≤ 8 MiB, payload ≤ 1 MiB. A
frame beyond these limits, or JSON that is not an object with an ``id``, ends the agent with an
error frame of kind ``protocol`` and id 0.

First frame, unasked: ``{"id": 0, "hello": {version, python, hostname, pid, boot_id, time, libtmux,
tmux, uid, workdir, stored, platform}}``; ``version`` is the bundle's hash, ``time`` the container's
clock in seconds, ``tmux`` its path or null, ``stored`` "workdir" or "temporary".

Request: ``{"id": n, "op": …, …}``, n ≥ 1, unused on this channel. Any number may be in flight; each
runs in its own thread. Two fields order them without waiting on the laptop:

* ``"after": [ids]``: start when these ended well; if one failed, fail with kind ``dependency``
  (detail ``{"id", "kind"}``).
* ``{"id": n, "cancel": true}``: end that request. It answers as it would at its end or with kind
  ``cancelled``. Cancelling what has ended is no error.

Input: a request with ``"more": true`` is followed by frames ``{"id": n, "more": true}`` + payload
and a last ``{"id": n}`` (+ payload). The first frame may carry payload too. The agent reports what
it has consumed, ``{"id": n, "more": true, "ack": total bytes}``, at the latest when it is 64 KiB
more; the laptop keeps at most ``WINDOW`` bytes unacknowledged a request, otherwise ``protocol``.
``"program": true`` in such a frame, without payload, stands for the bytes of the agent's own
program and counts as they would.

Reply: any number of ``{"id": n, "more": true, …}`` + payload, then one of ``{"id": n, "ok": true,
"result": {…}}`` or ``{"id": n, "ok": false, "error": {"kind", "message", "detail"}}``.

The agent ends (0) at the end of its input and stops everything except supervisors. Pings are
answered by the reading thread, also while everything else is busy.

Error kinds
===========
agent.absent agent.corrupt agent.store (no room for the program anywhere) · protocol · op.unknown ·
request.invalid (a field is missing or of the wrong type) · cancelled · dependency · timeout ·
internal (detail: traceback) · os (detail: errno, name, path) · disk.full · disk.readonly (detail:
path) · command.not_found (``exec``; detail: path) · file.not_found, file.unusable (something else
stands there, or not ours to touch; detail: path) · run.log_link · release.manifest (hostile or
malformed; detail: line, path) · release.missing (detail: indices) · release.corrupt (a blob did not
verify; detail: digest) · release.not_found · run.not_found · run.conflict (same run id, other
command) · run.busy (double launch; detail: runs) · run.not_started (detail: pane, log, exit) ·
tmux.missing · tmux.failed (detail: stderr) · pull.changed (file changed meanwhile) · ct.frozen ·
lease.held (detail: leases)

Operations (fields → frames → result)
=====================================
``ping`` {} → {"time"}

Releases
--------
Manifest: ASCII JSON lines, sorted by path bytes, each ended by ``\\n``: ``["f", path, sha256 hex,
size, 0|1 executable]`` · ``["l", path, link target]`` · ``["d", path]`` (folders that would
otherwise be absent: the empty ones). Paths relative, ``/``-separated, no ``.``, ``..``, empty or
NUL parts, none twice, none below a file or link. A release's id is the first 16 hex digits of the
manifest's sha256, with ``-2``, ``-3`` … appended when a job altered the tree of that name.

``release.begin`` {} + manifest as input → {"release": id, "present": bool, "missing": [line
    indices, from 0, first of each content], "bytes", "stamp": ns} ``present``: this release is
    there, whole; commit is then immediate. Also cleans what dead pushes left.
``release.blobs`` {"blobs": [[sha256, size], …], "stamp"?: the begin's} + their bytes, one after the
    other, as input → {"stored": n, "bytes"}. Each is verified; the good ones stay if the push is
    cut, so a retry sends only the rest. Usable on any channel: the commit reads again what has
    another stamp.
``release.commit`` {"begin": id of the begin on this channel, "meta": {any}} → {"release": id,
    "path", "existing": bool, "files", "bytes"}. Builds beside, verifies, syncs, one rename. With
    ``release.missing`` (blobs were pruned meanwhile, or a job had damaged one) send those indices
    and commit again. ``release`` may differ from begin's: ``-2`` when a job altered the first tree.
``release.prune`` {"keep": n} → {"removed": [ids], "kept": [{"release", "why", …}], "failed":
    [{"path", "why"}]}. Never one that a live run uses, nor one of the ``keep`` last pushed, nor one
    in which a job made or changed files (its results), nor one pushed on another channel that is
    open and has not asked for pruning yet. What is removed is out of sight with the answer; its
    files go after it, and what stays of them is told by the next.

Runs
----
``run.start`` {"run_id", "command": [argv], "name"?, "release"? | "release_from"? (id of a commit
    request in flight; implies after), "cwd"? (absolute, or relative to the release; default the
    release, else workdir), "env": {}, "python"? (an interpreter: given by its absolute path its
    folder is first on PATH unless "env" has one, and VIRTUAL_ENV is set in a virtual environment;
    run.json's "environment" says what was set), "secrets": {} (never written to a record nor to an
    argv), "gpus": [] (indices of nvidia-smi or UUIDs: CUDA_VISIBLE_DEVICES unless "env" has one),
    "meta": {} (kept in run.json as it is: who, git …), "log_link"?,
    "restart": {"max": 0, "backoff_s": 5, "backoff_max_s": 300}, "grace_s": 60, "log_bytes":
    268435456, "log_files": 8, "force": false} + payload: the dirty diff → {"run_id", "state",
    "already": bool, "session", "run_dir", "log", "log_link_moved": path|null (a plain file that
    stood at ``log_link``, moved aside), "log_link_failed": why|null, "release", "supervisor": {pid,
    start, boot_id, child, …}, "attach": [argv]} The same run id again gives the same answer with
    already true, never a second process. Refused with ``run.log_link`` where no link can stand,
    with ``run.busy`` while another run lives here with the same name or one of the same GPUs,
    unless ``force``. run.json names the newest run that was here before as its "predecessor".
``run.list`` {"limit"?: n, "live"?: bool, "lines"?: 0} → {"runs": [summary, newest first], "time"}.
    Beyond the limit those that live.
``run.status`` {"run_id"? (default the newest), "lines": 10, "stall_s"?: s} → summary + {"record":
    run.json, "exit": exit.json|null, "supervisor": supervisor.json|null, "processes": [{pid, ppid,
    command, state, rss_mb}]} Summary: run_id, name, state (starting compiling training stalled
    finished failed stopped), reason, stopping, created, started, ended, exit_code, signal, attempt,
    attempts, step, steps, loss, tau, tokens_per_s, eta_s, epoch, phase (last event), gpus, command,
    release, who, host (container's), session, alive (supervisor), rebooted, boot_id, idle_s (since
    the last line), stall_after_s, last_lines, log_bytes, lost_bytes, heartbeat_s (age),
    predecessor, metrics_time, run_dir
``run.stop`` {"run_id", "grace_s"?: (the run's own), "who"?} → frames {"more": true, "signal":
    "INT"|"TERM"|"KILL", "left": n} → {"state", "exit_code", "signal", "already": bool, "killed":
    [pids], "last_lines"}
``run.attach`` {"run_id", "terminals"?: [values of TERM, the wanted one first]} → {"session",
    "socket", "tmux", "argv", "alive": bool (session there), "log", "terminal" (the first that this
    machine has a description of, or null)}

Reading
-------
``tail`` {"run_id"?, "files": ["train.log"] (relative to the run, or absolute without one),
    "cursors"?: [cursor|null per file], "lines"?: n, "since"?: seconds of the container's clock,
    "follow": true} → frames {"more": true, "file": index, "cursor": {…}} + whole lines (pieces end
    after ``\\n`` or ``\\r``; ≤ 256 KiB) → {"reason": "ended"|"eof", "cursors": [...]} Start: the
    cursor, else the last ``lines`` lines, else ``since``, else the start of the oldest rotated
    file. ``cursor`` is to be handed back as it came: {"file", "dev", "inode", "offset", "head"}; it
    is the position after the frame's bytes. Frames without payload tell {"notice":
    "rotated"|"truncated"|"gap"|"waiting"|"state", "file", …}; ``gap`` (bytes unknown) means that
    what the cursor pointed at is gone. ``state`` {"state", "attempt"} tells changes of the run.
    With ``follow`` a run's tail ends after the run has: all read, an unfinished last line flushed.
    A plain file's ends by cancel.
``exec`` {"command": [argv], "cwd"?, "env"?: {}, "python"? (as in ``run.start``), "timeout_s"?,
    "stdin"?: bool} (+ input, with ``more``) → frames {"stream": "stdout"|"stderr"} + payload →
    {"exit_code": int|null, "signal": int|null, "timed_out": bool}. Cancel ends the process group
    (TERM, 2 s, KILL).
``pull.list`` {"path" (absolute) | "run_id" + "path"? (relative)} → frames + payload of JSON lines
    ``["f", path, size, mtime_ns, mode]`` ``["l", path, target]`` ``["d", path]`` → {"root",
    "files", "bytes"}. ``root`` is the real path where a link was named; it is path ``""`` itself
    when it is a file.
``pull.read`` {"path" | "run_id" + "path", "offset": 0, "expect"?: {"size", "mtime_ns"}, "limit"?: n
    (the first n bytes of a file that may grow)} → frames {"offset"} + payload → {"size", "sha256"
    (of the whole file, or of those n bytes), "mtime_ns", "mode"}. Before the first piece at a large
    offset come {"hashed": bytes} frames: what is there already is hashed.
``pull.last_checkpoint`` {"run_id"} → {"path"|null, "step"|null, "best": path|null (what the link
    ``best`` names), "checkpoints": [paths, oldest first]}

Looking
-------
``preflight`` {"python", "modules": [names], "gpus": [], "release_bytes"?} → {"checks": {name:
    {"ok": bool, "seconds", "value": {…} | "error"}}} names: python, modules, tmux, disk, shm,
    limits, memory, locale, clock, gpu, cpu, workdir, runs
``probe`` {"names"?: [] (default all of this side), "without"?: [names], "run_id"?, "side":
    "container"|"host", "ct"?, "python"?, "pve_root"?, "timeout_s": 3} → frames {"probe": name,
    "ok", "text", "value", "seconds", "error"?} as they come → {"probes": {name: {…}}}; names are
    those of ``probe.looks``. ``text`` is what a person would have seen (of a failed look: why),
    ``value`` the same or a small JSON value (boot_id {"at_start", "now"}, exit_record). Each has
    its own time limit and cannot fail the others.
``gpu.processes`` {"timeout_s": 10} → {"gpus": [{index, uuid, name, memory_used_mb,
    memory_total_mb, utilization, pids: []}], "processes": [{pid, gpu_uuid, memory_mb, command, ct,
    run_id}], "error"?}; on a host ``ct`` is the container of the PID (by its cgroup) or null,
    ``run_id`` whose run it is
``stacks`` {"run_id", "timeout_s": 10, "side"?: "container"|"host", "ct"? (on the host)} →
    {"stacks": [{pid (the container's), command, text, rank?, error?}], "path" (null on the host)}

Hosts
-----
``ct.list`` {"pve_root"?} → {"containers": [{ct, name, status, frozen, lock, config: {…}}]}
``lease.acquire`` {"gpus": [uuids], "run_id", "ct", "owner": {user, laptop, …}, "force"?: bool,
    "started"?: bool (its processes are there: without them it is stale at once)} → {"leases": […],
    "taken_over": [stale leases]} or ``lease.held``; all or none
``lease.release`` {"run_id"} → {"released": [uuids]}
``lease.list`` {} → {"leases": [{gpu, run_id, ct, owner, created, stale: bool, why}]}
``audit`` {"who", "action", "result", …} → {}
``relay`` {"command": [argv], "ct"?} + input → {"pid"} when it has been started, frames {"stream":
    "stdout"|"stderr"} + payload → {"exit_code", "signal"}. The way into this host's containers: the
    command is another agent's door (``pct exec N -- python3 -c LOADER``), and its streams are that
    agent's. Only a few are started at a time (those that have not yet written to stdout), the
    others wait; a frozen container's is not started at all (``ct.frozen``). The laptop acknowledges
    what it has taken, ``{"id": n, "ack": total bytes}``; at most ``RELAY_WINDOW`` bytes of both
    streams go without, so that a relay whose reader is slow stops alone. Cancel ends the command's
    input, which ends an agent; one that has not spoken is killed. The relayed agents end with this
    one: their pipes are its own.
"""

from __future__ import annotations

MAGIC = b"\x00DFLASH1\n"
REFUSAL = b"\x00DFLASH0 "
RESYNC = b"\xff" * 8

JSON_LIMIT = 8 << 20
PAYLOAD_LIMIT = 1 << 20
WINDOW = 16 << 20
"""Bytes of input that one request may have unacknowledged: 100 ms × 160 MB/s."""

RELAY_WINDOW = 4 << 20
"""Bytes of a relay's output that the laptop may have unacknowledged: 100 ms × 40 MB/s for each of
many containers."""

TAIL_PIECE = 256 << 10


class AgentError(Exception):
    """A request's failure as it travels: one of the kinds above, words for a person, details."""

    def __init__(self, kind: str, message: str, /, **detail: object) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail

    def as_dict(self) -> dict[str, object]:
        return {"kind": self.kind, "message": self.message, "detail": self.detail}
