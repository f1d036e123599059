"""The real thing, where there is a GPU: what the tapes of test_cuda_graph.py show of the logic, shown of CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashdreams.acceleration import cuda_graph
from flashdreams.acceleration.compile import compile_modules
from flashdreams.acceleration.cuda_graph import Graphs
from flashdreams.config import derive_config
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE

pytestmark = pytest.mark.ci_gpu

LENGTHS = 4
CONTROL = [0.1 * (i % 9) - 0.4 for i in range(400)]
LIMITS = {"float32": 1e-5, "bfloat16": 3e-2}
"""Relative: a library may choose another kernel in a captured pass."""


def pipeline_on_gpu(**transformer: Any) -> Any:
    torch.manual_seed(7)
    pipeline = derive_config(PIPELINE_TEMPLATE, diffusion_model={"transformer": transformer}).setup(device="cuda")
    torch.nn.init.normal_(pipeline.diffusion_model.transformer.network.brightness.weight, std=0.5)
    return pipeline


def pair(**transformer: Any) -> tuple[Any, Any, Graphs]:
    """The same pipeline twice, the second with graphs."""
    plain, graphed = pipeline_on_gpu(**transformer), pipeline_on_gpu(**transformer)
    graphed.load_state_dict(plain.state_dict())
    return plain, graphed, cuda_graph.apply(graphed)[0]


def latents(pipeline: Any, switch: int | None = None, **options: Any) -> torch.Tensor:
    rollout, made = pipeline.rollout("a", **{"seed": 3, "num_chunk": 9, "control": CONTROL, **options}), []
    for i in range(9):
        if i == switch:
            rollout.set_prompt("b")
        made.append(next(rollout).latent)
    return torch.cat(made, dim=2)


def close(a: torch.Tensor, b: torch.Tensor, dtype: str) -> None:
    assert torch.isfinite(a).all()
    assert (a.double() - b.double()).norm() / b.double().norm() <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("cfg", [None, "batched", "sequential"])
def test_a_rollout_from_graphs_equals_an_eager_one(dtype, cfg):
    guidance = {} if cfg is None else {"guidance_scale": 2.5, "cfg": cfg}
    plain, graphed, graphs = pair(dtype=dtype, **guidance)
    want, branches = latents(plain, switch=6), 2 if cfg == "sequential" else 1
    for _ in range(2):
        close(latents(graphed, switch=6), want, dtype)
    assert graphs.captures == 2 * LENGTHS * branches and not graphs.refused
    assert graphs.replays == 2 * (9 * 2 + 8) * branches


@pytest.mark.parametrize("rope", ["absolute", "cache_relative"])
def test_interleaved_rollouts_of_two_sizes_equal_those_alone(rope):
    plain, graphed, graphs = pair(rope=rope)
    sizes = [{"height": 32, "width": 48}, {"height": 64, "width": 32}]
    want = [latents(plain, **size) for size in sizes]
    rollouts = [graphed.rollout("a", seed=3, num_chunk=9, control=CONTROL, **size) for size in sizes]
    made: list[list[torch.Tensor]] = [[], []]
    for i in [0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1]:
        made[i].append(next(rollouts[i]).latent)
    for a, b in zip(made, want, strict=True):
        close(torch.cat(a, dim=2), b, "float32")
    assert graphs.captures == 2 * 2 * LENGTHS


def test_weights_that_change_in_place_are_seen_and_weights_that_move_are_captured_anew():
    plain, graphed, graphs = pair()
    latents(graphed)
    for each in (plain, graphed):
        each.diffusion_model.transformer.network.head.head.weight.mul_(1.5)
    close(latents(graphed), latents(plain), "float32")
    assert graphs.captures == 2 * LENGTHS
    network = graphed.diffusion_model.transformer.network
    network.load_state_dict({key: value.clone() for key, value in network.state_dict().items()}, assign=True)
    close(latents(graphed), latents(plain), "float32")
    assert graphs.captures == 4 * LENGTHS


def test_compiled_blocks_are_captured():
    plain, graphed = pipeline_on_gpu(), pipeline_on_gpu()
    graphed.load_state_dict(plain.state_dict())
    (region,) = compile_modules(graphed.diffusion_model.transformer.blocks)
    (graphs,) = cuda_graph.apply(graphed)
    for _ in range(2):
        close(latents(graphed), latents(plain), "float32")
    assert (graphs.captures, region.graphs, region.broken) == (2 * LENGTHS, LENGTHS, False) and not graphs.refused


def test_memory_stays_over_forty_chunks_and_over_rollouts():
    graphed = pipeline_on_gpu()
    (graphs,) = cuda_graph.apply(graphed, max_slots=1)
    latents(graphed)
    readings = []
    for _ in range(2):
        rollout = graphed.rollout("a", num_chunk=41, control=CONTROL)
        for i in range(40):
            next(rollout)
            rollout.flush()
            if i >= 10:
                readings.append(torch.cuda.memory_allocated())
        rollout.close()
    assert max(readings) - min(readings) <= 2**16
    assert graphs.captures == 2 * LENGTHS and graphs.pool.free == 1


def test_a_network_that_waits_for_the_device_runs_eagerly():
    plain, graphed, graphs = pair()
    for each in (plain, graphed):
        network = each.diffusion_model.transformer.network
        network.condition = lambda x, time, input: (x * (2 if x.mean() > 0 else 1), time)
    close(latents(graphed), latents(plain), "float32")
    assert graphs.captures == 0 and "waits for the device" in graphs.refused["forward"]
