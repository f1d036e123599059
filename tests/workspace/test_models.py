"""Every slug of the workspace: a description, a card that names it, and a licence that is said."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from flashdreams.plugins.registry import get_runner

pytestmark = pytest.mark.ci_cpu

ROOT = Path(__file__).resolve().parents[2]
CARDS = {path.stem: path.read_text() for path in (ROOT / "docs" / "models").glob("*.md")}


def slugs() -> list[tuple[str, str]]:
    """Each slug and the member that brings it, from the members' own files."""
    found = []
    for project in sorted(ROOT.glob("integrations/*/pyproject.toml")):
        table = tomllib.loads(project.read_text())["project"]["entry-points"]["flashdreams.runner_configs"]
        found += [(slug, project.parent.name) for slug in table]
    return found


@pytest.mark.parametrize(("slug", "member"), slugs())
def test_a_slug_is_described_and_has_a_card_with_its_licence(slug: str, member: str) -> None:
    runner = get_runner(slug)
    assert runner.runner_name == slug
    assert 20 < len(runner.description) < 140
    card = CARDS[member]
    assert slug in card
    licence = re.search(r"licen[cs]e.{0,400}?(Apache-2\.0|MIT|CC BY-NC-SA)", card, re.IGNORECASE | re.DOTALL)
    assert licence, f"docs/models/{member}.md says nothing of a licence"
    if member != "tiny_world":
        assert "licence: " in runner.description
    if "NC" in runner.description:
        assert re.search(r"non-?commercial", runner.description), "said before anything is downloaded"


def test_the_index_leads_to_every_card() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert {name for name in CARDS if f"models/{name}" in index} == set(CARDS)
