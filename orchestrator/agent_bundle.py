"""The agent as it travels: one zipapp, named by the sha256 of its bytes.

It holds ``orchestrator/agent``, ``orchestrator/paths.py`` and the part of the installed libtmux
that runs tmux commands. The same sources give the same bytes on every machine, so that two laptops
with the same version share one program in the container.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# ``libtmux.common.tmux_cmd`` needs these alone. The whole package is 125 KB and 150 ms of imports
# (server, session, window, pane, neo), and ``Server.new_session`` cannot put
# ``set-option remain-on-exit`` and ``new-session`` into one command sequence.
LIBTMUX_MODULES = ("common.py", "exc.py", "_compat.py")
# Imported there and used nowhere: 6 ms of every launch.
UNUSED_IMPORT = b"from libtmux._vendor.version import Version\n"

_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Bundle:
    """``data`` is what the loader stores as ``<digest>.pyz``."""

    digest: str
    data: bytes


@cache
def bundle() -> Bundle:
    """Built once a process from the installed sources (about 10 ms)."""
    data = _archive(_sources())
    return Bundle(hashlib.sha256(data).hexdigest(), data)


def _sources() -> dict[str, bytes]:
    package = Path(__file__).parent
    version = importlib.metadata.version("libtmux")
    sources = {
        "__main__.py": b"from orchestrator.agent.__main__ import main\nmain()\n",
        "orchestrator/__init__.py": b"",
        "orchestrator/paths.py": (package / "paths.py").read_bytes(),
        # The original imports everything that was left out.
        "libtmux/__init__.py": f'"""libtmux {version}, its command part."""\n'.encode(),
    }
    for path in sorted((package / "agent").glob("*.py")):
        sources[f"orchestrator/agent/{path.name}"] = path.read_bytes()
    sources["orchestrator/agent/vendored.py"] = f"LIBTMUX_VERSION = {version!r}\n".encode()
    libtmux = _package_folder("libtmux")
    for name in LIBTMUX_MODULES:
        sources[f"libtmux/{name}"] = (libtmux / name).read_bytes().replace(UNUSED_IMPORT, b"")
    return sources


def _package_folder(name: str) -> Path:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed", name=name)
    return Path(spec.origin).parent


def _archive(sources: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(sources):
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            # Fixed, or the bytes would tell which system built them.
            entry.create_system = 3
            archive.writestr(entry, sources[name])
    return buffer.getvalue()


def main() -> None:
    """``python -m orchestrator.agent_bundle FILE`` writes the program, for machines without us."""
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bundle().data)
    print(bundle().digest)


if __name__ == "__main__":
    main()
