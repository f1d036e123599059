"""Lists and help pages: complete, quick because torch stays out, and not spoiled by a broken plugin."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def many(plugins):
    """Twenty plugins, half of them installed; one more is broken, one more imports torch."""
    for number in range(19):
        plugins.add(f"fake{number}")
        if number % 2:
            plugins.install(f"fake{number}")
    plugins.add("broken", "import no_such_module_anywhere")
    plugins.add("heavy", "import torch")
    return ["fake", *(f"fake{number}" for number in range(19))]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_overview_lists_every_runner_with_its_description(many, elsewhere, words):
    result = elsewhere(*words)
    assert result.code == 0
    for slug in many:
        assert re.search(rf"^  {slug} +The fake called {slug}\.$", result.out, re.MULTILINE)
    broken, heavy, imported = result.err.splitlines()
    assert broken == (
        "warning: plugin 'broken' (plugin_broken:R) cannot be used: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )
    assert heavy == "warning: plugin 'heavy' (plugin_heavy:R) imports torch, so it is listed without description"
    assert "\n  heavy\n" in result.out and "broken" not in result.out
    assert imported == "imported:"


def test_flashdreams_list_says_the_same_also_as_json(many, elsewhere, tools):
    table, data = elsewhere("list", program=tools), elsewhere("list", "--json", program=tools)
    assert table.code == data.code == 0
    assert table.err.endswith("imported:\n") and data.err.endswith("imported:\n")
    listed = {runner["slug"]: runner for runner in json.loads(data.out)["runners"]}
    assert {*many, "heavy", "tiny-world"} <= listed.keys() and "broken" not in listed
    assert all(slug in table.out for slug in listed)
    assert listed["fake1"] == {
        "slug": "fake1",
        "description": "The fake called fake1.",
        "config": "plugin_fake1:R",
        "source": "plugin-fake1 1.0",
    }
    assert listed["heavy"]["description"] == ""


def test_post_processors_have_a_section_of_their_own(plugins, elsewhere, tools, monkeypatch):
    (plugins.folder / "doublers.py").write_text(
        "from flashdreams.infra.postprocess import PostprocessorConfig\n"
        "TWICE = PostprocessorConfig(name='twice', description='Everything twice.')\n"
    )
    monkeypatch.setenv("FLASHDREAMS_POSTPROCESSORS", "twice=doublers:TWICE,broken=no_such_module:X")
    table, data = elsewhere("list", program=tools), elsewhere("list", "--json", program=tools)
    runners, postprocessors = table.out.split("\nPost-processors, for --postprocess NAME:\n")
    assert re.search(r"^  twice +Everything twice\.$", postprocessors, re.MULTILINE)
    assert re.search("^  fake +The fake", runners, re.MULTILINE) and "fake" not in postprocessors
    warning = "warning: plugin 'broken' (no_such_module:X) cannot be used: ModuleNotFoundError: No module named"
    assert table.err.count(warning) == data.err.count(warning) == 1
    assert table.err.endswith("imported:\n") and data.err.endswith("imported:\n")
    listed = {each["slug"]: each for each in json.loads(data.out)["postprocessors"]}
    assert "broken" not in listed
    assert listed["twice"] == {
        "slug": "twice",
        "description": "Everything twice.",
        "config": "doublers:TWICE",
        "source": "FLASHDREAMS_POSTPROCESSORS",
    }


def test_the_help_of_a_runner_imports_no_other_plugin(many, elsewhere):
    result = elsewhere("fake3", "--help")
    assert (result.code, result.err) == (0, "imported:\n")


def test_the_config_of_a_runner_is_printed_without_torch(many, elsewhere):
    result = elsewhere("--no-instantiate", "fake3", "--seed", "3")
    assert result.code == 0
    assert result.err == "imported: tyro yaml\n"
    assert "runner_name: fake3\n" in result.out and "seed: 3\n" in result.out


def test_the_help_of_a_runner_whose_config_imports_torch_works_with_one_warning(plugins, elsewhere):
    plugins.fake_torch()
    plugins.add("heavy", "import torch")
    result = elsewhere("heavy", "--help")
    assert result.code == 0 and "The fake called heavy." in result.out
    warning, imported = result.err.splitlines()
    assert warning.startswith("warning: plugin 'heavy' imports torch in plugin_heavy") and "torch" in imported


def test_the_help_of_a_runner_fits_a_screen_with_the_model_last(here):
    text = here("fake", "--help").out
    lines = text.splitlines()
    assert len(lines) <= 55 and max(map(len, lines)) <= 100
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    nested = [flag.startswith("--pipeline") for flag in flags]
    assert nested == sorted(nested) and any(nested)
    assert flags.index("--prompt") < flags.index("--seed") < flags.index("--act") < flags.index("--config")
    assert "What the video shows" in text and "What the fake does" in text
    assert "--pipeline.diffusion-model.transformer.guidance-scale" in text
    for hidden in ("_target", "runner-name", "--description", "default-num-frames"):
        assert hidden not in text


def test_one_flag_further_every_field_is_explained(here):
    text = here("fake", "--help-all").out
    options = re.findall(r"^\W (--[\w.-]+)", text, re.MULTILINE)
    assert options.index("--preview") < options.index("--pipeline.height")
    assert "--pipeline.diffusion-model.transformer.network.patch-size" in options
    assert "Latent frames per chunk. (default: " in text
    assert "_target" not in text and "--pipeline.name" not in options


def test_the_list_of_nothing_says_what_to_do(monkeypatch, here, plugins):
    monkeypatch.setattr("importlib.metadata.distributions", list)
    plugins.entries.clear()
    result = here()
    assert result.code == 0 and "No runner is installed" in result.out


def test_tools_are_listed_and_the_nearest_is_named(here, tools):
    assert all(name in here(program=tools).out for name in ("run", "list"))
    assert here("--version", program=tools).out.strip().count(".") == 2
    wrong = here("lst", program=tools)
    assert (wrong.code, wrong.out, wrong.err) == (2, "", "error: there is no tool 'lst'; did you mean 'list'?\n")
    assert here("run", "fake", "--help", program=tools).out.startswith("usage: flashdreams run fake ")
    assert "--json" in here("list", "--help", program=tools).out
    assert here("list", "--jsn", program=tools).code == 2
