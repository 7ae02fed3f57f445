"""Descriptors of prepared calls: sizes, round trips, and bytes that are none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_api.descriptors import (
    CALL,
    CANCEL,
    DESCRIPTOR_BYTES,
    MAX_SLOTS,
    Answer,
    Ask,
    DescriptorError,
    SlotLayout,
)

ASKS = st.builds(
    Ask,
    st.sampled_from([CALL, CANCEL]),
    st.integers(0, MAX_SLOTS - 1),
    st.integers(0, 2**32 - 1),
    st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 255),
)


@given(ASKS)
def test_calls_survive_the_way(ask: Ask) -> None:
    data = ask.to_bytes()
    assert len(data) == DESCRIPTOR_BYTES
    assert Ask.from_bytes(data, MAX_SLOTS) == ask


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_answers_survive_the_way(kind: int, slot: int, number: int, head_byte_count: int) -> None:
    data = Answer(kind, slot, number, head_byte_count).to_bytes()
    assert len(data) == DESCRIPTOR_BYTES
    assert Answer.from_bytes(data) == Answer(kind, slot, number, head_byte_count)


@given(st.binary(max_size=80), st.integers(1, MAX_SLOTS))
def test_what_is_parsed_is_possible(data: bytes, slot_count: int) -> None:
    try:
        ask = Ask.from_bytes(data, slot_count)
    except DescriptorError:
        return
    assert ask.slot < slot_count
    assert 0 < ask.timeout_s < math.inf


def test_answers_of_another_size_are_refused() -> None:
    with pytest.raises(DescriptorError, match="64 bytes, not 3"):
        Answer.from_bytes(b"abc")


def test_the_trace_context_is_written_as_w3c_does() -> None:
    assert Ask(CALL, 0, 0).traceparent == ""
    ask = Ask(CALL, 0, 0, 1.0, bytes(16), bytes.fromhex("ab" * 16), bytes.fromhex("cd" * 8), 1)
    assert ask.traceparent == f"00-{'ab' * 16}-{'cd' * 8}-01"


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**6))
def test_parts_of_a_slot_do_not_overlap(payload: int, reply: int, head: int) -> None:
    layout = SlotLayout(payload, reply, head)
    assert payload <= layout.reply_offset
    assert layout.reply_offset + reply <= layout.head_offset
    assert layout.head_offset + head <= layout.slot_bytes
    assert layout.reply_offset % 64 == layout.head_offset % 64 == layout.slot_bytes % 4096 == 0
