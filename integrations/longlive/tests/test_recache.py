"""Changing the prompt of a LongLive rollout, against the published procedure written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.core.rope import apply_rope, rope_3d
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.rollout import Rollout
from flashdreams.recipes.template.config import TemplateTextConfig
from flashdreams.recipes.wan.layers import gated_add, layer_norm, modulate
from longlive.config import LONGLIVE_CONFIGS
from member import shrunk

pytestmark = pytest.mark.ci_cpu

WINDOW, SINK, CHUNK, TOKENS = 12, 3, 3, 6


@pytest.fixture(scope="module")
def pipeline() -> StreamInferencePipeline:
    config = derive_config(shrunk(LONGLIVE_CONFIGS["longlive-t2v-1.3b"]).pipeline, decoder=None, height=4, width=6)
    return derive_config(config, text_encoder=TemplateTextConfig(width=8, length=6)).setup()


def blocks_of(rollout: Rollout):
    return rollout.cache.experts[0].branches[0].blocks


def published_recache(network, latents: Tensor, text: Tensor, sink: list[tuple[Tensor, Tensor]]):
    """Keys and values, by block and slot, after one forward over the newest frames of ``latents`` ``[B, C, f, H, W]``.

    Timestep 0 for all; positions absolute; a query of the i-th chunk of the stretch sees the slots before that chunk's
    end. Slots are places in the stretch, and those of the sink keep the keys and values they have, ``sink``.
    """
    total = latents.shape[2]
    count = min(WINDOW, total)
    stretch = latents[:, :, total - count :]
    rope = rope_3d(range(total - count, total), 2, 3, 24)
    end = (torch.arange(count) // CHUNK + 1) * CHUNK
    seen = torch.arange(count) < end[:, None]
    mask = seen.repeat_interleave(TOKENS, 0).repeat_interleave(TOKENS, 1)
    x = network.patch_embedding(stretch).flatten(2).transpose(1, 2)
    time = network.embed_time(torch.zeros(1))
    table = network.time_projection(time.table).view(1, 6, -1)
    cross, made = network.encode_text(text), []
    for i, block in enumerate(network.blocks):
        entries = [entry[:, None, None] for entry in (table + block.modulation).unbind(1)]
        attention = block.self_attn
        y = modulate(x, entries[0], entries[1], 1e-6)
        q = apply_rope(attention.norm_q(attention.q(y)).unflatten(-1, (2, 24)), rope)
        k = apply_rope(attention.norm_k(attention.k(y)).unflatten(-1, (2, 24)), rope)
        v = attention.v(y).unflatten(-1, (2, 24))
        k[:, : SINK * TOKENS], v[:, : SINK * TOKENS] = sink[i]
        made.append((k, v))
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 24**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        x = gated_add(x, attention.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)), entries[2])
        x = x + block.cross_attn(layer_norm(x, block.norm3), cross[i])
        x = gated_add(x, block.ffn(modulate(x, entries[3], entries[4], 1e-6)), entries[5])
    return made


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 9], ids=lambda n: f"{3 * n} frames")
def test_recache_equals_the_published_procedure(pipeline: StreamInferencePipeline, chunks: int) -> None:
    """Before the cache of 12 frames is full, when it is just full, and after chunks have left it."""
    rollout = pipeline.rollout("a cat on a wall", seed=4)
    latents = torch.cat([next(rollout).latent for _ in range(chunks)], dim=2)
    rollout.flush()
    total = 3 * chunks
    sink = [
        (block.self_kv.k[:, : SINK * TOKENS].clone(), block.self_kv.v[:, : SINK * TOKENS].clone())
        for block in blocks_of(rollout)
    ]
    before = [block.self_kv.v.clone() for block in blocks_of(rollout)]
    rollout.set_prompt("a dog in the snow")
    network = pipeline.diffusion_model.transformer.network
    text = pipeline.encode_prompts(["a dog in the snow"]).text
    with torch.no_grad():
        made = published_recache(network, latents, text, sink)
    geometry, count = blocks_of(rollout)[0].self_kv.geometry, min(WINDOW, total)
    for block, (k, v) in zip(blocks_of(rollout), made, strict=True):
        assert torch.equal(block.self_kv.k[:, : SINK * TOKENS], k[:, : SINK * TOKENS]), "the sink keeps the old prompt"
        for place in range(SINK, count):
            slots = geometry.token_slots(total - count + place, total - count + place + 1)
            at = slice(place * TOKENS, (place + 1) * TOKENS)
            torch.testing.assert_close(block.self_kv.k[:, slots], k[:, at], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(block.self_kv.v[:, slots], v[:, at], rtol=1e-5, atol=1e-5)
    if chunks > 1:
        changed = (blocks_of(rollout)[-1].self_kv.v - before[-1]).abs().max()
        assert changed > 1e-4, "the new prompt has reached the context"


def test_the_procedure_tells_prompts_and_masks_apart(pipeline: StreamInferencePipeline) -> None:
    """The reference itself: another text or a sink of another prompt gives other keys."""
    network = pipeline.diffusion_model.transformer.network
    latents = torch.randn(1, 16, 6, 4, 6, generator=torch.Generator().manual_seed(0))
    zero = [(torch.zeros(1, 18, 2, 24), torch.zeros(1, 18, 2, 24))] * 2
    text, other = (pipeline.encode_prompts([words]).text for words in ("a cat", "a dog"))
    with torch.no_grad():
        first = published_recache(network, latents, text, zero)[-1][1]
        assert (first - published_recache(network, latents, other, zero)[-1][1])[:, 18:].abs().max() > 1e-4
        ones = [(torch.ones(1, 18, 2, 24), torch.ones(1, 18, 2, 24))] * 2
        assert (first - published_recache(network, latents, text, ones)[-1][1])[:, 18:].abs().max() > 1e-4


def test_text_keys_are_rebuilt_and_the_rollout_goes_on(pipeline: StreamInferencePipeline) -> None:
    rollout = pipeline.rollout("a cat on a wall", seed=4)
    for _ in range(6):
        next(rollout)
    rollout.set_prompt("a dog in the snow")
    fresh = pipeline.diffusion_model.transformer.network.encode_text(
        pipeline.encode_prompts(["a dog in the snow"]).text
    )
    assert all(torch.equal(ours.text_k, theirs.text_k) for ours, theirs in zip(blocks_of(rollout), fresh, strict=True))
    told, kept = pipeline.rollout("a cat on a wall", seed=4), pipeline.rollout("a cat on a wall", seed=4)
    for _ in range(6):
        next(told), next(kept)
    kept.set_prompt("a dog in the snow", policy="keep")
    latents = [next(each).latent for each in (rollout, kept, told)]
    assert F.l1_loss(latents[0], latents[1]) > 1e-5 and F.l1_loss(latents[1], latents[2]) > 1e-5
