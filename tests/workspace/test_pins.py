"""The pins, requirements.lock and the members' dependencies say the same thing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.ci_cpu

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = [ROOT, ROOT / "flashdreams", *(path.parent for path in sorted(ROOT.glob("integrations/*/pyproject.toml")))]
REFRESH = "run `python .ci/lock.py` and commit pyproject.toml and requirements.lock together"


def project(member: Path) -> dict:
    return tomllib.loads((member / "pyproject.toml").read_text())


def read_pins() -> dict[str, str]:
    entries = project(ROOT)["tool"]["uv"]["constraint-dependencies"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", entry) for entry in entries), "a pin is exactly name==version"
    names = [canonicalize_name(entry.split("==")[0]) for entry in entries]
    assert len(set(names)) == len(names), "one pin for each package"
    return dict(zip(names, (entry.split("==")[1] for entry in entries)))


def read_lock() -> dict[str, str]:
    text = (ROOT / "requirements.lock").read_text()
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    assert len(dict(found)) == len(found), "one version for each package"
    return {canonicalize_name(name): version for name, version in found}


def test_lock_and_pins_hold_the_same_versions() -> None:
    assert read_lock() == read_pins(), REFRESH


def test_every_entry_of_the_lock_has_a_hash_and_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(read_pins())
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text


def test_pins_satisfy_what_the_members_ask_for() -> None:
    pins = read_pins()
    members = {canonicalize_name(project(member)["project"]["name"]) for member in MEMBERS}
    for member in MEMBERS:
        table = project(member)
        asked = list(table["project"]["dependencies"])
        for group in (
            *table["project"].get("optional-dependencies", {}).values(),
            *table.get("dependency-groups", {}).values(),
        ):
            asked += group
        for requirement in map(Requirement, asked):
            name = canonicalize_name(requirement.name)
            if name not in members:
                assert name in pins, f"{name} of {member.name} has no pin; {REFRESH}"
                assert requirement.specifier.contains(Version(pins[name])), (
                    f"pin {name}=={pins[name]} is not {requirement}"
                )


def test_every_member_is_installed_by_a_plain_uv_run() -> None:
    root = project(ROOT)
    dependencies = {canonicalize_name(Requirement(text).name) for text in root["project"]["dependencies"]}
    for member in MEMBERS[1:]:
        name = project(member)["project"]["name"]
        assert name in dependencies, f"list {name} in the dependencies of the root pyproject.toml"
        assert root["tool"]["uv"]["sources"][name] == {"workspace": True}
        assert "dev" in project(member)["project"]["optional-dependencies"], f"{name} needs a `dev` extra"
