"""What must hold for the files of the repository, whatever they are about."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci_cpu

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [ROOT / "flashdreams/flashdreams", *(path.parent for path in ROOT.glob("integrations/*/*/__init__.py"))]
PACKAGES = [folder for folder in PACKAGES if folder.name != "tests"]

# Written in two halves, so that this file does not contain what it looks for.
HOSTS = ["pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "deb." + "debian.org", "download." + "pytorch.org"]
LOCAL_PATHS = ["/opt" + "/wheels", "/ro" + "ot/", "/work" + "/main", "/work" + "/shared"]
LARGEST_WEIGHTS = 12_000_000
LARGEST_TEXT = 400_000


def tracked_files() -> list[Path]:
    """Files that git has or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def public_modules() -> list[Path]:
    return [path for folder in PACKAGES for path in sorted(folder.rglob("*.py"))]


@pytest.mark.parametrize("word", [*HOSTS, *LOCAL_PATHS])
def test_no_file_names_a_registry_host_or_a_folder_of_one_machine(word: str) -> None:
    found = [path.relative_to(ROOT).as_posix() for path in tracked_files() if word.encode() in path.read_bytes()]
    assert found == []


def test_the_lock_of_uv_is_not_tracked() -> None:
    assert ROOT / "uv.lock" not in tracked_files()


def test_files_stay_small() -> None:
    for path in tracked_files():
        limit = (
            LARGEST_WEIGHTS
            if path.suffix == ".safetensors"
            else LARGEST_TEXT
            if path.suffix in {".py", ".md"}
            else None
        )
        size = path.stat().st_size
        assert limit is None or size <= limit, f"{path.relative_to(ROOT)} has {size:,} bytes; at most {limit:,}"


def test_weights_in_one_package_stay_under_the_limit() -> None:
    for folder in PACKAGES:
        weights = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        assert weights <= LARGEST_WEIGHTS, (
            f"the weights of {folder.name} are {weights:,} bytes; at most {LARGEST_WEIGHTS:,}"
        )


@pytest.mark.parametrize("path", public_modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no docstring"


def test_no_source_file_is_two_ideas_long() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): n for path in public_modules() if (n := path.read_text().count("\n")) > 400
    }
    assert long == {}


def test_in_tree_versions_equal_the_runtime(tmp_path: Path) -> None:
    check = [sys.executable, ROOT / ".ci/sync_version.py", "--check"]
    outcome = subprocess.run(check, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout


def test_sync_version_finds_and_mends_a_stale_version(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/sync_version.py").write_text((ROOT / ".ci/sync_version.py").read_text())
    (tmp_path / "flashdreams/flashdreams").mkdir(parents=True)
    (tmp_path / "flashdreams/flashdreams/_version.py").write_text('__version__ = "9.8.7"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "9.8.7"\n')
    (tmp_path / "integrations/old").mkdir(parents=True)
    stale = tmp_path / "integrations/old/pyproject.toml"
    stale.write_text('[project]\nversion = "0.1.0"\n')

    def sync(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, tmp_path / ".ci/sync_version.py", *flags], capture_output=True, text=True
        )

    checked = sync("--check")
    assert checked.returncode == 1
    assert "integrations/old/pyproject.toml says 0.1.0, flashdreams is 9.8.7" in checked.stdout
    assert "0.1.0" in stale.read_text()
    assert sync().returncode == 1
    assert 'version = "9.8.7"' in stale.read_text()
    assert sync("--check").returncode == 0
