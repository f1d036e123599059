"""FastVideo's causal Wan2.2 as a plugin: entry point, settings, key maps, its two experts, and a run from an image."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from fastvideo_causal_wan22.config import FASTVIDEO_CAUSAL_WAN22_CONFIGS, RUNNER_FASTVIDEO_CAUSAL_WAN22_I2V_A14B
from flashdreams.config import derive_config
from flashdreams.infra.loading import build_on_meta
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
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

MEMBER = Path(__file__).parents[1]
RUNNER = RUNNER_FASTVIDEO_CAUSAL_WAN22_I2V_A14B
MODEL = RUNNER.pipeline.diffusion_model
EXPERTS = {"transformer": MODEL.high_noise[0].transformer, "transformer_2": MODEL.transformer}
"""By the name of their folder."""

ci_cpu = pytest.mark.ci_cpu


@pytest.fixture(scope="module")
def small():
    """The shrunken pipeline without its decoder, with experts that differ as the published ones do."""
    config = derive_config(shrunk(RUNNER).pipeline, decoder=None, height=4, width=6)
    pipeline = config.setup()
    for parameter in pipeline.diffusion_model.experts[0].parameters():
        parameter.mul_(1.2)
    return pipeline


@ci_cpu
def test_entry_point_names_the_runner() -> None:
    assert_entry_points(MEMBER, FASTVIDEO_CAUSAL_WAN22_CONFIGS)


@ci_cpu
def test_help_says_what_it_is_and_its_licence(capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(RUNNER.runner_name, capsys)
    assert RUNNER.description in page
    assert "licence: Apache-2.0" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("fastvideo_causal_wan22.config")


@ci_cpu
def test_settings_are_the_published_ones() -> None:
    assert MODEL.scheduler.boundary == MODEL.high_noise[0].sigma_low == 0.875
    told = [round(step.timestep, 2) for step in MODEL.scheduler.setup().steps]
    assert told == [1000.0, 985.51, 965.52, 936.17, 865.98, 819.88, 750.0, 631.58]
    for transformer in EXPERTS.values():
        assert (transformer.len_t, transformer.window_size_t, transformer.sink_size_t) == (3, 21, 0)
        assert (transformer.network.in_dim, transformer.guidance_scale) == (16, 1.0)
    paths = {path.rpartition("/")[2]: config for config in EXPERTS.values() if (path := config.checkpoint_path)}
    assert paths == EXPERTS
    plan = RUNNER.pipeline.plan(given=1)
    assert [plan.span(i) for i in range(3)] == [(0, 1), (1, 4), (4, 7)]
    assert RUNNER.pipeline.plan() == plan, "without a picture the first chunk is one frame too"


@ci_cpu
@pytest.mark.parametrize("folder", EXPERTS)
def test_the_remap_is_full_bijection(folder: str) -> None:
    name = f"fastvideo-causalwan2.2-i2v-a14b-preview.{folder}.diffusers"
    assert_full_bijection(EXPERTS[folder], header(name))


@ci_cpu
def test_the_remap_spot_checks_real_keys() -> None:
    made = sources_by_target(
        EXPERTS["transformer"], header("fastvideo-causalwan2.2-i2v-a14b-preview.transformer.diffusers")
    )
    assert made["blocks.39.self_attn.o.bias"] == ("blocks.39.attn1.to_out.0.bias",)
    assert made["blocks.0.norm3.weight"] == ("blocks.0.norm2.weight",)
    assert made["time_projection.1.weight"] == ("condition_embedder.time_proj.weight",)


@ci_cpu
def test_the_image_channels_of_the_base_model_do_not_fit() -> None:
    with pytest.raises(AssertionError):
        assert_full_bijection(MODEL.transformer, header("wan2.2-i2v-a14b.transformer.diffusers"))


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    small = derive_config(MODEL, {"high_noise.0.transformer.network.num_layers": 3})
    assert len(build_on_meta(small.high_noise[0].transformer).network.blocks) == 3
    assert MODEL.transformer.network.num_layers == MODEL.high_noise[0].transformer.network.num_layers == 40


@ci_cpu
def test_each_expert_predicts_above_or_below_the_boundary_and_commits_every_chunk(small, monkeypatch) -> None:
    calls = []
    for number, expert in enumerate(small.diffusion_model.experts):
        predict, commit = expert.predict_flow, expert.commit
        monkeypatch.setattr(expert, "predict_flow", lambda *a, n=number, f=predict: calls.append((n, "p")) or f(*a))
        monkeypatch.setattr(expert, "commit", lambda *a, n=number, f=commit: calls.append((n, "c")) or f(*a))
    rollout = small.rollout(conditions=prompt(), num_chunk=1)
    next(rollout)
    rollout.flush()
    assert calls == [(0, "p")] * 4 + [(1, "p")] * 4 + [(0, "c"), (1, "c")]


@ci_cpu
def test_experts_have_contexts_of_their_own(small) -> None:
    rollout = small.rollout(conditions=prompt(), num_chunk=2)
    next(rollout), next(rollout)
    rollout.flush()
    high, low = (cache.branches[0].blocks[-1] for cache in rollout.cache.experts)
    for ours, theirs in ((high.self_kv.k, low.self_kv.k), (high.text_k, low.text_k)):
        assert ours.shape == theirs.shape
        assert not torch.allclose(ours, theirs, atol=1e-3)


@ci_cpu
def test_a_picture_is_the_first_frame_of_the_context(small) -> None:
    """As published: its latent is run through both experts at timestep 0, and what is generated begins after it."""
    picture = torch.randn(1, 16, 1, 4, 6)
    rollout = small.rollout(conditions=prompt(), initial_latents=picture, num_chunk=2, seed=1)
    first, second = next(rollout), next(rollout)
    assert torch.equal(first.latent, picture)
    assert second.latent.shape[2] == 3
    cache = small.initialize_cache(conditions=prompt(), initial_latents=picture, seed=1)
    model = small.diffusion_model
    with torch.no_grad():
        for expert, expert_cache in zip(model.experts, cache.experts, strict=True):
            expert.commit(picture, torch.zeros(1), expert_cache)
        x = cache.noise.initial(1, 1, (1, 16, 3, 4, 6))
        for step in model.scheduler.steps:
            which = 0 if step.timestep >= 875 else 1
            flow = model.experts[which].predict_flow(x, torch.tensor([step.timestep]), cache.experts[which])
            draw = lambda step=step: cache.noise.step(1, step.index, 1, (1, 16, 3, 4, 6))  # noqa: E731
            x = model.scheduler.transition(x, flow, step, draw)
    assert torch.equal(second.latent, x)


@ci_cpu
def test_the_sampler_without_a_boundary_makes_another_video(small) -> None:
    """Config swap: the plain few-step sampler on the same two experts."""
    plain = FewStepSchedulerConfig(num_steps=8, denoising_steps=MODEL.scheduler.denoising_steps, shift=12.0)
    base = small.config
    swapped = derive_config(base, diffusion_model={"scheduler": plain})
    ours, theirs = (next(config.setup().rollout(conditions=prompt(), seed=1)).latent for config in (base, swapped))
    assert ours.shape == theirs.shape == (1, 16, 1, 4, 6)
    assert not torch.allclose(ours, theirs, atol=1e-3)


@ci_cpu
def test_a_run_from_an_image_writes_a_video(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=generator)
    Image.fromarray(picture.numpy()).save(tmp_path / "first.png")
    frames = run_to_video(shrunk(RUNNER), tmp_path, num_chunk=2, image=tmp_path / "first.png")
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * (1 + 12)


@pytest.mark.ci_gpu
def test_one_chunk_on_a_gpu() -> None:
    half = {"dtype": "bfloat16"}
    config = derive_config(shrunk(RUNNER).pipeline, {"diffusion_model.transformer": half})
    pipeline = derive_config(config, {"diffusion_model.high_noise.0.transformer": half}).setup(device="cuda")
    chunks = list(pipeline.rollout(conditions=prompt().to_dict(), num_chunk=2))
    assert [chunk.frames.shape for chunk in chunks] == [(1, 1, 32, 48, 3), (1, 12, 32, 48, 3)]
    assert all(torch.isfinite(chunk.latent).all() for chunk in chunks)


@pytest.mark.manual
@pytest.mark.parametrize("folder", EXPERTS)
def test_two_sources_of_the_weights_identical(folder: str) -> None:
    """The published shards, and the file that ``flashdreams checkpoint convert`` writes of them in native names, which
    must lie as ``<folder>.native.safetensors`` where the test is run."""
    ours = derive_config(EXPERTS[folder]).setup().state_dict()
    other = derive_config(EXPERTS[folder], checkpoint_path=f"{folder}.native.safetensors").setup().state_dict()
    assert max((ours[key] - other[key]).abs().max().item() for key in ours) == 0
