"""Returns and advantages: the oracle, the identities, properties in pairs, the edges, and refused input."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.functional import records
from gigpo_lightning.functional.advantages import GigpoCredit, gigpo, normalise_in_groups, step_returns
from gigpo_lightning.functional.anchors import group_exact
from tests.functional import oracle

# float64 throughout: sums of tens of terms of size 1 to 10, divided by a spread that is at least 1e-3 here
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


class Batch(NamedTuple):
    rewards: np.ndarray
    episodes: np.ndarray
    steps: np.ndarray
    groups: np.ndarray
    step_groups: np.ndarray
    penalties: np.ndarray

    def take(self, order: np.ndarray) -> Batch:
        return Batch(*(values[order] for values in self))


@st.composite
def batches(draw: st.DrawFn, integer: bool = True) -> Batch:
    """Task groups of 1 to 4 episodes of 1 to 6 steps, in random order, with few distinct states."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4))
    rows = [
        (e, t, g, int(rng.integers(0, 3)))
        for g, lengths in enumerate(sizes)
        for e, length in enumerate(lengths, start=100 * g)
        for t in range(length)
    ]
    episodes, steps, groups, states = (np.array(c) for c in zip(*rows, strict=True))
    n = len(rows)
    rewards = rng.integers(-2, 3, n).astype(np.float64) if integer else rng.normal(size=n)
    batch = Batch(rewards, episodes, steps, groups, 10 * groups + states, 0.1 * rng.integers(0, 2, n))
    return batch.take(rng.permutation(n)) if draw(st.booleans()) else batch


def credit(batch: Batch, **options: Any) -> GigpoCredit:
    options = {"weight": 0.8, **options}
    return gigpo(*batch[:5], **options)


@given(batches(), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_step_returns_are_the_oracle(batch: Batch, gamma: float) -> None:
    found = step_returns(batch.rewards, batch.episodes, batch.steps, gamma)
    assert found.dtype == torch.float64
    wanted = oracle.step_returns(batch.rewards.tolist(), batch.episodes.tolist(), batch.steps.tolist(), gamma)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), **TIGHT)


@given(
    batches(), st.sampled_from(["std", "none"]), st.sampled_from(["trajectory", "step"]), st.sampled_from([0.5, 1.0])
)
def test_gigpo_is_the_oracle(batch: Batch, norm: str, statistics: str, gamma: float) -> None:
    found = credit(batch, norm=norm, statistics=statistics, gamma=gamma, penalties=batch.penalties)
    a_e, a_s = oracle.gigpo(*(v.tolist() for v in batch), gamma=gamma, norm=norm, statistics=statistics)
    torch.testing.assert_close(found.episode_advantage, torch.tensor(a_e, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(found.step_advantage, torch.tensor(a_s, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(
        found.advantage, 0.8 * found.episode_advantage + (1 - 0.8) * found.step_advantage, **TIGHT
    )


@given(batches(), st.integers(1, 9))
def test_the_size_of_a_chunk_changes_nothing(batch: Batch, size: int) -> None:
    whole = credit(batch, penalties=batch.penalties)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "CHUNK_RECORDS", size)
        parts = credit(batch, penalties=batch.penalties)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_a_shuffled_batch_of_many_chunks() -> None:
    # 100 groups × 8 episodes × 5 turns in chunks of two or three groups. Step groups are numbered by appearance, so
    # that those of one chunk lie up to 2,000 apart: too far for a chunk's table (2 · 100 + 1024).
    record = np.arange(4000)
    states = np.random.default_rng(0).integers(0, 20, 4000)
    rewards = np.where(record % 5 == 4, record % 3, 0.0)
    batch = Batch(rewards, record // 5, record % 5, record // 40, 20 * (record // 40) + states, 0.1 * (record % 2))
    order = np.random.default_rng(1).permutation(4000)
    shuffled = batch.take(order)
    appearance = group_exact(states[order], shuffled.groups)
    wanted = credit(batch, penalties=batch.penalties)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "CHUNK_RECORDS", 100)
        found = credit(shuffled._replace(step_groups=appearance), penalties=shuffled.penalties)
        returns = step_returns(shuffled.rewards, shuffled.episodes, shuffled.steps, 0.95)
    assert torch.equal(returns, found.step_return)
    assert torch.equal(found.step_return, wanted.step_return[order])  # an episode's sum is made in one order anywhere
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other[order], **TIGHT)


def test_rewards_that_are_a_field_of_packed_records() -> None:
    packed = np.zeros(3, dtype=[("done", np.bool_), ("reward", np.float64)])  # 9 bytes a record: not aligned
    packed["reward"] = [0, 1, 2]
    assert step_returns(packed["reward"], [0, 0, 0], [0, 1, 2], 0.5).tolist() == [1.0, 2.0, 2.0]  # 1 + ½ · 2, ½ · 2


def test_worked_example() -> None:
    # Episode 0: rewards 0, 0, 10; episode 1: 0, 0. γ = 0.5: returns 2.5, 5, 10 and 0, 0.
    # A_E: scores 10 and 0, mean 5, std √50 = 7.0710678: ±0.7071067 (with the 1e-6).
    # State 7 is left by records 0 (2.5) and 3 (0): mean 1.25, std 1.7677670: ±0.7071064. The others are alone: 0.
    batch = Batch(
        *map(np.array, ([0.0, 0, 10, 0, 0], [0, 0, 0, 1, 1], [0, 1, 2, 0, 1], [4] * 5, [7, 8, 9, 7, 6], [0] * 5))
    )
    found = credit(batch, gamma=0.5, weight=0.25)
    assert found.step_return.tolist() == [2.5, 5.0, 10.0, 0.0, 0.0]
    e, s = 5 / (50**0.5 + 1e-6), 1.25 / (3.125**0.5 + 1e-6)
    assert found.episode_advantage.tolist() == pytest.approx([e, e, e, -e, -e], rel=1e-12)
    assert found.step_advantage.tolist() == pytest.approx([s, 0, 0, -s, 0], rel=1e-12)
    assert found.advantage[0].item() == pytest.approx(0.25 * e + 0.75 * s, rel=1e-12)


# -- identities --------------------------------------------------------------------------------------------------------


@given(batches())
def test_lambda_one_is_grpo_and_lambda_zero_is_step_only(batch: Batch) -> None:
    found = credit(batch, weight=1.0)
    assert torch.equal(found.advantage, found.episode_advantage)
    assert torch.equal(credit(batch, weight=0.0).advantage, found.step_advantage)
    assert torch.equal(credit(batch, weight=0.0, combine="additive").advantage, found.episode_advantage)


@given(batches())
def test_lambda_half_is_half_of_omega_one(batch: Batch) -> None:
    convex, additive = credit(batch, weight=0.5), credit(batch, weight=1.0, combine="additive")
    torch.testing.assert_close(2 * convex.advantage, additive.advantage, **TIGHT)


@given(batches())
def test_equal_lengths_make_both_statistics_agree_without_std(batch: Batch) -> None:
    first = batch.take(np.flatnonzero(batch.steps == 0))  # every episode has one step: records are episodes
    one, other = (credit(first, norm="none", statistics=s).episode_advantage for s in ("trajectory", "step"))
    torch.testing.assert_close(one, other, **TIGHT)


def test_gamma_one_gives_the_whole_return_at_the_first_step() -> None:
    assert step_returns([1, 2, 3], [0, 0, 0], [0, 1, 2], 1).tolist() == [6, 5, 3]
    assert step_returns([1, 2, 3], [0, 0, 0], [0, 1, 2], 0).tolist() == [1, 2, 3]


# -- properties: each that a wrong answer passes has a partner that it fails -----------------------------------------


@given(batches(integer=False), st.sampled_from(["std", "none"]))
def test_mean_zero_in_every_group(batch: Batch, norm: str) -> None:
    found = credit(batch, norm=norm)
    first = torch.from_numpy(batch.steps == 0)
    sums = torch.zeros(10).double().index_add(0, torch.from_numpy(batch.groups)[first], found.episode_advantage[first])
    assert sums.abs().max() < 1e-9
    step_sums = torch.zeros(100).double().index_add(0, torch.from_numpy(batch.step_groups), found.step_advantage)
    assert step_sums.abs().max() < 1e-9


@given(batches(), st.sampled_from(["std", "none"]))
def test_order_is_kept_in_every_group(batch: Batch, norm: str) -> None:
    found = credit(batch, norm=norm)
    returns = found.step_return.numpy()
    for group in np.unique(batch.step_groups):
        members = np.flatnonzero(batch.step_groups == group)
        for i in members:
            for j in members:
                if returns[i] > returns[j] + 1e-9:
                    assert found.step_advantage[i] > found.step_advantage[j]


@given(batches(), st.integers(0, 2**32 - 1))
def test_the_order_of_the_records_does_not_matter(batch: Batch, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(batch.rewards))
    for one, other in zip(credit(batch), credit(batch.take(order)), strict=True):
        torch.testing.assert_close(one[torch.from_numpy(order)], other, **TIGHT)


@given(batches(), st.floats(-50, 50))
def test_a_shift_of_a_groups_scores_changes_nothing(batch: Batch, shift: float) -> None:
    # scores of one-step episodes are their rewards; every group moves by another amount
    first = batch.take(np.flatnonzero(batch.steps == 0))
    moved = first._replace(rewards=first.rewards + shift * (first.groups + 1))
    for norm in ("std", "none"):
        one, other = credit(first, norm=norm), credit(moved, norm=norm)
        torch.testing.assert_close(one.advantage, other.advantage, **TIGHT)


@given(batches(), st.floats(0.01, 100))
def test_scale(batch: Batch, factor: float) -> None:
    scaled = batch._replace(rewards=batch.rewards * factor)
    one, other = credit(batch, norm="none"), credit(scaled, norm="none")
    torch.testing.assert_close(factor * one.advantage, other.advantage, **TIGHT)
    # with std the factor cancels if the eps beside the std grows with it
    one, other = credit(batch), credit(scaled, eps=1e-6 * factor)
    torch.testing.assert_close(one.advantage, other.advantage, **TIGHT)


@given(batches())
def test_other_groups_do_not_matter(batch: Batch) -> None:
    keep = np.flatnonzero(batch.groups == batch.groups.max())
    alone = credit(batch.take(keep))
    for one, other in zip(credit(batch), alone, strict=True):
        torch.testing.assert_close(one[torch.from_numpy(keep)], other, **TIGHT)


def test_leave_one_out_form() -> None:
    # norm none times n / (n − 1) is R − mean of the others: 3 − (0 + 0) / 2 = 3 = (3 − 1) · 3 / 2
    found = normalise_in_groups([3.0, 0, 0], [0, 0, 0], norm="none")
    assert (found * 3 / 2).tolist() == pytest.approx([3.0, -1.5, -1.5])


# -- edges -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["std", "none"])
@pytest.mark.parametrize(
    ("rewards", "dtype"),
    [
        # 0.1 + 0.2 and 0.3 differ by one unit in the last place
        ([0.1, 0.2, 0.3, 0.0], np.float64),
        # in float32 by 7e-9, which a spread of 1e-6 does not hide
        ([0.1, 0.2, 0.3, 0.0], np.float32),
        # the scores cancel to 5.6e-17 and 0: round-off of the summed terms, not of the scores
        ([0.3, -0.2, 0.1, 0.0], np.float64),
        ([1e6, 2e6 + 0.1, 3e6 + 0.1, 0.0], np.float64),
    ],
)
def test_round_off_is_no_spread(rewards: list[float], dtype: type, norm: str) -> None:
    values = np.array(rewards, dtype=dtype)
    found = gigpo(values, [0, 0, 1, 1], [0, 1, 0, 1], [0] * 4, [0, 1, 0, 2], gamma=1.0, norm=norm, weight=0.5)
    assert found.episode_advantage.tolist() == [0.0] * 4
    assert found.advantage.tolist() == [0.0] * 4


def test_round_off_is_measured_against_what_was_summed() -> None:
    # 0.1 + 0.2 − 0.3 is 2.8e-17 or 5.6e-17 by the order, never 0: compared with itself it would be a spread
    rewards, index = [0.1, 0.2, -0.3, 0.0, 0.0, 0.0], [0, 1, 2, 0, 1, 2]
    found = gigpo(rewards, [0, 0, 0, 1, 1, 1], index, [0] * 6, [0, 1, 2, 0, 3, 4], gamma=1.0, weight=0.5)
    assert found.step_return[0] != 0
    assert found.episode_advantage.tolist() == [0.0] * 6
    assert found.step_advantage.tolist() == [0.0] * 6


@pytest.mark.parametrize(("spread", "dtype"), [(1e-4, np.float64), (1e-6, np.float64), (1e-4, np.float32)])
def test_a_small_spread_is_a_spread(spread: float, dtype: type) -> None:
    found = gigpo(np.array([10, 10 + spread], dtype=dtype), [0, 1], [0, 0], [0, 0], [0, 0], weight=0.5, norm="none")
    # half the difference, up to float32's 1e-6 at 10
    assert found.advantage[1].item() == pytest.approx(spread / 2, abs=1e-6 if dtype is np.float32 else 1e-12)


@pytest.mark.parametrize(
    ("norm", "single_member", "wanted"),
    [("std", "zero", 0.0), ("none", "zero", 0.0), ("std", "raw", 3 / (1 + 1e-6)), ("none", "raw", 3.0)],
)
def test_group_of_one(norm: str, single_member: str, wanted: float) -> None:
    found = gigpo([1, 2], [0, 0], [0, 1], [0, 0], [0, 1], norm=norm, single_member=single_member, weight=0.5)
    assert found.episode_advantage.tolist() == [wanted, wanted]
    assert found.step_advantage.tolist() == [0.0, 0.0]


def test_a_penalty_stays_with_its_own_record() -> None:
    # Episode 0 earns 4 in step 1, episode 1 nothing; step 1 of episode 1 was invalid. Episodes stand with step 0:
    # scores 4 and 0, mean 2, so the invalid record has 0 − 0.1 − 2; its step group {2, 3} holds 4 and −0.1.
    found = gigpo(
        [0, 4, 0, 0],
        [0, 0, 1, 1],
        [0, 1, 0, 1],
        [0] * 4,
        [0, 1, 0, 1],
        norm="none",
        weight=0.5,
        penalties=[0, 0, 0, 0.1],
    )
    assert found.episode_advantage.tolist() == pytest.approx([2, 2, -2, -2.1])
    assert found.step_advantage.tolist() == pytest.approx([1.9, 2.05, -1.9, -2.05])
    assert found.step_return.tolist() == pytest.approx([3.8, 4, 0, 0])


def test_zero_spread_with_a_penalty() -> None:
    # both episodes earn 1: with std the group is silent; without, the invalid record keeps its own −0.1
    options: dict[str, Any] = {"weight": 1.0, "penalties": [0, 0, 0, 0.1]}
    data = ([0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0] * 4, [0, 1, 0, 1])
    assert gigpo(*data, **options).advantage.tolist() == [0, 0, 0, 0]
    assert gigpo(*data, norm="none", **options).advantage.tolist() == pytest.approx([0, 0, 0, -0.1])


def test_no_records() -> None:
    assert step_returns([], [], [], 0.9).shape == (0,)
    assert [x.shape for x in gigpo([], [], [], [], [], weight=0.5)] == [(0,)] * 4


def test_lists_arrays_and_tensors_are_equal() -> None:
    lists = ([1.0, 2, 3], [5, 5, 10**12], [0, 1, 0], [1, 1, 1], [0, 1, 0])
    wanted = gigpo(*lists, weight=0.5)
    for convert in (np.array, torch.tensor):
        found = gigpo(*map(convert, lists), weight=0.5)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert gigpo(torch.tensor([1.0, 2, 3], requires_grad=True), *lists[1:], weight=0.5).advantage.requires_grad is False


def test_the_input_is_not_changed() -> None:
    rewards = np.array([1.0, 2.0, 4.0])
    gigpo(rewards, [0, 0, 1], [0, 1, 0], [0, 0, 0], [0, 1, 0], weight=0.5, penalties=np.array([0.1, 0, 0]))
    assert rewards.tolist() == [1.0, 2.0, 4.0]


def test_long_and_short_episodes_together() -> None:
    # a sum of 20,000 ones at γ = 1 is exact in float64
    n = 20_000
    episodes, steps = np.array([*[0] * n, 1]), np.array([*range(n), 0])
    found = step_returns(np.ones(n + 1), episodes, steps, 1.0)
    assert found[0] == n
    assert found[-1] == 1
