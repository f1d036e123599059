"""Matrix-Game-2 as a plugin: entry points, published settings, key maps, and a run of each preset."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from flashdreams.config import apply_dict, derive_config, to_dict
from flashdreams.infra.config import EncoderConfig, ModuleConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.loading import build_on_meta
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from matrix_game_2.config import (
    MATRIX_GAME_2_CONFIGS,
    PIPELINE_MATRIX_GAME_2_UNIVERSAL,
    TRANSFORMER_MATRIX_GAME_2_FOUNDATION,
    ActionEncoderConfig,
    MatrixGame2NetworkConfig,
)
from member import (
    assert_entry_points,
    assert_full_bijection,
    header,
    help_page,
    imports_torch,
    manifest,
    sources_by_target,
)

MEMBER = Path(__file__).parents[1]
SLUGS = {
    "universal": "matrix-game-2-universal",
    "gta_drive": "matrix-game-2-gta-drive",
    "templerun": "matrix-game-2-templerun",
}

ci_cpu, manual = pytest.mark.ci_cpu, pytest.mark.manual
every_slug = pytest.mark.parametrize("slug", MATRIX_GAME_2_CONFIGS)


def transformer_of(name: str) -> WanTransformerConfig:
    if name == "foundation":
        return TRANSFORMER_MATRIX_GAME_2_FOUNDATION
    return MATRIX_GAME_2_CONFIGS[SLUGS[name]].pipeline.diffusion_model.transformer


@ci_cpu
def test_the_entry_points_name_the_runners() -> None:
    assert list(SLUGS.values()) == list(MATRIX_GAME_2_CONFIGS)
    assert_entry_points(MEMBER, MATRIX_GAME_2_CONFIGS)


@ci_cpu
@every_slug
def test_help_says_what_it_is_and_its_licence(slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(slug, capsys)
    assert MATRIX_GAME_2_CONFIGS[slug].description in page and "licence: MIT" in page
    assert "--image FILE" in page and "--control" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("matrix_game_2.config")


@ci_cpu
@pytest.mark.parametrize(
    ("name", "window", "keys", "mouse", "steps", "timesteps"),
    [
        ("universal", 6, 4, 2, (1000, 666, 333), [1000, 908.84, 713.98]),
        ("gta_drive", 4, 2, 2, (1000, 666, 333), [1000, 908.84, 713.98]),
        ("templerun", 6, 7, 0, (1000, 750, 500, 250), [1000, 937.5, 833.33, 625]),
    ],
)
def test_settings_are_the_published_ones(name: str, window: int, keys: int, mouse: int, steps, timesteps) -> None:
    pipeline = MATRIX_GAME_2_CONFIGS[SLUGS[name]].pipeline
    model, transformer = pipeline.diffusion_model, pipeline.diffusion_model.transformer
    assert (transformer.window_size_t, transformer.sink_size_t, transformer.len_t) == (window, 0, 3)
    assert (transformer.network.keyboard_dim, transformer.network.mouse_dim) == (keys, mouse)
    assert (transformer.guidance_scale, transformer.context_noise, transformer.rope) == (1, 0, "absolute")
    assert model.scheduler == FewStepSchedulerConfig(num_steps=len(steps), denoising_steps=steps, shift=5.0, warp=True)
    assert [step.timestep for step in model.scheduler.setup().steps] == pytest.approx(timesteps, abs=0.005)
    assert (pipeline.height, pipeline.width) == (352, 640)
    assert pipeline.frames_until(1) == 9 and pipeline.frames_until(2) == 21
    encoder, network = pipeline.encoder, transformer.network
    assert (encoder.keyboard_dim, encoder.mouse_dim, encoder.window) == (keys, mouse, network.action_window)
    assert not transformer.takes_text and pipeline.text_encoder is None


@ci_cpu
@pytest.mark.parametrize("name", [*SLUGS, "foundation"])
def test_the_network_has_the_published_sizes(name: str) -> None:
    published, network = manifest(f"matrix-game-2.{name}")["config"], transformer_of(name).network
    actions = published["action_config"]
    for field in ("dim", "ffn_dim", "freq_dim", "num_heads", "num_layers", "in_dim", "out_dim", "eps"):
        assert getattr(network, field) == published[field]
    assert list(range(network.action_blocks)) == actions["blocks"]
    assert (network.action_dim, network.action_heads) == (actions["keyboard_hidden_dim"], actions["heads_num"])
    assert network.action_dim == actions.get("mouse_hidden_dim", network.action_dim)
    assert (network.action_embed_dim, network.action_window) == (actions["hidden_size"], actions["windows_size"])
    assert (network.action_rope_dim, network.action_rope_theta) == (actions["rope_dim_list"][0], actions["rope_theta"])
    assert network.keyboard_dim == actions["keyboard_dim_in"]
    assert network.mouse_dim == actions.get("mouse_dim_in", 0)
    if name != "foundation":
        assert transformer_of(name).window_size_t == published["local_attn_size"]


MANIFESTS = [*SLUGS, *(f"{name}.file" for name in SLUGS), "foundation"]


@ci_cpu
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_remap_is_full_bijection(name: str) -> None:
    assert_full_bijection(transformer_of(name.removesuffix(".file")), header(f"matrix-game-2.{name}"))


@ci_cpu
@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("universal.file", "model.blocks.14.action_model.t_qkv.weight", "blocks.14.action_model.t_qkv.weight"),
        ("gta_drive.file", "model.blocks.0.action_model.mouse_mlp.3.bias", "blocks.0.action_model.mouse_mlp.3.bias"),
        ("templerun.file", "model.blocks.3.action_model.key_attn_q_norm.weight",
         "blocks.3.action_model.key_attn_q_norm.weight"),
        ("universal.file", "model.img_emb.proj.4.bias", "img_emb.proj.4.bias"),
        ("foundation", "blocks.29.action_model.keyboard_attn_kv.weight",
         "blocks.29.action_model.keyboard_attn_kv.weight"),
        ("universal", "blocks.29.cross_attn.k.weight", "blocks.29.cross_attn.k.weight"),
    ],
)  # fmt: skip
def test_the_remap_spot_checks_real_keys(name: str, theirs: str, ours: str) -> None:
    config = transformer_of(name.removesuffix(".file"))
    assert sources_by_target(config, header(f"matrix-game-2.{name}"))[ours] == (theirs,)


@ci_cpu
@pytest.mark.parametrize(
    ("config", "checkpoint"),
    [
        ("universal", "gta_drive"),
        ("templerun", "universal"),
        ("universal", "foundation"),
        ("foundation", "universal"),
    ],
)
def test_a_checkpoint_of_another_preset_does_not_fit(config: str, checkpoint: str) -> None:
    with pytest.raises(AssertionError):
        assert_full_bijection(transformer_of(config), header(f"matrix-game-2.{checkpoint}"))


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    base = PIPELINE_MATRIX_GAME_2_UNIVERSAL.diffusion_model.transformer
    small = derive_config(base, {"network.num_layers": 4, "network.action_blocks": 1, "network.mouse_dim": 0})
    blocks = build_on_meta(small).network.blocks
    assert [hasattr(block, "action_model") for block in blocks] == [True, False, False, False]
    assert not hasattr(blocks[0].action_model, "t_qkv")
    assert (base.network.num_layers, base.network.action_blocks, base.network.mouse_dim) == (30, 15, 2)


@ci_cpu
@every_slug
def test_a_config_survives_its_file(slug: str) -> None:
    runner = MATRIX_GAME_2_CONFIGS[slug]
    assert apply_dict(runner, json.loads(json.dumps(to_dict(runner)))) == runner


@ci_cpu
@pytest.mark.parametrize(
    ("base", "own", "known"),
    [
        (
            WanNetworkConfig, MatrixGame2NetworkConfig,
            "dim ffn_dim num_heads num_layers in_dim out_dim text_dim text_len freq_dim patch_size eps rope_theta "
            "attention image_dim image_tokens image_positions",
        ),
        (EncoderConfig, ActionEncoderConfig, "dtype checkpoint_path state_dict_transform transforms allow_missing"),
        (
            WanTransformerConfig, WanTransformerConfig,
            "dtype checkpoint_path state_dict_transform transforms allow_missing network len_t first_len_t "
            "window_size_t sink_size_t rope context_noise guidance_scale cfg negative_prompt trained_frames "
            "stamp_image_latent concat_image_mask_to_latent takes_last_image prompt_policy recache_sink reuse_controls "
            "max_given_frames",
        ),
    ],
    ids=["network", "encoder", "transformer"],
)  # fmt: skip
def test_a_new_field_of_a_base_config_needs_a_decision_here(base: type, own: type[ModuleConfig], known: str) -> None:
    """Is its default right for these weights?"""
    assert {field.name for field in dataclasses.fields(base)} == set(known.split())
    assert issubclass(own, base)


def run_to_video(runner, folder: Path, **flags) -> list:
    """Frames of the mp4 that the command line's runner writes for a shrunken model and a picture of another shape."""
    pixels = torch.randint(0, 256, (70, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    Image.fromarray(pixels.numpy()).save(folder / "picture.png")
    runner = derive_config(
        runner, seed=0, device="cpu", ckpt_path="random:0", image=folder / "picture.png", output=folder / "video.mp4",
        **flags,
    )  # fmt: skip
    assert runner.setup().run() == folder / "video.mp4"
    with av.open(str(folder / "video.mp4")) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "control"),
    [
        ("matrix-game-2-universal", "w:9 w+look-left:12"),
        ("matrix-game-2-gta-drive", "w+a"),
        ("matrix-game-2-templerun", "jump:4 none:8 turn-left"),
    ],
)
def test_a_run_writes_a_video(slug: str, control: str, shrunk, tmp_path: Path) -> None:
    frames = run_to_video(shrunk(slug), tmp_path, num_chunk=2, control=control)
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * (9 + 12)
    record = json.loads((tmp_path / "video.json").read_text())
    assert record["slug"] == slug and record["output"]["height"] == 32


@ci_cpu
def test_other_keys_make_another_video(quick, tmp_path: Path) -> None:
    runner = quick("matrix-game-2-universal")
    one, other = (run_to_video(runner, tmp_path, num_chunk=2, control=keys) for keys in ("w:21", "w:9 s+i:12"))
    assert (one[0] == other[0]).all(), "the same picture and noise"
    assert any((a != b).any() for a, b in zip(one[9:], other[9:], strict=True))


@ci_cpu
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"image": None}, "from an image"),
        ({"prompt": "a street at night"}, "prompt"),
        ({"control": "hop:4"}, "hop"),
        ({"last_image": Path("picture.png")}, "last image"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(flags: dict, message: str, shrunk, tmp_path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "picture.png")
    flags = {"image": tmp_path / "picture.png"} | flags
    runner = derive_config(shrunk("matrix-game-2-universal"), output=tmp_path / "video.mp4", **flags)
    with pytest.raises(UserError, match=message):
        runner.setup().plan()


@pytest.mark.ci_gpu
@every_slug
def test_one_chunk_on_a_gpu(slug: str, shrunk, picture) -> None:
    config = derive_config(shrunk(slug).pipeline, {"diffusion_model.transformer.dtype": "bfloat16"})
    pipeline = config.setup(device="cuda")
    control = [pipeline.config.encoder.takes.validate("w")] * 9
    (chunk,) = pipeline.rollout(image=picture, control=control, num_chunk=1)
    assert chunk.frames.shape == (9, 32, 48, 3)
    assert torch.isfinite(chunk.latent).all() and chunk.frames.float().std() > 1


@manual
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PIPELINE_MATRIX_GAME_2_UNIVERSAL.decoder, "Wan2.1_VAE.pth"),
        (PIPELINE_MATRIX_GAME_2_UNIVERSAL.image_encoder,
         "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"),
    ],
    ids=["vae", "clip"],
)  # fmt: skip
def test_two_sources_of_the_shared_parts_have_weights_identical(ours: ModuleConfig, theirs: str) -> None:
    """The copies beside the model, and those of Wan2.1 that the presets name."""
    state = ours.setup().state_dict()
    other = derive_config(ours, checkpoint_path=f"hf://Skywork/Matrix-Game-2.0/{theirs}").setup().state_dict()
    assert max((state[key] - other[key]).abs().max().item() for key in state) == 0
