"""One forward pass of the Wan DiTs: from text or images, with one timestep per sample or per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdreams.core.rope import rope_3d
from flashdreams.recipes.wan.config import WanNetworkConfig
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache
from golden import Golden


def matches(golden: Golden) -> bool:
    return (
        golden.repository.startswith("Wan-Video/")
        and golden.files == ("wan/modules/model.py",)
        and golden.config["model_type"] in ("t2v", "i2v", "flf2v", "ti2v")
    )


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    config = network_config(golden.config)
    network = config.setup()
    network.load_state_dict(golden.weights["model"])
    x, t = golden.inputs["x"], golden.inputs["t"]
    frames, rows, columns = x.shape[2], x.shape[3] // config.patch_size[1], x.shape[4] // config.patch_size[2]
    if t.ndim == 2:
        t = t[:, : frames * rows * columns]  # the rest belongs to the padding of the original's sequences
    if "y" in golden.inputs:
        x = torch.cat((x, golden.inputs["y"]), dim=1)
    image = golden.inputs.get("clip_fea")
    if image is not None:
        image = image.reshape(len(x), -1, image.shape[2])  # the tokens of a sample's images, one after the other
    prompts = [golden.inputs[f"context_{i}"] for i in range(x.shape[0])]
    text = torch.stack([F.pad(prompt, (0, 0, 0, config.text_len - len(prompt))) for prompt in prompts])
    context = ChunkContext(rope_3d(range(frames), rows, columns, config.head_dim))
    yield "velocity", network(x, t, context, NetworkCache(network.encode_text(text, image)))


def network_config(published: dict[str, Any]) -> WanNetworkConfig:
    """Our config with the values of a published ``config.json``."""
    known = {field.name for field in fields(WanNetworkConfig)} & published.keys()
    both_ends = published["model_type"] == "flf2v"
    return WanNetworkConfig(
        image_dim=published.get("clip_dim"),
        image_tokens=514 if both_ends else 257,
        image_positions=both_ends,
        **{k: tuple(v) if isinstance(v := published[k], list) else v for k in known},
    )
