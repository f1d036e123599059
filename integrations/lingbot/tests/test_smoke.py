"""LingBot-World as a plugin: entry points, published settings, key maps of every checkpoint, and a run of each slug."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.core.controls import Control, Keys
from flashdreams.infra.config import EncoderConfig, ExpertConfig, RunnerConfig, TransformerConfig
from flashdreams.infra.embeds import save_embeds
from flashdreams.infra.errors import UserError
from flashdreams.infra.loading import build_on_meta
from flashdreams.infra.scheduler.config import DPMPPSchedulerConfig, UniPCSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig
from lingbot.config import (
    LINGBOT_CONFIGS,
    PIPELINE_LINGBOT_WORLD_FAST,
    PIPELINE_LINGBOT_WORLD_FAST_V1,
    CameraEncoderConfig,
    LingBotNetworkConfig,
    LingBotRunnerConfig,
)
from member import (
    assert_entry_points,
    help_page,
    imports_torch,
    manifest,
)

MEMBER = Path(__file__).parents[1]
GOLDENS = MEMBER.parents[1] / "tests/goldens/data"
BASE, FAST = ("lingbot-world-cam", "lingbot-world-act"), ("lingbot-world-fast", "lingbot-world-fast-v1")

ci_cpu, manual = pytest.mark.ci_cpu, pytest.mark.manual
every_slug = pytest.mark.parametrize("slug", LINGBOT_CONFIGS)


@ci_cpu
def test_entry_points_name_the_runners() -> None:
    assert_entry_points(MEMBER, LINGBOT_CONFIGS)
    assert (*BASE, *FAST) == tuple(LINGBOT_CONFIGS)


@ci_cpu
@every_slug
def test_help_says_what_it_is_its_licence_and_how_the_camera_moves(slug: str, capsys) -> None:
    page = help_page(slug, capsys)
    assert LINGBOT_CONFIGS[slug].description in page and "licence: Apache-2.0" in page
    assert "--trajectory" in page and "orbit-left" in page and "--image FILE" in page and "--control" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("lingbot.config")


def transformers(slug: str) -> list[TransformerConfig]:
    """That of low noise, then that of high noise if there is one."""
    model = LINGBOT_CONFIGS[slug].pipeline.diffusion_model
    return [model.transformer, *(expert.transformer for expert in model.high_noise)]


@ci_cpu
@pytest.mark.parametrize("slug", BASE)
def test_settings_of_the_base_models_are_the_published_ones(slug: str) -> None:
    pipeline = LINGBOT_CONFIGS[slug].pipeline
    assert pipeline.diffusion_model.scheduler == UniPCSchedulerConfig(num_steps=70, shift=10.0, table="native")
    assert [expert.sigma_low for expert in pipeline.diffusion_model.high_noise] == [0.947]
    assert [each.guidance_scale for each in transformers(slug)] == [5.0, 5.0]
    assert all(each.bidirectional and each.concat_image_mask_to_latent for each in transformers(slug))
    assert [(each.network.in_dim, each.network.control_channels) for each in transformers(slug)] == [
        (36, 7 if slug == "lingbot-world-act" else 6)
    ] * 2
    assert pipeline.encoder.takes_keys == (slug == "lingbot-world-act")
    assert (pipeline.height, pipeline.width, pipeline.fps, pipeline.size_multiple) == (480, 832, 16.0, 16)
    assert pipeline.image_size == "area" and pipeline.frames_of(21) == LINGBOT_CONFIGS[slug].default_num_frames
    names = [each.checkpoint_path.rpartition("/")[2] for each in transformers(slug)]
    assert names == ["low_noise_model", "high_noise_model"]


@ci_cpu
def test_settings_of_causal_fast_are_those_published_with_its_checkpoint() -> None:
    published = manifest("lingbot-world-v2-14b-causal-fast.native")["config"]
    pipeline = PIPELINE_LINGBOT_WORLD_FAST
    transformer, scheduler = pipeline.diffusion_model.transformer, pipeline.diffusion_model.scheduler
    assert transformer.len_t == published["chunk_size"]
    assert (transformer.window_size_t, transformer.sink_size_t) == (
        published["local_attn_size"],
        published["sink_size"],
    )
    assert (scheduler.shift, list(scheduler.indices)) == (published["sample_shift"], published["timesteps_index"])
    assert pipeline.height * pipeline.width == published["max_area"]
    assert (transformer.rope, transformer.context_noise, transformer.guidance_scale) == ("absolute", 0.0, 1.0)
    sizes = "dim", "ffn_dim", "num_heads", "num_layers", "in_dim", "out_dim", "text_dim", "text_len", "freq_dim", "eps"
    assert {name: getattr(transformer.network, name) for name in sizes} == {name: published[name] for name in sizes}
    assert [step.timestep for step in scheduler.setup().steps] == [999, 967, 908, 768]


@ci_cpu
def test_settings_of_the_first_version_are_those_of_its_recorded_rollout() -> None:
    with safe_open(GOLDENS / "lingbot_causal_fast_nowindow.safetensors", "pt") as file:
        recorded = json.loads(file.metadata()["config"])
    model = PIPELINE_LINGBOT_WORLD_FAST_V1.diffusion_model
    assert (model.transformer.len_t, model.transformer.sink_size_t) == (recorded["chunk_size"], recorded["sink_size"])
    assert recorded["local_attn_size"] == -1 and model.transformer.window_size_t == model.transformer.trained_frames
    assert (model.scheduler.shift, list(model.scheduler.indices)) == (
        recorded["sample_shift"], recorded["timesteps_index"],
    )  # fmt: skip


@ci_cpu
@every_slug
def test_a_chunk_of_the_model_is_a_chunk_of_its_encoder(slug: str) -> None:
    pipeline = LINGBOT_CONFIGS[slug].pipeline
    transformer, encoder = pipeline.diffusion_model.transformer, pipeline.encoder
    frames = 4 if transformer.bidirectional else 4 * transformer.len_t
    assert encoder.chunk_frames == frames
    assert 64 * transformer.network.control_channels == (448 if encoder.takes_keys else 384)


@ci_cpu
def test_base_configs_have_only_fields_known_here() -> None:
    """A new field upstream needs a decision here: is its default right for these models?"""
    network = {
        "dim", "ffn_dim", "num_heads", "num_layers", "in_dim", "out_dim", "text_dim", "text_len", "freq_dim",
        "patch_size", "eps", "rope_theta", "attention", "image_dim", "image_tokens", "image_positions",
    }  # fmt: skip
    assert field_names(WanNetworkConfig) == network
    assert field_names(LingBotNetworkConfig) == network | {"control_channels", "keep_injections"}
    encoder = {"dtype", "checkpoint_path", "state_dict_transform", "transforms", "allow_missing"}
    assert field_names(EncoderConfig) == encoder
    assert field_names(CameraEncoderConfig) == encoder | {
        "takes_keys", "chunk_frames", "world_scale", "move", "turn", "intrinsics",
    }  # fmt: skip
    assert field_names(LingBotRunnerConfig) - field_names(RunnerConfig) == {"trajectory"}
    assert field_names(ExpertConfig) == {"sigma_low", "transformer"}


def field_names(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    small = derive_config(PIPELINE_LINGBOT_WORLD_FAST, {"diffusion_model.transformer.network.num_layers": 2})
    assert len(build_on_meta(small.diffusion_model.transformer).network.blocks) == 2
    assert PIPELINE_LINGBOT_WORLD_FAST.diffusion_model.transformer.network.num_layers == 40


@ci_cpu
def test_another_solver_can_be_put_in_and_makes_another_video(shrunk, prompt, picture) -> None:
    base = shrunk("lingbot-world-cam").pipeline
    swapped = derive_config(base, diffusion_model={"scheduler": DPMPPSchedulerConfig(num_steps=3, shift=10.0)})
    ours, theirs = (
        next(config.setup().rollout(conditions=prompt, image=picture(32, 48), num_frames=5, seed=1)).latent
        for config in (base, swapped)
    )
    assert ours.shape == theirs.shape == (1, 16, 2, 4, 6)
    assert not torch.allclose(ours, theirs, atol=1e-4)


def run(runner: RunnerConfig, prompt, picture, folder: Path, **flags: Any) -> list[np.ndarray]:
    """Frames of the mp4 that the command line's runner writes: saved embeddings, an image file, controls."""
    folder.mkdir(exist_ok=True)
    save_embeds(folder / "prompt.safetensors", prompt.text, prompt.negative_text)
    Image.fromarray(picture(40, 60).numpy()).save(folder / "image.png")
    flags = {"image": folder / "image.png", "output": folder / "video.mp4", "ckpt_path": "random:0", **flags}
    runner = derive_config(runner, prompt_embeds=folder / "prompt.safetensors", seed=0, device="cpu", **flags)
    assert runner.setup().run() == folder / "video.mp4"
    assert json.loads((folder / "video.json").read_text())["slug"] == runner.runner_name
    with av.open(str(folder / "video.mp4")) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]


@ci_cpu
@every_slug
def test_a_run_along_a_trajectory_writes_a_video(slug: str, shrunk, prompt, picture, tmp_path: Path) -> None:
    length = {"num_frames": 9} if slug in BASE else {"num_chunk": 2}
    frames = run(shrunk(slug), prompt, picture, tmp_path, trajectory="orbit-left", **length)
    count = 9 if slug in BASE else 4 * 2 * LINGBOT_CONFIGS[slug].pipeline.diffusion_model.transformer.len_t - 3
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * count


@ci_cpu
def test_a_run_follows_a_file_of_poses_and_keys_and_its_record_repeats_it(shrunk, prompt, picture, tmp_path) -> None:
    (tmp_path / "path").mkdir()
    poses = np.tile(np.eye(4), (9, 1, 1))
    poses[:, 0, 3] = np.arange(9)
    np.save(tmp_path / "path/poses.npy", poses)
    np.save(tmp_path / "path/intrinsics.npy", np.array([[500.0, 500, 416, 240]]))
    np.save(tmp_path / "path/action.npy", np.eye(4)[[1] * 9])
    along = {"control": str(tmp_path / "path"), "save_control": tmp_path / "said.jsonl", "num_frames": 9}
    frames = run(shrunk("lingbot-world-act"), prompt, picture, tmp_path / "one", **along)
    again = run(
        shrunk("lingbot-world-act"), prompt, picture, tmp_path / "two", control=str(tmp_path / "said.jsonl"),
        num_frames=9,
    )  # fmt: skip
    assert len(frames) == 9 and all(np.array_equal(a, b) for a, b in zip(frames, again, strict=True))
    other = run(shrunk("lingbot-world-act"), prompt, picture, tmp_path / "three", control="w:9", num_frames=9)
    assert not all(np.array_equal(a, b) for a, b in zip(frames, other, strict=True))


@ci_cpu
@pytest.mark.parametrize("slug", ["lingbot-world-cam", "lingbot-world-fast"])
def test_a_run_without_an_image_or_with_two_paths_is_refused_before_any_work(slug: str, shrunk) -> None:
    with pytest.raises(UserError, match="makes a video from an image"):
        shrunk(slug).setup().plan()
    with pytest.raises(ValueError, match="give one of them"):
        derive_config(shrunk(slug), trajectory="forward", control="w:8").setup()


@ci_cpu
def test_live_keys_steer_what_follows_and_nothing_before(shrunk, prompt, picture) -> None:
    prompt = type(prompt)(prompt.text)
    pipeline = shrunk("lingbot-world-fast").pipeline.setup()

    def latents(*keys: Keys) -> list[Tensor]:
        made = []
        with pipeline.rollout(conditions=prompt, image=picture(32, 48), num_chunk=len(keys), seed=2) as rollout:
            for held in keys:
                rollout.set_control(held)
                made.append(next(rollout).latent)
        return made

    one, other = latents(Keys("w"), Keys("w"), Keys("left")), latents(Keys("w"), Keys("s"), Keys("left"))
    assert torch.equal(one[0], other[0])
    assert not torch.allclose(one[1], other[1], atol=1e-4)
    whole = pipeline.rollout(
        conditions=prompt, image=picture(32, 48), num_chunk=1, seed=2, control=[[Control(keys=Keys("w"))] * 13]
    )
    assert torch.equal(next(whole).latent, one[0]), "held live or written down, it is the same path"


@ci_cpu
def test_the_example_walks_through_a_picture(shrunk, prompt, picture, tmp_path: Path, monkeypatch) -> None:
    spec = importlib.util.spec_from_file_location("lingbot_walk", MEMBER / "examples/walk.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pipeline = shrunk("lingbot-world-fast").pipeline.setup()
    text = type(prompt)(prompt.text)
    monkeypatch.setattr(type(pipeline), "encode_prompts", lambda self, prompts, *rest: text)
    monkeypatch.setattr(script, "load_pipeline", lambda slug: pipeline)
    Image.fromarray(picture(40, 60).numpy()).save(tmp_path / "image.png")
    script.main(str(tmp_path / "image.png"), ["w", "w+left"], str(tmp_path / "walk.mp4"))
    with av.open(str(tmp_path / "walk.mp4")) as video:
        assert len(list(video.decode(video=0))) == 13 + 16


@pytest.mark.ci_gpu
@every_slug
def test_one_chunk_on_a_gpu(slug: str, shrunk, prompt, picture) -> None:
    """In bfloat16; the experts change places between the CPU and the GPU."""
    model = {"transformer": {"dtype": "bfloat16"}}
    if slug in BASE:
        model["high_noise"] = {0: {"transformer": {"dtype": "bfloat16"}}}
    else:
        prompt = type(prompt)(prompt.text)
    pipeline = derive_config(shrunk(slug).pipeline, diffusion_model=model).setup(device="cuda")
    conditions = type(prompt).from_dict({name: value.to("cuda") for name, value in prompt.to_dict().items()})
    length = {"num_frames": 9} if slug in BASE else {"num_chunk": 1}
    walk = [[Control(keys=Keys("w"))] * 13]
    (chunk,) = pipeline.rollout(conditions=conditions, image=picture(32, 48), control=walk, **length)
    assert chunk.frames.shape[2:] == (32, 48, 3)
    assert torch.isfinite(chunk.latent).all() and chunk.frames.float().std() > 1


@manual
@pytest.mark.parametrize("repository", ["lingbot-world-base-cam", "lingbot-world-base-act"])
@pytest.mark.parametrize("file", ["models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"])
def test_text_encoder_and_vae_have_weights_identical(repository: str, file: str) -> None:
    """The files of the original's repository, and those of Wan2.1 that we take in their place."""
    from flashdreams.core.checkpoint import open_checkpoint

    sources = f"hf://robbyant/{repository}/{file}", f"hf://Wan-AI/Wan2.1-T2V-1.3B/{file}"
    ours, theirs = (open_checkpoint(source).digest() for source in sources)
    assert ours == theirs
