"""``convert --part`` writes the other published layouts of a model's parts, and there and back gives the same bytes."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from flashdreams.config import derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.plugins.registry import ENV_VAR
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAE22Config, WanVAEConfig
from flashdreams.scripts.checkpoint import main

pytestmark = pytest.mark.ci_cpu

STATISTICS = {"latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4}
PARTS = {
    "vae21": ("decoder", "diffusers", WanVAEConfig(dim=4, z_dim=4, **STATISTICS), "encoder.conv_in.weight"),
    "vae22": (
        "decoder", "diffusers", WanVAE22Config(dim=4, decoder_dim=4, z_dim=4, **STATISTICS), "encoder.conv_in.weight",
    ),
    "umt5": (
        "text_encoder", "transformers",
        UMT5Config(vocab_size=20, dim=8, dim_attn=8, dim_ffn=16, num_heads=2, num_layers=2), "shared.weight",
    ),
}  # fmt: skip


def _runner(name: str) -> RunnerConfig:
    part, _, config, _ = PARTS[name]
    pipeline = derive_config(PIPELINE_TEMPLATE, name=name, **{part: config})
    return RunnerConfig(runner_name=name, description=name, pipeline=pipeline)


VAE21, VAE22, UMT5 = map(_runner, PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_there_and_back_gives_the_same_bytes(name, tmp_path, monkeypatch, capsys):
    part, layout, config, sample = PARTS[name]
    monkeypatch.setenv(ENV_VAR, f"{name}={__name__}:{name.upper()}")
    module = config.setup()
    native, there, back = (tmp_path / f"{each}.safetensors" for each in ("native", "there", "back"))
    save_file(getattr(module, "checkpoint_root", module).state_dict(), native)
    words = ["--model", name, "--part", part, "--output"]
    assert main(["convert", str(native), "--to", layout, *words, str(there)], "checkpoint") == 0
    assert sample in load_file(there)
    assert main(["verify", name, str(there), "--part", part], "checkpoint") == 0
    assert f"matched {len(load_file(native))}/{len(load_file(native))}" in capsys.readouterr().out
    assert main(["convert", str(there), "--to", "native", *words, str(back)], "checkpoint") == 0
    assert back.read_bytes() == native.read_bytes()
    assert main(["equal", str(there), str(native), "--model", name, "--part", part], "checkpoint") == 0
