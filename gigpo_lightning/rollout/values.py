"""What the critic says of played groups before the first update of their iteration: one value per turn and per end.

The rows are packed as in the update and run under the weights that sampled. Knows no estimator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gigpo_lightning.batch import cut_by_tokens, pack
from gigpo_lightning.credit import Values
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.rollout.demonstrations import pack_row
from gigpo_lightning.trajectory import EndReason, Group, Segment


def rate(groups: Sequence[Group], policy: BasePolicy, max_tokens: int) -> Values:
    """The values of all states in which something was answered, and of those that unfinished episodes were left in.

    Args:
        groups: Played with `leave_open`.
        policy: As it sampled, with a critic.
        max_tokens: Tokens of a micro-batch.

    Raises:
        ValueError: An unfinished episode does not show the state that it was left in.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    segments = [segment for episode in episodes for segment in episode.segments]
    found = iter(_of_segments(segments, policy, max_tokens))
    turns: list[np.ndarray] = []
    ends = []
    for episode in episodes:
        own = np.concatenate([np.zeros(0), *[next(found) for _ in episode.segments]])
        is_open = bool(episode.segments) and episode.segments[-1].is_left_open
        if is_open == (episode.end is EndReason.TERMINATED) or len(own) != len(episode.turns) + is_open:
            raise ValueError(
                f"the episode of task {episode.task_id} ended as {episode.end.value} with {len(own)} values for "
                f"{len(episode.turns)} turns: a critic needs rollouts that were played for one (leave_open)"
            )
        turns.append(own[: len(episode.turns)])
        ends.append(float(own[-1]) if is_open else 0.0)
    return Values(torch.from_numpy(np.concatenate(turns)), torch.tensor(ends, dtype=torch.float64))


def _of_segments(segments: Sequence[Segment], policy: BasePolicy, max_tokens: int) -> list[np.ndarray]:
    """The values at every prompt of each segment."""
    device = next(policy.parameters()).device
    found: dict[int, np.ndarray] = {}
    for cut in cut_by_tokens([len(segment.token_ids) for segment in segments], max_tokens):
        counts = [len(segments[i].answer_starts) for i in cut]
        rows = [
            pack_row(segments[i], 0.0)._replace(values=np.zeros(n), value_targets=np.zeros(n))
            for i, n in zip(cut, counts, strict=True)
        ]
        with torch.no_grad():
            values = policy.values(pack(rows).to(device)).double().cpu().numpy()
        found.update(zip(cut, np.split(values, np.cumsum(counts)[:-1]), strict=True))
    return [found[i] for i in range(len(segments))]
