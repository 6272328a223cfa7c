"""Fits with vLLM: what is corrected in them, and what is refused before they begin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from gigpo_lightning.batch import MicroBatch, Minibatch
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.vllm import VLLM
from gigpo_lightning.rollout.context import SegmentRule
from tests import fake_vllm
from tests.test_vllm_faults import Fake, engine_of
from tests.tiny_lm import CHAT, made, save_tiny
from tests.toy_run import fit, make_policy, rollouts, sgd, weights


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_vllm.install(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


# -- correction --------------------------------------------------------------------------------------------------------


def trained(
    root: Path, source: str, epochs: int = 1, lora: LoRA | None = None, precision: str = "32-true", **data: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """Updates of plain descent from the same start; the change of the weights, and the figures of the run."""
    policy = CausalLMPolicy(source, chat=CHAT, lora=lora)
    options = {"minibatches": 1, "engine": VLLM(), "segments": SegmentRule(max_tokens=200), **data}
    model = {"policy": policy, "optimizer": sgd, "gradient_clip": None}
    trainer, module, datamodule = fit(root, epochs=epochs, data=options, model=model, precision=precision)
    start = CausalLMPolicy(source, chat=CHAT, lora=lora)
    start.prepare()
    before = torch.nn.utils.parameters_to_vector(start.parameters()).detach()
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module) - before, {**figures, **datamodule.report.metrics}


def test_a_fit_with_it_is_a_fit(tmp_path: Path, source: str, fake: Fake) -> None:
    step, figures = trained(tmp_path, source)
    assert float(step.abs().max()) > 1e-3
    assert figures["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert abs(figures["mismatch/kl_k1"]) < 1e-5 and figures["mismatch/truncated_frac"] == 0.0
    assert figures["mismatch/probe"] < 1e-4 and figures["time/rescore_s"] > 0
    assert figures["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert fake[1][0].calls[-1] == "shutdown"


def test_dropout_has_no_part_in_the_rating(tmp_path: Path, source: str, fake: Fake) -> None:
    """Lightning collects in training mode; in the second iteration the adapter matters."""
    step, figures = trained(tmp_path, source, epochs=2, lora=LoRA(r=4, alpha=32.0, dropout=0.5))
    assert float(step.abs().max()) > 1e-3
    assert figures["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("precision", "probe"), [("bf16-mixed", 1e-4), ("bf16-true", 0.1)])
def test_the_rating_is_in_the_precision_of_the_update(
    tmp_path: Path, source: str, fake: Fake, precision: str, probe: float
) -> None:
    """Else the ratio of the first update would hold what bfloat16 rounds."""
    _, figures = trained(tmp_path, source, precision=precision)
    assert figures["loss/mismatch"] < 1e-6
    # Weights are compared in their own type: autocast has no part in it.
    assert figures["mismatch/probe"] < probe
    assert figures["mismatch/kl_k3"] > 1e-7  # in the update's type policy and sampler differ by the rounding


@pytest.mark.parametrize(
    ("shift", "weight", "figures"),
    [
        # d = −0.5 for every token: k1 = 0.5, k3 = e^−0.5 + 0.5 − 1
        (0.5, 0.606531, {"kl_k1": 0.5, "kl_k3": 0.106531, "ratio_max": 0.606531, "truncated_frac": 0.0}),
        # d = 2: the ratio e² = 7.389 is cut to the cap
        (-2.0, 2.0, {"kl_k1": -2.0, "kl_k3": 4.389056, "ratio_max": 7.389056, "truncated_frac": 1.0}),
    ],
)
def test_a_mismatch_is_logged_and_weighs_the_update(
    tmp_path: Path, source: str, fake: Fake, shift: float, weight: float, figures: dict[str, float]
) -> None:
    """The same episodes with other log-probs: the ratio of the update still starts at 1, its gradient is scaled."""
    plain, _ = trained(tmp_path / "plain", source)
    fake[0].shift = shift
    # Micro-batches of one to three rows, whose order is not that of the file.
    shifted, found = trained(tmp_path / "shifted", source, max_tokens_per_batch=120)
    for name, value in figures.items():
        assert found[f"mismatch/{name}"] == pytest.approx(value, abs=1e-4)
    assert found["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert float((shifted - weight * plain).abs().max()) < 1e-3 * float(plain.abs().max())
    said = [[row["logprobs"] for row in rollouts(tmp_path / name)[0]] for name in ("plain", "shifted")]
    moved = [b - a for first, second in zip(*said, strict=True) for a, b in zip(first, second, strict=True) if a or b]
    assert moved == pytest.approx([shift] * len(moved), abs=1e-4)  # the file keeps what the sampler said


class Seen(pl.Callback):
    """Keeps the micro-batches of a fit."""

    def __init__(self, batches: list[MicroBatch]) -> None:
        self.batches = batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Minibatch, batch_idx: int) -> None:
        self.batches += batch.micro_batches


def test_the_native_engine_needs_no_correction(tmp_path: Path, source: str) -> None:
    batches: list[MicroBatch] = []
    policy = CausalLMPolicy(source, chat=CHAT)
    _, _, datamodule = fit(tmp_path, model={"policy": policy}, callbacks=[Seen(batches)])
    assert batches and all(micro.importance is None for micro in batches)
    assert not [name for name in datamodule.report.metrics if name.startswith("mismatch/")]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance_cap": 0.5}, r"importance_cap=0\.5: must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1\.5: must lie in \(0, 1\)"),
        ({"sync_tolerance": 0.0}, r"sync_tolerance=0\.0: must be positive, or null"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLM(**options)


@pytest.mark.parametrize(
    ("args", "message"),
    [({"dtype": "half"}, "data.engine.args has dtype: set"), ({"no_such": 1}, "data.engine.args: .*no_such")],
)
def test_bad_args_are_refused(source: str, fake: Fake, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(made(source), args=args).begin(1, 1.0)


def test_more_tokens_than_positions_are_refused(source: str, fake: Fake) -> None:
    with pytest.raises(ValueError, match="512 positions, but segments may grow to 600 tokens"):
        VLLM().make(made(source), 600, 5).begin(1, 1.0)


def test_ranks_without_kernels_are_refused_and_others_rounded_up(source: str, fake: Fake) -> None:
    engine_of(made(source, lora=LoRA(r=9))).begin(1, 1.0)
    assert fake[1][0].args.max_lora_rank == 16
    policy = made(source, lora=LoRA(r=9), moved=False)
    policy.lora = LoRA(r=513)  # the policy itself would refuse it: its layers are smaller
    with pytest.raises(ValueError, match=r"policy\.lora\.r=513: vLLM has kernels up to 512"):
        engine_of(policy).begin(1, 1.0)


def test_a_missing_package_ends_a_fit_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    policy = CausalLMPolicy("never/loaded")
    with pytest.raises(ValueError, match=r"needs vllm, which is not installed: pip install '\.\[vllm\]'"):
        fit(tmp_path, data={"engine": VLLM()}, model={"policy": policy})


def test_policies_that_it_cannot_sample_from_are_refused(fake: Fake) -> None:
    with pytest.raises(ValueError, match="not from ScratchPolicy"):
        VLLM().check(make_policy())
    with pytest.raises(ValueError, match=r"policy\.quantization='4bit' would sample from other weights"):
        VLLM().check(CausalLMPolicy("any", lora=LoRA(), quantization="4bit"))


def test_a_strategy_of_several_processes_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"set trainer\.devices to 1"):
        VLLM().check(CausalLMPolicy("any"))
