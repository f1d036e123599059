"""From a command line to a run: where it starts from, how it ends, what each ending returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashdreams.config import apply_yaml, to_dict
from flashdreams.plugins.registry import ENV_VAR, get_runner

pytestmark = pytest.mark.ci_cpu


def refused(result, *expected: str) -> None:
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    for text in expected:
        assert text in result.err


def test_a_plugin_in_development_runs(here):
    result = here("fake", "--prompt", "hello", "--output", "a.txt")
    assert (result.code, result.out, result.err) == (0, "", "")
    assert "prompt='hello'" in Path("a.txt").read_text()


def test_an_installed_plugin_runs_from_both_programs_without_torch(plugins, elsewhere, tools, tmp_path):
    plugins.install("fake")
    assert plugins.variable == ""
    for name, words, program in (("a", [], None), ("b", ["run"], tools)):
        extra = {} if program is None else {"program": program}
        result = elsewhere(*words, "fake", "--prompt", name, "--output", tmp_path / name, **extra)
        assert (result.code, result.err) == (0, "imported: tyro\n")
        assert f"prompt='{name}'" in (tmp_path / name).read_text()


def test_a_plugin_whose_config_imports_torch_runs_with_one_warning(plugins, elsewhere, tmp_path):
    plugins.fake_torch()
    plugins.add("heavy", "import torch")
    result = elsewhere("heavy", "--output", tmp_path / "a")
    assert result.code == 0 and (tmp_path / "a").exists()
    assert result.err.count("warning: ") == 1 and "imports torch in plugin_heavy" in result.err


@pytest.mark.parametrize(
    ("act", "code", "message"),
    [("refuse", 2, "error: the fake refuses\n"), ("misconfigure", 2, "error: the fake is misconfigured\n"),
     ("interrupt", 130, "interrupted\n")],
)  # fmt: skip
def test_endings_and_their_exit_codes(here, act, code, message):
    result = here("fake", "--act", act, "--output", "a.txt")
    assert (result.code, result.err) == (code, message)
    assert Path("a.txt").exists() == (act == "interrupt")


@pytest.mark.parametrize("act", ["crash", "lose-reader"])
def test_a_fault_of_the_program_keeps_its_traceback(here, act):
    with pytest.raises((RuntimeError, BrokenPipeError)):
        here("fake", "--act", act)


@pytest.mark.parametrize(
    "words", [["list"], ["run"], ["run", "fake", "--no-instantiate"], ["run", "fake", "--help-all"]]
)
def test_a_reader_that_leaves_is_no_error(plugins, monkeypatch, words):
    monkeypatch.setenv(ENV_VAR, plugins.variable)
    monkeypatch.setenv("PYTHONPATH", str(plugins.folder), prepend=os.pathsep)
    command = [sys.executable, "-m", "flashdreams.scripts.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


class TestMistakes:
    def test_an_unknown_slug_names_the_nearest(self, here):
        refused(here("fak", "--seed", "1"), "no runner 'fak'", "'fake'")

    def test_a_broken_plugin_is_an_error_when_it_is_asked_for(self, here, plugins):
        plugins.add("broken", "1 / 0")
        refused(here("broken", "--help"), "'broken'", "plugin_broken:R", "ZeroDivisionError")
        assert here("fake", "--output", "a").code == 0

    def test_an_unknown_flag_names_the_nearest(self, here):
        refused(here("fake", "--promt", "x"), "--promt", "'--prompt'")

    def test_flags_without_a_slug(self, here):
        refused(here("--seed", "3", "fake"), "which runner?")
        refused(here("--no-instantiate"), "which runner?")

    @pytest.mark.parametrize("scale", ["-1", "nan"])
    @pytest.mark.parametrize("name", ["guidance-scale", "pipeline.diffusion-model.transformer.guidance-scale"])
    def test_b09_guidance_is_finite_and_not_negative(self, here, name, scale):
        refused(here("fake", f"--{name}", scale), scale)
        nested = "pipeline: {diffusion_model: {transformer: {guidance_scale: %s}}}"
        Path("c.yaml").write_text((nested if "." in name else "guidance_scale: %s") % scale)
        refused(here("fake", "--config", "c.yaml"), scale)

    @pytest.mark.parametrize("seed", ["-1", "18446744073709551616", "1e3", "0x10", "true", "'7'"])
    def test_b10_a_seed_of_a_file_is_held_to_the_same_range(self, here, seed):
        Path("c.yaml").write_text(f"seed: {seed}")
        refused(here("fake", "--config", "c.yaml", "--no-instantiate"), "seed is ")

    def test_words_that_are_no_text(self, here):
        refused(here("fake", "--prompt", "\udcff"), "not valid UTF-8")

    def test_a_config_that_does_not_hold_together(self, here):
        refused(here("fake", "--pipeline.diffusion-model.transformer.len-t", "0", "--no-instantiate"), "len_t=0")

    @pytest.mark.parametrize("flag", ["--config", "--replay"])
    def test_files_that_cannot_be_read(self, here, flag):
        Path("bytes").write_bytes(b"\xff\xfe")
        for name in ("missing", ".", "bytes", "nul\0"):
            refused(here("fake", flag, name), flag)
        refused(here("fake", f"{flag}="), f"{flag} needs the name of a file")
        refused(here("fake", flag), f"{flag} needs the name of a file")
        refused(here("fake", flag, "--seed", "1"), f"{flag} needs the name of a file")
        refused(here("fake", flag, "bytes", flag, "bytes"), f"{flag} is given twice")

    def test_both_files(self, here):
        refused(here("fake", "--config", "a", "--replay", "b"), "one of them")


class TestConfigFile:
    def test_what_is_printed_makes_the_same_config_again(self, here):
        words = ["--seed", "9007199254740993", "--prompt", "a: 'b' #c\n", "--guidance-scale", "1e-7", "--fps", "24"]
        first = here("fake", *words, "--no-instantiate")
        assert first.code == 0 and not Path("outputs").exists()
        Path("c.yaml").write_text(first.out)
        assert here("--config", "c.yaml", "fake", "--no-instantiate").out == first.out
        config = apply_yaml(get_runner("fake"), first.out)
        assert (config.seed, config.prompt, config.guidance_scale) == (9007199254740993, "a: 'b' #c\n", 1e-7)

    @pytest.mark.parametrize("line", [["--no-instantiate", "fake"], ["fake", "--no-instantiate", "--seed", "3"],
                                      ["fake", "--seed", "3", "--no_instantiate"]])  # fmt: skip
    def test_the_switch_may_stand_anywhere(self, here, line):
        assert here(*line).out.startswith("runner_name: fake\n")

    def test_flags_go_before_the_file(self, here):
        Path("c.yaml").write_text("seed: 1\nprompt: from the file\n")
        text = here("fake", "--seed", "2", "--config=c.yaml", "--no-instantiate").out
        assert "\nseed: 2\n" in text and "\nprompt: from the file\n" in text

    @pytest.mark.parametrize(
        "text",
        ["_target: os:system", "pipeline: {_target: os:system}", "pipeline: !!python/object/apply:os.system [touch x]",
         "pipeline: {diffusion_model: {transformer: {network: {_target: 'os:system'}}}}"],
    )  # fmt: skip
    def test_a_file_cannot_name_classes(self, here, text):
        Path("c.yaml").write_text(text)
        refused(here("fake", "--config", "c.yaml"), "--config c.yaml: ")
        assert [path.name for path in Path().iterdir()] == ["c.yaml"]

    def test_text_beyond_ascii_is_utf_8_whatever_the_terminal_speaks(self, plugins, monkeypatch):
        monkeypatch.setenv("PYTHONIOENCODING", "ascii")
        monkeypatch.setenv(ENV_VAR, plugins.variable)
        monkeypatch.setenv("PYTHONPATH", str(plugins.folder), prepend=os.pathsep)
        command = [sys.executable, "-m", "flashdreams.scripts.run", "fake", "--prompt", "ein Vögelchen 鳥"]
        done = subprocess.run([*command, "--no-instantiate"], capture_output=True, check=True)
        assert "prompt: ein Vögelchen 鳥\n" in done.stdout.decode()
        assert subprocess.run([*command, "--help"], capture_output=True).returncode == 0

    def test_a_file_of_another_runner(self, here, plugins):
        plugins.add("other")
        Path("c.yaml").write_text(here("other", "--no-instantiate").out)
        refused(here("fake", "--config", "c.yaml"), "'other'", "'fake'")

    def test_an_unknown_key_names_the_nearest(self, here):
        Path("c.yaml").write_text("pipeline: {hight: 3}")
        refused(here("fake", "--config", "c.yaml"), "pipeline.hight", "'height'")


class TestReplay:
    @pytest.fixture
    def record(self, here):
        """A record of the fake, in a folder of its own; changes are made to it before it is written."""

        def write(**changes) -> Path:
            here("fake", "--help")
            record = {
                "slug": "fake",
                "config": to_dict(get_runner("fake")),
                "seed": 9007199254740993,
                "environment": {},
            }
            Path("runs").mkdir(exist_ok=True)
            Path("runs/a.json").write_text(json.dumps(record | changes))
            return Path("runs/a.json")

        return write

    def test_config_and_seed_come_from_the_record_and_the_video_is_not_overwritten(self, here, record):
        config = to_dict(get_runner("fake")) | {"prompt": "recorded", "output": "runs/a.mp4"} if record() else {}
        text = here("--replay", record(config=config), "--no-instantiate").out
        assert "\nprompt: recorded\n" in text and "\nseed: 9007199254740993\n" in text
        assert "runs/a-replay.mp4" in text

    def test_flags_go_before_the_record(self, here, record):
        text = here("fake", "--replay", record(), "--output", "b.mp4", "--seed", "1", "--no-instantiate").out
        assert "\noutput: b.mp4\n" in text and "\nseed: 1\n" in text

    def test_what_differs_from_the_recorded_run_is_said(self, here, record):
        from flashdreams.infra.record import environment

        now = environment("cpu") | {"torch": "0.1"}
        config = to_dict(get_runner("fake")) if record() else {}
        result = here("fake", "--replay", record(config=config | {"device": "cpu"}, environment=now))
        assert result.code == 0 and Path("runs/a-replay.mp4").exists()
        first, second = result.err.splitlines()
        assert first.startswith("warning: this is not the run of runs/a.json") and "; torch: was 0.1, is " in first
        assert first.count(": was ") == 1
        assert second.endswith("; part: was not recorded, is sha256:new")

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "3", "{}", '{"slug": "fake"}', '{"slug": "fake", "config": {}}', "[" * 3000,
         '{"slug": "fake", "config": {}, "seed": 1.0}', '{"slug": "fake", "config": {}, "seed": NaN}',
         '{"slug": "fake", "config": [], "seed": 1}', '{"slug": 3, "config": {}, "seed": 1}'],
    )  # fmt: skip
    def test_a_file_that_is_no_record(self, here, text):
        Path("a.json").write_text(text)
        refused(here("fake", "--replay", "a.json"), "--replay a.json is no run record")

    def test_a_record_that_does_not_fit(self, here, record, plugins):
        refused(here("fake", "--replay", record(config={"_target": "os:system"})), "cannot name or change classes")
        refused(here("fake", "--replay", record(config={"promt": ""})), "does not fit this version of fake", "'prompt'")
        refused(here("fake", "--replay", record(seed=2**64)), str(2**64))
        plugins.add("other")
        refused(here("other", "--replay", record()), "'fake'", "'other'")


def test_b14_nothing_needs_a_home_or_a_name_for_the_user(plugins, elsewhere, tools, monkeypatch, tmp_path):
    """Case B14: a user id without a passwd entry, no HOME."""
    nobody = "import pwd\ndef _no(uid): raise KeyError(f'getpwuid(): uid not found: {uid}')\npwd.getpwuid = _no\n"
    (plugins.folder / "sitecustomize.py").write_text(nobody)
    for name in ("USER", "LOGNAME", "USERNAME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for words in (["list"], ["run", "fake", "--help"], ["run", "fake", "--output", tmp_path / "a"]):
        assert elsewhere(*words, program=tools).code == 0
    assert (tmp_path / "a").exists()
