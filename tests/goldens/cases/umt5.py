"""The umT5 encoder: relative positions, masked padding, hidden states as the DiT gets them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flashdreams.recipes.wan.umt5 import UMT5Encoder, relative_buckets
from flashdreams.recipes.wan.umt5_config import UMT5Config
from golden import Golden


def matches(golden: Golden) -> bool:
    return golden.repository.startswith("Wan-Video/") and golden.files == ("wan/modules/t5.py",)


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    sizes = {name: golden.config[name] for name in ("dim", "dim_attn", "dim_ffn", "num_heads", "num_layers")}
    positions = {name: golden.config[name] for name in ("num_buckets", "max_distance")}
    config = UMT5Config(**sizes, **positions, vocab_size=golden.config["vocab"], eps=golden.config["eps"])
    encoder = UMT5Encoder(config)
    encoder.load_state_dict(golden.weights["model"])
    ids, mask = golden.inputs["ids"], golden.inputs["mask"]
    hidden = encoder(ids, mask)
    yield "hidden", hidden
    yield "hidden_without_mask", encoder(ids)
    yield "hidden_trimmed_zero_padded", hidden * mask[..., None]
    buckets = relative_buckets(ids.shape[1], **positions)
    yield "relative_buckets_row0", buckets[0]
    yield "relative_buckets_last_row", buckets[-1]
