"""Causal-Forcing as a plugin: entry points, published settings, key maps, steps of the first chunk, runs of presets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from causal_forcing.config import CAUSAL_FORCING_CONFIGS, PIPELINE_CAUSAL_FORCING_T2V_1_3B
from flashdreams.config import derive_config
from flashdreams.core.checkpoint.nesting import select
from flashdreams.infra.loading import build_on_meta
from flashdreams.scripts.run import run
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
MODEL = PIPELINE_CAUSAL_FORCING_T2V_1_3B.diffusion_model

ci_cpu = pytest.mark.ci_cpu
every_slug = pytest.mark.parametrize("slug", CAUSAL_FORCING_CONFIGS)


@ci_cpu
def test_entry_points_name_the_runners() -> None:
    assert_entry_points(MEMBER, CAUSAL_FORCING_CONFIGS)


@ci_cpu
@every_slug
def test_help_says_what_it_is_and_its_licence(slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_page(slug, capsys)
    assert CAUSAL_FORCING_CONFIGS[slug].description in page
    assert "licence: Apache-2.0" in page


@ci_cpu
def test_config_imports_no_torch() -> None:
    assert not imports_torch("causal_forcing.config")


@ci_cpu
@pytest.mark.parametrize(
    ("slug", "file", "spans"),
    [
        ("causal-forcing-t2v-1.3b", "chunkwise", [(0, 3), (3, 6), (6, 9)]),
        ("causal-forcing-t2v-1.3b-framewise", "framewise", [(0, 1), (1, 2), (2, 3)]),
        ("causal-forcing-i2v-1.3b", "chunkwise", [(0, 1), (1, 4), (4, 7)]),
        ("causal-forcing-i2v-1.3b-framewise", "framewise", [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_settings_are_the_published_ones(slug: str, file: str, spans: list[tuple[int, int]]) -> None:
    pipeline = CAUSAL_FORCING_CONFIGS[slug].pipeline
    transformer = pipeline.diffusion_model.transformer
    assert (transformer.window_size_t, transformer.sink_size_t, transformer.trained_frames) == (21, 0, 21)
    assert (transformer.rope, transformer.context_noise, transformer.guidance_scale) == ("absolute", 0.0, 1.0)
    assert transformer.checkpoint_path.endswith(f"/{file}/causal_forcing.pt")
    told = [round(step.timestep, 3) for step in pipeline.diffusion_model.scheduler.setup().steps]
    assert told == [1000.0, 937.5, 833.333, 625.0]
    plan = pipeline.plan(given=1 if "i2v" in slug else 0)
    assert [plan.span(i) for i in range(3)] == spans


@ci_cpu
@pytest.mark.parametrize("name", ["self-forcing.generator", "self-forcing.generator_ema-fsdp-1.3b"])
@pytest.mark.parametrize("entry", ["generator", "generator_ema"])
def test_the_remap_is_full_bijection(name: str, entry: str) -> None:
    """In both names that its files carry, taken out of the training dump."""
    state, _ = select({entry: header(name)}, Path("causal_forcing.pt"), None)
    assert_full_bijection(MODEL.transformer, state)


@ci_cpu
def test_the_remap_spot_checks_real_keys() -> None:
    made = sources_by_target(MODEL.transformer, header("self-forcing.generator_ema-fsdp-1.3b"))
    assert made["blocks.0.ffn.2.bias"] == ("model._fsdp_wrapped_module.blocks.0.ffn.2.bias",)
    assert made["patch_embedding.weight"] == ("model._fsdp_wrapped_module.patch_embedding.weight",)


@ci_cpu
def test_a_changed_field_reaches_the_module_and_no_other_config() -> None:
    small = derive_config(MODEL, {"transformer.network.num_layers": 2})
    assert len(build_on_meta(small.transformer).network.blocks) == 2
    assert MODEL.transformer.network.num_layers == 30


@ci_cpu
@pytest.mark.parametrize(("steps", "later"), [((1000, 500), [1000.0, 833.333]), ((1000,), [1000.0])])
def test_the_few_step_files_have_a_long_first_chunk(steps: tuple[int, ...], later: list[float]) -> None:
    """Causal-Forcing++: what the model card says to write for a file of two steps or of one."""
    base = shrunk(CAUSAL_FORCING_CONFIGS["causal-forcing-t2v-1.3b-framewise"]).pipeline
    scheduler = {"num_steps": len(steps), "denoising_steps": steps, "first_chunk_steps": (1000, 750, 500, 250)}
    config = derive_config(base, decoder=None, height=4, width=6, diffusion_model={"scheduler": scheduler})
    pipeline = config.setup()
    told, transformer = [], pipeline.diffusion_model.transformer
    predict = transformer.predict_flow
    transformer.predict_flow = lambda *a: told.append(round(a[1].item(), 3)) or predict(*a)
    assert len(list(pipeline.rollout(conditions=prompt(), num_chunk=3))) == 3
    assert told == [1000.0, 937.5, 833.333, 625.0] + 2 * later


@ci_cpu
def test_the_flags_of_the_model_card_mean_two_steps_with_a_long_first_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    page = (MEMBER.parents[1] / "docs/models/causal_forcing.md").read_text()
    command = re.search(r"flashdreams-run (causal-forcing-t2v-1.3b-framewise --ckpt-path .*?)\n```", page, re.DOTALL)
    words = command[1].replace("\\\n", " ").split()
    assert run([*words, "--no-instantiate"], "flashdreams-run") == 0
    printed = capsys.readouterr().out
    assert "denoising_steps: [1000, 500]" in printed and "first_chunk_steps: [1000, 750, 500, 250]" in printed
    assert "      num_steps: 2" in printed


@ci_cpu
@every_slug
def test_a_run_writes_a_video(slug: str, tmp_path: Path) -> None:
    flags = {}
    if "i2v" in slug:
        generator = torch.Generator().manual_seed(0)
        picture = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(picture.numpy()).save(tmp_path / "first.png")
        flags["image"] = tmp_path / "first.png"
    frames = run_to_video(shrunk(CAUSAL_FORCING_CONFIGS[slug]), tmp_path, num_chunk=2, **flags)
    count = {"causal-forcing-t2v-1.3b": 21, "causal-forcing-i2v-1.3b": 13}.get(slug, 5)
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * count


@ci_cpu
def test_a_picture_is_committed_at_timestep_0(monkeypatch: pytest.MonkeyPatch) -> None:
    base = shrunk(CAUSAL_FORCING_CONFIGS["causal-forcing-i2v-1.3b-framewise"]).pipeline
    pipeline = derive_config(base, decoder=None, height=4, width=6).setup()
    picture = torch.randn(1, 16, 1, 4, 6)
    rollout = pipeline.rollout(conditions=prompt(), initial_latents=picture, num_chunk=2, seed=1)
    assert torch.equal(next(rollout).latent, picture)
    rollout.flush()
    cache = pipeline.initialize_cache(conditions=prompt())
    transformer = pipeline.diffusion_model.transformer
    with torch.no_grad():
        transformer.commit(picture, torch.zeros(1), cache.experts[0])
    ours, theirs = (c.experts[0].branches[0].blocks[-1].self_kv for c in (rollout.cache, cache))
    assert torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v)
    assert rollout.cache.experts[0].start == 1


@pytest.mark.ci_gpu
@every_slug
def test_one_chunk_on_a_gpu(slug: str) -> None:
    config = shrunk(CAUSAL_FORCING_CONFIGS[slug]).pipeline
    pipeline = derive_config(config, {"diffusion_model.transformer.dtype": "bfloat16"}).setup(device="cuda")
    (chunk,) = pipeline.rollout(conditions=prompt().to_dict(), num_chunk=1)
    assert torch.isfinite(chunk.latent).all() and chunk.frames.shape[2:] == (32, 48, 3)


@pytest.mark.manual
def test_both_entries_of_the_file_have_weights_identical() -> None:
    """Whether the averaged weights of a published file are those that its plain entry holds too, if it has one."""
    config = derive_config(MODEL.transformer, dtype="float32")
    states = [
        derive_config(config, checkpoint_path=f"{config.checkpoint_path}#{entry}").setup().state_dict()
        for entry in ("generator", "generator_ema")
    ]
    assert max((states[0][key] - states[1][key]).abs().max().item() for key in states[0]) == 0
