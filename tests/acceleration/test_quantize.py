"""Linear layers in eight bits: which, how exactly, and what does not go with them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from flashdreams.acceleration.apply import apply
from flashdreams.acceleration.offload import offload_blocks
from flashdreams.acceleration.quantize import Int8Linear, chosen, quantize_blocks
from flashdreams.config import derive_config
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.load import load_pipeline
from flashdreams.infra.loading import build_on_meta
from flashdreams.plugins.registry import get_runner
from late_copies import LateCopies
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def linear(rows: int = 48, columns: int = 96, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    layer = nn.Linear(columns, rows, bias=bias).to(dtype).requires_grad_(False)
    layer.weight *= torch.logspace(-3, 2, rows, dtype=dtype)[:, None]  # channels of very different size
    return layer


def latents(pipeline, num_chunk: int = 4) -> Tensor:
    return torch.cat([c.latent for c in pipeline.rollout("a red circle", seed=3, num_chunk=num_chunk)], dim=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_is_off_by_half_a_step_of_its_channel_at_most(dtype):
    layer = linear(dtype=dtype)
    coded = Int8Linear(layer)
    step = layer.weight.float().abs().amax(1) / 127
    back = coded.weight.float() * coded.scale.float()[:, None]
    slack = 1 + 260 * torch.finfo(dtype).eps  # the scale is rounded too, which 127 steps feel
    assert ((back - layer.weight.float()).abs() <= 0.5 * slack * step[:, None]).all()
    assert coded.weight.dtype == torch.int8 and coded.scale.dtype == dtype


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_the_weights_it_stands_for(bias):
    layer, x = linear(bias=bias), torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    coded = Int8Linear(layer)
    meant = nn.functional.linear(x, coded.weight.float() * coded.scale[:, None], layer.bias)
    torch.testing.assert_close(coded(x), meant)
    error = (coded(x) - layer(x)).norm(dim=0) / (layer(x) - (layer.bias if bias else 0)).norm(dim=0)
    assert error.max() < 0.01


def test_a_channel_of_zeros_stays_one():
    layer = linear()
    layer.weight[3] = 0
    assert not Int8Linear(layer)(torch.ones(1, 96))[0, 3] - layer.bias[3]


def test_memory_is_half_of_bfloat16():
    layer = linear(64, 512, torch.bfloat16)
    size = {
        type(m): sum(t.numel() * t.element_size() for t in m.state_dict().values()) for m in (layer, Int8Linear(layer))
    }
    assert size[Int8Linear] / size[nn.Linear] == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize(
    ("slug", "share"),
    [
        ("self-forcing-t2v-1.3b", 0.99),
        ("lingbot-world-fast", 0.99),
        ("wan21-i2v-14b-480p", 0.99),
        ("matrix-game-2-universal", 0.75),  # its first blocks have an action module, which stays as it is
    ],
)
def test_most_of_a_block_is_chosen_and_nothing_that_the_timestep_decides(slug, share):
    (block, *_) = build_on_meta(get_runner(slug).pipeline.diffusion_model.transformer).blocks
    layers = {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}
    taken = {name for name in layers if chosen(name)}
    assert sum(layers[name].weight.numel() for name in taken) > share * sum(p.numel() for p in block.parameters())
    assert {"self_attn.q", "self_attn.o", "cross_attn.k", "ffn.0", "ffn.2"} <= taken
    assert not [name for name in taken if "modulation" in name or "norm" in name]


def test_only_the_layers_of_blocks_change():
    pipeline = template_pipeline()
    before = {key: value.clone() for key, value in pipeline.state_dict().items()}
    assert quantize_blocks(pipeline.diffusion_model, "int8") == 2 * (8 + 2)
    same = [key for key, value in pipeline.state_dict().items() if key in before and torch.equal(value, before[key])]
    changed = [key for key, value in pipeline.state_dict().items() if value.dtype == torch.int8]
    assert len(changed) == 20 and all(".blocks." in key and key.endswith(".weight") for key in changed)
    assert set(before) - set(same) == set(changed)


def test_a_rollout_is_near_the_exact_one():
    exact, pipeline = latents(template_pipeline()), template_pipeline()
    apply(pipeline, AccelerationConfig(quantize="int8"))
    near = latents(pipeline)
    error = (near - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.01


def test_with_offload_it_is_the_same_to_the_bit():
    pipelines = [template_pipeline(), template_pipeline()]
    for pipeline in pipelines:
        quantize_blocks(pipeline.diffusion_model, "int8")
    offload_blocks(pipelines[1].diffusion_model, LateCopies())
    assert torch.equal(*map(latents, pipelines))


def test_loras_are_refused_before_and_after():
    change = {f"blocks.0.ffn.0.lora_{side}.weight": torch.ones(s) for side, s in (("A", (2, 48)), ("B", (96, 2)))}
    pipeline = template_pipeline()
    pipeline.loras.load("style", change, weight=0.5)
    with pytest.raises(UserError, match="'style' is loaded, and quantized weights take none; merge it first"):
        quantize_blocks(pipeline.diffusion_model, "int8")
    pipeline.loras.unload("style")
    quantize_blocks(pipeline.diffusion_model, "int8")
    with pytest.raises(CheckpointError, match=r"is stored as torch\.int8; merge LoRAs before quantizing"):
        pipeline.loras.load("style", change)


def test_it_is_said_and_off_by_default():
    pipeline = load_pipeline("tiny-world", device="cpu", acceleration=AccelerationConfig(quantize="int8"))
    (said,) = pipeline.acceleration.approximations
    assert said.startswith("quantize int8 (") and "quantized: 60 layers" in pipeline.acceleration.notes
    config = derive_config(get_runner("tiny-world").pipeline, {"diffusion_model.scheduler.num_steps": 2})
    (said,) = load_pipeline(config, device="cpu").acceleration.approximations
    assert said.startswith("2 denoising steps instead of 4")


def test_without_torchao_its_forms_say_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"pip install 'flashdreams\[quantize\]'; int8 needs nothing"):
        quantize_blocks(template_pipeline().diffusion_model, "int8-dynamic")


def test_fp8_needs_a_device_that_has_it():
    pytest.importorskip("torchao")
    with pytest.raises(UserError, match="needs a GPU that multiplies in fp8"):
        quantize_blocks(template_pipeline().diffusion_model, "fp8")


def test_inputs_in_eight_bits_are_near_and_take_no_loras():
    pytest.importorskip("torchao")
    exact, pipeline = latents(template_pipeline()), template_pipeline()
    quantize_blocks(pipeline.diffusion_model, "int8-dynamic")
    near = latents(pipeline)
    assert 0 < (near - exact).square().mean().sqrt() / exact.square().mean().sqrt() < 0.03
    change = {f"blocks.0.ffn.0.lora_{side}.weight": torch.ones(s) for side, s in (("A", (2, 48)), ("B", (96, 2)))}
    with pytest.raises(CheckpointError, match="merge LoRAs before quantizing"):
        pipeline.loras.load("style", change)
