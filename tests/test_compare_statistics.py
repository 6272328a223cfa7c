"""The figures over seeds against hand-worked values, and what the report makes of them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

from gigpo_lightning.compare.report import curve, final, markdown, summary
from gigpo_lightning.compare.statistics import (
    crossing,
    difference,
    interquartile_mean,
    interval,
    mean_rate,
    on_grid,
    summarise,
)
from tests.fake_fit import files


def test_mean_interquartile_mean_and_variance() -> None:
    # 5 values: ⌊5/4⌋ = 1 is left out at each end, (0.2 + 0.4 + 0.6) / 3 = 0.4; mean 2.2 / 5 = 0.44;
    # squares of the deviations: .1936 + .0576 + .0016 + .0256 + .3136 = .592, over n − 1 = 4: 0.148
    found = summarise([1.0, 0.0, 0.6, 0.2, 0.4])
    assert (found.n, found.mean, found.iqm, found.variance) == (
        5,
        pytest.approx(0.44),
        pytest.approx(0.4),
        pytest.approx(0.148),
    )
    # 3 values: none is left out
    assert interquartile_mean(np.array([0.0, 0.3, 0.9])) == pytest.approx(0.4)
    # 8 values: two at each end
    assert interquartile_mean(np.array([0, 0, 1, 2, 3, 4, 9, 9.0])) == pytest.approx(2.5)


def test_the_interval_of_two_values_spans_them() -> None:
    # The mean of a resample of two is a or b with probability 1/4 each, so 2.5 % and 97.5 % are a and b themselves.
    assert summarise([0.2, 0.6]).mean_ci == (pytest.approx(0.2), pytest.approx(0.6))


def test_the_interval_of_five_values_is_that_of_all_their_resamples() -> None:
    values = np.array([0.1, 0.2, 0.4, 0.7, 0.9])
    every = np.array(np.meshgrid(*[values] * 5)).reshape(5, -1).mean(axis=0)  # all 5⁵ = 3125 resamples
    exact = np.quantile(every, [0.025, 0.975])
    assert interval(values, lambda data, axis=-1: np.mean(data, axis=axis)) == pytest.approx(tuple(exact), abs=0.02)


def test_one_value_has_no_interval_and_equal_ones_an_empty_one() -> None:
    assert summarise([0.4]) == (1, 0.4, None, 0.4, None, None)
    assert summarise([0.4, 0.4, 0.4]).mean_ci == (0.4, 0.4)


def test_the_same_runs_give_the_same_interval() -> None:
    values = [0.1, 0.35, 0.8, 0.2]
    assert summarise(values) == summarise(values)


def test_differences_are_taken_seed_by_seed() -> None:
    ours, theirs = {0: 0.5, 1: 0.7, 5: 0.1}, {0: 0.4, 1: 0.4, 2: 0.9}
    found = difference(ours, theirs)
    assert found is not None
    # seeds 0 and 1 are in both: +0.1 and +0.3; pairs that ours wins: 0.5 and 0.7 each against two 0.4, 0.1 against none
    assert (found.seeds, found.mean, found.better) == (2, pytest.approx(0.2), pytest.approx(4 / 9))
    assert found.ci == (pytest.approx(0.1), pytest.approx(0.3))
    assert difference({0: 0.5}, {1: 0.5}) is None
    tie = difference({0: 0.5}, {0: 0.5})
    assert tie is not None and tie.better == 0.5


def test_a_crossing_lies_on_the_line_between_two_points() -> None:
    points = [(0.0, 0.1), (100.0, 0.3), (200.0, 0.7), (300.0, 0.2)]
    assert crossing(points, 0.5) == pytest.approx(150)  # half of the way from 0.3 to 0.7
    assert crossing(points, 0.7) == pytest.approx(200)
    assert crossing(points, 0.05) == 0
    assert math.isinf(crossing(points, 0.71))


def test_the_mean_of_a_curve_is_its_area_over_its_range() -> None:
    # trapezia 100 · 0.25 and 300 · 0.5 over 400
    assert mean_rate([(0, 0.0), (100, 0.5), (400, 0.5)]) == pytest.approx(175 / 400)
    assert mean_rate([(7, 0.25)]) == 0.25


def test_a_curve_is_not_drawn_beyond_its_ends() -> None:
    found = on_grid([(10, 0.0), (20, 1.0)], np.array([5, 10, 15, 20, 25]))
    np.testing.assert_array_equal(found, [np.nan, 0.0, 0.5, 1.0, np.nan])


# -- report ------------------------------------------------------------------------------------------------------------


def run(variant: str, seed: int, **changes: Any) -> dict[str, Any]:
    """The content of a `run.json`."""
    made = files(variant, seed)
    own = {"variant": variant, "seed": seed, "final": made["results.json"]["results"], "wall_s": 120.0, "cpu_s": 60.0}
    return {**own, **made["curve.json"], **changes}


RUNS = [run(variant, seed) for variant in ("good", "poor") for seed in (1, 2, 3)]
LABELS = {"good": "the good one", "poor": "the poor one"}
HEAD = {
    "command": "python -m gigpo_lightning compare …",
    "budget": "200 environment steps",
    "jobs": 2,
    "threads": 1,
    "missing": ["poor seed 4"],
    "machine": {"commit": "abc", "changed_files": [], "cpu": "CPU", "cores": 2, "python": "3", "torch": "2"},
}


def test_a_run_is_read_by_stage() -> None:
    assert final(RUNS[0], "near") == pytest.approx(0.6) and final(RUNS[0], "near", "greedy") is None
    assert curve(RUNS[0], "far") == [(0, 0.0), (100, pytest.approx(0.3)), (200, pytest.approx(0.6))]


def test_the_summary_has_every_figure_of_every_stage() -> None:
    found = summary(RUNS, LABELS, threshold=0.35)
    assert list(found["stages"]) == ["near", "far"]
    good, poor = found["stages"]["near"]
    # finals of good 0.6, 0.7, 0.8, of poor 0.1, 0.2, 0.3: half a unit apart, seed by seed and always
    assert good["mean"] == pytest.approx(0.7) and good["variance"] == pytest.approx(0.01) and good["difference"] is None
    assert poor["difference"]["mean"] == pytest.approx(-0.5) and poor["difference"]["better"] == 0
    assert poor["difference"]["ci"] == (pytest.approx(-0.5), pytest.approx(-0.5))
    # straight lines from 0 to the final at 200 steps: the middle one is at 0.35 after 100 of them
    assert good["crossing_env_steps"] == pytest.approx(100) and good["crossed"] == 3
    assert poor["crossing_env_steps"] is None and poor["crossed"] == 0
    assert good["curve_mean"] == pytest.approx(0.35)
    cost = found["cost"][0]
    assert (cost["env_steps"], cost["iterations"], cost["wall_s"], cost["peak_bytes"]) == (200, 2, 120, 2**30)


def test_a_median_crossing_counts_runs_that_never_cross_as_last() -> None:
    def figure(threshold: float) -> dict[str, Any]:
        found: dict[str, Any] = summary(RUNS[:3], {"good": ""}, threshold)["stages"]["near"][0]
        return found

    # 0.65 is reached by 0.7 (after 200 · 65/70 steps) and 0.8; 0.75 by 0.8 only
    assert figure(0.65)["crossed"] == 2 and figure(0.65)["crossing_env_steps"] == pytest.approx(200 * 65 / 70)
    assert figure(0.75)["crossed"] == 1 and figure(0.75)["crossing_env_steps"] is None


def test_the_tables_show_the_figures() -> None:
    text = markdown({**HEAD, **summary(RUNS, LABELS, 0.35)})
    lines = text.splitlines()
    assert "### Success on unseen tasks: near" in lines and "- **not finished**: poor seed 4" in lines
    good = next(line for line in lines if line.startswith("| good"))
    assert good.startswith("| good | 3 | 0.700 | 0.600 … 0.800 | 0.700 | 0.600 … 0.800 | 0.0100 | 0.350 | 100 (3/3) |")
    poor = next(line for line in lines if line.startswith("| poor"))
    assert poor.endswith("| – (0/3) | −0.500 (−0.500 … −0.500) | 0.00 |")
    assert "| good | 3 | 200 | 2 | 0.0 | 2.0 | 1.0 | 1024 | far (3) |" in lines


def test_a_report_is_json() -> None:
    json.dumps(summary(RUNS, LABELS, 0.99), allow_nan=False)


def test_the_picture_has_a_panel_a_stage_and_a_line_a_variant(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    from gigpo_lightning.compare.picture import draw

    drawn: list[Any] = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    draw(summary([*RUNS, run("short", 1)], {**LABELS, "short": "short", "none": "never run"}, 0.5), tmp_path / "a.png")
    panels = [panel for panel in drawn[0].axes if panel.get_visible()]
    assert [panel.get_title() for panel in panels] == ["near", "far"]
    names = [line.get_label() for line in panels[0].lines]
    assert names == ["the good one (3 seeds)", "the poor one (3 seeds)", "short (1 seed)"]
    assert panels[0].lines[0].get_ydata()[-1] == pytest.approx(0.7)  # the mean at the end
    assert len(panels[0].collections) == 2  # bands where there is more than one seed
