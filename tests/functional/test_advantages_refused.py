"""What the credit functions refuse: every message names the argument, its value and what is expected."""

from __future__ import annotations

from typing import Any

import pytest

from gigpo_lightning.functional import records
from gigpo_lightning.functional.advantages import gigpo

GOOD: dict[str, Any] = {
    "rewards": [0.0, 1, 0, 2],
    "episode_ids": [0, 0, 1, 1],
    "step_index": [0, 1, 0, 1],
    "group_ids": [0, 0, 0, 0],
    "step_group_ids": [0, 1, 0, 1],
    "weight": 0.5,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [0.0, float("nan"), 0, 2]}, "rewards: nan at record 1; a missing or infinite value is an error"),
        ({"rewards": [0.0, 1, float("inf"), 2]}, "rewards: inf at record 2"),
        ({"rewards": [0.0, None, 0, 2]}, "rewards: object values; expected numbers"),
        ({"rewards": [[0.0, 1, 0, 2]]}, r"rewards: shape \(1, 4\)"),
        ({"episode_ids": [0, 0, 1]}, r"episode_ids: shape \(3,\); expected one per record, \[4\]"),
        ({"episode_ids": [0.0, 0, 1, 1]}, "episode_ids: float64 values; expected integers"),
        ({"step_index": [0, 1, 0, 2]}, "step_index: .* without a gap"),
        ({"step_index": [1, 2, 0, 1]}, "step_index: .* without a gap"),
        ({"step_index": [0, 1, 0, -1]}, "step_index: .* negative"),
        # records out of order, and a step that 32 bits would take for 1
        (
            {"group_ids": [1, 1, 0, 0], "step_group_ids": [0, 1, 2, 3], "step_index": [0, 2**32 + 1, 0, 1]},
            "without a gap",
        ),
        ({"step_index": [0, 0, 0, 1]}, "step_index: two records have the same episode and step"),
        ({"group_ids": [0, 0, 0, 1], "step_group_ids": [0, 1, 0, 2]}, "group_ids: one episode lies in two task groups"),
        ({"group_ids": [0, 0, 1, 1]}, "group_ids: one step group lies in two task groups"),
        ({"penalties": [0, 0, 0]}, r"penalties: shape \(3,\)"),
        ({"penalties": [0, 0, 0, -0.1]}, "penalties: -0.1 is negative"),
        ({"gamma": 1.5}, r"gamma: 1.5 is outside \[0, 1\]"),
        ({"gamma": float("nan")}, "gamma: nan"),
        ({"weight": 1.2}, r"weight \(λ\): 1.2 is outside \[0, 1\]"),
        ({"weight": -0.1, "combine": "additive"}, r"weight \(ω\): -0.1"),
        ({"norm": "var"}, "norm: 'var' is unknown; choose one of std, none"),
        ({"statistics": "episode"}, "statistics: 'episode' is unknown; choose one of trajectory, step"),
        ({"combine": "sum"}, "combine: 'sum' is unknown; choose one of convex, additive"),
        ({"single_member": "one"}, "single_member: 'one' is unknown; choose one of zero, raw"),
        ({"eps": 0.0}, "eps: 0.0 is not positive"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1000])
def test_refused(change: dict[str, Any], message: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CHUNK_RECORDS", chunk)
    gigpo(**GOOD)
    with pytest.raises(ValueError, match=message):
        gigpo(**{**GOOD, **change})
