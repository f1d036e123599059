"""The camera layers: computed once per chunk with the same result, and nothing at all when they are absent."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flashdreams.config import derive_config
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.controls import Control, Keys
from flashdreams.core.rope import rope_3d
from flashdreams.infra.config import PipelineConfig
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache
from lingbot.config import CAMERA_KEYS, LingBotNetworkConfig
from member import NETWORK

pytestmark = pytest.mark.ci_cpu

SCRIPT = Path(__file__).parents[1] / "examples/camera_reuse.py"
WALK = [Control(keys=Keys("w", "left"))] * 81


def latents(config: PipelineConfig, prompt: WanConditions, chunks: int) -> Tensor:
    """Latents of a run whose camera moves, without the VAE, which takes most of the time."""
    pipeline = derive_config(config, decoder=None, height=4, width=6).setup()
    given = torch.randn(1, 20, 21, 4, 6, generator=torch.Generator().manual_seed(4))
    slots = {"image_mask": given[:, :4], "image_latent": given[:, 4:]}
    cache = pipeline.initialize_cache(conditions=prompt, slots=slots, seed=3)
    made = []
    for i in range(chunks):
        start, stop = cache.layout.plan.span(i)
        input = pipeline.encode_controls([WALK[max(0, 4 * start - 3) : 4 * stop - 3]], i, cache)
        made.append(pipeline.generate(i, cache, input))
        pipeline.finalize(i, cache)
    return torch.cat(made, dim=2)


@pytest.mark.parametrize(("slug", "chunks"), [("lingbot-world-fast", 3), ("lingbot-world-cam", 1)])
def test_a_run_is_the_same_with_and_without_reuse(slug: str, chunks: int, shrunk, prompt) -> None:
    """Of the chunk's features, and of what each block makes of them: bit for bit, guidance and commits included."""
    base, made = shrunk(slug).pipeline, {}
    for reuse in (True, False):
        for keep in (True, False):
            change = {"reuse_controls": reuse, "network": {"keep_injections": keep}}
            model = {"transformer": change}
            if base.diffusion_model.high_noise:
                model["high_noise"] = {0: {"transformer": change}}
            made[reuse, keep] = latents(derive_config(base, diffusion_model=model), prompt, chunks)
    assert all(torch.equal(other, made[True, True]) for other in made.values())
    still = derive_config(base, encoder={"move": 0.0, "turn": 0.0})
    assert not torch.allclose(latents(still, prompt, chunks), made[True, True], atol=1e-4)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lingbot_camera_reuse", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(script: ModuleType) -> WanTransformerConfig:
    return derive_config(script.SMALL, network={"dim": 48, "ffn_dim": 64, "num_heads": 2, "text_dim": 8})


def test_reuse_saves_the_camera_layers_of_every_pass_but_the_first(script: ModuleType) -> None:
    """Counted, not estimated: four of the five passes of a chunk."""
    config = tiny(script)
    report = script.compare(config, 4, 6, "cpu", repeats=1)
    network = config.setup().network
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.prepare(torch.zeros(1, 384, config.len_t, 4, 6))
    saved = report["without reuse, operations"] - report["with reuse, operations"]
    assert saved == 4 * counter.get_total_flops() > 0
    assert report["operations saved"] == pytest.approx(saved / report["without reuse, operations"])
    assert report["largest difference"] == 0


def test_the_script_prints_what_is_saved_in_operations_and_time(script: ModuleType, monkeypatch, capsys) -> None:
    monkeypatch.setattr(script, "SMALL", tiny(script))
    monkeypatch.setattr(script, "PUBLISHED", tiny(script))
    script.main(1)
    lines = [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines.count("operations saved") == 2 and lines.count("time saved") == 1
    assert lines.count("largest difference") == 1


def velocity(network, control: Tensor | None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 36, 3, 4, 6, generator=generator), torch.randn(1, 6, 8, generator=generator)
    context = ChunkContext(rope_3d(range(3), 2, 3, 24))
    with torch.no_grad():
        cache = NetworkCache(network.encode_text(text))
        input = network.prepare(control) if control is not None else None
        return network(x, torch.tensor([900.0]), context, cache, input)


@pytest.fixture
def base_checkpoint(tmp_path: Path) -> Path:
    """Weights of a small Wan2.2-I2V-A14B."""
    base = WanTransformerConfig(network=WanNetworkConfig(**NETWORK, in_dim=36), checkpoint_path="random:7")
    save_file(base.setup().network.state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


@pytest.mark.parametrize("channels", [6, 7])
def test_a_base_checkpoint_loads_with_exactly_the_camera_keys_absent(channels: int, base_checkpoint: Path) -> None:
    config = WanTransformerConfig(
        network=LingBotNetworkConfig(**NETWORK, control_channels=channels),
        checkpoint_path=str(base_checkpoint),
        allow_missing=CAMERA_KEYS,
        dtype="float32",
    )
    base = WanTransformerConfig(
        network=WanNetworkConfig(**NETWORK, in_dim=36), checkpoint_path=str(base_checkpoint), dtype="float32"
    ).setup()
    ours = config.setup()
    new = ours.network.state_dict().keys() - base.network.state_dict().keys()
    assert set(ours.load_report.missing) == new
    assert len(new) == 6 + 8 * NETWORK["num_layers"] and all("cam" in key or "c2ws" in key for key in new)
    assert not any(ours.network.state_dict()[key].any() for key in new), "absent keys are zero"
    plain = velocity(base.network, None)
    assert torch.equal(velocity(ours.network, None), plain)
    assert torch.equal(velocity(ours.network, torch.randn(1, 64 * channels, 3, 4, 6)), plain)


def test_no_other_key_may_be_absent(base_checkpoint: Path) -> None:
    config = WanTransformerConfig(
        network=LingBotNetworkConfig(**NETWORK), checkpoint_path=str(base_checkpoint), dtype="float32"
    )
    with pytest.raises(CheckpointError, match="22 missing"):
        config.setup()


def test_new_layers_begin_as_nothing_and_matter_once_they_do_not() -> None:
    network = WanTransformerConfig(network=LingBotNetworkConfig(**NETWORK), dtype="float32").setup().network
    control = torch.randn(1, 384, 3, 4, 6, generator=torch.Generator().manual_seed(2))
    plain = velocity(network, None)
    assert torch.equal(velocity(network, control), plain)
    network.blocks[1].cam_shift_layer.weight.data.normal_()
    assert not torch.allclose(velocity(network, control), plain, atol=1e-4)


def test_conditioning_of_the_other_kind_is_refused() -> None:
    network = LingBotNetworkConfig(**NETWORK, control_channels=7).setup()
    with pytest.raises(ValueError, match="has 384 channels; this network takes 448"):
        network.prepare(torch.zeros(1, 384, 1, 4, 6))
