"""Runs with a critic: what is refused, checkpoints and resumed runs, every estimator from the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gigpo_lightning.__main__ import main
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.lambda_decay import LambdaDecay
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.resources import find_file
from gigpo_lightning.rollout.collection import CreditRule
from tests.test_critic import change, ppo
from tests.test_resume import assert_equal
from tests.tiny_lm import CHAT, save_tiny
from tests.toy_run import fit, make_data, make_module, make_trainer, weights

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
