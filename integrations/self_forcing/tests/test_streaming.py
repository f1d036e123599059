"""The stream of a Self-Forcing-shaped model: equal to one masked pass, and no other after 10,000 frames."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import apply_rope, rope_3d
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.recipes.template.config import TemplateCodecConfig
from flashdreams.recipes.wan import attention as wan_attention
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache
from member import prompt, shrunk
from self_forcing.config import PIPELINE_SELF_FORCING_T2V_1_3B_LONG, SELF_FORCING_CONFIGS

pytestmark = pytest.mark.ci_cpu


def whole_pass(pipeline: StreamInferencePipeline, clip: Tensor, text: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Reference: keys and values of every block from one pass over the clean clip under a block-causal mask, in which
    the frames of a chunk see those that are in their window and sink."""
    config = pipeline.config.diffusion_model.transformer
    network = pipeline.diffusion_model.transformer.network
    frames, rows, columns = clip.shape[2], clip.shape[3] // 2, clip.shape[4] // 2
    of = torch.arange(frames)
    end = (of // config.len_t + 1) * config.len_t
    ring = config.window_size_t - config.sink_size_t
    seen = (of < end[:, None]) & ((of >= end[:, None] - ring) | (of < config.sink_size_t))
    mask = seen.repeat_interleave(rows * columns, 0).repeat_interleave(rows * columns, 1)
    geometry = CacheGeometry(frames, 0, rows * columns)
    cache = NetworkCache(network.encode_text(text))
    for block in cache.blocks:
        shape = config.network.num_heads, config.network.head_dim
        block.self_kv = RollingKVCache(geometry, len(clip), *shape, clip.dtype, clip.device)
    slots = torch.arange(frames * rows * columns)
    context = ChunkContext(rope_3d(range(frames), rows, columns, config.network.head_dim), slots, len(slots), mask=mask)
    network(clip, torch.zeros(len(clip)), context, cache)
    return [(block.self_kv.k, block.self_kv.v) for block in cache.blocks]


@pytest.mark.parametrize(("window", "sink"), [(21, 0), (6, 0), (9, 3)])
def test_streaming_equals_block_causal(window: int, sink: int) -> None:
    """A rollout's context after its last commit is that of the whole clip at once; with text, which must matter."""
    base = shrunk(SELF_FORCING_CONFIGS["self-forcing-t2v-1.3b"]).pipeline
    pipeline = derive_config(
        base, decoder=None, height=4, width=6,
        diffusion_model={"transformer": {"window_size_t": window, "sink_size_t": sink}},
    ).setup()  # fmt: skip
    text = 5 * prompt().text
    rollout = pipeline.rollout(conditions=WanConditions(text), num_chunk=6, seed=2)
    clip = torch.cat([next(rollout).latent for _ in range(6)], dim=2)
    rollout.flush()
    blocks = rollout.cache.experts[0].branches[0].blocks
    with torch.no_grad():
        whole, untold = whole_pass(pipeline, clip, text), whole_pass(pipeline, clip, torch.zeros_like(text))
    geometry = blocks[0].self_kv.geometry
    visible = [f for f in range(18) if f < sink or f >= 18 - geometry.ring]
    slots = torch.cat([geometry.token_slots(f, f + 1) for f in visible])
    tokens = torch.cat([torch.arange(6 * f, 6 * f + 6) for f in visible])
    for block, (k, v) in zip(blocks, whole, strict=True):
        torch.testing.assert_close(block.self_kv.k[:, slots], k[:, tokens], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(block.self_kv.v[:, slots], v[:, tokens], rtol=1e-5, atol=1e-5)
    assert (whole[-1][1] - untold[-1][1]).abs().max() > 1e-2


def state_bytes(value: Any) -> int:
    """Bytes of every tensor of a cache tree."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(state_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(state_bytes, value))
    if dataclasses.is_dataclass(value) or isinstance(value, RollingKVCache):
        return sum(map(state_bytes, vars(value).values()))
    return 0


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc")
@pytest.mark.parametrize("rope", ["absolute", "cache_relative"])
def test_10000_frames_in_flat_memory_with_keys_at_their_positions(rope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """834 chunks of 3 latent frames. The keys that the last chunk attends to are compared with raw keys, kept by frame
    when they were committed, rotated to the positions that the policy promises."""
    network = {"dim": 16, "ffn_dim": 16, "num_heads": 2, "num_layers": 2, "in_dim": 3, "out_dim": 3}
    network |= {"text_dim": 8, "text_len": 6, "freq_dim": 16}
    pipeline = derive_config(
        PIPELINE_SELF_FORCING_T2V_1_3B_LONG, decoder=TemplateCodecConfig(), text_encoder=None, height=16, width=32,
        diffusion_model={
            "transformer": {"rope": rope, "dtype": "float32", "checkpoint_path": None, "network": network},
            "scheduler": {"num_steps": 2, "denoising_steps": (1000, 500)},
        },
    ).setup()  # fmt: skip
    block = pipeline.diffusion_model.transformer.network.blocks[0]
    latest, raw = {}, {}
    block.self_attn.norm_k.register_forward_hook(lambda module, inputs, output: latest.update(k=output))

    def keep(start: int) -> None:
        raw.update(zip(range(start, start + 3), latest["k"].unflatten(1, (3, -1)).unbind(1), strict=True))
        for frame in [frame for frame in raw if 3 <= frame < start - 9]:
            del raw[frame]

    rollout = pipeline.rollout(conditions=prompt(), seed=0)
    made, sizes, resident = 0, {}, {}
    for index in range(834):
        made += next(rollout).frames.shape[1]
        rollout.flush()
        keep(3 * index)
        if index in (50, 400, 833):
            sizes[index], resident[index] = state_bytes(rollout.cache), resident_bytes()
    assert made == 1 + 4 * (834 * 3 - 1) >= 10_000
    assert len(set(sizes.values())) == 1
    assert resident[833] - resident[50] < 16e6

    read = []
    attention = wan_attention.attention
    monkeypatch.setattr(wan_attention, "attention", lambda q, k, v, **kw: read.append(k) or attention(q, k, v, **kw))
    expert, end = rollout.cache.experts[0], 3 * 835
    with torch.no_grad():
        pipeline.diffusion_model.transformer.predict_flow(torch.randn(1, 3, 3, 2, 4), torch.tensor([625.0]), expert)
    keep(end - 3)
    moved = end - 12 if rope == "cache_relative" else 0
    position = {frame: frame + moved if frame < 3 else frame for frame in (*range(3), *range(end - 9, end))}
    assert max(position.values()) - min(position.values()) == (11 if moved else end - 1)
    geometry, seen = expert.branches[0].blocks[0].self_kv.geometry, read[0].unflatten(1, (12, -1))
    for frame, at in position.items():
        want = apply_rope(raw[frame].unflatten(-1, (2, 8)), rope_3d(range(at, at + 1), 1, 2, 8))
        torch.testing.assert_close(seen[:, geometry.slot(frame)], want, rtol=1e-5, atol=1e-5)
