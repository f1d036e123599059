"""Flows of many chunks in one pass: the clean chunks in a row, and after them noisy copies that see those before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdreams.core.controls import control_from_json
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.infra.layout import Layout
from flashdreams.infra.transformer import Copy
from flashdreams.rollout.segment import Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline
    from flashdreams.rollout.flows import Query


def packed_flows(
    pipeline: StreamInferencePipeline, segment: Segment, queries: Sequence[Query], *, detached: bool
) -> Iterator[Tensor]:
    """The flow of each query from one block-causal pass.

    Raises:
        ValueError: it could not be equal to a replay chunk by chunk, with the reason.
    """
    last = max((query.chunk for query in queries), default=-1)
    if last < 0:
        return
    chunks, model = segment.chunks[: last + 1], pipeline.diffusion_model
    if len(model.experts) > 1:
        raise ValueError("packed: this model has several experts, each with a context of its own; use mode='exact'")
    changed = next((chunk for chunk in chunks if chunk.events), None)
    if changed is not None:
        kinds = ", ".join(sorted({event.kind for event in changed.events}))
        raise ValueError(
            f"packed: {kinds} changed before chunk {changed.index}, but one pass has one; use mode='exact'"
        )
    with torch.no_grad():
        cache = pipeline.initialize_cache(
            conditions=segment.conditions, height=segment.height, width=segment.width, loras=segment.loras
        )
        inputs: list[Any] = []
        for chunk in chunks:
            rows = [[control_from_json(control) for control in row] for row in chunk.controls]
            inputs.append(pipeline.encode_controls(rows, chunk.index, cache))
    model.loras.use(cache.loras)
    layout = Layout(*(getattr(cache.layout, name) for name in ("batch", "channels", "height", "width")), segment.frames)
    like = queries[0].x
    yield from model.transformer.predict_flow_packed(
        [chunk.clean[VIDEO].to(like) for chunk in chunks[:last]],
        [Copy(query.chunk, query.x, query.timestep.to(like.device)) for query in queries],
        layout, cache.conditions, inputs, detached=detached,
    )  # fmt: skip
