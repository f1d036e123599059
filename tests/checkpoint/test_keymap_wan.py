"""The Wan family's key maps against the published manifests and rename maps."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from flashdreams.config import import_object
from flashdreams.core.checkpoint.keymap import KeyMap, keyshape_md5
from flashdreams.recipes.wan import keymaps

pytestmark = pytest.mark.ci_cpu

DATA = Path(__file__).parent / "data"
Header = dict[str, tuple[int, ...]]


@functools.cache
def manifest(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))


def header(name: str) -> Header:
    return {key: tuple(entry["shape"]) for key, entry in manifest(name)["tensors"].items()}


def published_map(name: str) -> dict[str, str]:
    """Native key -> key of the other layout."""
    maps = manifest("rename_maps.native_to_diffusers")["maps"]
    return next(found for key, found in maps.items() if key.startswith(name + "->"))


def disagreements(key_map: KeyMap, source: Header, published: dict[str, str]) -> list[str]:
    """Native keys that the map makes of another tensor than the published map does, or of none."""
    found = {item.target: item.sources for item in key_map.plan(source)}
    return [key for key in found.keys() | published if found.get(key) != (published.get(key),)]


# native manifest, manifest of the other layout, map from that one
PAIRS = [
    *(
        (f"{name}.native", f"{name}.diffusers", keymaps.DIT_FROM_DIFFUSERS)
        for name in (
            "wan2.1-t2v-1.3b",
            "wan2.1-t2v-14b",
            "wan2.1-i2v-14b-480p",
            "wan2.1-i2v-14b-720p",
            "wan2.1-flf2v-14b-720p",
            "wan2.2-ti2v-5b",
        )
    ),
    (
        "wan2.2-i2v-a14b.high_noise_model.native",
        "wan2.2-i2v-a14b.transformer.diffusers",
        keymaps.DIT_FROM_DIFFUSERS,
    ),
    ("wan2.1-vae.native", "wan2.1-vae.diffusers", keymaps.VAE21_FROM_DIFFUSERS),
    ("wan2.2-vae.native", "wan2.2-vae.diffusers", keymaps.VAE22_FROM_DIFFUSERS),
    ("umt5-xxl-encoder.native", "umt5-xxl-encoder.transformers-saved", keymaps.UMT5_FROM_TRANSFORMERS),
]
# The same, where no rename map is published.
UNPUBLISHED = [
    *(
        (f"wan2.2-{model}-a14b.{native}_noise_model.native", f"wan2.2-{model}-a14b.{other}.diffusers")
        for model in ("t2v", "i2v")
        for native, other in (("high", "transformer"), ("low", "transformer_2"))
    ),
]
ALL = [
    *PAIRS,
    *((native, other, keymaps.DIT_FROM_DIFFUSERS) for native, other in UNPUBLISHED),
    *(
        (native, f"fastvideo-internal.{other}", keymaps.DIT_FROM_FASTVIDEO)
        for native, other in (
            ("wan2.1-t2v-1.3b.native", "wan2.1-t2v-1.3b"),
            ("wan2.1-i2v-14b-480p.native", "wan2.1-i2v-14b-480p"),
            ("wan2.2-ti2v-5b.native", "wan2.2-ti2v-5b"),
            ("wan2.2-t2v-a14b.high_noise_model.native", "wan2.2-t2v-a14b.transformer"),
            ("wan2.2-i2v-a14b.high_noise_model.native", "wan2.2-i2v-a14b.transformer"),
        )
    ),
    (
        "clip-xlmr-vit-h14-visual.native",
        "clip-vit-h14-vision-proj.transformers4",
        keymaps.CLIP_FROM_TRANSFORMERS,
    ),
]


def test_every_published_map_is_tested():
    assert len(PAIRS) == len(manifest("rename_maps.native_to_diffusers")["maps"])


@pytest.mark.parametrize(
    ("native", "other", "key_map"), PAIRS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_map_is_the_published_one_key_for_key(native: str, other: str, key_map: KeyMap):
    assert disagreements(key_map, header(other), published_map(native)) == []


def test_a_bijection_with_q_and_k_swapped_is_noticed():
    native, other, key_map = PAIRS[0]
    swapped = key_map.then(KeyMap(((r"\.q\.", ".@."), (r"\.k\.", ".q."), (r"\.@\.", ".k."))))
    assert swapped.shapes(header(other)) == header(native), "keys and shapes alone do not show it"
    assert len(disagreements(swapped, header(other), published_map(native))) == 30 * 2 * 2 * 2


@pytest.mark.parametrize(("native", "other", "key_map"), ALL, ids=lambda value: value if isinstance(value, str) else "")
def test_keys_and_shapes_agree_both_ways_and_so_do_the_published_hashes(native: str, other: str, key_map: KeyMap):
    there, back = key_map.shapes(header(other)), key_map.inverse().shapes(header(native))
    assert there == header(native)
    assert back == header(other)
    assert keyshape_md5(there) == manifest(native)["keyshape_md5"]
    assert keyshape_md5(back) == manifest(other)["keyshape_md5"]


@pytest.mark.parametrize(
    ("native", "wrapped"),
    [
        ("wan2.1-t2v-1.3b.native", "self-forcing.generator"),
        ("wan2.1-t2v-1.3b.native", "self-forcing.generator_ema-fsdp-1.3b"),
        ("wan2.1-t2v-14b.native", "self-forcing.generator_ema-fsdp-14b"),
        ("wan2.1-t2v-14b.native", "krea-realtime-14b.file"),
        ("wan2.2-ti2v-5b.native", "longlive2.generator"),
    ],
)
def test_training_wrappers_come_off(native: str, wrapped: str):
    assert keymaps.dit_from_native(header(wrapped)) == header(native)


def test_the_transforms_named_in_configs_take_wrappers_off_first():
    wrapped = {
        f"model._fsdp_wrapped_module.{key}": shape for key, shape in header("wan2.1-i2v-14b-480p.diffusers").items()
    }
    transform = import_object("flashdreams.recipes.wan.keymaps:dit_from_diffusers")
    assert transform(wrapped) == header("wan2.1-i2v-14b-480p.native")


def test_the_state_dict_of_the_module_has_the_token_table_twice():
    both = header("umt5-xxl-encoder.transformers")
    assert keymaps.umt5_from_transformers(both) == header("umt5-xxl-encoder.native")


def small_state(shapes: Header) -> dict[str, Tensor]:
    """Distinct random bytes by key, every size divided so that the whole is small."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for key, shape in shapes.items():
        small = tuple(size if size <= 64 else -(-size // 128) for size in shape)
        state[key] = torch.randint(0, 256, (*small, 2), generator=generator, dtype=torch.uint8).view(torch.bfloat16)[
            ..., 0
        ]
    return {key: value.contiguous() for key, value in state.items()}


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[4], PAIRS[8], PAIRS[9]], ids=lambda pair: pair[0])
def test_export_and_import_give_back_the_very_bytes(pair: tuple[str, str, KeyMap]):
    native, _, key_map = pair
    state = small_state(header(native))
    exported = key_map.inverse().apply(state)
    assert exported.keys() != state.keys()
    assert save(dict(sorted(key_map.apply(exported).items()))) == save(dict(sorted(state.items())))


def test_the_image_encoder_comes_back_to_the_byte_though_it_is_fused_and_transposed():
    shapes = {key: shape for key, shape in header("clip-xlmr-vit-h14-visual.native").items() if "mlp" not in key}
    shapes = {key: shape for key, shape in shapes.items() if ".transformer." not in key or ".transformer.0." in key}
    generator = torch.Generator().manual_seed(2)
    state = {key: torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for key, shape in shapes.items()}
    exported = keymaps.CLIP_FROM_TRANSFORMERS.inverse().apply(state)
    qkv = [exported[f"vision_model.encoder.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(torch.cat(qkv), state["visual.transformer.0.attn.to_qkv.weight"])
    assert torch.equal(exported["visual_projection.weight"], state["visual.head"].T)
    again = keymaps.clip_from_transformers(exported)
    assert save(dict(sorted(again.items()))) == save(dict(sorted(state.items())))


def test_meta_tensors_pass_through_every_kind_of_step():
    shapes = header("clip-vit-h14-vision-proj.transformers4")
    state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    out = keymaps.clip_from_transformers(state)
    assert {key: tuple(value.shape) for key, value in out.items()} == header("clip-xlmr-vit-h14-visual.native")
    assert all(value.is_meta for value in out.values())


def published_hash_files() -> list[str]:
    return sorted(
        path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz") if "rename_maps" not in path.name
    )


def test_our_hash_of_keys_and_shapes_is_the_published_one_for_every_manifest():
    different = [
        name for name in published_hash_files() if keyshape_md5(header(name)) != manifest(name)["keyshape_md5"]
    ]
    assert different == []
