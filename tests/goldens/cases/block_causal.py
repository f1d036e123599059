"""One forward pass of a causal Wan DiT over a whole clip, without a cache: how such models are trained."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cases.wan_network import network_config
from flashdreams.core.rope import rope_3d
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache
from golden import Golden


def matches(golden: Golden) -> bool:
    return "Self-Forcing" in golden.repository and "teacher_forcing" in golden.config


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    config = network_config(golden.config)
    network = config.setup()
    network.load_state_dict(golden.weights["model"])
    x, t = golden.inputs["x"], golden.inputs["t"]
    frames, rows, columns = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
    positions = list(range(frames))
    chunk = torch.arange(frames) // golden.config["frames_per_block"]
    sees = chunk[None] <= chunk[:, None]
    if golden.config["teacher_forcing"]:  # the clean clip, and after it the noisy one, which sees clean earlier chunks
        x, t = torch.cat((golden.inputs["clean_x"], x), dim=2), torch.cat((golden.inputs["aug_t"], t), dim=1)
        own, earlier = chunk[None] == chunk[:, None], chunk[None] < chunk[:, None]
        sees = torch.cat((torch.cat((sees, torch.zeros_like(own)), 1), torch.cat((earlier, own), 1)))
        positions *= 2
    mask = sees.repeat_interleave(rows * columns, 0).repeat_interleave(rows * columns, 1)
    context = ChunkContext(rope_3d(positions, rows, columns, config.head_dim), mask=mask)
    velocity = network(x, t, context, NetworkCache(network.encode_text(golden.inputs["context"])))
    yield "velocity", velocity[:, :, -frames:]
