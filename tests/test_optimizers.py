"""Optimisers of bitsandbytes by name: they step on the CPU, their state survives a resume, a lack is said at once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.placement import check_optimizer
from tests.test_resume import assert_equal
from tests.toy_run import fit, make_policy, weights

NAMES = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit")


def sgd_of_nothing(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def make(name: str) -> Any:
    return lambda parameters: getattr(bitsandbytes.optim, name)(parameters, lr=3e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_with_the_state_in_8_bits(tmp_path: Path, name: str) -> None:
    # 64 wide: two matrices have more than the 4,096 weights below which bitsandbytes keeps 32 bits.
    def run(folder: str, epochs: int, path: str | None = None) -> torch.Tensor:
        model = {"policy": make_policy(64), "optimizer": make(name)}
        return weights(fit(tmp_path / folder, epochs, [IterationCheckpoint()], None, model, path)[1])

    whole = run("whole", 3)
    run("cut", 2)
    assert run("cut", 3, str(tmp_path / "cut/checkpoints/last.ckpt")).equal(whole)
    last = [torch.load(tmp_path / f / "checkpoints/last.ckpt", weights_only=True) for f in ("whole", "cut")]
    states = [checkpoint["optimizer_states"] for checkpoint in last]
    assert_equal(*states, "optimizer")
    entries = [entry["__bnb_optimizer_quant_state__"] for entry in states[0][0]["state"].values()]
    assert any(entry["state1"].dtype == torch.uint8 for entry in entries)


def test_one_step_in_8_bits_is_near_that_of_adam(tmp_path: Path) -> None:
    """Adam's first step is lr · g / (|g| + ε), at most lr, whatever the state's bits; rounding shows for small g."""
    start = weights(fit(tmp_path, model={"policy": make_policy(64), "optimizer": sgd_of_nothing})[1])
    steps = []
    for optimizer in (make("AdamW8bit"), lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)):
        model = {"policy": make_policy(64), "optimizer": optimizer}
        steps.append(weights(fit(tmp_path, data={"passes": 1, "minibatches": 1}, model=model)[1]) - start)
    assert float(steps[1].abs().max()) == pytest.approx(3e-3, rel=0.02)
    torch.testing.assert_close(steps[0], steps[1], rtol=0, atol=3e-4)
    assert not steps[0].equal(steps[1])


def test_an_optimizer_that_does_not_run_here_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose library is missing, the first step would tell, after minutes of collection."""
    optimizer = make("AdamW8bit")([torch.nn.Parameter(torch.zeros(3))])

    def lacking(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("\nCUDA library is not there\nand much more")

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", lacking)
    message = r"model\.optimizer: AdamW8bit of bitsandbytes does not run on cpu .*\(RuntimeError: CUDA library is not"
    with pytest.raises(ValueError, match=message):
        check_optimizer(optimizer, make("AdamW8bit"), torch.device("cpu"))
    check_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0), lacking, torch.device("cpu"))  # type: ignore[arg-type]


def test_a_resumed_run_keeps_its_optimizer_and_says_which_options_do_not_count(tmp_path: Path) -> None:
    def adamw(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)

    fit(tmp_path, 1, [IterationCheckpoint()], model={"optimizer": adamw})
    path = str(tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(
        ValueError, match=r"model\.optimizer=torch\.optim\.sgd\.SGD: .* trained with .*AdamW.*resume with"
    ):
        fit(tmp_path, 2, model={"optimizer": sgd_of_nothing}, ckpt_path=path)
    with pytest.warns(UserWarning, match=r"optimizer: lr=0\.5 does not count.*its checkpoint has \(lr=0\.01\)"):
        trainer, _, _ = fit(tmp_path, 2, model={"optimizer": lambda p: adamw(p, 0.5)}, ckpt_path=path)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="model.optimizer")
        fit(tmp_path, 2, model={"optimizer": adamw}, ckpt_path=path)
