"""A GRPO step beside the one of TRL's GRPOTrainer: same model, prompts, completions and rewards.

    pip install trl datasets pandas   # not needed by the package; measured with trl 1.16.0
    python -m benchmarks.trl_step [--model FOLDER | --words 20480] [--groups 4] [--members 4] [--prompt 32 160]
        [--completion 16 96] [--max_tokens 8192] [--move 0.05] [--repeats 5] [--threads 1] [--out FILE.json]

Both policies are the same step away from the sampling policy, which is also the reference, so that some ratios are
clipped and the KL is not 0. Without `--model` the model is a Llama of 4 layers × 256 with random weights.

Shown are the differences of loss, advantages and gradient, for three ways of averaging, and seconds of processor time
of a step (forward, backward, AdamW), without KL and with the reference's log-probs computed anew; the two take turns,
the best of `--repeats` counts. TRL options that differ from its defaults: no gradient checkpointing, and
`use_bias_correction_kl=False` (by default TRL multiplies the KL by the ratio).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.trl_sides import AVERAGES, CLIP, TRL, Ours, make_completions, make_model, move
from gigpo_lightning.files import write_json
from gigpo_lightning.machine import machine


def compare(trl: TRL, ours: Ours) -> list[dict[str, Any]]:
    """Loss and gradient by every way of averaging, with and without KL; the models are the same and do not change."""
    rows = []
    both: tuple[TRL | Ours, ...] = (trl, ours)
    for average in AVERAGES:
        for kl in (False, True):
            losses, gradients = [], []
            for side in both:
                side.optimizer.zero_grad()
                losses.append(side.backward(average, kl))
                gradients.append(torch.cat([p.grad.flatten() for p in side.model.parameters()]))
            wanted, found = gradients
            row: dict[str, Any] = {"loss_type": average, "aggregation": AVERAGES[average], "kl": kl}
            row |= {"loss_trl": losses[0], "loss": losses[1]}
            row["gradient_difference_largest"] = float((found - wanted).abs().max() / wanted.abs().max())
            row["gradient_difference_norm"] = float((found - wanted).norm() / wanted.norm())
            rows.append(row)
    return rows


def measure(trl: TRL, ours: Ours, repeats: int) -> list[dict[str, Any]]:
    """Seconds of processor time of a whole step, best of the repeats; the two take turns."""
    rows = []
    both: tuple[TRL | Ours, ...] = (trl, ours)
    for kl in (False, True):
        best = [float("inf")] * 2
        for _ in range(repeats):
            for i, side in enumerate(both):
                begin = time.process_time()
                side.optimizer.zero_grad()
                side.backward("bnpo", kl, refer=kl)
                side.optimizer.step()
                best[i] = min(best[i], time.process_time() - begin)
        rows.append({"kl": kl, "seconds_trl": best[0], "seconds": best[1], "speed_up": best[0] / best[1]})
    return rows


def run(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Everything that is compared and measured, as the JSON holds it."""
    data = make_completions(options, AutoConfig.from_pretrained(folder).vocab_size)
    trl = TRL(folder, data)
    ours = Ours(folder, data, options.max_tokens, trl.constant)
    advantages = float((trl.inputs["advantages"] - ours.advantages).abs().max())
    move(trl.model, options.move)
    ours.model.load_state_dict(trl.model.state_dict())
    lengths = [len(p) + len(c) for p, c in zip(data.prompts, data.completions, strict=True)]
    padded = len(lengths) * (max(map(len, data.prompts)) + max(map(len, data.completions)))
    return {
        "advantage_difference": advantages,
        "rows": len(lengths),
        "tokens": sum(lengths),
        "padded_tokens_trl": padded,
        "completion_tokens": sum(map(len, data.completions)),
        "clipped_frac": clipped(ours),
        "equal": compare(trl, ours),
        "speed": measure(trl, ours, options.repeats),
    }


def clipped(ours: Ours) -> float:
    """Share of the ratios outside of the clipping range."""
    with torch.no_grad():
        ratios = torch.cat([(ours.policy.chosen_logprobs(b, 1.0)[0] - b.old_logprobs).exp() for b in ours.batches])
    return float(((ratios - 1).abs() > CLIP).float().mean())


def show(figures: dict[str, Any]) -> None:
    """Print the figures."""
    tokens = "{tokens} tokens in {rows} rows ({padded_tokens_trl} padded), {completion_tokens} of completions"
    print(tokens.format(**figures), end="; ")
    print(
        "{clipped_frac:.1%} of the ratios outside the clip, advantages differ by {advantage_difference:.1e}".format(
            **figures
        )
    )
    print(f"{'loss_type':10} {'aggregation':12} {'KL':4} {'loss TRL':>12} {'loss':>12}  gradient: largest, norm")
    for row in figures["equal"]:
        name = f"{row['loss_type']:10} {row['aggregation']:12} {'yes' if row['kl'] else 'no':4}"
        gradient = f"{row['gradient_difference_largest']:.1e}, {row['gradient_difference_norm']:.1e}"
        print(f"{name} {row['loss_trl']:12.8f} {row['loss']:12.8f}  {gradient}")
    for row in figures["speed"]:
        step = "step with the reference" if row["kl"] else "step without KL"
        print(
            f"{step}: TRL {row['seconds_trl']:.3f} s, ours {row['seconds']:.3f} s, {row['speed_up']:.2f} times as fast"
        )


def main(argv: Sequence[str]) -> None:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: a random one of 4 layers × 256")
    parser.add_argument("--words", type=int, default=20_480, help="vocabulary of the random model")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--prompt", type=int, nargs=2, default=[32, 160], help="shortest and longest, in tokens")
    parser.add_argument("--completion", type=int, nargs=2, default=[16, 96], help="shortest and longest, in tokens")
    parser.add_argument("--max_tokens", type=int, default=8192, help="of our micro-batches; TRL takes all rows at once")
    parser.add_argument("--move", type=float, default=0.05, help="step from the sampling policy, in spreads of weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            make_model(Path(folder), options.words)
        figures = run(options, options.model or folder)
    show(figures)
    if options.out:
        setting = {k: v for k, v in vars(options).items() if k != "out"}
        setting["model"] = Path(options.model).name if options.model else "random"
        where = machine("trl", "transformers", "accelerate")
        write_json(options.out, {"setting": setting, "machine": where, **figures})


if __name__ == "__main__":
    main(sys.argv[1:])
