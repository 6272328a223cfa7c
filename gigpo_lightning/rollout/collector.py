"""Plays episodes: environments × policy → episodes with their token rows.

All live episodes are decoded together, each at its own place: one forward pass feeds every row what it has not seen yet
(one chosen token, or the environment's answer) and samples where there is a choice. A finished episode leaves the batch
and the next one takes its row. Knows nothing about credit, losses or Lightning.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gigpo_lightning.envs.base import Task
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.constraint import ActionTrie
from gigpo_lightning.policy.generation import TrieCache, choose_tokens
from gigpo_lightning.policy.ragged import KVCache
from gigpo_lightning.rollout.context import EpisodeContext, SegmentRule
from gigpo_lightning.rollout.pool import EnvPool, EnvState
from gigpo_lightning.trajectory import EndReason, Episode, Turn

# Room for one answer beyond `max_tokens`: an action that is longer is a mistake of the world.
ACTION_ROOM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """One episode to play; `seed` alone decides its random numbers."""

    task: Task
    max_turns: int
    seed: tuple[int, ...]


@dataclass(slots=True)
class CollectorStats:
    """What a collection cost: seconds by part, tokens, and environment failures with their words."""

    env_s: float = 0.0
    policy_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    env_errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Live:
    """An episode under way in slot `slot` of the pool and row `row` of the cache."""

    slot: int
    row: int
    job_index: int
    job: EpisodeJob
    random: np.random.Generator
    context: EpisodeContext
    state: EnvState
    node: ActionTrie | None = None
    sampled: int = 0
    turns: list[Turn] = field(default_factory=list)
    end: EndReason | None = None
    action: str | None = None
    won: bool = False


class Collector:
    """Plays jobs with a policy, at most `rows` at a time.

    Args:
        policy: A prepared policy, in evaluation mode.
        pool: Environments, one slot per row.
        rule: How episodes are cut into segments.
        rows: Episodes under way at once.
        constrain: Follow the admissible actions where the world lists them.
        max_action_tokens: Longest free answer.
        max_env_errors: Environment failures in one collection after which it stops.
    """

    def __init__(
        self,
        policy: BasePolicy,
        pool: EnvPool,
        rule: SegmentRule,
        *,
        rows: int = 128,
        constrain: bool = True,
        max_action_tokens: int = 16,
        max_env_errors: int = 16,
    ):
        self._policy, self._pool, self._rule = policy, pool, rule
        self._rows, self._constrain = rows, constrain
        self._max_action_tokens, self._max_env_errors = max_action_tokens, max_env_errors
        self._tries = TrieCache(policy.prompt)
        self._cache: KVCache | None = None
        self._lists_actions: bool | None = None  # whether the world lists them: at every turn as at the first
        self.stats = CollectorStats()

    def run(self, jobs: Sequence[EpisodeJob], temperature: float) -> Iterator[tuple[int, Episode]]:
        """Play all jobs; yields `(index of the job, episode)` as episodes finish.

        Raises:
            ValueError: The environments failed too often (the message ends with the last failure, the cause shows where
                in the world's code), or admissible actions are listed on some turns only.
        """
        self.stats = CollectorStats()
        rows = min(self._rows, len(jobs))
        if self._cache is None or len(self._cache.lengths) < rows:
            self._cache = self._policy.new_cache(rows, self._rule.max_tokens + ACTION_ROOM_TOKENS)
        queue = deque(enumerate(jobs))
        free = deque(range(rows))
        live: list[_Live] = []  # the place in it is the row of the cache
        while queue or live:
            started = [(free.popleft(), *queue.popleft()) for _ in range(min(len(free), len(queue)))]
            acting = self._start(started, live, queue, free)
            acting += self._decode(live, temperature) if live and not acting else []
            while acting:
                self._act(acting)
                for row in [r for r in acting if r.end is not None]:
                    self._leave(row, live)
                    free.append(row.slot)
                    if row.end is EndReason.ERROR:
                        self._note_error(row.state)
                        queue.appendleft((row.job_index, row.job))
                    else:
                        yield row.job_index, self._finish(row)
                acting = [r for r in acting if r.end is None and r.action is not None]

    def _start(
        self,
        started: Sequence[tuple[int, int, EpisodeJob]],
        live: list[_Live],
        queue: deque[tuple[int, EpisodeJob]],
        free: deque[int],
    ) -> list[_Live]:
        """Reset environments for new episodes; returns those whose first action is already forced."""
        if not started:
            return []
        begin = time.perf_counter()
        states = self._pool.reset([s[0] for s in started], [s[2].task for s in started])
        self.stats.env_s += time.perf_counter() - begin
        acting = []
        for (slot, index, job), state in zip(started, states, strict=True):
            if state.error is not None:
                free.append(slot)
                queue.appendleft((index, job))
                self._note_error(state)
                continue
            context = EpisodeContext(self._policy.prompt, self._rule, state.instruction, state.observation)
            context.require_room(self._max_action_tokens, job.task.id)
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence(job.seed)))
            row = _Live(slot, len(live), index, job, random, context, state)
            live.append(row)
            self._open_turn(row)
            if row.action is not None:
                acting.append(row)
        return acting

    def _leave(self, row: _Live, live: list[_Live]) -> None:
        """Take a row out of the batch; the last one moves into its place, so that the cache stays without gaps."""
        assert self._cache is not None
        last = live.pop()
        if last is not row:
            self._cache.move(last.row, row.row)
            last.row, live[row.row] = row.row, last

    def _open_turn(self, row: _Live) -> None:
        """Point the row at its first choice of this turn."""
        row.action, row.sampled = None, 0
        admissible = row.state.admissible if self._constrain else None
        if self._lists_actions is None:
            self._lists_actions = admissible is not None
        if self._lists_actions != (admissible is not None):
            raise ValueError(
                f"task {row.job.task.id}, turn {len(row.turns) + 1}: the world lists admissible actions on some turns "
                "only; list them on every turn, or set data.constrain to false"
            )
        if admissible is None:
            row.node = None
        else:
            self._descend(row, self._tries.get(admissible))

    def _descend(self, row: _Live, node: ActionTrie) -> None:
        """Take the forced tokens below `node`; the action is complete at a leaf."""
        forced, row.node = node.follow_forced()
        if forced:
            row.context.force(forced)
        row.action = row.node.action

    def _decode(self, rows: list[_Live], temperature: float) -> list[_Live]:
        """One forward pass and one choice for every row; returns the rows whose action is complete."""
        assert self._cache is not None
        begin = time.perf_counter()
        pending = []
        for row in rows:
            if row.context.fresh:
                self._cache.lengths[row.row] = 0
                row.context.fresh = False
            pending.append(row.context.pending)
            row.context.pending = []
        with torch.inference_mode():
            logits = self._policy.feed(self._cache, pending)
            allowed = [None if r.node is None else r.node.allowed for r in rows]
            choices = choose_tokens(logits, allowed, [r.random.random() for r in rows], temperature)
        self.stats.tokens += sum(map(len, pending))
        for row, choice, ids in zip(rows, choices, allowed, strict=True):
            row.context.choose(choice.token_id, choice.logprob, ids)
            row.sampled += 1
            if row.node is not None:
                self._descend(row, row.node.child(choice.token_id))
            elif choice.token_id == self._policy.prompt.end_id or row.sampled >= self._max_action_tokens:
                if choice.token_id != self._policy.prompt.end_id:
                    row.context.force([self._policy.prompt.end_id])  # cut short: later turns see it ended
                row.action = self._policy.prompt.action_text(row.context.action_so_far)
        self.stats.policy_s += time.perf_counter() - begin
        return [row for row in rows if row.action is not None]

    def _act(self, rows: list[_Live]) -> None:
        """Take the complete actions; afterwards a row has ended, has its next forced action, or waits for a choice."""
        begin = time.perf_counter()
        states = self._pool.step([r.slot for r in rows], [r.action or "" for r in rows])
        self.stats.env_s += time.perf_counter() - begin
        self.stats.steps += len(rows)
        for row, state in zip(rows, states, strict=True):
            before, row.state = row.state, state
            if state.error is not None:
                row.end = EndReason.ERROR
                continue
            action = row.action or ""
            admissible = before.admissible is None or action in before.admissible
            turn = Turn(before.observation, action, state.reward, before.anchor, state.valid, admissible, row.sampled)
            row.turns.append(turn)
            if state.terminated:
                row.end, row.won = EndReason.TERMINATED, state.won
            elif state.truncated or len(row.turns) >= row.job.max_turns:
                row.end = EndReason.TRUNCATED
            else:
                row.context.observe(state.observation, self._max_action_tokens)
                if row.context.room < self._max_action_tokens:
                    row.end = EndReason.CONTEXT_LIMIT
                else:
                    self._open_turn(row)

    def _finish(self, row: _Live) -> Episode:
        assert row.end is not None
        job = row.job
        instruction = row.context.instruction
        segments = row.context.segments()
        return Episode(job.task.id, instruction, tuple(row.turns), segments, row.end, row.won)

    def _note_error(self, state: EnvState) -> None:
        """Count a failure; an episode that lost its worker to another slot's failure is played again uncounted."""
        if state.lost:
            return
        self.stats.env_errors.append(state.error or "unknown failure")
        if len(self.stats.env_errors) > self._max_env_errors:
            raise ValueError(
                f"the environments failed {len(self.stats.env_errors)} times in one collection "
                f"(data.max_env_errors={self._max_env_errors}); the last failure: {state.error}"
            ) from (RuntimeError(state.trace) if state.trace else None)
