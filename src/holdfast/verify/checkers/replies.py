"""Checker 15: a reply is a gap-free prefix plus exactly one end. (Pure.)

Producers record what they made, readers what they got.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.verify.checkers.verdict import Verdict
from holdfast.verify.history import History, ReplyMade, ReplySeen

_Made = Mapping[tuple[str, int], ReplyMade]


def reply_is_whole(history: History) -> Verdict:
    """15: no entry is lost, repeated, moved or invented, and there is one true end.

    A success is shown only with every entry before it. After one that others can see,
    no reader gets another end.
    """
    verdict = Verdict("reply_is_whole")
    made = {(each.reply, each.epoch): each for each in history.of(ReplyMade)}
    done_at: dict[str, float] = {}
    for seen in sorted(history.of(ReplySeen), key=lambda seen: seen.at):
        _is_prefix(seen, made, verdict)
        if seen.ends is None:
            continue
        who = f"{seen.reader} of {seen.reply}"
        verdict.require(len(seen.ends) == 1, f"{who} got {len(seen.ends)} ends", seen.ends)
        if "done" in seen.ends:
            _is_complete(seen, made, verdict)
            if seen.resumable:
                done_at.setdefault(seen.reply, seen.at)
        elif seen.reply in done_at:
            verdict.require(False, f"{who} got {seen.ends}, and another reader got done before")
    return verdict


def _is_prefix(seen: ReplySeen, made: _Made, verdict: Verdict) -> None:
    who, expected = f"{seen.reader} of {seen.reply}", (0, 0)
    for epoch, n, digest in seen.entries:
        begins = n == 0 and epoch > expected[0]
        verdict.require((epoch, n) == expected or begins, f"{who}: {epoch}-{n} is not the next")
        producer = made.get((seen.reply, epoch))
        entries = producer.entries if producer is not None else ()
        is_made = n < len(entries) and entries[n] == digest
        verdict.require(is_made, f"{who}: {epoch}-{n} was not made so")
        expected = epoch, n + 1


def _is_complete(seen: ReplySeen, made: _Made, verdict: Verdict) -> None:
    who, epoch = f"{seen.reader} of {seen.reply}", seen.entries[-1][0] if seen.entries else 0
    producer = made.get((seen.reply, epoch))
    is_done = producer is not None and producer.end == "done"
    verdict.require(is_done, f"{who} got done, which its producer did not make")
    got = sum(each[0] == epoch for each in seen.entries)
    whole = len(producer.entries) if producer is not None else 0
    verdict.require(got == whole, f"{who} got done after {got} of {whole} entries")
