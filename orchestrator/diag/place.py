"""Which run on which machine a live diagnosis was asked about, so that a remedy can name it.

It travels among the probes under ``target`` (a bundle keeps it), but no rule searches its words.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

KEY = "target"


class Place(BaseModel):
    """What is not known is empty: of a saved log nobody said where it ran."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: str = ""
    """The host's name in the inventory, or as it was typed."""
    address: str = ""
    port: int | None = None
    user: str | None = None
    ssh_config: str | None = None
    container: str = ""
    """The words that name the container on dflashctl's command line."""
    python: str = ""
    """The interpreter that the inventory names for the container."""

    @classmethod
    def among(cls, probes: Mapping[str, Any] | None) -> Place:
        value = (probes or {}).get(KEY)
        if not isinstance(value, dict) or not isinstance(value.get("host"), str):
            return cls()
        try:
            return cls.model_validate(value)
        except ValidationError:  # of a bundle that somebody edited
            return cls()

    @property
    def ssh_host(self) -> str:
        """``root@10.1.2.6``; ``HOST`` if nobody said."""
        address = self.address or "HOST"
        return f"{self.user}@{address}" if self.user else address

    @property
    def ssh_options(self) -> str:
        """With a blank after it, or empty."""
        config = f"-F {shlex.quote(self.ssh_config)} " if self.ssh_config else ""
        return config + (f"-p {self.port} " if self.port not in (None, 22) else "")

    @property
    def known_as(self) -> str:
        """The name under which ssh keeps the host's key."""
        plain = self.port in (None, 22)
        return self.address if plain else f"'[{self.address}]:{self.port}'"

    @property
    def title(self) -> str:
        at = self.address + (f":{self.port}" if self.port not in (None, 22) else "")
        return self.host if at in ("", self.host) else f"{self.host} ({at})"
