"""``run.start``: a run's folder, then its tmux session, exactly once.

Started once is made sure of twice: here by a lock and by the folder that appears whole by rename,
and in the supervisor, which locks the folder and starts nothing if a supervisor was there before.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import shutil
import time
from typing import Any

from orchestrator.agent.attach import attach_command
from orchestrator.agent.files import locked, make_private, read_record, write_bytes, write_record
from orchestrator.agent.program import boot_id, of_interpreter, runnable, search_path
from orchestrator.agent.protocol import AgentError
from orchestrator.agent.serve import Request
from orchestrator.paths import FLIGHT_VARIABLES, RunPaths

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""Also a tmux session's name, where ``.`` and ``:`` mean something else."""

START_WAIT_S = 20.0
_NOT_INHERITED = ("SSH_", "TMUX", "DFLASH", "XDG_SESSION", "LINES", "COLUMNS")
"""Of pct exec's leaked environment: what speaks of the connection, not of the machine."""

_DEFAULT_RESTART = {"max": 0, "backoff_s": 5.0, "backoff_max_s": 300.0}


def start(request: Request) -> dict[str, Any]:
    run_id = request.need("run_id", str)
    if not RUN_ID.fullmatch(run_id):
        raise AgentError("request.invalid", f"not a run id: {run_id!r}", field="run_id")
    paths = request.paths.run(run_id)
    record, plan = _plan(request, paths)
    link = request.get("log_link", str)
    # Before the lock: whoever is cut off in the middle must not hold up others' starts.
    diff = request.read_input(64 << 20)
    make_private(request.paths.runs)
    with locked(f"{request.paths.runs}/.lock"):
        already = os.path.isdir(paths.root)
        if already:
            _same(paths, record)
        else:
            if not request.get("force", bool, False):
                _refuse_second(request, record)
            if link:
                _check_link(link)
            record["predecessor"] = _newest(request)
            # Written down, it keeps its release from being pruned: one may go until then.
            with locked(request.paths.lock, shared=True):
                _code(request, record["release"])
                _make_folder(request, paths, record, plan, diff)
        if not os.path.exists(paths.supervisor):
            try:
                _begin(request, paths, plan)
            except AgentError:
                _undo(paths)
                raise
            supervisor = _await_supervisor(paths)
        else:
            supervisor = read_record(paths.supervisor) or {}
    moved, unlinked = _link_log(link, paths)
    from orchestrator.agent.status import state_of

    return {
        "run_id": run_id,
        "state": state_of(paths),
        "already": already,
        "session": run_id,
        "run_dir": paths.root,
        "log": paths.log,
        "log_link_moved": moved,
        "log_link_failed": unlinked,
        "release": record["release"],
        "supervisor": supervisor,
        "attach": attach_command(run_id),
    }


def _plan(request: Request, paths: RunPaths) -> tuple[dict[str, Any], dict[str, Any]]:
    """What run.json says (for people) and what the supervisor needs (values too)."""
    command = words(request)
    release = _release(request)
    code = _code(request, release)
    cwd = code or request.paths.workdir
    if request.get("cwd", str):
        cwd = posixpath.join(cwd, request.get("cwd", str))
    given = variables(request.get("env", dict, {}))
    secrets = variables(request.get("secrets", dict, {}))
    chosen = of_interpreter(request.get("python", str), given | secrets)
    gpus = request.get("gpus", list, [])
    record = {
        **request.get("meta", dict, {}),
        "run_id": paths.run_id,
        "name": request.get("name", str, paths.run_id.rsplit("-", 3)[0]),
        "release": release,
        "command": command,
        "cwd": cwd,
        "environment": chosen,
        "env_names": sorted(given),
        "secret_names": sorted(secrets),
        "gpus": gpus,
        "session": paths.run_id,
        "created": time.time(),
        "boot_id": boot_id(),
        "hostname": os.uname().nodename,
        "log_link": request.get("log_link", str),
        "restart": {**_DEFAULT_RESTART, **request.get("restart", dict, {})},
        "grace_s": request.get("grace_s", (int, float), 60),
    }
    plan = {
        **{key: record[key] for key in ("command", "cwd", "session", "restart", "grace_s")},
        "environment": _environment(paths, code, chosen | given, gpus),
        "given": given,
        "umask": _own_umask(),
        "log_bytes": request.get("log_bytes", int, 256 << 20),
        "log_files": request.get("log_files", int, 8),
    }
    return record, plan


def _environment(
    paths: RunPaths, code: str | None, given: dict[str, str], gpus: list[Any]
) -> dict[str, str]:
    """The command's: the machine's, over it what was given, and what every run gets unless given.

    :param code: the release's folder.
    """
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(_NOT_INHERITED)
    }
    environment |= given
    environment["PATH"] = search_path(environment)
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # A library that crashes the interpreter (a torch built for another processor) leaves a signal
    # and no word otherwise; with it, every thread's stack is in the log.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    environment |= {"DFLASH_RUN_ID": paths.run_id, "DFLASH_RUN_DIR": paths.root}
    for variable in FLIGHT_VARIABLES:
        environment.setdefault(variable, paths.flight_prefix)
    if code is not None:
        environment["DFLASH_RELEASE_DIR"] = code
    if gpus and "CUDA_VISIBLE_DEVICES" not in given:
        # A run sees what it leased. nvidia-smi counts by bus, CUDA by default the fastest first.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        environment["CUDA_DEVICE_ORDER"] = given.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return environment


def _release(request: Request) -> str | None:
    number = request.get("release_from", int)
    if number is None:
        name = request.get("release", str)
        if name is not None and (not name or "/" in name or name.startswith(".")):
            raise AgentError("request.invalid", f"not a release: {name!r}", field="release")
        return str(name) if name is not None else None
    commit = request.server.request(number)
    if commit is None or commit.result is None or "release" not in commit.result:
        raise AgentError("request.invalid", f"request {number} gave no release")
    return str(commit.result["release"])


def _code(request: Request, release: str | None) -> str | None:
    """The release's folder."""
    code = request.paths.release(release) if release else None
    if code is not None and not os.path.isdir(code):
        raise AgentError("release.not_found", f"there is no release {release}", release=release)
    return code


def words(request: Request) -> list[str]:
    command: list[str] = request.need("command", list)
    if not command or not all(isinstance(word, str) and "\0" not in word for word in command):
        raise AgentError("request.invalid", "the command is empty or no list of words")
    return command


def variables(given: dict[str, Any]) -> dict[str, str]:
    for key, value in given.items():
        bad = not key or "=" in key or "\0" in key or not isinstance(value, str) or "\0" in value
        if bad:
            raise AgentError("request.invalid", f"not an environment variable: {key!r}")
    return given


def _same(paths: RunPaths, record: dict[str, Any]) -> None:
    """The run id is there already: the same request, or somebody else's?"""
    known = read_record(paths.record) or {}
    if any(known.get(key) != record[key] for key in ("command", "cwd", "release", "gpus")):
        raise AgentError(
            "run.conflict",
            f"run {paths.run_id} is there already with another command or release",
            command=known.get("command"),
            release=known.get("release"),
        )


def _refuse_second(request: Request, record: dict[str, Any]) -> None:
    from orchestrator.agent.status import in_the_way

    busy = in_the_way(request.paths, record["gpus"])
    if busy:
        named = ", ".join(one["words"] for one in busy)
        raise AgentError("run.busy", f"already running here: {named}", runs=busy)


def _newest(request: Request) -> str | None:
    """The last run here, whoever launched it: what a new one's speed is measured by."""
    from orchestrator.agent.status import folders

    found = folders(request.paths)
    return found[0].run_id if found else None


_STAGING = ".start-"


def _beside(paths: RunPaths) -> str:
    """Where a run's folder is made and unmade: under its own name it is always whole."""
    return f"{os.path.dirname(paths.root)}/{_STAGING}{paths.run_id}"


def _make_folder(
    request: Request, paths: RunPaths, record: dict[str, Any], plan: dict[str, Any], diff: bytes
) -> None:
    """All of it beside, then one rename."""
    staging = _beside(paths)
    # Left by agents that were killed here; we hold the lock.
    for entry in os.scandir(request.paths.runs):
        if entry.name.startswith(_STAGING):
            shutil.rmtree(entry.path, ignore_errors=True)
    try:
        make_private(f"{staging}/checkpoints")
        make_private(f"{staging}/stacks")
        beside = RunPaths(staging)
        write_record(beside.record, record, durable=False)
        write_record(beside.start, plan, durable=False)
        if diff:
            write_bytes(beside.dirty_diff, diff, durable=False)
        os.rename(staging, paths.root)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _begin(request: Request, paths: RunPaths, plan: dict[str, Any]) -> None:
    import sys

    from orchestrator.agent import tmux

    secrets = request.get("secrets", dict, {})
    if secrets:
        write_bytes(paths.secrets, json.dumps(secrets).encode(), durable=False)
    given = plan["given"] | {"DFLASH_RUN_DIR": paths.root}
    program = runnable(request.server.program)
    command = [sys.executable, "-I", "-S", program, "supervise", paths.root]
    tmux.new_session(paths.run_id, command, given)


def _undo(paths: RunPaths) -> None:
    """tmux refused: no secret stays behind, and no run that would be "starting" for minutes."""
    from orchestrator.agent import tmux

    if tmux.has_session(paths.run_id):
        return  # its answer was lost, not the session
    staging = _beside(paths)
    os.rename(paths.root, staging)
    shutil.rmtree(staging, ignore_errors=True)


def _await_supervisor(paths: RunPaths) -> dict[str, Any]:
    """Proof that it runs: tmux's own 0 says nothing."""
    from orchestrator.agent import tmux

    until = time.monotonic() + START_WAIT_S
    look_at = time.monotonic() + 0.5
    while time.monotonic() < until:
        record = read_record(paths.supervisor)
        if record is not None:
            return record
        if time.monotonic() > look_at:
            look_at = time.monotonic() + 0.5
            dead, shown = tmux.pane_state(paths.run_id)
            if dead and not os.path.exists(paths.supervisor):
                _not_started(paths, "the supervisor ended at once", shown)
        time.sleep(0.002)
    return _not_started(paths, f"no sign of the supervisor within {START_WAIT_S:g} s", "")


def _not_started(paths: RunPaths, what: str, shown: str) -> dict[str, Any]:
    text = ""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.secrets)
    with contextlib.suppress(OSError), open(paths.supervisor_log, errors="replace") as file:
        text = file.read()[-4000:]
    raise AgentError("run.not_started", what, pane=shown, log=text, exit=read_record(paths.exit))


def _own_umask() -> int:
    """Without setting it, which would be seen by every thread's files."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask")), 0o022)


def _check_link(link: str) -> None:
    """Before anything starts: only a plain file or an earlier run's link may give way.

    Moving a device (``/dev/null``), a folder or somebody's own link aside breaks the container.
    """
    why = ""
    if not link.startswith("/"):
        why = "it is not an absolute path"
    elif os.path.islink(link) and not _is_ours(link):
        why = f"it is a link to {os.readlink(link)}"
    elif os.path.lexists(link) and not os.path.islink(link) and not os.path.isfile(link):
        why = "it is a folder" if os.path.isdir(link) else "it is no plain file"
    else:
        try:
            os.makedirs(os.path.dirname(link), exist_ok=True)
        except OSError as error:
            why = str(error.strerror)
        else:
            # Also false on a read-only mount, and for root too.
            if not os.access(os.path.dirname(link), os.W_OK):
                why = "its folder cannot be written"
    if why:
        raise AgentError("run.log_link", f"no link to the log can stand at {link}: {why}")


def _is_ours(link: str) -> bool:
    """A link that an earlier run left, perhaps of a workdir that is gone."""
    return re.search(r"/dflashctl/runs/[^/]+/train\.log\Z", os.readlink(link)) is not None


def _link_log(link: str | None, paths: RunPaths) -> tuple[str | None, str | None]:
    """A symbolic link at the user's path; a file that is there is moved aside, never lost.

    Returns where that file is now, and why there is no link: the run lives either way, and an
    error would say that it does not.
    """
    if not link:
        return None, None
    moved = None
    try:
        if os.path.islink(link) and os.readlink(link) == paths.log:
            return None, None
        if os.path.lexists(link) and not os.path.islink(link):
            moved = f"{link}.{time.strftime('%Y%m%d-%H%M%S')}"
            os.rename(link, moved)
        temporary = f"{link}.{paths.run_id}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        os.symlink(paths.log, temporary)
        os.rename(temporary, link)
    except OSError as error:
        return moved, str(error.strerror)
    return moved, None
