"""What the pages tell people to type exists, and links between them lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from flashdreams.plugins.registry import discover_runners

pytestmark = pytest.mark.ci_cpu

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("flashdreams/*.md"),
    *ROOT.glob("integrations/*/*.md"),
]
EXAMPLE_SLUGS = {"my-model"}


def commands() -> list[tuple[str, list[str]]]:
    """Every line of every bash block that calls uv, as (page, words after ``uv run`` and its own options)."""
    found = []
    for page in sorted(PAGES):
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words[:2] == ["uv", "run"]:
                    words = words[2:]
                    while words[0] in ("--extra", "--group"):
                        words = words[2:]
                if words:
                    found.append((page.relative_to(ROOT).as_posix(), words))
    return found


def run(*command: str) -> str:
    outcome = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


@cache
def help_of(slug: str | None) -> str:
    return run("flashdreams.scripts.run", *([slug] if slug else []), "--help")


def test_the_readme_has_the_commands_that_do_everything() -> None:
    readme = [words for page, words in commands() if page == "README.md"]
    assert ["pip", "install", "uv"] in readme
    assert ["pytest", "-n", "auto", "-m", "ci_cpu"] in readme
    assert any(words[:2] == ["flashdreams-run", "tiny-world"] for words in readme)


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_command_of_the_pages_exists(page: str, words: list[str]) -> None:
    program, *arguments = words
    if program == "python" and arguments[0] == "-m":
        assert find_spec(arguments[1]) is not None
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    elif program not in ("pip", "bash", "git", "sphinx-build"):  # the last is in the docs group
        assert shutil.which(program, path=Path(sys.executable).parent.as_posix()), f"{page} calls {program}"
    for word in arguments:
        if word.startswith("tests/") or re.match(r"integrations/\w+/tests/", word):
            assert list(ROOT.glob(word)), f"{page} names {word}"
    if program == "flashdreams-run":
        slug = next((word for word in arguments[:1] if not word.startswith("-")), None)
        if slug in EXAMPLE_SLUGS:
            return
        assert slug is None or slug in discover_runners()
        flags = set(re.findall(r"--[a-z-]+", help_of(slug)))
        arguments = [word for word in arguments if not word.startswith("--pipeline.")]  # of --help-all
        assert {word for word in arguments if word.startswith("--")} <= flags | {"--help"}, f"{page}: {words}"


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"
