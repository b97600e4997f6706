"""What a push takes from a folder: git's own list, or a walk by ignore files. Reads only."""

from __future__ import annotations

import os
import stat
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.agent.manifest import PATH_BYTES
from orchestrator.errors import RefusedError, UsageError
from orchestrator.laptop_path import did_you_mean, laptop_path

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

# Beyond this the record of a dirty tree is cut: it travels in one frame (1 MiB).
DIFF_LIMIT = 512 * 1024
# Never part of a plain folder's code; git's own list leaves them out by itself.
NEVER = frozenset({".git", ".hg", ".svn", "__pycache__"})
IGNORE_FILE = ".dflashignore"
VENV_MARK = "pyvenv.cfg"
# Code is some MB. What nobody named and is larger was hardly meant: it holds data or checkpoints.
MOST_BYTES = 2_000_000_000
MOST_FILES = 50_000


@dataclass(frozen=True)
class Root:
    """The folder that is pushed."""

    path: Path
    git: bool
    given: bool = field(default=False, compare=False)
    """By ``--code``: it is meant, whatever it is."""


@dataclass(frozen=True)
class GitState:
    """What the run's record says about where the code came from."""

    commit: str | None
    branch: str | None
    dirty: bool
    diff: bytes
    """``git diff HEAD``, at most ``DIFF_LIMIT`` bytes."""


@dataclass(frozen=True)
class Found:
    """One thing to push: ``kind`` f, l or d as in the manifest, ``path`` below the root."""

    kind: str
    path: str
    source: Path
    info: os.stat_result


def find_root(code: Path | None, cwd: Path) -> Root:
    """``--code DIR`` as it is; else the git work tree that ``cwd`` is in; else ``cwd``.

    :raises UsageError: no such folder, or a home folder or ``/`` that nobody means to push.
    """
    if code is not None:
        path = laptop_path(code).resolve()
        if not path.is_dir():
            near = did_you_mean(laptop_path(code), folder=True)
            raise UsageError(
                f"--code {code}: no such folder{near}", next_step="give the code's folder"
            )
        return Root(path, _is_tracked(path), given=True)
    path = cwd.resolve()
    # A work tree of the whole home folder keeps somebody's settings: no project either.
    top = (_git(cwd, "rev-parse", "--show-toplevel") or b"").rstrip(b"\n")
    if top and not _holds_home(Path(os.fsdecode(top))):
        return Root(Path(os.fsdecode(top)), True)
    if _holds_home(path):
        raise UsageError(
            f"{path} is no project folder: pushing all of it is hardly meant",
            next_step="change to the project's folder, or give --code DIR, or --no-push",
        )
    return Root(path, bool(top) and _is_tracked(path))


def _holds_home(path: Path) -> bool:
    home = Path.home().resolve()
    return path.resolve() in {home, *home.parents}


def collect(root: Root, own: Sequence[Path] = ()) -> list[Found]:
    """Every file, link and empty folder that belongs to the code, sorted by the bytes of its path.

    A virtual environment is this machine's alone, and stays.

    :param own: folders of this tool's, which are nobody's code.
    :raises UsageError: a file that cannot be read, an ignore file that does not parse, or more than
        anybody means to push from a folder that was not named.
    :raises RefusedError: a path longer than a container takes.
    """
    names = list(_git_paths(root.path) if root.git else _walked_paths(root.path))
    spec = _spec(root.path / IGNORE_FILE)
    if spec is not None:
        names = [name for name in names if not spec.match_file(name)]
    left_out = _without(root, names, own)
    found = [
        entry
        for name in names
        if not name.startswith(left_out)
        and (entry := _found(root.path, _short(name.rstrip("/")))) is not None
    ]
    if not root.given:
        _refuse_too_much(root, found)
    return sorted(found, key=lambda entry: os.fsencode(entry.path))


def _without(root: Root, names: Iterable[str], own: Sequence[Path]) -> tuple[str, ...]:
    """How the paths begin of what is never pushed."""
    environments = [
        name.removesuffix(VENV_MARK) for name in names if name.endswith(f"/{VENV_MARK}")
    ]
    here = root.path.resolve()
    ours = [path.resolve() for path in own]
    inside = [path.relative_to(here) for path in ours if path.is_relative_to(here)]
    return (*environments, *(f"{path.as_posix()}/" for path in inside if path.parts))


def _refuse_too_much(root: Root, found: Sequence[Found]) -> None:
    size = sum(entry.info.st_size for entry in found if entry.kind == "f")
    if size <= MOST_BYTES and len(found) <= MOST_FILES:
        return
    sizes: Counter[str] = Counter()
    for entry in found:
        top, slash, _ = entry.path.partition("/")
        sizes[top + slash] += entry.info.st_size if size > MOST_BYTES else 1
    largest = ", ".join(
        f"{name} {count / 1e9:.1f} GB" if size > MOST_BYTES else f"{name} {count} files"
        for name, count in sizes.most_common(3)
    )
    raise UsageError(
        f"{root.path} holds {len(found)} files, {size / 1e9:.1f} GB: all of it is hardly meant to "
        f"be pushed; the most is in {largest}",
        next_step=f"leave out what is no code: write it into {IGNORE_FILE}; or name the folder, if "
        f"all of it is meant: --code {root.path}",
    )


def git_state(root: Root) -> GitState | None:
    """Commit, branch and uncommitted changes; None outside git."""
    if not root.git:
        return None
    commit = (_git(root.path, "rev-parse", "HEAD") or b"").decode().strip() or None
    branch = (_git(root.path, "symbolic-ref", "--short", "-q", "HEAD") or b"").decode().strip()
    status = _git(root.path, "status", "--porcelain", "--untracked-files=normal", "--", ".")
    dirty = bool(status)
    diff = (_git(root.path, "diff", "HEAD", "--", ".") or b"") if dirty and commit else b""
    if len(diff) > DIFF_LIMIT:
        diff = diff[:DIFF_LIMIT] + b"\n[cut: %d bytes in all]\n" % len(diff)
    return GitState(commit, branch or None, dirty, diff)


def _short(name: str, what: str | None = None) -> str:
    """:raises RefusedError: the release's own folder and this path are too long together."""
    size = len(os.fsencode(name))
    if size <= PATH_BYTES:
        return name
    shown = name if len(name) <= 200 else f"{name[:100]}…{name[-100:]}"
    raise RefusedError(
        f"{what or shown} is too long to push: {size} bytes, and {PATH_BYTES} is the most",
        next_step=f"shorten it, or leave it out: write it into {IGNORE_FILE}",
    )


def _found(root: Path, name: str) -> Found | None:
    source = root / name
    try:
        info = source.lstat()
    except (FileNotFoundError, NotADirectoryError):
        # In git's index but removed from the work tree.
        return None
    except OSError as error:
        raise UsageError(
            f"{source} cannot be read: {error.strerror}",
            next_step=f"make it readable, or leave it out: write it into {IGNORE_FILE}",
        ) from None
    if stat.S_ISLNK(info.st_mode):
        _short(os.fsdecode(source.readlink()), f"the target of {name}")
    for kind, test in (("f", stat.S_ISREG), ("l", stat.S_ISLNK), ("d", stat.S_ISDIR)):
        if test(info.st_mode):
            return Found(kind, name, source, info)
    # Sockets, pipes and devices are no code.
    return None


# Git


def _git(folder: Path, *words: str, stdin: bytes | None = None) -> bytes | None:
    """The output of a git command, or None where it fails (no git, no work tree, no commit)."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.quotepath=off", *words],
            capture_output=True,
            check=False,
            input=stdin,
            # Another person's index lock must not be fought over for a mere look.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _is_tracked(path: Path) -> bool:
    """In a git work tree, and not a folder that this tree ignores."""
    if not _git(path, "rev-parse", "--show-toplevel"):
        return False
    return _git(path, "check-ignore", "-q", ".") is None


def _names(output: bytes | None) -> list[str]:
    return [os.fsdecode(name) for name in (output or b"").split(b"\0") if name]


def _git_paths(root: Path) -> Iterator[str]:
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listing is None:
        raise UsageError(
            f"git cannot list the files of {root}",
            next_step=f"see: git -C {root} ls-files (another owner needs safe.directory)",
        )
    # A conflicted file is listed once for each of its stages.
    for name in dict.fromkeys(_names(listing)):
        inner = root / name
        if not inner.is_symlink() and inner.is_dir():
            # A submodule or a clone inside: it has a list of its own.
            prefix = name.rstrip("/")
            inner_paths = _git_paths(inner) if (inner / ".git").exists() else iter(())
            yield from (f"{prefix}/{path}" for path in inner_paths)
        else:
            yield name
    yield from _empty_folders(root)


def _empty_folders(root: Path) -> Iterator[str]:
    """Folders without any file, which git does not know; the ignored ones left out."""
    listing = _git(root, "ls-files", "-z", "--others", "--directory", "--exclude-standard")
    empty = [
        str(folder.relative_to(root))
        for name in _names(listing)
        if name.endswith("/")
        for folder in _leaves(root / name)
    ]
    if empty:
        asked = b"\0".join(os.fsencode(name) for name in empty)
        ignored = set(_names(_git(root, "check-ignore", "-z", "--stdin", stdin=asked)))
        yield from (name for name in empty if name not in ignored)


def _leaves(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        if ".git" in folders:
            folders.remove(".git")
        if not folders and not files:
            yield Path(here)


# Plain folders

Rules = list[tuple[str, "GitIgnoreSpec"]]


def _walked_paths(root: Path) -> Iterator[str]:
    yield from _walk(root, "", [])


def _walk(root: Path, prefix: str, rules: Rules) -> Iterator[str]:
    folder = root / prefix
    own = _spec(folder / ".gitignore")
    if own is not None:
        rules = [*rules, (prefix, own)]
    try:
        children = sorted(os.scandir(folder), key=lambda child: child.name)
    except OSError as error:
        _short(prefix)
        raise UsageError(
            f"{folder} cannot be read: {error.strerror}",
            next_step="make it readable, or leave it out: write it into .gitignore",
        ) from None
    if prefix and not children:
        yield prefix
    for child in children:
        path = f"{prefix}/{child.name}" if prefix else child.name
        is_folder = child.is_dir(follow_symlinks=False)
        if child.name in NEVER or _ignored(f"{path}/" if is_folder else path, rules):
            continue
        if is_folder:
            yield from _walk(root, path, rules)
        else:
            yield path


def _ignored(path: str, rules: Rules) -> bool:
    """The innermost .gitignore that says anything decides."""
    for prefix, spec in reversed(rules):
        verdict = spec.check_file(path[len(prefix) :].lstrip("/")).include
        if verdict is not None:
            return bool(verdict)
    return False


def _spec(path: Path) -> GitIgnoreSpec | None:
    """An ignore file's rules, or None where there is no such file."""
    try:
        lines: Iterable[str] = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", next_step="make it readable text in UTF-8"
        ) from None
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise UsageError(
            f"{path}: {error}", next_step="write its lines as in a .gitignore"
        ) from None
