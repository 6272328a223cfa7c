"""What a world of one's own may get wrong: every bad answer is a failure of that environment, named with its task."""

from __future__ import annotations

import fractions
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gigpo_lightning import __main__
from gigpo_lightning.envs.base import Expert, Observation, StepResult, Task, TextEnv
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.pool import EnvState, InProcessPool
from tests.toy_world import BoxEnv, BoxTasks

TASK = BoxTasks(3).get("train", 5)
GOOD = StepResult(Observation("fine"), 0.0, False, False)


class Answers(TextEnv):
    """Gives the answers that it was made with."""

    def __init__(self, **answers: Any):
        self.answers = {"reset": Observation("start", "do it"), "step": GOOD, "actions": ("a", "b"), "anchor": "k"}
        self.answers |= answers

    def reset(self, task: Task) -> Any:
        return self.answers["reset"]

    def step(self, action: str) -> Any:
        return self.answers["step"]

    def admissible_actions(self) -> Any:
        return self.answers["actions"]

    def anchor(self) -> Any:
        return self.answers["anchor"]


def stepped(**answers: Any) -> EnvState:
    """The state after one step; `actions` and `anchor` are bad only from that step on."""
    env = Answers()
    pool = InProcessPool(lambda: env)
    assert pool.reset([4], [TASK])[0].error is None
    env.answers |= answers
    return pool.step([4], ["go"])[0]


def result(reward: Any = 0.0, **info: Any) -> StepResult:
    return StepResult(Observation("fine"), reward, False, False, info)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"actions": []}, "ValueError: admissible_actions() gave an empty list"),
        (
            {"actions": "look"},
            "TypeError: admissible_actions() gave 'look' (str): it must give a list of texts, or None",
        ),
        ({"actions": {"look": 1}}, "TypeError: admissible_actions() gave {'look': 1} (dict)"),
        ({"actions": {"look", "wait"}}, "(set): it must give a list"),  # its order would differ from run to run
        ({"actions": 3}, "TypeError: admissible_actions() gave 3 (int)"),
        ({"actions": ["a", "b", "a"]}, "ValueError: admissible_actions() lists 'a' twice"),
        ({"actions": ["a", ""]}, "ValueError: admissible_actions() lists '' (str): every action must be a text"),
        ({"actions": ["a", None]}, "ValueError: admissible_actions() lists None (NoneType)"),
        ({"actions": ["a", ["b"]]}, "ValueError: admissible_actions() lists ['b'] (list)"),
        ({"actions": ["a", "b\udcff"]}, "ValueError: admissible_actions() lists an action with '\\udcff', half a char"),
        ({"step": StepResult(Observation("\udcff"), 0.0, False, False)}, "ValueError: the observation holds '\\udcff'"),
        ({"anchor": ["k"]}, "TypeError: anchor() gave ['k'] (list): it must be hashable"),
        ({"step": StepResult(Observation(3), 0.0, False, False)}, "TypeError: the observation's text is 3 (int)"),  # type: ignore[arg-type]
        ({"step": StepResult("text", 0.0, False, False)}, "TypeError: the observation is 'text' (str)"),  # type: ignore[arg-type]
        ({"step": ("text", 0.0, False, {})}, "(tuple): it must give a StepResult"),
        ({"step": None}, "TypeError: step() gave None (NoneType): it must give a StepResult"),
        ({"step": result(math.inf)}, "ValueError: the reward is inf (float): it must be a number from -1e+06 to 1e+06"),
        ({"step": result(-math.inf)}, "ValueError: the reward is -inf"),
        ({"step": result(math.nan)}, "ValueError: the reward is nan"),
        ({"step": result(1.1e6)}, "ValueError: the reward is 1100000.0"),
        ({"step": result(10**400)}, "ValueError: the reward is 1000"),
        ({"step": result(None)}, "ValueError: the reward is None"),
        ({"step": result("1")}, "ValueError: the reward is '1' (str)"),
        ({"step": result(won="no")}, "TypeError: info['won'] is 'no' (str): it must be True or False"),
        ({"step": result(won=None)}, "TypeError: info['won'] is None"),
        ({"step": result(valid=1)}, "TypeError: info['valid'] is 1 (int)"),
        ({"step": StepResult(Observation(""), 0.0, "no", False)}, "TypeError: terminated is 'no'"),  # type: ignore[arg-type]
        ({"step": StepResult(Observation(""), 0.0, False, None)}, "TypeError: truncated is None"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_answer_to_a_step_is_a_failure_that_names_the_task(answers: dict[str, Any], message: str) -> None:
    error = stepped(**answers).error or ""
    assert error.startswith("step 'go' of task train-5: ")
    assert message in error


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"reset": "start"}, "TypeError: the observation is 'start' (str): it must be an Observation"),
        ({"reset": Observation("start", None)}, "TypeError: the observation's instruction is None"),  # type: ignore[arg-type]
        ({"actions": []}, "ValueError: admissible_actions() gave an empty list"),
        ({"anchor": {}}, "TypeError: anchor() gave {} (dict): it must be hashable"),
    ],
)
def test_a_bad_answer_to_a_reset_too(answers: dict[str, Any], message: str) -> None:
    (state,) = InProcessPool(lambda: Answers(**answers)).reset([0], [TASK])
    assert (state.error or "").startswith(f"reset of task train-5: {message}")


@pytest.mark.parametrize(
    ("reward", "value"),
    [(1, 1.0), (-1e6, -1e6), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (fractions.Fraction(1, 4), 0.25)],
)
def test_any_real_number_is_a_reward(reward: Any, value: float) -> None:
    state = stepped(step=result(reward, won=True, valid=False))
    assert (state.error, state.reward, type(state.reward)) == (None, value, float)
    assert (state.won, state.valid) == (True, False)


def test_what_is_good_stays_as_it_is() -> None:
    actions = ["b", "a"]
    state = stepped(actions=actions, anchor=(1, "k"))
    actions.append("c")  # the world goes on with its own list
    assert (state.admissible, state.anchor) == (("b", "a"), (1, "k"))
    assert stepped(actions=None).admissible is None
    over = stepped(step=StepResult(Observation("end"), 1.0, True, False), actions=[], anchor=[])
    assert (over.error, over.terminated) == (None, True)  # after the end nothing more is asked


def test_environments_that_fail_to_close_are_told_and_the_others_are_closed() -> None:
    closed: list[int] = []

    class Sticky(BoxEnv):
        made = 0

        def __init__(self) -> None:
            self.number = Sticky.made
            Sticky.made += 1

        def close(self) -> None:
            if self.number < 2:
                raise OSError("it does not close")
            closed.append(self.number)

    pool = InProcessPool(Sticky)
    pool.reset(range(4), [TASK] * 4)
    with pytest.warns(UserWarning, match="2 of 4 environments failed to close: OSError: it does not close"):
        pool.close()
    assert closed == [2, 3]
    pool.close()  # nothing is left


# -- in the collector --------------------------------------------------------------------------------------------------


def played(env: type[TextEnv], *, constrain: bool = True, max_env_errors: int = 2) -> Collector:
    policy = ScratchPolicy(hidden_size=16, layers=1, heads=2, kv_heads=1)
    policy.prepare(BoxTasks(3))
    rule = SegmentRule(max_tokens=200)
    collector = Collector(
        policy.eval(), InProcessPool(env), rule, constrain=constrain, max_action_tokens=8, max_env_errors=max_env_errors
    )
    list(collector.run([EpisodeJob(TASK, 4, (i,)) for i in range(3)], 1.0))
    return collector


class Endless(BoxEnv):
    """Its rewards are infinite."""

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("done ."), math.inf, True, False, {"won": True})


def test_an_infinite_reward_never_reaches_an_episode() -> None:
    with pytest.raises(
        ValueError, match=r"failed 3 times .*data\.max_env_errors=2.*task train-5: .*reward is inf"
    ) as end:
        played(Endless)
    # The cause shows where the failure was raised, as the traceback of the world's code is lost in a worker.
    assert "check_step" in str(end.value.__cause__)


class Moody(BoxEnv):
    """Lists its actions at the start only."""

    def admissible_actions(self) -> Sequence[str] | None:  # type: ignore[override]
        return super().admissible_actions() if self.open is None else None

    def step(self, action: str) -> StepResult:
        if action.startswith("open box"):
            self.open = 0
        return StepResult(Observation("in it is a cup ."), 0.0, False, False)


def test_where_no_actions_are_listed_the_answer_is_free() -> None:
    policy = ScratchPolicy(hidden_size=16, layers=1, heads=2, kv_heads=1)
    policy.prepare(BoxTasks(3))
    collector = Collector(policy.eval(), InProcessPool(Moody), SegmentRule(max_tokens=200), max_action_tokens=8)
    _, episode = next(collector.run([EpisodeJob(TASK, 4, (0,))], 1.0))
    assert episode.turns[0].action.startswith("open box")  # listed: one of them
    (segment,) = episode.segments
    first = sum(segment.turn_index[i] == 0 for i, chosen in enumerate(segment.response_mask) if chosen)
    assert all(count >= 2 for count in segment.allowed_counts[:first])
    assert set(segment.allowed_counts[first:]) == {0}  # not listed: the whole vocabulary
    assert len(segment.allowed_counts) == sum(segment.response_mask) > first


class Silent(BoxEnv):
    """Lists no actions, so that the answer is free."""

    def admissible_actions(self) -> Sequence[str] | None:  # type: ignore[override]
        return None

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("nothing happens ."), 0.0, False, False, {"valid": False})


def test_a_world_that_never_lists_actions_is_played() -> None:
    assert played(Silent).stats.env_errors == []


# -- in a run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EndlessTasks(BoxTasks):
    def make_env(self) -> TextEnv:
        return Endless()


@dataclass(frozen=True)
class NoExpert(BoxTasks):
    def make_expert(self) -> Expert:  # type: ignore[override]
        return super(BoxTasks, self).make_expert()


@dataclass(frozen=True)
class NoWords(BoxTasks):
    def vocabulary(self) -> Sequence[str]:
        return super(BoxTasks, self).vocabulary()


CONFIG = """
trainer: {accelerator: cpu, max_epochs: 1, enable_model_summary: false, enable_progress_bar: false, logger: false}
data:
  tasks: {class_path: tests.test_own_world.%s}
  groups: 1
  members: 2
  max_env_errors: 3
model:
  policy: {class_path: ScratchPolicy, init_args: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1}}
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIGPO_RUN_PLACE", "")
    monkeypatch.delenv("GIGPO_TRACEBACK", raising=False)
    return tmp_path


TRAIN_ONLY = "--trainer.limit_val_batches=0"  # else the first validation finds the fault, before the training


@pytest.mark.parametrize(
    ("world", "message", "options"),
    [
        ("EndlessTasks", "the reward is inf", []),
        ("EndlessTasks", "the reward is inf", [TRAIN_ONLY]),
        ("NoWords", "NoWords has no vocabulary: use a policy with a tokenizer of its own", []),
        ("NoExpert", "NoExpert has no expert: leave WarmStart out", ["--trainer.callbacks+=WarmStart"]),
    ],
)
def test_the_run_ends_with_the_world_s_message(
    in_folder: Path, capsys: pytest.CaptureFixture[str], world: str, message: str, options: list[str]
) -> None:
    (in_folder / "own.yaml").write_text(CONFIG % world)
    with pytest.raises(SystemExit) as end:
        __main__.main(["fit", "--config=own.yaml", *options])
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
