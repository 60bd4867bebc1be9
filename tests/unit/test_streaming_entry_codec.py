"""Entries to bytes and back: lossless, small, readable from any entry on."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.streaming.entry_codec import END, Decoder, Encoder, UnreadableEntry
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyUsage,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def chunk(token: str, name: str = "chatcmpl-AcE5l0nBhqyFk6a5qUjXcJ1e8bB7d") -> bytes:
    return msgspec.json.encode(
        {
            "id": name,
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": "gpt-4o-2024-08-06",
            "system_fingerprint": "fp_50cad350e4",
            "choices": [{"index": 0, "delta": {"content": token}, "finish_reason": None}],
        }
    )


CHUNKS = st.builds(chunk, TEXT, st.sampled_from(["a", "chatcmpl-1", "x" * 400])) | JSON.map(
    msgspec.json.encode
)
ENTRIES = st.lists(
    st.builds(ReplyDelta, CHUNKS | st.binary(max_size=40))
    | st.builds(
        ReplyUsage, st.integers(0, 2**40), st.integers(0, 2**40), st.booleans(), st.binary()
    )
    | st.builds(ReplyError, st.sampled_from(["cancelled", "gap"]), TEXT, body=st.binary())
    | st.just(ReplyDone())
    | st.just(ReplyBegin("t", "key", "né", "plain", "chat", "m", "n", 1.25, '{"a":1}')),
    max_size=40,
)


def encoded(entries: list[ReplyEntry]) -> list[bytes]:
    return Encoder().encode(0, entries)[0]


def decoded(stored: list[bytes], first: int = 0, epoch: int = 7) -> list[ReplyEntry]:
    """As an adapter reads: fetches the templates that the decoder misses."""
    decoder, entries = Decoder(), []
    for n in range(first, len(stored)):
        if (template := decoder.missing(EntryId(epoch, n), stored[n])) is not None:
            assert template < n
            assert stored[template][:1] == b"w"
            decoder.decode(EntryId(epoch, template), stored[template])
        entries.append(decoder.decode(EntryId(epoch, n), stored[n]))
    return entries


@given(ENTRIES)
def test_entries_survive_the_codec(entries: list[ReplyEntry]) -> None:
    assert decoded(encoded(entries)) == entries


@given(ENTRIES, st.data())
def test_entries_are_read_from_any_entry_on(entries: list[ReplyEntry], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(entries)))
    assert decoded(encoded(entries), first) == entries[first:]


@given(ENTRIES, st.data())
def test_repeated_and_resent_entries_name_only_what_the_log_has(
    entries: list[ReplyEntry], data: st.DataObject
) -> None:
    """The encoder goes on from wherever the log ends, and the log is whole."""
    stored: list[bytes] = []
    encoder = Encoder()
    while len(stored) < len(entries):
        first = len(stored)
        some = entries[first : first + 3]
        batch, following = encoder.encode(first, some)
        match data.draw(st.sampled_from(["ok", "nothing", "answer lost", "tail lost"])):
            case "ok":
                stored, encoder = stored + batch, following
            case "answer lost":
                assert encoder.encode(first, some)[0] == batch
                stored += batch
            case "tail lost":
                stored, encoder = stored[: data.draw(st.integers(0, first))], following
                if data.draw(st.booleans()):
                    break
    assert decoded(stored) == entries[: len(stored)]


@given(ENTRIES)
def test_only_an_end_is_stored_as_an_end(entries: list[ReplyEntry]) -> None:
    for entry, stored in zip(entries, encoded(entries), strict=True):
        assert (stored[:1] == END) is isinstance(entry, (ReplyDone, ReplyError))


def test_token_takes_few_bytes() -> None:
    tokens = [ReplyDelta(chunk(f" word{n % 97}")) for n in range(500)]
    stored = encoded(list[ReplyEntry](tokens))
    assert stored[0][:1] == b"w"
    assert sum(map(len, stored)) / 500 < 15


def test_chunks_of_two_shapes_in_turn_are_both_stored_as_differences() -> None:
    entries: list[ReplyEntry] = []
    for n in range(100):
        entries += [
            ReplyDelta(chunk(f"t{n}")),
            ReplyDelta(b'{"tool":[' + b"1," * 150 + b"%d]}" % n),
        ]
    stored = encoded(entries)
    assert [each[:1] for each in stored[:3]] == [b"w", b"w", b"d"]
    assert sum(map(len, stored[2:])) / 198 < 15


def test_tiny_first_chunk_is_not_the_template_of_large_ones() -> None:
    stored = encoded([ReplyDelta(b"{}"), *(ReplyDelta(chunk(f"t{n}")) for n in range(50))])
    assert sum(map(len, stored[2:])) / 49 < 15


def test_epoch_has_its_own_templates() -> None:
    stored = encoded([ReplyDelta(chunk("a")), ReplyDelta(chunk("b"))])
    decoder = Decoder()
    decoder.decode(EntryId(1, 0), stored[0])
    assert decoder.missing(EntryId(2, 1), stored[1]) == 0
    with pytest.raises(UnreadableEntry):
        decoder.decode(EntryId(2, 1), stored[1])


@given(st.binary(max_size=30))
def test_garbage_is_refused_or_read_and_never_anything_else(garbage: bytes) -> None:
    decoder = Decoder()
    decoder.decode(EntryId(1, 0), b"w" + b"x" * 20)
    try:
        decoder.missing(EntryId(1, 1), garbage)
        decoder.decode(EntryId(1, 1), garbage)
    except UnreadableEntry:
        pass


def test_decoder_keeps_few_templates() -> None:
    decoder, rng = Decoder(), random.Random(1)
    for n in range(1000):
        decoder.decode(EntryId(1, n), b"w" + rng.randbytes(50))
    assert len(decoder._templates) <= 8


def test_megabyte_chunks_are_compared_in_milliseconds() -> None:
    one, other = b"a" * (1 << 20), b"a" * (1 << 19) + b"b" + b"a" * ((1 << 19) - 1)
    began_at = time.perf_counter()
    stored = encoded([ReplyDelta(one), ReplyDelta(other)])
    assert time.perf_counter() - began_at < 0.1
    assert len(stored[1]) < 16
