"""Frames: whatever is encoded comes out again, however the bytes are cut; noise is refused."""

from __future__ import annotations

from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent.frames import Decoder, encode
from orchestrator.agent.protocol import JSON_LIMIT, PAYLOAD_LIMIT, AgentError

# Surrogates too: a file name that is not UTF-8 is such text.
TEXT = st.text(st.characters(), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
HEADS = st.builds(
    lambda number, rest: {**rest, "id": number},
    st.integers(0, 2**31),
    st.dictionaries(TEXT, VALUES, max_size=4),
)
FRAMES = st.lists(st.tuples(HEADS, st.binary(max_size=50)), max_size=4)


@examples(50)
@given(FRAMES, st.integers(1, 40))
def test_frames_survive_any_cutting_of_the_stream(
    frames: list[tuple[dict[str, Any], bytes]], size: int
) -> None:
    stream = b"".join(encode(head, payload) for head, payload in frames)
    decoder = Decoder()
    found = []
    for start in range(0, len(stream), size):
        found += decoder.feed(stream[start : start + size])
    assert found == frames


@given(st.binary(min_size=8, max_size=100))
def test_noise_gives_frames_or_a_refusal_never_another_error(noise: bytes) -> None:
    try:
        for head, payload in Decoder().feed(noise):
            assert isinstance(head["id"], int)
            assert len(payload) <= PAYLOAD_LIMIT
    except AgentError as error:
        assert error.kind == "protocol"


@pytest.mark.parametrize(
    "stream",
    [
        (JSON_LIMIT + 1).to_bytes(4, "big") + bytes(4),
        bytes(4) + (PAYLOAD_LIMIT + 1).to_bytes(4, "big"),
        b"Last login: Mon Nov 29 on pts/0\n",
        b"\x00\x00\x00\x02\x00\x00\x00\x00[]",
        b"\x00\x00\x00\x02\x00\x00\x00\x00{}",
        b"\x00\x00\x00\x0b\x00\x00\x00\x00" + b'{"id":true}',
        b"\x00\x00\x00\x03\x00\x00\x00\x00{x}",
    ],
)
def test_what_is_no_frame_is_refused_at_once(stream: bytes) -> None:
    with pytest.raises(AgentError) as caught:
        Decoder().feed(stream)
    assert caught.value.kind == "protocol"


def test_a_payload_beyond_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="beyond the limits"):
        encode({"id": 1}, bytes(PAYLOAD_LIMIT + 1))


def test_numbers_that_json_has_no_word_for_are_null() -> None:
    head = {"id": 1, "loss": float("nan"), "rates": [1.5, float("inf"), {"x": -float("inf")}]}
    ((found, _),) = Decoder().feed(encode(head))
    assert found == {"id": 1, "loss": None, "rates": [1.5, None, {"x": None}]}
