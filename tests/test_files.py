"""Files appear under their name whole or not at all, and nothing of a failed one stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gigpo_lightning.files import replacing, write_json


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_json_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = write_json(tmp_path / "new" / "results.json", {"λ": 1})
    assert path == tmp_path / "new" / "results.json"
    assert json.loads(path.read_text(encoding="utf-8")) == {"λ": 1}
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"λ": 1}
    assert names(path.parent) == ["results.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_is_cut_short_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def cut_short() -> None:
        with replacing(tmp_path / "a.txt") as partial:
            partial.write_text("half")
            assert names(tmp_path) == [partial.name] != ["a.txt"]
            raise error

    with pytest.raises(error):
        cut_short()
    assert names(tmp_path) == []


def test_a_file_that_cannot_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    with pytest.raises(OSError, match=r"results\.json"):
        write_json(tmp_path / "results.json", {})
    assert names(tmp_path) == ["results.json"]
