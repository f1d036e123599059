"""The comparison with the original: its settings, and its second step on small models of both kinds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import bench_batch
import parity
from flashdreams.config import derive_config
from flashdreams.core.noise import GivenNoise
from flashdreams.infra.embeds import save_embeds
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.runner import Runner
from flashdreams.infra.scheduler.config import UniPCSchedulerConfig
from lingbot import config as module
from lingbot.config import LINGBOT_CONFIGS

pytestmark = pytest.mark.ci_cpu

SCRIPT = Path(__file__).parent / "parity_check/run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lingbot_parity_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_asks_the_original_for_our_settings(script: ModuleType) -> None:
    pipeline = LINGBOT_CONFIGS[script.SLUG].pipeline
    model = pipeline.diffusion_model
    assert model.scheduler == UniPCSchedulerConfig(num_steps=script.STEPS, shift=script.SHIFT)
    assert model.transformer.guidance_scale == script.GUIDANCE
    assert pipeline.height * pipeline.width == script.AREA


@pytest.mark.parametrize("slug", ["lingbot-world-cam", "lingbot-world-fast"])
def test_ours_repeats_a_recorded_run(slug, script, shrunk, prompt, picture, tmp_path: Path, monkeypatch) -> None:
    """With a made-up reference: frames of our own with the noise and the path it holds."""
    prompt = type(prompt)(prompt.text) if slug.endswith("fast") else prompt
    save_embeds(tmp_path / "prompt.safetensors", prompt.text, prompt.negative_text)
    Image.fromarray(picture(32, 48).numpy()).save(tmp_path / "image.png")
    (tmp_path / "path").mkdir()
    poses = np.tile(np.eye(4), (29, 1, 1))
    poses[:, 0, 3] = np.arange(29) ** 2
    np.save(tmp_path / "path/poses.npy", poses)
    runner = derive_config(shrunk(slug), prompt_embeds=tmp_path / "prompt.safetensors", ckpt_path="random:0")
    monkeypatch.setitem(module.LINGBOT_CONFIGS, slug, runner)
    monkeypatch.setattr("flashdreams.infra.runner.resolve_device", lambda device: "cpu")
    monkeypatch.setattr(StreamInferencePipeline, "encode_prompts", lambda self, prompts, negative_prompt=None: prompt)

    latent, chunks = (3, 0) if slug.endswith("cam") else (8, 2)
    draws = [torch.randn(4, 16, 4, 6) for _ in range(3 * chunks)]
    tensors = {"noise": torch.randn(16, latent, 4, 6)} | {f"draw{i:04d}": draw for i, draw in enumerate(draws)}
    asked = derive_config(
        runner, image=tmp_path / "image.png", control=str(tmp_path / "path"), num_frames=4 * latent - 3
    )
    plan = Runner(asked).plan()
    noise = GivenNoise(tensors["noise"][None], parity.draws_by_step(draws, lambda chunk: 3))
    made = plan.pipeline.setup().rollout(
        "a town", num_frames=4 * latent - 3, image=plan.framing.image, control=plan.control, noise=noise
    )
    tensors["frames"] = torch.cat([chunk.frames for chunk in made])
    steps = runner.pipeline.diffusion_model.scheduler.num_steps
    about = {"slug": slug, "prompt": "a town", "negative_prompt": "", "steps": steps,
             "image": str(tmp_path / "image.png"), "camera": str(tmp_path / "path")}  # fmt: skip
    parity.save_reference(tmp_path / "ref.safetensors", tensors, **about)
    words = ["ours", "--reference", str(tmp_path / "ref.safetensors"), "--checkpoints", str(tmp_path)]
    words += ["--dtype", "float32", "--threshold", "0"]
    assert script.main(words) == 0
    tensors["noise"] = -tensors["noise"]
    parity.save_reference(tmp_path / "ref.safetensors", tensors, **about)
    assert script.main(words) == 1


def test_the_command_line_says_what_is_missing(script: ModuleType, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        script.main(["original", "--repo", str(tmp_path)])
    assert "--checkpoints" in capsys.readouterr().err


def test_batches_are_timed_from_an_image(shrunk, prompt, monkeypatch, capsys) -> None:
    pipeline = shrunk("lingbot-world-fast").pipeline.setup()
    text = type(prompt)(prompt.text)
    monkeypatch.setattr(type(pipeline), "encode_prompts", lambda self, prompts: text)
    monkeypatch.setattr(bench_batch, "load_pipeline", lambda slug, device: pipeline)
    monkeypatch.setattr(bench_batch, "get_runner", LINGBOT_CONFIGS.__getitem__)
    bench_batch.main("lingbot-world-fast", 2, [1, 2], device="cpu")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["batch 1", "batch 2"]
