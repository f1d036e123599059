"""Many chunks in one pass of a Wan network, for training: the clean clip, and after it noisy copies of its chunks.

A clean chunk sees the clean frames that its commit would have seen, a copy those that were in sight when its chunk was
made, and itself: windows and sinks are masks. Positions are those of the clip, so a copy stands where its chunk does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdreams.core.rope import rope_3d
from flashdreams.infra.layout import Layout
from flashdreams.infra.transformer import Copy
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.context import ChunkContext, NetworkCache

if TYPE_CHECKING:
    from flashdreams.recipes.wan.transformer import WanTransformer


class _ChunkKeys:
    """Stands where a rolling cache would: hands back what is written, without a gradient to the clean tokens."""

    def __init__(self, clean_tokens: int) -> None:
        self.clean_tokens = clean_tokens

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self.kept = tuple(
            torch.cat((part[:, : self.clean_tokens].detach(), part[:, self.clean_tokens :]), dim=1) for part in (k, v)
        )

    def read(self, tokens: int) -> tuple[Tensor, Tensor]:
        k, v = self.kept
        return k, v


def packed_branches(
    model: WanTransformer,
    clean: Sequence[Tensor],
    copies: Sequence[Copy],
    layout: Layout,
    conditions: WanConditions,
    inputs: Sequence[Any],
    *,
    detached: bool,
) -> list[list[Tensor]]:
    """Flows of each copy, ``[B, C, T, H, W]``, for each guidance branch (conditional first)."""
    _check(model, layout, copies, inputs)
    batch, like = layout.batch, copies[0].noisy
    spans = [layout.plan.span(chunk) for chunk in (*range(len(clean)), *(copy.chunk for copy in copies))]
    frames = [frame for start, stop in spans for frame in range(start, stop)]
    clean_frames = layout.plan.frames_until(len(clean))
    latent = torch.cat((*clean, *(copy.noisy for copy in copies)), dim=2)
    told = torch.full((batch, clean_frames), 1000 * model.config.context_noise, device=like.device)
    lengths = [stop - start for start, stop in spans[len(clean) :]]
    own = [copy.timestep[:, None].expand(-1, length) for copy, length in zip(copies, lengths, strict=True)]
    timestep = torch.cat((told, *own), dim=1)
    input = model.network.prepare(_packed_input(inputs, [*range(len(clean)), *(copy.chunk for copy in copies)], layout))

    rows, columns = model._grid(layout)
    tokens = rows * columns
    frame_mask = sees(spans, len(clean), model.config.window_size_t, model.config.sink_size_t)
    mask = frame_mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1).to(like.device)
    network = model.config.network
    dtype = torch.promote_types(like.dtype, torch.float32)
    rope = rope_3d(frames, rows, columns, network.head_dim, network.rope_theta, dtype).to(like.device)
    slots = torch.arange(len(frames) * tokens, device=like.device)
    context = ChunkContext(rope, slots, len(slots), mask=mask, shape=(len(frames), rows, columns))

    flows: list[list[Tensor]] = []
    for blocks in model._encode(conditions):
        if detached:
            for block in blocks:
                block.self_kv = _ChunkKeys(clean_frames * tokens)  # ty: ignore[invalid-assignment]
        times = blocks[0].text_k.shape[0] // batch
        repeated = (torch.cat([part] * times) if part is not None else None for part in (latent, timestep, input))
        x, t, controls = repeated
        assert x is not None
        out = model.network(x, t, context, NetworkCache(blocks), controls)
        noisy = out[:, :, clean_frames:].to(like.dtype)
        flows += [list(part.split(lengths, dim=2)) for part in noisy.chunk(times)]
    return flows


def sees(spans: Sequence[tuple[int, int]], num_clean: int, window: int | None, sink: int) -> Tensor:
    """Bool ``[F, F]``: which frame of the sequence (row) attends to which.

    Args:
        spans: frames ``[start, stop)`` of the clip that each part of the sequence stands for.
        num_clean: how many of the parts, at its beginning, are clean chunks; the others are noisy copies.
        window, sink: in latent frames; ``None``: everything before is in sight.
    """
    frame = torch.tensor([frame for start, stop in spans for frame in range(start, stop)])
    part = torch.tensor([i for i, (start, stop) in enumerate(spans) for _ in range(start, stop)])
    start = torch.tensor([spans[i][0] for i in part.tolist()])
    stop = torch.tensor([spans[i][1] for i in part.tolist()])
    earlier = (part < num_clean)[None, :] & (frame[None, :] < start[:, None])
    if window is not None:
        earlier &= (frame[None, :] >= (stop - (window - sink))[:, None]) | (frame[None, :] < sink)
    return earlier | (part[None, :] == part[:, None])


def _packed_input(inputs: Sequence[Any], chunks: Sequence[int], layout: Layout) -> Tensor | None:
    """Controls of the sequence's frames, from those of each chunk, ``[B, T, ...]`` or ``None``."""
    if all(input is None for input in inputs):
        return None
    for chunk, input in enumerate(inputs):
        start, stop = layout.plan.span(chunk)
        if not isinstance(input, Tensor) or input.ndim < 2 or input.shape[1] != stop - start:
            got = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise ValueError(
                f"packed: controls of chunk {chunk} are {got}; expected [B, {stop - start}, ...], one entry per latent "
                "frame; use mode='exact'"
            )
    return torch.cat([inputs[chunk] for chunk in chunks], dim=1)


def _check(model: WanTransformer, layout: Layout, copies: Sequence[Copy], inputs: Sequence[Any]) -> None:
    config, network = model.config, type(model.network)
    stop = max(layout.plan.span(copy.chunk)[1] for copy in copies)
    moved = config.window_size_t is not None and stop > config.window_size_t and config.sink_size_t > 0
    given = config.stamp_image_latent or config.concat_image_mask_to_latent
    reason = (
        "a sink that moves with the window (rope cache_relative)" if config.rope == "cache_relative" and moved
        else "given frames in its sample or its input" if given
        else f"conditioners of its own ({network.__name__} does not say frame_by_frame)"
        if not vars(network).get("frame_by_frame", False)
        else None
    )  # fmt: skip
    if reason is not None:
        raise ValueError(f"packed: this model has {reason}, which one pass cannot equal; use mode='exact'")
