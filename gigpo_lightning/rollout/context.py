"""Segments: how the turns of an episode become token rows.

An episode is cut into segments of at most `turns` turns and `max_tokens` tokens. A segment opens with a header (task
and the kept turns before it) and then only grows, so that its key/value cache stays valid and what was sampled is what
is trained on. Knows the prompt format, not the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from gigpo_lightning.policy.base import KeptTurn, PromptFormat
from gigpo_lightning.rollout.keyframes import KEYFRAMES, PastTurn
from gigpo_lightning.trajectory import Segment

SHORTEST_SEGMENT = 16


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class SegmentRule:
    """How episodes are cut.

    Args:
        turns: Turns per segment: 1 is a prompt per turn, null one growing conversation.
        keep_last: Earlier turns that a header always shows: the last ones.
        keep_first_observation: Whether a header always opens with the first observation of the episode.
        max_tokens: Longest segment. An episode whose header without any keyframe leaves no room ends as
            `context_limit`.
        keyframes: Turns before the last ones that a header shows, too: `changes`, those that changed the state or
            earned a reward; `anchors`, the last ones in states where the episode has been twice or more; null for none.
        keep_keyframes: At most so many keyframes, the latest; fewer where the answer would have no room.
    """

    turns: int | None = None
    keep_last: int = 3
    keep_first_observation: bool = True
    max_tokens: int = 1024
    keyframes: str | None = None
    keep_keyframes: int = 6

    def __post_init__(self) -> None:
        if self.turns is not None and self.turns < 1:
            raise ValueError(f"data.segments.turns={self.turns}: must be at least 1, or null for whole episodes")
        if self.keep_last < 0:
            raise ValueError(f"data.segments.keep_last={self.keep_last}: must be at least 0")
        if self.keyframes is not None and self.keyframes not in KEYFRAMES:
            known = ", ".join(KEYFRAMES)
            raise ValueError(f"data.segments.keyframes={self.keyframes!r}: choose one of {known}, or null for none")
        if self.keep_keyframes < 1:
            raise ValueError(
                f"data.segments.keep_keyframes={self.keep_keyframes}: must be at least 1; keyframes=null is none"
            )
        if self.max_tokens < SHORTEST_SEGMENT:
            raise ValueError(f"data.segments.max_tokens={self.max_tokens}: must be at least {SHORTEST_SEGMENT}")


@dataclass(slots=True)
class _OpenSegment:
    """The lists of a `Segment` while it grows, and the turns in it."""

    token_ids: list[int] = field(default_factory=list)
    response_mask: list[bool] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    allowed_ids: list[int] = field(default_factory=list)
    allowed_counts: list[int] = field(default_factory=list)
    answer_starts: list[int] = field(default_factory=list)
    turns: int = 0

    def add(self, token_ids: Sequence[int], turn: int) -> None:
        """Append tokens that the policy did not choose."""
        n = len(token_ids)
        self.token_ids += token_ids
        self.response_mask += [False] * n
        self.turn_index += [turn] * n
        self.logprobs += [0.0] * n

    def add_choice(self, token_id: int, logprob: float, allowed: Sequence[int] | None, turn: int) -> None:
        """Append a token that the policy chose among `allowed` (None: among all)."""
        self.token_ids.append(token_id)
        self.response_mask.append(True)
        self.turn_index.append(turn)
        self.logprobs.append(logprob)
        self.allowed_ids += allowed or ()
        self.allowed_counts.append(len(allowed or ()))

    def close(self) -> Segment:
        lists = {name: getattr(self, name) for name in Segment.__slots__}
        return Segment(**lists)


class EpisodeContext:
    """The token side of one running episode.

    Args:
        prompt: How texts become tokens.
        rule: How the episode is cut.
        instruction: The goal.
        observation: The first observation.
        admissible: What is possible there, for prompts that show it; None where the world does not list it.
        anchor: The key of the first state.
    """

    def __init__(
        self,
        prompt: PromptFormat,
        rule: SegmentRule,
        instruction: str,
        observation: str,
        admissible: Sequence[str] | None = None,
        *,
        anchor: Hashable,
    ):
        self._prompt, self._rule, self.instruction = prompt, rule, instruction
        self._first_observation, self._anchor = observation, anchor
        self._kept: list[KeptTurn] = []
        self._past: list[PastTurn] = []
        self._action: list[int] = []
        self._observation = observation
        self._closed: list[Segment] = []
        self.turn = 0
        self._open = _OpenSegment()
        self._start_segment(admissible, 0)

    @property
    def tokens(self) -> int:
        """Tokens of the open segment."""
        return len(self._open.token_ids)

    @property
    def room(self) -> int:
        """Tokens that still fit into the open segment."""
        return self._rule.max_tokens - self.tokens

    def require_room(self, answer_tokens: int, task_id: str) -> None:
        """Refuse a first prompt that leaves no room for an answer.

        Raises:
            ValueError: The message names the option to raise, and the task.
        """
        if self.room < answer_tokens:
            raise ValueError(
                f"data.segments.max_tokens={self._rule.max_tokens} leaves no room after the first prompt of task "
                f"{task_id} ({self.tokens} tokens): raise it to at least {self.tokens + answer_tokens}"
            )

    @property
    def token_ids(self) -> list[int]:
        """The open segment's tokens so far: what the policy answers to."""
        return self._open.token_ids

    def force(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the answer that have no alternative."""
        self._begin_answer()
        self._open.add(token_ids, self.turn)
        self._action += token_ids

    def answer(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        allowed: Sequence[Sequence[int] | None],
    ) -> None:
        """Append an answer.

        Args:
            token_ids: Its tokens.
            logprobs: Of each token; None where it had no alternative, and so was not chosen.
            allowed: For each chosen token, what it was chosen among; None for the whole vocabulary.
        """
        self._begin_answer()
        for token_id, logprob, ids in zip(token_ids, logprobs, allowed, strict=True):
            if logprob is None:
                self._open.add([token_id], self.turn)
            else:
                self._open.add_choice(token_id, logprob, ids, self.turn)
        self._action += token_ids

    def observe(
        self,
        observation: str,
        reserve: int,
        admissible: Sequence[str] | None = None,
        *,
        anchor: Hashable,
        reward: float,
    ) -> None:
        """Close the turn with what the environment answered; open a new segment where the rule says so.

        Args:
            observation: The next observation.
            reserve: Tokens that the next answer may need.
            admissible: What is possible now, for prompts that show it; None where the world does not list it.
            anchor: The key of the present state.
            reward: What the turn earned.
        """
        self._kept.append(KeptTurn(self._observation, tuple(self._action)))
        self._past.append(PastTurn(self._anchor, anchor, reward))
        self._observation, self._action, self._anchor = observation, [], anchor
        self._open.turns += 1
        self.turn += 1
        ids = self._prompt.continuation(self.instruction, observation, admissible)
        full = self._rule.turns is not None and self._open.turns >= self._rule.turns
        if full or self.tokens + len(ids) + reserve > self._rule.max_tokens:
            self._closed.append(self._open.close())
            self._start_segment(admissible, reserve)
        else:
            self._open.add(ids, self.turn)

    def leave_open(self, positions: int | None) -> None:
        """Keep what was observed last as a prompt that nothing answers, for the value of the state it shows.

        Args:
            positions: What the model can read, in tokens: of a longer segment only the end is kept; None for no limit.
        """
        last = self._open
        last.turn_index = [-1 if turn == self.turn else turn for turn in last.turn_index]
        surplus = 0 if positions is None else self.tokens - positions
        if surplus > 0:  # a header alone: a segment with turns has room for an answer
            for name in ("token_ids", "response_mask", "turn_index", "logprobs"):
                del getattr(last, name)[:surplus]
        last.answer_starts.append(self.tokens)

    def segments(self) -> tuple[Segment, ...]:
        """All segments, the open one included unless nothing was answered in it and it was not left open."""
        if not self._open.answer_starts:
            return tuple(self._closed)
        return (*self._closed, self._open.close())

    def _begin_answer(self) -> None:
        if len(self._open.answer_starts) == self._open.turns:
            self._open.answer_starts.append(self.tokens)

    def _start_segment(self, admissible: Sequence[str] | None, reserve: int) -> None:
        recent = list(range(max(0, self.turn - self._rule.keep_last), self.turn))
        earlier = self._keyframes(self.turn - len(recent))
        ids = self._header([*earlier, *recent], admissible)
        while earlier and len(ids) + reserve > self._rule.max_tokens:
            del earlier[0]
            ids = self._header([*earlier, *recent], admissible)
        self._open = _OpenSegment()
        self._open.add(ids, -1)

    def _keyframes(self, before: int) -> list[int]:
        """The turns before turn `before` that a header shows beside the last ones."""
        if self._rule.keyframes is None:
            return []
        chosen = KEYFRAMES[self._rule.keyframes](self._past)
        return [turn for turn in chosen if turn < before][-self._rule.keep_keyframes :]

    def _header(self, turns: Sequence[int], admissible: Sequence[str] | None) -> list[int]:
        """The header that shows these turns of the past."""
        kept = [self._kept[turn] for turn in turns]
        if self._rule.keep_first_observation and self._kept and 0 not in turns:
            kept = [KeptTurn(self._first_observation, ()), *kept]
        return self._prompt.header(self.instruction, kept, self._observation, admissible)
