"""One forward pass of a causal Wan DiT over a whole clip, without a cache: how such models are trained."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cases.wan_network import network_config
from flashdreams.core.rope import rope_3d
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache
from flashdreams.recipes.wan.packed import sees
from golden import Golden


def matches(golden: Golden) -> bool:
    return "Self-Forcing" in golden.repository and "teacher_forcing" in golden.config


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    config = network_config(golden.config)
    network = config.setup()
    network.load_state_dict(golden.weights["model"])
    x, t = golden.inputs["x"], golden.inputs["t"]
    frames, rows, columns = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
    positions, length = list(range(frames)), golden.config["frames_per_block"]
    spans = [(start, start + length) for start in range(0, frames, length)]
    num_clean = len(spans)
    if golden.config["teacher_forcing"]:  # the clean clip, and after it the noisy one, which sees clean earlier chunks
        x, t = torch.cat((golden.inputs["clean_x"], x), dim=2), torch.cat((golden.inputs["aug_t"], t), dim=1)
        positions, spans = 2 * positions, 2 * spans
    mask = sees(spans, num_clean, None, 0).repeat_interleave(rows * columns, 0).repeat_interleave(rows * columns, 1)
    context = ChunkContext(rope_3d(positions, rows, columns, config.head_dim), mask=mask)
    velocity = network(x, t, context, NetworkCache(network.encode_text(golden.inputs["context"])))
    yield "velocity", velocity[:, :, -frames:]
