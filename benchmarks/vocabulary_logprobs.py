"""Memory and time of log-probs and entropies over a large vocabulary, with gradients: in tiles, and with plain torch.

    python -m benchmarks.vocabulary_logprobs [--tokens 2048] [--words 151936] [--hidden 896] [--dtype float32]
        [--repeats 2] [--threads 1] [--out FILE.json]

Forward and backward from given hidden states, with a frozen and with a trained output layer (`head`). Ways:

* `plain`: all scores at once, then log-softmax and entropy, in float32, as the sampler computes them;
* `plain_low` (bfloat16 only): the same from scores that are rounded to bfloat16, as a model's own output layer does it;
* `tiles`: `vocabulary_logprobs`; `tiles_0`: the same with nothing kept for the backward pass.

Memory: every case in a process of its own, the highest resident size beyond that after making inputs, the gradients
that are asked for included. Time: seconds of processor time, ways taking turns in one process, best of `--repeats`.
Gradients (of the hidden states, and of a trained weight): largest error of those of 64 tokens against float64, relative
to the largest entry.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from gigpo_lightning.files import write_json
from gigpo_lightning.functional.logprobs import TokenLogprobs, constrained_logprobs
from gigpo_lightning.functional.vocabulary import vocabulary_logprobs
from gigpo_lightning.machine import machine

TEMPERATURE = 0.9
HEADS = ("frozen", "trained")
EXACT_TOKENS = 64
Inputs = tuple[Tensor, Tensor, Tensor]
Way = Callable[[Tensor, Tensor, Tensor], TokenLogprobs]
WAYS: dict[str, Way] = {
    "plain": lambda h, w, ids: constrained_logprobs(linear(h.float(), w.float()), ids, temperature=TEMPERATURE),
    "plain_low": lambda h, w, ids: constrained_logprobs(linear(h, w), ids, temperature=TEMPERATURE),
    "tiles": lambda h, w, ids: vocabulary_logprobs(h, w, ids, temperature=TEMPERATURE),
    "tiles_0": lambda h, w, ids: vocabulary_logprobs(h, w, ids, temperature=TEMPERATURE, kept_bytes=0),
}


def make(options: argparse.Namespace, head: str) -> Inputs:
    """Hidden states, weight and tokens; scores of standard deviation 3, as a trained model's."""
    random = torch.Generator().manual_seed(0)
    kind = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, generator=random).to(kind)
    weight = torch.randn(options.words, options.hidden, generator=random).mul_(3 / options.hidden**0.5).to(kind)
    token_ids = torch.randint(options.words, (options.tokens,), generator=random)
    return hidden.requires_grad_(), weight.requires_grad_(head == "trained"), token_ids


def step(way: Way, inputs: Inputs) -> list[Tensor]:
    """One forward and backward pass; the gradients."""
    found = way(*inputs)
    (found.logprobs.mean() + 0.1 * found.entropy.mean()).backward()
    gradients = [leaf.grad for leaf in inputs[:2] if leaf.grad is not None]
    inputs[0].grad = inputs[1].grad = None
    return gradients


def peak_kb() -> int:
    """The highest resident size of this process since it was last forgotten, in KiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def measure_memory(options: argparse.Namespace) -> float:
    """MiB that one step of `options.case` takes beyond its inputs."""
    head, name = options.case
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # the libraries' own buffers
    inputs = make(options, head)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the highest size so far
    before = peak_kb()
    step(WAYS[name], inputs)
    return (peak_kb() - before) / 1024


def memory_of(argv: Sequence[str], head: str, name: str) -> float:
    """`measure_memory` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.vocabulary_logprobs", *argv, "--case", head, name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def time_of(inputs: Inputs, names: Sequence[str], repeats: int) -> dict[str, float]:
    """Seconds of processor time of a step by way."""
    seconds = dict.fromkeys(names, float("inf"))
    for _ in range(repeats):
        for name in names:
            begin = time.process_time()
            step(WAYS[name], inputs)
            seconds[name] = min(seconds[name], time.process_time() - begin)
    return seconds


def errors_of(inputs: Inputs, names: Sequence[str]) -> dict[str, list[float]]:
    """Relative errors of the gradients of a few tokens against float64, by way."""
    some = (inputs[0][:EXACT_TOKENS].detach().requires_grad_(), inputs[1], inputs[2][:EXACT_TOKENS])
    twice = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in some[:2]]
    exact = step(_exact, (twice[0], twice[1], some[2]))
    return {
        name: [float((a - b).abs().max() / b.abs().max()) for a, b in zip(step(WAYS[name], some), exact, strict=True)]
        for name in names
    }


def _exact(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> TokenLogprobs:
    log_p = torch.log_softmax(linear(hidden, weight) / TEMPERATURE, -1)
    return TokenLogprobs(log_p.gather(1, token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(1))


def main(argv: Sequence[str]) -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--words", type=int, default=151_936, help="size of the vocabulary; default: Qwen2.5's")
    parser.add_argument("--hidden", type=int, default=896, help="width of the hidden states; default: Qwen2.5-0.5B's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.case:
        print(measure_memory(options))
        return
    names = [name for name in WAYS if name != "plain_low" or options.dtype == "bfloat16"]
    rows = []
    print(f"{options.tokens} tokens, {options.words} words, hidden {options.hidden}, {options.dtype}")
    print(f"{'head':8} {'way':10} {'MiB':>8} {'ratio':>6} {'seconds':>8} {'ratio':>6}  errors of gradients")
    for head in HEADS:
        inputs = make(options, head)
        errors, seconds = errors_of(inputs, names), time_of(inputs, names, options.repeats)
        mib = {name: memory_of(argv, head, name) for name in names}
        for name in names:
            row: dict[str, Any] = {"head": head, "way": name, "mib": mib[name], "seconds": seconds[name]}
            row |= {"mib_ratio": mib[name] / mib["plain"], "seconds_ratio": seconds[name] / seconds["plain"]}
            row["gradient_errors"] = errors[name]
            rows.append(row)
            figures = f"{row['mib']:8.0f} {row['mib_ratio']:6.3f} {row['seconds']:8.2f} {row['seconds_ratio']:6.2f}"
            print(f"{head:8} {name:10} {figures}  {', '.join(f'{d:.1e}' for d in row['gradient_errors'])}", flush=True)
    if options.out:
        sizes = {name: getattr(options, name) for name in ("tokens", "words", "hidden", "dtype", "repeats", "threads")}
        write_json(options.out, {**sizes, "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
