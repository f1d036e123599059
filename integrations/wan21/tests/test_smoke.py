"""Wan2.1 as a plugin: entry points, published settings, key maps of every layout, and a run of each kind of model."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from flashdreams.config import derive_config
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.infra.config import ModuleConfig
from flashdreams.infra.embeds import save_embeds
from flashdreams.infra.loading import build_on_meta, candidates
from flashdreams.infra.scheduler.config import DPMPPSchedulerConfig, FlowMatchEulerSchedulerConfig, UniPCSchedulerConfig
from member import assert_entry_points, header, help_page, imports_torch, manifest
from wan21.config import NEGATIVE_PROMPT, PIPELINE_WAN21_T2V_1_3B, WAN21_CONFIGS

MEMBER = Path(__file__).parents[1]

ci_cpu, manual = pytest.mark.ci_cpu, pytest.mark.manual
every_slug = pytest.mark.parametrize("slug", WAN21_CONFIGS)


@ci_cpu
def test_the_entry_points_name_the_runners() -> None:
    assert_entry_points(MEMBER, WAN21_CONFIGS)


@ci_cpu
@every_slug
def test_help_says_what_it_is_and_its_licence(slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(slug, capsys)
    assert WAN21_CONFIGS[slug].description in page and "Apache-2.0" in WAN21_CONFIGS[slug].description
    assert "--image FILE" in page and "--num-frames N" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("wan21.config")


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "steps", "shift", "prefix", "size"),
    [
        ("wan21-t2v-1.3b", 50, 5.0, "", (480, 832)),
        ("wan21-t2v-14b", 50, 5.0, "", (720, 1280)),
        ("wan21-i2v-14b-480p", 40, 3.0, "镜头晃动，", (480, 832)),
        ("wan21-i2v-14b-720p", 40, 5.0, "镜头晃动，", (720, 1280)),
        ("wan21-flf2v-14b-720p", 50, 16.0, "镜头切换，镜头晃动，", (720, 1280)),
    ],
)
def test_settings_are_the_published_ones(slug: str, steps: int, shift: float, prefix: str, size) -> None:
    pipeline, model = WAN21_CONFIGS[slug].pipeline, WAN21_CONFIGS[slug].pipeline.diffusion_model
    assert model.scheduler == UniPCSchedulerConfig(num_steps=steps, shift=shift, table="native")
    assert model.transformer.guidance_scale == 5.0
    assert model.negative_prompt(None) == prefix + NEGATIVE_PROMPT
    assert (pipeline.height, pipeline.width, pipeline.fps, pipeline.size_multiple) == (*size, 16.0, 16)
    assert model.transformer.bidirectional and not model.high_noise
    assert pipeline.frames_of(model.transformer.len_t) == WAN21_CONFIGS[slug].default_num_frames == 81
    made_from_images = "2v-14b" in slug and "t2v" not in slug
    assert (pipeline.image_encoder is not None) == made_from_images == (pipeline.image_size == "area")


# slug, part, manifests of the layouts in which its weights are published
LAYOUTS = [
    ("wan21-t2v-1.3b", "transformer", ["wan2.1-t2v-1.3b.native", "wan2.1-t2v-1.3b.diffusers",
                                       "fastvideo-internal.wan2.1-t2v-1.3b"]),
    ("wan21-t2v-14b", "transformer", ["wan2.1-t2v-14b.native", "wan2.1-t2v-14b.diffusers"]),
    ("wan21-i2v-14b-480p", "transformer", ["wan2.1-i2v-14b-480p.native", "wan2.1-i2v-14b-480p.diffusers",
                                           "fastvideo-internal.wan2.1-i2v-14b-480p"]),
    ("wan21-i2v-14b-720p", "transformer", ["wan2.1-i2v-14b-720p.native", "wan2.1-i2v-14b-720p.diffusers"]),
    ("wan21-flf2v-14b-720p", "transformer", ["wan2.1-flf2v-14b-720p.native", "wan2.1-flf2v-14b-720p.diffusers"]),
    ("wan21-t2v-1.3b", "decoder", ["wan2.1-vae.native", "wan2.1-vae.diffusers"]),
    ("wan21-t2v-1.3b", "text_encoder", ["umt5-xxl-encoder.native", "umt5-xxl-encoder.transformers",
                                        "umt5-xxl-encoder.transformers-saved"]),
    ("wan21-i2v-14b-480p", "image_encoder", ["clip-xlmr-vit-h14-full.native", "clip-xlmr-vit-h14-visual.native",
                                             "clip-vit-h14-vision-proj.transformers",
                                             "clip-vit-h14-vision-proj.transformers4",
                                             "clip-vit-h14-vision.transformers",
                                             "clip-vit-h14-vision.transformers4"]),
]  # fmt: skip
DROPPED = {
    "clip-xlmr-vit-h14-full.native": lambda key: key.startswith("textual.") or key == "log_scale",
    "umt5-xxl-encoder.transformers": lambda key: key == "encoder.embed_tokens.weight",
}
"""Keys that are left out on purpose: the text tower of CLIP, and the second name of the token table."""
REMADE = re.compile(r"self_attn\.[qkv]_proj\.|class_embedding|position_embedding\.|visual_projection\.")
"""Tensors of CLIP that are joined, reshaped or transposed rather than passed on."""


def part_of(slug: str, part: str) -> ModuleConfig:
    """Config of a part, of full size; without its checkpoint, beside which a tokenizer would be looked for."""
    pipeline = WAN21_CONFIGS[slug].pipeline
    config = pipeline.diffusion_model.transformer if part == "transformer" else getattr(pipeline, part)
    return derive_config(config, checkpoint_path=None)


@functools.cache
def module_keys(config: ModuleConfig) -> dict[str, torch.Tensor]:
    module = build_on_meta(config)
    return getattr(module, "checkpoint_root", module).state_dict()


def choice(config: ModuleConfig, checkpoint: dict[str, torch.Tensor]):
    """What loading would do with a checkpoint of these keys and shapes."""
    return choose_transform(
        module_keys(config), checkpoint, candidates(config), allow_missing=config.allow_missing, dtype=torch.float32
    )


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "part", "name"), [(slug, part, name) for slug, part, names in LAYOUTS for name in names]
)
def test_the_remap_is_full_bijection(slug: str, part: str, name: str) -> None:
    config, checkpoint = part_of(slug, part), header(name)
    _, steps, match = choice(config, checkpoint)
    assert match.ok, match
    used = [source for step in steps for source in step.sources]
    assert len(used) == len(set(used))
    dropped = DROPPED.get(name, lambda _: False)
    kept = {key: value for key, value in checkpoint.items() if not dropped(key)}
    assert set(used) <= set(kept)
    assert all(REMADE.search(key) for key in set(kept) - set(used))
    assert sum(value.numel() for value in kept.values()) == sum(step.meta.numel() for step in steps), "nothing is lost"
    targets = [step.target for step in steps]
    assert len(targets) == len(set(targets))
    assert set(module_keys(config)) - set(targets) <= set(config.allow_missing)
    if name.endswith((".diffusers", ".transformers-saved")):
        maps = manifest("rename_maps.native_to_diffusers")["maps"]
        native = name.rpartition(".")[0] + ".native"
        published = next(pairs for key, pairs in maps.items() if key.startswith(native + "->"))
        assert {step.target: step.sources for step in steps} == {ours: (theirs,) for ours, theirs in published.items()}


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "part", "name", "theirs", "ours"),
    [
        ("wan21-t2v-1.3b", "transformer", "wan2.1-t2v-1.3b.diffusers",
         "blocks.7.norm2.weight", "blocks.7.norm3.weight"),
        ("wan21-t2v-1.3b", "transformer", "wan2.1-t2v-1.3b.diffusers",
         "blocks.29.ffn.net.0.proj.bias", "blocks.29.ffn.0.bias"),
        ("wan21-i2v-14b-480p", "transformer", "wan2.1-i2v-14b-480p.diffusers",
         "blocks.39.attn2.add_k_proj.weight", "blocks.39.cross_attn.k_img.weight"),
        ("wan21-i2v-14b-480p", "transformer", "wan2.1-i2v-14b-480p.native",
         "img_emb.proj.4.bias", "img_emb.proj.4.bias"),
        ("wan21-flf2v-14b-720p", "transformer", "wan2.1-flf2v-14b-720p.diffusers",
         "condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
        ("wan21-t2v-1.3b", "decoder", "wan2.1-vae.diffusers",
         "decoder.up_blocks.1.upsamplers.0.time_conv.weight", "decoder.upsamples.7.time_conv.weight"),
        ("wan21-t2v-1.3b", "text_encoder", "umt5-xxl-encoder.transformers-saved",
         "encoder.block.3.layer.1.DenseReluDense.wi_0.weight", "blocks.3.ffn.gate.0.weight"),
        ("wan21-i2v-14b-480p", "image_encoder", "clip-vit-h14-vision-proj.transformers4",
         "vision_model.encoder.layers.5.mlp.fc1.weight", "visual.transformer.5.mlp.0.weight"),
    ],
)  # fmt: skip
def test_the_remap_spot_checks_real_keys(slug: str, part: str, name: str, theirs: str, ours: str) -> None:
    _, steps, _ = choice(part_of(slug, part), header(name))
    assert {step.target: step.sources for step in steps}[ours] == (theirs,)


@ci_cpu
def test_a_checkpoint_that_lacks_a_tensor_does_not_fit() -> None:
    checkpoint = header("wan2.1-t2v-1.3b.diffusers")
    del checkpoint["blocks.3.attn2.norm_k.weight"]
    _, _, match = choice(part_of("wan21-t2v-1.3b", "transformer"), checkpoint)
    assert not match.ok


@ci_cpu
@pytest.mark.parametrize("solver", [DPMPPSchedulerConfig, FlowMatchEulerSchedulerConfig])
def test_another_solver_can_be_put_in_and_makes_another_video(shrunk, prompt, solver) -> None:
    base = shrunk("wan21-t2v-1.3b").pipeline
    swapped = derive_config(base, diffusion_model={"scheduler": solver(num_steps=3, shift=5.0)})
    assert swapped.diffusion_model.transformer == base.diffusion_model.transformer
    ours, theirs = (
        next(iter(config.setup().rollout(conditions=prompt, num_frames=5, seed=1))).latent for config in (base, swapped)
    )
    assert ours.shape == theirs.shape == (1, 16, 2, 4, 6)
    assert not torch.allclose(ours, theirs, atol=1e-4)


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    small = derive_config(PIPELINE_WAN21_T2V_1_3B, {"diffusion_model.transformer.network.num_layers": 2})
    assert len(build_on_meta(small.diffusion_model.transformer).network.blocks) == 2
    assert PIPELINE_WAN21_T2V_1_3B.diffusion_model.transformer.network.num_layers == 30


@ci_cpu
@pytest.mark.parametrize("slug", ["wan21-t2v-1.3b", "wan21-i2v-14b-480p", "wan21-flf2v-14b-720p"])
def test_a_run_writes_a_video(slug: str, shrunk, prompt, picture, tmp_path: Path) -> None:
    """The small model through the command line's runner: saved embeddings, images of files, an mp4 and its record."""
    save_embeds(tmp_path / "prompt.safetensors", prompt.text, prompt.negative_text)
    flags = {"prompt_embeds": tmp_path / "prompt.safetensors", "output": tmp_path / "video.mp4", "num_frames": 9}
    for name in ["image"][: "i2v" in slug or "flf2v" in slug] + ["last_image"][: "flf2v" in slug]:
        Image.fromarray(picture(64, 96).numpy()).save(tmp_path / f"{name}.png")
        flags[name] = tmp_path / f"{name}.png"
    runner = derive_config(shrunk(slug), seed=0, device="cpu", ckpt_path="random:0", **flags)
    assert runner.setup().run() == tmp_path / "video.mp4"
    with av.open(str(tmp_path / "video.mp4")) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * 9
    assert json.loads((tmp_path / "video.json").read_text())["slug"] == slug


@pytest.mark.ci_gpu
@every_slug
def test_one_chunk_on_a_gpu(slug: str, shrunk, prompt, picture) -> None:
    config = derive_config(shrunk(slug).pipeline, {"diffusion_model.transformer.dtype": "bfloat16"})
    images = {"image": picture(32, 48)} if config.image_encoder is not None else {}
    if config.diffusion_model.transformer.takes_last_image:
        images["last_image"] = picture(32, 48, seed=1)
    pipeline = config.setup(device="cuda")
    conditions = {name: value.to("cuda") for name, value in prompt.to_dict().items()}
    conditions = type(prompt).from_dict(conditions)
    (chunk,) = pipeline.rollout(conditions=conditions, num_frames=9, **images)
    assert chunk.frames.shape == (1, 9, 32, 48, 3)
    assert torch.isfinite(chunk.latent).all() and chunk.frames.float().std() > 1


DIFFUSERS = {
    "wan21-t2v-1.3b": "hf://Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan21-t2v-14b": "hf://Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "wan21-i2v-14b-480p": "hf://Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "wan21-i2v-14b-720p": "hf://Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    "wan21-flf2v-14b-720p": "hf://Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
}


@manual
@pytest.mark.parametrize(("part", "folder"), [("transformer", "transformer"), ("decoder", "vae"),
                                              ("image_encoder", "image_encoder")])  # fmt: skip
@every_slug
def test_both_layouts_have_weights_identical(slug: str, part: str, folder: str) -> None:
    pipeline = WAN21_CONFIGS[slug].pipeline
    native = pipeline.diffusion_model.transformer if part == "transformer" else getattr(pipeline, part)
    if native is None:
        pytest.skip("this model has no such part")
    native = derive_config(native, dtype="float32")
    other = derive_config(native, checkpoint_path=f"{DIFFUSERS[slug]}/{folder}").setup().state_dict()
    state = native.setup().state_dict()
    unused = {key for key in state if key.startswith("visual.head")}
    worst = {key: (state[key] - other[key]).abs().max().item() for key in state.keys() - unused}
    assert max(worst.values()) == 0, sorted(worst, key=worst.__getitem__)[-3:]


@manual
@pytest.mark.parametrize("file", ["models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"])
@pytest.mark.parametrize("repository", ["Wan2.1-T2V-14B", "Wan2.1-I2V-14B-480P", "Wan2.1-I2V-14B-720P",
                                        "Wan2.1-FLF2V-14B-720P"])  # fmt: skip
def test_shared_files_are_those_of_every_repository(repository: str, file: str) -> None:
    from flashdreams.core.checkpoint import open_checkpoint

    ours, theirs = (open_checkpoint(f"hf://Wan-AI/{name}/{file}") for name in ("Wan2.1-T2V-1.3B", repository))
    assert ours.digest() == theirs.digest()
