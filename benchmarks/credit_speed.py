"""How long credit takes, and that it is linear: step groups from string keys, step returns and advantages.

`python benchmarks/credit_speed.py [--records 1000000 10000000] [--shuffled]` on one thread; seconds of processor time
(a busy machine does not count), best of `--repeats`. Making the records is not counted. 10 million need about 4 GB.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gigpo_lightning.functional.advantages import gigpo, step_returns
from gigpo_lightning.functional.anchors import group_exact

TURNS = 50  # the turn limit of ALFWorld
MEMBERS = 8
STATES = 40  # distinct states per group


class Records(NamedTuple):
    rewards: NDArray[np.float64]
    episodes: NDArray[np.int64]
    steps: NDArray[np.int64]
    groups: NDArray[np.int64]
    keys: list[str]


def make_records(n_records: int, shuffled: bool) -> Records:
    rng = np.random.default_rng(0)
    record = np.arange(n_records)
    episodes, steps = record // TURNS, record % TURNS
    rewards = np.where(steps == TURNS - 1, 10.0 * (rng.random(n_records) < 0.5), 0.0)
    states = rng.integers(0, STATES, n_records)
    groups = episodes // MEMBERS
    if shuffled:
        order = rng.permutation(n_records)
        rewards, episodes, steps, groups, states = (a[order] for a in (rewards, episodes, steps, groups, states))
    return Records(rewards, episodes, steps, groups, [f"you are at place {state}" for state in states.tolist()])


def measure(records: Records) -> tuple[float, float, float]:
    """Seconds for the step groups, the step returns, and the advantages (which make the returns again)."""
    begin = time.process_time()
    step_groups = group_exact(records.keys, records.groups)
    grouped = time.process_time()
    step_returns(records.rewards, records.episodes, records.steps, 0.95)
    returned = time.process_time()
    gigpo(records.rewards, records.episodes, records.steps, records.groups, step_groups, weight=0.8)
    return grouped - begin, returned - grouped, time.process_time() - returned


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of credit on one thread.")
    parser.add_argument("--records", type=int, nargs="+", default=[1_000_000, 10_000_000], help="numbers of records")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the best counts")
    parser.add_argument("--shuffled", action="store_true", help="records in random order instead of by episode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'records':>10} {'groups':>8} {'returns':>8} {'gigpo':>8} {'total':>8}  per million")
    for n_records in options.records:
        records = make_records(n_records, options.shuffled)
        best = min((measure(records) for _ in range(options.repeats)), key=sum)
        figures = " ".join(f"{seconds:8.3f}" for seconds in (*best, sum(best)))
        print(f"{n_records:>10} {figures}  {sum(best) / n_records * 1e6:.3f}")


if __name__ == "__main__":
    main()
