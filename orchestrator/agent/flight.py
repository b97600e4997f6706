"""The probe ``nccl_flight``: what torch's flight recorder wrote of a run's collectives.

torch leaves one pickle a rank at ``$TORCH_FR_DUMP_TEMP_FILE`` + rank (before 2.9
``$TORCH_NCCL_DEBUG_INFO_TEMP_FILE``) when a collective times out. A pickle from a container can run
code, so it is read by an unpickler that knows no classes: plain dictionaries, lists, tuples,
strings and numbers are all that a dump holds.
"""

from __future__ import annotations

import glob
import os
import pickle
import re
from typing import Any

from orchestrator.agent.looking import Failed
from orchestrator.paths import FLIGHT_VARIABLES, RunPaths

# torch's own: up to 2.8, and since then below the user's cache.
DEFAULTS = ("/tmp/nccl_trace_rank_", "~/.cache/torch/comm_lib_trace_rank_")
RANKS = 256
DUMP_BYTES = 64 << 20
ENTRIES = 200
"""The newest of a rank: a mismatch stands at the end, a ring of 2,000 entries is 4 MB of JSON."""
IN_ALL = 6_000
"""Of all ranks together, at 300 bytes each: an answer has 8 MiB."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, no dump does")


def dumps(run: RunPaths | None, environment: dict[str, str], since: float) -> dict[str, Any]:
    """Rank → ``{"entries": [...]}``, as ``_dump_nccl_trace_json`` would have it, shortened; of a
    file that cannot be read, why. ``Failed`` if no rank wrote one since ``since``."""
    prefixes = [environment[name] for name in FLIGHT_VARIABLES if environment.get(name)]
    if run is not None:
        prefixes.append(run.flight_prefix)
    prefixes += [os.path.expanduser(default) for default in DEFAULTS]
    paths: dict[str, str] = {}
    for prefix in dict.fromkeys(prefixes):
        for path in sorted(glob.glob(glob.escape(prefix) + "*"))[:RANKS]:
            rank = re.fullmatch(r"\d{1,6}", path[len(prefix) :])
            if rank is not None and os.stat(path).st_mtime >= since:
                paths.setdefault(rank[0], path)
    if not paths:
        raise Failed("no flight-recorder dump")
    share = min(ENTRIES, IN_ALL // len(paths))
    return {rank: _told(path, share) for rank, path in paths.items()}


def _told(path: str, count: int) -> dict[str, Any]:
    try:
        return {**read(path, count), "file": path}
    except (OSError, pickle.UnpicklingError) as error:
        return {"file": path, "error": str(error)[:200]}
    except (ValueError, EOFError, KeyError, TypeError, IndexError, AttributeError) as error:
        # A torn pickle fails in many ways.
        return {"file": path, "error": f"not a dump: {error!r}"[:200]}


def read(path: str, count: int = ENTRIES) -> dict[str, Any]:
    """The newest ``count`` entries, cut to what is compared."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > DUMP_BYTES:
            raise ValueError(f"larger than {DUMP_BYTES >> 20} MiB")
        loaded = _Plain(file).load()
    entries = loaded["entries"][-count:]
    return {
        "version": str(loaded.get("version"))[:20],
        "entries": [_short(one) for one in entries if isinstance(one, dict)],
    }


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    """Of known types and lengths: what wrote it may have been anything."""
    sizes = entry.get("input_sizes") or ()
    group = entry.get("process_group") or ()
    frames = [one for one in entry.get("frames") or () if isinstance(one, dict)]
    # A frame of the user's own tells where the call stands; torch's are alike in all.
    own = [one for one in frames if "/torch/" not in str(one.get("filename"))] or frames
    return {
        "collective_seq_id": _number(entry.get("collective_seq_id")),
        "profiling_name": str(entry.get("profiling_name"))[:60],
        "state": str(entry.get("state"))[:20],
        "is_p2p": bool(entry.get("is_p2p")),
        "input_sizes": [[_number(n) for n in list(one)[:8]] for one in list(sizes)[:1]],
        "process_group": [str(one)[:60] for one in list(group)[:2]],
        "frames": [
            {"filename": str(one.get("filename"))[-160:], "line": _number(one.get("line"))}
            for one in own[:1]
        ],
    }


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
