"""Density steering, on turns whose density is known for every threshold or minimum count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigpo_lightning.detectors import Detector, EmbeddingDetector, SimilarityDetector, TurnTable, WindowDetector
from gigpo_lightning.functional.steering import Band, Threshold, next_count, next_threshold
from tests.detectors.tables import alone, make_table, make_turn, of_keys, of_texts

PAIRS = 25
BAND = (0.15, 0.25)


def density_of(step_groups: torch.Tensor) -> float:
    sizes = step_groups.bincount()
    return float((sizes >= 2).sum() / (sizes > 0).sum())


def text_pairs(spread: int) -> TurnTable:
    """25 pairs of texts; the ratio of pair i is 1 − (i + 1)·spread/500, and 0 with any text of another pair.

    Text and partner have 500 letters each, all the same, of which (i + 1)·spread are others in the partner: LCS is
    500 − (i + 1)·spread. At a threshold that joins j pairs there are j recurring ones of 50 − j states.
    """
    texts = []
    for i in range(PAIRS):
        letter, other, changed = chr(0x4E00 + 2 * i), chr(0x4E01 + 2 * i), (i + 1) * spread
        texts += [letter * 500, letter * (500 - changed) + other * changed]
    return of_texts(*texts)


def known_density(threshold: float, spread: int) -> float:
    joined = sum(1 - (i + 1) * spread / 500 >= threshold - 1e-9 for i in range(PAIRS))
    return joined / (2 * PAIRS - joined)


def vector_pairs(spread: int) -> TurnTable:
    """The same as directions: pair i lies in a plane of its own, with cosine 1 − (i + 1)·spread/500 between the two."""
    vectors = torch.zeros(2 * PAIRS, 2 * PAIRS)
    for i in range(PAIRS):
        cosine = 1 - (i + 1) * spread / 500
        vectors[2 * i, 2 * i] = 1.0
        vectors[2 * i + 1, 2 * i : 2 * i + 2] = torch.tensor([cosine, math.sqrt(1 - cosine**2)])
    row = {f"{i:03}": i for i in range(2 * PAIRS)}
    turns = [make_turn(observation=text) for text in row]
    return make_table(turns, embed=lambda texts: vectors[[row[text] for text in texts]])


def steer(detector: Detector, table: TurnTable, iterations: int) -> list[float]:
    """The densities of so many iterations over the same turns."""
    densities = []
    for _ in range(iterations):
        densities.append(density_of(detector.detect(table)))
        detector.end_iteration(densities[-1], alone)
    return densities


def test_the_density_is_known() -> None:
    for threshold in (0.51, 0.81, 0.91, 0.999):  # between two ratios: a cosine at the threshold itself is rounded
        known = pytest.approx(known_density(threshold, 10))
        assert density_of(SimilarityDetector(threshold).detect(text_pairs(10))) == known
        assert density_of(EmbeddingDetector(threshold).detect(vector_pairs(10))) == known


@pytest.mark.parametrize("start", [0.0, 0.5, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("spread", [1, 10])  # all ratios from 0.95 on, and from 0.5 on
@pytest.mark.parametrize(("kind", "make"), [(SimilarityDetector, text_pairs), (EmbeddingDetector, vector_pairs)])
def test_the_threshold_goes_into_the_band_and_stays(
    kind: type[SimilarityDetector] | type[EmbeddingDetector],
    make: Callable[[int], TurnTable],
    spread: int,
    start: float,
) -> None:
    detector = kind(start, target_density=BAND)
    densities = steer(detector, make(spread), 25)
    assert all(BAND[0] <= density <= BAND[1] for density in densities[20:])
    before = detector.threshold
    assert before == detector.metrics()["anchors/threshold"]
    steer(detector, make(spread), 2)
    assert detector.threshold == before
    # it follows when the turns become others
    assert BAND[0] <= steer(detector, make(11 - spread), 25)[-1] <= BAND[1]


def test_without_a_band_nothing_moves() -> None:
    detector = SimilarityDetector(0.8)
    steer(detector, text_pairs(10), 3)
    assert detector.threshold == 0.8


def test_the_count_goes_into_the_band_and_stays() -> None:
    # key i occurs i times, 1 to 20: with min_count c the keys from c on recur, 21 − c of them, and every turn of the
    # others, 1 + … + (c − 1) of them, is a state: density (21 − c) / (21 − c + c(c − 1)/2)
    table = of_keys(*(f"k{i}" for i in range(1, 21) for _ in range(i)))
    known = [(21 - c) / (21 - c + c * (c - 1) / 2) for c in (2, 10, 11, 12)]
    assert known == pytest.approx([0.95, 0.196, 0.154, 0.120], abs=1e-3)
    for start in (2, 18):
        detector = WindowDetector(window=0, min_count=start, target_density=BAND)
        densities = steer(detector, table, 12)
        assert densities[0] == pytest.approx((21 - start) / (21 - start + start * (start - 1) / 2))
        assert densities[-2] == densities[-1]
        assert BAND[0] <= densities[-1] <= BAND[1]
        assert detector.min_count in (9, 10, 11)


@pytest.mark.parametrize(("kind", "make"), [(SimilarityDetector, text_pairs), (EmbeddingDetector, vector_pairs)])
def test_a_resumed_detector_goes_on_like_the_first(
    kind: type[SimilarityDetector] | type[EmbeddingDetector], make: Callable[[int], TurnTable]
) -> None:
    detector = kind(0.99, target_density=BAND)
    steer(detector, make(10), 4)
    resumed = kind(0.99, target_density=BAND)
    resumed.load_state_dict(detector.state_dict())
    assert resumed.threshold == detector.threshold != 0.99
    assert steer(resumed, make(10), 5) == steer(detector, make(10), 5)
    assert resumed.state_dict() == detector.state_dict()
    # without steering the option holds
    fixed = kind(0.9)
    fixed.load_state_dict(detector.state_dict())
    assert fixed.threshold == 0.9
    detector.load_state_dict(fixed.state_dict())
    assert detector.threshold == resumed.threshold


@settings(deadline=None)
@given(st.floats(0, 1), st.lists(st.floats(0, 1), max_size=60))
def test_the_threshold_is_bounded(start: float, densities: Sequence[float]) -> None:
    now = Threshold(start)
    for density in densities:
        after = next_threshold(now, density, Band(*BAND))
        assert 0 <= after.value <= 1
        # the right way, unless it stands at an end already
        if density < BAND[0]:
            assert after.value < now.value or now.value == 0
        elif density > BAND[1]:
            assert after.value > now.value or now.value >= 1 - 1e-4
        else:
            assert after == now
        now = after


def test_moves_of_the_threshold() -> None:
    # the distance to 1 is 0.1: × 1.5; then, again too low, × 1.5^1.5; then too high: / √(1.5^1.5)
    first = next_threshold(Threshold(0.9), 0.1, Band(*BAND))
    assert first.value == pytest.approx(1 - 0.15)
    second = next_threshold(first, 0.1, Band(*BAND))
    assert second.value == pytest.approx(1 - 0.15 * 1.5**1.5)
    third = next_threshold(second, 0.9, Band(*BAND))
    assert third.value == pytest.approx(1 - 0.15 * 1.5**0.75)
    assert next_threshold(third, 0.2, Band(*BAND)) == third


def test_moves_of_the_count() -> None:
    band = Band(*BAND)
    assert [next_count(5, density, band) for density in (0.1, 0.15, 0.25, 0.3)] == [4, 5, 5, 6]
    assert next_count(2, 0.0, band) == 2
    assert next_count(1000, 1.0, band) == 1000
