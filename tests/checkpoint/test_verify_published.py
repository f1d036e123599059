"""``flashdreams checkpoint verify`` on every published manifest whose model the recipes build: a full bijection of keys
and shapes by the model's own transforms, on the meta device."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from flashdreams.core.checkpoint import compare
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.core.checkpoint.keymap import keyshape_md5
from flashdreams.core.checkpoint.nesting import select
from flashdreams.plugins.registry import ENV_VAR
from flashdreams.scripts.checkpoint import main
from flashdreams.scripts.checkpoint_models import header_of, model_part, read_manifest
from published_models import MANIFESTS, PLUGINS

pytestmark = pytest.mark.ci_cpu

DATA = Path(__file__).parent / "data"
ABSENT = ("cosmos-", "hy-worldplay", "lingbot-world", "matrix-game-2", "flashvsr.lq_proj_in", "flashvsr.tcdecoder")
"""Models that no recipe builds."""
NESTED = "self-forcing.checkpoint-top"


@pytest.fixture(autouse=True)
def _models(monkeypatch):
    monkeypatch.setenv(ENV_VAR, ",".join(f"{slug}={reference}" for slug, reference in PLUGINS.items()))


def manifest(name: str) -> str:
    return str(DATA / f"{name}.json.gz")


def test_every_manifest_is_verified_or_of_a_model_that_is_not_here():
    names = {path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz")} - {
        "rename_maps.native_to_diffusers"
    }
    assert names == MANIFESTS.keys() | {NESTED} | {name for name in names if name.startswith(ABSENT)}


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_key_and_shape_fits_by_the_models_own_transforms(name, capsys):
    slug, part = MANIFESTS[name]
    code = main(["verify", slug, "--manifest", manifest(name), "--part", part], "flashdreams checkpoint")
    said = capsys.readouterr().out
    assert code == 0, said
    matched, total = map(int, re.search(r"matched (\d+)/(\d+)", said).groups())
    only_head = "absent by permission: visual.head" in said
    assert matched == total - only_head, said
    assert only_head == (name in ("clip-vit-h14-vision.transformers", "clip-vit-h14-vision.transformers4"))
    assert keyshape_md5(header_of(manifest(name))) == read_manifest(manifest(name)).md5


def published_maps() -> dict[str, dict[str, str]]:
    """Native key -> key of the other layout, by native manifest."""
    maps = json.loads(gzip.decompress((DATA / "rename_maps.native_to_diffusers.json.gz").read_bytes()))["maps"]
    return {name.partition("->")[0]: table for name, table in maps.items()}


@pytest.mark.parametrize("native", published_maps())
def test_the_transform_that_is_chosen_is_the_published_map_key_for_key(native):
    table = published_maps()[native]
    slug, name = MANIFESTS[native]
    part = model_part(slug, name, None)
    other = {header: {*header_of(manifest(header))} for header, place in MANIFESTS.items() if place == (slug, name)}
    source = next(header for header, keys in other.items() if keys == {*table.values()})
    _, steps, match = choose_transform(part.wanted, header_of(manifest(source)), part.candidates)
    assert match.ok
    assert {step.target: step.sources for step in steps} == {key: (there,) for key, there in table.items()}


def test_the_state_dict_inside_a_training_dump_fits_too():
    """The manifest has the names of the dicts before the keys."""
    dump: dict = {}
    for key, value in header_of(manifest(NESTED)).items():
        outer, _, inner = key.partition(".")
        dump.setdefault(outer, {})[inner] = value
    state, _ = select(dump, Path("self_forcing_dmd.pt"), None)
    part = model_part("t2v-1.3b", "transformer", None)
    _, _, match = choose_transform(part.wanted, state, part.candidates)
    assert match.ok and match.summary == "matched 825/825"


@pytest.mark.parametrize(
    ("slug", "part", "native", "layout", "other"),
    [
        ("vae21", "decoder", "wan2.1-vae.native", "diffusers", "wan2.1-vae.diffusers"),
        ("vae22", "decoder", "wan2.2-vae.native", "diffusers", "wan2.2-vae.diffusers"),
        ("encoders", "text_encoder", "umt5-xxl-encoder.native", "transformers", "umt5-xxl-encoder.transformers-saved"),
        ("encoders", "image_encoder", "clip-xlmr-vit-h14-visual.native", "transformers",
         "clip-vit-h14-vision-proj.transformers4"),
        ("flf2v-14b", "transformer", "wan2.1-flf2v-14b-720p.native", "diffusers", "wan2.1-flf2v-14b-720p.diffusers"),
    ],
)  # fmt: skip
def test_every_part_declares_the_layouts_that_convert_writes(slug, part, native, layout, other):
    found = model_part(slug, part, None)
    key_map = found.layouts[layout]
    assert keyshape_md5(key_map.inverse().shapes(found.wanted)) == read_manifest(manifest(other)).md5
    assert keyshape_md5(found.wanted) == read_manifest(manifest(native)).md5
    back = key_map.apply(header_of(manifest(other)))
    assert compare(found.wanted, back, (), torch.float32).ok
