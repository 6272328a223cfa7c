"""The replay cache: recent successes by task, lent to groups of the same task in which nobody succeeded.

Such a group has no spread of returns: it teaches nothing. The borrowed episode joins it as a further member, so that
its mean and its step groups include a success. Knows episodes and iterations, not how they are trained on: `rating`
makes up for the older policy that played them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gigpo_lightning.detectors.base import Gather
from gigpo_lightning.rollout.episode_state import check_anchor, episodes_from_state, episodes_to_state
from gigpo_lightning.trajectory import Episode, Group


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class ReplayRule:
    """When a group may borrow a success.

    Args:
        max_episodes: The most episodes that are kept, one per task; those played longest ago leave.
        max_age: Iterations after which an episode is no longer lent.
        max_ratio: Largest importance weight of a borrowed token, ≥ 1: present ÷ old probability, truncated there.
    """

    max_episodes: int = 256
    max_age: int = 10
    max_ratio: float = 2.0

    def __post_init__(self) -> None:
        for name in ("max_episodes", "max_age"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.replay.{name}={getattr(self, name)}: must be at least 1; replay=null is off")
        if not 1.0 <= self.max_ratio < float("inf"):
            raise ValueError(f"data.replay.max_ratio={self.max_ratio}: must be at least 1 and finite, 2 is usual")


class ReplayCache:
    """Successes of the last iterations, the same on every process.

    Args:
        rule: When a group may borrow; None for never: then nothing is kept.
    """

    def __init__(self, rule: ReplayRule | None):
        self.rule = rule
        self._played: dict[str, tuple[int, Episode]] = {}  # by task: iteration and episode, oldest first
        self._new: dict[str, Episode] = {}  # those of the iteration under way
        self._ages: list[int] = []
        self._episodes = 0

    def __len__(self) -> int:
        return len(self._played)

    def exchange(self, groups: Sequence[Group], iteration: int) -> list[Group]:
        """The groups of a part of an iteration, with a borrowed member each where nobody succeeded and one is there.

        Their successes are lent from the next iteration on, so that the order of the groups does not matter.

        Raises:
            ValueError: An anchor key that no checkpoint could hold.
        """
        if self.rule is None:
            return list(groups)
        self._episodes += sum(len(group.episodes) for group in groups)
        return [self._exchanged(group, iteration, self.rule) for group in groups]

    def _exchanged(self, group: Group, iteration: int, rule: ReplayRule) -> Group:
        won = [episode for episode in group.episodes if episode.won]
        if won:
            self._note(min(won, key=lambda episode: len(episode.turns)), rule)
            return group
        played, episode = self._played.get(group.task_id, (iteration, None))
        age = iteration - played
        if episode is None or age > rule.max_age:
            return group
        self._ages.append(age)
        return replace(group, episodes=(*group.episodes, replace(episode, age=age)))

    def _note(self, episode: Episode, rule: ReplayRule) -> None:
        """Keep a success of this iteration: the shortest of its task, the latest tasks."""
        check_anchor(episode.turns[0].anchor)
        known = self._new.pop(episode.task_id, episode)
        self._new[episode.task_id] = min(known, episode, key=lambda e: len(e.turns))
        if len(self._new) > rule.max_episodes:
            del self._new[next(iter(self._new))]

    def end_iteration(self, iteration: int, gather: Gather) -> dict[str, float]:
        """Take over the successes of all processes; returns the figures `replay/*`, over all processes.

        Args:
            iteration: Its number.
            gather: Exchanges a value with all processes, which must all call.
        """
        if self.rule is None:
            return {}
        parts = gather((self._new, self._ages, self._episodes))
        for new, _, _ in parts:
            for task, episode in new.items():
                self._played.pop(task, None)
                self._played[task] = (iteration, episode)
        self._forget(iteration, self.rule)
        ages = [age for _, own, _ in parts for age in own]
        episodes = sum(own for _, _, own in parts)
        self._new, self._ages, self._episodes = {}, [], 0
        share = len(ages) / max(episodes + len(ages), 1)
        age = {"replay/age": sum(ages) / len(ages)} if ages else {}  # nothing borrowed has no age
        return {"replay/share": share, **age, "replay/cache_size": float(len(self))}

    def _forget(self, iteration: int, rule: ReplayRule) -> None:
        """Let go of what the next iteration may no longer borrow, and of the oldest."""
        recent = [(t, kept) for t, kept in self._played.items() if iteration + 1 - kept[0] <= rule.max_age]
        self._played = dict(recent[-rule.max_episodes :])

    def state_dict(self) -> dict[str, Any]:
        """The episodes as tensors and one text, for weights-only loading."""
        kept = list(self._played.values())
        return {"iterations": [played for played, _ in kept], **episodes_to_state([episode for _, episode in kept])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's episodes, as many as this rule allows; none where replay is off."""
        if self.rule is None:
            return
        kept = zip(state["iterations"], episodes_from_state(state), strict=True)
        self._played = {episode.task_id: (int(played), episode) for played, episode in kept}
        self._played = dict(list(self._played.items())[-self.rule.max_episodes :])
