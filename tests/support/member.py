"""What the smoke tests of the streaming Wan plugins share: published layouts, shrunken models, a run to a file."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import torch
from torch import Tensor

from flashdreams.config import derive_config, import_object
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.infra.config import ModuleConfig, RunnerConfig
from flashdreams.infra.embeds import save_embeds
from flashdreams.infra.loading import build_on_meta, candidates
from flashdreams.plugins.registry import get_runner
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.vae_config import WanVAE22Config, WanVAEConfig
from flashdreams.scripts.run import run

MANIFESTS = Path(__file__).parents[1] / "checkpoint/data"
NETWORK = {"dim": 48, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "text_dim": 8, "text_len": 6, "freq_dim": 16}


def assert_entry_points(member: Path, configs: Mapping[str, RunnerConfig]) -> None:
    """``pyproject.toml`` of the folder ``member`` names every runner by its slug, and the registry finds it."""
    project = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["flashdreams.runner_configs"]
    assert list(points) == list(configs)
    for slug, runner in configs.items():
        assert import_object(points[slug]) is runner
        assert get_runner(slug) == runner
        assert runner.runner_name == runner.pipeline.name == slug
        runner.validate_tree()


def help_page(slug: str, capsys: Any) -> str:
    """What ``flashdreams-run <slug> --help`` prints."""
    assert run([slug, "--help"], "flashdreams-run") == 0
    return capsys.readouterr().out


def imports_torch(module: str) -> bool:
    """Whether importing ``module`` in a new process brings torch."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode != 0


@functools.cache
def manifest(name: str) -> dict[str, Any]:
    """A published checkpoint's keys and shapes, as recorded."""
    return json.loads(gzip.decompress((MANIFESTS / f"{name}.json.gz").read_bytes()))


def header(name: str) -> dict[str, Tensor]:
    """The same as tensors on the meta device."""
    return {key: torch.empty(entry["shape"], device="meta") for key, entry in manifest(name)["tensors"].items()}


@functools.lru_cache(maxsize=2)  # the layouts of a part are tested one after the other
def module_keys(config: ModuleConfig) -> dict[str, Tensor]:
    """State dict, on the meta device, of the full-size module that a checkpoint of ``config`` fills."""
    module = build_on_meta(derive_config(config, checkpoint_path=None))
    return getattr(module, "checkpoint_root", module).state_dict()


def sources_by_target(config: ModuleConfig, checkpoint: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Which tensors of ``checkpoint`` make each tensor of the module, as loading would choose; all must match."""
    options, wanted = candidates(config), module_keys(config)
    _, steps, match = choose_transform(wanted, checkpoint, options, allow_missing=config.allow_missing)
    assert match.ok, match
    assert {step.target: step.meta.shape for step in steps} == {key: value.shape for key, value in wanted.items()}
    return {step.target: step.sources for step in steps}


def assert_full_bijection(config: ModuleConfig, checkpoint: dict[str, Tensor]) -> None:
    """Every tensor of the checkpoint becomes exactly one of the module's, and every one of those is filled."""
    made = sources_by_target(config, checkpoint)
    assert sorted(made.values()) == sorted((key,) for key in checkpoint)
    assert made.keys() == module_keys(config).keys()


def shrunk(runner: RunnerConfig) -> RunnerConfig:
    """The runner with a small network and VAE and random weights: the same structure in sizes a test can afford."""
    model, decoder = runner.pipeline.diffusion_model, runner.pipeline.decoder
    transformer = {"dtype": "float32", "checkpoint_path": None, "network": NETWORK}
    patch: dict[str, Any] = {
        "diffusion_model.transformer": transformer,
        **{f"diffusion_model.high_noise.{i}.transformer": transformer for i in range(len(model.high_noise))},
        "decoder.checkpoint_path": None,
        "height": 2 * runner.pipeline.size_multiple,
        "width": 3 * runner.pipeline.size_multiple,
    }
    if isinstance(decoder, WanVAEConfig):
        patch |= {"decoder.dim": 8, "decoder.num_res_blocks": 1}
    if isinstance(decoder, WanVAE22Config):
        patch |= {"decoder.decoder_dim": 8}
    return derive_config(runner, pipeline=patch)


def prompt() -> WanConditions:
    """Embeddings of a prompt, of the width that shrunken networks take."""
    return WanConditions(torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(5)))


def run_to_video(runner: RunnerConfig, folder: Path, **flags: Any) -> list[Any]:
    """Frames of the mp4 that the command line's runner writes for a shrunken model."""
    save_embeds(folder / "prompt.safetensors", prompt().text)
    flags = {"prompt_embeds": folder / "prompt.safetensors", "output": folder / "video.mp4", **flags}
    runner = derive_config(runner, seed=0, device="cpu", ckpt_path="random:0", **flags)
    assert runner.setup().run() == folder / "video.mp4"
    assert json.loads((folder / "video.json").read_text())["slug"] == runner.runner_name
    with av.open(str(folder / "video.mp4")) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
