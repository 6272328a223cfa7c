"""The window detector: counts over iterations and steps, and its memory."""

from __future__ import annotations

import pytest
import torch

from gigpo_lightning.detectors import ExactDetector, WindowDetector
from tests.detectors.tables import alone, of_keys, pairs, partition

PAIR = {frozenset({0, 1})}


def test_min_count_in_the_present() -> None:
    table = of_keys("a", "b", "a", "b", "a")
    # a occurs three times, b twice
    assert partition(WindowDetector(min_count=3).detect(table)) == {
        frozenset({0, 2, 4}),
        frozenset({1}),
        frozenset({3}),
    }
    assert torch.equal(WindowDetector(min_count=2).detect(table), ExactDetector().detect(table))


def test_earlier_iterations_count() -> None:
    detector = WindowDetector(min_count=3)
    assert pairs(detector.detect(of_keys("a", "a", "b"))) == set()
    detector.end_iteration(0.0, alone)
    # a: two before and two now; b: one before and one now
    assert pairs(detector.detect(of_keys("a", "a", "b"))) == PAIR


def test_only_the_window_counts() -> None:
    detector = WindowDetector(window=2, min_count=3)
    detector.detect(of_keys("a"))
    for _ in range(2):  # the iteration with a is the last but one, then the last but two
        detector.end_iteration(0.0, alone)
    assert pairs(detector.detect(of_keys("a", "a"))) == PAIR
    forgetful = WindowDetector(window=2, min_count=3)
    forgetful.detect(of_keys("a"))
    for _ in range(3):
        forgetful.end_iteration(0.0, alone)
    assert pairs(forgetful.detect(of_keys("a", "a"))) == set()


def test_a_window_of_nothing() -> None:
    detector = WindowDetector(window=0, min_count=3)
    detector.detect(of_keys("a", "a"))
    detector.end_iteration(0.0, alone)
    assert pairs(detector.detect(of_keys("a", "a"))) == set()


@pytest.mark.parametrize(("window", "found"), [(3, set()), (5, PAIR)])
def test_a_window_of_steps(window: int, found: set[frozenset[int]]) -> None:
    detector = WindowDetector(window=window, unit="steps", min_count=3)
    detector.detect(of_keys("a", "b"))
    detector.end_iteration(0.0, alone)
    detector.detect(of_keys("c", "d", "e"))
    detector.end_iteration(0.0, alone)
    # the last iteration has three turns; a was met in the one before, which has two more
    assert pairs(detector.detect(of_keys("a", "a"))) == found


def test_tasks_are_told_apart() -> None:
    detector = WindowDetector(min_count=3)
    detector.detect(of_keys("a", "a", tasks=["x", "x"]))
    detector.end_iteration(0.0, alone)
    assert pairs(detector.detect(of_keys("a", "a", tasks=["y", "y"]))) == set()
    assert pairs(detector.detect(of_keys("a", "a", tasks=["x", "x"]))) == PAIR


def test_calls_within_an_iteration_do_not_matter() -> None:
    once, twice = WindowDetector(min_count=3), WindowDetector(min_count=3)
    together = once.detect(of_keys("a", "a", "b", "a", "a", groups=[0, 0, 0, 1, 1], tasks=["x"] * 5))
    first = twice.detect(of_keys("a", "a", "b", tasks=["x"] * 3))
    second = twice.detect(of_keys("a", "a", tasks=["x"] * 2))
    # two groups of one task: neither sees the other's turns of the same iteration
    assert pairs(together) == pairs(first) == pairs(second) == set()
    for detector in (once, twice):
        detector.end_iteration(0.0, alone)
    assert once.state_dict().keys() == twice.state_dict().keys()
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in states(once, twice))


def states(one: WindowDetector, other: WindowDetector) -> list[tuple[object, object]]:
    return list(zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_all_processes_remember_the_same() -> None:
    first, second = WindowDetector(min_count=3), WindowDetector(min_count=3)
    first.detect(of_keys("a", tasks=["x"]))
    second.detect(of_keys("a", "b", tasks=["x", "x"]))
    both = [dict(first._present), dict(second._present)]
    for detector in (first, second):
        detector.end_iteration(0.0, lambda own: both)
        # met twice before, over both; with one more turn it is an anchor
        assert partition(detector.detect(of_keys("a", "b", "b", tasks=["x"] * 3))) == {
            frozenset({0}),
            frozenset({1, 2}),
        }
        assert detector._totals.total() == 3


def test_a_resumed_detector_goes_on_like_the_first() -> None:
    detector = WindowDetector(window=2, min_count=3, target_density=(0.5, 0.6))
    for keys in ("aab", "bc"):
        detector.detect(of_keys(*keys))
        detector.end_iteration(0.9, alone)
    resumed = WindowDetector(window=2, min_count=3, target_density=(0.5, 0.6))
    resumed.load_state_dict(detector.state_dict())
    assert detector.min_count == 5
    for keys in ("aabbb", "ccccc", "abc"):
        assert torch.equal(resumed.detect(of_keys(*keys)), detector.detect(of_keys(*keys)))
        for one in (resumed, detector):
            one.end_iteration(0.55, alone)
        assert resumed.metrics() == detector.metrics() == {"anchors/min_count": 5.0}
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in states(resumed, detector))


def test_without_steering_the_option_holds_on_resume() -> None:
    resumed = WindowDetector(min_count=4)
    resumed.load_state_dict(WindowDetector(min_count=7).state_dict())
    assert resumed.min_count == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "WindowDetector.window=-1: must be at least 0"),
        ({"unit": "turns"}, "WindowDetector.unit='turns': choose one of iterations, steps"),
        ({"min_count": 1}, r"WindowDetector.min_count=1: must lie in \[2, 1000\]"),
        ({"target_density": (0.3, 0.3)}, r"WindowDetector.target_density=\[0.3, 0.3\]: must be \[low, high\]"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowDetector(**options)  # type: ignore[arg-type]
