"""Options that the parser or Lightning lets pass, refused with their names before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gigpo_lightning import __main__
from gigpo_lightning.cli_checks import check_nulls, check_options, check_parts
from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.module import GiGPOModule
from tests.cli_world import enter
from tests.toy_run import make_data, make_module

POLICY = "model: {policy: {class_path: CausalLMPolicy, init_args: {model: x, %s}}}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data: {groups: null}", "data.groups=null: needs a value"),
        ("data: {segments: null}", "data.segments=null: needs a value; leave it out for the default"),
        ("data: {segments: []}", "data.segments=[]: needs named options"),
        ("data: {segments: {max_tokens: null}}", "data.segments.max_tokens=null: needs a value"),
        (POLICY % "chat: null", "model.policy.chat=null: needs a value"),
        (POLICY % "chat: {system: null}", "model.policy.chat.system=null: needs a value"),
        (POLICY % "lora: {r: null}", "model.policy.lora.r=null: needs a value"),
        (POLICY % "lora: {targets: q_proj}", "targets: expected a list, got q_proj"),
        ("model: {optimizer: {init_args: {lr: null}}}", "model.optimizer.lr=null: needs a value"),
        ("model: {optimizer: {init_args: {lr: -1.0}}}", "model.optimizer: Invalid learning rate: -1.0"),
        ("model: {optimizer: torch.optim.Adamw}", "model.optimizer: cannot be used: module 'torch.optim' has no"),
        ("data: {engine: VLMM}", "data.engine: unknown class VLMM; did you mean VLLM?"),
    ],
)
def test_values_of_no_use(
    content: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    enter(tmp_path, monkeypatch)
    Path("bad.yaml").write_text(content)
    with pytest.raises(SystemExit) as end:
        __main__.main(["fit", "--config", "alfworld.yaml", "--config", "bad.yaml"])
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert shown.count("error: ") == 1
    assert f"error: {message}" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_null_is_a_value_where_it_is_offered() -> None:
    lora = {"r": 4, "alpha": 8.0, "targets": ["all-linear"]}
    policy: dict[str, Any] = {"model": "x", "lora": None, "revision": None, "chat": {"template": None, "options": None}}
    path = "gigpo_lightning.policy.causal_lm.CausalLMPolicy"
    for given in (policy, {**policy, "lora": lora}):
        options = {"policy": {"class_path": path, "init_args": given}, "lr_scheduler": None, "dual_clip": None}
        check_nulls(GiGPOModule, options, "model")
    check_nulls(RolloutDataModule, {"lam": None, "engine": None, "segments": {"turns": None}}, "data")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "16-mixed"}, r"trainer\.precision=16-mixed: choose 32-true, bf16-mixed"),
        ({"precision": 16}, r"trainer\.precision=16: "),
        ({"strategy": "deepspeed_stage_2"}, r"trainer\.strategy=deepspeed_stage_2: is not supported, .* choose fsdp2"),
        ({"strategy": "fsdp"}, r"trainer\.strategy=fsdp: .* choose fsdp2"),
    ],
)
def test_ways_to_train_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(options, [])
    check_options({"precision": "bf16-mixed", "strategy": "fsdp2"}, [])


@pytest.mark.parametrize(("ratio", "passes", "warned"), [("none", 2, 1), ("none", 1, 0), ("token", 2, 0)])
def test_several_passes_without_a_ratio_are_warned_of(
    ratio: str, passes: int, warned: int, recwarn: pytest.WarningsRecorder
) -> None:
    check_parts(make_module(ratio=ratio), make_data(passes=passes), [])
    assert sum(f"model.ratio=none with data.passes={passes}" in str(seen.message) for seen in recwarn) == warned
