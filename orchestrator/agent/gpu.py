"""GPUs and who is on them, as ``nvidia-smi`` tells; on a host, the container of each process.

Inside a container the driver shows no PIDs; on the host it shows the host's, and a process's
control group names its container.
"""

from __future__ import annotations

from typing import Any

from orchestrator.agent.host import container_of
from orchestrator.agent.looking import Failed, Limit, command, text_of
from orchestrator.agent.process import command as command_line
from orchestrator.agent.process import run_of
from orchestrator.agent.serve import Request

LIMIT_S = 10.0
_GPU_FIELDS = "index,uuid,name,memory.used,memory.total,utilization.gpu"
_PROCESS_FIELDS = "pid,gpu_uuid,used_memory,process_name"


def processes(request: Request) -> dict[str, Any]:
    limit = Limit(request.get("timeout_s", (int, float), LIMIT_S))
    try:
        gpus = cards(limit)
        found = applications(limit)
    except Failed as failure:
        return {"gpus": [], "processes": [], "error": str(failure)}
    for card in gpus:
        card["pids"] = [one["pid"] for one in found if one["gpu_uuid"] == card["uuid"]]
    return {"gpus": gpus, "processes": found}


def cards(limit: Limit) -> list[dict[str, Any]]:
    """Memory in MiB, utilization in percent; null where the driver does not say."""
    return [
        {
            "index": _number(row[0]),
            "uuid": row[1],
            "name": row[2],
            "memory_used_mb": _number(row[3]),
            "memory_total_mb": _number(row[4]),
            "utilization": _number(row[5]),
            "pids": [],
        }
        for row in _query("gpu", _GPU_FIELDS, limit)
    ]


def applications(limit: Limit) -> list[dict[str, Any]]:
    rows = _query("compute-apps", _PROCESS_FIELDS, limit)
    found = []
    for row in rows:
        pid = _number(row[0])
        found.append(
            {
                "pid": pid,
                "gpu_uuid": row[1],
                "memory_mb": _number(row[2]),
                "command": (command_line(pid) if pid else "") or row[3],
                "ct": container_of(pid) if pid else None,
                "run_id": run_of(pid) if pid else None,
            }
        )
    return found


def _query(what: str, fields: str, limit: Limit) -> list[list[str]]:
    text = command(
        ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"],
        limit,
        check=True,
    )
    width = fields.count(",") + 1
    rows = [[cell.strip() for cell in line.split(",", width - 1)] for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        # "[N/A]", "[Not Supported]", "[Insufficient Permissions]"
        return None


# Probes


def compute_applications(limit: Limit) -> str:
    index = {card["uuid"]: card["index"] for card in cards(limit)}
    lines = ["gpu, pid, name, used"]
    for one in applications(limit):
        name = one["command"].split(" ")[0].rpartition("/")[2]
        lines.append(f"{index.get(one['gpu_uuid'])}, {one['pid']}, {name}, {one['memory_mb']} MiB")
    return "\n".join(lines)


def compute_groups(limit: Limit) -> str:
    """PID and control group of each process on a GPU."""
    lines = []
    for one in applications(limit):
        if one["pid"] is None:
            continue
        try:
            lines += [
                f"{one['pid']} {line}"
                for line in text_of(f"/proc/{one['pid']}/cgroup").splitlines()
                if "/lxc/" in line or line.startswith("0::")
            ]
        except Failed:
            continue
    return "\n".join(lines)
