"""The rolling Wan transformer against the whole clip at once, and under torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import rope_3d
from flashdreams.infra.layout import ChunkPlan, Layout
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.network import BlockCache, ChunkContext, NetworkCache, WanBlock
from flashdreams.recipes.wan.transformer import WanConditions

pytestmark = pytest.mark.ci_cpu

NETWORK = WanNetworkConfig(
    dim=48, ffn_dim=96, num_heads=2, num_layers=2, in_dim=4, out_dim=4, text_dim=8, text_len=4, freq_dim=16
)


def transformer(**options):
    torch.manual_seed(0)
    return WanTransformerConfig(network=NETWORK, dtype="float32", **options).setup()


@pytest.mark.parametrize(("sink", "window"), [(0, 12), (0, 4), (2, 6), (3, 5)])
def test_chunk_by_chunk_equals_one_masked_pass(sink, window):
    """Reference: the whole clip in one block-causal pass with the window as a mask. A committed frame's keys depend on
    what it saw when committed, so the reference masks each chunk's queries by its own window."""
    model = transformer(len_t=2, window_size_t=window, sink_size_t=sink)
    layout = Layout(2, 4, 4, 4, ChunkPlan.of(2))
    conditions = WanConditions(torch.randn(2, 4, 8))
    clip, frames, tokens = torch.randn(2, 4, 10, 4, 4), 10, 4
    cache = model.initialize_cache(layout, conditions)
    flows = []
    with torch.inference_mode():
        for start in range(0, frames, 2):
            chunk = clip[:, :, start : start + 2]
            flows.append(model.predict_flow(chunk, torch.full((2,), 300.0), cache))
            model.commit(chunk, torch.full((2,), 300.0), cache)
        of = torch.arange(frames)
        end = (of // 2 + 1) * 2
        seen = (of[None] < end[:, None]) & ((of[None] >= end[:, None] - (window - sink)) | (of[None] < sink))
        mask = seen.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)
        context = ChunkContext(rope_3d(range(frames), 2, 2, NETWORK.head_dim), mask=mask)
        network_cache = NetworkCache(model.network.encode_text(conditions.text))
        want = model.network(clip, torch.full((2,), 300.0), context, network_cache)
    torch.testing.assert_close(torch.cat(flows, 2), want, rtol=1e-5, atol=1e-5)


def test_relative_positions_equal_absolute_until_the_window_moves():
    models = [
        transformer(len_t=2, window_size_t=6, sink_size_t=2, rope=rope) for rope in ("absolute", "cache_relative")
    ]
    layout, conditions = Layout(1, 4, 4, 4, ChunkPlan.of(2)), WanConditions(torch.randn(1, 4, 8))
    clip, outputs = torch.randn(1, 4, 12, 4, 4), []
    for model in models:
        cache, flows = model.initialize_cache(layout, conditions), []
        with torch.inference_mode():
            for start in range(0, 12, 2):
                flows.append(model.predict_flow(clip[:, :, start : start + 2], torch.tensor([500.0]), cache))
                model.commit(clip[:, :, start : start + 2], torch.tensor([0.0]), cache)
        outputs.append(flows)
    differences = [(a - b).abs().max().item() for a, b in zip(*outputs, strict=True)]
    assert max(differences[:3]) < 1e-6 < min(differences[3:])


def test_relative_positions_have_no_far_past():
    """After 10,000 frames, as at the start: with the same context, the same flow (no table runs out)."""
    model = transformer(len_t=2, window_size_t=6, sink_size_t=2, rope="cache_relative")
    layout, conditions = Layout(1, 4, 4, 4, ChunkPlan.of(2)), WanConditions(torch.randn(1, 4, 8))
    still = torch.randn(1, 4, 2, 4, 4)
    flows = []
    with torch.inference_mode():
        for warm in (8, 10_000):
            cache = model.initialize_cache(layout, conditions)
            model.commit(still, torch.tensor([0.0]), cache)
            cache.start = warm
            for _ in range(3):
                model.commit(still, torch.tensor([0.0]), cache)
            flows.append(model.predict_flow(still, torch.tensor([500.0]), cache))
    torch.testing.assert_close(flows[0], flows[1], rtol=2e-4, atol=2e-4)


def test_bidirectional_model_makes_a_single_chunk():
    model = transformer(len_t=5)
    cache = model.initialize_cache(Layout(1, 4, 4, 4, ChunkPlan.of(5)), WanConditions(torch.randn(1, 4, 8)))
    clip = torch.randn(1, 4, 5, 4, 4)
    model.commit(clip, torch.tensor([0.0]), cache)
    with pytest.raises(ValueError, match="single chunk"):
        model.predict_flow(clip, torch.tensor([500.0]), cache)


def test_timesteps_per_sample_frame_and_token_agree():
    model = transformer(len_t=3)
    cache = NetworkCache(model.network.encode_text(torch.randn(2, 4, 8)))
    clip, context = torch.randn(2, 4, 3, 24, 24), ChunkContext(rope_3d(range(3), 12, 12, NETWORK.head_dim))
    t = torch.tensor([300.0, 950.0])
    with torch.inference_mode():
        per_sample = model.network(clip, t, context, cache)
        per_frame = model.network(clip, t[:, None].expand(2, 3), context, cache)
        per_token = model.network(clip, t[:, None].expand(2, 3 * 144), context, cache)
    torch.testing.assert_close(per_sample, per_frame, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(per_sample, per_token, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sink", [0, 2])
def test_compiled_block_never_recompiles_after_the_fill_phase(sink):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    block = WanBlock(NETWORK).eval().requires_grad_(False)
    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    geometry = CacheGeometry(window=6, sink=sink, tokens_per_frame=4)
    text = block.cross_attn.encode(torch.randn(1, 4, 48))
    caches = [BlockCache(*text, RollingKVCache(geometry, 1, 2, 24, torch.float32, "cpu")) for _ in range(2)]
    vectors = [torch.randn(1, 1, 1, 48) for _ in range(6)]
    after_fill = None
    with torch.inference_mode():
        for chunk in range(40):
            start, stop = 2 * chunk, 2 * chunk + 2
            visible = geometry.visible(stop) * 4
            context = ChunkContext(rope_3d(range(start, stop), 2, 2, 24), geometry.token_slots(start, stop), visible)
            x = torch.randn(1, 8, 48)
            want, got = block(x, vectors, context, caches[0]), compiled(x, vectors, context, caches[1])
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            if chunk == 2:
                after_fill = counters["stats"]["unique_graphs"]
    assert 1 <= after_fill <= 3
    assert counters["stats"]["unique_graphs"] == after_fill
    assert sum(counters["graph_break"].values()) == 0
