"""LoRAs: every spelling of one means the same, all or nothing is matched, and taking it out leaves no trace."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.keymap import Fuse, KeyMap, Split, Transpose
from flashdreams.core.checkpoint.lora import LoraSet
from flashdreams.recipes.wan.keymaps import DIT_FROM_DIFFUSERS, DIT_FROM_FASTVIDEO
from mini_wan import FILE, factors, mini_wan

pytestmark = pytest.mark.ci_cpu

KEY_MAPS = (DIT_FROM_DIFFUSERS, DIT_FROM_FASTVIDEO)


def to_diffusers(layer: str) -> str:
    for old, new in (
        ("self_attn", "attn1"), ("cross_attn", "attn2"), (".q", ".to_q"), (".k", ".to_k"), (".o", ".to_out.0"),
        ("ffn.0", "ffn.net.0.proj"),
    ):  # fmt: skip
        layer = layer.replace(old, new)
    return layer


def dotted(prefix="", down="lora_A.weight", up="lora_B.weight", rename=lambda layer: layer):
    return lambda layer: (f"{prefix}{rename(layer)}.{down}", f"{prefix}{rename(layer)}.{up}")


def flat(rename=lambda layer: layer):
    return lambda layer: tuple(
        f"lora_unet_{rename(layer).replace('.', '_')}.{side}.weight" for side in ("lora_down", "lora_up")
    )


SPELLINGS = {
    "peft": dotted("base_model.model."),
    "peft in memory": dotted("base_model.model.", "lora_A.default.weight", "lora_B.default.weight"),
    "diffusers": dotted("transformer.", rename=to_diffusers),
    "diffusers, older": dotted("transformer.", "lora.down.weight", "lora.up.weight", to_diffusers),
    "kohya": flat(),
    "kohya on diffusers names": flat(to_diffusers),
    "ComfyUI": dotted("diffusion_model."),
    "ComfyUI, down and up": dotted("diffusion_model.", "lora_down.weight", "lora_up.weight"),
    "original": dotted("", "lora_down.weight", "lora_up.weight"),
    "a trainer's pipeline": dotted("pipe.dit.", "lora_A.default.weight", "lora_B.default.weight"),
    "wrapped": dotted("model._fsdp_wrapped_module."),
}


def spelled(spelling: str, seed: int = 0) -> dict[str, torch.Tensor]:
    state = {}
    for layer, (down, up) in factors(seed).items():
        first, second = SPELLINGS[spelling](layer)
        state |= {first: down, second: up}
    return state


def expected(*changes: tuple[dict, float]) -> dict[str, torch.Tensor]:
    """The base weights with ``weight * up @ down`` added, the obvious way."""
    state = load_file(FILE)
    for layers, weight in changes:
        for layer, (down, up) in layers.items():
            state[f"{layer}.weight"] = state[f"{layer}.weight"] + weight * (up @ down)
    return state


def assert_close(network: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for key, value in network.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=1e-6, atol=1e-6)


def assert_base(network: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for key, value in load_file(FILE).items():
        assert torch.equal(network.state_dict()[key], value.to(dtype)), key


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_matched_in_full_and_means_the_same(spelling):
    network = mini_wan()
    lora = LoraSet(network, KEY_MAPS).add("x", spelled(spelling))
    assert lora.summary == "matched 8/8 layers"
    assert_close(network, expected((factors(), 1.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_then_unmerge_gives_the_exact_weights_back(dtype):
    network = mini_wan(dtype)
    places = {key: value.data_ptr() for key, value in network.state_dict().items()}
    loras = LoraSet(network)
    loras.add("x", spelled("original"), 0.7)
    with pytest.raises(AssertionError):
        assert_base(network, dtype)
    loras.add("y", spelled("ComfyUI", seed=1))
    loras.remove("x")
    loras.remove("y")
    assert_base(network, dtype)
    assert places == {key: value.data_ptr() for key, value in network.state_dict().items()}


def test_several_add_up_with_their_weights_in_any_order():
    one, other = mini_wan(), mini_wan()
    loras = LoraSet(one)
    loras.add("x", spelled("kohya"), 0.5)
    loras.add("y", spelled("peft", seed=1), -2)
    assert_close(one, expected((factors(), 0.5), (factors(1), -2)))
    turned = LoraSet(other)
    turned.add("y", spelled("peft", seed=1), 3)
    turned.add("x", spelled("kohya"), 0.5)
    turned.set_weights({"y": -2})
    assert turned.weights == {"x": 0.5, "y": -2}
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])
    loras.set_weights({"x": 0, "y": 0})
    assert_base(one)


def test_alpha_is_divided_by_the_rank():
    state = spelled("kohya") | {"lora_unet_blocks_0_ffn_0.alpha": torch.tensor(2.0)}
    scaled = {layer: (down, up * (0.5 if layer == "blocks.0.ffn.0" else 1)) for layer, (down, up) in factors().items()}
    network = mini_wan()
    LoraSet(network).add("x", state)
    assert_close(network, expected((scaled, 1.0)))


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({"lora_alpha": 8, "r": 4}, 2.0), ({"lora_alpha": 8, "use_rslora": True}, 4.0)],
)
def test_alpha_stands_in_the_file_beside_or_in_the_notes(tmp_path, settings, scale):
    path = tmp_path / "adapter_model.safetensors"
    save_file(spelled("peft"), path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"alpha_pattern": {"blocks.1.ffn.0": 4}}))
    special = 1.0 if scale == 2.0 else 2.0
    scaled = {
        layer: (down, up * (special if layer == "blocks.1.ffn.0" else scale)) for layer, (down, up) in factors().items()
    }
    network = mini_wan()
    LoraSet(network).add("x", path)
    assert_close(network, expected((scaled, 1.0)))
    noted = tmp_path / "noted.safetensors"
    (tmp_path / "adapter_config.json").unlink()
    notes = {f"transformer.{name}": value for name, value in settings.items()}
    save_file(spelled("diffusers"), noted, metadata={"lora_adapter_metadata": json.dumps(notes)})
    network = mini_wan()
    LoraSet(network, KEY_MAPS).add("x", noted)
    assert_close(network, expected((factors(), scale)))


def test_differences_of_weights_biases_and_other_parameters_are_added():
    network, base = mini_wan(), load_file(FILE)
    changes = {
        "diffusion_model.blocks.0.self_attn.q.diff": torch.ones(24, 24),
        "diffusion_model.blocks.0.self_attn.q.diff_b": torch.ones(24),
        "diffusion_model.blocks.0.norm3.diff": torch.ones(24),
        "diffusion_model.blocks.1.modulation.diff": torch.ones(1, 6, 24),
    }
    loras = LoraSet(network)
    loras.add("x", changes, 0.5)
    touched = ("self_attn.q.weight", "self_attn.q.bias", "norm3.weight")
    for key in [*(f"blocks.0.{name}" for name in touched), "blocks.1.modulation"]:
        assert torch.equal(network.state_dict()[key], base[key] + 0.5)
    loras.remove("x")
    assert_base(network)


def test_a_convolution_is_merged_with_its_kernel():
    network, base = mini_wan(), load_file(FILE)
    down, up = torch.randn(2, 16, 1, 2, 2), torch.randn(24, 2, 1, 1, 1)
    LoraSet(network).add("x", {"patch_embedding.lora_down.weight": down, "patch_embedding.lora_up.weight": up})
    want = base["patch_embedding.weight"] + torch.einsum("orabc,rixyz->oixyz", up, down)
    torch.testing.assert_close(network.patch_embedding.weight, want)


def test_a_change_goes_through_fused_split_and_transposed_tensors():
    """The change of one of three fused matrices lands in its third, the others of it stay exact."""
    model = nn.Module()
    model.qkv = nn.Linear(4, 12, bias=False)
    model.left, model.right = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    model.turned = nn.Linear(4, 3, bias=False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    key_map = KeyMap((
        Fuse(("q.weight", "k.weight", "v.weight"), "qkv.weight"),
        Split("both.weight", ("left.weight", "right.weight")),
        Transpose("turned.weight"),
    ))  # fmt: skip
    down, up = torch.randn(2, 4), {size: torch.randn(size, 2) for size in (4, 6)}
    turned = torch.randn(2, 3), torch.randn(4, 2)
    LoraSet(model, [key_map]).add("x", {
        "k.lora_A.weight": down, "k.lora_B.weight": up[4],
        "both.lora_A.weight": down, "both.lora_B.weight": up[6],
        "turned.lora_A.weight": turned[0], "turned.lora_B.weight": turned[1],
    })  # fmt: skip
    qkv = before["qkv.weight"].clone()
    qkv[4:8] += up[4] @ down
    torch.testing.assert_close(model.qkv.weight.data, qkv)
    assert torch.equal(model.qkv.weight[:4], before["qkv.weight"][:4])
    torch.testing.assert_close(model.right.weight.data, before["right.weight"] + (up[6] @ down)[3:])
    torch.testing.assert_close(model.turned.weight.data, before["turned.weight"] + (turned[1] @ turned[0]).T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.9.self_attn.q.lora_A.weight": (4, 24), "blocks.9.self_attn.q.lora_B.weight": (24, 4)},
         r"matched 8/9 layers.*unexpected blocks.9.self_attn.q; nearest: blocks.0.self_attn.q"),
        ({"text_encoder.layers.0.q.lora_A.weight": (4, 24), "text_encoder.layers.0.q.lora_B.weight": (24, 4)},
         "matched 8/9 layers"),
        ({"head.head.lora_A.weight": (4, 32), "head.head.lora_B.weight": (64, 4)},
         r"head.head changes \[64, 32\], but head.head.weight is \[64, 24\]; it is for a model of another size"),
        ({"head.head.lora_A.weight": (4, 24)}, "head.head.lora_A.weight without the factor that belongs to it"),
        ({"head.head.lora_A.weight": (4, 24), "head.head.lora_B.weight": (64, 8)}, r"are \[64, 8\] and \[4, 24\]"),
        ({"head.head.weight": (64, 24)}, r"1 keys that belong to no LoRA \(head.head.weight\)"),
        ({"head.head.lokr_w1": (2, 2)}, "is a LoKr .*head.head.lokr_w1"),
        ({"head.head.hada_w1_a": (2, 2)}, "is a LoHa .*head.head.hada_w1_a"),
    ],
)  # fmt: skip
def test_less_than_all_is_an_error_and_changes_nothing(change, message):
    network = mini_wan()
    loras = LoraSet(network, KEY_MAPS)
    state = spelled("original") | {key: torch.ones(shape) for key, shape in change.items()}
    with pytest.raises(CheckpointError, match=r"(?s)" + message):
        loras.add("x", state)
    assert_base(network)
    assert loras.weights == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_lora_with_values_that_are_no_numbers_is_refused_by_key(value):
    network, state = mini_wan(), spelled("original")
    key = "blocks.1.ffn.0.lora_up.weight"
    state[key] = torch.full_like(state[key], value)
    with pytest.raises(CheckpointError, match=key):
        LoraSet(network).add("x", state)
    assert_base(network)


def test_a_lora_without_effect_is_said(capsys):
    state = {key: value * ("lora_down" in key) for key, value in spelled("original").items()}
    LoraSet(mini_wan()).add("x", state)
    assert "changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "1", True])
def test_a_weight_is_a_finite_number(weight):
    loras = LoraSet(mini_wan())
    with pytest.raises(ValueError, match="expected a finite number"):
        loras.add("x", spelled("original"), weight)
    assert loras.weights == {}


def test_names_are_unique_and_must_be_known():
    loras = LoraSet(mini_wan())
    loras.add("x", spelled("original"))
    with pytest.raises(ValueError, match="there is a LoRA 'x' already"):
        loras.add("x", spelled("original"))
    with pytest.raises(ValueError, match="there is no LoRA 'y'; loaded: 'x'"):
        loras.set_weights({"y": 1})


def test_weights_that_have_no_values_or_are_quantized_are_not_merged_into():
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    quantized = nn.Linear(4, 4)
    quantized.weight = nn.Parameter(quantized.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    for module, why in ((empty, "has no values yet"), (quantized, "float8_e4m3fn; merge LoRAs before quantizing")):
        with pytest.raises(CheckpointError, match=why):
            LoraSet(nn.ModuleDict({"a": module})).add(
                "x", {"a.lora_A.weight": torch.ones(1, 4), "a.lora_B.weight": torch.ones(4, 1)}
            )


@pytest.mark.parametrize(
    ("file", "key"),
    [("lycoris", "q.dora_scale"), ("peft", "q.lora_magnitude_vector.weight"), ("aitoolkit", "q.magnitude")],
)
def test_case_b11_dora_is_refused_by_name_with_its_key(cases, file, key):
    network = mini_wan()
    with pytest.raises(CheckpointError, match=rf"is a DoRA \(its key diffusion_model.blocks.0.self_attn.{key} is"):
        LoraSet(network).add("x", cases / "B11" / f"dora_{file}.safetensors")
    assert_base(network)


def test_dora_is_refused_where_only_its_settings_say_so(tmp_path):
    save_file(spelled("peft"), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 4, "use_dora": true}')
    with pytest.raises(CheckpointError, match="is a DoRA .use_dora in its adapter_config.json"):
        LoraSet(mini_wan()).add("x", tmp_path)


def test_damaged_settings_are_an_error_and_not_another_alpha(tmp_path):
    save_file(spelled("peft"), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": ')
    with pytest.raises(CheckpointError, match=r"adapter_config.json is damaged"):
        LoraSet(mini_wan()).add("x", tmp_path)
