"""``flashdreams checkpoint``: one action a question, an exit code for the answer, one message for a mistake."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdreams.core import notices
from flashdreams.core.checkpoint.keymap import keyshape_md5
from flashdreams.recipes.wan.keymaps import DIT_FROM_DIFFUSERS
from mini_wan import FILE, factors

pytestmark = pytest.mark.ci_cpu

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture
def checkpoint(here, plugins, tools, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path / "cache"))
    notices.reset()
    plugins.entries["mini-wan"] = "mini_wan:RUNNER"
    return lambda *words: here("checkpoint", *words, program=tools)


@pytest.fixture
def diffusers(tmp_path) -> Path:
    """The same weights under the names of diffusers."""
    path = tmp_path / "diffusers.safetensors"
    save_file(DIT_FROM_DIFFUSERS.inverse().apply(load_file(FILE)), path)
    return path


def changed(path: Path, **values) -> Path:
    state = load_file(FILE)
    for key, change in values.items():
        key = key.replace("__", ".")
        if change is None:
            del state[key]
        else:
            state[key] = change(state[key]) if key in state else change(torch.zeros(2))
    save_file(state, path)
    return path


def manifest(path: Path, state, md5: str | None = None) -> Path:
    tensors = {key: {"shape": list(value.shape), "dtype": "F32"} for key, value in state.items()}
    content = {"keyshape_md5": md5 or keyshape_md5(state), "tensors": tensors}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_the_help_names_every_action_and_imports_no_torch(elsewhere, tools):
    result = elsewhere("checkpoint", "--help", program=tools)
    for action in ("inspect", "diff", "verify", "suggest", "equal", "convert", "merge-lora"):
        assert f"  {action} " in result.out
    assert (result.code, result.err) == (0, "imported:\n")


def test_an_action_explains_itself(checkpoint):
    result = checkpoint("verify", "--help")
    assert result.code == 0 and "SLUG --manifest FILE" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verfy"], "there is no action 'verfy' of flashdreams checkpoint; did you mean 'verify'?"),
        (["inspect"], "the following arguments are required: SOURCE; `flashdreams checkpoint inspect --help` says"),
        (["inspect", "a", "--fast"], "unrecognized arguments: --fast"),
        (["inspect", "none.safetensors"], "no checkpoint at none.safetensors"),
        (["verify", "mini-wan"], "verify takes a model and a checkpoint, or one of these and --manifest FILE"),
        (["verify", "mini-wam", FILE], "there is no runner 'mini-wam'; did you mean 'mini-wan'?"),
        (["verify", "mini-wan", FILE, "--part", "vae"], "mini-wan has no part 'vae'; it has transformer"),
        (["verify", "mini-wan", FILE, "--transform", "json:nothing"], "json' has no attribute 'nothing'"),
        (["suggest", "mini-wan", FILE, "--hint", "attn1"], "--hint is 'attn1'; expected THEIRS=OURS"),
        (["convert", FILE, "--output", "x.bin"], "--output is 'x.bin'; expected a name that ends in .safetensors"),
        (["convert", FILE, "--output", "x.safetensors", "--dtype", "int3"], "--dtype is 'int3'; expected float32"),
        (["convert", FILE, "--output", "x.safetensors", "--to", "diffusers"], "say which model with --model SLUG"),
        (["convert", FILE, "--output", "x.safetensors", "--shard-size", "0"], "--shard-size: size is '0'"),
        (["convert", FILE, "--output", "x.safetensors", "--model", "mini-wan", "--to", "onnx"],
         "--to is 'onnx'; mini-wan transformer has the layouts native, diffusers, fastvideo"),
        (["merge-lora", FILE, "style.safetensors:nan", "--output", "x.safetensors"], "expected SOURCE or SOURCE:W"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message(checkpoint, words, message):
    result = checkpoint(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ") and message in result.err and "Traceback" not in result.err


def test_inspect_shows_totals_and_patterns(checkpoint):
    result = checkpoint("inspect", FILE)
    assert result.code == 0
    count = sum(value.numel() for value in load_file(FILE).values())
    assert f"{len(load_file(FILE))} tensors, {count:,} numbers" in result.out
    assert "hash of keys and shapes: " + keyshape_md5(load_file(FILE)) in result.out
    assert "blocks.#.self_attn.q.weight" in result.out and "2 x F32 [24, 24]" in result.out
    assert "blocks.0.self_attn.q.weight" in checkpoint("inspect", FILE, "--keys").out


def test_inspect_as_json_is_a_manifest(checkpoint, tmp_path):
    path = tmp_path / "made.json"
    path.write_text(checkpoint("inspect", FILE, "--json").out)
    result = checkpoint("verify", "mini-wan", "--manifest", path)
    assert (result.code, result.err) == (0, "")
    assert checkpoint("inspect", path).out.splitlines()[0] == checkpoint("inspect", FILE).out.splitlines()[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("B08/wan-q8_0.gguf", "is a GGUF file (block-quantized), which is not supported; use the safetensors file"),
        ("B08/wan-q8_0-renamed.safetensors", "is a GGUF file (block-quantized), which is not supported"),
        ("B12/lfs_pointer.safetensors", "Git LFS pointer"),
        ("B12/lfs_pointer.pth", "Git LFS pointer"),
        ("B12/login_page.safetensors", "is a web page"),
    ],
)
def test_cases_b08_and_b12_inspect_says_what_a_file_is_that_is_no_checkpoint(checkpoint, name, said):
    result = checkpoint("inspect", CASES / name)
    assert result.code == 2
    assert said in result.err and "header" not in result.err


def test_diff_lists_what_differs(checkpoint, tmp_path):
    other = changed(
        tmp_path / "other.safetensors", extra=lambda t: t, head__head__bias=None,
        patch_embedding__bias=lambda t: t.bfloat16(),
    )  # fmt: skip
    result = checkpoint("diff", FILE, other)
    assert result.code == 1
    assert f"only in {FILE}: 1\n  head.head.bias F32 [64]" in result.out
    assert f"only in {other}: 1\n  extra F32 [2]" in result.out
    assert "patch_embedding.bias: F32 [24] -> BF16 [24]" in result.out
    same = checkpoint("diff", FILE, FILE)
    count = len(load_file(FILE))
    assert (same.code, same.out) == (0, f"{count} of {count} tensors have the same key, shape and number format\n")


def test_verify_finds_the_transform_of_a_file(checkpoint, diffusers):
    count = len(load_file(FILE))
    result = checkpoint("verify", "mini-wan", FILE)
    assert result.code == 0 and f"matched {count}/{count}, with the keys as they are" in result.out
    result = checkpoint("verify", "mini-wan", diffusers)
    assert result.code == 0 and f"matched {count}/{count}, with flashdreams.recipes.wan.keymaps:dit_from_" in result.out


def test_verify_says_what_does_not_fit(checkpoint, tmp_path):
    bad = changed(tmp_path / "bad.safetensors", head__head__bias=None, head__head__bies=lambda t: torch.zeros(64))
    result = checkpoint("verify", "mini-wan", bad)
    assert result.code == 1
    assert "1 missing, 1 unexpected" in result.out
    assert "missing head.head.bias [64]; nearest: head.head.bies" in result.out


def test_verify_against_a_manifest(checkpoint, tmp_path, diffusers):
    path = manifest(tmp_path / "m.json.gz", load_file(FILE))
    assert checkpoint("verify", FILE, "--manifest", path).code == 0
    other = checkpoint("verify", diffusers, "--manifest", path)
    assert other.code == 1 and "missing" in other.out
    changed_by_hand = manifest(tmp_path / "t.json.gz", load_file(FILE), "0" * 32)
    tampered = checkpoint("verify", "mini-wan", "--manifest", changed_by_hand)
    assert tampered.code == 1 and "states the hash 000" in tampered.out
    (tmp_path / "broken.json").write_text('{"tensors": [')
    broken = checkpoint("verify", "mini-wan", "--manifest", tmp_path / "broken.json")
    assert broken.code == 2 and "is no manifest" in broken.err


def test_suggest_proposes_rules_that_verify_then_accepts(checkpoint, diffusers, tmp_path, monkeypatch):
    result = checkpoint("suggest", "mini-wan", diffusers, "--output", tmp_path / "proposed_map.py")
    count = len(load_file(FILE))
    assert result.code == 0, result.out
    assert f"matched {count}/{count}" in result.out
    monkeypatch.syspath_prepend(str(tmp_path))
    result = checkpoint("verify", "mini-wan", diffusers, "--transform", "proposed_map:transform")
    assert result.code == 0 and f"matched {count}/{count}" in result.out
    result = checkpoint("equal", FILE, diffusers, "--model", "mini-wan")
    assert (result.code, result.out) == (0, f"equal: {count}/{count} tensors, max |d| = 0\n")


def test_equal_measures_every_tensor_after_each_transform(checkpoint, diffusers, tmp_path):
    count = len(load_file(FILE))
    near = changed(tmp_path / "near.safetensors", head__head__bias=lambda t: t + torch.eye(64)[3] / 4)
    result = checkpoint("equal", near, diffusers, "--model", "mini-wan")
    assert result.code == 1
    assert "head.head.bias: max |d| = 0.25" in result.out
    assert f"equal: {count - 1}/{count} tensors, max |d| = 0.25" in result.out
    assert checkpoint("equal", near, FILE, "--model", "mini-wan", "--tolerance", "0.3").code == 0
    nan = changed(tmp_path / "nan.safetensors", head__head__bias=lambda t: t * float("nan"))
    assert checkpoint("equal", nan, FILE, "--tolerance", "1e9").code == 1
    assert checkpoint("equal", nan, nan).code == 0
    lacking = checkpoint("equal", FILE, changed(tmp_path / "less.safetensors", head__head__bias=None))
    assert lacking.code == 1 and "head.head.bias stands in one of the two only" in lacking.out


def test_convert_there_and_back_gives_the_same_bytes(checkpoint, tmp_path):
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    result = checkpoint("convert", FILE, "--model", "mini-wan", "--to", "diffusers", "--output", there)
    assert result.code == 0, result.err
    assert load_file(there).keys() == DIT_FROM_DIFFUSERS.inverse().apply(load_file(FILE)).keys()
    assert checkpoint("convert", there, "--model", "mini-wan", "--to", "native", "--output", back).code == 0
    assert back.read_bytes() == FILE.read_bytes()


def test_convert_between_two_other_layouts(checkpoint, diffusers, tmp_path):
    fast = tmp_path / "fast.safetensors"
    assert checkpoint("convert", diffusers, "--model", "mini-wan", "--to", "fastvideo", "--output", fast).code == 0
    assert "blocks.0.to_q.weight" in load_file(fast)
    assert checkpoint("equal", fast, FILE, "--model", "mini-wan").code == 0


def test_convert_casts_and_shards(checkpoint, tmp_path):
    result = checkpoint(
        "convert", FILE, "--output", tmp_path / "m.safetensors", "--dtype", "bfloat16", "--shard-size", "20KB"
    )
    assert result.code == 0, result.err
    shards = sorted(tmp_path.glob("m-*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size < 26_000 for path in shards)
    state = {key: value for path in shards for key, value in load_file(path).items()}
    assert state.keys() == load_file(FILE).keys()
    assert all(torch.equal(value.bfloat16(), state[key]) for key, value in load_file(FILE).items())
    assert checkpoint("verify", "mini-wan", tmp_path / "m.safetensors").code == 0
    assert list(tmp_path.glob(".*")) == []


def test_convert_does_not_write_over_its_source(checkpoint, tmp_path):
    path = shutil.copy(FILE, tmp_path / "own.safetensors")
    result = checkpoint("convert", path, "--output", path)
    assert result.code == 2 and "is the checkpoint itself" in result.err
    assert path.read_bytes() == FILE.read_bytes()


def test_merge_lora_adds_each_with_its_weight(checkpoint, tmp_path):
    loras, state = [], load_file(FILE)
    for seed, weight in ((0, 1.0), (1, -0.5)):
        path = tmp_path / f"lora{seed}.safetensors"
        save_file(
            {f"diffusion_model.{layer}.lora_{side}.weight": value
             for layer, pair in factors(seed).items() for side, value in zip("AB", pair, strict=True)}, path,
        )  # fmt: skip
        loras.append(str(path) if weight == 1 else f"{path}:{weight}")
        for layer, (down, up) in factors(seed).items():
            state[f"{layer}.weight"] = state[f"{layer}.weight"] + weight * (up @ down)
    output = tmp_path / "merged.safetensors"
    result = checkpoint("merge-lora", FILE, *loras, "--output", output)
    assert result.code == 0, result.err
    assert "lora1.safetensors: matched 8/8 layers, weight -0.5" in result.out
    for key, value in load_file(output).items():
        torch.testing.assert_close(value, state[key], rtol=1e-6, atol=1e-6)


def test_merge_lora_reads_names_of_another_layout_with_the_model(checkpoint, diffusers, tmp_path):
    down, up = factors()["blocks.0.self_attn.q"]
    lora, layer = tmp_path / "l.safetensors", "blocks.0.self_attn.q"
    save_file({f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}, lora)
    words = ("merge-lora", diffusers, lora, "--output", tmp_path / "m.safetensors")
    assert "matched 0/1" in checkpoint(*words).err
    assert checkpoint(*words, "--model", "mini-wan").code == 0
    want = load_file(diffusers)["blocks.0.attn1.to_q.weight"] + up @ down
    torch.testing.assert_close(load_file(tmp_path / "m.safetensors")["blocks.0.attn1.to_q.weight"], want)


@pytest.mark.parametrize(
    ("file", "key"),
    [("lycoris", "q.dora_scale"), ("peft", "q.lora_magnitude_vector.weight"), ("aitoolkit", "q.magnitude")],
)
def test_case_b11_merge_lora_refuses_dora_by_name(checkpoint, tmp_path, file, key):
    output = tmp_path / "x.safetensors"
    result = checkpoint("merge-lora", FILE, CASES / "B11" / f"dora_{file}.safetensors", "--output", output)
    assert result.code == 2 and not output.exists()
    assert "is a DoRA" in result.err and key in result.err
