"""Imitation before reinforcement: bad options, by hand, inside a fit, and once only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.warm_start import WarmStart
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import Observation
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.evaluation import EvaluationRule
from tests.callbacks.tiny import TinyModule, TinyRollouts
from tests.toy_run import fit, initial_weights, make_trainer, weights
from tests.toy_world import BoxExpert, BoxTasks


class Seen(pl.Callback):
    """What is there when training begins: weights and reference."""

    def on_train_start(self, trainer: Any, pl_module: GiGPOModule) -> None:
        self.weights = weights(pl_module)
        reference = pl_module.reference
        self.reference = None if reference is None else torch.nn.utils.parameters_to_vector(reference.parameters())


class NoExpert(BoxTasks):
    def make_expert(self) -> Any:
        raise NotImplementedError("NoExpert has no expert: leave WarmStart out")


class Hopeless(BoxTasks):
    """Its expert opens the same box for ever."""

    def make_expert(self) -> Any:
        class Stubborn(BoxExpert):
            def act(self, observation: Observation, admissible: Any) -> str:
                return "open box 1"

        return Stubborn()


# -- bad argument ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, r"WarmStart\.episodes=0: must be at least 1; to switch it off, leave WarmStart out"),
        ({"epochs": 0}, r"WarmStart\.epochs=0"),
        ({"batch_episodes": 0}, r"WarmStart\.batch_episodes=0"),
        ({"stages": 0}, r"WarmStart\.stages=0: must be at least 1, or null"),
        ({"lr": 0.0}, r"WarmStart\.lr=0\.0: must be positive"),
        ({"lr": math.nan}, r"WarmStart\.lr=nan: must be positive"),
        ({"lr": math.inf}, r"WarmStart\.lr=inf: must be positive"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmStart(**options)


def test_what_it_needs_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="needs a RolloutDataModule; the trainer's datamodule is TinyRollouts"):
        make_trainer(tmp_path, callbacks=[WarmStart()]).fit(TinyModule(), datamodule=TinyRollouts([0.5]))
    with pytest.raises(NotImplementedError, match="leave WarmStart out"):
        fit(tmp_path, callbacks=[WarmStart()], data={"tasks": NoExpert(3)})
    with pytest.raises(ValueError, match="the expert won no training task"):
        fit(tmp_path, callbacks=[WarmStart()], data={"tasks": Hopeless(3)})


# -- by hand -----------------------------------------------------------------------------------------------------------


def success(module: GiGPOModule, root: Path, data: Any) -> float:
    """On 40 unseen tasks, most likely actions."""
    make_trainer(root).test(module, datamodule=data, verbose=False)
    return float(module.results[-1]["success"])


def test_by_hand_the_loss_falls_and_the_success_rises(tmp_path: Path) -> None:
    options = {"max_turns": 5, "evaluation": EvaluationRule(splits=("unseen",), tasks=40, seeds=1)}
    policy = ScratchPolicy(hidden_size=32, layers=2)
    _, module, data = fit(tmp_path, data=options, model={"optimizer": frozen, "policy": policy})
    before = success(module, tmp_path, data)
    warm = WarmStart(episodes=128, epochs=30, batch_episodes=16, lr=0.003)
    losses = warm.imitate(data.policy, warm._demonstrations(data), data.max_tokens_per_batch, seed=0)
    assert len(losses) == 30
    assert losses[-1] < 0.1 < 0.5 < losses[0]  # nats per choice; two equally good boxes would cost ln 2 = 0.69
    assert before < 0.7  # three boxes and five turns: luck alone wins about half
    assert success(module, tmp_path, data) > 0.9


def frozen(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def imitated(tmp_path: Path, max_tokens: int = 8192, **options: Any) -> torch.Tensor:
    """The weights when training begins."""
    seen = Seen()
    settings = {"episodes": 8, "epochs": 2, "batch_episodes": 4, **options}
    fit(tmp_path, callbacks=[WarmStart(**settings), seen], data={"max_tokens_per_batch": max_tokens})
    return seen.weights


def test_every_option_changes_the_weights_and_micro_batches_do_not(tmp_path: Path) -> None:
    usual = imitated(tmp_path)
    for options in ({"episodes": 9}, {"epochs": 3}, {"batch_episodes": 8}, {"lr": 2e-3}):
        assert not torch.allclose(imitated(tmp_path, **options), usual, atol=1e-4), options
    # AdamW divides by the gradient's own size, so that weights with next to no gradient may move the other way.
    torch.testing.assert_close(imitated(tmp_path, max_tokens=1), usual, rtol=0, atol=1e-3)


def test_demonstrations_are_spread_over_the_chosen_stages(tmp_path: Path) -> None:
    _, _, data = fit(tmp_path)
    data.controls.stages = (Stage("two", {"boxes": 2}, max_turns=5), Stage("five", {"boxes": 5}, max_turns=9))
    both = [segments[0].token_ids for segments in WarmStart(episodes=8)._demonstrations(data)]
    first = [segments[0].token_ids for segments in WarmStart(episodes=8, stages=1)._demonstrations(data)]
    two, five = (data.policy.prompt.tokenizer.encode(f"you see {n} box .") for n in (2, 5))  # type: ignore[attr-defined]

    def count(rows: list[list[int]], part: list[int]) -> int:
        return sum(any(row[i : i + len(part)] == part for i in range(len(row))) for row in rows)

    assert (count(both, two), count(both, five)) == (4, 4)
    assert (count(first, two), count(first, five)) == (8, 0)


def test_an_imitation_that_diverges_is_refused(tmp_path: Path) -> None:
    """Adam's first step is ten times this rate, the largest of float32; the loss before it is still a number."""
    warm = WarmStart(episodes=4, epochs=1, batch_episodes=4, lr=3e37)
    with pytest.raises(ValueError, match=r"WarmStart\.lr=3e\+37: .* not finite; lower it"):
        fit(tmp_path, callbacks=[warm])


def test_what_the_run_cannot_play_is_found_before_the_imitation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WarmStart, "imitate", lambda *_: pytest.fail("imitated first"))
    with pytest.raises(ValueError, match="there is no split 'unsen'"):
        fit(tmp_path, callbacks=[WarmStart()], data={"evaluation": EvaluationRule(splits=("unsen",))})


# -- inside a fit ------------------------------------------------------------------------------------------------------


def test_inside_a_fit_it_comes_before_the_first_iteration(tmp_path: Path) -> None:
    seen = Seen()
    fit(tmp_path, callbacks=[WarmStart(episodes=4, epochs=1), seen], model={"kl_coef": 0.1})
    assert not seen.weights.equal(initial_weights())
    assert seen.reference is not None
    assert seen.reference.equal(seen.weights)  # the KL penalty holds to what was imitated


# -- resume ------------------------------------------------------------------------------------------------------------


def test_resume_does_not_repeat_it_and_equals_uninterrupted(tmp_path: Path) -> None:
    def run(folder: str, epochs: int, ckpt_path: str | None = None) -> tuple[WarmStart, GiGPOModule]:
        warm = WarmStart(episodes=4, epochs=1)
        model = {"kl_coef": 0.1}
        return warm, fit(tmp_path / folder, epochs, [warm, IterationCheckpoint()], model=model, ckpt_path=ckpt_path)[1]

    _, whole = run("a", 4)
    first, _ = run("b", 2)
    assert first.done
    second, resumed = run("b", 4, "last")
    assert second.done
    assert weights(resumed).equal(weights(whole))
