"""Cosmos-Predict2.5 as a plugin: entry points, published settings, key maps of every layout, and runs of each kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from cosmos_predict2.config import (
    COSMOS_PREDICT2_CONFIGS,
    NEGATIVE_PROMPT,
    PIPELINE_COSMOS_PREDICT2_5_2B,
    CosmosTransformerConfig,
    ReasonConfig,
)
from flashdreams.config import ConfigError, derive_config
from flashdreams.infra.config import TextEncoderConfig, TransformerConfig
from flashdreams.infra.embeds import save_embeds
from flashdreams.infra.loading import build_on_meta
from flashdreams.infra.scheduler.config import DPMPPSchedulerConfig, FlowMatchEulerSchedulerConfig, UniPCSchedulerConfig
from member import (
    assert_entry_points,
    assert_full_bijection,
    header,
    help_page,
    imports_torch,
    module_keys,
    sources_by_target,
)
from suggest_pairs import cosmos as published_names

MEMBER = Path(__file__).parents[1]

ci_cpu = pytest.mark.ci_cpu
every_slug = pytest.mark.parametrize("slug", COSMOS_PREDICT2_CONFIGS)


@ci_cpu
def test_the_entry_points_name_the_runners() -> None:
    assert_entry_points(MEMBER, COSMOS_PREDICT2_CONFIGS)


@ci_cpu
@every_slug
def test_help_says_what_it_is_and_its_licence(slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(slug, capsys)
    description = COSMOS_PREDICT2_CONFIGS[slug].description
    assert description in page and "licence: NVIDIA Open Model License" in description
    assert "--image FILE" in page and "--num-frames N" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("cosmos_predict2.config")


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "dim", "heads", "layers"),
    [("cosmos-predict2.5-2b", 2048, 16, 28), ("cosmos-predict2.5-14b", 5120, 40, 36)],
)
def test_settings_are_the_published_ones(slug: str, dim: int, heads: int, layers: int) -> None:
    pipeline, model = COSMOS_PREDICT2_CONFIGS[slug].pipeline, COSMOS_PREDICT2_CONFIGS[slug].pipeline.diffusion_model
    network = model.transformer.network
    assert (network.dim, network.num_heads, network.num_layers, network.head_dim) == (dim, heads, layers, 128)
    assert (network.qk_eps, network.rope_extrapolation, network.timestep_scale) == (1e-6, (1.0, 3.0, 3.0), 0.001)
    assert model.scheduler == UniPCSchedulerConfig(num_steps=35, shift=5.0, table="native")
    assert model.transformer.guidance_scale == 1 + 7, "v_c + 7 (v_c - v_u) is scale 8 where 1 means no guidance"
    assert model.negative_prompt(None) == NEGATIVE_PROMPT
    assert (pipeline.height, pipeline.width, pipeline.fps, pipeline.size_multiple) == (704, 1280, 16.0, 16)
    assert model.transformer.bidirectional and pipeline.image_use == "stamp" and pipeline.image_size == "fixed"
    assert pipeline.frames_of(model.transformer.len_t) == COSMOS_PREDICT2_CONFIGS[slug].default_num_frames == 93
    assert model.transformer.text_shape == (pipeline.text_encoder.text_len, 28 * 3584) == (512, 100352)


@ci_cpu
def test_base_configs_have_only_fields_known_here() -> None:
    """A new field of a base wants a decision here: what it means for this model."""
    module = {"dtype", "checkpoint_path", "state_dict_transform", "transforms", "allow_missing"}
    transformer = module | {
        "network", "len_t", "guidance_scale", "cfg", "negative_prompt", "trained_frames", "stamp_image_latent",
        # Of streaming models, and of other ways to give images; none has an effect here.
        "first_len_t", "window_size_t", "sink_size_t", "rope", "context_noise", "concat_image_mask_to_latent",
        "takes_last_image", "prompt_policy", "recache_sink", "max_given_frames",
    }  # fmt: skip
    text_encoder = module | {"residence", "cache_embeddings"}
    assert {field.name for field in dataclasses.fields(TransformerConfig)} == transformer
    assert {field.name for field in dataclasses.fields(TextEncoderConfig)} == text_encoder


TRANSFORMERS = {slug: runner.pipeline.diffusion_model.transformer for slug, runner in COSMOS_PREDICT2_CONFIGS.items()}


@ci_cpu
@every_slug
def test_the_remap_of_diffusers_is_full_bijection(slug: str) -> None:
    checkpoint = header(f"{slug}.diffusers")
    assert_full_bijection(TRANSFORMERS[slug], checkpoint)
    published = published_names(f"{slug}.native", f"{slug}.diffusers")
    made = {sources[0]: target for target, sources in sources_by_target(TRANSFORMERS[slug], checkpoint).items()}
    assert {theirs: f"net.{ours}" for theirs, ours in made.items()} == {
        key: native for key, (native,) in published.items()
    }


@ci_cpu
@every_slug
def test_the_remap_of_the_native_file_is_full_bijection_but_for_seven_buffers(slug: str) -> None:
    checkpoint = header(f"{slug}.native")
    made = sources_by_target(TRANSFORMERS[slug], checkpoint)
    assert made == {key: (f"net.{key}",) for key in module_keys(TRANSFORMERS[slug])}
    left = checkpoint.keys() - {source for sources in made.values() for source in sources}
    assert left == {
        *(f"net.accum_{what}" for what in ("image_sample_counter", "iteration", "train_in_hours",
                                           "video_sample_counter")),
        *(f"net.pos_embedder.{what}" for what in ("dim_spatial_range", "dim_temporal_range", "seq")),
    }  # fmt: skip


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "theirs", "ours"),
    [
        ("cosmos-predict2.5-2b", "transformer_blocks.27.ff.net.0.proj.weight", "blocks.27.mlp.layer1.weight"),
        ("cosmos-predict2.5-2b", "transformer_blocks.3.norm2.linear_2.weight",
         "blocks.3.adaln_modulation_cross_attn.2.weight"),
        ("cosmos-predict2.5-14b", "transformer_blocks.35.attn2.norm_k.weight", "blocks.35.cross_attn.k_norm.weight"),
        ("cosmos-predict2.5-14b", "norm_out.linear_1.weight", "final_layer.adaln_modulation.1.weight"),
        ("cosmos-predict2.5-14b", "time_embed.t_embedder.linear_2.weight", "t_embedder.1.linear_2.weight"),
    ],
)  # fmt: skip
def test_the_remap_spot_checks_real_keys(slug: str, theirs: str, ours: str) -> None:
    assert sources_by_target(TRANSFORMERS[slug], header(f"{slug}.diffusers"))[ours] == (theirs,)


@ci_cpu
@pytest.mark.parametrize("lacking", ["crossattn_proj.0.bias", "transformer_blocks.0.attn1.norm_q.weight"])
def test_a_checkpoint_that_lacks_a_tensor_or_is_of_the_model_before_does_not_fit(lacking: str) -> None:
    checkpoint = header("cosmos-predict2.5-2b.diffusers")
    del checkpoint[lacking]
    for other in (checkpoint, header("cosmos-predict2-2b-v2w.diffusers")):
        with pytest.raises(AssertionError):
            sources_by_target(TRANSFORMERS["cosmos-predict2.5-2b"], other)


@ci_cpu
@pytest.mark.parametrize("solver", [DPMPPSchedulerConfig, FlowMatchEulerSchedulerConfig])
def test_another_solver_can_be_put_in_and_makes_another_video(shrunk, prompt, solver) -> None:
    base = shrunk().pipeline
    swapped = derive_config(base, diffusion_model={"scheduler": solver(num_steps=3, shift=5.0)})
    ours, theirs = (
        next(config.setup().rollout(conditions=prompt, num_frames=5, seed=1)).latent for config in (base, swapped)
    )
    assert ours.shape == theirs.shape == (1, 16, 2, 4, 6)
    assert not torch.allclose(ours, theirs, atol=1e-4)


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    changed = derive_config(
        PIPELINE_COSMOS_PREDICT2_5_2B.diffusion_model.transformer, network={"num_layers": 2, "qk_eps": 1e-5}
    )
    network = build_on_meta(changed).network
    assert len(network.blocks) == 2
    assert network.blocks[1].cross_attn.k_norm.eps == 1e-5 and network.t_embedding_norm.eps == 1e-6
    assert PIPELINE_COSMOS_PREDICT2_5_2B.diffusion_model.transformer.network.num_layers == 28


@ci_cpu
@pytest.mark.parametrize(
    "wrong",
    [
        {"window_size_t": 30},
        {"stamp_image_latent": False},
        {"given_timestep": -1.0},
        {"max_given_frames": 0},
        {"network": {"num_heads": 3}},
        {"network": {"in_dim": 16}},
        {"network": {"patch_size": (2, 2, 2)}},
        {"network": {"rope_extrapolation": (1.0, 0.0, 3.0)}},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        derive_config(CosmosTransformerConfig(), **wrong).validate_tree()


@ci_cpu
@pytest.mark.parametrize("wrong", [{"num_kv_heads": 5}, {"dtype": "float16"}, {"text_len": 0}], ids=str)
def test_a_text_encoder_that_cannot_be_is_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        derive_config(ReasonConfig(), **wrong).validate_tree()


@ci_cpu
@pytest.mark.parametrize(("slug", "images"), [("cosmos-predict2.5-2b", 0), ("cosmos-predict2.5-14b", 1)])
def test_a_run_writes_a_video(slug: str, images: int, shrunk, prompt, pictures, tmp_path: Path) -> None:
    """The small model through the command line's runner: saved embeddings, an image or none, an mp4 and its record."""
    save_embeds(tmp_path / "prompt.safetensors", prompt.text, prompt.negative_text)
    flags = {"prompt_embeds": tmp_path / "prompt.safetensors", "output": tmp_path / "video.mp4", "num_frames": 9}
    if images:
        Image.fromarray(pictures(1, 64, 96)[0].numpy()).save(tmp_path / "image.png")
        flags["image"] = tmp_path / "image.png"
    runner = derive_config(shrunk(slug), seed=0, device="cpu", ckpt_path="random:0", **flags)
    assert runner.setup().run() == tmp_path / "video.mp4"
    with av.open(str(tmp_path / "video.mp4")) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * 9
    assert json.loads((tmp_path / "video.json").read_text())["slug"] == slug


@pytest.mark.ci_gpu
@every_slug
@pytest.mark.parametrize("images", [0, 1])
def test_one_chunk_on_a_gpu(slug: str, images: int, shrunk, prompt, pictures) -> None:
    config = derive_config(shrunk(slug).pipeline, {"diffusion_model.transformer.dtype": "bfloat16"}, text_encoder=None)
    conditions = {name: value.to("cuda") for name, value in prompt.to_dict().items()}
    image = {"image": pictures()[0]} if images else {}
    (chunk,) = config.setup(device="cuda").rollout(conditions=conditions, num_frames=9, **image)
    assert chunk.frames.shape == (1, 9, 32, 48, 3)
    assert torch.isfinite(chunk.latent).all() and chunk.frames.float().std() > 1


@pytest.mark.manual
@every_slug
def test_the_text_encoder_and_the_vae_are_those_of_each_repository(slug: str) -> None:
    from flashdreams.core.checkpoint import open_checkpoint

    pipeline = COSMOS_PREDICT2_CONFIGS[slug].pipeline
    theirs = pipeline.diffusion_model.transformer.checkpoint_path.replace("/transformer@", "/text_encoder@")
    assert open_checkpoint(theirs).digest() == open_checkpoint(pipeline.text_encoder.checkpoint_path).digest()
    native = pipeline.decoder.setup().state_dict()
    vae = pipeline.diffusion_model.transformer.checkpoint_path.replace("/transformer@", "/vae@")
    other = derive_config(pipeline.decoder, checkpoint_path=vae).setup().state_dict()
    assert max((native[key].float() - other[key].float()).abs().max().item() for key in native) == 0


@pytest.mark.manual
def test_both_layouts_have_weights_identical(pytestconfig: pytest.Config) -> None:
    """The native file's name is not known here: give its source in COSMOS_NATIVE_2B."""
    import os

    source = os.environ.get("COSMOS_NATIVE_2B")
    if source is None:
        pytest.skip("set COSMOS_NATIVE_2B to the native file of the post-trained 2B model")
    ours = TRANSFORMERS["cosmos-predict2.5-2b"]
    state = ours.setup().state_dict()
    other = derive_config(ours, checkpoint_path=source).setup().state_dict()
    worst = {key: (state[key].float() - other[key].float()).abs().max().item() for key in state}
    assert max(worst.values()) == 0, sorted(worst, key=worst.__getitem__)[-3:]
