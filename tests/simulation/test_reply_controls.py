"""Checker 15 on replies with one defect each: every one turns it red and no other, and
what is whole stays green.
"""

from __future__ import annotations

from result_counts import tally_controls

from holdfast.verify.checkers import check, red
from holdfast.verify.checkers.replies import reply_is_whole
from holdfast.verify.history import ReplySeen, decode, encode
from proof.controls.replies import REPLY_CONTROLS, SEEDS, WHOLE, ReplyControl, play_replies


def test_correct_log_keeps_replies_whole_among_kills_and_lost_answers() -> None:
    ends = set[str]()
    for seed in SEEDS:
        history = play_replies(seed, WHOLE)
        verdict = reply_is_whole(history)
        assert verdict.ok, f"seed {seed}\n{verdict}"
        assert verdict.examined > 500
        ends |= {end for seen in history.of(ReplySeen) for end in seen.ends or ()}
    assert ends == {"done", "worker_lost"}, "both happened"


def test_each_broken_log_turns_its_checker_red_and_no_other() -> None:
    def turned_red(control: ReplyControl) -> set[int]:
        return set[int]().union(*(red(check(play_replies(seed, control))) for seed in SEEDS))

    how = "broken variants of the log of replies and of its readers"
    requirement = "each turns checker 15 red, and no other"
    name = "negative controls of replies"
    tally_controls(name, how, requirement, REPLY_CONTROLS, SEEDS, turned_red)


def test_saved_history_of_replies_gets_the_same_verdict() -> None:
    history = play_replies(1, REPLY_CONTROLS[0])
    again = decode(encode(history.events))
    assert str(reply_is_whole(again)) == str(reply_is_whole(history))
