"""What the world says: the sentences of ALFWorld's text format, as functions of names. Knows no state and no rules."""

from __future__ import annotations

from collections.abc import Sequence

NOTHING_HAPPENS = "Nothing happens."
EMPTY_HANDED = "You are not carrying anything."
TASK_PREFIX = "Your task is to: "
BANNER = "-= Welcome to TextWorld, ALFRED! =-"

# (usage, meaning); the column after the usage is padded to one width, except for `move`, as the stock text has it.
_HELP = (
    ("look:", "look around your current location"),
    ("inventory:", "check your current inventory"),
    ("go to (receptacle):", "move to a receptacle"),
    ("open (receptacle):", "open a receptacle"),
    ("close (receptacle):", "close a receptacle"),
    ("take (object) from (receptacle):", "take an object from a receptacle"),
    ("move (object) to (receptacle):", "place an object in or on a receptacle"),
    ("examine (something):", "examine a receptacle or an object"),
    ("use (object):", "use an object"),
    ("heat (object) with (receptacle):", "heat an object using a receptacle"),
    ("clean (object) with (receptacle):", "clean an object using a receptacle"),
    ("cool (object) with (receptacle):", "cool an object using a receptacle"),
    ("slice (object) with (object):", "slice an object using a sharp object"),
)
_HELP_WIDTH = 34


def help_text() -> str:
    """The answer to `help`."""
    lines = ["Available commands:"]
    for usage, meaning in _HELP:
        padded = usage + "  " if usage.startswith("move") else usage.ljust(_HELP_WIDTH)
        lines.append(f"  {padded}{meaning}")
    return "\n".join(lines) + "\n"


def enumerate_names(names: Sequence[str]) -> str:
    """`x`, `x, and y`, `x, y, and z`, or `nothing`."""
    if not names:
        return "nothing"
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + ", and " + names[-1]


def enumerate_things(names: Sequence[str]) -> str:
    """As `enumerate_names`, each with its article."""
    return enumerate_names(["a " + name for name in names])


def intro(room: str, instruction: str) -> str:
    """What a game prints first: the banner, the room, the task."""
    return f"{BANNER}\n\n{room}\n\n{TASK_PREFIX}{instruction}"


def room(receptacles: Sequence[str]) -> str:
    """The room as seen from a place without a receptacle."""
    seen = enumerate_things(receptacles)
    return f"You are in the middle of a room. Looking quickly around you, you see {seen}."


def facing(receptacles: Sequence[str], floor: Sequence[str]) -> str:
    """`look` in front of one or more receptacles; `floor` are the objects lying beside them."""
    return f"You are facing the {enumerate_names(receptacles)}. Next to it, you see {enumerate_things(floor)}."


def contents(receptacle: str, openable: bool, opened: bool, things: Sequence[str]) -> str:
    """What is in or on a receptacle, as far as it can be seen."""
    if not openable:
        return f"On the {receptacle}, you see {enumerate_things(things)}."
    if not opened:
        return f"The {receptacle} is closed."
    return f"The {receptacle} is open. In it, you see {enumerate_things(things)}."


def carrying(things: Sequence[str]) -> str:
    """The answer to `inventory` when something is held."""
    return f"You are carrying: {enumerate_things(things)}."


def examined(thing: str, clean: bool, hot: bool, cool: bool, sliced: bool, switched_on: bool, sliceable: bool) -> str:
    """A close look at an object that holds nothing: the first fitting description wins."""
    temperature = "hot" if hot else "cool" if cool else ""
    if clean and temperature:
        return f"This is a {temperature} and clean {'sliced ' if sliced else ''}{thing}."
    if clean and sliced:
        return f"This is a clean sliced {thing}."
    if temperature and sliced:
        return f"This is a {temperature} sliced {thing}."
    if hot:
        return f"This is a hot {thing}."
    if clean:
        return f"This is a clean {thing}."
    if cool:
        return f"This is a cold {thing}."
    if switched_on:
        return f"This {thing} is on."
    if sliced and sliceable:
        return f"This is a sliced {thing}."
    return f"There's nothing special about {thing}."


def examined_container(thing: str, things: Sequence[str]) -> str:
    """A close look at an object that can hold others (a bowl, a box)."""
    return f"This is a normal {thing}. In it, you see {enumerate_things(things)}."
