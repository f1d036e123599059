"""LoRAs on a running pipeline: exchanged between chunks, each rollout with its own, without compiling again."""

from __future__ import annotations

import pytest
import torch

from flashdreams.core.checkpoint import CheckpointError
from flashdreams.infra.snapshot import SnapshotError
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def lora(seed: int) -> dict[str, torch.Tensor]:
    """Changes self-attention, and the text's keys, which are computed once for a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"transformer.blocks.{block}.{layer}.lora_{side}.weight": torch.randn(shape, generator=generator)
        for block in (0, 1)
        for layer in ("attn1.to_v", "attn2.to_k", "attn2.to_v")
        for side, shape in (("A", (4, 48)), ("B", (48, 4)))
    }


@pytest.fixture
def pipeline():
    pipeline = template_pipeline()
    pipeline.loras.load("a", lora(1), weight=0)
    pipeline.loras.load("b", lora(2), weight=0)
    return pipeline


def latents(pipeline, plan: list[dict[str, float]], seed: int = 3) -> list[torch.Tensor]:
    """One rollout whose chunk ``i`` is made with the LoRAs ``plan[i]``."""
    found = []
    with pipeline.rollout("a red circle", seed=seed, num_chunk=len(plan), loras=plan[0]) as rollout:
        for weights in plan:
            if weights != rollout.cache.loras:
                rollout.set_loras(weights)
            found.append(next(rollout).latent)
    return found


def test_a_lora_brought_in_between_chunks_changes_what_follows_and_nothing_before(pipeline):
    plain = latents(pipeline, [{}] * 4)
    swapped = latents(pipeline, [{}, {}, {"a": 1.0}, {}])
    assert torch.equal(swapped[0], plain[0]) and torch.equal(swapped[1], plain[1])
    assert not torch.allclose(swapped[2], plain[2], atol=1e-3)
    again = latents(pipeline, [{}] * 4)
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True)), "the base weights are not back"


def test_the_context_of_earlier_chunks_is_committed_with_the_weights_that_made_them(pipeline):
    """The chunk that waits for its commit when the LoRA comes belongs to the time before."""
    begun = pipeline.rollout("a red circle", seed=3, num_chunk=3, loras={})
    next(begun)
    begun.flush()
    begun.set_loras({"a": 1.0})
    pending = latents(pipeline, [{}, {"a": 1.0}])
    assert torch.equal(next(begun).latent, pending[1])


def test_the_keys_and_values_of_the_text_are_made_anew(pipeline):
    with pipeline.rollout("a red circle", num_chunk=2, loras={}) as rollout:
        block = rollout.cache.experts[0].branches[0].blocks[0]
        before = block.text_k.clone()
        rollout.set_loras({"a": 1.0})
        assert not torch.equal(block.text_k, before)
        rollout.set_loras({})
        assert torch.equal(block.text_k, before)


def test_interleaved_rollouts_keep_their_own_loras(pipeline):
    loras: dict[str, dict[str, float]] = {"a": {"a": 1.0}, "b": {"b": 0.5}, "": {}}
    alone = {name: latents(pipeline, [weights] * 3) for name, weights in loras.items()}
    rollouts = {
        name: pipeline.rollout("a red circle", seed=3, num_chunk=3, loras=weights) for name, weights in loras.items()
    }
    for i in range(3):
        for name, rollout in rollouts.items():
            assert torch.equal(next(rollout).latent, alone[name][i]), (name, i)


def test_a_new_rollout_has_the_weights_given_when_loading(pipeline):
    pipeline.loras.load("c", lora(1), weight=0.5)
    with pipeline.rollout("a red circle", seed=3, num_chunk=1) as rollout:
        assert rollout.cache.loras == {"a": 0.0, "b": 0.0, "c": 0.5}
        assert torch.equal(next(rollout).latent, latents(pipeline, [{"a": 0.5}])[0])


def test_a_refused_lora_leaves_a_running_rollout_alone(pipeline, cases):
    plain = latents(pipeline, [{"a": 1.0}] * 3)
    with pipeline.rollout("a red circle", seed=3, num_chunk=3, loras={"a": 1.0}) as rollout:
        assert torch.equal(next(rollout).latent, plain[0])
        for file in sorted((cases / "B11").iterdir()):
            with pytest.raises(CheckpointError, match="is a DoRA"):
                pipeline.loras.load("dora", file)
        with pytest.raises(ValueError, match="there is no LoRA 'dora'; loaded: 'a', 'b'"):
            rollout.set_loras({"dora": 1.0})
        assert torch.equal(next(rollout).latent, plain[1])
        assert torch.equal(next(rollout).latent, plain[2])


def test_a_rollout_whose_lora_is_unloaded_says_so_and_goes_on_without_it(pipeline):
    with pipeline.rollout("a red circle", seed=3, num_chunk=3, loras={"a": 1.0}) as rollout:
        next(rollout)
        rollout.flush()
        pipeline.loras.unload("a")
        with pytest.raises(ValueError, match="there is no LoRA 'a'"):
            next(rollout)
        rollout.set_loras({"b": 1.0})
        assert next(rollout).index == 1


def test_a_saved_rollout_goes_on_with_its_loras(pipeline, tmp_path):
    whole = latents(pipeline, [{"a": 0.5}] * 3)
    rollout = pipeline.rollout("a red circle", seed=3, num_chunk=3, loras={"a": 0.5})
    next(rollout)
    rollout.save(tmp_path / "state.safetensors")
    rollout.close()
    latents(pipeline, [{"b": 1.0}])
    resumed = pipeline.resume(tmp_path / "state.safetensors", num_chunk=3)
    assert [torch.equal(chunk.latent, want) for chunk, want in zip(resumed, whole[1:], strict=True)] == [True, True]
    pipeline.loras.unload("a")
    with pytest.raises(SnapshotError, match="goes on with the LoRA 'a', which is not loaded"):
        pipeline.resume(tmp_path / "state.safetensors")


def test_a_swap_compiles_nothing_and_moves_no_buffer(pipeline):
    from torch._dynamo.testing import CompileCounter

    network = pipeline.diffusion_model.transformer.network
    compiled = CompileCounter()
    block = network.blocks[0]
    block.forward = torch.compile(block.forward, backend=compiled, fullgraph=True)
    places = [parameter.data_ptr() for parameter in network.parameters()]
    plan = [{}, {}, {}, {}]
    plain = latents(pipeline, plan)
    count = compiled.frame_count
    assert count > 0
    swapped = latents(pipeline, [{}, {"a": 1.0}, {"a": 0.3, "b": 1.0}, {}])
    assert compiled.frame_count == count
    assert [parameter.data_ptr() for parameter in network.parameters()] == places
    assert torch.equal(swapped[0], plain[0]) and not torch.allclose(swapped[1], plain[1], atol=1e-3)
