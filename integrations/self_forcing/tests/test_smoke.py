"""Self-Forcing as a plugin: entry points, published settings, key maps of every layout, and a run of each preset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from flashdreams.config import derive_config
from flashdreams.core.checkpoint.nesting import select
from flashdreams.infra.loading import build_on_meta
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig, FlowMatchEulerSchedulerConfig
from member import (
    assert_entry_points,
    assert_full_bijection,
    header,
    help_page,
    imports_torch,
    prompt,
    run_to_video,
    shrunk,
    sources_by_target,
)
from self_forcing.config import (
    PIPELINE_SELF_FORCING_T2V_1_3B,
    PIPELINE_SELF_FORCING_T2V_1_3B_LONG,
    PIPELINE_SELF_FORCING_T2V_1_3B_TAEHV,
    SELF_FORCING_CONFIGS,
)

MEMBER = Path(__file__).parents[1]
MODEL = PIPELINE_SELF_FORCING_T2V_1_3B.diffusion_model

ci_cpu, manual = pytest.mark.ci_cpu, pytest.mark.manual
every_slug = pytest.mark.parametrize("slug", SELF_FORCING_CONFIGS)


@ci_cpu
def test_entry_points_name_the_runners() -> None:
    assert_entry_points(MEMBER, SELF_FORCING_CONFIGS)


@ci_cpu
@every_slug
def test_help_says_what_it_is_and_its_licence(slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(slug, capsys)
    assert SELF_FORCING_CONFIGS[slug].description in page
    assert "licence: Apache-2.0" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("self_forcing.config")


@ci_cpu
def test_settings_are_the_published_ones() -> None:
    transformer = MODEL.transformer
    assert (transformer.len_t, transformer.first_len_t, transformer.window_size_t) == (3, None, 21)
    assert (transformer.sink_size_t, transformer.context_noise, transformer.guidance_scale) == (0, 0.0, 1.0)
    assert (transformer.rope, transformer.trained_frames) == ("absolute", 21)
    told = [round(step.timestep, 3) for step in MODEL.scheduler.setup().steps]
    assert told == [1000.0, 937.5, 833.333, 625.0]
    pipeline = PIPELINE_SELF_FORCING_T2V_1_3B
    assert (pipeline.height, pipeline.width, pipeline.fps, pipeline.frames_until(7)) == (480, 832, 16.0, 81)


@ci_cpu
def test_settings_are_those_of_the_recorded_rollout_of_the_original() -> None:
    """The golden that every number of a small model is compared with, of the official settings."""
    with safe_open(MEMBER.parents[1] / "tests/goldens/data/self_forcing_full21.safetensors", "pt") as file:
        recorded = json.loads(file.metadata()["config"])
    transformer, scheduler = MODEL.transformer, MODEL.scheduler
    assert recorded["frames_per_chunk"] == transformer.len_t and not recorded["independent_first_frame"]
    assert recorded["cache_capacity_frames"] == transformer.window_size_t
    assert recorded["sink_frames"] == transformer.sink_size_t
    assert recorded["context_timestep"] == 1000 * transformer.context_noise
    assert (tuple(recorded["denoising_steps"]), recorded["shift"]) == (scheduler.denoising_steps, scheduler.shift)
    assert recorded["warped_timesteps"] == pytest.approx([step.timestep for step in scheduler.setup().steps])


@ci_cpu
def test_presets_differ_in_what_they_say_only() -> None:
    tiny, long = PIPELINE_SELF_FORCING_T2V_1_3B_TAEHV, PIPELINE_SELF_FORCING_T2V_1_3B_LONG
    assert tiny.diffusion_model == MODEL
    assert long.diffusion_model.scheduler == MODEL.scheduler
    assert long.decoder == PIPELINE_SELF_FORCING_T2V_1_3B.decoder
    transformer = long.diffusion_model.transformer
    assert transformer.trained_frames is None and transformer.rope == "cache_relative"
    assert transformer.window_size_t <= MODEL.transformer.trained_frames, "no distance that training did not have"
    back = {"window_size_t": 21, "sink_size_t": 0, "rope": "absolute", "trained_frames": 21}
    assert derive_config(transformer, **back) == MODEL.transformer


LAYOUTS = [
    "self-forcing.causalwan-1.3b.inner", "self-forcing.generator", "self-forcing.generator_ema-fsdp-1.3b",
    "wan2.1-t2v-1.3b.native", "wan2.1-t2v-1.3b.diffusers",
]  # fmt: skip


@ci_cpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_remap_is_full_bijection(name: str) -> None:
    assert_full_bijection(MODEL.transformer, header(name))


@ci_cpu
@pytest.mark.parametrize("beside", [(), ("generator", "critic")])
def test_the_published_file_remap_is_full_bijection(beside: tuple[str, ...]) -> None:
    """The averaged generator is taken out of the training dump, whatever stands beside it."""
    inner = {key.removeprefix("generator_ema."): value for key, value in header("self-forcing.checkpoint-top").items()}
    dump = {name: {key: torch.zeros(1) for key in inner} for name in beside} | {"generator_ema": inner}
    state, _ = select(dump, Path("self_forcing_dmd.pt"), None)
    assert_full_bijection(MODEL.transformer, state)


@ci_cpu
def test_the_tiny_vae_remap_is_full_bijection() -> None:
    assert_full_bijection(PIPELINE_SELF_FORCING_T2V_1_3B_TAEHV.decoder, header("taew2_1"))


@ci_cpu
@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("self-forcing.generator", "model.blocks.29.cross_attn.norm_k.weight", "blocks.29.cross_attn.norm_k.weight"),
        ("self-forcing.generator_ema-fsdp-1.3b", "model._fsdp_wrapped_module.head.modulation", "head.modulation"),
        ("wan2.1-t2v-1.3b.diffusers", "blocks.7.norm2.weight", "blocks.7.norm3.weight"),
    ],
)
def test_the_remap_spot_checks_real_keys(name: str, theirs: str, ours: str) -> None:
    assert sources_by_target(MODEL.transformer, header(name))[ours] == (theirs,)


@ci_cpu
def test_a_checkpoint_of_another_size_does_not_fit() -> None:
    with pytest.raises(AssertionError):
        assert_full_bijection(MODEL.transformer, header("self-forcing.generator_ema-fsdp-14b"))


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    small = derive_config(MODEL, {"transformer.network.num_layers": 2})
    assert len(build_on_meta(small.transformer).network.blocks) == 2
    assert MODEL.transformer.network.num_layers == 30


@ci_cpu
@pytest.mark.parametrize(
    "scheduler",
    [
        FewStepSchedulerConfig(num_steps=2, denoising_steps=(1000, 500)),
        FlowMatchEulerSchedulerConfig(num_steps=3, shift=5.0),
    ],
)
def test_another_sampler_can_be_put_in_and_makes_another_video(scheduler) -> None:
    base = shrunk(SELF_FORCING_CONFIGS["self-forcing-t2v-1.3b"]).pipeline
    swapped = derive_config(base, diffusion_model={"scheduler": scheduler})
    ours, theirs = (next(config.setup().rollout(conditions=prompt(), seed=1)).latent for config in (base, swapped))
    assert ours.shape == theirs.shape == (1, 16, 3, 4, 6)
    assert not torch.allclose(ours, theirs, atol=1e-4)


@ci_cpu
@every_slug
def test_a_run_writes_a_video(slug: str, tmp_path: Path) -> None:
    frames = run_to_video(shrunk(SELF_FORCING_CONFIGS[slug]), tmp_path, num_chunk=2)
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * (9 + 12)


@pytest.mark.ci_gpu
@every_slug
def test_one_chunk_on_a_gpu(slug: str) -> None:
    config = shrunk(SELF_FORCING_CONFIGS[slug]).pipeline
    pipeline = derive_config(config, {"diffusion_model.transformer.dtype": "bfloat16"}).setup(device="cuda")
    (chunk,) = pipeline.rollout(conditions=prompt().to_dict(), num_chunk=1)
    assert chunk.frames.shape == (1, 9, 32, 48, 3)
    assert torch.isfinite(chunk.latent).all()


@manual
def test_two_sources_of_the_tiny_vae_have_weights_identical() -> None:
    """Needs ``taew2_1.pth`` of the author's repository in the folder the test is run from."""
    ours = PIPELINE_SELF_FORCING_T2V_1_3B_TAEHV.decoder
    state = derive_config(ours, dtype="float16").setup().state_dict()
    other = derive_config(ours, dtype="float16", checkpoint_path="taew2_1.pth").setup().state_dict()
    assert max((state[key] - other[key]).abs().max().item() for key in state) == 0
