"""Whole runs of policies that reason before they act: what is logged, charged and shown of their answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.rollout.collection import CreditRule
from tests.tiny_lm import CHAT, save_tiny
from tests.toy_run import fit, rollouts


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def run(source: str, root: Path, **data: Any) -> tuple[Any, Any, list[dict[str, Any]]]:
    chat = replace(CHAT, format="think", first=f"{CHAT.first}\n{{admissible}}", turn="{observation}\n{admissible}")
    policy = CausalLMPolicy(source, lora=LoRA(r=4), chat=chat)
    settings = {"max_action_tokens": 16, "transcripts": 2, **data}
    trainer, module, datamodule = fit(
        root, data=settings, model={"policy": policy, "kl_coef": 0.1}, limit_val_batches=1
    )
    assert trainer.callback_metrics["loss/skipped_updates"] == 0
    assert trainer.callback_metrics["val/all/well_formed"] == pytest.approx(module.results[0]["well_formed"])
    return module, datamodule.report, rollouts(root)[0]


def shares(rows: list[dict[str, Any]], name: str) -> float:
    judged = [x for row in rows for x in row[name]]
    return sum(judged) / len(judged)


def test_half_constrained(source: str, tmp_path: Path) -> None:
    module, report, rows = run(source, tmp_path)
    assert shares(rows, "admissible") == shares(rows, "valid") == 1
    assert 0.5 < shares(rows, "well_formed") < 1
    assert report.metrics["rollout/ill_formed_answers"] == pytest.approx(1 - shares(rows, "well_formed"))
    assert report.metrics["rollout/inadmissible_actions"] == 0
    assert 0.5 < module.results[0]["well_formed"] <= 1
    assert report.transcripts[0].count("     : <think>") == report.transcripts[0].count(" > ") >= 1


def test_free_answers_of_a_random_model_are_ill_formed_and_cost(source: str, tmp_path: Path) -> None:
    _, report, rows = run(source, tmp_path / "free", constrain=False)
    assert shares(rows, "well_formed") == shares(rows, "admissible") == 0
    figures = report.metrics
    assert figures["rollout/ill_formed_answers"] == figures["rollout/inadmissible_actions"] == 1
    credit = CreditRule(invalid_penalty=0.0, format_penalty=0.5, penalty_in_returns=True)
    _, _, charged = run(source, tmp_path / "charged", constrain=False, credit=credit)
    last = [row["step_return"][-1] for row in charged if row["segment"] == 0]
    assert last == [-0.5] * len(last)
