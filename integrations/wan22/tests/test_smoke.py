"""Wan2.2 as a plugin: entry points, published settings, key maps of every layout, and a run of each kind of model."""

from __future__ import annotations

import functools
import json
import runpy
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
from flashdreams.infra.prompts import GivenPrompts
from flashdreams.infra.scheduler.config import DPMPPSchedulerConfig, FlowMatchEulerSchedulerConfig, UniPCSchedulerConfig
from member import assert_entry_points, header, help_page, imports_torch, manifest
from wan22.config import NEGATIVE_PROMPT, PIPELINE_WAN22_TI2V_5B, WAN22_CONFIGS

MEMBER = Path(__file__).parents[1]

ci_cpu, manual = pytest.mark.ci_cpu, pytest.mark.manual
every_slug = pytest.mark.parametrize("slug", WAN22_CONFIGS)


@ci_cpu
def test_the_entry_points_name_the_runners() -> None:
    assert_entry_points(MEMBER, WAN22_CONFIGS)


@ci_cpu
@every_slug
def test_help_says_what_it_is_and_its_licence(slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(slug, capsys)
    assert WAN22_CONFIGS[slug].description in page and "Apache-2.0" in WAN22_CONFIGS[slug].description
    assert "--image FILE" in page and "--num-frames N" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("wan22.config")


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "steps", "shift", "low_high", "boundary", "frames", "size", "multiple", "fps"),
    [
        ("wan22-ti2v-5b", 50, 5.0, (5.0,), None, 121, (704, 1280), 32, 24.0),
        ("wan22-t2v-a14b", 40, 12.0, (3.0, 4.0), 0.875, 81, (720, 1280), 16, 16.0),
        ("wan22-i2v-a14b", 40, 5.0, (3.5, 3.5), 0.9, 81, (720, 1280), 16, 16.0),
    ],
)
def test_settings_are_the_published_ones(slug, steps, shift, low_high, boundary, frames, size, multiple, fps) -> None:
    pipeline, model = WAN22_CONFIGS[slug].pipeline, WAN22_CONFIGS[slug].pipeline.diffusion_model
    assert model.scheduler == UniPCSchedulerConfig(num_steps=steps, shift=shift, table="native")
    experts = [model.transformer, *(expert.transformer for expert in model.high_noise)]
    assert tuple(expert.guidance_scale for expert in experts) == low_high
    assert [expert.sigma_low for expert in model.high_noise] == [boundary] * (len(low_high) - 1)
    assert model.negative_prompt(None) == NEGATIVE_PROMPT, "without the words that Wan2.1 puts before it"
    assert (pipeline.height, pipeline.width, pipeline.fps, pipeline.size_multiple) == (*size, fps, multiple)
    assert all(expert.bidirectional for expert in experts)
    assert pipeline.frames_of(model.transformer.len_t) == WAN22_CONFIGS[slug].default_num_frames == frames
    assert pipeline.image_encoder is None
    assert (pipeline.image_use, pipeline.image_size) == {
        "wan22-ti2v-5b": ("stamp", "cells"),
        "wan22-t2v-a14b": ("context", "fixed"),
        "wan22-i2v-a14b": ("concat", "area"),
    }[slug]


# slug, part, manifests of the layouts in which its weights are published
LAYOUTS = [
    ("wan22-ti2v-5b", "low", ["wan2.2-ti2v-5b.native", "wan2.2-ti2v-5b.diffusers",
                              "fastvideo-internal.wan2.2-ti2v-5b"]),
    *(
        (f"wan22-{model}-a14b", expert, [f"wan2.2-{model}-a14b.{expert}_noise_model.native",
                                         f"wan2.2-{model}-a14b.{folder}.diffusers",
                                         f"fastvideo-internal.wan2.2-{model}-a14b.transformer"])
        for model in ("t2v", "i2v")
        for expert, folder in (("high", "transformer"), ("low", "transformer_2"))
    ),
    ("wan22-ti2v-5b", "decoder", ["wan2.2-vae.native", "wan2.2-vae.diffusers"]),
    ("wan22-t2v-a14b", "decoder", ["wan2.1-vae.native", "wan2.1-vae.diffusers"]),
    ("wan22-t2v-a14b", "text_encoder", ["umt5-xxl-encoder.native", "umt5-xxl-encoder.transformers",
                                        "umt5-xxl-encoder.transformers-saved"]),
]  # fmt: skip
PUBLISHED = {
    "wan2.2-ti2v-5b.diffusers": "wan2.2-ti2v-5b.native",
    "wan2.2-i2v-a14b.transformer.diffusers": "wan2.2-i2v-a14b.high_noise_model.native",
    "wan2.2-vae.diffusers": "wan2.2-vae.native",
    "wan2.1-vae.diffusers": "wan2.1-vae.native",
    "umt5-xxl-encoder.transformers-saved": "umt5-xxl-encoder.native",
}
"""Layouts whose published rename map is here, and the native layout it starts from."""
TOKEN_TABLE_TWICE = "umt5-xxl-encoder.transformers", "encoder.embed_tokens.weight"
"""The one key that is left out on purpose."""


def part_of(slug: str, part: str) -> ModuleConfig:
    """Config of a part, of full size; without its checkpoint, beside which a tokenizer would be looked for."""
    pipeline = WAN22_CONFIGS[slug].pipeline
    model = pipeline.diffusion_model
    experts = {"low": model.transformer} | {"high": expert.transformer for expert in model.high_noise}
    config = experts[part] if part in experts else getattr(pipeline, part)
    return derive_config(config, checkpoint_path=None)


def module_keys(config: ModuleConfig) -> dict[str, torch.Tensor]:
    """State dict of the module on meta; experts, whose keys are alike, are built once."""
    return _built(derive_config(config, guidance_scale=1.0) if hasattr(config, "guidance_scale") else config)


@functools.cache
def _built(config: ModuleConfig) -> dict[str, torch.Tensor]:
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
    assert len(used) == len(set(used)) == len(steps)
    assert set(used) == {key for key in checkpoint if (name, key) != TOKEN_TABLE_TWICE}
    assert {step.target for step in steps} == set(module_keys(config))
    if name in PUBLISHED:
        maps = manifest("rename_maps.native_to_diffusers")["maps"]
        published = next(pairs for key, pairs in maps.items() if key.startswith(PUBLISHED[name] + "->"))
        assert {step.target: step.sources for step in steps} == {ours: (theirs,) for ours, theirs in published.items()}


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "part", "name", "theirs", "ours"),
    [
        ("wan22-ti2v-5b", "low", "wan2.2-ti2v-5b.diffusers",
         "blocks.7.norm2.weight", "blocks.7.norm3.weight"),
        ("wan22-ti2v-5b", "low", "wan2.2-ti2v-5b.diffusers", "scale_shift_table", "head.modulation"),
        ("wan22-t2v-a14b", "high", "wan2.2-t2v-a14b.transformer.diffusers",
         "blocks.39.attn1.to_out.0.bias", "blocks.39.self_attn.o.bias"),
        ("wan22-i2v-a14b", "low", "wan2.2-i2v-a14b.transformer_2.diffusers",
         "condition_embedder.time_proj.weight", "time_projection.1.weight"),
        ("wan22-i2v-a14b", "low", "wan2.2-i2v-a14b.low_noise_model.native",
         "patch_embedding.weight", "patch_embedding.weight"),
        ("wan22-ti2v-5b", "decoder", "wan2.2-vae.diffusers",
         "decoder.up_blocks.1.upsampler.time_conv.weight", "decoder.upsamples.1.upsamples.3.time_conv.weight"),
    ],
)  # fmt: skip
def test_the_remap_spot_checks_real_keys(slug: str, part: str, name: str, theirs: str, ours: str) -> None:
    _, steps, _ = choice(part_of(slug, part), header(name))
    assert {step.target: step.sources for step in steps}[ours] == (theirs,)


@ci_cpu
def test_a_checkpoint_that_lacks_a_tensor_does_not_fit() -> None:
    checkpoint = header("wan2.2-ti2v-5b.diffusers")
    del checkpoint["blocks.3.attn2.norm_k.weight"]
    _, _, match = choice(part_of("wan22-ti2v-5b", "low"), checkpoint)
    assert not match.ok


@ci_cpu
@pytest.mark.parametrize("solver", [DPMPPSchedulerConfig, FlowMatchEulerSchedulerConfig])
def test_another_solver_can_be_put_in_and_makes_another_video(shrunk, prompt, solver) -> None:
    base = shrunk("wan22-ti2v-5b").pipeline
    swapped = derive_config(base, diffusion_model={"scheduler": solver(num_steps=3, shift=5.0)})
    assert swapped.diffusion_model.transformer == base.diffusion_model.transformer
    ours, theirs = (
        next(iter(config.setup().rollout(conditions=prompt, num_frames=5, seed=1))).latent for config in (base, swapped)
    )
    assert ours.shape == theirs.shape == (1, 48, 2, 4, 6)
    assert not torch.allclose(ours, theirs, atol=1e-4)


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    small = derive_config(PIPELINE_WAN22_TI2V_5B, {"diffusion_model.transformer.network.num_layers": 2})
    assert len(build_on_meta(small.diffusion_model.transformer).network.blocks) == 2
    assert PIPELINE_WAN22_TI2V_5B.diffusion_model.transformer.network.num_layers == 30


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "from_image"),
    [("wan22-ti2v-5b", False), ("wan22-ti2v-5b", True), ("wan22-t2v-a14b", False), ("wan22-i2v-a14b", True)],
)
def test_a_run_writes_a_video(slug: str, from_image: bool, shrunk, prompt, picture, tmp_path: Path) -> None:
    """The small model through the command line's runner: saved embeddings, an image file, an mp4 and its record."""
    save_embeds(tmp_path / "prompt.safetensors", prompt.text, prompt.negative_text)
    flags = {"prompt_embeds": tmp_path / "prompt.safetensors", "output": tmp_path / "video.mp4", "num_frames": 5}
    if from_image:
        Image.fromarray(picture(64, 96).numpy()).save(tmp_path / "image.png")
        flags["image"] = tmp_path / "image.png"
    runner = derive_config(shrunk(slug), seed=0, device="cpu", ckpt_path="random:0", **flags)
    assert runner.setup().run() == tmp_path / "video.mp4"
    with av.open(str(tmp_path / "video.mp4")) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert [frame.shape for frame in frames] == [(64, 96, 3)] * 5
    assert json.loads((tmp_path / "video.json").read_text())["slug"] == slug


@ci_cpu
@pytest.mark.parametrize("slug", ["wan22-t2v-a14b", "wan22-i2v-a14b"])
def test_flags_about_the_transformer_are_for_both_experts(slug: str, shrunk, prompt, picture, tmp_path: Path) -> None:
    save_embeds(tmp_path / "prompt.safetensors", prompt.text, prompt.negative_text)
    Image.fromarray(picture(64, 96).numpy()).save(tmp_path / "image.png")
    runner = derive_config(
        shrunk(slug),
        prompt_embeds=tmp_path / "prompt.safetensors",
        image=tmp_path / "image.png" if "i2v" in slug else None,
        guidance_scale=2.5,
        dtype="bfloat16",
        ckpt_path="random:0",
    )
    model = runner.setup().plan().pipeline.diffusion_model
    for expert in (model.transformer, model.high_noise[0].transformer):
        assert (expert.guidance_scale, expert.dtype, expert.checkpoint_path) == (2.5, "bfloat16", "random:0")


@ci_cpu
@pytest.mark.parametrize("from_image", [False, True])
def test_the_example_writes_a_video(from_image: bool, shrunk, prompt, picture, tmp_path: Path, monkeypatch) -> None:
    config = derive_config(shrunk("wan22-ti2v-5b").pipeline, {"diffusion_model.transformer.len_t": 2})
    given = GivenPrompts(prompt.to_dict(), "A ginger cat walks along a garden wall at sunset")
    monkeypatch.setattr("flashdreams.load_pipeline", lambda slug: config.setup(text_encoder=given), raising=False)
    monkeypatch.chdir(tmp_path)
    Image.fromarray(picture(60, 90).numpy()).save("image.png")
    monkeypatch.setattr("sys.argv", ["from_python.py", *["image.png"][:from_image]])
    runpy.run_path(str(MEMBER / "examples/from_python.py"))
    with av.open("wan22.mp4") as video:
        assert len(list(video.decode(video=0))) == 5


@pytest.mark.ci_gpu
@every_slug
def test_one_chunk_on_a_gpu(slug: str, shrunk, prompt, picture) -> None:
    """In bfloat16; the experts change places between the CPU and the GPU."""
    model = {"transformer": {"dtype": "bfloat16"}}
    if WAN22_CONFIGS[slug].pipeline.diffusion_model.high_noise:
        model["high_noise"] = {0: {"transformer": {"dtype": "bfloat16"}}}
    pipeline = derive_config(shrunk(slug).pipeline, diffusion_model=model).setup(device="cuda")
    conditions = type(prompt).from_dict({name: value.to("cuda") for name, value in prompt.to_dict().items()})
    image = picture(64, 96) if slug != "wan22-t2v-a14b" else None
    (chunk,) = pipeline.rollout(conditions=conditions, num_frames=9, image=image)
    assert chunk.frames.shape == (1, 9, 64, 96, 3)
    assert torch.isfinite(chunk.latent).all() and chunk.frames.float().std() > 1


# slug, part, folder of the diffusers repository that holds it
SECOND_SOURCES = [
    ("wan22-ti2v-5b", "low", "Wan2.2-TI2V-5B-Diffusers/transformer"),
    ("wan22-ti2v-5b", "decoder", "Wan2.2-TI2V-5B-Diffusers/vae"),
    *(
        (f"wan22-{model}-a14b", expert, f"Wan2.2-{model.upper()}-A14B-Diffusers/{folder}")
        for model in ("t2v", "i2v")
        for expert, folder in (("high", "transformer"), ("low", "transformer_2"), ("decoder", "vae"))
    ),
]


@manual
@pytest.mark.parametrize(("slug", "part", "folder"), SECOND_SOURCES)
def test_both_layouts_have_weights_identical(slug: str, part: str, folder: str) -> None:
    pipeline = WAN22_CONFIGS[slug].pipeline
    model = pipeline.diffusion_model
    experts = {"low": model.transformer} | {"high": expert.transformer for expert in model.high_noise}
    native = derive_config(experts[part] if part in experts else getattr(pipeline, part), dtype="float32")
    other = derive_config(native, checkpoint_path=f"hf://Wan-AI/{folder}").setup().state_dict()
    worst = {key: (value - other[key]).abs().max().item() for key, value in native.setup().state_dict().items()}
    assert max(worst.values()) == 0, sorted(worst, key=worst.__getitem__)[-3:]


@manual
@pytest.mark.parametrize(
    ("repository", "file"),
    [
        *((repository, "models_t5_umt5-xxl-enc-bf16.pth")
          for repository in ("Wan2.2-TI2V-5B", "Wan2.2-T2V-A14B", "Wan2.2-I2V-A14B")),
        *((repository, "Wan2.1_VAE.pth") for repository in ("Wan2.2-T2V-A14B", "Wan2.2-I2V-A14B")),
    ],
)  # fmt: skip
def test_shared_files_are_those_of_every_repository(repository: str, file: str) -> None:
    from flashdreams.core.checkpoint import open_checkpoint

    ours, theirs = (open_checkpoint(f"hf://Wan-AI/{name}/{file}") for name in ("Wan2.1-T2V-1.3B", repository))
    assert ours.digest() == theirs.digest()
