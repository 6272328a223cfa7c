"""Manual and hybrid detectors: what matches, what belongs together, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from gigpo_lightning.detectors import (
    ExactDetector,
    HybridDetector,
    ManualDetector,
    Pattern,
    SimilarityDetector,
    WindowDetector,
    make_detector,
)
from gigpo_lightning.trajectory import Turn
from tests.detectors.tables import alone, make_table, make_turn, pairs

TAKEN = make_turn("k1", "You pick up the mug 1 from desk 1.", "go to shelf 1")
TAKEN_TOO = make_turn("k2", "You pick up the mug 1 from shelf 3.", "look")
OTHER = make_turn("k3", "You pick up the book 2 from desk 1.", "go to shelf 1")
NOTHING = make_turn("k4", "Nothing happens.", "look")
NOTHING_AGAIN = make_turn("k4", "Nothing happens.", "go to shelf 1")
TURNS = [TAKEN, TAKEN_TOO, OTHER, NOTHING, NOTHING_AGAIN]


def has_mug(turn: Turn) -> bool:
    return "mug" in turn.observation


def place(turn: Turn) -> Hashable:
    """The desk, or None."""
    return "desk" if "desk" in turn.observation else None


def grouped(*patterns: Pattern) -> set[frozenset[int]]:
    return pairs(ManualDetector(patterns).detect(make_table(TURNS)))


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (Pattern(observation="You pick up"), {frozenset({0, 1, 2})}),  # nothing is captured: all are alike
        (Pattern(observation=r"pick up the (\w+ \d)"), {frozenset({0, 1})}),  # the same mug; the book stands alone
        (Pattern(observation=r"the (\w+ \d) from (\w+ \d)"), set()),
        (Pattern(action="^go to"), {frozenset({0, 2, 4})}),
        (Pattern(observation="pick up", action="^go to"), {frozenset({0, 2})}),  # both must match
        (Pattern(predicate=f"{__name__}:has_mug"), {frozenset({0, 1})}),
        (Pattern(predicate=f"{__name__}:place"), {frozenset({0, 2})}),
        (Pattern(observation=r"the (\w+) \d", predicate=f"{__name__}:place"), set()),
        (Pattern(observation="You see"), set()),
    ],
)
def test_what_matches_and_captures_the_same_belongs_together(pattern: Pattern, wanted: set[frozenset[int]]) -> None:
    assert grouped(pattern) == wanted


def test_the_first_pattern_counts() -> None:
    book, taken = Pattern(observation="book"), Pattern(observation="pick up")
    assert grouped(book, taken) == {frozenset({0, 1})}
    assert grouped(taken, book) == {frozenset({0, 1, 2})}


def test_tasks_stay_apart() -> None:
    found = ManualDetector([Pattern(observation="pick up")]).detect(make_table(TURNS, [0, 0, 1, 1, 1]))
    assert pairs(found) == {frozenset({0, 1})}


def test_a_value_of_a_predicate_that_is_false_but_not_none_matches() -> None:
    found = ManualDetector([Pattern(predicate=f"{__name__}:count")]).detect(make_table([make_turn("a")] * 2))
    assert pairs(found) == {frozenset({0, 1})}


def count(turn: Turn) -> int:
    return 0


def hybrid(**options: Any) -> set[frozenset[int]]:
    return pairs(HybridDetector(**options).detect(make_table(TURNS)))


def test_hybrid_is_both() -> None:
    # the keys k4 are equal, and the mugs match
    mug = Pattern(observation="pick up the mug")
    assert hybrid(manual=[mug]) == {frozenset({0, 1}), frozenset({3, 4})}
    assert hybrid(manual=[mug], exclude=[Pattern(observation="^Nothing")]) == {frozenset({0, 1})}
    assert hybrid(exclude=[Pattern(observation="^Nothing")]) == set()


def test_excluded_wins_over_manual() -> None:
    mug = Pattern(observation="pick up the mug")
    assert hybrid(manual=[mug], exclude=[Pattern(action="^look$")]) == set()


def test_the_automatic_detector_is_the_chosen_one() -> None:
    # without the mugs, two texts are equal and the book is unlike them; at threshold 0 all are alike
    mug = [Pattern(observation="pick up the mug")]
    assert hybrid(automatic="similarity", manual=mug) == {frozenset({0, 1}), frozenset({3, 4})}
    assert hybrid(automatic=SimilarityDetector(0.0), manual=mug) == {frozenset({0, 1}), frozenset({2, 3, 4})}


def test_every_turn_may_be_named() -> None:
    assert hybrid(manual=[Pattern(observation=".")]) == {frozenset({0, 1, 2, 3, 4})}


def test_hybrid_remembers_and_is_steered_as_its_automatic_detector() -> None:
    def make() -> HybridDetector:
        return HybridDetector(WindowDetector(min_count=3, target_density=(0.1, 0.2)), exclude=[Pattern(action="x")])

    detector = make()
    assert pairs(detector.detect(make_table([make_turn("a")] * 2))) == set()
    detector.end_iteration(0.15, alone)
    assert pairs(detector.detect(make_table([make_turn("a")] * 2))) == {frozenset({0, 1})}
    detector.end_iteration(0.9, alone)
    assert detector.metrics() == {"anchors/min_count": 4.0}
    resumed = make()
    resumed.load_state_dict(detector.state_dict())
    assert resumed.metrics() == {"anchors/min_count": 4.0}
    assert pairs(resumed.detect(make_table([make_turn("a")] * 2))) == {frozenset({0, 1})}  # four before


def test_hybrid_lends_the_policy_to_its_automatic_detector() -> None:
    table = make_table(TURNS, embed=lambda texts: torch.ones(len(texts), 2))
    assert pairs(HybridDetector("embedding", exclude=[Pattern(action="^look$")]).detect(table)) == {
        frozenset({0, 2, 4})
    }


@pytest.mark.parametrize("make", [lambda p: ManualDetector(p), lambda p: HybridDetector(exclude=p)])
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (Pattern(), r"\[0\]: a pattern needs an observation, an action or a predicate"),
        (Pattern(observation="("), r"\[0\].observation='\(': not a regular expression: missing \)"),
        (Pattern(action="["), r"\[0\].action='\[': not a regular expression"),
        (Pattern(predicate="os.path"), r"\[0\].predicate='os.path': must be package.module:function"),
        (Pattern(predicate="no_such:f"), "predicate='no_such:f': no_such cannot be imported: No module named"),
        (Pattern(predicate="os.path:f"), "predicate='os.path:f': os.path has no f"),
        (Pattern(predicate="os.path:sep"), "predicate='os.path:sep': sep is a str, not a function"),
    ],
)
def test_refused_patterns(make: Callable[[list[Pattern]], Any], pattern: Pattern, message: str) -> None:
    with pytest.raises(ValueError, match=r"(ManualDetector.patterns|HybridDetector.exclude).*" + message):
        make([pattern])


def test_refused_without_patterns() -> None:
    with pytest.raises(ValueError, match=r"ManualDetector.patterns is empty: name at least one"):
        ManualDetector()
    with pytest.raises(ValueError, match="HybridDetector: neither manual nor exclude has a pattern"):
        HybridDetector("similarity")


def test_short_names() -> None:
    assert isinstance(make_detector("detector", "exact"), ExactDetector)
    assert isinstance(make_detector("detector", "window"), WindowDetector)
    own = SimilarityDetector(0.5)
    assert make_detector("detector", own) is own
    with pytest.raises(ValueError, match=r"detector: 'windw' is unknown; choose one of .*; did you mean window\?"):
        make_detector("detector", "windw")
    with pytest.raises(ValueError, match=r"'manual' needs patterns; write \{class_path: ManualDetector"):
        make_detector("detector", "manual")
    with pytest.raises(ValueError, match=r"HybridDetector.automatic: 'fuzzy' is unknown"):
        HybridDetector("fuzzy", exclude=[Pattern(action="x")])


def test_exact_has_nothing_to_steer() -> None:
    assert torch.equal(ExactDetector().detect(make_table(TURNS)), torch.tensor([0, 1, 2, 3, 3]))
    with pytest.raises(ValueError, match=r"ExactDetector.target_density=\[0.1, 0.2\]: equal keys have no threshold"):
        ExactDetector(target_density=(0.1, 0.2))
