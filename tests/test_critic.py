"""The critic in whole runs: where values are read, what each option changes, cuts, refusals, resumed runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from gigpo_lightning.__main__ import main
from gigpo_lightning.batch import pack
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.lambda_decay import LambdaDecay
from gigpo_lightning.envs.base import Observation, StepResult, Task
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.chat_text import ChatText
from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.resources import find_file
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import EpisodeContext, SegmentRule
from gigpo_lightning.rollout.demonstrations import pack_row
from gigpo_lightning.rollout.iteration import _mean_and_scale
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.store import RolloutStore
from gigpo_lightning.rollout.values import rate
from gigpo_lightning.trajectory import EndReason, Episode, Group
from tests.test_module import MANY_UPDATES, ONE_UPDATE, Figures
from tests.test_resume import assert_equal
from tests.tiny_lm import CHAT, made, save_tiny
from tests.toy_run import fit, initial_weights, make_data, make_module, make_trainer, rollouts, sgd, weights
from tests.toy_world import BoxEnv, BoxTasks

TASKS = BoxTasks(4)


# -- where values are read ---------------------------------------------------------------------------------------------


def with_critic(**options: Any) -> ScratchPolicy:
    """A policy whose critic says something."""
    policy = ScratchPolicy(hidden_size=32, layers=1, initializer_range=0.2, **options)
    policy.prepare(TASKS)
    policy.add_critic(detach=False)
    assert policy.critic is not None
    torch.nn.init.normal_(policy.critic.head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(policy.critic.head.bias, 0.3)
    return policy.eval()


def play(policy: ScratchPolicy, rule: SegmentRule, max_turns: int = 4, leave_open: bool = True) -> list[Episode]:
    collector = Collector(policy, InProcessPool(BoxEnv), rule, rows=4, max_action_tokens=8, leave_open=leave_open)
    jobs = [EpisodeJob(TASKS.get("train", i), max_turns, (i,)) for i in range(12)]
    return [episode for _, episode in sorted(collector.run(jobs, 3.0))]  # hot: episodes of all kinds


RULES = {
    "growing": SegmentRule(max_tokens=200),
    "pairs": SegmentRule(turns=2, max_tokens=200),
    "single": SegmentRule(turns=1, max_tokens=200),
    "short": SegmentRule(max_tokens=44, keep_last=1),
}


@pytest.mark.parametrize("kind", RULES)
def test_the_values_are_of_the_prompts_and_of_the_state_at_the_end(kind: str) -> None:
    """Each prompt read alone, as when it was answered, gives the value that the packed rows give."""
    policy = with_critic()
    episodes = play(policy, RULES[kind])
    found = rate([Group("g", "", tuple(episodes))], policy, 100)
    wanted, ends = [], []
    for episode in episodes:
        prompts = [s.token_ids[:start] for s in episode.segments for start in s.answer_starts]
        values = [value_of(policy, prompt) for prompt in prompts]
        is_open = episode.end is not EndReason.TERMINATED
        assert len(values) == len(episode.turns) + is_open
        wanted += values[: len(episode.turns)]
        ends.append(values[-1] if is_open else 0.0)
        assert_prompts(policy, episode, prompts)
    assert {episode.end for episode in episodes} >= {EndReason.TERMINATED, EndReason.TRUNCATED}
    torch.testing.assert_close(found.turns, torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.ends, torch.tensor(ends, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    assert float(found.turns.std()) > 0.1


def assert_prompts(policy: ScratchPolicy, episode: Episode, prompts: list[list[int]]) -> None:
    """Every prompt ends with its own observation, and what the policy said is no part of it."""
    texts = [policy.prompt.tokenizer.decode(prompt) for prompt in prompts]
    for turn, text in zip(episode.turns, texts, strict=False):
        assert turn.observation in text[-len(turn.observation) - 60 :]
    for segment in episode.segments:
        for start in segment.answer_starts:
            # What comes before an answer was not chosen; the answer itself belongs to a turn.
            assert not segment.response_mask[start - 1]
            assert start == len(segment.token_ids) or segment.turn_index[start] >= 0


def value_of(policy: ScratchPolicy, prompt: list[int]) -> float:
    with torch.no_grad():
        hidden = policy.feed(policy.new_cache(1, len(prompt)), [prompt])
        assert policy.critic is not None
        return float(policy.critic(hidden)[0])


def test_an_episode_at_its_context_limit_shows_the_state_it_was_left_in() -> None:
    """17 tokens of header and 30 of first prompt at most: some header after a turn leaves no room."""
    policy = with_critic()
    rule = SegmentRule(turns=1, keep_last=3, max_tokens=50)
    limited = [e for e in play(policy, rule, max_turns=8) if e.end is EndReason.CONTEXT_LIMIT]
    assert limited
    for episode in limited:
        last = episode.segments[-1]
        assert last.is_left_open
        assert not any(last.response_mask)
        assert set(last.turn_index) == {-1}
        assert len(last.answer_starts) == 1
    without = [e for e in play(policy, rule, max_turns=8, leave_open=False) if e.end is EndReason.CONTEXT_LIMIT]
    # nothing else about the episodes changes
    assert [e.turns for e in without] == [e.turns for e in limited]
    assert [e.segments for e in without] == [e.segments[:-1] for e in limited]


def test_a_last_state_beyond_the_models_positions_keeps_its_end() -> None:
    """An observation longer than all that the model reads opens a segment of its own, of which the end is kept."""
    policy = with_critic()
    start = (policy.prompt, RULES["growing"], "take the cup", "you see 3 box .")
    contexts = [EpisodeContext(*start, anchor="a") for _ in range(2)]
    for context, positions in zip(contexts, (None, 20), strict=True):
        context.force(policy.prompt.action_ids("open box 1"))
        context.observe("in it is a " + "cup " * 300, 8, anchor="b", reward=0.0)
        context.leave_open(positions)
    whole, cut = (context.segments()[-1] for context in contexts)
    assert len(whole.token_ids) > 300
    assert cut.token_ids == whole.token_ids[-20:]
    for segment in (whole, cut):
        assert segment.is_left_open
        assert segment.answer_starts == [len(segment.token_ids)]
        assert segment.turn_index == [-1] * len(segment.token_ids)
        assert segment.response_mask == [False] * len(segment.token_ids)
        assert segment.logprobs == [0.0] * len(segment.token_ids)


class ShortBoxes(BoxEnv):
    """Ends an episode by a limit of its own, and then lists nothing."""

    def reset(self, task: Task) -> Observation:
        self.turns = 0
        return super().reset(task)

    def step(self, action: str) -> StepResult:
        self.turns += 1
        result = super().step(action)
        return replace(result, truncated=self.turns >= 2 and not result.terminated)

    def admissible_actions(self) -> Sequence[str]:
        return [] if self.turns >= 2 else super().admissible_actions()


def test_a_state_that_the_world_itself_cut_is_read_with_what_is_possible_there(tmp_path: Path) -> None:
    """In prompts that list it; of a world that lists nothing there the list is empty."""
    chat = ChatText(
        system="take it", first="{instruction} , {observation}\n{admissible}", turn="{observation}\n{admissible}"
    )
    policy = made(save_tiny(tmp_path), chat=chat, lora=None)
    policy.add_critic(detach=False)
    collector = Collector(
        policy, InProcessPool(ShortBoxes), RULES["growing"], rows=4, max_action_tokens=8, leave_open=True
    )
    jobs = [EpisodeJob(TASKS.get("train", i), 9, (i,)) for i in range(6)]
    episodes = [episode for _, episode in sorted(collector.run(jobs, 3.0))]
    cut = [episode for episode in episodes if episode.end is EndReason.TRUNCATED]
    assert cut and all(len(episode.turns) == 2 and episode.segments[-1].is_left_open for episode in cut)
    assert len(rate([Group("g", "", tuple(episodes))], policy, 500).ends) == 6


def test_rollouts_that_were_not_played_for_a_critic_are_refused() -> None:
    policy = with_critic()
    groups = [Group("g", "", tuple(play(policy, RULES["growing"], leave_open=False)))]
    with pytest.raises(ValueError, match="ended as truncated with 4 values for 4 turns"):
        rate(groups, policy, 100)


def test_a_prompt_that_nothing_answers_is_not_trained_on() -> None:
    policy = with_critic()
    episode = next(e for e in play(policy, RULES["growing"]) if e.end is EndReason.TRUNCATED)
    segment = episode.segments[-1]
    n = len(episode.turns)
    row = pack_row(segment, 1.0)._replace(values=np.arange(n) / 2, value_targets=np.arange(n) / 4)
    batch = pack([row, row])
    assert batch.values is not None
    first = [start - 1 for start in segment.answer_starts[:n]]
    assert batch.values.states.tolist() == [*first, *(len(segment.token_ids) + i for i in first)]
    assert batch.values.old.tolist() == [*(np.arange(n) / 2), *(np.arange(n) / 2)]
    assert batch.values.targets.tolist() == [*(np.arange(n) / 4), *(np.arange(n) / 4)]


# -- the update --------------------------------------------------------------------------------------------------------


def ppo(**credit: Any) -> dict[str, Any]:
    return {"credit": CreditRule(estimator=credit.pop("estimator", "ppo"), **credit)}


class StartAt(pl.Callback):
    """Gives all weights of the head this value."""

    def __init__(self, start: float):
        self.start = start

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.nn.init.constant_(pl_module.policy.critic.head.weight, self.start)


def change(
    root: Path,
    data: dict[str, Any] = ONE_UPDATE,
    critic: dict[str, Any] | None = None,
    start: float = 0.0,
    **model: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one iteration adds to the weights of the model, and the weights of the head after it."""
    options = {"optimizer": sgd, "gradient_clip": None, "critic": CriticRule(**{"lr": 0.05, **(critic or {})}), **model}
    _, module, _ = fit(root, callbacks=[StartAt(start)], data={**ppo(), **data}, model=options)
    head = module.policy.critic
    assert head is not None
    own = torch.nn.utils.parameters_to_vector(head.parameters()).detach()
    return weights(module)[: -len(own)] - initial_weights(), own


@pytest.mark.parametrize("aggregation", ["token", "turn"])
def test_micro_batching_changes_no_gradient(tmp_path: Path, aggregation: str) -> None:
    """The head says something from the start, so that it trains the trunk, too.

    With one box the first action is forced, and its row has nothing chosen.
    """
    rows = {"segments": SegmentRule(turns=1, max_tokens=200), "tasks": BoxTasks(1)}
    data = {**ONE_UPDATE, "entropy_coef": 0.1, **rows}
    cuts = [
        torch.cat(
            change(tmp_path, {**data, "max_tokens_per_batch": n}, start=0.1, aggregation=aggregation, kl_coef=0.1)
        )
        for n in (1, 100, 10**9)
    ]
    assert cuts[0].norm() > 0.1
    for other in cuts[1:]:
        torch.testing.assert_close(other, cuts[0], rtol=1e-4, atol=1e-5)
    store = RolloutStore(next((tmp_path / "rollouts").glob("*.arrow")))
    assert (store.valued & (store.chosen_counts == 0)).any()


def test_the_value_loss_is_the_mean_over_turns_of_half_the_squares(tmp_path: Path) -> None:
    """The head starts at 0: the first step of its bias, by descent with rate 1, is coef · mean of T.

    With one box the first action is forced: in segments of one turn its row has nothing chosen, but a value.
    """
    figures = Figures()
    data = {**ppo(), **ONE_UPDATE, "segments": SegmentRule(turns=1, max_tokens=200), "tasks": BoxTasks(1)}
    model = {"optimizer": sgd, "gradient_clip": None, "critic": CriticRule(lr=1.0, coef=0.25, clip=None)}
    _, module, _ = fit(tmp_path, callbacks=[figures], data=data, model=model)
    rows = [row for row in rollouts(tmp_path)[0] if row["value_target"]]
    targets = np.array([t for row in rows for t in row["value_target"]])
    assert figures.seen[0]["loss/value"] == pytest.approx(0.5 * float((targets**2).mean()), rel=1e-5)
    assert module.policy.critic is not None
    assert float(module.policy.critic.head.bias.detach()) == pytest.approx(0.25 * float(targets.mean()), rel=1e-5)
    total = figures.seen[0]["loss/policy"] + 0.25 * figures.seen[0]["loss/value"]
    assert figures.seen[0]["loss/total"] == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    ("data", "critic", "model"),
    [
        ({}, {"lr": 0.02}, {}),
        ({}, {"coef": 0.05}, {}),
        ({}, {"clip": 1e-3}, {}),
        ({}, {"detach": True}, {}),
        (ppo(gae_lambda=0.2), {}, {}),
        (ppo(gamma=0.5), {}, {}),
        (ppo(norm="none"), {}, {}),
        (ppo(estimator="a2c"), {}, {}),
        ({}, {}, {"ratio": "sequence"}),
        ({}, {}, {"ratio": "none"}),
    ],
    ids=str,
)
def test_an_option_changes_the_update(
    tmp_path: Path, data: dict[str, Any], critic: dict[str, Any], model: dict[str, Any]
) -> None:
    usual = torch.cat(change(tmp_path, MANY_UPDATES))
    assert not torch.allclose(
        usual, torch.cat(change(tmp_path, {**MANY_UPDATES, **data}, critic, **model)), rtol=1e-3, atol=1e-5
    )


def test_steps_of_a2c_change_the_update(tmp_path: Path) -> None:
    """After an iteration that has moved the critic from 0: before, all n above the longest wait are alike."""

    def after(n: int) -> torch.Tensor:
        data = ppo(estimator="a2c", n_steps=n)
        return weights(fit(tmp_path, 2, data=data, model={"critic": CriticRule(lr=0.1), "ratio": "none"})[1])

    assert not after(1).equal(after(5))


def test_a_detached_critic_leaves_the_trunk_alone(tmp_path: Path) -> None:
    """Whatever its weight, and only then."""
    for detach in (True, False):
        trunks = [change(tmp_path, MANY_UPDATES, {"coef": c, "detach": detach})[0] for c in (0.5, 0.1)]
        assert trunks[0].equal(trunks[1]) == detach


def test_the_head_has_a_gradient_norm_of_its_own(tmp_path: Path) -> None:
    figures = Figures()
    fit(tmp_path, callbacks=[figures], data={**ppo(), **ONE_UPDATE}, model={"critic": CriticRule()})
    assert figures.seen[0]["loss/critic_gradient_norm"] > 0
    model, head = change(tmp_path, gradient_clip=1e-3)
    assert float(model.norm()) == pytest.approx(1e-3, rel=1e-2)
    assert float(head.norm()) == pytest.approx(0.05 * 1e-3, rel=1e-2)


def test_advantages_are_normalised_over_the_iteration(tmp_path: Path) -> None:
    """Mean 0 and standard deviation 1 over the turns in which something was chosen."""
    raw, scaled = seen_advantages(tmp_path, "ppo")
    torch.testing.assert_close(scaled, (raw - raw.mean()) / (raw.std() + 1e-6), rtol=1e-4, atol=1e-5)
    assert float(raw.std()) < 0.9


def test_those_of_rloo_are_divided_and_not_shifted(tmp_path: Path) -> None:
    """A group without spread stays without influence."""
    raw, scaled = seen_advantages(tmp_path, "rloo")
    torch.testing.assert_close(scaled, raw / (raw.std() + 1e-6), rtol=1e-4, atol=1e-5)
    assert abs(float(raw.mean())) > 0.01


def seen_advantages(root: Path, estimator: str) -> list[torch.Tensor]:
    """The advantage of every turn with a choice, as the update sees it, with `norm` none and std."""
    figures = []
    for norm in ("none", "std"):
        seen: list[torch.Tensor] = []
        module = make_module(critic=CriticRule() if estimator == "ppo" else None)
        object.__setattr__(module, "loss", Watching(module.loss, seen))
        data = make_data(**ppo(estimator=estimator, norm=norm), **ONE_UPDATE, max_tokens_per_batch=10**9)
        make_trainer(root).fit(module, datamodule=data)
        figures.append(seen[0])
    return figures


class Watching:
    """A loss that notes the advantage of every turn with a chosen token."""

    def __init__(self, loss: Any, seen: list[torch.Tensor]):
        self._loss, self._seen = loss, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def part(self, policy: Any, reference: Any, micro: Any, *args: Any, **options: Any) -> Any:
        _, index = np.unique(micro.turn.numpy(), return_index=True)
        self._seen.append(micro.advantages[torch.from_numpy(index)])
        return self._loss.part(policy, reference, micro, *args, **options)


def test_moments_of_several_processes_are_those_of_all_turns() -> None:
    random = np.random.default_rng(0)
    parts = [random.normal(3, 2, n) for n in (5, 1, 40)]
    moments = [(float(len(x)), float(x.mean()), float(((x - x.mean()) ** 2).sum())) for x in parts]
    mean, scale = _mean_and_scale([moments[0], (0.0, 0.0, 0.0), *moments[1:]])
    every = np.concatenate(parts)
    assert mean == pytest.approx(every.mean())
    assert scale == pytest.approx(1 / (every.std(ddof=1) + 1e-6))
    assert _mean_and_scale([(3.0, 0.1 + 0.2, 1e-34)])[1] == 0  # round-off is not divided by itself


def test_the_critic_learns_and_says_so(tmp_path: Path) -> None:
    figures = Figures()
    data = {**ppo(), "groups": 8, "passes": 40, "minibatches": 1}
    _, _, datamodule = fit(tmp_path, 2, [figures], data, {"critic": CriticRule(lr=0.03, clip=None)})
    first = [seen["loss/value"] for seen in figures.seen[:40]]
    assert first[-1] < 0.7 * first[0]
    metrics = datamodule.report.metrics
    rows = [row for row in rollouts(tmp_path)[1] if row["value_target"]]
    values, targets = (np.array([v for row in rows for v in row[name]]) for name in ("value", "value_target"))
    assert metrics["critic/value_mean"] == pytest.approx(values.mean())
    assert metrics["critic/target_mean"] == pytest.approx(targets.mean())
    assert metrics["critic/explained_variance"] == pytest.approx(1 - (targets - values).var() / targets.var())
    assert metrics["time/values_s"] > 0


def test_without_a_critic_nothing_is_said_of_one(tmp_path: Path) -> None:
    _, _, data = fit(tmp_path)
    assert not [name for name in data.report.metrics if name.startswith("critic/") or name == "time/values_s"]
    assert all(row["value"] is None and row["value_target"] is None for row in rollouts(tmp_path)[0])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "critic", "message"),
    [
        (ppo(), None, r"data\.credit\.estimator=ppo needs a critic: set model\.critic\.lr"),
        ({}, CriticRule(), r"model\.critic: data\.credit\.estimator=gigpo reads no critic"),
        ({**ppo(), "skip_zero_advantage": True}, CriticRule(), r"data\.skip_zero_advantage=true with model\.critic"),
    ],
)
def test_estimator_and_critic_must_fit(
    tmp_path: Path, data: dict[str, Any], critic: CriticRule | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, data=data, model={"critic": critic})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(CriticRule, lr=0.0), r"model\.critic\.lr=0\.0"),
        (partial(CriticRule, lr=float("nan")), r"model\.critic\.lr=nan"),
        (partial(CriticRule, coef=0.0), r"model\.critic\.coef=0\.0"),
        (partial(CriticRule, clip=-1.0), r"model\.critic\.clip=-1\.0"),
        (partial(CreditRule, gae_lambda=1.5), r"data\.credit\.gae_lambda: 1\.5 is outside \[0, 1\]"),
        (partial(CreditRule, n_steps=0), r"data\.credit\.n_steps: 0 is less than 1"),
        (partial(make_module, ratio="word"), r"model\.ratio='word': choose one of token, sequence, none"),
        (partial(make_module, ratio="none", dual_clip=3.0), r"model\.dual_clip=3\.0 with ratio='none'"),
    ],
)
def test_a_bad_option_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_schedules_multiply_both_learning_rates_or_are_refused(tmp_path: Path) -> None:
    def once(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: float(update == 0))

    four = {"passes": 4, "minibatches": 1}
    for scheduled, single in zip(change(tmp_path, four, lr_scheduler=once), change(tmp_path), strict=True):
        torch.testing.assert_close(scheduled, single, rtol=0, atol=0)

    def cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)

    with pytest.raises(
        ValueError, match=r"model\.lr_scheduler sets the learning rates itself, model\.critic\.lr=0\.05"
    ):
        change(tmp_path, lr_scheduler=cycle)


def test_a_schedule_of_lambda_does_not_disturb_estimators_that_do_not_read_it(tmp_path: Path) -> None:
    for name in ("grpo", "rloo", "ppo"):
        model = {"critic": CriticRule() if name == "ppo" else None}
        callbacks = [LambdaDecay("constant", start=0.3)]
        _, module, data = fit(tmp_path, 2, callbacks, {"credit": CreditRule(estimator=name)}, model)
        assert data.report.metrics["credit/lambda"] == 1
        without = fit(tmp_path, 2, [], {"credit": CreditRule(estimator=name)}, model)[1]
        assert weights(module).equal(weights(without))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    data = {**ppo(), "passes": 2}
    model = {
        "critic": CriticRule(lr=0.02),
        "kl_coef": 0.05,
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }
    fit(tmp_path / "whole", 4, [IterationCheckpoint()], data, model)
    fit(tmp_path / "cut", 2, [IterationCheckpoint()], data, model)
    fit(tmp_path / "cut", 4, [IterationCheckpoint()], data, model, str(tmp_path / "cut/checkpoints/last.ckpt"))
    last = [torch.load(tmp_path / f / "checkpoints/last.ckpt", weights_only=True) for f in ("whole", "cut")]
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_equal(*(checkpoint[part] for checkpoint in last), part)
    head = last[0]["state_dict"]["policy.critic.head.weight"]
    assert head.any()
    assert not [name for name in last[0]["state_dict"] if name.startswith("reference.critic")]
    rates = [group["lr"] for group in last[0]["optimizer_states"][0]["param_groups"]]
    assert rates == pytest.approx([0.01 * 0.9**16, 0.02 * 0.9**16])  # 4 iterations of 2 × 2 updates


def test_a_checkpoint_with_a_critic_belongs_to_a_run_with_one(tmp_path: Path) -> None:
    for name, data, critic in (("with", ppo(), CriticRule()), ("without", {}, None)):
        fit(tmp_path / name, 1, [IterationCheckpoint()], data, {"critic": critic})
    paths = {name: str(tmp_path / name / "checkpoints/last.ckpt") for name in ("with", "without")}
    with pytest.raises(ValueError, match=r"model\.critic is null, but the checkpoint holds a critic"):
        fit(tmp_path, 2, ckpt_path=paths["with"])
    with pytest.raises(ValueError, match=r"model\.critic is set, but the checkpoint holds no critic"):
        fit(tmp_path, 2, data=ppo(), model={"critic": CriticRule()}, ckpt_path=paths["without"])
    for options, path in (({"critic": CriticRule()}, paths["with"]), ({}, paths["with"])):  # an evaluation has no use
        module = make_module(**options)
        make_trainer(tmp_path).test(module, datamodule=make_data(), ckpt_path=path, weights_only=True)
        assert module.policy.critic is None


def test_another_learning_rate_of_the_head_does_not_count_and_is_told(tmp_path: Path) -> None:
    fit(tmp_path, 1, [IterationCheckpoint()], ppo(), {"critic": CriticRule(lr=0.02)})
    path = str(tmp_path / "checkpoints/last.ckpt")
    with pytest.warns(UserWarning, match=r"lr of model\.critic=0\.5 does not count"):
        fit(tmp_path, 2, [], ppo(), {"critic": CriticRule(lr=0.5)}, path)


def test_the_reference_of_a_warm_start_has_no_critic(tmp_path: Path) -> None:
    _, module, _ = fit(tmp_path, 1, [], ppo(), {"critic": CriticRule(), "kl_coef": 0.1})
    assert module.reference is not None
    assert module.reference.critic is None
    module.renew_reference()
    assert torch.nn.utils.parameters_to_vector(module.reference.parameters()).equal(
        torch.nn.utils.parameters_to_vector(module.policy.model.parameters())
    )


def test_with_lora_the_head_is_trained_saved_and_exported(tmp_path: Path) -> None:
    """The checkpoint holds adapter and head, a resumed run takes both over, `export` writes both."""
    source = save_tiny(tmp_path / "tiny")

    def run(folder: str, epochs: int, path: str | None = None) -> Any:
        policy = CausalLMPolicy(source, chat=CHAT, lora=LoRA(r=4))
        model = {"policy": policy, "critic": CriticRule(lr=0.02), "kl_coef": 0.05}
        return fit(tmp_path / folder / "version_0", epochs, [IterationCheckpoint()], ppo(), model, path)[1].policy

    whole = run("whole", 2)
    run("cut", 1)
    resumed = run("cut", 2, str(tmp_path / "cut/version_0/checkpoints/last.ckpt"))
    last = torch.load(tmp_path / "whole/version_0/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert {"policy.critic.head.weight", "policy.critic.head.bias"} < set(last)
    assert all("lora_" in name or ".critic." in name for name in last)
    assert_equal(whole.state_dict(), resumed.state_dict(), "weights")
    assert whole.critic.head.weight.any()
    options = {"model": source, "lora": {"r": 4}, "chat": {"system": CHAT.system, "first": CHAT.first}}
    config = {"class_path": "gigpo_lightning.policy.causal_lm.CausalLMPolicy", "init_args": options}
    (tmp_path / "whole/version_0/config.yaml").write_text(yaml.safe_dump({"model": {"policy": config}}))
    for more, file in ((["--merged"], "model.safetensors"), ([], "adapter_model.safetensors")):
        folder = tmp_path / file
        line = ["export", "--ckpt_path", str(tmp_path / "whole/version_0/checkpoints/last.ckpt"), "--to", str(folder)]
        assert main([*line, *more]) == 0
        assert (folder / file).is_file()
        head = load_file(folder / "value_head.safetensors")
        assert head["weight"].equal(whole.critic.head.weight.detach())
        assert head["bias"].equal(whole.critic.head.bias.detach())


# -- from the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gigpo", "grpo", "grpo-no-std", "rloo", "ppo", "a2c", "step"])
def test_an_overlay_trains_alfworld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Over a configuration with a schedule of λ and rows without advantage left out."""
    monkeypatch.chdir(tmp_path)
    small = ["--data.groups=2", "--data.members=2", "--trainer.max_epochs=2", "--trainer.limit_test_batches=0"]
    small += ["--trainer.limit_val_batches=0"]
    assert main(["fit", "--config=alfworld.yaml", f"--config=algorithm/{name}.yaml", *small]) == 0
    saved = yaml.safe_load((tmp_path / "runs/alfworld/version_0/config.yaml").read_text())
    assert saved["data"]["credit"]["estimator"] == name.removesuffix("-no-std")
    assert saved["data"]["credit"]["gamma"] is not None
    critics = {"ppo", "a2c"}
    assert (saved["model"]["critic"] is not None) == (name in critics)
    assert saved["data"]["skip_zero_advantage"] == (name not in critics)
    assert saved["model"]["ratio"] == ("none" if name == "a2c" else "token")


def test_ppo_over_a2c_has_its_ratio_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overlay says all that its name means, whatever lies below it."""
    monkeypatch.chdir(tmp_path)
    for name, ratio in (("ppo", "token"), ("a2c", "none")):
        other = {"ppo": "a2c", "a2c": "ppo"}[name]
        paths = [find_file("configs", f"algorithm/{each}.yaml") for each in (other, name)]
        model = {k: v for path in paths for k, v in yaml.safe_load(path.read_text())["model"].items()}
        assert model["ratio"] == ratio


def test_an_estimator_without_its_critic_is_refused_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config=alfworld.yaml", "--data.credit.estimator=ppo"])
    assert ended.value.code == 2
    assert "error: data.credit.estimator=ppo needs a critic: set model.critic.lr" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
