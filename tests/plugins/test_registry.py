"""The registry: finds every runner without importing it, and a broken plugin hides no other."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from flashdreams.config import ConfigError
from flashdreams.plugins import API_VERSION
from flashdreams.plugins.guard import without_torch
from flashdreams.plugins.registry import (
    ENTRY_POINT_GROUP,
    ENV_VAR,
    PluginError,
    PluginWarning,
    discover_postprocessors,
    discover_runners,
    get_postprocessor,
    get_runner,
)

pytestmark = pytest.mark.ci_cpu

PLUGIN = """
from flashdreams.recipes.template.config import RUNNER_TEMPLATE
from flashdreams.config import derive_config
def runner(slug):
    return derive_config(RUNNER_TEMPLATE, runner_name=slug, description=f"this is {slug}", pipeline={"name": slug})
"""


class Site:
    """A folder of installed modules and distributions, and the environment variable."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = monkeypatch
        self.patch.syspath_prepend(str(folder))
        self.patch.setattr(importlib.metadata, "distributions", self._distributions)
        self.patch.delenv(ENV_VAR, raising=False)
        self.patch.delenv("FLASHDREAMS_POSTPROCESSORS", raising=False)

    def _distributions(self) -> list[importlib.metadata.Distribution]:
        return [importlib.metadata.PathDistribution(path) for path in sorted(self.folder.glob("*.dist-info"))]

    def module(self, name: str, body: str) -> str:
        (self.folder / f"{name}.py").write_text(PLUGIN + textwrap.dedent(body))
        self.patch.delitem(sys.modules, name, raising=False)
        return name

    def distribution(self, name: str, points: str, requires: str = "flashdreams") -> None:
        info = self.folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n"
        )
        (info / "entry_points.txt").write_text(points if "[" in points else f"[{ENTRY_POINT_GROUP}]\n{points}\n")

    def environ(self, text: str) -> None:
        self.patch.setenv(ENV_VAR, text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_finds_slugs_of_both_sources_and_imports_only_the_one_that_is_asked_for(site: Site) -> None:
    site.module("plug_a", "R = runner('a')")
    site.module("plug_b", "CONFIGS = {'b': runner('b'), 'c': runner('c')}")
    site.module("plug_d", "class holder: R = runner('d')")
    site.distribution("dist-b", "b = plug_b:CONFIGS\nc = plug_b:CONFIGS")
    site.environ("a=plug_a:R, d = plug_d:holder.R ,")
    runners = discover_runners()
    assert list(runners) == ["a", "b", "c", "d"]
    assert not {"plug_a", "plug_b", "plug_d"} & sys.modules.keys()
    assert (runners["a"].source, runners["c"].source) == (ENV_VAR, "dist-b 1.0")
    assert runners["c"].load().runner_name == "c"
    assert not {"plug_a", "plug_d"} & sys.modules.keys()
    assert get_runner("d").runner_name == "d"
    assert runners["a"].description() == "this is a"


@pytest.mark.parametrize(
    ("body", "reference", "cause"),
    [
        ("import no_such_module_anywhere", ":R", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("1 / 0", ":R", "ZeroDivisionError"),
        ("syntax error", ":R", "SyntaxError"),
        ("raise SystemExit(3)", ":R", "SystemExit: 3"),
        ("R = runner('b')", ":Q", "AttributeError"),
        ("R = 3", ":R", "it is a int; expected a RunnerConfig"),
        ("R = type(runner('b'))", ":R", "it is a type; expected a RunnerConfig"),
        ("R = runner('other')", ":R", "its runner_name is 'other'"),
        ("R = {'x': runner('x')}", ":R", "the mapping has no 'b', only 'x'"),
        ("R = {}", ":R", "the mapping has no 'b', only nothing"),
        ("raise ValueError('two\\nlines')", ":R", "ValueError: two lines"),
        ("raise ValueError('long ' * 1000)", ":R", "ValueError: long long"),
        ("", "", "slug=module:attr"),
        ("", ":", "slug=module:attr"),
    ],
)
def test_a_broken_plugin_is_one_line_that_names_it(site: Site, body: str, reference: str, cause: str) -> None:
    site.module("plug_b", body)
    site.environ(f"b=plug_b{reference},a=plug_a:R")
    site.module("plug_a", "R = runner('a')")
    with pytest.raises(PluginError) as caught:
        get_runner("b")
    message = str(caught.value)
    assert message.startswith(f"plugin 'b' (plug_b{reference}) cannot be used: ")
    assert cause in message and "\n" not in message and len(message) <= 500
    assert isinstance(caught.value, ConfigError)
    assert get_runner("a").runner_name == "a"


@pytest.mark.parametrize(
    "entry", ["a", "=plug:R", "a=", "a=plug", "a=:R", "a=plug:", "a=plug:R:Q", "a=b=c", "a=../x:R"]
)
def test_a_malformed_entry_of_the_variable_is_told_when_asked_for(site: Site, entry: str) -> None:
    site.environ(entry)
    (runner,) = discover_runners().values()
    with pytest.raises(PluginError, match=f"{ENV_VAR} must name it as slug=module:attr"):
        runner.load()


def test_an_unreadable_distribution_hides_no_other(site: Site) -> None:
    site.distribution("bad-bytes", "x")
    (site.folder / "bad-bytes-1.0.dist-info/entry_points.txt").write_bytes(b"\xff" + ENTRY_POINT_GROUP.encode())
    site.distribution("bad-lines", "no equals sign here")
    site.distribution("good", "a = plug_a:R")
    with pytest.warns(PluginWarning) as caught:
        assert list(discover_runners()) == ["a"]
    assert len(caught) == 2


def test_other_groups_of_a_distribution_are_left_alone(site: Site) -> None:
    site.distribution("both", f"[{ENTRY_POINT_GROUP}]\na = plug_a:R\n[console_scripts]\nb = plug_b:main\n")
    assert list(discover_runners()) == ["a"]


def test_the_variable_goes_before_entry_points_and_says_so(site: Site) -> None:
    site.module("plug_new", "R = runner('a')")
    site.distribution("old", "a = plug_old:R")
    site.environ("a=plug_new:R")
    with pytest.warns(PluginWarning) as caught:
        assert get_runner("a").runner_name == "a"
    (warning,) = caught
    assert "plug_new:R" in str(warning.message) and "plug_old:R (old 1.0) is not" in str(warning.message)


def test_two_entry_points_of_one_name_are_named_both(site: Site) -> None:
    site.module("plug_1", "R = runner('a')")
    site.distribution("dist-1", "a = plug_1:R")
    site.distribution("dist-2", "a = plug_2:R")
    with pytest.warns(PluginWarning, match=r"plug_1:R \(dist-1 1\.0\) is used, plug_2:R \(dist-2 1\.0\) is not"):
        get_runner("a")


def test_a_duplicate_is_not_mentioned_when_another_runner_is_asked_for(site: Site) -> None:
    site.module("plug_b", "R = runner('b')")
    site.environ("a=plug_1:R,a=plug_2:R,b=plug_b:R")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_runner("b")


class TestPostprocessors:
    """Found like runners, in a group and by a variable of their own."""

    body = """
from flashdreams.infra.postprocess import PostprocessorConfig
ALL = {name: PostprocessorConfig(name=name, description=f"this is {name}") for name in ("x2", "x4")}
ONE = PostprocessorConfig(name="x3", description="this is x3")
"""

    def test_of_both_sources(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        site.module("plug_p", self.body)
        site.module("plug_a", "R = runner('a')")
        points = "[flashdreams.postprocessors]\nx2 = plug_p:ALL\nx4 = plug_p:ALL\n"
        site.distribution("dist-p", f"{points}[{ENTRY_POINT_GROUP}]\na = plug_a:R\n")
        monkeypatch.setenv("FLASHDREAMS_POSTPROCESSORS", "x3=plug_p:ONE")
        found = discover_postprocessors()
        assert list(found) == ["x2", "x3", "x4"] and "plug_p" not in sys.modules
        assert list(discover_runners()) == ["a"]
        assert get_postprocessor("x4").description == found["x4"].description() == "this is x4"
        assert get_postprocessor("x3").name == "x3"

    def test_an_unknown_one_names_the_nearest(self, site: Site) -> None:
        site.distribution("dist-p", "[flashdreams.postprocessors]\nupscale-x2 = plug_p:ALL\n")
        with pytest.raises(PluginError, match=r"no post-processor 'upscale-x4'; did you mean 'upscale-x2'\?"):
            get_postprocessor("upscale-x4")

    def test_one_kind_is_not_taken_for_the_other(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        site.module("plug_p", self.body)
        site.environ("x3=plug_p:ONE")
        with pytest.raises(PluginError, match="it is a PostprocessorConfig; expected a RunnerConfig"):
            get_runner("x3")
        site.module("plug_a", "R = runner('a')")
        monkeypatch.setenv("FLASHDREAMS_POSTPROCESSORS", "a=plug_a:R")
        with pytest.raises(PluginError, match="it is a RunnerConfig; expected a PostprocessorConfig"):
            get_postprocessor("a")


def test_an_unknown_slug_names_the_nearest(site: Site) -> None:
    site.environ("tiny-world=x:R,self-forcing=y:R")
    with pytest.raises(PluginError, match=r"no runner 'tinyworld'; did you mean 'tiny-world'\?"):
        get_runner("tinyworld")
    with pytest.raises(PluginError, match="there are self-forcing, tiny-world"):
        get_runner("zzz")
    site.environ("")
    with pytest.raises(PluginError, match="none is installed"):
        get_runner("zzz")


class TestOtherVersions:
    """A plugin made for another major version of the API is named as such."""

    expected = f"made for API {API_VERSION + 1}, this flashdreams speaks {API_VERSION}"

    def test_declared_by_a_module_that_loads(self, site: Site) -> None:
        site.module("plug_a", f"FLASHDREAMS_API = {API_VERSION + 1}\nR = runner('a')")
        site.environ("a=plug_a:R")
        with pytest.raises(PluginError, match=self.expected):
            get_runner("a")

    @pytest.mark.parametrize("declaration", ["FLASHDREAMS_API = {}", "FLASHDREAMS_API: int = {}"])
    def test_declared_by_a_module_that_fails(self, site: Site, declaration: str) -> None:
        body = f"from flashdreams.config import NotInvented\n{declaration.format(API_VERSION + 1)}\n"
        site.module("plug_a", body)
        site.environ("a=plug_a:R")
        with pytest.raises(PluginError, match=f"{self.expected}.*NotInvented"):
            get_runner("a")

    def test_required_by_a_distribution_whose_module_fails(self, site: Site) -> None:
        site.module("plug_a", "from flashdreams.config import NotInvented")
        site.distribution("later", "a = plug_a:R", requires="FlashDreams>=2,<3")
        with pytest.raises(PluginError, match=rf"made for flashdreams<3,>=2, this is .*API {API_VERSION}.*NotInvented"):
            get_runner("a")

    def test_this_version_is_not_mentioned(self, site: Site) -> None:
        site.module("plug_a", f"FLASHDREAMS_API = {API_VERSION}\n1 / 0")
        site.distribution("now", "a = plug_a:R", requires="flashdreams>=0.0.1")
        with pytest.raises(PluginError) as caught:
            get_runner("a")
        assert "made for" not in str(caught.value)


def test_what_a_plugin_prints_does_not_reach_stdout(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.module("plug_a", "print('hello')\nR = runner('a')")
    site.environ("a=plug_a:R")
    get_runner("a")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_the_guard_refuses_torch_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    before = list(sys.meta_path)
    with without_torch() as guard:
        import json  # noqa: F401 - others pass

        assert not guard.asked
        with pytest.raises(ImportError, match="torch is not imported"):
            import torch  # noqa: F401
        assert guard.asked
    assert sys.meta_path == before


def test_the_guard_does_nothing_once_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    before = list(sys.meta_path)
    with without_torch():
        assert sys.meta_path == before
