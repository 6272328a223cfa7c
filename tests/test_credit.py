"""Credit of groups of episodes: the layout, the estimators by name, penalties, figures, and refused input."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gigpo_lightning.credit import Values, credit_groups
from gigpo_lightning.detectors import Detector, ExactDetector, TurnTable
from gigpo_lightning.functional.advantages import gigpo
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.trajectory import EndReason, Episode, Group, Turn

Step = tuple[str, float, bool]


def make_group(task: str, episodes: Sequence[Sequence[Step]], end: EndReason = EndReason.TERMINATED) -> Group:
    """Episodes as lists of (anchor, reward, valid)."""
    return Group(
        task_id=task,
        task_type="toy",
        episodes=tuple(
            Episode(
                task_id=task,
                instruction="",
                turns=tuple(Turn("o", "a", r, anchor, valid, True, 1) for anchor, r, valid in steps),
                segments=(),
                end=end,
                won=False,
            )
            for steps in episodes
        ),
    )


# Group "x": a success in two turns and a failure whose second action was invalid; group "y": two equal failures.
X = make_group("x", [[("s", 0.0, True), ("a", 4.0, True)], [("s", 0.0, True), ("a", 0.0, False)]])
Y = make_group("y", [[("s", 0.0, True)], [("s", 0.0, True), ("b", 0.0, True)]], EndReason.TRUNCATED)


def test_layout_is_groups_then_episodes_then_turns() -> None:
    found = credit_groups([X, Y], lam=0.5, gamma=0.5, norm="none")
    # returns: 0 + 0.5 · 4 and 4; zeros elsewhere
    assert found.step_return.tolist() == [2.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # "s" of x and "s" of y are two states
    assert found.step_group_ids.tolist() == [0, 1, 0, 1, 2, 2, 3]
    # A_E: 4 and 0 about 2, the invalid turn 0.1 less; A_S: 2, 0 about 1; 4, −0.1 about 1.95
    assert found.episode_advantage.tolist() == pytest.approx([2, 2, -2, -2.1, 0, 0, 0])
    assert found.step_advantage.tolist() == pytest.approx([1, 2.05, -1, -2.05, 0, 0, 0])
    assert found.advantage.tolist() == pytest.approx([1.5, 2.025, -1.5, -2.075, 0, 0, 0])
    assert found.advantage.dtype == torch.float64


def test_estimators_by_name() -> None:
    found = {name: credit_groups([X, Y], estimator=name, lam=0.7).advantage for name in ("gigpo", "grpo", "step")}
    both = credit_groups([X, Y], lam=0.7)
    assert torch.equal(found["grpo"], both.episode_advantage)
    assert torch.equal(found["step"], both.step_advantage)
    torch.testing.assert_close(found["gigpo"], 0.7 * found["grpo"] + 0.3 * found["step"])
    # the identities hold across names: λ = 1 is GRPO, λ = 0 is step only
    assert torch.equal(credit_groups([X, Y], lam=1.0).advantage, found["grpo"])
    assert torch.equal(credit_groups([X, Y], lam=0.0).advantage, found["step"])
    # neither reads λ or `combine`
    for name in ("grpo", "step"):
        other = credit_groups([X, Y], estimator=name, lam=5.0, combine="additive")
        assert torch.equal(other.advantage, found[name])


@pytest.mark.parametrize(
    ("rule", "lam", "same"),
    [
        ({"combine": "additive", "omega": 0.3}, 0.9, {"combine": "additive", "lam": 0.3}),  # λ is not read
        ({"combine": "convex", "omega": 0.3}, 0.9, {"lam": 0.9}),
        ({"format_penalty": 0.3}, 0.9, {"format_penalty": 0.3, "lam": 0.9}),
        ({"norm": "none"}, 0.9, {"norm": "none", "lam": 0.9}),
    ],
    ids=str,
)
def test_the_rule_of_a_run_hands_its_options_on(rule: dict[str, Any], lam: float, same: dict[str, Any]) -> None:
    won, failure = X.episodes
    first, second = failure.turns
    sloppy = replace(X, episodes=(won, replace(failure, turns=(first, replace(second, well_formed=False)))))
    found = CreditRule(**rule).credit([sloppy], lam).advantage
    assert torch.equal(found, credit_groups([sloppy], **same).advantage)
    assert rule.get("combine") == "convex" or not torch.equal(found, credit_groups([sloppy], lam=lam).advantage)


def test_options_reach_the_formula() -> None:
    records = ([0, 4, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0] * 4, [0, 1, 0, 1])
    options: dict[str, Any] = {"gamma": 0.9, "norm": "std", "statistics": "step", "combine": "additive"}
    found = credit_groups([X], lam=1.3, invalid_penalty=0.2, **options)
    wanted = gigpo(*records, weight=1.3, penalties=[0, 0, 0, 0.2], **options)
    assert torch.equal(found.advantage, wanted.advantage)


def test_penalty_in_the_returns() -> None:
    # The reward of the invalid turn is −0.1: it is discounted back to the turn before, and lowers the episode's score
    # for both turns: 4 and −0.1 about 1.95.
    found = credit_groups([X], lam=0.5, gamma=0.5, norm="none", penalty_in_returns=True)
    assert found.step_return.tolist() == pytest.approx([2, 4, -0.05, -0.1])
    assert found.episode_advantage.tolist() == pytest.approx([2.05, 2.05, -2.05, -2.05])


def test_an_ill_formed_answer_costs_its_own_turn() -> None:
    # The two turns of the failure broke the format; the second was invalid, too: 0.3, and 0.3 + 0.1.
    failure = X.episodes[1]
    turns = tuple(replace(turn, well_formed=False) for turn in failure.turns)
    sloppy = replace(X, episodes=(X.episodes[0], replace(failure, turns=turns)))
    found = credit_groups([sloppy], lam=0.5, gamma=0.5, norm="none", format_penalty=0.3)
    # A_E: an episode counts with the score of its first turn: 4 and −0.3 about 1.85, the last turn −0.4 about it;
    # A_S: (2, −0.3) about 0.85; (4, −0.4) about 1.8
    assert found.episode_advantage.tolist() == pytest.approx([2.15, 2.15, -2.15, -2.25])
    assert found.step_advantage.tolist() == pytest.approx([1.15, 2.2, -1.15, -2.2])
    assert found.step_return.tolist() == [2.0, 4.0, 0.0, 0.0]
    free = credit_groups([sloppy], lam=0.5, gamma=0.5, norm="none")  # off by default
    assert torch.equal(free.advantage, credit_groups([X], lam=0.5, gamma=0.5, norm="none").advantage)
    found = credit_groups([sloppy], lam=0.5, gamma=0.5, norm="none", format_penalty=0.3, penalty_in_returns=True)
    assert found.step_return.tolist() == pytest.approx([2, 4, -0.3 - 0.5 * 0.4, -0.4])


def test_figures() -> None:
    found = credit_groups([X, Y], lam=0.5)
    # four states (s, a of x; s, b of y), of which three recur; 6 of 7 turns leave one that recurs
    assert found.step_group_sizes.tolist() == [2, 2, 2, 1]
    assert found.figures["density"] == 3 / 4
    assert found.figures["coverage"] == 6 / 7
    # of two task groups y is silent; of the three step groups of two members that of y
    assert found.figures["zero_spread_groups"] == 1 / 2
    assert found.figures["zero_spread_step_groups"] == 1 / 3
    assert found.figures["episode_advantage_std"] == pytest.approx(found.episode_advantage.std(correction=0).item())
    assert found.figures["step_advantage_std"] == pytest.approx(found.step_advantage.std(correction=0).item())
    assert all(type(value) is float for value in found.figures.values())


def test_figures_without_any_pair() -> None:
    found = credit_groups([make_group("z", [[("p", 1.0, True), ("q", 0.0, True)]])], lam=0.5)
    assert found.advantage.tolist() == [0.0, 0.0]
    assert found.figures["density"] == found.figures["coverage"] == 0.0
    assert found.figures["zero_spread_groups"] == found.figures["zero_spread_step_groups"] == 0.0


class Given(Detector):
    """A detector of one's own that gives what it is told."""

    def __init__(self, step_groups: torch.Tensor):
        self.step_groups = step_groups

    def detect(self, table: TurnTable) -> torch.Tensor:
        return self.step_groups


def test_numbers_of_step_groups_may_be_as_high_as_digests() -> None:
    low = credit_groups([X, Y], lam=0.0, detector=Given(torch.tensor([0, 1, 0, 1, 2, 2, 3])))
    high = credit_groups([X, Y], lam=0.0, detector=Given(torch.tensor([5, 2**62, 5, 2**62, 2**61, 2**61, 9])))
    assert high.advantage.equal(low.advantage) and high.step_group_sizes.numel() == 4


def test_a_detector_of_ones_own() -> None:
    alone = credit_groups([X], lam=0.0, detector=Given(torch.arange(4)))
    assert alone.advantage.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("step_groups", "message"),
    [
        (
            torch.arange(6),
            r"Given.detect gave torch.int64 of shape \[6\]; it must give one int64 ≥ 0 for each of 7 turns",
        ),
        (torch.zeros(7), "gave torch.float32 of shape"),
        ([0] * 7, "Given.detect gave list; it must give one int64"),
        (None, "Given.detect gave NoneType; it must give one int64"),
        (torch.tensor([0, 1, 0, 1, 2, 2, -1]), "must give one int64 ≥ 0"),
        (torch.tensor([0, 1, 0, 1, 0, 2, 2]), "put turns of two task groups into one step group"),
    ],
)
def test_a_wrong_detector_is_refused(step_groups: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credit_groups([X, Y], lam=0.5, detector=Given(step_groups))


def test_the_detector_sees_the_turns() -> None:
    seen = []

    class Watching(ExactDetector):
        def detect(self, table: TurnTable) -> torch.Tensor:
            seen.append(table)
            return super().detect(table)

    credit_groups([X, Y], lam=0.5, detector=Watching(), iteration=3, embed=lambda texts: torch.ones(len(texts), 2))
    table = seen[0]
    assert table.keys == ["s", "a", "s", "a", "s", "s", "b"]
    assert table.group_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert table.names[:2] + table.names[-1:] == ["x|s", "x|a", "y|b"]
    assert [turn.reward for turn in table.turns] == [0, 4, 0, 0, 0, 0, 0]
    assert table.iteration == 3
    assert table.embed is not None and table.embed(["a", "b"]).shape == (2, 2)


def test_a_thousand_turns_are_light() -> None:
    groups = [make_group(str(g), [[(f"s{t % 9}", float(t == 24), True) for t in range(25)]] * 8) for g in range(5)]
    credit_groups(groups, lam=0.5)
    # processor time, best of five: a busy machine does not count; about 2 ms here
    best = min(timed(groups) for _ in range(5))
    assert best < 0.010


def timed(groups: list[Group]) -> float:
    begin = time.process_time()
    credit_groups(groups, lam=0.5)
    return time.process_time() - begin


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([make_group("bad", [[("s", 0.0, True)]], EndReason.ERROR)], {}, "episode of task bad ended in an environment"),
        ([], {}, "groups: there is no turn to credit"),
        ([make_group("e", [[], []])], {}, "groups: there is no turn to credit"),
        ([make_group("n", [[("s", float("nan"), True)]])], {}, "rewards: nan at record 0"),
        ([make_group("n", [[("s", None, True)]])], {}, "reward: None; a missing reward is an error"),  # type: ignore[list-item]
        ([X], {"estimator": "grppo"}, "estimator: 'grppo' is unknown; choose one of gigpo, grpo, step"),
        ([X], {"detector": "fuzzy"}, "detector: 'fuzzy' is unknown; choose one of exact"),
        ([X], {"invalid_penalty": -0.1}, "invalid_penalty: -0.1 is not a number >= 0"),
        ([X], {"format_penalty": float("nan")}, "format_penalty: nan is not a number >= 0"),
        ([X], {"lam": 1.5}, r"weight \(λ\): 1.5 is outside \[0, 1\]"),
        ([X], {"gamma": 2.0}, "gamma: 2.0"),
    ],
)
def test_refused(groups: list[Group], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credit_groups(groups, **{"lam": 0.5, **options})


# -- a critic ----------------------------------------------------------------------------------------------------------


def ended(end: EndReason) -> Group:
    """One episode of two turns, rewards 0 and 1, the first action invalid."""
    return make_group("x", [[("s", 0.0, False), ("a", 1.0, True)]], end)


# V of the two states, and of the one that the episode was left in.
VALUES = Values(torch.tensor([0.5, 0.8], dtype=torch.float64), torch.tensor([0.4], dtype=torch.float64))


@pytest.mark.parametrize(
    ("end", "last"),
    [
        (EndReason.TERMINATED, 0.2),  # δ_1 = 1 − 0.8: the task ended, whatever the critic says of what comes then
        (EndReason.TRUNCATED, 0.4),  # δ_1 = 1 + 0.5 · 0.4 − 0.8
        (EndReason.CONTEXT_LIMIT, 0.4),
    ],
)
def test_the_critics_estimators_at_each_end(end: EndReason, last: float) -> None:
    """δ_0 = 0 + 0.5 · 0.8 − 0.5 = −0.1, to which GAE adds γλ δ_1 = 0.25 δ_1, two steps γ δ_1, one step nothing."""
    for name, options, share in (("ppo", {"gae_lambda": 0.5}, 0.25), ("a2c", {}, 0.5), ("a2c", {"n_steps": 1}, 0.0)):
        found = credit_groups([ended(end)], estimator=name, lam=1.0, gamma=0.5, values=VALUES, **options)  # type: ignore[arg-type]
        advantage = [-0.1 + share * last, last]
        # The penalty is the turn's own and no part of what the critic learns.
        assert found.advantage.tolist() == pytest.approx([advantage[0] - 0.1, advantage[1]])
        assert found.value_target is not None
        assert found.value_target.tolist() == pytest.approx([advantage[0] + 0.5, advantage[1] + 0.8])
        assert found.value is not None
        assert found.value.tolist() == [0.5, 0.8]


def test_a_penalty_in_the_returns_is_one_that_the_critic_learns() -> None:
    found = credit_groups(
        [ended(EndReason.TERMINATED)], estimator="ppo", lam=1.0, gamma=0.5, values=VALUES, penalty_in_returns=True
    )
    first = -0.1 - 0.1 + 0.5 * 0.95 * 0.2
    assert found.advantage.tolist() == pytest.approx([first, 0.2])
    assert found.value_target is not None
    assert found.value_target.tolist() == pytest.approx([first + 0.5, 1.0])


def test_a_critics_estimator_without_values_and_a_failed_episode_are_refused() -> None:
    with pytest.raises(ValueError, match=r"estimator: ppo needs the values of a critic; set model\.critic"):
        credit_groups([X], estimator="ppo", lam=1.0)
    with pytest.raises(ValueError, match="ended in an environment error"):
        credit_groups([ended(EndReason.ERROR)], estimator="ppo", lam=1.0, values=VALUES)
    assert credit_groups([X], lam=1.0).value is None


def test_rloo_is_the_return_less_that_of_the_others_and_the_own_penalty() -> None:
    """Returns 4 and 0 in x, 0 and 0 in y; the last turn of x was invalid."""
    found = credit_groups([X, Y], estimator="rloo", lam=0.5)
    assert found.advantage.tolist() == pytest.approx([4, 4, -4, -4.1, 0, 0, 0])
    without = [credit_groups([X, Y], estimator=n, lam=1.0, norm="none", invalid_penalty=0.0) for n in ("rloo", "grpo")]
    torch.testing.assert_close(without[0].advantage, 2 / 1 * without[1].advantage)  # N / (N − 1)
