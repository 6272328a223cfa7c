"""All golden cases of the public reference implementation (see tests/golden/README.md)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gigpo_lightning.functional.advantages import GigpoCredit, gigpo, normalise_in_groups, step_returns
from gigpo_lightning.functional.anchors import group_exact, group_similar
from tests.functional.golden import Case, column, load_cases, numbered

CASES = load_cases()
ORIGINALS = [case for case in CASES if not any(r.get("copy_of") is not None for r in case["records"])]
WITH_COPIES = [case for case in CASES if case not in ORIGINALS]
WITH_TOKENS = [case for case in CASES if "out_token_adv" in case]

# The reference computes in float32; golden/README.md states 3e-6 as its distance from exact arithmetic.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def by_name(case: Case) -> str:
    return str(case["name"])


def norm_of(case: Case) -> str:
    return {"mean_norm": "none", "mean_std_norm": "std"}[case["params"]["mode"]]


def penalties_of(case: Case) -> Tensor:
    penalty = case["params"]["invalid_action_penalty"] or 0.0
    return torch.tensor([penalty * (not r.get("valid", True)) for r in case["records"]], dtype=torch.float64)


def step_groups_of(case: Case) -> Tensor:
    anchors = [record["anchor"] for record in case["records"]]
    if case["params"]["similarity"]:
        threshold = case["params"]["similarity_thresh"]
        return group_similar(anchors, numbered(case, "group"), threshold, method="reference")
    return group_exact(anchors, numbered(case, "group"))


def credit(case: Case, statistics: str) -> GigpoCredit:
    return gigpo(
        column(case, "reward"),
        numbered(case, "group", "traj"),
        column(case, "step").long(),
        numbered(case, "group"),
        step_groups_of(case),
        gamma=case["params"]["gamma"],
        norm=norm_of(case),
        statistics=statistics,
        combine="additive",
        weight=case["params"]["step_advantage_w"],
        penalties=penalties_of(case),
        single_member="raw",
        eps=case["params"]["epsilon"],
    )


def expected(case: Case, field: str, flag: str) -> Tensor:
    """The reference's column, with 0 where it holds round-off divided by epsilon."""
    return torch.where(column(case, flag).bool(), 0.0, column(case, field))


@pytest.mark.parametrize("case", ORIGINALS, ids=by_name)
def test_step_returns(case: Case) -> None:
    found = step_returns(
        column(case, "reward"), numbered(case, "group", "traj"), column(case, "step").long(), case["params"]["gamma"]
    )
    torch.testing.assert_close(found, column(case, "out_step_return"), **TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_step_groups(case: Case) -> None:
    # both number the groups by first appearance, so the labels themselves agree
    assert step_groups_of(case).tolist() == column(case, "out_step_group").long().tolist()
    assert len(step_groups_of(case).unique()) == case["n_step_groups"]


@pytest.mark.parametrize("case", ORIGINALS, ids=by_name)
def test_step_statistics(case: Case) -> None:
    found = credit(case, "step")
    a_e = expected(case, "out_episode_adv", "zero_spread_episode")
    a_s = expected(case, "out_step_adv", "zero_spread_step")
    torch.testing.assert_close(found.episode_advantage, a_e, **TOLERANCE)
    torch.testing.assert_close(found.step_advantage, a_s, **TOLERANCE)
    # where nothing is round-off, a_e + ω a_s is the reference's own out_adv
    torch.testing.assert_close(found.advantage, a_e + case["params"]["step_advantage_w"] * a_s, **TOLERANCE)
    sound = ~(column(case, "zero_spread_episode").bool() | column(case, "zero_spread_step").bool())
    torch.testing.assert_close(found.advantage[sound], column(case, "out_adv")[sound], **TOLERANCE)


@pytest.mark.parametrize("case", ORIGINALS, ids=by_name)
def test_trajectory_statistics(case: Case) -> None:
    found = credit(case, "trajectory").episode_advantage
    flat = episodes_without_spread(case)
    torch.testing.assert_close(found[~flat], column(case, "out_episode_adv_traj")[~flat], **TOLERANCE)
    assert (found[flat] == 0).all()


def episodes_without_spread(case: Case) -> Tensor:
    """Records of groups of several episodes with equal scores, where the reference's column holds round-off.

    The flag of the file looks at all records: it is also set for a group of one episode, which has its raw score, and
    not set where only a later step's penalty makes a difference.
    """
    scores: dict[str, dict[str, float]] = {}
    for record in case["records"]:  # an episode stands in the statistics with its first record
        scores.setdefault(record["group"], {}).setdefault(record["traj"], record["out_episode_score"])
    flat = {
        group: norm_of(case) == "std" and len(s) > 1 and max(s.values()) - min(s.values()) < 1e-5
        for group, s in scores.items()
    }
    return torch.tensor([flat[record["group"]] for record in case["records"]])


@pytest.mark.parametrize("case", ORIGINALS, ids=by_name)
def test_zero_spread_is_exactly_zero(case: Case) -> None:
    found = credit(case, "step")
    assert (found.episode_advantage[column(case, "zero_spread_episode").bool()] == 0).all()
    assert (found.step_advantage[column(case, "zero_spread_step").bool()] == 0).all()


@pytest.mark.parametrize("case", ORIGINALS, ids=by_name)
def test_a_group_of_one_is_zero_by_default(case: Case) -> None:
    found = gigpo(
        column(case, "reward"),
        numbered(case, "group", "traj"),
        column(case, "step").long(),
        numbered(case, "group"),
        step_groups_of(case),
        weight=1.0,
    )
    lonely = [r["group"] for r in case["records"] if r["step"] == 0]
    alone = torch.tensor([lonely.count(r["group"]) == 1 for r in case["records"]])
    assert (found.episode_advantage[alone] == 0).all()


@pytest.mark.parametrize("case", WITH_COPIES, ids=by_name)
def test_duplicated_records(case: Case) -> None:
    """The reference pads by copies after the returns; `gigpo` refuses them, its normalisation gives the same values."""
    with pytest.raises(ValueError, match="step_index"):
        credit(case, "step")
    penalties = penalties_of(case)
    a_e = normalise_in_groups(
        column(case, "episode_return") - penalties, numbered(case, "group"), norm=norm_of(case), single_member="raw"
    )
    a_s = normalise_in_groups(column(case, "out_step_return") - penalties, step_groups_of(case), norm=norm_of(case))
    torch.testing.assert_close(a_e, expected(case, "out_episode_adv", "zero_spread_episode"), **TOLERANCE)
    torch.testing.assert_close(a_s, expected(case, "out_step_adv", "zero_spread_step"), **TOLERANCE)


@pytest.mark.parametrize("case", WITH_TOKENS, ids=by_name)
def test_token_broadcast(case: Case) -> None:
    """A turn's advantage goes to that turn's own tokens."""
    mask = torch.tensor(case["response_mask"], dtype=torch.bool)
    found = torch.where(mask, credit(case, "step").advantage.unsqueeze(-1), 0.0)
    wanted = torch.tensor(case["out_token_adv"], dtype=torch.float64)
    sound = ~(column(case, "zero_spread_episode").bool() | column(case, "zero_spread_step").bool())
    torch.testing.assert_close(found[sound], wanted[sound], **TOLERANCE)
    assert mask.sum(-1).tolist() == [record["resp_tokens"] for record in case["records"]]


@pytest.mark.skipif("GIGPO_GOLDEN" in os.environ, reason="another folder of cases was named")
def test_no_case_is_left_out() -> None:
    index = json.loads((Path(__file__).parents[1] / "golden" / "gigpo" / "index.json").read_text(encoding="utf-8"))
    assert [case["name"] for case in CASES] == sorted(entry["name"] for entry in index)
    assert len(CASES) == 42
    assert len(WITH_COPIES) == 1
    assert len(WITH_TOKENS) == 1
