"""Bad input: one clear message with the value and the fix, before any work, exit code 2, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cli import TEMPLATE
from flashdreams.core import notices
from flashdreams.infra.runner import Runner
from flashdreams.scripts.run import main

pytestmark = pytest.mark.ci_cpu

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs the template with flags; asserts the refusal and returns the message."""
    monkeypatch.setenv("FLASHDREAMS_RUNNER_CONFIGS", TEMPLATE)
    monkeypatch.setattr(Runner, "_load", lambda *_: pytest.fail("weights were loaded before the refusal"))
    notices.reset()

    def refused(*words: str | Path, output: Path | None = None) -> str:
        output = output or tmp_path / "new" / "video.mp4"
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr("sys.argv", ["flashdreams-run", "template", "--output", str(output), *map(str, words)])
        code = main()
        text = capsys.readouterr().err
        assert code == 2, text
        assert "Traceback" not in text and text.count("error:") == 1
        assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
        return text

    return refused


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--num-chunk", "0"], "num_chunk is 0"),
        (["--num-chunk", "-3"], "-3"),
        (["--num-frames", "0"], "num_frames is 0"),
        (["--duration", "-1"], "-1"),
        (["--duration", "nan"], "nan"),
        (["--num-chunk", "2", "--num-frames", "9"], "only one"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "   "], "prompt is empty"),
        (["--prompt", "long " * 2_000_000], "10000000 characters"),
        (["--prompt-file", "/nonexistent.txt"], "/nonexistent.txt"),
        (["--height", "0"], "height is 0"),
        (["--height", "30", "--strict-size"], "16 and 32"),
        (["--guidance-scale", "-1"], "-1"),
        (["--guidance-scale", "nan"], "nan"),
        (["--num-steps", "0"], "num_steps is 0"),
        (["--num-steps", "1001"], "num_steps is 1001"),
        (["--device", "cuda"], "CUDA"),
        (["--device", "toaster"], "toaster"),
        (["--ckpt-path", "/nonexistent.safetensors"], "/nonexistent.safetensors"),
        (["--ckpt-transform", "a:b"], "--ckpt-path"),
        (["--image", "/nonexistent.png"], "/nonexistent.png"),
        (["--image", "/"], "not a file"),
        (["--control", "up, down"], "'up'"),
        (["--unknown-flag", "1"], "--unknown-flag"),
        (["--numchunk", "3"], "--num-chunk"),
    ],
)
def test_refused(refused, words, expected):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert expected in refused(*words)


@pytest.mark.parametrize("line", (CASES / "B05" / "fps_values.txt").read_text().splitlines()[-6:])
def test_b05_frame_rates_out_of_range(refused, line):
    assert line in refused(f"--fps={line}")


@pytest.mark.parametrize(
    "seed", ["-1", "-9223372036854775808", "18446744073709551616", "1e3", "0x10", "", "None", "1_0"]
)
def test_b10_seeds_out_of_range(refused, seed):
    assert "18446744073709551615" in refused(f"--seed={seed}")


@pytest.mark.parametrize("file", ["zero_byte.png", "truncated.png", "text_named.jpg", "bomb_40960x40960_1bit.png"])
def test_b04_images(refused, file):
    text = refused("--image", CASES / "B04" / file)
    assert file in text
    if "bomb" in file:
        assert "1677721600" in text.replace(",", "")


def test_unwritable_output(refused, tmp_path):
    (tmp_path / "file").write_text("x")
    assert "file" in refused(output=tmp_path / "file" / "video.mp4")
    assert "proc" in refused(output=Path("/proc/none/video.mp4"))


def test_truncated_checkpoint(refused, tmp_path):
    save_file({"a": torch.zeros(100)}, tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-40])
    assert "not a whole safetensors file" in refused("--ckpt-path", tmp_path / "cut.safetensors")


def test_config_file_cannot_name_classes(refused, tmp_path):
    for text in (
        "_target: os:system",
        "pipeline:\n  decoder: !!python/object:os.system {}",
        "pipeline: {decoder: {_target: x}}",
    ):
        (tmp_path / "c.yaml").write_text(text)
        refused("--config", tmp_path / "c.yaml")


def test_unknown_slug_names_the_nearest(monkeypatch, capsys):
    monkeypatch.setenv("FLASHDREAMS_RUNNER_CONFIGS", TEMPLATE)
    monkeypatch.setattr("sys.argv", ["flashdreams-run", "templat"])
    assert main() == 2
    assert "'template'" in capsys.readouterr().err


def test_a_file_cannot_choose_code_but_may_repeat_what_the_flags_name(refused, tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text("ckpt_transform: os:system\n")
    assert "a file cannot choose code" in refused("--config", tmp_path / "c.yaml")
    inner = "pipeline: {diffusion_model: {transformer: {state_dict_transform: 'os:system'}}}"
    (tmp_path / "c.yaml").write_text(inner)
    assert "a file cannot choose code" in refused("--config", tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("ckpt_transform: a.b:c\nnum_chunk: 3\n")
    words = ["template", "--config", str(tmp_path / "c.yaml"), "--ckpt-transform", "a.b:c", "--no-instantiate"]
    monkeypatch.setattr("sys.argv", ["flashdreams-run", *words])
    assert main() == 0
    assert "num_chunk: 3" in capsys.readouterr().out
