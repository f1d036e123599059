"""The comparison with the original: its command line, its controls, and its second step on a small model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from PIL import Image

import parity
from flashdreams.config import derive_config
from flashdreams.core.noise import GivenNoise
from flashdreams.infra.pipeline import StreamInferencePipeline
from matrix_game_2.config import MATRIX_GAME_2_CONFIGS

pytestmark = pytest.mark.ci_cpu

SCRIPT = Path(__file__).parent / "parity_check/run.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("matrix_game_2_parity", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_knows_every_model_and_our_names_of_its_weights(script) -> None:
    assert script.MODELS.keys() == MATRIX_GAME_2_CONFIGS.keys()
    for slug, (_, weights) in script.MODELS.items():
        config = MATRIX_GAME_2_CONFIGS[slug].pipeline.diffusion_model.transformer
        assert config.checkpoint_path == f"hf://Skywork/Matrix-Game-2.0/{weights}"


@pytest.mark.parametrize("slug", MATRIX_GAME_2_CONFIGS)
def test_rows_of_the_original_become_controls_that_say_the_same(script, slug: str) -> None:
    config = MATRIX_GAME_2_CONFIGS[slug].pipeline.encoder
    keys = torch.eye(config.keyboard_dim)
    mouse = 0.1 * torch.tensor([[1.0, 0], [-1, 0], [0, -1], [0, 1]]).repeat(2, 1)[: len(keys)]
    encoder = config.setup()
    for row, control in enumerate(script.controls(config, keys, mouse if config.mouse_dim else None)):
        told = encoder.row(config.takes.validate(control))
        want = [*keys[row].tolist(), *(mouse[row].tolist() if config.mouse_dim else [])]
        assert told == pytest.approx(want, abs=1e-6)


def test_ours_repeats_a_recorded_run(script, quick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second step on a small model, with a made-up reference: frames of our own with the noise it holds."""
    from matrix_game_2 import config as module

    slug, runner = "matrix-game-2-universal", quick("matrix-game-2-universal")
    pixels = torch.randint(0, 256, (32, 48, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "picture.png")
    pipeline = runner.pipeline.setup()
    monkeypatch.setattr(module, "MATRIX_GAME_2_CONFIGS", {slug: derive_config(runner)})
    monkeypatch.setattr(type(runner.pipeline), "setup", lambda self, device: pipeline)
    monkeypatch.setattr(script.parity, "with_local_files", lambda config, folder: config)
    monkeypatch.setattr("flashdreams.infra.runner.resolve_device", lambda device: "cpu")
    noise, draws = torch.randn(1, 3, 6, 4, 6), [torch.randn(3, 3, 4, 6) for _ in range(4)]
    keyboard, mouse = torch.eye(4).repeat(6, 1)[None, :21], 0.1 * torch.randn(1, 21, 2).clamp(-1, 1)
    tensors = {"noise": noise, "keyboard": keyboard, "mouse": mouse}
    tensors |= {f"draw{i:04d}": draw for i, draw in enumerate(draws)}
    control = script.controls(runner.pipeline.encoder, keyboard[0], mouse[0])

    def frames_of(pipeline: StreamInferencePipeline) -> torch.Tensor:
        given = GivenNoise(noise, parity.draws_by_step(draws, lambda chunk: 2))
        chunks = pipeline.rollout(image=pixels, num_chunk=2, noise=given, control=control)
        return torch.cat([chunk.frames for chunk in chunks])

    tensors["frames"] = frames_of(pipeline)
    words = ["ours", "--reference", str(tmp_path / "ref.safetensors"), "--models", "folder", "--dtype", "float32"]
    about = {"slug": slug, "image": str(tmp_path / "picture.png")}
    parity.save_reference(tmp_path / "ref.safetensors", tensors, **about)
    assert script.main(words) == 0
    tensors["keyboard"] = tensors["keyboard"].roll(1, dims=2)
    parity.save_reference(tmp_path / "ref.safetensors", tensors, **about)
    assert script.main([*words, "--threshold", "0"]) == 1


def test_the_command_line_says_what_is_missing(script, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        script.main(["original", "--repo", str(tmp_path)])
    assert "--models" in capsys.readouterr().err
