"""The comparison with diffusers: its command line, and both of its steps on a small model; the real one needs a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import parity
from cosmos_predict2._conditions import CosmosConditions
from cosmos_predict2.config import COSMOS_PREDICT2_CONFIGS, CosmosTransformerConfig
from flashdreams.config import derive_config
from flashdreams.infra.pipeline import StreamInferencePipeline

pytestmark = pytest.mark.ci_cpu

SCRIPT = Path(__file__).parent / "parity_check/run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cosmos_predict2_parity_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_knows_every_model_with_our_settings(script: ModuleType) -> None:
    assert list(script.SLUGS) == list(COSMOS_PREDICT2_CONFIGS)
    words = ["original", "--checkpoints", "x", "--slug", script.SLUGS[0], "--out", "y"]
    arguments = script.parser().parse_args(words)
    for runner in COSMOS_PREDICT2_CONFIGS.values():
        pipeline, model = runner.pipeline, runner.pipeline.diffusion_model
        assert (pipeline.height, pipeline.width) == (arguments.height, arguments.width)
        assert (runner.default_num_frames, model.scheduler.num_steps) == (arguments.frames, arguments.steps)
        assert (model.scheduler.shift, model.transformer.given_timestep) == (script.SHIFT, script.GIVEN_TIMESTEP)
        assert model.transformer.guidance_scale == 1 + script.GUIDANCE


def test_the_command_line_says_what_is_missing(script: ModuleType, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        script.main(["original", "--slug", "cosmos-predict2.5-2b"])
    assert "--checkpoints" in capsys.readouterr().err
    Image.new("RGB", (10, 6)).save(tmp_path / "small.png")
    with pytest.raises(SystemExit, match="scale it to 48x32"):
        script.pixels(tmp_path / "small.png", 32, 48)


@pytest.mark.parametrize("images", [0, 1])
def test_both_steps_agree_on_a_small_model(script: ModuleType, images: int, tmp_path: Path, monkeypatch) -> None:
    from cosmos_predict2._keymaps import dit_from_diffusers
    from diffusers_cosmos import NETWORK, their_pipeline
    from diffusers_wan import VAE21, vaes

    words = ["original", "--checkpoints", "x", "--slug", script.SLUGS[0], "--out", "y", "--steps", "3", "--frames", "9",
             "--height", "32", "--width", "48"]  # fmt: skip
    if images:
        noise = torch.randint(0, 256, (32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        Image.fromarray(noise.numpy()).save(tmp_path / "image.png")
        words += ["--image", str(tmp_path / "image.png")]
    generator = torch.Generator().manual_seed(2)
    text, negative = (torch.randn(1, 7, 12, generator=generator) for _ in range(2))
    theirs = their_pipeline()
    theirs.to(torch.float32)
    embeds = {"prompt": None, "prompt_embeds": text, "negative_prompt_embeds": negative}
    about, kept = script.run_original(theirs, script.parser().parse_args(words), **embeds)
    parity.save_reference(tmp_path / "reference.safetensors", kept, **about)
    about, kept = parity.load_reference(tmp_path / "reference.safetensors")
    assert kept["frames"].shape == (9, 32, 48, 3)

    config = derive_config(
        COSMOS_PREDICT2_CONFIGS[about["slug"]].pipeline,
        text_encoder=None,
        diffusion_model={
            "transformer": CosmosTransformerConfig(network=NETWORK, dtype="float32", cfg="sequential", guidance_scale=2)
        },
        decoder=derive_config(VAE21, dtype="float32"),
    )
    setup = type(config).setup

    def with_their_weights(self, **options) -> StreamInferencePipeline:
        pipeline = setup(self, **options)
        network = pipeline.diffusion_model.transformer.network
        network.load_state_dict(dit_from_diffusers(theirs.transformer.state_dict()))
        pipeline.decoder.load_state_dict(vaes(VAE21)[0].state_dict())
        return pipeline

    monkeypatch.setattr(type(config), "setup", with_their_weights)
    made = script.run_ours(config, about, kept, device="cpu", conditions=CosmosConditions(text, negative))
    report = parity.compare(made, kept["frames"])
    assert report["mean"] < 1e-3, report
    assert kept["frames"].float().std() > 5
