"""The transform of a checkpoint, chosen from its header among those a model declares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdreams.config import derive_config
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.core.checkpoint.keymap import KeyMap
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.keymaps import DIT_FROM_DIFFUSERS, DIT_FROM_FASTVIDEO
from mini_wan import FILE, NETWORK, mini_wan

pytestmark = pytest.mark.ci_cpu


def on_meta(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.to("meta") for key, value in state.items()}


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("native", dict),
        ("diffusers", DIT_FROM_DIFFUSERS.inverse().apply),
        ("fastvideo", DIT_FROM_FASTVIDEO.inverse().apply),
        ("trainer", lambda state: {f"model._fsdp_wrapped_module.{key}": value for key, value in state.items()}),
    ],
)
def test_a_checkpoint_of_any_published_layout_loads_without_naming_it(tmp_path: Path, name, rename, capsys):
    path = tmp_path / f"{name}.safetensors"
    save_file(rename(load_file(FILE)), path)
    config = WanTransformerConfig(network=NETWORK, dtype="float32", checkpoint_path=str(path))
    network = config.setup().network
    for key, value in load_file(FILE).items():
        assert torch.equal(network.state_dict()[key], value)
    said = capsys.readouterr().err
    assert ("has the layout that" in said) == (name != "native"), said


def test_a_transform_that_is_named_is_taken_and_no_other(tmp_path):
    config = WanTransformerConfig(
        network=NETWORK, dtype="float32", checkpoint_path=str(FILE),
        state_dict_transform="flashdreams.recipes.wan.keymaps:dit_from_diffusers",
    )  # fmt: skip
    assert torch.equal(config.setup().network.head.head.bias, load_file(FILE)["head.head.bias"])
    path = tmp_path / "fast.safetensors"
    save_file(DIT_FROM_FASTVIDEO.inverse().apply(load_file(FILE)), path)
    with pytest.raises(CheckpointError, match="does not fit WanNetwork"):
        derive_config(config, checkpoint_path=str(path)).setup()


def test_what_fits_none_is_reported_against_the_nearest():
    state = DIT_FROM_DIFFUSERS.inverse().apply(load_file(FILE))
    del state["proj_out.bias"]
    candidates = {"native": None, "diffusers": DIT_FROM_DIFFUSERS, "fastvideo": DIT_FROM_FASTVIDEO}
    name, _, match = choose_transform(mini_wan().state_dict(), on_meta(state), candidates)
    assert name == "diffusers"
    assert list(match.missing) == ["head.head.bias"] and not match.unexpected


def test_two_that_fit_and_differ_are_an_error():
    state = {"a.weight": torch.zeros(2), "b.weight": torch.zeros(2)}
    turned = KeyMap(((r"^a\.", "c."), (r"^b\.", "a."), (r"^c\.", "b.")))
    with pytest.raises(CheckpointError, match="both plain and turned fit this checkpoint, and differ"):
        choose_transform(state, on_meta(state), {"plain": None, "turned": turned})
    assert choose_transform(state, on_meta(state), {"plain": None, "same": KeyMap()})[0] == "plain"
