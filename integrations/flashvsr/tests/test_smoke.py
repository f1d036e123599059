"""FlashVSR as a plugin: entry points, published settings, key maps, and what its parts refuse."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flashdreams.config import ConfigError, derive_config, import_object
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.controls import Control, Frame
from flashdreams.infra.config import DecoderConfig, EncoderConfig, ModuleConfig, PipelineConfig, TextEncoderConfig
from flashdreams.infra.loading import build_on_meta
from flashdreams.infra.postprocess import PipelinePostprocessorConfig
from flashdreams.plugins.registry import get_postprocessor
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from flashvsr.config import (
    FLASHVSR_CONFIGS,
    FLASHVSR_POSTPROCESSORS,
    PIPELINE_FLASHVSR_V1_0_X4,
    PIPELINE_FLASHVSR_X4,
    PIPELINE_FLASHVSR_X4_VAE,
    ColouredVAEConfig,
    FixedPromptConfig,
    FlashVSRNetworkConfig,
    FlashVSRTransformerConfig,
    LowQualityEncoderConfig,
    TCDecoderConfig,
)
from member import (
    assert_entry_points,
    assert_full_bijection,
    header,
    help_page,
    imports_torch,
    sources_by_target,
)
from small_flashvsr import narrow, shrunk

MEMBER = Path(__file__).parents[1]
MODEL = PIPELINE_FLASHVSR_X4.diffusion_model
MODULE = {"dtype", "checkpoint_path", "state_dict_transform", "transforms", "allow_missing"}

ci_cpu, manual = pytest.mark.ci_cpu, pytest.mark.manual
every_slug = pytest.mark.parametrize("slug", FLASHVSR_CONFIGS)


@ci_cpu
def test_entry_points_name_the_runners_and_the_postprocessors() -> None:
    assert_entry_points(MEMBER, FLASHVSR_CONFIGS)
    points = tomllib.loads((MEMBER / "pyproject.toml").read_text())["project"]["entry-points"]
    assert list(points["flashdreams.postprocessors"]) == list(FLASHVSR_CONFIGS)
    for name, runner in FLASHVSR_CONFIGS.items():
        assert import_object(points["flashdreams.postprocessors"][name])[name] is FLASHVSR_POSTPROCESSORS[name]
        assert get_postprocessor(name) == FLASHVSR_POSTPROCESSORS[name]
        assert FLASHVSR_POSTPROCESSORS[name] == PipelinePostprocessorConfig(
            name=name, description=runner.description, pipeline=runner.pipeline, scale=4
        )


@ci_cpu
@every_slug
def test_help_says_what_it_is_and_its_licence(slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(slug, capsys)
    assert FLASHVSR_CONFIGS[slug].description in page
    assert "licence: Apache-2.0" in page
    assert "--video FILE" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("flashvsr.config")


@ci_cpu
def test_settings_are_the_published_ones() -> None:
    transformer, network = MODEL.transformer, MODEL.transformer.network
    assert (transformer.first_len_t, transformer.len_t, transformer.window_size_t) == (6, 2, 2 * (3 + 1))
    assert (network.window, network.sparse_ratio, network.local_range) == ((2, 8, 8), 2.0, 11)
    assert [step.timestep for step in MODEL.scheduler.setup().steps] == [1000.0]
    pipeline = PIPELINE_FLASHVSR_X4
    assert (pipeline.size_multiple, pipeline.encoder.lookahead, pipeline.encoder.scale) == (128, 4, 4)
    assert [pipeline.frames_until(chunks) for chunks in (1, 2, 3)] == [21, 29, 37]


@ci_cpu
def test_settings_are_those_of_the_recorded_stream_of_the_original() -> None:
    with safe_open(MEMBER.parents[1] / "tests/goldens/data/flashvsr_dit_stream.safetensors", "pt") as file:
        recorded = json.loads(file.metadata()["config"])
    transformer = MODEL.transformer
    assert tuple(recorded["window"]) == transformer.network.window
    assert 2 * (recorded["kv_ratio"] + 1) == transformer.window_size_t
    assert (recorded["timestep"],) == MODEL.scheduler.denoising_steps


@ci_cpu
def test_one_step_is_noise_minus_flow() -> None:
    scheduler, noise, flow = MODEL.scheduler.setup(), *torch.randn(2, 1, 4, 2, 3, 3)
    (step,) = scheduler.steps
    torch.testing.assert_close(scheduler.transition(noise, flow, step, lambda: pytest.fail("drawn")), noise - flow)


@ci_cpu
def test_presets_differ_in_what_they_say_only() -> None:
    recommended, first, full = PIPELINE_FLASHVSR_X4, PIPELINE_FLASHVSR_V1_0_X4, PIPELINE_FLASHVSR_X4_VAE
    assert (recommended.encoder.carries_past, first.encoder.carries_past) == (True, False)
    paths = {
        "text_encoder.checkpoint_path": recommended.text_encoder.checkpoint_path,
        "encoder": recommended.encoder,
        "diffusion_model.transformer.checkpoint_path": MODEL.transformer.checkpoint_path,
        "decoder.checkpoint_path": recommended.decoder.checkpoint_path,
    }
    assert derive_config(first, {"name": recommended.name, **paths}) == recommended
    assert derive_config(full, name=recommended.name, decoder=recommended.decoder) == recommended


LAYOUTS: list[tuple[ModuleConfig, str]] = [
    (MODEL.transformer, "flashvsr.dit"),
    (MODEL.transformer, "wan2.1-t2v-1.3b.diffusers"),
    (PIPELINE_FLASHVSR_X4.encoder, "flashvsr.lq_proj_in"),
    (PIPELINE_FLASHVSR_V1_0_X4.encoder, "flashvsr.lq_proj_in"),
    (PIPELINE_FLASHVSR_X4.decoder, "flashvsr.tcdecoder"),
    (PIPELINE_FLASHVSR_X4_VAE.decoder, "wan2.1-vae.native"),
]


@ci_cpu
@pytest.mark.parametrize(("config", "name"), LAYOUTS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_remap_is_full_bijection(config: ModuleConfig, name: str) -> None:
    assert_full_bijection(config, header(name))


@ci_cpu
@pytest.mark.parametrize(
    ("config", "name", "key"),
    [
        (MODEL.transformer, "flashvsr.dit", "blocks.29.self_attn.norm_k.weight"),
        (PIPELINE_FLASHVSR_X4.encoder, "flashvsr.lq_proj_in", "norm2.gamma"),
        (PIPELINE_FLASHVSR_X4.encoder, "flashvsr.lq_proj_in", "linear_layers.0.weight"),
        (PIPELINE_FLASHVSR_X4.decoder, "flashvsr.tcdecoder", "decoder.24.weight"),
        (PIPELINE_FLASHVSR_X4.decoder, "flashvsr.tcdecoder", "decoder.19.conv.4.bias"),
    ],
)
def test_the_remap_spot_checks_real_keys(config: ModuleConfig, name: str, key: str) -> None:
    assert sources_by_target(config, header(name))[key] == (key,)


@ci_cpu
@pytest.mark.parametrize("name", ["prompt", "context", "posi_prompt"])
@pytest.mark.parametrize("batched", [True, False])
def test_the_prompt_is_the_only_tensor_of_its_file(name: str, batched: bool, tmp_path: Path) -> None:
    tensor = torch.randn(6, 8)
    save_file({name: tensor[None] if batched else tensor}, tmp_path / "prompt.safetensors")
    config = derive_config(narrow().text_encoder, dtype="float32", checkpoint_path=str(tmp_path / "prompt.safetensors"))
    assert torch.equal(config.setup().encode(["", ""]), tensor.expand(2, -1, -1))


@ci_cpu
def test_the_published_prompt_is_a_tensor_that_stands_alone(tmp_path: Path) -> None:
    tensor = torch.randn(1, 6, 8)
    torch.save(tensor, tmp_path / "posi_prompt.pth")
    config = derive_config(narrow().text_encoder, dtype="float32", checkpoint_path=str(tmp_path / "posi_prompt.pth"))
    assert torch.equal(config.setup().encode([""]), tensor)


@ci_cpu
def test_a_prompt_of_another_shape_does_not_fit(tmp_path: Path) -> None:
    save_file({"prompt": torch.randn(1, 5, 8)}, tmp_path / "prompt.safetensors")
    config = derive_config(narrow().text_encoder, checkpoint_path=str(tmp_path / "prompt.safetensors"))
    with pytest.raises(CheckpointError, match="does not fit FixedPrompt"):
        config.setup()


@ci_cpu
def test_words_are_refused_since_the_model_would_not_read_them() -> None:
    pipeline = narrow().setup()
    with pytest.raises(ValueError, match="has a prompt of its own and takes no other, but got 'a cat'"):
        pipeline.rollout("a cat")


KNOWN: list[tuple[type, type, set[str], set[str]]] = [
    (
        WanNetworkConfig,
        FlashVSRNetworkConfig,
        {
            "dim", "ffn_dim", "num_heads", "num_layers", "in_dim", "out_dim", "text_dim", "text_len", "freq_dim",
            "patch_size", "eps", "rope_theta", "attention", "image_dim", "image_tokens", "image_positions",
        },
        {"window", "sparse_ratio", "local_range", "sparse_attention"},
    ),
    (
        WanTransformerConfig,
        FlashVSRTransformerConfig,
        MODULE | {
            "network", "len_t", "first_len_t", "window_size_t", "sink_size_t", "rope", "context_noise", "cfg",
            "guidance_scale", "negative_prompt", "trained_frames", "stamp_image_latent", "concat_image_mask_to_latent",
            "takes_last_image", "prompt_policy", "recache_sink", "reuse_controls", "max_given_frames",
        },
        set(),
    ),
    (EncoderConfig, LowQualityEncoderConfig, MODULE, {"carries_past", "hidden_dims", "dim", "scale"}),
    (TextEncoderConfig, FixedPromptConfig, MODULE | {"residence", "cache_embeddings"}, {"text_len", "text_dim"}),
    (DecoderConfig, TCDecoderConfig, MODULE, {"latent_channels", "dims", "latents_per_pass", "colour"}),
    (
        WanVAEConfig,
        ColouredVAEConfig,
        MODULE | {"dim", "z_dim", "dim_mult", "num_res_blocks", "temporal_downsample", "latents_mean", "latents_std"},
        {"colour"},
    ),
]  # fmt: skip


@ci_cpu
@pytest.mark.parametrize(
    ("base", "ours", "known", "added"), KNOWN, ids=lambda v: v.__name__ if isinstance(v, type) else ""
)
def test_base_configs_have_only_fields_known_here(base: type, ours: type, known: set[str], added: set[str]) -> None:
    """A new field upstream needs a decision here: is its default right for these weights?"""
    assert {field.name for field in dataclasses.fields(base)} == known
    assert {field.name for field in dataclasses.fields(ours)} == known | added


@ci_cpu
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"window_size_t": 7}, "window_size_t is 7; expected whole windows of 2 latent frames"),
        ({"len_t": 3}, "len_t is 3"),
        ({"window_size_t": 4}, "leaves 4 latent frames for the ring"),
        ({"sink_size_t": 2}, "neither sink"),
        ({"guidance_scale": 2.0}, "neither sink, relative positions, guidance"),
        ({"network": {"window": (2, 8, 4)}}, "rows and columns must be equal"),
        ({"network": {"sparse_ratio": float("nan")}}, "sparse_ratio is nan"),
        ({"network": {"local_range": 0}}, "local_range is 0"),
    ],
)
def test_settings_that_the_model_cannot_have_are_refused(changes: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        derive_config(MODEL.transformer, changes).validate_tree()


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    network = build_on_meta(derive_config(MODEL.transformer, network={"local_range": 9, "num_layers": 2})).network
    assert [block.self_attn.local_range for block in network.blocks] == [9, 9]
    assert (MODEL.transformer.network.local_range, MODEL.transformer.network.num_layers) == (11, 30)


def video(count: int = 22, height: int = 32, width: int = 64) -> list[Control]:
    pixels = torch.randint(
        0, 256, (count, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return [Control(frame=Frame(frame.numpy())) for frame in pixels]


def made(config: PipelineConfig) -> torch.Tensor:
    """Two chunks of frames."""
    return torch.cat([c.frames for c in config.setup().rollout(control=video(29, 16, 24), num_chunk=2, seed=1)])


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return made(narrow())


CHANGES = {
    "budget": {"diffusion_model.transformer.network.sparse_ratio": 0.0035},
    "local range": {"diffusion_model.transformer.network.local_range": 1},
    "kept rows": {"diffusion_model.transformer.window_size_t": 6},
    "projection": {"encoder.carries_past": False},
    "colours": {"decoder.colour": "wavelet"},
}


@ci_cpu
@pytest.mark.parametrize("name", CHANGES)
def test_another_choice_can_be_put_in_and_makes_another_video(name: str, plain: torch.Tensor) -> None:
    other = made(derive_config(narrow(), CHANGES[name]))
    assert other.shape == plain.shape == (29, 64, 96, 3)
    assert not torch.equal(other, plain)


@pytest.mark.ci_gpu
@every_slug
def test_one_chunk_on_a_gpu(slug: str) -> None:
    """In the published precision, by whichever block-sparse backend is the best there; near to float32 on the CPU."""
    config = shrunk(FLASHVSR_CONFIGS[slug], dim=256, num_heads=4, ffn_dim=128).pipeline
    config = derive_config(config, encoder={"dim": 256})
    half = {"dtype": "bfloat16"}
    changes = {"encoder": half, "text_encoder": half, "decoder": half, "diffusion_model": {"transformer": half}}
    (chunk,) = derive_config(config, changes).setup(device="cuda").rollout(control=video(), num_chunk=1)
    assert chunk.frames.shape == (21, 128, 256, 3)
    assert torch.isfinite(chunk.latent).all()
    (exact,) = config.setup().rollout(control=video(), num_chunk=1)
    assert (chunk.latent.cpu() - exact.latent).abs().mean() < 0.03 * exact.latent.abs().mean()


@manual
def test_two_sources_of_the_vae_have_weights_identical() -> None:
    """``Wan2.1_VAE.pth`` is published beside FlashVSR's own weights too (needs both downloads)."""
    ours = derive_config(PIPELINE_FLASHVSR_X4_VAE.decoder, dtype="float32")
    state = ours.setup().state_dict()
    other = derive_config(ours, checkpoint_path="hf://JunhaoZhuang/FlashVSR-v1.1/Wan2.1_VAE.pth").setup().state_dict()
    assert max((state[key] - other[key]).abs().max().item() for key in state) == 0
