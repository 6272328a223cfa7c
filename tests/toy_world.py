"""A world of one's own in a few lines: boxes, one of which holds the wanted thing. For tests that play and train."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gigpo_lightning.envs.base import Observation, StepResult, Task, TaskSet, TextEnv

THINGS = ("apple", "book", "cup")


class BoxEnv(TextEnv):
    """Open the box that holds the wanted thing, then take it. A wrong box shows what is inside."""

    def reset(self, task: Task) -> Observation:
        self.boxes: tuple[str, ...] = task.payload["boxes"]
        self.wanted: str = task.payload["wanted"]
        self.open: int | None = None
        return Observation(f"you see {len(self.boxes)} box .", f"take the {self.wanted}")

    def step(self, action: str) -> StepResult:
        words = action.split()
        if action not in self.admissible_actions():
            return StepResult(Observation("nothing happens ."), 0.0, False, False, {"won": False, "valid": False})
        if words[0] == "open":
            self.open = int(words[2]) - 1
            return StepResult(Observation(f"in it is a {self.boxes[self.open]} ."), 0.0, False, False, {"valid": True})
        won = words[2] == self.wanted
        return StepResult(Observation("done ."), float(won), True, False, {"won": won, "valid": True})

    def admissible_actions(self) -> Sequence[str]:
        actions = [f"open box {i + 1}" for i in range(len(self.boxes))]
        if self.open is not None:
            actions.append(f"take the {self.boxes[self.open]}")
        return sorted(set(actions))

    def anchor(self) -> str:
        return f"open={self.open}"

    def snapshot(self) -> int | None:
        return self.open

    def restore(self, snapshot: int | None) -> None:
        self.open = snapshot


class BoxExpert:
    """Opens one box after the other until the wanted thing turns up."""

    def act(self, observation: Observation, admissible: Sequence[str]) -> str:
        if observation.instruction:
            self.wanted, self.opened = observation.instruction.split()[-1], 0
        if f"a {self.wanted} ." in observation.text:
            return f"take the {self.wanted}"
        self.opened += 1
        return f"open box {self.opened}"


@dataclass(frozen=True)
class BoxTasks(TaskSet):
    """`boxes` boxes with things in them, one of them wanted."""

    boxes: int = 3
    size: int = 100

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "seen", "unseen")

    def len(self, split: str) -> int:
        return self.size

    def get(self, split: str, index: int) -> Task:
        rng = random.Random(f"{split}/{index}/{self.boxes}")
        boxes = tuple(rng.choice(THINGS) for _ in range(self.boxes))
        payload = {"boxes": boxes, "wanted": rng.choice(boxes)}
        return Task(f"{split}-{index}", split, {"boxes": self.boxes, "type": "take"}, payload)

    def narrow(self, difficulty: Mapping[str, Any]) -> BoxTasks:
        unknown = set(difficulty) - {"boxes"}
        if unknown:
            raise ValueError(f"difficulty: unknown knob {sorted(unknown)[0]!r}; known: boxes")
        return BoxTasks(int(difficulty.get("boxes", self.boxes)), self.size)

    def make_env(self) -> TextEnv:
        return BoxEnv()

    def make_expert(self) -> BoxExpert:
        return BoxExpert()

    def vocabulary(self) -> Sequence[str]:
        words = ["you", "see", "box", "in", "it", "is", "a", "nothing", "happens", "done", "take", "the", "open"]
        return [*words, *THINGS, *map(str, range(1, 10))]
