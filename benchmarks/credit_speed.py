"""How long credit takes, and that it is linear: step groups from string keys, step returns and advantages.

`python benchmarks/credit_speed.py [--records 1000000 10000000] [--shuffled]` on one thread; seconds of processor time
(a busy machine does not count), best of `--repeats`, the sizes in turn. Making the records is not counted. 10 million
need about 4 GB.

`kernel` is the part of the total that the operating system took, nearly all of it for the first touch of memory. The
small results lie in memory that the process still holds from the run before, those of 10 million never do: linear work
shows in the column beside it, the last one, which is nanoseconds a record without that part.
"""

from __future__ import annotations

import argparse
import os
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


class Seconds(NamedTuple):
    """Of processor time; `gigpo` makes the returns again, `kernel` is a part of the other three."""

    groups: float
    returns: float
    gigpo: float
    kernel: float

    @property
    def total(self) -> float:
        return self.groups + self.returns + self.gigpo


def measure(records: Records) -> Seconds:
    kernel = os.times().system
    begin = time.process_time()
    step_groups = group_exact(records.keys, records.groups)
    grouped = time.process_time()
    step_returns(records.rewards, records.episodes, records.steps, 0.95)
    returned = time.process_time()
    gigpo(records.rewards, records.episodes, records.steps, records.groups, step_groups, weight=0.8)
    end = time.process_time()
    return Seconds(grouped - begin, returned - grouped, end - returned, os.times().system - kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of credit on one thread.")
    parser.add_argument("--records", type=int, nargs="+", default=[1_000_000, 10_000_000], help="numbers of records")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the best counts")
    parser.add_argument("--shuffled", action="store_true", help="records in random order instead of by episode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batches = [make_records(n_records, options.shuffled) for n_records in options.records]
    runs = [[measure(records) for records in batches] for _ in range(options.repeats)]
    print(
        f"{'records':>10} {'groups':>8} {'returns':>8} {'gigpo':>8} {'total':>8} {'kernel':>8}  ns each without kernel"
    )
    for n_records, seconds in zip(options.records, zip(*runs, strict=True), strict=True):
        best = min(seconds, key=lambda run: run.total)
        figures = (best.groups, best.returns, best.gigpo, best.total, best.kernel)
        own_ns = (best.total - best.kernel) / n_records * 1e9
        print(f"{n_records:>10} {' '.join(f'{figure:8.3f}' for figure in figures)}  {own_ns:.0f}")


if __name__ == "__main__":
    main()
