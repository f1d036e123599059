"""The stream: equal to the whole clip at once, in memory that stays the same; repeatable, resumable, interleaved."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from flashdreams.core.controls import Control, Frame
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.noise import KeyedNoise
from flashdreams.core.rope import apply_rope, rope_3d
from flashdreams.infra.config import PipelineConfig
from flashdreams.infra.layout import ChunkPlan
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.rollout import to_uint8
from flashvsr._attention import neighbours
from flashvsr._colour import METHODS
from flashvsr._decoder import FOLD
from flashvsr._encoder import enlarge
from flashvsr.config import FLASHVSR_CONFIGS, ColouredVAEConfig
from small_flashvsr import narrow, shrunk

pytestmark = pytest.mark.ci_cpu

FRAMES = 120
ROWS, COLUMNS = 4, 6
"""Of a latent frame, in tokens."""
LATENTS = 32
"""6 + 13 * 2, which decode to 125 frames."""


def clip(count: int = FRAMES) -> Tensor:
    """A small clip that moves: uint8 ``[F, 16, 24, 3]``."""
    generator = np.random.default_rng(0)
    still, time = generator.uniform(0, 255, (16, 24 + count, 3)), np.arange(count)
    frames = np.stack([still[:, t : t + 24] * (0.75 + 0.25 * np.cos(t / 7)) for t in time])
    return torch.tensor(frames.astype(np.uint8))


def low_quality(frames: Tensor, length: int) -> Tensor:
    """The whole clip at the size of the output, its last frame repeated: ``[1, 3, length, H, W]`` in [-1, 1]."""
    frames = torch.cat((frames, frames[-1:].expand(length - len(frames), -1, -1, -1)))
    larger = enlarge(frames.permute(0, 3, 1, 2), 64, 96)
    return (larger.double() / 255 * 2 - 1).transpose(0, 1)[None]


def whole_projection(pipeline: StreamInferencePipeline, video: Tensor) -> Tensor:
    """Version 1.1: two causal convolutions over the whole clip, its first frame three more times in front."""
    projection = pipeline.encoder.projection
    x = torch.cat((video[:, :, :1].expand(-1, -1, 3, -1, -1), video), dim=2)
    x = rearrange(x, "b c f (h r) (w s) -> b (c r s) f h w", r=16, s=16)
    for conv, norm in ((projection.conv1, projection.norm1), (projection.conv2, projection.norm2)):
        first = conv is projection.conv1
        x = conv(F.pad(x, (1, 1, 1, 1, 2 if first else 0, 0), mode="replicate"))
        x = F.silu(x / x.norm(dim=1, keepdim=True) * math.sqrt(x.shape[1]) * norm.gamma)
    return projection.linear_layers[0](rearrange(x, "b c f h w -> b (f h w) c"))


def whole_network(pipeline: StreamInferencePipeline, noise: Tensor, tokens: Tensor) -> Tensor:
    """Clean latents of the whole clip from one pass over all its tokens; attention is over all pairs of them, where
    those that a call does not see, or does not select, are masked out."""
    network, config = pipeline.diffusion_model.transformer.network, pipeline.config.diffusion_model.transformer
    dim, heads = config.network.dim, config.network.num_heads
    half = config.network.freq_dim // 2
    angle = 1000.0 * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    time = network.time_embedding(torch.cat((angle.cos(), angle.sin()))[None])
    steps = network.time_projection(time).view(6, dim)
    text = network.text_embedding(pipeline.text_encoder.module.prompt)
    rope = rope_3d(range(LATENTS), ROWS, COLUMNS, dim // heads, dtype=torch.float64)
    norm = lambda x: F.layer_norm(x, (dim,), eps=config.network.eps)  # noqa: E731
    x = network.patch_embedding(noise).flatten(2).transpose(1, 2) + tokens
    for block in network.blocks:
        shift, scale, gate, shift2, scale2, gate2 = (block.modulation[0] + steps).unbind()
        y, attend = norm(x) * (1 + scale) + shift, block.self_attn
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in
                   (attend.norm_q(attend.q(y)), attend.norm_k(attend.k(y)), attend.v(y)))  # fmt: skip
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        scores = torch.einsum("blhd,bshd->bhls", q, k) / math.sqrt(dim // heads)
        weights = scores.masked_fill(~seen_tokens(q, k, config), -math.inf).softmax(-1).nan_to_num(0)
        x = x + gate * attend.o(torch.einsum("bhls,bshd->blhd", weights, v).flatten(-2))
        attend, y = block.cross_attn, block.norm3(x)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in
                   (attend.norm_q(attend.q(y)), attend.norm_k(attend.k(text)), attend.v(text)))  # fmt: skip
        weights = (torch.einsum("blhd,bshd->bhls", q, k) / math.sqrt(dim // heads)).softmax(-1)
        x = x + attend.o(torch.einsum("bhls,bshd->blhd", weights, v).flatten(-2))
        x = x + gate2 * block.ffn(norm(x) * (1 + scale2) + shift2)
    shift, scale = (network.head.modulation[0] + time).unbind()
    flow = network.head.head(norm(x) * (1 + scale) + shift)
    flow = rearrange(flow, "b (t h w) (p q c) -> b c t (h p) (w q)", h=ROWS, w=COLUMNS, p=2, q=2)
    return noise - flow


def seen_tokens(q: Tensor, k: Tensor, config: Any) -> Tensor:
    """Which tokens of the clip each token reads, boolean ``[1, heads, L, L]``: the selected windows of the rows of two
    latent frames that its call sees, which are its own and the last three before."""
    window_of = torch.arange(LATENTS)[:, None, None] // 2 * 6
    window_of = (window_of + torch.arange(ROWS)[:, None] // 2 * 3 + torch.arange(COLUMNS) // 2).flatten()
    members = [(window_of == i).nonzero().flatten() for i in range(LATENTS // 2 * 6)]
    mean_q, mean_k = (torch.stack([x[:, m].mean(1) for m in members], dim=1) for x in (q, k))
    near = neighbours((2, 3), config.network.local_range)
    pixels = 16 * 16 * ROWS * COLUMNS
    topk = int(36 * (config.network.sparse_ratio * 768 * 1280 / pixels)) - 1
    windows = torch.zeros(q.shape[2], len(members), len(members), dtype=torch.bool)
    for row in range(LATENTS // 2):
        end = 3 if row < 3 else row + 1
        rows = list(range(max(0, end - config.window_size_t // 2), end))
        keys = [6 * r + i for r in rows for i in range(6)]
        for head in range(q.shape[2]):
            scores = mean_q[0, 6 * row : 6 * row + 6, head] @ mean_k[0, keys, head].T / math.sqrt(q.shape[3])
            weights = scores.masked_fill(~near.repeat(1, len(rows)), -math.inf).softmax(-1)
            threshold = weights.flatten().sort(descending=True).values[topk]
            windows[head, 6 * row : 6 * row + 6, keys] = weights > threshold
    return windows[:, window_of][:, :, window_of][None]


def whole_tiny_decoder(pipeline: StreamInferencePipeline, latents: Tensor, video: Tensor) -> Tensor:
    """All latents beside all frames through the layers, each over the whole clip."""
    t, r, s = FOLD
    decoder = pipeline.decoder
    frames = torch.cat((video[:, :, :1].expand(-1, -1, 3, -1, -1), video), dim=2)
    folded = rearrange(frames, "b c (n t) (h r) (w s) -> (b n) (c t r s) h w", t=t, r=r, s=s)
    x = torch.cat((folded, latents[0].transpose(0, 1)), dim=1)
    for layer in decoder.decoder:
        if hasattr(layer, "factor"):
            x = rearrange(layer.conv(x), "n (k c) h w -> (n k) c h w", k=layer.factor)
        elif type(layer).__name__ == "BaseMemory":
            x = layer(x, torch.cat((torch.zeros_like(x[:1]), x[:-1])))
        else:
            x = layer(x)
    return (x[3:] * 2 - 1).transpose(0, 1)[None]


def whole_clip(pipeline: StreamInferencePipeline, frames: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Latents, and frames uint8 ``[F, H, W, 3]``, from the whole clip at once."""
    video = low_quality(frames, 4 * LATENTS + 1)
    tokens = whole_projection(pipeline, video)
    plan = ChunkPlan(2, 6)
    spans = [plan.span(i) for i in range(14)]
    noise = [KeyedNoise(seed).initial(i, start, (1, 16, stop - start, 8, 12)) for i, (start, stop) in enumerate(spans)]
    latents = whole_network(pipeline, torch.cat(noise, dim=2).double(), tokens)
    own = video[:, :, : 4 * LATENTS - 3]
    made = METHODS["adain"](whole_tiny_decoder(pipeline, latents, own), own)
    return latents, to_uint8(made)[0, : len(frames)]


@pytest.fixture(scope="module")
def model() -> StreamInferencePipeline:
    return narrow().setup()


@pytest.fixture(scope="module")
def whole(model: StreamInferencePipeline) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return whole_clip(model, clip(), seed=3)


def streamed(model: StreamInferencePipeline, frames: Tensor, **options: Any):
    controls = [Control(frame=Frame(frame.numpy())) for frame in frames]
    return model.rollout(control=controls, num_frames=len(frames), **options)


def held(value: Any) -> dict[int, int]:
    """Bytes of every storage in a cache tree."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) or isinstance(value, RollingKVCache):
        value = list(vars(value).values())
    if not isinstance(value, (list, tuple)):
        return {}
    return {place: size for item in value for place, size in held(item).items()}


def test_streaming_equals_the_whole_clip_in_memory_that_stays_the_same(
    model: StreamInferencePipeline, whole: tuple[Tensor, Tensor]
) -> None:
    """120 frames by 14 calls: 21 frames, then 8 each, of which the last are beyond the end. What the rollout holds, the
    small frames and their tokens included, is the same after every call once the window is full."""
    rollout, chunks, sizes = streamed(model, clip(), seed=3), [], []
    for chunk in rollout:
        chunks.append(chunk)
        rollout.flush()
        sizes.append(sum(held(rollout.cache).values()))
    assert [len(chunk.frames) for chunk in chunks] == [21] + [8] * 13
    torch.testing.assert_close(torch.cat([chunk.latent for chunk in chunks], dim=2), whole[0], rtol=1e-9, atol=1e-9)
    assert torch.equal(torch.cat([chunk.frames for chunk in chunks])[:FRAMES], whole[1])
    assert len(set(sizes[4:])) == 1


def test_a_pass_may_be_repeated_and_the_next_chunk_is_the_same(model: StreamInferencePipeline) -> None:
    """The keys of a chunk are scratch until it is committed."""
    plain = [chunk.latent for chunk in streamed(model, clip(37), seed=1)]
    rollout = streamed(model, clip(37), seed=1)
    next(rollout)
    rollout.flush()
    next(rollout)
    cache, transformer = rollout.cache, model.diffusion_model.transformer
    noise, input = torch.randn(2, 1, 16, 2, 8, 12, dtype=torch.float64), cache.pending["input"]
    timestep = torch.tensor([1000.0])
    with torch.no_grad():
        first = transformer.predict_flow(noise[0], timestep, cache.experts[0], input)
        transformer.predict_flow(noise[1], timestep, cache.experts[0], input)
        assert torch.equal(transformer.predict_flow(noise[0], timestep, cache.experts[0], input), first)
        own = KeyedNoise(1).initial(1, 6, (1, 16, 2, 8, 12)).double()
        transformer.predict_flow(own, timestep, cache.experts[0], input)
    assert torch.equal(next(rollout).latent, plain[2])


def test_latents_that_were_not_made_here_are_no_context(model: StreamInferencePipeline) -> None:
    rollout = model.rollout(
        control=[Control(frame=Frame(frame.numpy())) for frame in clip(40)],
        initial_latents=torch.zeros(1, 16, 6, 8, 12, dtype=torch.float64),
    )
    next(rollout)
    with pytest.raises(ValueError, match="cannot go on from given latents"):
        next(rollout)


def test_a_saved_stream_goes_on_bit_for_bit(model: StreamInferencePipeline, tmp_path: Path) -> None:
    plain = list(streamed(model, clip(37), seed=2))
    rollout = streamed(model, clip(37), seed=2)
    for _ in range(2):
        next(rollout)
    rollout.save(tmp_path / "stream.safetensors")
    rollout.close()
    controls = [Control(frame=Frame(frame.numpy())) for frame in clip(37)]
    rest = list(narrow().setup().resume(tmp_path / "stream.safetensors", num_chunk=3, control=controls))
    assert len(rest) == 1
    for ours, theirs in zip(rest, plain[2:], strict=True):
        assert torch.equal(ours.latent, theirs.latent)
        assert torch.equal(ours.frames, theirs.frames)


@pytest.mark.parametrize("slug", ["flashvsr-x4", "flashvsr-x4-vae"])
def test_rollouts_of_different_sizes_interleave_as_if_alone(slug: str) -> None:
    config: PipelineConfig = shrunk(FLASHVSR_CONFIGS[slug], window=(2, 2, 2), local_range=3, sparse_ratio=0.01).pipeline
    assert isinstance(config.decoder, ColouredVAEConfig) == slug.endswith("-vae")
    model = config.setup()
    clips = [clip(25)[:, :8, :16], clip(25)[:, :16, :8]]
    open_ = lambda i: streamed(model, clips[i], seed=i, height=4 * clips[i].shape[1], width=4 * clips[i].shape[2])  # noqa: E731
    alone = [torch.cat([chunk.frames for chunk in open_(i)]) for i in range(2)]
    together = list(zip(*(open_(i) for i in range(2)), strict=True))
    for i in range(2):
        assert torch.equal(torch.cat([chunks[i].frames for chunks in together]), alone[i])
