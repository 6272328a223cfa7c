"""What is installed: dependencies that exclude the bad and are pinned, data files in the wheel, one version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import gigpo_lightning

ROOT = Path(gigpo_lightning.__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the source checkout")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def requirements(section: str) -> list[Requirement]:
    """The requirements of a list in pyproject.toml, e.g. `dependencies` (without tomllib, which 3.10 lacks)."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(rf"^{section} = \[(.*?)\n?\](?: #.*)?$", text, re.MULTILINE | re.DOTALL)
    assert block, section
    lines = [line.strip() for line in block[1].splitlines() if not line.strip().startswith("#")]
    return [Requirement(match) for line in lines for match in re.findall(r'^"([^"]+)"', line)]


def pins(python: str) -> dict[str, str]:
    """Package → version that constraints.txt sets for a Python version."""
    environment = {"python_version": python, "python_full_version": f"{python}.1"}
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(environment):
            assert pin.name not in found, f"{pin.name} is pinned twice for Python {python}"
            (specifier,) = pin.specifier
            assert specifier.operator == "==", line
            found[pin.name] = specifier.version
    return found


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_the_malicious_releases_of_lightning_are_excluded(name: str) -> None:
    """2.6.2 and 2.6.3; the package exists under two names."""
    (requirement,) = [r for r in requirements("dependencies") if r.name == name]
    allowed = [version for version in ("2.6.1", "2.6.2", "2.6.3", "2.6.6") if requirement.specifier.contains(version)]
    assert allowed == ["2.6.1", "2.6.6"]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("section", ["dependencies", "test", "textworld", "plots", "compare"])
def test_every_requirement_is_pinned_to_a_version_that_it_allows(section: str, python: str) -> None:
    tested = pins(python)
    wanted = requirements(section)
    assert wanted
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": python}):
            continue
        assert requirement.name in tested or requirement.name.lower() in tested, requirement
        version = tested.get(requirement.name, tested.get(requirement.name.lower(), ""))
        assert requirement.specifier.contains(version), f"{requirement} but {version} is pinned"
        lower = [specifier for specifier in requirement.specifier if specifier.operator in (">=", "==")]
        assert lower, f"{requirement} has no lower bound"


def test_the_stock_engine_is_not_asked_for_where_it_does_not_run() -> None:
    for requirement in requirements("textworld"):
        assert requirement.marker is not None
        assert requirement.marker.evaluate({"python_version": "3.12"})
        assert not requirement.marker.evaluate({"python_version": "3.13"})


def test_every_dependency_says_what_needs_it() -> None:
    """A comment on the line of the dependency or on the one before it."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    begin = lines.index("dependencies = [")
    block = lines[begin : lines.index("]", begin)]
    for number, line in enumerate(block):
        if line.strip().startswith('"'):
            assert "#" in line or block[number - 1].strip().startswith("#"), line


def test_the_version_is_one() -> None:
    assert Version(gigpo_lightning.__version__) >= Version("0.1")
    assert f"## {gigpo_lightning.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_names_are_loaded_on_first_use() -> None:
    code = "import sys, gigpo_lightning as g; assert 'torch' not in sys.modules; g.GiGPOModule; g.RolloutDataModule"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gigpo_lightning.nothing  # noqa: B018


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy of what belongs to it."""
    pytest.importorskip("hatchling")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("gigpo_lightning", "configs", "curricula"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    code = f"import hatchling.build as b; print(b.build_wheel({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.split()[-1]


def test_the_wheel_carries_configurations_curricula_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [path for kind in ("configs", "curricula") for path in (ROOT / kind).rglob("*.yaml")]
    assert shipped
    assert {f"gigpo_lightning/{path.relative_to(ROOT)}" for path in shipped} <= names
    assert "gigpo_lightning/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_an_installed_package_finds_its_files_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    """The wheel unpacked into a folder of its own, as pip does it."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import gigpo_lightning.resources as r, gigpo_lightning.curriculum as c\n"
        f"assert r.find_file('configs', 'alfworld').is_relative_to({str(site)!r})\n"
        f"assert r.find_file('curricula', 'alfworld.yaml').is_relative_to({str(site)!r})\n"
        "assert len(c.load_stages('alfworld.yaml')) > 1\n"
    )
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"], check=True, cwd=elsewhere
    )
