"""`python -m gigpo_lightning anchors`: the orders, the table, JSON, and what bad input is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gigpo_lightning.__main__ import main
from gigpo_lightning.callbacks.anchor_table import AnchorTable


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with four anchors: often, good, wild (returns 0 and 2), and one whose statistics were reset."""
    table = AnchorTable("world")

    def add(key: str, returns: list[float], iteration: int) -> None:
        n = len(returns)
        table.merge(
            AnchorTable.of_turns([key] * n, returns, [f"see [{key}] \x1b[31m\n"] * n, ["[/st\x1b"] * n, iteration, 80)
        )

    add("reset", [5.0], 9)
    table.forget_statistics()
    add("often", [0.5] * 4, 0)
    add("good", [1.0], 1)
    add("wild", [0.0, 2.0], 2)
    table.save(tmp_path / "anchors.arrow")
    return tmp_path


@pytest.mark.parametrize(
    ("sort", "keys"),
    [
        ("visits", ["often", "wild", "good", "reset"]),
        ("return", ["wild", "good", "often", "reset"]),  # wild and good have the mean 1: the more visited first
        ("spread", ["wild", "often", "good", "reset"]),
        ("recent", ["wild", "good", "often", "reset"]),
    ],
)
def test_orders_as_json(run: Path, capsys: pytest.CaptureFixture[str], sort: str, keys: list[str]) -> None:
    assert main(["anchors", str(run / "anchors.arrow"), "--sort", sort, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["scope"], found["size"]) == ("world", 4)
    assert [anchor["key"] for anchor in found["anchors"]] == keys
    wild = next(anchor for anchor in found["anchors"] if anchor["key"] == "wild")
    assert wild == {
        "key": "wild",
        "text": "see [wild] \x1b[31m\n",
        "stage": "[/st\x1b",
        "visits": 2,
        "return_mean": 1.0,
        "return_std": pytest.approx(2**0.5),  # of {0, 2}
        "first_seen": 2,
        "last_seen": 2,
    }


def test_the_table_of_a_run(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["anchors", str(run), "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 anchors, 7 visits; one anchor is of one world" in out
    assert "see [often]" in out
    assert "\x1b" not in out  # a terminal would obey it
    assert "1.414" in out
    assert "good" not in out


def test_an_empty_library_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AnchorTable().save(tmp_path / "empty.arrow")
    assert main(["anchors", str(tmp_path / "empty.arrow")]) == 0
    assert "0 anchors, 0 visits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere: no such file; name a library's file or the folder of a run"),
        (["."], "there is no anchors.arrow in it; AnchorLibrary in trainer.callbacks writes it when training ends"),
        (["text"], "anchor library text: cannot be read"),
        (["text", "--top", "0"], "--top 0: must be at least 1"),
        (["text", "--sort", "best"], "invalid choice: 'best'"),
        (["text", "--top", "few"], "invalid int value: 'few'"),
        ([], "required: PATH"),
    ],
)
def test_bad_input_is_one_message(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no library")
    with pytest.raises(SystemExit) as left:
        main(["anchors", *args])
    assert left.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert said.out == ""
