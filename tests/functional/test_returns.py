"""GAE, n-step returns and leave-one-out: hand-worked episodes of each kind of end, identities, a brute-force oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gigpo_lightning.functional.advantages import gigpo, step_returns
from gigpo_lightning.functional.records import CHUNK_RECORDS
from gigpo_lightning.functional.returns import gae, n_step, rloo

# One episode of three turns: r = 0, 0, 1; V = 0.5, 0.6, 0.8; γ = 0.5.
REWARDS, VALUES, STEPS = [0.0, 0.0, 1.0], [0.5, 0.6, 0.8], [0, 1, 2]


def random_batch(seed: int = 0, episodes: int = 40) -> dict[str, Any]:
    """Episodes of 1 to 9 turns, records shuffled, ids with gaps; what is read nowhere is far off."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 10, episodes)
    ids = np.repeat(random.permutation(episodes) * 7 - 50, lengths)
    steps = np.concatenate([np.arange(n) for n in lengths])
    total = len(ids)
    is_last = np.append(ids[1:] != ids[:-1], True)
    bootstrap = np.where(is_last, random.normal(size=total) * (random.random(total) < 0.5), 1e3)
    order = random.permutation(total)
    columns = {
        "rewards": random.normal(size=total),
        "values": random.normal(size=total),
        "bootstrap": bootstrap,
        "episode_ids": ids,
        "step_index": steps,
    }
    return {name: column[order] for name, column in columns.items()}


def oracle(batch: dict[str, Any], gamma: float, weights: Any) -> np.ndarray:
    """Σ_k weights(k) γ^k δ_{t+k}, record by record."""
    place = {(e, t): i for i, (e, t) in enumerate(zip(batch["episode_ids"], batch["step_index"], strict=True))}

    def error(e: int, t: int) -> float:
        i, after = place[e, t], place.get((e, t + 1))
        follow = batch["bootstrap"][i] if after is None else batch["values"][after]
        return float(batch["rewards"][i] + gamma * follow - batch["values"][i])

    found = np.zeros(len(place))
    for (e, t), i in place.items():
        k = 0
        while (e, t + k) in place:
            found[i] += weights(k) * gamma**k * error(e, t + k)
            k += 1
    return found


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bootstrap", "wanted"),
    [
        # The task ended: δ_2 = 1 − 0.8 = 0.2; δ_1 = 0.5 · 0.8 − 0.6 = −0.2; δ_0 = 0.5 · 0.6 − 0.5 = −0.2. With
        # γλ = 0.25: A_2 = 0.2; A_1 = −0.2 + 0.25 · 0.2 = −0.15; A_0 = −0.2 − 0.25 · 0.15 = −0.2375.
        (0.0, [-0.2375, -0.15, 0.2]),
        # Cut off in a state worth 0.4: δ_2 = 1 + 0.5 · 0.4 − 0.8 = 0.4; A_1 = −0.2 + 0.1; A_0 = −0.2 − 0.025.
        (0.4, [-0.225, -0.1, 0.4]),
    ],
)
def test_gae_by_hand(bootstrap: float, wanted: list[float]) -> None:
    found = gae(REWARDS, VALUES, [9.0, 9.0, bootstrap], [7] * 3, STEPS, gamma=0.5, gae_lambda=0.5)
    assert found.tolist() == pytest.approx(wanted)
    assert found.dtype == torch.float64


@pytest.mark.parametrize(
    ("bootstrap", "wanted"),
    [
        # n = 2: A_0 = 0.25 · 0.8 − 0.5 = −0.3; A_1 = 0.5 · 1 + 0.25 · 0 − 0.6 = −0.1; A_2 = 1 − 0.8 = 0.2
        (0.0, [-0.3, -0.1, 0.2]),
        # A_1 = 0.5 + 0.25 · 0.4 − 0.6 = 0; A_2 = 1 + 0.5 · 0.4 − 0.8 = 0.4
        (0.4, [-0.3, 0.0, 0.4]),
    ],
)
def test_n_step_by_hand(bootstrap: float, wanted: list[float]) -> None:
    found = n_step(REWARDS, VALUES, [9.0, 9.0, bootstrap], [7] * 3, STEPS, gamma=0.5, n_steps=2)
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)


def test_rloo_by_hand() -> None:
    """Returns 4, 1 (in two turns) and 1 in one group: 4 − 1, 1 − 5/2, 1 − 5/2; a group of one: 0."""
    found = rloo([4.0, 0.25, 0.75, 1.0, 9.0], [5, 6, 6, 7, 8], [0, 0, 1, 0, 0], [1, 1, 1, 1, 2])
    assert found.tolist() == [3.0, -1.5, -1.5, -1.5, 0.0]


def test_equal_returns_give_exactly_zero() -> None:
    """0.1 + 0.2 and 0.3 differ by round-off."""
    found = rloo([0.1, 0.2, 0.3, 0.3], [0, 0, 1, 2], [0, 1, 0, 0], [0] * 4)
    assert found.tolist() == [0.0] * 4


# -- identities --------------------------------------------------------------------------------------------------------


def test_without_values_and_discount_gae_is_the_return() -> None:
    batch = random_batch()
    nothing = np.zeros(len(batch["rewards"]))
    found = gae(**{**batch, "values": nothing, "bootstrap": nothing}, gamma=1.0, gae_lambda=1.0)
    wanted = step_returns(batch["rewards"], batch["episode_ids"], batch["step_index"], 1.0)
    torch.testing.assert_close(found, wanted)


def test_one_step_is_the_td_error_and_endless_steps_are_gae_at_one() -> None:
    batch = random_batch()
    for gamma in (0.0, 0.7, 1.0):
        one, endless = (n_step(**batch, gamma=gamma, n_steps=n) for n in (1, 9))
        torch.testing.assert_close(one, gae(**batch, gamma=gamma, gae_lambda=0.0))
        torch.testing.assert_close(endless, gae(**batch, gamma=gamma, gae_lambda=1.0))
    assert not torch.allclose(one, endless)


def test_rloo_is_a_multiple_of_grpo_without_std() -> None:
    """N / (N − 1) in groups of N = 2, 5 and 3."""
    random = np.random.default_rng(1)
    lengths = random.integers(1, 5, 10)
    ids = np.repeat(np.arange(10), lengths)
    steps = np.concatenate([np.arange(n) for n in lengths])
    groups = np.repeat([0, 1, 2], [2, 5, 3])[ids]
    rewards, order = random.normal(size=len(ids)), random.permutation(len(ids))
    records = [column[order] for column in (rewards, ids, steps, groups)]
    grpo = gigpo(*records, np.arange(len(ids)), norm="none", weight=1.0).advantage
    factor = torch.tensor([2 / 1, 5 / 4, 3 / 2], dtype=torch.float64)[torch.from_numpy(records[3])]
    torch.testing.assert_close(rloo(*records), factor * grpo)


# -- any batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_the_sum_record_by_record(seed: int) -> None:
    batch = random_batch(seed)
    found = gae(**batch, gamma=0.9, gae_lambda=0.6)
    np.testing.assert_allclose(found, oracle(batch, 0.9, lambda k: 0.6**k), rtol=1e-10, atol=1e-12)
    found = n_step(**batch, gamma=0.9, n_steps=3)
    np.testing.assert_allclose(found, oracle(batch, 0.9, lambda k: k < 3), rtol=1e-10, atol=1e-12)


def test_chunks_change_nothing() -> None:
    """More records than a chunk holds: the episodes of a short batch, many times."""
    batch = random_batch()
    times = CHUNK_RECORDS // len(batch["rewards"]) + 2
    many = {name: np.tile(column, times) for name, column in batch.items()}
    many["episode_ids"] = many["episode_ids"] + np.repeat(np.arange(times) * 1000, len(batch["rewards"]))
    options: list[tuple[Any, dict[str, Any]]] = [(gae, {"gae_lambda": 0.6}), (n_step, {"n_steps": 3})]
    for function, option in options:
        torch.testing.assert_close(function(**many, **option), function(**batch, **option).repeat(times))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.1}, r"gamma: 1.1 is outside \[0, 1\]"),
        ({"gae_lambda": -0.1}, r"gae_lambda: -0.1 is outside \[0, 1\]"),
        ({"rewards": [0.0, None, 1.0]}, "rewards: "),
        ({"values": [0.0, float("nan"), 1.0]}, "values: nan at record 1"),
        ({"values": [0.0]}, r"values: shape \(1,\)"),
        ({"bootstrap": [0.0, 0.0, float("inf")]}, "bootstrap: inf at record 2"),
        ({"step_index": [0, 1, 3]}, "a step is missing"),
        ({"step_index": [0, 1, 1]}, "the same episode and step"),
    ],
)
def test_a_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    batch: dict[str, Any] = {
        "rewards": REWARDS,
        "values": VALUES,
        "bootstrap": [0.0] * 3,
        "episode_ids": [0] * 3,
        "step_index": STEPS,
    }
    with pytest.raises(ValueError, match=message):
        gae(**{**batch, **change})


def test_a_bad_number_of_steps_or_group_is_named() -> None:
    with pytest.raises(ValueError, match="n_steps: 0 is less than 1"):
        n_step(REWARDS, VALUES, [0.0] * 3, [0] * 3, STEPS, n_steps=0)
    with pytest.raises(ValueError, match="one episode lies in two task groups"):
        rloo([1.0, 1.0], [0, 0], [0, 1], [0, 1])


def test_nothing_gives_nothing() -> None:
    nothing: Any = np.zeros(0)
    whole: Any = np.zeros(0, np.int64)
    assert gae(nothing, nothing, nothing, whole, whole).shape == (0,)
    assert n_step(nothing, nothing, nothing, whole, whole).shape == (0,)
    assert rloo(nothing, whole, whole, whole).shape == (0,)


def test_more_steps_than_an_episode_has_are_all_of_them() -> None:
    """However large: no integer overflows."""
    rewards, values, ends = [1.0, 0.0, 2.0], [0.5, 0.25, 1.0], [9.0, 9.0, 4.0]
    whole = n_step(rewards, values, ends, [0, 0, 0], [0, 1, 2], n_steps=3)
    for n in (4, 2**63 - 1, 10**30):
        torch.testing.assert_close(n_step(rewards, values, ends, [0, 0, 0], [0, 1, 2], n_steps=n), whole)
