"""LongLive as a plugin: entry points, published settings, key maps, the LoRA that belongs to it, and a run of each."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from flashdreams.config import derive_config
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.lora import read_lora
from flashdreams.core.checkpoint.nesting import select
from flashdreams.infra.loading import build_on_meta
from flashdreams.infra.scheduler.config import UniPCSchedulerConfig
from flashdreams.recipes.wan.config import WanTransformerConfig
from longlive.config import (
    LONGLIVE_CONFIGS,
    PIPELINE_LONGLIVE2_TI2V_5B,
    PIPELINE_LONGLIVE_T2V_1_3B,
    LongLiveTransformerConfig,
    MergedLoraConfig,
)
from member import (
    assert_entry_points,
    assert_full_bijection,
    header,
    help_page,
    imports_torch,
    module_keys,
    prompt,
    run_to_video,
    shrunk,
    sources_by_target,
)

MEMBER = Path(__file__).parents[1]
ONE, TWO = (pipeline.diffusion_model for pipeline in (PIPELINE_LONGLIVE_T2V_1_3B, PIPELINE_LONGLIVE2_TI2V_5B))
LORA_LAYERS = [
    *(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"), "ffn.0", "ffn.2",
]  # fmt: skip

ci_cpu = pytest.mark.ci_cpu
every_slug = pytest.mark.parametrize("slug", LONGLIVE_CONFIGS)


def peft_file(config: WanTransformerConfig, rank: int = 1) -> dict[str, torch.Tensor]:
    """A LoRA in the names of the published one, on every layer that it has."""
    generator, state = torch.Generator().manual_seed(3), {}
    shapes = {key: value.shape for key, value in module_keys(config).items()}
    for block in range(config.network.num_layers):
        for layer in LORA_LAYERS:
            out, inside = shapes[f"blocks.{block}.{layer}.weight"]
            name = f"base_model.model.blocks.{block}.{layer}"
            state[f"{name}.lora_A.weight"] = torch.randn(rank, inside, generator=generator)
            state[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    return state


@ci_cpu
def test_entry_points_name_the_runners() -> None:
    assert_entry_points(MEMBER, LONGLIVE_CONFIGS)


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "licence"),
    [("longlive-t2v-1.3b", "CC BY-NC-SA 4.0, non-commercial"), ("longlive2-ti2v-5b", "Apache-2.0")],
)
def test_help_says_what_it_is_and_its_licence(slug: str, licence: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(slug, capsys)
    assert LONGLIVE_CONFIGS[slug].description in page
    assert f"(licence: {licence})" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("longlive.config")


@ci_cpu
def test_settings_of_1_0_are_the_published_ones() -> None:
    transformer = ONE.transformer
    assert (transformer.len_t, transformer.window_size_t, transformer.sink_size_t) == (3, 12, 3)
    assert (transformer.prompt_policy, transformer.recache_sink) == ("recache", False)
    assert (transformer.rope, transformer.context_noise, transformer.guidance_scale) == ("absolute", 0.0, 1.0)
    told = [round(step.timestep, 3) for step in ONE.scheduler.setup().steps]
    assert told == [1000.0, 937.5, 833.333, 625.0]


@ci_cpu
def test_settings_of_2_0_are_the_published_ones() -> None:
    transformer, pipeline = TWO.transformer, PIPELINE_LONGLIVE2_TI2V_5B
    assert (transformer.len_t, transformer.window_size_t, transformer.sink_size_t) == (8, 32, 8)
    assert transformer.stamp_image_latent and transformer.prompt_policy == "keep"
    assert TWO.scheduler == UniPCSchedulerConfig(num_steps=4, shift=5.0, table="native")
    assert (pipeline.height, pipeline.width, pipeline.size_multiple) == (704, 1280, 32)
    assert LONGLIVE_CONFIGS["longlive2-ti2v-5b"].default_num_frames == pipeline.frames_of(128) == 509


@ci_cpu
@pytest.mark.parametrize("entry", ["generator", "generator_ema"])
def test_the_remap_of_1_0_is_full_bijection(entry: str) -> None:
    state, _ = select({entry: header("self-forcing.generator")}, Path("longlive_base.pt"), None)
    assert_full_bijection(ONE.transformer, state)


@ci_cpu
@pytest.mark.parametrize("name", ["longlive2.generator", "longlive2.causalwan-5b.inner", "wan2.2-ti2v-5b.diffusers"])
def test_the_remap_of_2_0_is_full_bijection(name: str) -> None:
    assert_full_bijection(TWO.transformer, header(name))


@ci_cpu
def test_the_remap_spot_checks_real_keys() -> None:
    made = sources_by_target(TWO.transformer, header("longlive2.generator"))
    assert made["blocks.29.self_attn.norm_q.weight"] == ("model.blocks.29.self_attn.norm_q.weight",)
    assert made["head.head.bias"] == ("model.head.head.bias",)


@ci_cpu
@pytest.mark.parametrize("config", [ONE.transformer, TWO.transformer], ids=["1.0", "2.0"])
def test_the_published_lora_has_300_layers_and_all_are_matched(config: LongLiveTransformerConfig) -> None:
    root = build_on_meta(derive_config(config, checkpoint_path=None)).checkpoint_root
    lora = read_lora(peft_file(config), root.state_dict())
    assert lora.summary == "matched 300/300 layers"
    assert len(lora.patches) == 300


@ci_cpu
def test_the_lora_is_merged_into_the_weights_and_counts_in_their_digest(tmp_path: Path) -> None:
    small = shrunk(LONGLIVE_CONFIGS["longlive-t2v-1.3b"]).pipeline.diffusion_model.transformer
    small = derive_config(small, lora=None)
    base = {key: value.clone() for key, value in small.setup().checkpoint_root.state_dict().items()}
    save_file(base, tmp_path / "base.safetensors")
    state = peft_file(small, rank=4)
    save_file(state, tmp_path / "lora.safetensors")
    plain = derive_config(small, checkpoint_path=str(tmp_path / "base.safetensors"))
    lora = MergedLoraConfig(checkpoint_path=str(tmp_path / "lora.safetensors"))
    module = derive_config(plain, lora=lora).setup()
    for key, value in module.checkpoint_root.state_dict().items():
        name = f"base_model.model.{key.removesuffix('.weight')}"
        want = base[key]
        if f"{name}.lora_A.weight" in state:
            want = want + state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
        torch.testing.assert_close(value, want, rtol=1e-6, atol=1e-6)
    assert module.checkpoint_digest != plain.setup().checkpoint_digest
    assert sorted(module.load_report.digests) == ["base.safetensors", "lora.safetensors"]
    without = derive_config(plain, lora=derive_config(lora, weight=0.0)).setup()
    assert all(torch.equal(value, base[key]) for key, value in without.checkpoint_root.state_dict().items())
    again = plain.setup().checkpoint_root.state_dict()
    assert all(torch.equal(again[key], base[key]) for key in base), "the file of the base is as it was"


@ci_cpu
def test_a_lora_of_another_model_is_refused(tmp_path: Path) -> None:
    small = shrunk(LONGLIVE_CONFIGS["longlive-t2v-1.3b"]).pipeline.diffusion_model.transformer
    small = derive_config(small, lora=None)
    save_file(small.setup().checkpoint_root.state_dict(), tmp_path / "base.safetensors")
    save_file({key: value[:, :1].repeat(1, 9).contiguous() for key, value in peft_file(small).items()},
              tmp_path / "lora.safetensors")  # fmt: skip
    lora = MergedLoraConfig(checkpoint_path=str(tmp_path / "lora.safetensors"))
    with pytest.raises(CheckpointError):
        derive_config(small, lora=lora, checkpoint_path=str(tmp_path / "base.safetensors")).setup()


@ci_cpu
def test_the_transformer_config_has_only_fields_known_here() -> None:
    """A new field upstream needs a decision here: is its default right for these weights?"""
    known = {
        "dtype", "checkpoint_path", "state_dict_transform", "transforms", "allow_missing", "network", "len_t",
        "first_len_t", "window_size_t", "sink_size_t", "rope", "context_noise", "guidance_scale", "cfg",
        "negative_prompt", "stamp_image_latent", "concat_image_mask_to_latent", "takes_last_image", "prompt_policy",
        "recache_sink", "trained_frames", "reuse_controls", "max_given_frames",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(WanTransformerConfig)} == known
    assert {field.name for field in dataclasses.fields(LongLiveTransformerConfig)} == known | {"lora"}


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    small = derive_config(TWO, {"transformer.network.num_layers": 2})
    assert len(build_on_meta(small.transformer).network.blocks) == 2
    assert TWO.transformer.network.num_layers == 30


@ci_cpu
@pytest.mark.parametrize(("slug", "count", "size"), [("longlive-t2v-1.3b", 21, 16), ("longlive2-ti2v-5b", 61, 32)])
def test_a_run_writes_a_video(slug: str, count: int, size: int, tmp_path: Path) -> None:
    frames = run_to_video(shrunk(LONGLIVE_CONFIGS[slug]), tmp_path, num_chunk=2)
    assert [frame.shape for frame in frames] == [(2 * size, 3 * size, 3)] * count


@ci_cpu
def test_2_0_starts_from_an_image_that_stays_in_the_first_chunk(tmp_path: Path) -> None:
    pipeline = shrunk(LONGLIVE_CONFIGS["longlive2-ti2v-5b"]).pipeline.setup()
    picture = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    (chunk,) = pipeline.rollout(conditions=prompt(), image=picture, num_chunk=1)
    assert chunk.latent.shape == (1, 48, 8, 4, 6)
    video = picture.permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
    torch.testing.assert_close(chunk.latent[:, :, :1], pipeline.encode_video(video))


@ci_cpu
def test_a_run_of_2_0_from_an_image_writes_a_video(tmp_path: Path) -> None:
    picture = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(picture.numpy()).save(tmp_path / "first.png")
    runner = derive_config(shrunk(LONGLIVE_CONFIGS["longlive2-ti2v-5b"]), height=64, width=96)
    frames = run_to_video(runner, tmp_path, num_chunk=1, image=tmp_path / "first.png")
    assert [frame.shape for frame in frames] == [(64, 96, 3)] * 29


@pytest.mark.ci_gpu
@every_slug
def test_one_chunk_on_a_gpu(slug: str) -> None:
    config = shrunk(LONGLIVE_CONFIGS[slug]).pipeline
    pipeline = derive_config(config, {"diffusion_model.transformer.dtype": "bfloat16"}).setup(device="cuda")
    (chunk,) = pipeline.rollout(conditions=prompt().to_dict(), num_chunk=1)
    assert torch.isfinite(chunk.latent).all()


@pytest.mark.manual
def test_merged_when_loaded_and_merged_by_the_tool_have_weights_identical() -> None:
    """Needs ``longlive_merged.safetensors``, which ``flashdreams checkpoint merge-lora`` writes of base and LoRA (in
    bfloat16), in the folder the test is run from."""
    ours = ONE.transformer.setup().checkpoint_root.state_dict()
    merged = derive_config(ONE.transformer, checkpoint_path="longlive_merged.safetensors", lora=None)
    other = merged.setup().checkpoint_root.state_dict()
    assert max((ours[key] - other[key]).abs().max().item() for key in ours) == 0
