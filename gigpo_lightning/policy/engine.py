"""Decoding: many conversations at once, each at its own place, none waiting for another.

One forward pass feeds every row what it has not read (one chosen token, or a whole prompt) and samples where there is
a choice. A row keeps its keys and values from turn to turn, reuses as much of them as a new prompt repeats, and takes
over what another row has read already. `Engine` is the seam, `DecodingEngine` the policy's own model. Knows nothing
about environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gigpo_lightning.policy.answering import Answer
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.casts import without_gradients
from gigpo_lightning.policy.generation import Choice, OutputLayer, choose_tokens
from gigpo_lightning.policy.ragged import KVCache

# A shorter common beginning is read again sooner than it is found and copied.
SHARED_TOKENS = 16


@dataclass(slots=True)
class Said:
    """A complete answer in `slot`, token by token.

    `logprobs` and `allowed` have an entry per token: None in `logprobs` where the token had no alternative; in
    `allowed` the ids that it was chosen among, None for the whole vocabulary.
    """

    slot: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    allowed: list[tuple[int, ...] | None] = field(default_factory=list)

    def force(self, token_ids: Sequence[int]) -> None:
        """Append tokens that had no alternative."""
        self.token_ids += token_ids
        self.logprobs += [None] * len(token_ids)
        self.allowed += [None] * len(token_ids)

    def choose(self, token_id: int, logprob: float, allowed: tuple[int, ...] | None) -> None:
        """Append a chosen token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.allowed.append(allowed)

    def extend(self, more: Said) -> None:
        """Append the tokens of another."""
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.allowed += more.allowed


class Engine(Protocol):
    """Says the answers of many conversations, each in a slot."""

    tokens: int
    """Tokens read and sampled since `begin`."""
    shared_tokens: int
    """Prompt tokens that did not have to be read, as they were read before."""

    def begin(self, slots: int, temperature: float) -> None:
        """Start a collection under the present weights: at most `slots` conversations, sampled at `temperature`."""

    def ask(self, slot: int, token_ids: Sequence[int], answer: Answer, random: np.random.Generator) -> None:
        """Start an answer.

        Args:
            slot: The conversation.
            token_ids: All of it up to here, the first forced tokens of the answer (`Answer.begin`) included.
            answer: What may be said; not complete.
            random: Where the choices of this conversation come from.
        """

    def step(self) -> list[Said]:
        """Go on with all answers under way; returns those that are complete (perhaps none)."""

    def leave(self, slot: int) -> None:
        """The conversation in this slot is over."""

    def end(self) -> None:
        """The collection is over: the memory may be wanted for the update."""


@dataclass(slots=True, eq=False)
class _Row:
    """One conversation: what its row of the cache holds, and what comes next. Without `answer` it waits for its turn.

    `follows` is the row that is just reading the tokens in `cached`: they are copied once it has read them.
    """

    slot: int
    cached: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    answer: Answer | None = None
    random: np.random.Generator | None = None
    said: Said | None = None
    follows: _Row | None = None

    @property
    def is_reading(self) -> bool:
        """Whether the next forward pass is for this row, too."""
        return self.answer is not None and self.follows is None

    def take(self, choice: Choice) -> None:
        """Go on with a chosen token."""
        assert self.answer is not None and self.said is not None
        self.said.choose(choice.token_id, choice.logprob, self.answer.allowed)
        forced = self.answer.take(choice.token_id)
        self.said.force(forced)
        self.pending = [choice.token_id, *forced]

    def hand_over(self) -> Said:
        """The complete answer; the row waits for its next turn."""
        said, self.said, self.answer = self.said, None, None
        assert said is not None
        return said


class DecodingEngine:
    """The policy's own model, in this process.

    Args:
        policy: A prepared policy, in evaluation mode.
        capacity: Longest conversation, in tokens.
    """

    def __init__(self, policy: BasePolicy, capacity: int):
        self._policy, self._capacity = policy, capacity
        self._cache: KVCache | None = None
        self._output: OutputLayer | None = None
        self._rows: list[_Row] = []  # the place in it is the row of the cache
        self._slots, self._temperature = 0, 1.0
        self.tokens = self.shared_tokens = 0

    def begin(self, slots: int, temperature: float) -> None:
        if slots < 0 or not 0 <= temperature < float("inf"):
            raise ValueError(f"slots={slots}, temperature={temperature}: both must be at least 0")
        if self._cache is None or len(self._cache.lengths) < slots:
            self._cache = self._policy.new_cache(slots, self._capacity)
        self._output = self._policy.output_layer()
        self._slots, self._temperature = slots, temperature
        self._rows = []  # the weights have changed: nothing that was read still holds
        self.tokens = self.shared_tokens = 0

    def ask(self, slot: int, token_ids: Sequence[int], answer: Answer, random: np.random.Generator) -> None:
        ids = list(token_ids)
        if not 0 < len(ids) <= self._capacity or answer.is_complete:
            raise ValueError(
                f"slot {slot}: {len(ids)} tokens and an answer that is {'' if answer.is_complete else 'not '}complete; "
                f"there must be 1 to {self._capacity} tokens and something left to answer"
            )
        words = self._policy.model.config.vocab_size
        if not 0 <= min(ids) <= max(ids) < words:
            raise ValueError(
                f"slot {slot}: token {min(ids) if min(ids) < 0 else max(ids)} is none of the {words} words"
            )
        place = self._place(slot)
        row = self._rows[place]
        self._let_go(row)
        row.answer, row.random, row.said = answer, random, Said(slot)
        # The last token must be read again at least, as the first choice is made from its state.
        kept = min(common_length(row.cached, ids), len(ids) - 1)
        goes_on = 0 < kept == len(row.cached)
        source, shared = (None, kept) if goes_on else self._find(row, ids, kept)
        self.shared_tokens += 0 if goes_on else shared
        row.cached, row.pending, row.follows = ids[:shared], ids[shared:], None
        assert self._cache is not None
        self._cache.lengths[place] = kept
        if source is not None and len(source.cached) >= shared:
            self._cache.copy(self._rows.index(source), place, shared)
        else:
            row.follows = source

    def step(self) -> list[Said]:
        active = [row for row in self._rows if row.is_reading]
        if not active:
            return []
        assert self._cache is not None and self._output is not None
        with without_gradients(self._cache.keys.device.type):
            hidden = self._policy.feed(self._cache, [row.pending if row.is_reading else () for row in self._rows])
            choices = choose_tokens(
                self._output,
                hidden,
                [row.answer.allowed for row in active if row.answer],
                [row.random.random() for row in active if row.random],
                self._temperature,
            )
            for row in active:
                self.tokens += len(row.pending)
                row.cached += row.pending
            for place, row in enumerate(self._rows):
                if row.follows is not None:
                    self._cache.copy(self._rows.index(row.follows), place, len(row.cached))
                    row.follows = None
        for row, choice in zip(active, choices, strict=True):
            row.take(choice)
        return [row.hand_over() for row in active if row.answer and row.answer.is_complete]

    def leave(self, slot: int) -> None:
        place = next((i for i, row in enumerate(self._rows) if row.slot == slot), None)
        if place is None:
            return
        assert self._cache is not None
        self._let_go(self._rows[place])
        last = self._rows.pop()
        if place < len(self._rows):  # the last row moves into the gap
            self._cache.copy(len(self._rows), place, len(last.cached))
            self._rows[place] = last

    def end(self) -> None:
        if self._cache is not None and self._cache.keys.is_cuda:
            self._cache = None  # elsewhere it costs more to make it anew than to keep it
        self._output = None
        self._rows = []

    def _place(self, slot: int) -> int:
        """The row of the cache that belongs to this slot; a new one is empty."""
        for place, row in enumerate(self._rows):
            if row.slot == slot:
                return place
        if len(self._rows) >= self._slots:
            raise ValueError(f"slot {slot}: there are {self._slots} conversations under way, as many as were begun")
        self._rows.append(_Row(slot))
        return len(self._rows) - 1

    def _let_go(self, row: _Row) -> None:
        """What this row was about to read will not be there: who waits for it reads its own; as the row does itself."""
        assert self._cache is not None
        for place, other in enumerate(self._rows):
            if other.follows is not None and (other is row or other.follows is row):
                other.cached, other.pending, other.follows = [], other.cached + other.pending, None
                self._cache.lengths[place] = 0

    def _find(self, row: _Row, ids: list[int], kept: int) -> tuple[_Row | None, int]:
        """The row that has read, or is about to read, most of the beginning of `ids`, and how much; or `kept`."""
        best, shared = None, kept
        for other in reversed(self._rows):  # members of a group stand side by side
            if other is row or other.follows is not None:
                continue
            there = other.cached + other.pending if other.answer is not None else other.cached
            needed = max(shared + 1, SHARED_TOKENS)
            if there[:needed] == ids[:needed] and len(there) >= needed < len(ids):
                best, shared = other, min(common_length(there, ids), len(ids) - 1)
        return best, shared


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
