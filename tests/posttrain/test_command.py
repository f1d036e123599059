"""``flashdreams train``: its flags, what it refuses before any model is loaded, and a training from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flashdreams.config import ConfigError
from flashdreams.infra.errors import UserError
from flashdreams.posttrain.config import TrainConfig
from flashdreams.scripts.train import main

pytestmark = pytest.mark.ci_cpu

VARIABLE = "FLASHDREAMS_REWARDS"


@pytest.fixture(autouse=True)
def rewards(monkeypatch):
    monkeypatch.setenv(VARIABLE, "tiny-world-position=tiny_world.rewards:REWARDS")


def test_a_training_ends_with_a_lora_metrics_and_videos(tmp_path, capsys):
    words = [
        "nft", "tiny-world", "--reward", "tiny-world-position", "--output", str(tmp_path), "--groups", "1",
        "--group-size", "2", "--iterations", "1", "--eval-samples", "1", "--eval-chunks", "1", "--videos", "1",
        "--device", "cpu", "--guidance-scale", "1",
    ]  # fmt: skip
    assert main(words, "flashdreams train") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'lora.safetensors'}\n"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["iteration"]) for line in lines] == [("eval", 0), ("train", 1), ("eval", 1)]
    assert {"reward", "colour", "shape", "background", "intact"} <= lines[0].keys()
    assert {"reward_spread", "gradient_norm", "loss", "sample_seconds"} <= lines[1].keys()
    assert [path.name for path in sorted((tmp_path / "videos").iterdir())] == ["0000-0.mp4", "0001-0.mp4"]


def test_help_and_refusals_need_no_torch():
    code = (
        "import sys\nfrom flashdreams.scripts.train import main\nfrom flashdreams.config import ConfigError\n"
        "assert main(['--help'], 'flashdreams train') == 0\n"
        "try: main(['nft', 'tiny-world', '--reward', 'x', '--output', 'y'], 'flashdreams train')\n"
        "except ConfigError as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tiny-world-position" in done.stdout and "there is no reward 'x'" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ppo"], "there is no algorithm 'ppo'; there are grpo, nft"),
        (["nft", "tiny-world"], "--reward, --output"),
        (["nft", "tiny-world", "--reward", "tiny-world-positio", "--output", "x"], "did you mean"),
        (["nft", "tiny-world", "--reward", "tiny-world-position", "--output", "x", "--clip", "1"], "--clip"),
        (["grpo", "tiny-world", "--reward", "tiny-world-position", "--output", "x", "--lora", "a"], "checkpoint merge"),
        (["grpo", "tiny-world", "--reward", "tiny-world-position", "--output", "x", "--rank", "0"], "rank is 0"),
    ],
)  # fmt: skip
def test_what_makes_no_training_is_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, ConfigError)) as caught:
        main(words, "flashdreams train")
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "ppo"}, "algorithm is 'ppo'; expected grpo or nft"),
        ({"method": "dora"}, "method is 'dora'; expected lora or full"),
        ({"first_chunk": 2}, "first_chunk is 2, and chunks are 0 to 1: none would be trained"),
        ({"batch": 4}, "batch is 4, less than a group of 8"),
        ({"sigmas": (0.0,)}, r"sigmas are \(0.0,\)"),
        ({"steps": ()}, "steps are none"),
        ({"lr": 0.0}, "lr is 0.0; expected a number above 0"),
        ({"rank": 0}, "rank is 0; expected 1 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"algorithm": "nft", **change}).validate()
