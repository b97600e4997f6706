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
_FIELDS = (
    *("collective_seq_id", "p2p_seq_id", "profiling_name", "state", "input_sizes"),
    *("process_group", "is_p2p"),
)


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
    found: dict[str, Any] = {}
    for prefix in dict.fromkeys(prefixes):
        for path in sorted(glob.glob(glob.escape(prefix) + "*"))[:RANKS]:
            rank = re.fullmatch(r"\d+", path[len(prefix) :])
            if rank is None or rank[0] in found or os.stat(path).st_mtime < since:
                continue
            try:
                found[rank[0]] = {**read(path), "file": path}
            except (OSError, pickle.UnpicklingError, ValueError, EOFError, KeyError) as error:
                found[rank[0]] = {"file": path, "error": str(error)}
    if not found:
        raise Failed("no flight-recorder dump")
    return found


def read(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > DUMP_BYTES:
            raise ValueError(f"larger than {DUMP_BYTES >> 20} MiB")
        loaded = _Plain(file).load()
    if not isinstance(loaded, dict) or not isinstance(loaded.get("entries"), list):
        raise ValueError("no dump of a flight recorder")
    entries = [_short(one) for one in loaded["entries"][-ENTRIES:] if isinstance(one, dict)]
    return {"version": loaded.get("version"), "entries": entries}


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    frames = [one for one in entry.get("frames") or [] if isinstance(one, dict)]
    # A frame of the user's own tells where the call stands; torch's are alike in all.
    own = [one for one in frames if "/torch/" not in str(one.get("filename"))][:1]
    return {**{key: entry[key] for key in _FIELDS if key in entry}, "frames": own or frames[:1]}
