"""The anchor library: its arithmetic against a plain one, options, inside a fit, after a resume, its own file."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.callbacks.anchor_library import AnchorLibrary, figures
from gigpo_lightning.callbacks.anchor_table import AnchorTable
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.output_place import check_file
from tests.callbacks.tiny import CreditTable, Report, TinyRollouts, fit


def turns(pairs: list[tuple[str, float]], iteration: int = 0, stage: str = "s") -> AnchorTable:
    keys = [key for key, _ in pairs]
    return AnchorTable.of_turns(
        keys, [value for _, value in pairs], [f"see {k}" for k in keys], [stage] * len(keys), iteration, 80
    )


def rows(table: AnchorTable) -> dict[str, tuple[int, float, float]]:
    """key → visits, mean, sample variance."""
    variance = table.variance()
    return {
        key: (int(table.visits[row]), float(table.mean[row]), float(variance[row]))
        for row, key in enumerate(table.keys)
    }


def plain(pairs: list[tuple[str, float]]) -> dict[str, tuple[int, float, float]]:
    """The oracle: collect every value, then use the standard library."""
    values: dict[str, list[float]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return {k: (len(v), statistics.mean(v), statistics.variance(v) if len(v) > 1 else 0.0) for k, v in values.items()}


pairs = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-100, 100)), max_size=30)


@given(pairs, pairs, pairs)
def test_merging_equals_one_pass_over_all_values(one: list, two: list, three: list) -> None:
    table = AnchorTable()
    for iteration, part in enumerate((one, two, three)):
        table.merge(turns(part, iteration))
    expected = plain(one + two + three)
    assert table.keys == list(expected)
    for key, row in rows(table).items():
        assert row == pytest.approx(expected[key], abs=1e-7)


def test_variance_survives_a_large_offset() -> None:
    # Σx² − n·mean² would lose the variance 1/3 of {0, 1, 1, 0} + 1e9 entirely in float64.
    table = turns([("a", 1e9), ("a", 1e9 + 1)])
    table.merge(turns([("a", 1e9 + 1), ("a", 1e9)]))
    assert rows(table)["a"][2] == pytest.approx(1 / 3)


def test_first_and_last_seen_text_and_stage() -> None:
    table = turns([("a", 1.0)], iteration=3, stage="small")
    table.merge(turns([("a", 2.0), ("b", 0.0)], iteration=7, stage="large"))
    assert (table.first_seen.tolist(), table.last_seen.tolist()) == ([3, 7], [7, 7])
    assert (table.stages, table.texts) == (["small", "large"], ["see a", "see b"])


def test_shrink_keeps_those_seen_last_then_the_most_visited() -> None:
    table = turns([("old", 0.0)] * 9, iteration=0)
    table.merge(turns([("once", 0.0), ("twice", 0.0), ("twice", 1.0), ("again", 0.0)], iteration=1))
    table.shrink(2)
    assert table.keys == ["once", "twice"]
    assert "old" not in table
    table.merge(turns([("twice", 2.0)], iteration=2))  # rows are found again after shrinking
    assert rows(table)["twice"] == (3, pytest.approx(1.0), pytest.approx(1.0))  # {0, 1, 2}


def test_of_turns_refuses_what_cannot_be_averaged() -> None:
    with pytest.raises(ValueError, match="keys 1, returns 2"):
        AnchorTable.of_turns(["a"], [1.0, 2.0], ["t"], ["s"], 0, 80)
    with pytest.raises(ValueError, match="not finite"):
        turns([("a", float("nan"))])


def test_figures() -> None:
    assert figures(AnchorTable())["anchors/library_return_std"] == 0.0
    # a: {0, 2}, M2 = 2, one degree of freedom; b: one visit. Pooled: √(2 / 1).
    assert figures(turns([("a", 0.0), ("a", 2.0), ("b", 5.0)])) == {
        "anchors/library_size": 2.0,
        "anchors/library_visits": 1.5,
        "anchors/library_recurring_frac": 0.5,
        "anchors/library_return_std": pytest.approx(2**0.5),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_anchors": 0}, "AnchorLibrary.max_anchors=0: must be ≥ 1, or null"),
        ({"text_chars": -1}, "AnchorLibrary.text_chars=-1"),
        ({"reset_every": 0}, "AnchorLibrary.reset_every=0: must be ≥ 1, or null"),
        ({"load_from": "nowhere.arrow"}, "anchor library nowhere.arrow: cannot be read"),
    ],
)
def test_a_bad_option_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnchorLibrary(**options)


def report(data: TinyRollouts, pairs: list[tuple[str, float]]) -> TinyRollouts:
    keys = [key for key, _ in pairs]
    table = CreditTable(
        ["t"] * len(keys), keys, np.array([value for _, value in pairs]), ["x" * 200] * len(keys), ["s"] * len(keys)
    )
    data.iteration += 1
    data.report = Report(credit_tables=lambda: [table])
    return data


def test_by_hand_with_reset_and_bound() -> None:
    library, data = AnchorLibrary(reset_every=2, max_anchors=4, text_chars=10, scope="world"), TinyRollouts([0.0])
    assert library.add(report(data, [("a", 1.0), ("b", 1.0)]))["anchors/library_new_frac"] == 1.0
    assert library.add(report(data, [("a", 3.0), ("c", 1.0)]))["anchors/library_new_frac"] == 0.5
    assert rows(library.table)["a"] == (2, 2.0, 2.0)
    library.add(report(data, [("a", 7.0)]))  # iteration 2: statistics start anew with this batch
    assert rows(library.table) == {"a": (1, 7.0, 0.0), "b": (0, 0.0, 0.0), "c": (0, 0.0, 0.0)}
    library.add(report(data, [("d", 0.0), ("e", 0.0)]))  # five states, four allowed: three quarters of four stay
    assert library.table.keys == ["a", "d", "e"]
    assert library.table.texts[0] == "x" * 10


def test_in_a_fit_it_knows_every_state_and_writes_its_file(tmp_path: Path) -> None:
    library = AnchorLibrary()
    _, _, data = fit(tmp_path, [library], [0.5], epochs=3)
    assert library.table.visits.sum() == 3 * 40
    assert data.report.metrics["anchors/library_size"] == len(library.table) == 12
    saved = AnchorTable.load(tmp_path / "anchors.arrow")
    assert rows(saved) == rows(library.table)
    with pa.memory_map(str(tmp_path / "anchors.arrow")) as source:
        assert pa.ipc.open_file(source).schema.names[:3] == ["keys", "texts", "stages"]


def test_a_later_run_starts_from_the_file(tmp_path: Path) -> None:
    fit(tmp_path / "a", [AnchorLibrary()], [0.5], epochs=3)
    library = AnchorLibrary(load_from=str(tmp_path / "a/anchors.arrow"), save_to=str(tmp_path / "b.arrow"))
    fit(tmp_path / "b", [library], [0.5], epochs=1)
    assert library.table.visits.sum() == 4 * 40
    assert len(AnchorTable.load(tmp_path / "b.arrow")) == 12


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    turns([("a", 1.0)]).save(tmp_path / "good.arrow")
    whole = (tmp_path / "good.arrow").read_bytes()
    (tmp_path / "half.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"half\.arrow: cannot be read"):
        AnchorLibrary(load_from=str(tmp_path / "half.arrow"))
    table = pa.table({"keys": ["a"]})
    with pa.OSFile(str(tmp_path / "other.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"other\.arrow: not an anchor library"):
        AnchorLibrary(load_from=str(tmp_path / "other.arrow"))


@pytest.mark.parametrize(("column", "value"), [("visits", -1), ("m2", -0.5), ("mean", float("inf"))])
def test_a_figure_that_no_state_can_have_is_refused(tmp_path: Path, column: str, value: float) -> None:
    table = turns([("a", 1.0), ("b", 2.0)])
    getattr(table, column)[1] = value
    table.save(tmp_path / "bad.arrow")
    with pytest.raises(ValueError, match=r"bad\.arrow: damaged: .*a figure that none can have"):
        AnchorTable.load(tmp_path / "bad.arrow")


def test_a_damaged_offset_is_refused_instead_of_crashing(tmp_path: Path) -> None:
    # Keys of 5, 9 and 2 characters begin and end at 0, 5, 14 and 16: int32 numbers that stand in the file as they are.
    keys = ["a" * 5, "b" * 9, "c" * 2]
    turns([(key, 1.0) for key in keys]).save(tmp_path / "good.arrow")
    whole = bytearray((tmp_path / "good.arrow").read_bytes())
    place = whole.index(np.array([0, 5, 14, 16], np.int32).tobytes())
    whole[place + 11] = 0x7F  # 14 becomes 2·10⁹: far outside of the file
    (tmp_path / "bad.arrow").write_bytes(whole)
    with pytest.raises(ValueError, match=r"anchor library .*bad\.arrow: cannot be read"):
        AnchorLibrary(load_from=str(tmp_path / "bad.arrow"))


def test_any_damaged_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    turns([(f"key {i % 7}", float(i)) for i in range(9)]).save(tmp_path / "good.arrow")
    whole = (tmp_path / "good.arrow").read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        (tmp_path / "bad.arrow").write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert len(AnchorTable.load(tmp_path / "bad.arrow")) <= 7
        except ValueError as error:
            assert f"anchor library {tmp_path / 'bad.arrow'}: " in str(error)  # noqa: PT017 - many are no error
            refused += 1
    assert refused > 100


def test_a_library_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    table = turns([("a", 1.0), ("b", 2.0)])
    table.keys = ["a", "a"]
    table.save(tmp_path / "twice.arrow")
    with pytest.raises(ValueError, match=r"twice\.arrow: damaged"):
        AnchorTable.load(tmp_path / "twice.arrow")
    table = turns([("a", 1.0)])
    table.mean[0] = np.nan
    table.save(tmp_path / "nan.arrow")
    with pytest.raises(ValueError, match=r"nan\.arrow: damaged"):
        AnchorTable.load(tmp_path / "nan.arrow")


@pytest.mark.parametrize(
    ("save_to", "message"),
    [
        ("folder", r"AnchorLibrary\.save_to=.*folder: .*folder is a folder; give the name of a file"),
        (".", r"AnchorLibrary\.save_to=.* is a folder; give the name of a file"),
        ("file/x.arrow", r"AnchorLibrary\.save_to=.*x\.arrow: .*file is not a folder"),
        ("/proc/x.arrow", r"AnchorLibrary\.save_to=/proc/x\.arrow: cannot write in /proc: "),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_played(
    tmp_path: Path, save_to: str, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    library = AnchorLibrary(save_to=str(tmp_path / save_to))  # an absolute path stays what it is
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, [library], [0.5], epochs=1)
    assert len(library.table) == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        turns([("a", 1.0)]).save(tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_asking_for_the_place_makes_no_folder(tmp_path: Path) -> None:
    check_file(tmp_path / "a" / "b" / "file", "option")
    assert list(tmp_path.iterdir()) == []


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    def options() -> AnchorLibrary:
        return AnchorLibrary(reset_every=3, max_anchors=10)

    straight, resumed = options(), options()
    fit(tmp_path / "a", [straight, IterationCheckpoint()], [0.5], epochs=5)
    fit(tmp_path / "b", [options(), IterationCheckpoint()], [0.5], epochs=2)
    fit(tmp_path / "b", [resumed, IterationCheckpoint()], [0.5], epochs=5, ckpt_path="last")
    for name, value in straight.state_dict().items():
        other = resumed.state_dict()[name]
        assert value.equal(other) if torch.is_tensor(value) else value == other, name


def test_state_is_plain_and_keeps_odd_texts(tmp_path: Path) -> None:
    library = AnchorLibrary()
    library.table.merge(
        AnchorTable.of_turns(["", "é\n", "b"], [1.0, 2.0, 3.0], ["\0", "", "λ→"], ["", "s", "s"], 0, 80)
    )
    torch.save(library.state_dict(), tmp_path / "state")
    other = AnchorLibrary()
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert (other.table.keys, other.table.texts, other.table.stages) == (
        library.table.keys,
        ["\0", "", "λ→"],
        ["", "s", "s"],
    )
    assert rows(other.table) == rows(library.table)
