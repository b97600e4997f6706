"""``dflashctl``: the command line. Verbs are loaded when they are used, so that help is quick."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    """Run a verb; one message and the design's exit code for whatever fails."""
    try:
        # The first of all: before it Ctrl-C is a traceback of whatever import it comes into.
        from orchestrator.cli import interrupt

        interrupt.leave_at_once()
        # Imports make some 200,000 objects and no garbage: looking for it took 40 of 330 ms.
        gc.set_threshold(100_000)
        _take_utf8()
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # The interpreter's last collection would look through all of them: 80 ms of every verb.
        gc.freeze()


def _run(words: list[str]) -> None:
    if words[:1] == ["__complete"]:
        # Asked on every press of the key: before anything that takes time is imported.
        from orchestrator.cli.complete import main as complete

        complete(words[1:])
        return
    _prepare_streams()
    # pydantic would look through every installed distribution for plugins of its own.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from orchestrator.errors import DflashctlError, UsageError

    options = words[: words.index("--")] if "--" in words else words
    try:
        with _head_start(words):
            from orchestrator.cli.app import build

            build()(prog_name="dflashctl")
    except DflashctlError as error:
        from orchestrator.cli import output

        output.fail(error, as_json="--json" in options)
        sys.exit(error.exit_code)
    except OSError as error:
        # Of a stream, not of a file: `dflashctl tail > log` on a full disk.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        from orchestrator.cli import output

        full = UsageError(
            f"the output could not be written: {error.strerror}",
            next_step="free some space on this machine, or send the output elsewhere",
        )
        output.fail(full, as_json=False)
        # What waits in the buffer would fail once more when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


@contextmanager
def _head_start(words: list[str]) -> Iterator[None]:
    """Connect while the verb is imported, where it is known from before what to."""
    if len(words) < 2 or words[0].startswith("-"):
        yield
        return
    from orchestrator import head_start

    head_start.begin(words)
    try:
        yield
    finally:
        head_start.end()


def _take_utf8() -> None:
    """Begin again in UTF-8 mode where the locale has none and Python was kept from helping itself.

    With an ASCII file system encoding ``ünï`` is another name than on everybody else's laptop, and
    what comes out of a container under that name cannot be written.
    """
    if sys.getfilesystemencoding().lower() in ("utf-8", "utf8") or not sys.orig_argv:
        return
    # What is shown stays what the terminal can show.
    os.environ.setdefault("PYTHONIOENCODING", f"{getattr(sys.stdout, 'encoding', None) or 'ascii'}")
    os.execv(sys.executable, [sys.orig_argv[0], "-X", "utf8", *sys.orig_argv[1:]])


def _prepare_streams() -> None:
    """No character of a log or a file name, and no closed descriptor, may end a verb."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            # Under an ASCII locale, and for names that are not UTF-8.
            stream.reconfigure(errors="backslashreplace")
