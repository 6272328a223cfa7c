"""What an iteration says about its answers: figures and transcripts tell format, admissibility and validity apart."""

from __future__ import annotations

from gigpo_lightning.credit import credit_groups
from gigpo_lightning.rollout.report import Tally
from gigpo_lightning.rollout.transcript import transcript
from gigpo_lightning.trajectory import EndReason, Episode, Group, Turn

TURNS = (
    Turn("you see a box .", "open box", 0.0, "a", valid=True, admissible=True, tokens=3),
    Turn("it is empty .", "sing", 0.0, "b", valid=False, admissible=False, tokens=3),
    Turn(
        "nothing happens .",
        "",
        0.0,
        "b",
        valid=False,
        admissible=False,
        tokens=3,
        well_formed=False,
        answer="<think>hm",
    ),
    Turn(
        "nothing happens .",
        "take cup",
        1.0,
        "b",
        valid=True,
        admissible=True,
        tokens=9,
        answer="<think>there\nit is</think>\n<action>take cup</action>",
    ),
)
EPISODE = Episode("train-0", "take the cup", TURNS, (), EndReason.TERMINATED, won=True)


def test_the_three_judgements_are_counted_apart() -> None:
    tally, group = Tally(), Group("train-0", "take", (EPISODE, EPISODE))
    tally.add_groups([group], ["first"], credit_groups([group], lam=0.5))
    figures = tally.metrics()
    assert figures["rollout/invalid_actions"] == figures["rollout/inadmissible_actions"] == 0.5
    assert figures["rollout/ill_formed_answers"] == 0.25


def test_a_transcript_shows_answers_that_say_more_and_marks_bad_ones() -> None:
    assert transcript(EPISODE).splitlines() == [
        "task: take the cup  [train-0]",
        "",
        "you see a box .",
        "   1 > open box",
        "it is empty .",
        "   2 > sing  (invalid)",
        "nothing happens .",
        "     : <think>hm",
        "   3 >   (invalid)  (ill-formed)",
        "nothing happens .",
        "     : <think>there",
        "     : it is</think>",
        "     : <action>take cup</action>",
        "   4 > take cup    | reward 1",
        "[won, terminated, 4 turns]",
    ]
