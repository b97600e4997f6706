"""Frames of the wire: two lengths, a JSON object, raw bytes. No input or output happens here."""

from __future__ import annotations

import json
import math
from typing import Any

from orchestrator.agent.protocol import JSON_LIMIT, PAYLOAD_LIMIT, AgentError

Frame = tuple[dict[str, Any], bytes]

_PREFIX = 8
# ASCII JSON: lone surrogates (names that are not UTF-8) survive as \udcXX, and no encoding of the
# far side can matter. Compact separators: 2,000 small frames a second are common under tail.
_encoder = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def encode(head: dict[str, Any], payload: bytes | memoryview = b"") -> bytes:
    """The bytes of one frame; numbers that JSON has no word for (NaN, infinities) become null.

    ``ValueError`` if a part is beyond its limit.
    """
    try:
        text = _encoder.encode(head).encode("ascii")
    except ValueError:
        # Of a trainer's own metrics.jsonl: Python writes and reads NaN there.
        text = _encoder.encode(finite(head)).encode("ascii")
    size = len(payload)
    if len(text) > JSON_LIMIT or size > PAYLOAD_LIMIT:
        raise ValueError(f"a frame of {len(text)} + {size} bytes is beyond the limits")
    return b"".join((len(text).to_bytes(4, "big"), size.to_bytes(4, "big"), text, payload))


def finite(value: Any) -> Any:
    """The same with null for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


class Decoder:
    """Bytes in, frames out, however the bytes are cut.

    Raises ``AgentError`` of kind ``protocol`` on lengths beyond the limits (noise in the stream
    looks like one) and on JSON that is no object with an integer ``id``. After that it is of no
    further use: the stream cannot be trusted again.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._need = _PREFIX

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        buffer = self._buffer
        buffer += data
        if len(buffer) < self._need:
            return []
        frames: list[Frame] = []
        start = 0
        while True:
            have = len(buffer) - start
            if have < _PREFIX:
                self._need = _PREFIX
                break
            head_size = int.from_bytes(buffer[start : start + 4], "big")
            payload_size = int.from_bytes(buffer[start + 4 : start + 8], "big")
            if head_size > JSON_LIMIT or payload_size > PAYLOAD_LIMIT:
                raise AgentError(
                    "protocol", f"a frame claims {head_size} + {payload_size} bytes: not a frame"
                )
            need = _PREFIX + head_size + payload_size
            if have < need:
                self._need = need
                break
            middle = start + _PREFIX + head_size
            head = _parse(buffer[start + _PREFIX : middle])
            frames.append((head, bytes(memoryview(buffer)[middle : start + need])))
            start += need
        if start:
            del buffer[:start]
        return frames


def _parse(text: bytearray) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AgentError("protocol", f"a frame's JSON does not parse: {error}") from error
    if not isinstance(head, dict) or type(head.get("id")) is not int:
        raise AgentError("protocol", "a frame's JSON is no object with an integer id")
    return head
