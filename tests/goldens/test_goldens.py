"""This implementation gives the numbers of the public originals; and the comparison would notice if it did not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from golden import Golden, compare, load
from run import evaluate, main

pytestmark = pytest.mark.ci_cpu

FILES = sorted((Path(__file__).parent / "data").glob("*.safetensors"))
PLACES = (
    # DiT
    "patch_embedding.weight",
    "time_embedding.0.weight",
    "text_embedding.2.weight",
    "blocks.0.self_attn.q.weight",
    "blocks.1.cross_attn.v.weight",
    "blocks.1.ffn.0.weight",
    "head.head.weight",
    "img_emb.proj.1.weight",
    "blocks.0.cross_attn.k_img.weight",
    # VAE, 2.1 and 2.2
    "encoder.downsamples.5.time_conv.weight",
    "decoder.upsamples.3.resample.1.weight",
    "encoder.downsamples.1.downsamples.2.time_conv.weight",
    "decoder.upsamples.0.upsamples.3.resample.1.weight",
    # TAEHV
    "encoder.7.conv.weight",
    "decoder.19.conv.weight",
    # umT5
    "blocks.0.attn.q.weight",
    "blocks.1.attn.v.weight",
    "blocks.1.ffn.gate.0.weight",
    # CLIP
    "transformer.0.attn.to_qkv.weight",
    "transformer.0.mlp.2.weight",
    # Cosmos
    "x_embedder.proj.1.weight",
    "t_embedder.1.linear_2.weight",
    "crossattn_proj.0.weight",
    "blocks.0.self_attn.q_proj.weight",
    "blocks.1.cross_attn.v_proj.weight",
    "blocks.0.adaln_modulation_cross_attn.1.weight",
    "blocks.1.mlp.layer1.weight",
    "final_layer.linear.weight",
    # Matrix-Game-2: its action module, within the network and alone
    "blocks.0.action_model.t_qkv.weight",
    "blocks.0.action_model.keyboard_attn_kv.weight",
    "mouse_mlp.0.weight",
    "t_qkv.weight",
    "keyboard_embed.0.weight",
    "mouse_attn_q.weight",
    # FlashVSR: its projection and its decoder; its network is a DiT
    "conv2.weight",
    "linear_layers.0.weight",
    "decoder.3.weight",
    "decoder.12.conv.2.weight",
    # LingBot-World: its camera layers
    "patch_embedding_wancamctrl.weight",
    "c2ws_hidden_states_layer2.weight",
    "blocks.0.cam_injector_layer1.weight",
    "blocks.1.cam_shift_layer.weight",
)
"""Weights between input and output, of each kind of model, that are changed to see whether it is noticed."""

ELEMENT = {"c2ws": -5, "intrinsics": 0, "sigma_cap": 24, "sigma_next": 15}
"""Which element of an input is changed, where the one in the middle is not read: of poses, where the last one is; of
intrinsics, those of the first frame; of caps, one of a step from sigma 1; of next levels, one far enough below."""


def keys_to_perturb(path: Path) -> tuple[str, ...]:
    """Those of the places that the file's model has; of a scheduler, which has no weights, its inputs."""
    with safe_open(path, "pt") as file:
        weights = json.loads(file.metadata()["weights"])
        if not weights:
            return tuple(key[3:] for key in file.keys() if key.startswith("in."))
        idle = ("cam", "c2ws") if json.loads(file.metadata()["config"]).get("with_camera") is False else ()
    shapes = next(iter(weights.values()))["shapes"]
    keys = tuple(key for key in PLACES if key in shapes and not any(part in key for part in idle))
    assert keys, f"{path.stem} has none of the weights in PLACES; add some of its own"
    return keys


PERTURBATIONS = [(path, key) for path in FILES for key in keys_to_perturb(path)]


def named(value: object) -> str:
    return value.stem if isinstance(value, Path) else str(value)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_numbers_are_those_of_the_original(path: Path):
    assert evaluate(load(path)).problems == ()


@pytest.mark.parametrize(("path", "key"), PERTURBATIONS, ids=named)
def test_a_single_changed_number_is_noticed(path: Path, key: str):
    """One element, of hundreds of thousands, moves by one standard deviation of its tensor (by a hundredth if there is
    none); by a hundred where all that comes out is a choice, which only what crosses its threshold changes."""
    golden = load(path)
    tensor = next(iter(golden.weights.values()), golden.inputs)[key]
    step = 1 if any(want.is_floating_point() for want in golden.wants.values()) else 100
    tensor.view(-1)[ELEMENT.get(key, tensor.numel() // 2)] += step * (tensor.std() if tensor.std() > 1e-6 else 0.01)
    assert evaluate(golden).problems


def small(**outputs: Tensor) -> Golden:
    measured = {"x": {"max_abs": 1e-6, "rms_out": 1.0}}
    return Golden("small", {}, "", (), {}, measured, inputs={}, wants=outputs)


def test_a_value_passes_within_the_tolerance_and_a_ten_thousandth_of_itself():
    golden = small(x=torch.tensor([0.0, 10.0]))
    assert golden.atol == pytest.approx(2e-5)
    assert not compare(golden, [("x", torch.tensor([1.9e-5, 10.001]))]).problems
    assert compare(golden, [("x", torch.tensor([2.1e-5, 10.0]))]).problems
    assert compare(golden, [("x", torch.tensor([0.0, 10.0012]))]).problems


def test_integers_must_be_equal():
    golden = small(x=torch.tensor([10**6]))
    assert not compare(golden, [("x", torch.tensor([10**6]))]).problems
    assert compare(golden, [("x", torch.tensor([10**6 + 1]))]).problems


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        ([("x", torch.tensor([0.0, float("nan")]))], "x differs by nan"),
        ([("x", torch.zeros(1, 2))], r"x has shape \[1, 2\], expected \[2\]"),
        ([], "x was not computed"),
    ],
)
def test_no_result_passes_by_default(results: list[tuple[str, Tensor]], problem: str):
    (found,) = compare(small(x=torch.zeros(2)), results).problems
    assert re.fullmatch(problem, found)


def test_each_of_several_results_for_one_output_counts():
    golden = small(x=torch.zeros(2))
    assert compare(golden, [("x", torch.zeros(2)), ("x", torch.ones(2))]).problems == ("x differs by 1.0e+00",)


def test_the_script_prints_a_line_per_file_and_fails_if_one_fails(capsys: pytest.CaptureFixture, tmp_path: Path):
    good = next(path for path in FILES if path.stem == "wan21_t2v")
    assert main([str(good)]) == 0
    name, difference, tolerance, verdict = capsys.readouterr().out.splitlines()[-1].split()
    assert (name, tolerance, verdict) == ("wan21_t2v", "4e-05", "ok")
    assert 0 < float(difference) < 4e-5

    renamed = rewrite(good, tmp_path / "renamed.safetensors")
    wrong = rewrite(good, tmp_path / "wrong.safetensors", velocity=1.01)
    assert main([str(renamed)]) == 0, "the name of a file says nothing"
    assert main([str(wrong), str(good)]) == 1
    assert "FAIL: velocity differs by" in capsys.readouterr().out


def test_the_script_says_which_case_it_does_not_know(capsys: pytest.CaptureFixture, tmp_path: Path):
    source = json.dumps({"repo": "someone/else@1234", "file": "model.py"})
    unknown = rewrite(FILES[0], tmp_path / "unknown.safetensors", metadata={"source": source, "config": "{}"})
    assert main([str(unknown)]) == 1
    assert "no case for someone/else@1234 model.py" in capsys.readouterr().out


def test_the_script_names_a_file_it_cannot_read(capsys: pytest.CaptureFixture, tmp_path: Path):
    (tmp_path / "empty.safetensors").touch()
    assert main([str(tmp_path / "empty.safetensors"), str(FILES[0])]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "empty.safetensors is not a readable golden file" in lines[-2]
    assert lines[-1].endswith("ok")


def rewrite(path: Path, target: Path, metadata: dict[str, str] | None = None, **factors: float) -> Path:
    """A copy of a golden file with outputs multiplied by factors, or other metadata."""
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) * factors.get(key[4:], 1) for key in file.keys()}
        save_file(tensors, target, {**file.metadata(), **(metadata or {})})
    return target
