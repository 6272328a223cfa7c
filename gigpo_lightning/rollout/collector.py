"""Plays episodes: environments × policy → episodes with their token rows.

Each episode goes at its own pace: a complete answer goes to its environment while the engine says the others, and a
finished episode makes room for the next one of the queue. Knows nothing about models, credit, losses or Lightning.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from gigpo_lightning.envs.base import Task
from gigpo_lightning.policy.answer_rules import AnswerRules
from gigpo_lightning.policy.answering import Answer
from gigpo_lightning.policy.base import BasePolicy, Reading
from gigpo_lightning.policy.engine import DecodingEngine, Engine, Said
from gigpo_lightning.policy.projection import admit
from gigpo_lightning.rollout.context import SHORTEST_SEGMENT, EpisodeContext, SegmentRule
from gigpo_lightning.rollout.job_queue import JobQueue
from gigpo_lightning.rollout.pool import EnvPool, EnvState
from gigpo_lightning.trajectory import EndReason, Episode, Turn

# Room for one answer beyond `max_tokens`, so that most actions of a list need none inside.
ACTION_ROOM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """One episode to play; `seed` alone decides its random numbers."""

    task: Task
    max_turns: int
    seed: tuple[int, ...]


@dataclass(slots=True)
class CollectorStats:
    """What a collection cost: seconds by part, tokens that were read or sampled, prompt tokens that need not be read as
    another row or turn had, and environment failures with their words."""

    env_s: float = 0.0
    policy_s: float = 0.0
    tokens: int = 0
    shared_tokens: int = 0
    steps: int = 0
    env_errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Live:
    """An episode under way in slot `slot` of pool and engine. `said` are the forced tokens that open its answer."""

    slot: int
    job_index: int
    job: EpisodeJob
    random: np.random.Generator
    context: EpisodeContext
    state: EnvState
    answer: Answer = field(init=False)
    said: Said = field(init=False)
    reading: Reading = field(init=False)
    action: str = ""
    is_admissible: bool = True
    turns: list[Turn] = field(default_factory=list)
    end: EndReason | None = None
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
        leave_open: End unfinished episodes with the prompt that comes after their last action, for a critic.
        engine: What says the answers; None for the policy's own model in this process.

    Raises:
        ValueError: The policy has too few positions for such segments.
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
        leave_open: bool = False,
        engine: Engine | None = None,
    ):
        _check_positions(policy.positions, rule.max_tokens)
        self._policy, self._pool, self._rule = policy, pool, rule
        self._rows = rows
        self._max_action_tokens, self._max_env_errors = max_action_tokens, max_env_errors
        self._leave_open = leave_open
        self._rules = AnswerRules(policy.prompt, constrain, max_action_tokens)
        self._engine = engine or DecodingEngine(policy, rule.max_tokens + ACTION_ROOM_TOKENS)
        self.stats = CollectorStats()

    def run(self, jobs: Iterable[EpisodeJob], temperature: float) -> Iterator[tuple[int, Episode]]:
        """Play all jobs, drawn as rows become free; yields `(index of the job, episode)` as episodes finish.

        Raises:
            ValueError: The environments failed too often; the message ends with the last failure, the cause shows where
                in the world's code.
        """
        self.stats = CollectorStats()
        queue = JobQueue(jobs)
        slots = queue.ready(self._rows)
        self._engine.begin(slots, temperature)
        free = deque(range(slots))
        live: dict[int, _Live] = {}
        acting: list[_Live] = []
        while queue.ready(1) or live:
            acting += self._start(queue, free, live)
            self._send(acting)
            # An environment in this process has answered already; those elsewhere work while the engine does.
            complete = self._decode(live) if self._pool.is_elsewhere or not acting else []
            self._receive(acting)
            for row in [row for row in acting if row.end is not None]:
                del live[row.slot]
                self._engine.leave(row.slot)
                free.append(row.slot)
                if row.end is EndReason.ERROR:
                    self._note_error(row.state)
                    queue.put_back(row.job_index, row.job)
                else:
                    yield row.job_index, self._finish(row)
            acting = complete + [row for row in acting if row.end is None and row.answer.is_complete]
        self._engine.end()

    def _start(self, queue: JobQueue[EpisodeJob], free: deque[int], live: dict[int, _Live]) -> list[_Live]:
        """Begin episodes in the free slots; returns those whose first action has no alternative."""
        started = [(free.popleft(), *queue.take()) for _ in range(queue.ready(len(free)))]
        if not started:
            return []
        begin = time.perf_counter()
        states = self._pool.reset([s[0] for s in started], [s[2].task for s in started])
        self.stats.env_s += time.perf_counter() - begin
        rows = []
        for (slot, index, job), state in zip(started, states, strict=True):
            if state.error is not None:
                free.append(slot)
                queue.put_back(index, job)
                self._note_error(state)
                continue
            context = EpisodeContext(
                self._policy.prompt,
                self._rule,
                state.instruction,
                state.observation,
                state.admissible,
                anchor=state.anchor,
            )
            context.require_room(self._reserve(state), job.task.id)
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence(job.seed)))
            rows.append(_Live(slot, index, job, random, context, state))
        live.update((row.slot, row) for row in rows)
        for row in rows:
            self._open_turn(row)
        return [row for row in rows if row.answer.is_complete]

    def _reserve(self, state: EnvState) -> int:
        """Tokens that must be left in a segment for the answer; there is none where the world has cut the episode."""
        if state.truncated:
            return self._max_action_tokens
        return max(self._max_action_tokens, self._rules.longest(state.admissible) - ACTION_ROOM_TOKENS)

    def _open_turn(self, row: _Live) -> None:
        """Ask for the answer of this turn, unless it has no alternative at all."""
        row.answer, row.said = self._rules.start(row.state.admissible), Said(row.slot)
        row.said.force(row.answer.begin())
        if not row.answer.is_complete:
            begin = time.perf_counter()
            self._engine.ask(row.slot, [*row.context.token_ids, *row.said.token_ids], row.answer, row.random)
            self.stats.policy_s += time.perf_counter() - begin

    def _decode(self, live: dict[int, _Live]) -> list[_Live]:
        """Let the engine go on; returns the rows whose answer is complete."""
        begin = time.perf_counter()
        complete = []
        for said in self._engine.step():
            row = live[said.slot]
            row.said.extend(said)
            complete.append(row)
        self.stats.policy_s += time.perf_counter() - begin
        self.stats.tokens, self.stats.shared_tokens = self._engine.tokens, self._engine.shared_tokens
        return complete

    def _send(self, rows: list[_Live]) -> None:
        """Hand the complete answers to their environments."""
        begin = time.perf_counter()
        for row in rows:
            row.context.answer(row.said.token_ids, row.said.logprobs, row.said.allowed)
            row.reading = row.answer.reading(row.said.token_ids)
            row.action, row.is_admissible = admit(row.reading.action, row.state.admissible)
        if rows:
            self._pool.send([row.slot for row in rows], [row.action for row in rows])
        self.stats.env_s += time.perf_counter() - begin

    def _receive(self, rows: list[_Live]) -> None:
        """Take what the environments say; afterwards a row has ended, or its next turn is open."""
        if not rows:
            return
        begin = time.perf_counter()
        states = self._pool.receive()
        self.stats.env_s += time.perf_counter() - begin
        self.stats.steps += len(rows)
        for row, state in zip(rows, states, strict=True):
            before, row.state = row.state, state
            if state.error is not None:
                row.end = EndReason.ERROR
                continue
            row.turns.append(self._turn(row, before, state))
            if state.terminated:
                row.end, row.won = EndReason.TERMINATED, state.won
            elif state.truncated or len(row.turns) >= row.job.max_turns:
                row.end = EndReason.TRUNCATED
            else:
                reserve = self._observe(row)
                if row.context.room < reserve:
                    row.end = EndReason.CONTEXT_LIMIT
                else:
                    self._open_turn(row)

    def _observe(self, row: _Live) -> int:
        """Close the turn with what the environment answered; returns the tokens that the next answer may need."""
        state, reserve = row.state, self._reserve(row.state)
        row.context.observe(
            state.observation, reserve, state.admissible, anchor=state.anchor, reward=row.turns[-1].reward
        )
        return reserve

    def _turn(self, row: _Live, before: EnvState, after: EnvState) -> Turn:
        return Turn(
            observation=before.observation,
            action=row.action,
            reward=after.reward,
            anchor=before.anchor,
            valid=after.valid,
            admissible=row.is_admissible,
            tokens=sum(logprob is not None for logprob in row.said.logprobs),
            well_formed=row.reading.well_formed,
            answer=row.reading.text,
        )

    def _finish(self, row: _Live) -> Episode:
        assert row.end is not None
        job = row.job
        instruction = row.context.instruction
        if self._leave_open and row.end in (EndReason.TRUNCATED, EndReason.CONTEXT_LIMIT):
            self._leave(row)
        segments = row.context.segments()
        return Episode(job.task.id, instruction, tuple(row.turns), segments, row.end, row.won)

    def _leave(self, row: _Live) -> None:
        """Show the state after the last action, as a further turn would have begun with it."""
        if row.end is EndReason.TRUNCATED:
            self._observe(row)
        row.context.leave_open(self._policy.positions)

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


def _check_positions(positions: int | None, max_tokens: int) -> None:
    """Refuse segments that could grow beyond the model's positions.

    Raises:
        ValueError: The message names the longest that would do.
    """
    if positions is not None and max_tokens + ACTION_ROOM_TOKENS > positions:
        most = positions - ACTION_ROOM_TOKENS
        lower = f"lower it to at most {most}, or " if most >= SHORTEST_SEGMENT else ""
        raise ValueError(
            f"data.segments.max_tokens={max_tokens}: the policy has {positions} positions, of which a last answer may "
            f"need {ACTION_ROOM_TOKENS}: {lower}take a policy with more"
        )
