"""``dflashctl``: the command line. Verbs are loaded when they are used, so that help is quick."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run a verb; one message and the design's exit code for whatever fails."""
    words = sys.argv[1:]
    if words[:1] == ["__complete"]:
        # Asked on every press of the key: before anything that takes time is imported.
        from orchestrator.cli.complete import main as complete

        complete(words[1:])
        return
    # pydantic would look through every installed distribution for plugins of its own.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from orchestrator.errors import DflashctlError

    options = words[: words.index("--")] if "--" in words else words
    try:
        from orchestrator.cli.app import build

        build()(prog_name="dflashctl")
    except DflashctlError as error:
        from orchestrator.cli import output

        output.fail(error, as_json="--json" in options)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
