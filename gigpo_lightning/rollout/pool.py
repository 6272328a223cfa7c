"""Many environments behind one call: the collector steps all live episodes at once and reads plain states.

What a world answers is checked here and nowhere else. Knows nothing about tokens or policies. `InProcessPool` runs
environments in this process; worker processes are the other kind.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

from gigpo_lightning.envs.base import Observation, StepResult, Task, TextEnv

# Rewards beyond it swamp every other step of a group; a world that means them can scale them down.
MAX_REWARD = 1e6
_WHOLE = "read the world's files as what they are, or with errors='replace'"


@dataclass(slots=True)  # not frozen: one is made at every step, and frozen ones take four times as long to make
class EnvState:
    """What an environment says after a reset or a step.

    `error` is the environment's failure in words, or None; with an error the other fields say nothing, except `lost`
    (the failure was another environment's, and took this one's process with it) and `trace`, where in the world's code
    it failed.
    """

    observation: str = ""
    instruction: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    won: bool = False
    valid: bool = True
    admissible: tuple[str, ...] | None = None
    anchor: Hashable = ""
    error: str | None = None
    lost: bool = False
    trace: str = field(default="", compare=False)


class EnvPool(Protocol):
    """Slots, each with one environment.

    Attributes:
        is_elsewhere: Whether environments work while this process does something else, between `send` and `receive`.
    """

    is_elsewhere: bool

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[EnvState]:
        """Start `tasks[i]` in slot `slots[i]`."""

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> list[EnvState]:
        """Take `actions[i]` in slot `slots[i]`."""

    def send(self, slots: Sequence[int], actions: Sequence[str]) -> None:
        """Let `actions[i]` be taken in slot `slots[i]`; nothing else may be asked before `receive`."""

    def receive(self) -> list[EnvState]:
        """The states after what was sent."""

    def close(self) -> None:
        """Release all environments."""


def first_state(env: TextEnv, task: Task) -> EnvState:
    """Reset `env` and describe where it stands. A failure of the world is recorded, never raised."""
    try:
        observation = env.reset(task)
        check_observation(observation)
        return EnvState(observation.text, observation.instruction, admissible=_admissible(env), anchor=_anchor(env))
    except Exception as error:  # noqa: BLE001 - a world's code: any failure ends the episode as `error`
        return _failure(f"reset of task {task.id}", error)


def next_state(env: TextEnv, action: str, task_id: str = "") -> EnvState:
    """Step `env` and describe where it stands. A failure of the world is recorded, never raised.

    Args:
        env: The environment.
        action: What to do.
        task_id: The task that it plays, for messages.
    """
    try:
        result = env.step(action)
        won, valid = check_step(result)
        over = result.terminated or result.truncated
        return EnvState(
            observation=result.observation.text,
            reward=float(result.reward),
            terminated=result.terminated,
            truncated=result.truncated,
            won=won,
            valid=valid,
            admissible=None if result.terminated else _admissible(env, may_be_empty=over),
            anchor="" if over else _anchor(env),
        )
    except Exception as error:  # noqa: BLE001 - a world's code: any failure ends the episode as `error`
        return _failure(f"step {action!r} of task {task_id}", error)


def check_observation(observation: Observation) -> None:
    """Refuse an observation that is not made of texts.

    Raises:
        TypeError: It is something else; the message says what.
        ValueError: It holds half a character, which no tokenizer reads.
    """
    if not isinstance(observation, Observation):
        raise TypeError(f"the observation is {_show(observation)}: it must be an Observation")
    if not isinstance(observation.text, str) or not isinstance(observation.instruction, str):
        name = "instruction" if isinstance(observation.text, str) else "text"
        raise TypeError(f"the observation's {name} is {_show(getattr(observation, name))}: it must be a str")
    half = _half_character(observation.text) or _half_character(observation.instruction)
    if half:
        raise ValueError(f"the observation holds {half!r}, half a character: {_WHOLE}")


def check_step(result: StepResult) -> tuple[bool, bool]:
    """Refuse an outcome that cannot be trained on (a missing or infinite reward is an error, never 0).

    Returns:
        `won` and `valid`.

    Raises:
        TypeError, ValueError: The message names the part that is wrong, its value, and what is allowed.
    """
    if not isinstance(result, StepResult):
        raise TypeError(f"step() gave {_show(result)}: it must give a StepResult")
    check_observation(result.observation)
    reward, info = result.reward, result.info
    # Not `abs(reward) > …`: NaN compares false with everything.
    if not (isinstance(reward, (float, int, Real)) and abs(reward) <= MAX_REWARD):
        raise ValueError(f"the reward is {_show(reward)}: it must be a number from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    won, valid = info.get("won", False), info.get("valid", True)
    if not (bool is type(won) is type(valid) is type(result.terminated) is type(result.truncated)):
        flags = {"info['won']": won, "info['valid']": valid}
        flags |= {"terminated": result.terminated, "truncated": result.truncated}
        name = next(name for name, value in flags.items() if type(value) is not bool)
        raise TypeError(f"{name} is {_show(flags[name])}: it must be True or False; convert it with bool()")
    return won, valid


def _half_character(text: str) -> str:
    """The first surrogate in a text, as is left of bytes that are not UTF-8; empty where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""


def _admissible(env: TextEnv, may_be_empty: bool = False) -> tuple[str, ...] | None:
    """The admissible actions, checked. This runs at every step: what is wrong is worked out only where something is.

    Where the world's own limit has cut the episode, a critic still reads the state: nothing need be possible there.
    """
    actions = env.admissible_actions()
    if actions is None:
        return () if may_be_empty else None
    if isinstance(actions, str) or not isinstance(actions, (list, tuple, Sequence)):
        raise TypeError(f"admissible_actions() gave {_show(actions)}: it must give a list of texts, or None")
    listed = tuple(actions)
    try:
        "".join(listed).encode()  # the quickest way to see that all are texts, and whole ones
        different = set(listed)
    except (TypeError, UnicodeEncodeError):
        different = set()
    if may_be_empty and not listed:
        return listed
    if not different or len(different) < len(listed) or "" in different:
        raise ValueError(_wrong_actions(listed))
    return listed


def _wrong_actions(listed: tuple[str, ...]) -> str:
    other = [action for action in listed if not isinstance(action, str) or not action]
    if other:
        return f"admissible_actions() lists {_show(other[0])}: every action must be a text that is not empty"
    half = _half_character("".join(listed))
    if half:
        return f"admissible_actions() lists an action with {half!r}, half a character: {_WHOLE}"
    twice = [action for place, action in enumerate(listed) if action in listed[:place]]
    if twice:
        return f"admissible_actions() lists {twice[0]!r} twice: the actions must be different"
    return "admissible_actions() gave an empty list: it must list at least one action, or give None for free answers"


def _anchor(env: TextEnv) -> Hashable:
    anchor = env.anchor()
    try:
        hash(anchor)
    except TypeError as error:
        raise TypeError(f"anchor() gave {_show(anchor)}: it must be hashable, e.g. a str or a tuple of them") from error
    return anchor


def _show(value: object) -> str:
    """A value in an error message: short, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _failure(what: str, error: Exception) -> EnvState:
    return EnvState(error=f"{what}: {type(error).__name__}: {error}", trace=traceback.format_exc())


class InProcessPool:
    """Environments in this process, made when a slot is first used."""

    is_elsewhere = False

    def __init__(self, make_env: Callable[[], TextEnv]):
        self._make_env = make_env
        self._sent: list[EnvState] = []
        self._envs: dict[int, TextEnv] = {}
        self._task_ids: dict[int, str] = {}  # those under way, for messages

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[EnvState]:
        self._task_ids.update((slot, task.id) for slot, task in zip(slots, tasks, strict=True))
        return [first_state(self._env(slot), task) for slot, task in zip(slots, tasks, strict=True)]

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> list[EnvState]:
        ids = self._task_ids
        return [next_state(self._env(slot), a, ids.get(slot, "")) for slot, a in zip(slots, actions, strict=True)]

    def send(self, slots: Sequence[int], actions: Sequence[str]) -> None:
        self._sent = self.step(slots, actions)

    def receive(self) -> list[EnvState]:
        return self._sent

    def close(self) -> None:
        """Close all environments; those that fail to are told in one warning."""
        failures = []
        for env in self._envs.values():
            try:
                env.close()
            except Exception as error:  # noqa: BLE001 - a world's code: the others still have to be closed
                failures.append(f"{type(error).__name__}: {error}")
        count = len(self._envs)
        self._envs.clear()
        self._task_ids.clear()
        if failures:
            warnings.warn(f"{len(failures)} of {count} environments failed to close: {failures[0]}", stacklevel=2)

    def _env(self, slot: int) -> TextEnv:
        if slot not in self._envs:
            self._envs[slot] = self._make_env()
        return self._envs[slot]
