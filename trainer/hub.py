"""Whether the Hugging Face hub answers, asked once and briefly before anything is fetched from it.

huggingface_hub 2.4 asks a hub that is out of reach twice, then six times more with pauses of 1 to
8 s: 23 s for each file where connections are refused, six minutes where packets are dropped.
"""

from __future__ import annotations

import functools
import ssl
import threading
import urllib.error
import urllib.request

from huggingface_hub import constants

PATIENCE_S = 8.0
"""For the whole question: a name with eight addresses would take as many time limits of one."""


@functools.cache
def silence() -> str | None:
    """Why the hub does not answer this process; None if it does, or where nobody shall ask it.

    Asked as huggingface_hub asks: at ``HF_ENDPOINT``, through ``HTTPS_PROXY``.
    """
    if constants.HF_HUB_OFFLINE:
        return None
    found = [f"no answer within {PATIENCE_S:g} s"]

    def ask() -> None:
        found[:] = _ask(constants.ENDPOINT)

    # A daemon: a name server that does not answer has no time limit of ours.
    thread = threading.Thread(target=ask, daemon=True, name="hub")
    thread.start()
    thread.join(PATIENCE_S)
    return found[0] if found else None


def _ask(endpoint: str) -> list[str]:
    """What went wrong; nothing where anybody answered, be it with an error."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S):
            return []
    except urllib.error.HTTPError:
        return []
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        # Certificates are the hub client's own affair, which may know a company's.
        return [] if isinstance(why, ssl.SSLError) else [str(why)]
