"""Keys that a YAML text gives twice in one mapping, of which PyYAML keeps the last without a word. Knows no option."""

from __future__ import annotations

import yaml


def repeated_key(text: str) -> tuple[str, int] | None:
    """The first key that its mapping has had before, and its line; None where there is none.

    Merges (`<<:`) do not count: their keys are there to be overridden.

    Raises:
        yaml.YAMLError: The text is not YAML.
    """
    seen: set[int] = set()  # an alias may lead back to where it stands
    waiting = [yaml.compose(text, Loader=yaml.SafeLoader)]
    found: list[tuple[str, int]] = []
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, value in node.value:
                name = (key.tag, str(key.value))
                if name in keys and name[1] != "<<":
                    found.append((name[1], key.start_mark.line + 1))
                keys.add(name)
                waiting.append(value)
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
    return min(found, key=lambda place: place[1], default=None)
