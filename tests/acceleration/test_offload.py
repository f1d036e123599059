"""Offloaded blocks: the same bits, two blocks on the device, and no block that runs before it is there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashdreams.acceleration.compile import compile_modules
from flashdreams.acceleration.offload import Offload, bytes_of, offload_blocks, weights_of
from flashdreams.acceleration.plan import plan_model
from flashdreams.acceleration.transfer import DirectCopies
from flashdreams.config import ConfigError, derive_config
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.config import ExpertConfig
from flashdreams.infra.load import load_pipeline
from flashdreams.infra.loading import build_on_meta
from flashdreams.plugins.registry import get_runner
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from late_copies import LateCopies
from member import prompt, shrunk
from template_model import template_pipeline

cpu, gpu = pytest.mark.ci_cpu, pytest.mark.ci_gpu


def lora(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"blocks.{block}.{layer}.lora_{side}.weight": torch.randn(shape, generator=generator) / 4
        for block in (0, 1)
        for layer in ("self_attn.q", "cross_attn.k")
        for side, shape in (("A", (4, 48)), ("B", (48, 4)))
    }


def two_experts():
    transformer = PIPELINE_TEMPLATE.diffusion_model.transformer
    high = ExpertConfig(sigma_low=0.9, transformer=transformer)
    pipeline = derive_config(PIPELINE_TEMPLATE, diffusion_model={"high_noise": (high,)}).setup()
    with torch.no_grad():
        pipeline.diffusion_model.experts[0].network.head.head.bias.fill_(0.3)
    return pipeline


def camera_in_every_pass():
    config = derive_config(shrunk(get_runner("lingbot-world-fast")).pipeline, text_encoder=None)
    return derive_config(config, {"diffusion_model.transformer.network.keep_injections": False}).setup()


MODELS = {
    "one branch": lambda: template_pipeline(),
    "two branches in a batch": lambda: template_pipeline(guidance_scale=2.0),
    "two branches in turn": lambda: template_pipeline(guidance_scale=2.0, cfg="sequential"),
    "turning sinks": lambda: template_pipeline(rope="cache_relative"),
    "two experts": two_experts,
    "blocks of a subclass": camera_in_every_pass,
}


def latents(pipeline, num_chunk: int = 3) -> Tensor:
    words = pipeline.text_encoder is not None
    start = {"prompt": "a red circle"} if words else {"conditions": prompt(), "image": image(pipeline)}
    return torch.cat([chunk.latent for chunk in pipeline.rollout(**start, seed=3, num_chunk=num_chunk)], dim=2)


def image(pipeline) -> Tensor:
    return torch.full((pipeline.config.height, pipeline.config.width, 3), 90, dtype=torch.uint8)


@cpu
@pytest.mark.parametrize("model", MODELS)
def test_the_result_is_the_same_to_the_bit_however_late_copies_come(model):
    exact, pipeline = MODELS[model](), MODELS[model]()
    offload = offload_blocks(pipeline.diffusion_model, LateCopies())
    assert offload is not None
    assert torch.equal(latents(exact), latents(pipeline))
    assert len(offload.slots) == 2
    assert offload.resident == 2 * max(bytes_of(block) for e in pipeline.diffusion_model.experts for block in e.blocks)


@cpu
def test_the_next_block_is_on_its_way_while_one_runs_and_every_pass_copies_each_once():
    copies = LateCopies()
    stack = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(4)])
    offload = Offload([list(stack)], torch.device("cpu"), copies)
    number = {block.memory.data_ptr(): i for i, block in enumerate(offload.blocks)}
    copies.log.clear()
    for _ in range(2):
        x = torch.ones(1, 4)
        for block in stack:
            x = block(x)
    assert [f"{what} {number[where]}" if where else what for what, where in copies.log] == [
        "copy 0", "wait 0", "copy 1", "mark", "wait 1", "copy 2", "mark", "wait 2", "copy 3", "mark",
        "wait 3", "copy 0", "mark", "wait 0", "copy 1", "mark", "wait 1", "copy 2", "mark", "wait 2", "copy 3", "mark",
        "wait 3", "copy 0", "mark",
    ]  # fmt: skip


@cpu
def test_loras_change_between_chunks_as_without_offload():
    found = []
    for copies in (None, LateCopies()):
        pipeline = template_pipeline()
        if copies is not None:
            offload_blocks(pipeline.diffusion_model, copies)
        pipeline.loras.load("a", lora(1), weight=0)
        with pipeline.rollout("a red circle", seed=3, num_chunk=5) as rollout:
            made = []
            for weights in ({}, {"a": 1.0}, {"a": 1.0}, {"a": 0.4}, {}):
                rollout.set_loras(weights)
                made.append(next(rollout).latent)
        found.append(torch.cat(made, dim=2))
    assert torch.equal(*found)
    assert not torch.equal(found[0], latents(template_pipeline(), 5)), "the LoRA does nothing"


@cpu
def test_outside_of_a_pass_the_weights_are_those_in_the_memory_of_the_cpu():
    exact, pipeline = template_pipeline(), template_pipeline()
    offload = offload_blocks(pipeline.diffusion_model, LateCopies())
    assert offload is not None
    latents(pipeline, 1)
    held = pipeline.state_dict()
    assert held.keys() == exact.state_dict().keys()
    assert all(torch.equal(held[key], value) for key, value in exact.state_dict().items())
    with pytest.raises(TypeError):
        pipeline.diffusion_model.transformer.network.blocks[0](None, None, None, None)
    assert all(weight.table[weight.name] is weight.home for block in offload.blocks for weight in block.weights)


@cpu
def test_an_exchanged_weight_is_refused_and_one_that_is_written_over_is_seen():
    stack = [nn.Sequential(nn.Linear(4, 4, bias=False))]
    Offload([stack], torch.device("cpu"), LateCopies())
    assert stack[0](torch.ones(1, 4)).any()
    with torch.no_grad():
        stack[0].state_dict()["0.weight"].zero_()
    assert not stack[0](torch.ones(1, 4)).any()
    stack[0][0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="exchanged for another tensor"):
        stack[0](torch.ones(1, 4))


@cpu
def test_formats_may_be_mixed_within_a_block():
    block = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).to(torch.bfloat16))
    block[0].register_buffer("codes", torch.arange(6, dtype=torch.int8).view(2, 3))
    held = {key: value.clone() for key, value in block.state_dict().items()}
    Offload([[block]], torch.device("cpu"), LateCopies())
    assert {key: value.dtype for key, value in block.state_dict().items()} == {k: v.dtype for k, v in held.items()}
    assert all(torch.equal(value, held[key]) for key, value in block.state_dict().items())


@cpu
def test_the_device_never_sees_more_than_two_blocks_not_even_while_loading():
    """The meta device stands for one that has no room for the model."""
    model = PIPELINE_TEMPLATE.diffusion_model.setup(device="meta", home="cpu")
    assert not any(parameter.is_meta for parameter in model.parameters())
    offload = offload_blocks(model, DirectCopies())
    assert offload is not None
    away = [table[name] for block in model.transformer.blocks for table, name in weights_of(block)]
    assert away and all(tensor.device.type == "cpu" for tensor in away)
    rest = [p for p in model.parameters() if not any(p is tensor for tensor in away)]
    assert rest and all(tensor.is_meta for tensor in rest)
    assert [slot.memory.device.type for slot in offload.slots] == ["meta", "meta"]


@cpu
def test_the_plan_counts_what_is_there():
    pipeline = template_pipeline()
    plan = plan_model(pipeline.config)
    offload = offload_blocks(pipeline.diffusion_model, LateCopies())
    assert offload is not None
    assert plan.offloaded == offload.resident
    assert plan.blocks == sum(block.memory.numel() for block in offload.blocks)
    assert plan.peak_offloaded == plan.peak - plan.blocks + plan.offloaded


@cpu
def test_the_plan_knows_approximations():
    config = shrunk(get_runner("self-forcing-t2v-1.3b")).pipeline
    config = derive_config(config, {"diffusion_model.transformer.dtype": "bfloat16"})
    exact = plan_model(config)
    kv = plan_model(config, acceleration=AccelerationConfig(kv_dtype="int8"))
    coded = plan_model(config, acceleration=AccelerationConfig(quantize="int8"))
    assert kv.state < exact.state and kv.weights == exact.weights and kv.total_flops == exact.total_flops
    assert coded.blocks < 0.6 * exact.blocks and coded.state == exact.state
    assert coded.parts[0].parameters == exact.parts[0].parameters and coded.total_flops == exact.total_flops


@cpu
def test_14b_at_480p_fits_16_gib():
    config = get_runner("wan21-t2v-14b").pipeline
    plan = plan_model(config, height=480, width=832)
    blocks = build_on_meta(config.diffusion_model.transformer).to("meta").to(torch.bfloat16).blocks
    assert plan.blocks == sum(map(bytes_of, blocks)) > 25 * 2**30
    assert plan.peak_offloaded < 11 * 2**30 < plan.peak


@cpu
def test_compiled_blocks_are_entered_from_outside_of_the_compiled_code():
    exact, pipeline = template_pipeline(), template_pipeline()
    offload_blocks(pipeline.diffusion_model, LateCopies())
    regions = {}
    for name, each in (("exact", exact), ("offloaded", pipeline)):
        regions[name] = compile_modules(each.diffusion_model.transformer.blocks, backend="eager")
    assert torch.equal(latents(exact, 4), latents(pipeline, 4))
    assert sum(region.graphs for region in regions["offloaded"]) == sum(region.graphs for region in regions["exact"])
    assert not any(region.broken for region in regions["offloaded"])


@cpu
def test_on_a_cpu_nothing_is_done_and_that_is_said(capsys):
    pipeline = load_pipeline("tiny-world", device="cpu", acceleration=AccelerationConfig(offload="blocks"))
    assert "not offloaded: cpu works in the CPU's memory" in capsys.readouterr().err
    assert not any(module._forward_pre_hooks for module in pipeline.modules())


@cpu
def test_what_excludes_each_other_is_refused():
    with pytest.raises(ConfigError, match="use int8"):
        AccelerationConfig(offload="blocks", quantize="fp8").validate()


@gpu
def test_on_a_gpu_the_result_is_the_same_and_so_is_the_memory_that_was_planned():
    config = derive_config(
        PIPELINE_TEMPLATE,
        diffusion_model={"transformer": {"network": {"dim": 1024, "ffn_dim": 4096, "num_layers": 12}}},
    )
    found, peak = [], []
    for acceleration in (AccelerationConfig(compile="off"), AccelerationConfig(compile="off", offload="blocks")):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        pipeline = load_pipeline(config, device="cuda", acceleration=acceleration)
        found.append(latents(pipeline, 6))
        peak.append(torch.cuda.max_memory_allocated())
        del pipeline
    assert torch.equal(*found)
    plan = plan_model(config)
    assert peak[0] - peak[1] == pytest.approx(plan.blocks - plan.offloaded, rel=0.05)


@gpu
def test_offloaded_weights_are_pinned():
    pipeline = load_pipeline("tiny-world", device="cuda", acceleration=AccelerationConfig(offload="blocks"))
    network = pipeline.diffusion_model.transformer.network
    assert network.blocks[0].ffn[0].weight.is_pinned()
    assert network.patch_embedding.weight.is_cuda
