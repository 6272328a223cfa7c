"""Episodes as what a checkpoint may hold: tensors, and one text.

Thousands of small lists and texts would be pickled slowly, and weights-only loading takes plain types only. Texts,
rewards and keys are Python literals in one text, exact and never evaluated; token rows are tensors end to end.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from gigpo_lightning.trajectory import EndReason, Episode, Segment, Turn

# Log-probs keep every bit; they came as Python floats.
_TYPES = {"response_mask": torch.bool, "logprobs": torch.float64}
_PLAIN = ("task_id", "instruction", "won", "age")


def check_anchor(anchor: Hashable) -> None:
    """Refuse an anchor key that does not survive being written.

    Raises:
        ValueError: It is not made of texts, numbers and tuples.
    """
    try:
        survives = ast.literal_eval(repr(anchor)) == anchor
    except (ValueError, SyntaxError):
        survives = False
    if not survives:
        raise ValueError(
            f"data.replay: the world's anchor keys are of type {type(anchor).__name__}, which a checkpoint cannot "
            "hold; let anchor() return a text, a number or a tuple of such, or set data.replay=null"
        )


def episodes_to_state(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Plain values; see `episodes_from_state`."""
    texts = [
        (
            {name: getattr(episode, name) for name in _PLAIN},
            episode.end.value,
            [tuple(getattr(turn, name) for name in Turn.__slots__) for turn in episode.turns],
            len(episode.segments),
        )
        for episode in episodes
    ]
    segments = [segment for episode in episodes for segment in episode.segments]
    state: dict[str, Any] = {"texts": repr(texts)}
    for name in Segment.__slots__:
        lists = [getattr(segment, name) for segment in segments]
        state[name] = torch.tensor([x for values in lists for x in values], dtype=_TYPES.get(name, torch.int32))
        state[f"{name}_lengths"] = torch.tensor([len(values) for values in lists], dtype=torch.int64)
    return state


def episodes_from_state(state: Mapping[str, Any]) -> list[Episode]:
    """The episodes that `episodes_to_state` was given, equal in every field."""
    columns = {}
    for name in Segment.__slots__:
        values, ends = state[name].tolist(), state[f"{name}_lengths"].cumsum(0).tolist()
        columns[name] = [values[begin:end] for begin, end in pairwise([0, *ends])]
    rows = zip(*columns.values(), strict=True)
    return [
        Episode(
            **plain,
            turns=tuple(Turn(*fields) for fields in turns),
            segments=tuple(Segment(**dict(zip(columns, next(rows), strict=True))) for _ in range(segments)),
            end=EndReason(end),
        )
        for plain, end, turns, segments in ast.literal_eval(state["texts"])
    ]
