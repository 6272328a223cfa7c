"""The records of what happened: turns, episodes, groups. Frozen, plain, without knowledge of how they were made."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum


class EndReason(str, Enum):
    """Why an episode ended. The four are never mixed up: only `TERMINATED` means that the task itself ended."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    CONTEXT_LIMIT = "context_limit"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Turn:
    """One observation, the response to it, and what the environment answered.

    `anchor` is the key of the state in which the action was taken; `tokens` the number of sampled tokens. Three
    judgements are kept apart: the world understood the action (`valid`), it had listed it (`admissible`, True where it
    lists none), and the answer kept to its format (`well_formed`). `answer` is the text of the whole answer where it
    says more than the action, else empty.
    """

    observation: str
    action: str
    reward: float
    anchor: Hashable
    valid: bool
    admissible: bool
    tokens: int
    well_formed: bool = True
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive turns of one episode that share one token sequence: one training row.

    The first four lists have the length of `token_ids`. `response_mask` is True where the policy chose the token among
    at least two allowed ones; `turn_index` is the turn within the episode, -1 in the header and in what nothing
    answers; `logprobs` is 0 where the mask is False. `allowed_counts` holds, for each chosen token in order, the
    number of tokens it was chosen among, 0 where that was the whole vocabulary; `allowed_ids` concatenates these
    tokens, none for a 0. `answer_starts` holds, for each turn in order, where its answer begins; one more entry, the
    length of `token_ids`, where the segment ends with a prompt that nothing answers: the state that an unfinished
    episode was left in.
    """

    token_ids: list[int]
    response_mask: list[bool]
    turn_index: list[int]
    logprobs: list[float]
    allowed_ids: list[int]
    allowed_counts: list[int]
    answer_starts: list[int]

    @property
    def is_left_open(self) -> bool:
        """Whether it ends with a prompt that nothing answers."""
        return bool(self.answer_starts) and self.answer_starts[-1] == len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Episode:
    """The turns of one attempt at a task, and the token rows they were sampled in.

    `age` is how many iterations ago it was played; more than 0 only for one that a group has borrowed.
    """

    task_id: str
    instruction: str
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    end: EndReason
    won: bool
    age: int = 0

    @property
    def episode_return(self) -> float:
        """R(τ): the undiscounted sum of the rewards."""
        return sum(turn.reward for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """The N episodes of one task from the same initial state under the same policy."""

    task_id: str
    task_type: str
    episodes: tuple[Episode, ...]
