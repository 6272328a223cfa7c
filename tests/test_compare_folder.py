"""Which runs a comparison's folder holds."""

from __future__ import annotations

from pathlib import Path

from gigpo_lightning.compare.folder import begun_runs


def test_runs_come_in_the_order_of_variants_and_seeds_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("b/seed_10", "b/seed_9", "a/seed_0", "a/seed_0 (copy)", "a/seed_old", "c/seed_1"):
        (tmp_path / name).mkdir(parents=True)
    assert [str(run) for run in begun_runs(tmp_path, ["b", "a"], [])] == ["b seed 9", "b seed 10", "a seed 0"]
    (only,) = begun_runs(tmp_path, ["b", "a"], [10, 3])
    assert only.folder == tmp_path / "b/seed_10"
