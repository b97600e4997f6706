"""One JSON object by HTTP POST. A webhook that fails is told and never stops what it reports on."""

from __future__ import annotations

import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from orchestrator.errors import UsageError

TIMEOUT_S = 10.0
# Each post may take its time-out; a watch that ends waits no longer than this for the last ones.
LINGER_S = 15.0


def check_url(url: str) -> str:
    """:raises UsageError: no http or https (urllib would open files, too)."""
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
        raise UsageError(
            "the webhook is no http:// or https:// address",
            next_step="give --webhook URL, or set DFLASHCTL_WEBHOOK, which no process list shows",
        )
    return url


def post(url: str, body: dict[str, Any]) -> str | None:
    """Send; None if the far side took it, else why not. The address is a secret: never told."""
    request = urllib.request.Request(
        url,
        data=json.dumps(body, default=str).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "dflashctl"},
        method="POST",
    )
    host = urlsplit(url).hostname
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return f"the webhook at {host} answered {error.code} {error.reason}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return f"the webhook at {host} was not reached: {reason}"


class Webhook:
    """Posts in order in a thread of its own, so that a slow far side holds up nobody."""

    def __init__(self, url: str, notice: Callable[[str], None]) -> None:
        self._url = check_url(url)
        self._notice = notice
        self._bodies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="webhook")
        self._thread.start()

    def send(self, body: dict[str, Any]) -> None:
        self._bodies.put(body)

    def close(self) -> None:
        """Wait a little for what is still to be sent."""
        self._bodies.put(None)
        self._thread.join(LINGER_S)

    def _work(self) -> None:
        while (body := self._bodies.get()) is not None:
            failed = post(self._url, body)
            if failed:
                self._notice(failed)
