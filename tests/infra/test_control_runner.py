"""``--control`` and ``--save-control``: words, files, recordings, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cli import TEMPLATE
from flashdreams.config import derive_config
from flashdreams.core import notices
from flashdreams.core.controls import Control, ControlSpec, load_controls, save_controls
from flashdreams.core.media.video import read_video_frames
from flashdreams.infra.config import EncoderConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.runner import Runner
from flashdreams.recipes.template.config import RUNNER_TEMPLATE, TemplateControlConfig
from flashdreams.scripts.run import main

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the template with flags; gives the exit code and all that was printed."""
    monkeypatch.setenv("FLASHDREAMS_RUNNER_CONFIGS", TEMPLATE)
    monkeypatch.chdir(tmp_path)
    notices.reset()

    def run(*words: str, output: str = "a.mp4") -> tuple[int, str]:
        line = ["flashdreams-run", "template", "--seed", "1", "--num-chunk", "3", "--output", output, *words]
        monkeypatch.setattr("sys.argv", line)
        code = main()
        text = capsys.readouterr()
        return code, text.out + text.err

    return run


def test_a_saved_control_file_is_consumed_as_it_was_saved(run):
    assert run("--control", "0.5:3 -0.25:4", "--save-control", "keep/a.jsonl")[0] == 0
    recording = load_controls("keep/a.jsonl")
    assert [control and control.number for control in recording.controls] == [0.5] * 3 + [-0.25] * 4 + [None] * 10
    assert recording.model == "template"
    assert run("--control", "keep/a.jsonl", "--save-control", "b.jsonl", output="b.mp4")[0] == 0
    assert load_controls("b.jsonl") == recording
    record = json.loads(Path("b.json").read_text())
    assert record["inputs"]["control"].startswith("sha256:") and record["config"]["control"] == "keep/a.jsonl"
    assert "control" not in json.loads(Path("a.json").read_text())["inputs"]


def test_a_replay_does_not_record_again(run, monkeypatch, capsys):
    assert run("--control", "0.5", "--save-control", "a.jsonl")[0] == 0
    assert json.loads(Path("a.json").read_text())["config"]["save_control"] is None
    Path("a.jsonl").unlink()
    monkeypatch.setattr("sys.argv", ["flashdreams-run", "--replay", "a.json"])
    assert main() == 0
    assert not Path("a.jsonl").exists()
    assert (read_video_frames(Path("a.mp4")) == read_video_frames(Path("a-replay.mp4"))).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--control", "0.5:x"], "'x' is not a number of frames"),
        (["--control", "2"], "is 2; expected a number from -1 to 1"),
        (["--control", "none.jsonl"], "none.jsonl cannot be read"),
        (["--control", "words.jsonl"], "words.jsonl, line 1"),
        (["--control", "keys.jsonl"], "keys.jsonl, frame 1: control"),
        (["--control", "none.txt"], "none.txt"),
        (["--save-control", "a.txt"], "does not end in .jsonl"),
        (["--save-control", "/proc/none/a.jsonl"], "/proc/none/a.jsonl"),
        (["--control", "good.jsonl", "--save-control", "./good.jsonl"], "would overwrite the controls it reads"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_before_anything_is_loaded_or_written(run, monkeypatch, words, said):
    monkeypatch.setattr(Runner, "_load", lambda *_: pytest.fail("weights were loaded before the refusal"))
    Path("words.jsonl").write_text("0.5:3\n")
    save_controls("good.jsonl", [0.5], fps=16, takes=ControlSpec(number=(-1, 1)))
    save_controls("keys.jsonl", [None, "w"], fps=16, takes=ControlSpec(keys={"w": "up"}))
    before = {path: path.read_bytes() for path in Path().rglob("*")}
    code, text = run(*words, output="new/a.mp4")
    assert code == 2 and said in text and "Traceback" not in text
    assert {path: path.read_bytes() for path in Path().rglob("*")} == before


def plan(config):
    return Runner(config).plan()


def test_models_without_controls_and_models_of_pixels_refuse_the_flags():
    class VideoConfig(TemplateControlConfig):
        takes = ControlSpec(frame=True)

    for encoder in (None, EncoderConfig()):
        deaf = derive_config(RUNNER_TEMPLATE, pipeline={"encoder": encoder})
        for flags in ({"control": "0.5"}, {"save_control": Path("a.jsonl")}):
            name = next(iter(flags)).replace("_", "-")
            with pytest.raises(UserError, match=f"template takes no controls; leave --{name} out"):
                plan(derive_config(deaf, **flags))
        assert plan(deaf).control is None
    pixels = derive_config(RUNNER_TEMPLATE, pipeline={"encoder": VideoConfig()}, save_control=Path("a.jsonl"))
    with pytest.raises(UserError, match="controlled by a video; keep it"):
        plan(pixels)


def test_a_model_may_have_flags_and_files_of_its_own():
    class PathConfig(TemplateControlConfig):
        def parse_controls(self, source, frames):
            return (
                [frame / frames for frame in range(frames)]
                if source == "rising"
                else super().parse_controls(source, frames)
            )

    class RunnerConfig(type(RUNNER_TEMPLATE)):
        def control_source(self):
            return "rising" if self.control is None else self.control

    base = derive_config(RUNNER_TEMPLATE, pipeline={"encoder": PathConfig()}, num_chunk=3)
    own = RunnerConfig(**{name: getattr(base, name) for name in vars(base)})
    assert plan(own).control == [frame / 17 for frame in range(17)]
    assert plan(derive_config(own, control="0.5:2")).control == [Control(number=0.5)] * 2
    assert plan(base).control is None


def test_the_config_of_a_runner_keeps_its_flags_as_data(run):
    code, text = run("--save-control", "a.jsonl", "--no-instantiate")
    assert code == 0 and yaml.safe_load(text)["save_control"] == "a.jsonl"
