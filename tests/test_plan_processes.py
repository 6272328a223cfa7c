"""The command `plan` for several processes and for vLLM: what one process holds, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gigpo_lightning import __main__
from gigpo_lightning.cli_plan_split import Split, split_of
from gigpo_lightning.memory import storage_bytes
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.hollow import HollowPolicy
from gigpo_lightning.policy.hollow_shards import spread
from gigpo_lightning.sharding import own_part, shard
from tests.cli_world import enter
from tests.test_plan import SMALL, pretrained
from tests.tiny_lm import CHAT, save_tiny
from tests.toy_world import BoxTasks

GPU = ["--trainer.accelerator=auto", "--memory=8GiB", "--json=figures.json"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch)


def plan(*args: str) -> int:
    return __main__.main(["plan", *SMALL, *args])


def figures() -> dict[str, Any]:
    return dict(json.loads(Path("figures.json").read_text()))


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"devices": 4, "strategy": "ddp"}, Split(4)),
        ({"devices": "2", "strategy": "fsdp2", "num_nodes": 3}, Split(6, spread=True)),
        ({"devices": "0,2", "strategy": "auto"}, Split(2)),
        ({"devices": [1, 3, 5], "strategy": "ddp"}, Split(3)),
        ({"devices": "auto", "strategy": "auto"}, Split(1)),
        ({"devices": 2, "strategy": {"class_path": "gigpo_lightning.sharding.FullyShardedStrategy"}}, Split(2, True)),
    ],
)
def test_the_options_say_how_many_processes(options: dict[str, Any], expected: Split) -> None:
    assert split_of({"accelerator": "cpu", **options}, elsewhere=False) == expected
    assert Split(4).share(10) == 3  # 3, 3, 2, 2


@pytest.fixture
def four_processes() -> Iterator[None]:
    """A group of four of which only this one is there; what is sent to the others goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [None, LoRA(r=3)])
def test_the_part_of_one_process_is_what_fsdp2_gives_it(
    lora: LoRA | None, own_folder: Path, four_processes: None
) -> None:
    # Sizes that four do not divide: a vocabulary of 123, feed-forward 70, ranks of 3.
    folder = save_tiny(own_folder / "model", vocab_size=123, intermediate_size=70)
    policy = CausalLMPolicy(folder, "float32", lora, chat=CHAT)
    hollow = HollowPolicy(policy, BoxTasks())
    counted = spread(hollow.policy, 4)
    policy.prepare(BoxTasks())
    whole = storage_bytes(policy.parameters())
    shard(policy, init_device_mesh("cpu", (4,)))
    parts = [own_part(p.data) for p in policy.parameters()]
    assert counted.weights == sum(t.numel() * 4 for t in parts) + storage_bytes(policy.buffers())
    trained = [own_part(p.data) for p in policy.parameters() if p.requires_grad]
    assert counted.trained == sum(t.numel() * 4 for t in trained)
    assert counted.whole == whole
    # Adam: two moments of each part, and a counter of 4 bytes for each tensor.
    assert hollow.optimizer_bytes(torch.optim.AdamW, 4)[0] == 2 * counted.trained + 4 * len(trained)


def test_each_of_several_processes_is_planned(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--data.evaluation.tasks=4", "--data.evaluation.seeds=1"]
    model = [*pretrained(own_folder / "model"), *few]
    assert plan(*model, *GPU) == 0
    alone = figures()["memory"]
    capsys.readouterr()
    assert plan(*model, *GPU, "--trainer.devices=2", "--trainer.strategy=ddp") == 0
    shown, ddp = capsys.readouterr().out, figures()
    assert "Memory of each of 2 processes (ddp) on a GPU" in shown
    assert ddp["processes"] == 2
    # Nothing is spread; what is sent is copied once.
    assert ddp["memory"]["weights"] == alone["weights"]
    assert ddp["memory"]["exchange"] == alone["gradients"] == ddp["memory"]["held"] - alone["held"]
    # 4 episodes in all, 2 for each.
    assert ddp["memory"]["cache"] * 2 == alone["cache"]
    assert plan(*model, *GPU, "--trainer.devices=2", "--trainer.strategy=fsdp2") == 0
    shown, spread_out = capsys.readouterr().out, figures()["memory"]
    assert "Memory of each of 2 processes (fsdp2) on a GPU" in shown and "all weights, whole" in shown
    for part in ("weights", "gradients", "optimizer", "reference"):
        assert spread_out[part] == pytest.approx(alone[part] / 2, rel=0.01)
    assert spread_out["gathered_rollout"] == alone["gradients"]  # as many bytes as all weights, all trained
    assert spread_out["exchange"] == 0


def test_one_process_is_probed_with_its_share(own_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--trainer.max_time=null", "--trainer.max_epochs=3", "--iterations=1", "--json=figures.json"]
    assert plan(*options, "--trainer.devices=2", "--trainer.strategy=ddp") == 0
    shown = capfd.readouterr().out
    assert shown.count("Memory of each of 2 processes (ddp)") == 1  # no other process prints it again
    assert "An iteration of 2 episodes for each of 2 processes" in shown  # of 4
    assert "probe: 1 iteration of one process with its share, the exchange left out" in shown
    assert figures()["probe"]["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trainer.devices=3", "--trainer.strategy=ddp"], "data.groups=2 for 3 processes"),
        (["--trainer.devices=auto", "--trainer.strategy=fsdp2", "--memory=8GiB"], "give their number, such as"),
        (["--trainer.devices=2", "--trainer.strategy=ddp_spawn"], "trainer.strategy=ddp_spawn"),
        (["--trainer.precision=16-mixed"], "trainer.precision=16-mixed: choose"),
        (["--trainer.precision=64-true"], "trainer.precision=64-true: choose"),
        (["--data.engine=VLLM", "--memory=8GiB"], "VLLM samples from a CausalLMPolicy, not from ScratchPolicy"),
        (["--data.engine=VLLM", "--memory=8GiB", "--trainer.devices=2"], "VLLM cannot share a process"),
    ],
)
def test_what_fit_refuses_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        plan(*args)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_other_processes_are_not_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    with pytest.raises(SystemExit):
        plan()
    assert "start it without torchrun or srun" in capsys.readouterr().err


def test_quantized_weights_are_not_spread() -> None:
    from gigpo_lightning.cli_plan_split import check_spreadable

    with pytest.raises(ValueError, match=r"quantized weights \(4bit\) cannot be spread over processes"):
        check_spreadable(Split(2, spread=True), SimpleNamespace(quantization="4bit"))  # type: ignore[arg-type]
    check_spreadable(Split(2), SimpleNamespace(quantization="4bit"))  # type: ignore[arg-type]


# -- precision ---------------------------------------------------------------------------------------------------------


def test_precision_is_followed(own_folder: Path) -> None:
    model, memory = pretrained(own_folder / "model"), {}
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        assert plan(*model, *GPU, f"--trainer.precision={precision}") == 0
        memory[precision] = figures()["memory"]
    full, mixed, short = memory.values()
    assert mixed["held"] == full["held"]  # weights, gradients and moments stay float32
    assert short["weights"] * 2 == full["weights"]
    assert short["gradients"] * 2 == full["gradients"]
    assert mixed["cache"] * 2 == full["cache"] == short["cache"] * 2


# -- vLLM --------------------------------------------------------------------------------------------------------------


def test_vllm_takes_its_share_and_there_is_no_cache_of_our_own(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [*pretrained(own_folder / "model"), "--data.engine=VLLM", "--data.engine.gpu_memory_utilization=0.25"]
    assert plan(*model, *GPU) == 0
    shown, memory = capsys.readouterr().out, figures()["memory"]
    assert memory["cache"] == memory["rollout"] == 0
    assert memory["engine"]["share"] == 2 * 2**30  # a quarter of 8 GiB
    assert memory["total"] == memory["held"] + 2 * 2**30  # the update needs less
    assert "rollout: VLLM" in shown and "given back afterwards" in shown
    assert plan(*model, *GPU, "--data.engine.sleep=false") == 0
    awake = figures()["memory"]
    peak = max(awake["update"]["peak"], awake["step"])
    assert awake["total"] == awake["held"] + 2 * 2**30 + peak


def test_a_share_that_holds_no_conversation_does_not_fit(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = [*pretrained(own_folder / "model"), "--data.engine=VLLM", "--data.engine.gpu_memory_utilization=0.00001"]
    assert plan(*model, *GPU) == 1
    assert "for weights and one conversation; raise gpu_memory_utilization" in " ".join(capsys.readouterr().out.split())
