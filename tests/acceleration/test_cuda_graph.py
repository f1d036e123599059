"""Rollouts from graphs are those of eager passes, bit for bit. The graphs are tapes on the CPU, which replay operations
on the tensors of their recording, as CUDA does."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashdreams.acceleration import cuda_graph
from flashdreams.acceleration.compile import compile_modules
from flashdreams.acceleration.cuda_graph import Graphs
from flashdreams.acceleration.prewarm import prewarm
from flashdreams.config import derive_config
from flashdreams.core import notices
from flashdreams.infra.config import ExpertConfig
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from tape_graphs import TapeBackend
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

LENGTHS = 4
"""Of the window while it fills: 1, 3, 5, 7 latent frames. Eviction begins with the fifth chunk."""
GUIDANCE: dict[str, dict[str, Any]] = {
    "plain": {},
    "batched": {"guidance_scale": 2.5, "cfg": "batched"},
    "sequential": {"guidance_scale": 2.5, "cfg": "sequential"},
    "relative": {"rope": "cache_relative"},
}
CHUNKS = 7
CONTROL = [0.1 * (i % 9) - 0.4 for i in range(80)]


@pytest.fixture(autouse=True)
def _fresh_notices():
    notices.reset()


def graphed(max_slots: int = 2, **transformer: Any) -> tuple[Any, Graphs, TapeBackend]:
    pipeline, backend = template_pipeline(**transformer), TapeBackend()
    (graphs,) = cuda_graph.apply(pipeline, max_slots=max_slots, backend=backend)
    return pipeline, graphs, backend


def latents(pipeline: Any, *, steer: dict[int, Callable[[Any], None]] | None = None, **options: Any) -> list[Any]:
    """Of a rollout; ``steer`` is done before the chunks of these numbers."""
    options = {"prompt": "a red circle", "seed": 3, "num_chunk": CHUNKS, "control": CONTROL, **options}
    rollout, made = pipeline.rollout(**options), []
    for i in range(options["num_chunk"]):
        if steer and i in steer:
            steer[i](rollout)
        made.append(next(rollout).latent)
    return made


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("guidance", GUIDANCE)
def test_a_window_that_fills_and_evicts(guidance):
    pipeline, graphs, backend = graphed(**GUIDANCE[guidance])
    want = latents(template_pipeline(**GUIDANCE[guidance]))
    assert same(latents(pipeline), want)
    branches = 2 if guidance == "sequential" else 1
    assert graphs.captures == 2 * LENGTHS * branches, "a pass that predicts and one that commits, for each length"
    assert graphs.replays == (3 * CHUNKS - 1) * branches, "every pass: 2 steps and a commit, but for the last chunk"
    assert same(latents(pipeline), want)
    assert graphs.captures == len(backend.tapes) == 2 * LENGTHS * branches, "the next rollout captures nothing"
    assert not graphs.refused


@pytest.mark.parametrize("policy", ["keep", "recache", "reset"])
@pytest.mark.parametrize("guidance", ["batched", "sequential", "relative"])
def test_a_new_prompt(guidance, policy):
    steer = {5: lambda rollout: rollout.set_prompt("something else", policy=policy)}
    pipeline, graphs, _ = graphed(**GUIDANCE[guidance])
    want = latents(template_pipeline(**GUIDANCE[guidance]), steer=steer)
    assert not same(want, latents(pipeline)), "the prompt matters"
    captures = graphs.captures
    assert same(latents(pipeline, steer=steer), want)
    if policy != "reset":
        assert graphs.captures == captures, "text is copied into the tensors that graphs read"
        assert all(tape.replays for tape in graphs.backend.tapes)


def lora(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = [f"blocks.{block}.{layer}" for block in (0, 1) for layer in ("self_attn.q", "cross_attn.k", "ffn.0")]
    shapes = {"self_attn.q": (48, 48), "cross_attn.k": (48, 48), "ffn.0": (96, 48)}
    state = {}
    for name in names:
        rows, columns = shapes[name.partition(".")[2].partition(".")[2]]
        state[f"{name}.lora_A.weight"] = torch.randn(4, columns, generator=generator) / 3
        state[f"{name}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) / 3
    return state


def test_loras_change_between_chunks_and_between_rollouts_without_a_capture():
    plain, (pipeline, graphs, _) = template_pipeline(), graphed()
    for each in (plain, pipeline):
        each.loras.load("style", lora(1), weight=0.0)
        each.loras.load("other", lora(2), weight=0.0)
    latents(pipeline)
    captures = graphs.captures
    steer = {3: lambda r: r.set_loras({"style": 0.9}), 5: lambda r: r.set_loras({"style": 0.2, "other": 1.0})}
    want = latents(plain, steer=steer)
    assert same(latents(pipeline, steer=steer), want) and not same(want, latents(plain))
    assert same(latents(pipeline), latents(plain))
    assert graphs.captures == captures


def test_rollouts_of_different_sizes_interleave():
    plain, (pipeline, graphs, _) = template_pipeline(guidance_scale=2.0), graphed(guidance_scale=2.0)
    options = [
        {"prompt": "a", "seed": 1, "height": 32, "width": 48, "control": CONTROL},
        {"prompt": ["b", "c"], "seed": 2, "height": 48, "width": 32, "control": [CONTROL, CONTROL]},
    ]
    want = [[chunk.latent for chunk in plain.rollout(num_chunk=CHUNKS, **option)] for option in options]
    rollouts, mixed = [pipeline.rollout(num_chunk=CHUNKS, **option) for option in options], ([], [])
    for i in (0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0):
        mixed[i].append(next(rollouts[i]).latent)
    assert all(same(a, b) for a, b in zip(want, mixed, strict=True))
    assert graphs.captures == 2 * 2 * LENGTHS and graphs.pool.free == 0


def test_rollouts_of_one_size_interleave_each_in_a_slot_of_its_own():
    plain, (pipeline, graphs, _) = template_pipeline(), graphed()
    want = [latents(plain, seed=seed, prompt=f"scene {seed}") for seed in (1, 2)]
    rollouts = [pipeline.rollout(f"scene {seed}", seed=seed, num_chunk=CHUNKS, control=CONTROL) for seed in (1, 2)]
    mixed = [[next(rollout).latent for rollout in rollouts] for _ in range(CHUNKS)]
    assert all(same(a, list(b)) for a, b in zip(want, zip(*mixed, strict=True), strict=True))
    assert len(graphs.pool.slots) == 2


def test_every_expert_has_graphs_of_its_own():
    expert = ExpertConfig(sigma_low=0.9, transformer=PIPELINE_TEMPLATE.diffusion_model.transformer)
    config = derive_config(PIPELINE_TEMPLATE, diffusion_model={"high_noise": (expert,)})
    plain, pipeline = config.setup(), config.setup()
    high, low = cuda_graph.apply(pipeline, backend=TapeBackend())
    assert same(latents(pipeline), latents(plain))
    assert high.captures == low.captures == 2 * LENGTHS and high.replays == low.replays == 2 * CHUNKS - 1
    assert high.pool.free == low.pool.free == 1


def test_a_slot_comes_back_when_its_rollout_is_closed_and_keeps_its_addresses():
    pipeline, graphs, _ = graphed()
    rollout = pipeline.rollout("a", num_chunk=CHUNKS)
    next(rollout), next(rollout)
    assert graphs.pool.free == 0
    before = [tensor.data_ptr() for tensor in graphs.pool.slots[0].tensors]
    rollout.close()
    assert graphs.pool.free == 1
    again = pipeline.rollout("b", num_chunk=CHUNKS)
    assert [tensor.data_ptr() for tensor in graphs.pool.slots[0].tensors] == before
    assert again.cache.experts[0].branches[0].blocks[0].self_kv.k.data_ptr() in before
    del again
    assert graphs.pool.free == 1, "a rollout that is merely forgotten counts as closed"


def test_a_snapshot_goes_on_in_a_slot(tmp_path):
    want = latents(template_pipeline(guidance_scale=2.0))
    pipeline, graphs, _ = graphed(guidance_scale=2.0)
    rollout = pipeline.rollout("a red circle", seed=3, num_chunk=CHUNKS, control=CONTROL)
    begun = [next(rollout).latent for _ in range(5)]
    rollout.save(tmp_path / "state")
    rollout.close()
    captures = graphs.captures
    resumed = pipeline.resume(tmp_path / "state", num_chunk=CHUNKS, control=CONTROL)
    assert same(begun + [chunk.latent for chunk in resumed], want)
    assert graphs.captures == captures, "it stands in the slot of the one before"


def test_where_all_slots_are_taken_a_rollout_runs_without_graphs_and_that_is_said_once(capsys):
    plain, (pipeline, graphs, _) = template_pipeline(), graphed(max_slots=1)
    first = pipeline.rollout("a red circle", seed=3, num_chunk=CHUNKS, control=CONTROL)
    next(first)
    replays = graphs.replays
    assert same(latents(pipeline), latents(plain)) and same(latents(pipeline), latents(plain))
    assert graphs.replays == replays and len(graphs.pool.slots) == 1
    assert capsys.readouterr().err.count("all 1 slots of CUDA graphs are taken") == 1
    first.close()
    assert same(latents(pipeline), latents(plain)) and graphs.replays > replays


def test_a_free_slot_of_another_size_makes_room():
    pipeline, graphs, backend = graphed(max_slots=1)
    latents(pipeline)
    old = list(backend.tapes)
    assert same(latents(pipeline, height=48), latents(template_pipeline(), height=48))
    assert len(graphs.pool.slots) == 1 and not set(map(id, old)) & set(map(id, backend.tapes))


def test_weights_that_change_in_place_need_no_capture_and_weights_that_move_do(capsys):
    plain, (pipeline, graphs, _) = template_pipeline(), graphed()
    latents(pipeline)
    captures = graphs.captures
    for each in (plain, pipeline):
        each.diffusion_model.transformer.network.head.head.weight.mul_(1.5)
    assert same(latents(pipeline), latents(plain)) and graphs.captures == captures
    assert not capsys.readouterr().err
    network = pipeline.diffusion_model.transformer.network
    network.load_state_dict({key: value.clone() for key, value in network.state_dict().items()}, assign=True)
    assert same(latents(pipeline), latents(plain)) and graphs.captures == 2 * captures
    assert "weights of TemplateNetwork lie elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize("committed", [False, True])
def test_weights_that_move_while_another_rollout_is_at_work(committed):
    """Between two chunks of one, before or after it is committed, and after a chunk of the other."""
    plain, (pipeline, _, backend) = template_pipeline(), graphed()
    made = []
    for each in (plain, pipeline):
        latents(each)
        a, b = (each.rollout(name, seed=3, num_chunk=CHUNKS, control=CONTROL) for name in "ab")
        made.append([next(a).latent, next(b).latent, next(a).latent])
        if committed:
            b.flush()
        old = list(backend.tapes)
        network = each.diffusion_model.transformer.network
        network.load_state_dict({key: value * 1.1 for key, value in network.state_dict().items()}, assign=True)
        made[-1] += [next(b).latent, next(a).latent]
    assert same(*made) and not set(map(id, old)) & set(map(id, backend.tapes))


def test_recaching_runs_eagerly():
    pipeline, graphs, _ = graphed()
    rollout = pipeline.rollout("a", num_chunk=CHUNKS)
    for _ in range(5):
        next(rollout)
    rollout.flush()
    before = graphs.captures, graphs.replays
    rollout.set_prompt("a", policy="recache")
    assert (graphs.captures, graphs.replays) == before


def test_compiled_blocks_are_captured_and_compiled_once_for_each_length():
    plain, pipeline = template_pipeline(guidance_scale=2.0), template_pipeline(guidance_scale=2.0)
    (region,) = compile_modules(pipeline.diffusion_model.transformer.blocks, backend="eager")
    (graphs,) = cuda_graph.apply(pipeline, backend=TapeBackend())
    assert same(latents(pipeline), latents(plain))
    steer = {5: lambda rollout: rollout.set_prompt("something else")}
    assert same(latents(pipeline, steer=steer), latents(plain, steer=steer))
    assert (region.graphs, region.broken) == (LENGTHS, False) and graphs.captures == 2 * LENGTHS


def test_prewarming_captures_all_that_a_rollout_needs():
    pipeline, graphs, _ = graphed()
    prewarm(pipeline, lambda: pipeline.rollout("warm", num_chunk=CHUNKS, control=CONTROL))
    assert graphs.captures == 2 * LENGTHS
    assert same(latents(pipeline), latents(template_pipeline())) and graphs.captures == 2 * LENGTHS


def test_given_latents_and_a_first_chunk_of_another_length():
    given = torch.randn(1, 3, 4, 4, 6, generator=torch.Generator().manual_seed(0))
    pipeline, graphs, _ = graphed()
    assert same(latents(pipeline, initial_latents=given), latents(template_pipeline(), initial_latents=given))
    assert not graphs.refused


def test_gradients_go_through_the_plain_pass():
    pipeline, graphs, _ = graphed()
    rollout = pipeline.rollout("a", num_chunk=2)
    transformer = pipeline.diffusion_model.transformer
    noisy = torch.randn(1, 3, 1, 4, 6, requires_grad=True)
    transformer.predict_flow(noisy, torch.tensor([500.0]), rollout.cache.experts[0]).sum().backward()
    assert noisy.grad is not None and graphs.captures == 0


def test_a_copy_has_no_graphs():
    pipeline, graphs, _ = graphed()
    want = latents(pipeline)
    replays = graphs.replays
    assert same(latents(copy.deepcopy(pipeline)), want) and graphs.replays == replays
    transformer = pipeline.diffusion_model.transformer
    another = type(transformer)(transformer.config)
    another.load_state_dict(transformer.state_dict())
    pipeline.diffusion_model.experts[0] = another.requires_grad_(False)
    assert same(latents(pipeline), want) and graphs.replays == replays


def test_a_forgotten_pipeline_is_freed_with_its_slots():
    pipeline, graphs, _ = graphed()
    latents(pipeline)
    gc.collect()
    weight = weakref.ref(pipeline.diffusion_model.transformer.network.head.head.weight)
    buffer = weakref.ref(graphs.pool.slots[0].tensors[0])
    gc.disable()
    try:
        del pipeline, graphs, _
        assert weight() is None and buffer() is None, "by counting references: a GPU's memory cannot wait for more"
    finally:
        gc.enable()
