"""The six kinds of goal: what they ask for, and how they are worded.

A `Goal` names simulator types (`CounterTop`); a `Want` is what a reader of the instruction knows (`countertop`). Knows
nothing about particular households.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SIMPLE = "pick_and_place_simple"
LOOK = "look_at_obj_in_light"
CLEAN = "pick_clean_then_place_in_recep"
HEAT = "pick_heat_then_place_in_recep"
COOL = "pick_cool_then_place_in_recep"
TWO = "pick_two_obj_and_place"
TASK_TYPES = (SIMPLE, LOOK, CLEAN, HEAT, COOL, TWO)

# Where the recorded games set each kind of task.
TASK_ROOMS: dict[str, tuple[str, ...]] = {
    SIMPLE: ("kitchen", "livingroom", "bedroom", "bathroom"),
    LOOK: ("livingroom", "bedroom"),
    CLEAN: ("kitchen", "bathroom"),
    HEAT: ("kitchen",),
    COOL: ("kitchen",),
    TWO: ("kitchen", "livingroom", "bedroom", "bathroom"),
}
# The furniture that changes an object, the verb that does it, and the fact that results.
TREATMENTS: dict[str, tuple[str, str, str]] = {
    CLEAN: ("SinkBasin", "clean", "isClean"),
    HEAT: ("Microwave", "heat", "isHot"),
    COOL: ("Fridge", "cool", "isCool"),
}
ABILITIES = {CLEAN: "cleanable", HEAT: "heatable", COOL: "coolable"}
# Fewest steps of any solution: go and take, (go and) treat, go and put; with two objects twice that; 3 where the lamp
# stands beside the object.
FEWEST_STEPS = {LOOK: 3, SIMPLE: 4, CLEAN: 5, HEAT: 5, COOL: 5, TWO: 8}

# The wordings of the recorded games' templated instructions.
TEMPLATES: dict[str, tuple[str, str]] = {
    SIMPLE: ("put a {object} in {target}", "put some {object} on {target}"),
    LOOK: ("look at {object} under the {target}", "examine the {object} with the {target}"),
    CLEAN: ("put a clean {object} in {target}", "clean some {object} and put it in {target}"),
    HEAT: ("put a hot {object} in {target}", "heat some {object} and put it in {target}"),
    COOL: ("put a cool {object} in {target}", "cool some {object} and put it in {target}"),
    TWO: ("put two {object} in {target}", "find two {object} and put them in {target}"),
}


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(template.format(object=r"(?P<object>[a-z]+)", target=r"(?P<target>[a-z]+)") + r"\.?")


_PATTERNS = [(kind, _pattern(template)) for kind, templates in TEMPLATES.items() for template in templates]


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal in the simulator's types. `target` is the receptacle type, or the lamp type of a look task."""

    type: str
    object: str
    target: str

    def instruction(self, wording: int) -> str:
        """The goal in words, as a sentence with a full stop; `wording` is 0 or 1."""
        template = TEMPLATES[self.type][wording]
        return template.format(object=self.object.lower(), target=self.target.lower()) + "."

    def want(self) -> Want:
        """The goal as a reader of the instruction knows it."""
        return Want(self.type, self.object.lower(), self.target.lower())


@dataclass(frozen=True, slots=True)
class Want:
    """A goal in the words of the game: lower-case type names without numbers."""

    type: str
    object: str
    target: str

    @property
    def copies(self) -> int:
        """How many objects must lie in the target."""
        return 2 if self.type == TWO else 1

    @property
    def tool(self) -> str:
        """The furniture that treats the object; empty where no treatment is asked for."""
        return TREATMENTS[self.type][0].lower() if self.type in TREATMENTS else ""

    @property
    def verb(self) -> str:
        """The verb of the treatment; empty where none is asked for."""
        return TREATMENTS[self.type][1] if self.type in TREATMENTS else ""


def read_instruction(text: str) -> Want:
    """The goal of a templated instruction, with or without the words "Your task is to:" before it.

    Raises:
        ValueError: The wording is none of the templates (the recorded games also exist with free human wordings).
    """
    sentence = text.strip().lower().removeprefix("your task is to:").strip()
    for kind, pattern in _PATTERNS:
        match = pattern.fullmatch(sentence)
        # "put a clean cup in …" has one word more than "put a cup in …", so at most one pattern matches.
        if match:
            return Want(kind, match["object"], match["target"])
    known = "; ".join(template for templates in TEMPLATES.values() for template in templates)
    raise ValueError(f"instruction {text!r} follows none of the known wordings: {known}")
