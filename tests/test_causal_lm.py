"""Pretrained policies: what is sampled is what is trained on, with adapters, constraints and rounded weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

from gigpo_lightning.__main__ import main
from gigpo_lightning.batch import MicroBatch, pack
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.cli_export import load_policy
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.demonstrations import pack_row
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.trajectory import Episode
from tests.tiny_lm import CHAT, made, move, save_tiny
from tests.toy_run import fit
from tests.toy_world import BoxTasks

TASKS = BoxTasks(3)
TEMPERATURE = 1.3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def play(policy: CausalLMPolicy, constrain: bool = True, turns: int | None = None, n: int = 16) -> list[Episode]:
    rule = SegmentRule(turns=turns, max_tokens=200)
    collector = Collector(policy, InProcessPool(TASKS.make_env), rule, rows=5, constrain=constrain, max_action_tokens=8)
    jobs = [EpisodeJob(TASKS.get("train", i // 2), 5, (i,)) for i in range(n)]
    return [episode for _, episode in sorted(collector.run(jobs, TEMPERATURE))]


def batch_of(episodes: list[Episode]) -> MicroBatch:
    """All segments in which something was chosen, in one micro-batch, its rows of unequal length."""
    return pack([pack_row(s, 1.0) for e in episodes for s in e.segments if any(s.response_mask)])


def difference(policy: CausalLMPolicy, batch: MicroBatch) -> float:
    """The largest difference between the update's log-probs and those that were recorded in sampling."""
    with torch.no_grad():
        logprobs, _ = policy.chosen_logprobs(batch, TEMPERATURE)
    assert len(logprobs) > 30 and float(batch.old_logprobs.std()) > 0.3  # choices that are far from uniform
    return float((logprobs - batch.old_logprobs).abs().max())


# -- token in, token out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [LoRA(r=4, alpha=8.0), None])
@pytest.mark.parametrize("constrain", [True, False])
@pytest.mark.parametrize("turns", [1, 2, None])
def test_the_updates_logprobs_are_the_samplers(source: str, turns: int | None, constrain: bool, lora: Any) -> None:
    policy = made(source, lora=lora)
    episodes = play(policy, constrain, turns)
    assert difference(policy, batch_of(episodes)) < 1e-5
    if lora is not None:  # the adapter matters: with another one the same tokens are rated otherwise
        move(policy, seed=1)
        assert difference(policy, batch_of(episodes)) > 0.01


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, MistralConfig])
def test_so_they_are_in_other_families(tmp_path: Path, kind: Any) -> None:
    """Biases, norms of queries and keys, heads of another width than hidden / heads."""
    sizes = {"head_dim": 32} if kind is not Qwen2Config else {}
    policy = made(save_tiny(tmp_path, kind=kind, **sizes))
    assert policy.model.config.model_type == kind.model_type
    assert difference(policy, batch_of(play(policy, n=16))) < 1e-5


def test_they_are_those_of_a_plain_forward_pass_of_peft(source: str) -> None:
    """An oracle that shares no code with the policy: one segment, the whole vocabulary, attention of transformers."""
    policy = made(source)
    batch = batch_of(play(policy, constrain=False, n=1))
    ids, chosen = batch.token_ids[: batch.lengths[0]], batch.chosen[batch.chosen < batch.lengths[0]]
    policy.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = policy._wrapped[0](input_ids=ids[None]).logits[0] / TEMPERATURE
    expected = logits.log_softmax(-1)[chosen - 1, ids[chosen]]
    torch.testing.assert_close(batch.old_logprobs[: len(chosen)], expected, atol=1e-5, rtol=0)


def test_bfloat16_weights_give_float32_logprobs(source: str) -> None:
    policy = made(source, dtype="bfloat16")
    assert policy.model.dtype == torch.bfloat16
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    batch = batch_of(play(policy))
    assert policy.chosen_logprobs(batch, TEMPERATURE)[0].dtype == torch.float32
    # Hidden states are rounded to 8 bits, in sums of another order; the logits of this model spread over ±5.
    assert difference(policy, batch) < 0.2


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
# In 8 bit the inputs are rounded, too: a last-bit difference can move one of them by a whole step of 1/127.
@pytest.mark.parametrize(("quantization", "tolerance"), [("4bit", 1e-5), ("8bit", 0.2)])
def test_rounded_weights_sample_and_train(source: str, quantization: str, tolerance: float) -> None:
    policy = made(source, quantization=quantization, dtype="float32")
    batch = batch_of(play(policy))
    assert difference(policy, batch) < tolerance
    policy.chosen_logprobs(batch, TEMPERATURE)[0].sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name
    assert sum(float(p.grad.abs().sum()) for p in policy.parameters() if p.grad is not None) > 0
    # The rounding itself shows: with the adapter off it is not the model of the file.
    assert difference(made(source, dtype="float32"), batch) > 0.01


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_gradients_through_4bit_weights_are_those_through_what_they_stand_for(source: str) -> None:
    """The oracle: a full-precision policy with the rounded weights written out."""
    from bitsandbytes.functional import dequantize_4bit

    policy, oracle = made(source, quantization="4bit", dtype="float32"), made(source, dtype="float32")
    written = dict(oracle.named_parameters())
    for name, parameter in policy.named_parameters():
        if hasattr(parameter, "quant_state"):
            written[name].data = dequantize_4bit(parameter.data, parameter.quant_state)
    gradients = []
    batch = batch_of(play(policy))  # evaluation first, as in every iteration
    for each in (policy.train(), oracle.train()):
        each.chosen_logprobs(batch, TEMPERATURE)[0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_changes_no_gradient(source: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = made(source, gradient_checkpointing=checkpointing)
        batch = batch_of(play(policy))
        policy.train()
        policy.chosen_logprobs(batch, TEMPERATURE)[0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)


# -- reference ---------------------------------------------------------------------------------------------------------


def test_with_the_adapter_off_it_is_the_pretrained_model(source: str) -> None:
    policy, base = made(source), made(source, lora=None)
    batch = batch_of(play(policy))
    with torch.no_grad():
        own, pretrained = (p.chosen_logprobs(batch, TEMPERATURE)[0] for p in (policy, base))
    assert policy.make_reference() is None
    reference = policy.reference_logprobs(batch, TEMPERATURE)
    torch.testing.assert_close(reference, pretrained)
    assert not reference.requires_grad and float((own - reference).abs().max()) > 0.01
    # and afterwards the adapter is on, and trained, as before
    assert difference(policy, batch) < 1e-5
    assert all(p.requires_grad == ("lora_" in name) for name, p in policy.named_parameters())


def test_a_new_adapter_changes_nothing_and_its_seed_decides_it(source: str) -> None:
    policy, base = made(source, moved=False), made(source, lora=None)
    batch = batch_of(play(base))
    assert difference(policy, batch) < 1e-5
    again, other = made(source, moved=False), made(source, moved=False, init_seed=1)
    weights = [torch.cat([p.flatten() for p in x.parameters() if p.requires_grad]) for x in (policy, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_in_full_training_the_reference_is_a_copy(source: str) -> None:
    policy = made(source, lora=None)
    reference = policy.make_reference()
    assert reference is not None and not any(p.requires_grad for p in reference.parameters())
    assert set(reference.state_dict()) == set(policy.state_dict())  # a frozen copy is saved, too
    with pytest.raises(ValueError, match=r"policy\.lora is null"), policy.adapter_off():
        pass


# -- checkpoints and export --------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_adapter_only_and_is_loaded_strictly(source: str) -> None:
    policy, fresh = made(source), made(source, moved=False)
    outer = torch.nn.ModuleDict({"policy": policy})
    state = outer.state_dict()
    # 2 layers × 7 linear layers × 2 factors
    assert len(state) == 28 and all(name.startswith("policy.model.") and "lora_" in name for name in state)
    batch = batch_of(play(policy))
    assert difference(fresh, batch) > 0.01
    torch.nn.ModuleDict({"policy": fresh}).load_state_dict(state)
    assert difference(fresh, batch) < 1e-5
    name = next(iter(state))
    lacking = {k: v for k, v in state.items() if k != name}
    with pytest.raises(RuntimeError, match="Missing key"):
        outer.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        outer.load_state_dict({**state, "policy.model.other": state[name]})


def test_identity_tells_policies_apart(source: str, tmp_path: Path) -> None:
    identity = made(source).identity()
    assert identity == made(source, init_seed=5).identity()
    assert identity != made(source, lora=LoRA(r=8, alpha=8.0)).identity()
    assert identity != made(source, lora=None).identity()
    other = made(save_tiny(tmp_path, initializer_range=0.1)).identity()
    assert [key for key in identity if identity[key] != other[key]] == ["weights"]


@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_a_merged_export_is_the_policy(source: str, tmp_path: Path, quantization: str) -> None:
    policy = made(source, dtype="float32", quantization=quantization)
    policy.save_merged(tmp_path / "merged")
    exported = made(str(tmp_path / "merged"), lora=None)
    reference = policy
    if quantization != "none":  # the adapter is merged into the weights of the file, before rounding
        reference = made(source, dtype="float32")
    assert difference(exported, batch_of(play(reference))) < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    names = set(loaded.state_dict())
    assert loaded.config.use_cache and not any("lora" in name or "base_layer" in name for name in names)
    assert difference(policy, batch_of(play(policy))) < 1e-5  # and the policy is what it was


def test_an_exported_adapter_is_pefts(source: str, tmp_path: Path) -> None:
    from peft import PeftModel

    policy = made(source)
    policy.save_adapter(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), tmp_path / "adapter")
    ids = torch.arange(6, 20)[None]
    policy.model.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, policy._wrapped[0](input_ids=ids).logits)
    with pytest.raises(ValueError, match=r"policy\.lora is null: .*merged"):
        made(source, lora=None).save_adapter(tmp_path / "none")


# -- a fit -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"lora": LoRA(r=4)}, {"lora": None}, {"lora": LoRA(r=4), "quantization": "4bit", "gradient_checkpointing": True}],
)
def test_it_trains_and_resumes(source: str, tmp_path: Path, options: dict[str, Any]) -> None:
    def run(epochs: int, ckpt_path: str | None = None) -> tuple[Any, CausalLMPolicy]:
        policy = CausalLMPolicy(source, dtype="float32", chat=CHAT, **options)
        trainer, _, _ = fit(
            tmp_path / "run",
            epochs,
            [IterationCheckpoint()],
            model={"policy": policy, "kl_coef": 0.1},
            ckpt_path=ckpt_path,
        )
        return trainer, policy

    trainer, policy = run(2)
    kl = float(trainer.callback_metrics["loss/kl"])
    assert kl > 0  # it has moved away from its reference
    path = tmp_path / "run" / "checkpoints" / "iteration=000001.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    trained = "lora_" if options["lora"] is not None else ""
    assert state and all(trained in name for name in state)
    assert any(name.startswith("reference.") for name in state) == (options["lora"] is None)
    _, resumed = run(2, str(path))
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], tensor)


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp16"}, r"policy\.dtype='fp16': choose one of auto, float32, bfloat16, float16"),
        ({"quantization": "3bit", "lora": LoRA()}, r"policy\.quantization='3bit': choose one of none, 4bit, 8bit"),
        ({"quantization": "4bit"}, r"policy\.quantization='4bit': .* give lora"),
        ({"dtype": "float16"}, r"policy\.dtype='float16' needs a GPU"),
        ({"init_seed": 2**63}, r"policy\.init_seed=9223372036854775808: must lie in \[0, 2\^63\)"),
        ({"lora": LoRA(targets=["q_prj"])}, r"targets has 'q_prj': .* did you mean q_proj\? .*all-linear, down_proj"),
        ({"lora": LoRA(targets=["lm_head"])}, r"policy\.lora\.targets has 'lm_head'"),
    ],
)
def test_options_that_cannot_work_are_refused(source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLMPolicy(source, **options).prepare(TASKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, r"policy\.lora\.r=0: .*lora: null"),
        ({"alpha": 0.0}, r"policy\.lora\.alpha=0\.0: must be positive"),
        ({"dropout": 1.0}, r"policy\.lora\.dropout=1\.0: must lie in \[0, 1\)"),
        ({"targets": "q_proj"}, r"policy\.lora\.targets='q_proj': must be a list"),
        ({"targets": []}, r"policy\.lora\.targets=\[\]: must be a list"),
    ],
)
def test_adapters_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRA(**options)


def test_missing_models_are_named(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"policy\.model='\./nowhere': there is no such folder"):
        CausalLMPolicy("./nowhere").prepare(TASKS)
    with pytest.raises(ValueError, match=r"the folder has no config\.json"):
        CausalLMPolicy(str(tmp_path)).prepare(TASKS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"policy\.model='nobody/nothing': its .* check the name and the connection"):
        CausalLMPolicy("nobody/nothing").prepare(TASKS)


def test_missing_bitsandbytes_is_named(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "bitsandbytes" else find(n, *a))
    with pytest.raises(ValueError, match=r"policy\.quantization='4bit' needs bitsandbytes.*pip install"):
        CausalLMPolicy(source, quantization="4bit", lora=LoRA()).prepare(TASKS)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        CausalLMPolicy(save_tiny(tmp_path, template=None)).prepare(TASKS)


def test_too_few_positions_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"512 positions.*600 tokens: lower data\.segments\.max_tokens"):
        made(source).new_cache(1, 600)
    rule, longest = SegmentRule(max_tokens=449), "449: the policy has 512 positions.* need 64: lower it to at most 448"
    with pytest.raises(ValueError, match=rf"data\.segments\.max_tokens={longest}"):
        Collector(made(source), InProcessPool(TASKS.make_env), rule)


def test_an_attention_window_is_the_longest_sequence(tmp_path: Path) -> None:
    policy = made(save_tiny(tmp_path, kind=MistralConfig, sliding_window=100))
    assert policy.new_cache(1, 100).capacity == 100
    with pytest.raises(ValueError, match="100 positions"):
        policy.new_cache(1, 101)


def test_layers_without_attention_are_refused(tmp_path: Path) -> None:
    source = save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = ["linear_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": layers}))
    with pytest.raises(ValueError, match="has layers of type linear_attention"):
        CausalLMPolicy(source).prepare(TASKS)


def test_attention_that_ragged_attention_does_not_know_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe against the model's own attention; here the scale is wrong, as with capped scores."""
    from gigpo_lightning.policy.ragged import PackedRows

    attend = PackedRows.attend
    monkeypatch.setattr(PackedRows, "attend", lambda s, n, q, k, v, scale: attend(s, n, q, k, v, 2 * (scale or 1.0)))
    with pytest.raises(ValueError, match=r"attends in a way that is not supported: its hidden states differ by"):
        made(source)


def test_a_deep_model_in_bfloat16_is_not_refused_for_its_rounding(tmp_path: Path) -> None:
    """24 layers of large weights: rounding alone moves the last hidden states by more than other attention would."""
    assert made(save_tiny(tmp_path, num_hidden_layers=24), dtype="bfloat16", lora=None).model.dtype == torch.bfloat16


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(source: str, tmp_path: Path) -> Path:
    """The checkpoint of a run of the box world, with the configuration that the command line leaves beside it."""
    run = tmp_path / "runs" / "box" / "version_0"
    policy = CausalLMPolicy(source, chat=CHAT, lora=LoRA(r=4, alpha=8.0))
    fit(run, 1, [IterationCheckpoint()], model={"policy": policy})
    lora = {"r": 4, "alpha": 8.0}
    chat = {"system": CHAT.system, "first": CHAT.first}
    options = {"model": source, "lora": lora, "chat": chat}
    policy_yaml = {"class_path": "gigpo_lightning.policy.causal_lm.CausalLMPolicy", "init_args": options}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": policy_yaml}}))
    return run / "checkpoints" / "iteration=000001.ckpt"


def test_export_writes_adapter_or_model(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "adapter"
    assert main(["export", "--ckpt_path", str(finished), "--to", str(target)]) == 0
    assert (target / "adapter_model.safetensors").is_file() and (target / "tokenizer.json").is_file()
    assert main(["export", "--ckpt_path", str(finished), "--to", str(tmp_path / "model"), "--merged"]) == 0
    said = [f"adapter: {target}, of {finished}", f"model: {tmp_path / 'model'}, of {finished}"]
    assert capsys.readouterr().out.splitlines() == said
    trained = load_policy(finished)
    exported = made(str(tmp_path / "model"), lora=None)
    assert difference(exported, batch_of(play(trained, n=40))) < 1e-5


def test_export_refuses_what_does_not_fit(
    finished: Path, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["export", *args])
        assert ended.value.code == 2
        return capsys.readouterr().err

    target = ["--to", str(tmp_path / "new")]
    assert "no such file" in refused("--ckpt_path", "nowhere.ckpt", *target)
    assert "is not empty" in refused("--ckpt_path", str(finished), "--to", str(finished.parent))
    config = finished.parent.parent / "config.yaml"
    config.write_text(config.read_text().replace("r: 4", "r: 8"))
    assert "of another policy" in refused("--ckpt_path", str(finished), *target)
    scratch = {"class_path": "gigpo_lightning.policy.scratch.ScratchPolicy"}
    config.write_text(yaml.safe_dump({"model": {"policy": scratch}}))
    assert "ScratchPolicy cannot be exported" in refused("--ckpt_path", str(finished), *target)
    config.unlink()
    assert "name it with --config" in refused("--ckpt_path", str(finished), *target)
    assert not (tmp_path / "new").exists()


def test_a_rank_beyond_every_layer_is_refused(tmp_path: Path) -> None:
    source = save_tiny(tmp_path)  # hidden 64; keys and values 2 heads of 16; feed-forward 128
    made(source, lora=LoRA(r=64))
    with pytest.raises(ValueError, match=r"policy\.lora\.r=65: the targets' layers have at most rank 64"):
        made(source, lora=LoRA(r=65))
    with pytest.raises(ValueError, match="at most rank 32"):
        made(source, lora=LoRA(r=33, targets=["k_proj"]))
