"""The published pairs on which `flashdreams checkpoint suggest` is judged, and what is right for each.

    python tests/support/suggest_pairs.py

prints a table: right key for key or not, number of rules, seconds, what is left and why.
"""

from __future__ import annotations

import functools
import gzip
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from flashdreams.core.checkpoint.keymap import KeyMap
from flashdreams.core.checkpoint.suggest import suggest
from flashdreams.recipes.wan import keymaps
from flashdreams.recipes.wan.umt5 import UMT5Encoder
from flashdreams.recipes.wan.umt5_config import UMT5Config

DATA = Path(__file__).parents[1] / "checkpoint" / "data"
Header = dict[str, tuple[int, ...]]
Mapping = dict[str, tuple[str, ...]]


@functools.cache
def header(name: str) -> Header:
    manifest = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return {key: tuple(entry["shape"]) for key, entry in manifest["tensors"].items()}


def published(native: str) -> Mapping:
    maps = json.loads(gzip.decompress((DATA / "rename_maps.native_to_diffusers.json.gz").read_bytes()))["maps"]
    found = next(found for key, found in maps.items() if key.startswith(native + "->"))
    return {key: (other,) for key, other in found.items()}


def by_map(key_map: KeyMap, checkpoint: str) -> Mapping:
    return {item.target: item.sources for item in key_map.plan(header(checkpoint))}


def umt5() -> Header:
    """Of our module, because the manifest's keys are in no order: only that of registration tells which is the gate."""
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in UMT5Encoder(UMT5Config()).state_dict().items()}


# The renames of diffusers' convert_cosmos_to_diffusers.py, in its order.
COSMOS = (
    ("t_embedder.1", "time_embed.t_embedder"),
    ("t_embedding_norm", "time_embed.norm"),
    ("blocks", "transformer_blocks"),
    ("adaln_modulation_self_attn.1", "norm1.linear_1"),
    ("adaln_modulation_self_attn.2", "norm1.linear_2"),
    ("adaln_modulation_cross_attn.1", "norm2.linear_1"),
    ("adaln_modulation_cross_attn.2", "norm2.linear_2"),
    ("adaln_modulation_mlp.1", "norm3.linear_1"),
    ("adaln_modulation_mlp.2", "norm3.linear_2"),
    ("self_attn", "attn1"),
    ("cross_attn", "attn2"),
    ("q_proj", "to_q"),
    ("k_proj", "to_k"),
    ("v_proj", "to_v"),
    ("output_proj", "to_out.0"),
    ("q_norm", "norm_q"),
    ("k_norm", "norm_k"),
    ("mlp.layer1", "ff.net.0.proj"),
    ("mlp.layer2", "ff.net.2"),
    ("x_embedder.proj.1", "patch_embed.proj"),
    ("final_layer.adaln_modulation.1", "norm_out.linear_1"),
    ("final_layer.adaln_modulation.2", "norm_out.linear_2"),
    ("final_layer.linear", "proj_out"),
)


def cosmos(native: str, diffusers: str) -> Mapping:
    mapping = {}
    for key in header(native):
        renamed = key.removeprefix("net.")
        for old, new in COSMOS:
            renamed = renamed.replace(old, new)
        if renamed in header(diffusers):
            mapping[renamed] = (key,)
    assert mapping.keys() == header(diffusers).keys()
    return mapping


@dataclass(frozen=True)
class Pair:
    """``rules`` is how many there may be; ``asked`` says whether the pair is one of the twelve."""

    model: Callable[[], Header]
    checkpoint: str
    right: Callable[[], Mapping]
    rules: int
    asked: bool = True


def diffusers(name: str, rules: int) -> Pair:
    return Pair(lambda: header(f"{name}.native"), f"{name}.diffusers", lambda: published(f"{name}.native"), rules)


def mapped(native: str, checkpoint: str, key_map: KeyMap, rules: int, *, asked: bool = True) -> Pair:
    return Pair(lambda: header(f"{native}.native"), checkpoint, lambda: by_map(key_map, checkpoint), rules, asked)


PAIRS = {
    "Wan2.1 T2V 1.3B": diffusers("wan2.1-t2v-1.3b", 14),
    "Wan2.1 T2V 14B": diffusers("wan2.1-t2v-14b", 14),
    "Wan2.1 I2V 14B": diffusers("wan2.1-i2v-14b-480p", 21),
    "Wan2.1 FLF2V 14B": diffusers("wan2.1-flf2v-14b-720p", 22),
    "Wan2.2 TI2V 5B": diffusers("wan2.2-ti2v-5b", 14),
    "Wan2.1 VAE": diffusers("wan2.1-vae", 30),
    "Wan2.2 VAE": diffusers("wan2.2-vae", 21),
    "umT5": Pair(umt5, "umt5-xxl-encoder.transformers-saved", lambda: published("umt5-xxl-encoder.native"), 15),
    "CLIP": mapped(
        "clip-xlmr-vit-h14-visual",
        "clip-vit-h14-vision-proj.transformers4",
        keymaps.CLIP_FROM_TRANSFORMERS,
        17,
    ),
    "Self-Forcing EMA 1.3B": mapped("wan2.1-t2v-1.3b", "self-forcing.generator_ema-fsdp-1.3b", keymaps.UNWRAP, 1),
    "Self-Forcing EMA 14B": mapped(
        "wan2.1-t2v-14b", "self-forcing.generator_ema-fsdp-14b", keymaps.UNWRAP, 1, asked=False
    ),
    "FastVideo T2V 1.3B": mapped(
        "wan2.1-t2v-1.3b", "fastvideo-internal.wan2.1-t2v-1.3b", keymaps.DIT_FROM_FASTVIDEO, 17
    ),
    "FastVideo I2V 14B": mapped(
        "wan2.1-i2v-14b-480p",
        "fastvideo-internal.wan2.1-i2v-14b-480p",
        keymaps.DIT_FROM_FASTVIDEO,
        24,
        asked=False,
    ),
    "Cosmos-Predict2.5 2B": Pair(
        lambda: header("cosmos-predict2.5-2b.native"),
        "cosmos-predict2.5-2b.diffusers",
        lambda: {
            native: (key,)
            for key, (native,) in cosmos("cosmos-predict2.5-2b.native", "cosmos-predict2.5-2b.diffusers").items()
        },
        25,
    ),
    "Cosmos 2B, native -> diffusers": Pair(
        lambda: header("cosmos-predict2.5-2b.diffusers"),
        "cosmos-predict2.5-2b.native",
        lambda: cosmos("cosmos-predict2.5-2b.native", "cosmos-predict2.5-2b.diffusers"),
        23,
        asked=False,
    ),
}


def main() -> int:
    print("pair (* one of the twelve) | right | tensors | rules | seconds of one core | left in the model, and why")
    good = 0
    for name, pair in PAIRS.items():
        model, right = pair.model(), pair.right()
        start = time.process_time()
        found = suggest(model, header(pair.checkpoint))
        seconds = time.process_time() - start
        wrong = {key for key, sources in found.mapping.items() if right.get(key) != sources}
        is_right = found.mapping == right
        good += is_right and pair.asked
        left = "; ".join(
            f"{len(rest.keys)} such as {rest.keys[0]}: {rest.why}" for rest in found.remaining if rest.side == "model"
        )
        verdict = "yes" if is_right else f"{len(wrong)} WRONG" if wrong else "in part"
        count = f"{len(found.mapping)}/{len(model)}"
        print(f"{name}{'*' * pair.asked} | {verdict} | {count} | {found.rules} | {seconds:.2f} | {left or '-'}")
    print(f"{good} of {sum(pair.asked for pair in PAIRS.values())} are right, key for key")
    return 0 if good >= 10 else 1


if __name__ == "__main__":
    sys.exit(main())
