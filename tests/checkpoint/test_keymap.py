"""Key maps as data: what each step does, what a plan promises, and what cannot be undone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.keymap import (
    Drop,
    Fuse,
    KeyMap,
    KeyMapError,
    Reshape,
    Rule,
    Split,
    Strip,
    Transpose,
    keyshape_md5,
)

pytestmark = pytest.mark.ci_cpu

QKV = Fuse(("*.q.*", "*.k.*", "*.v.*"), "*.qkv.*")


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Distinct random tensors; ``__`` in a name is a dot."""
    generator = torch.Generator().manual_seed(0)
    return {key.replace("__", "."): torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def test_rules_are_applied_in_order_each_to_what_the_one_before_left():
    key_map = KeyMap(((r"^a\.", "b."), (r"^b\.", "c."), (r"\.to_(q|k)$", r".\1")))
    assert list(key_map.shapes({"a.to_q": (1,), "d.to_k": (2,)})) == ["c.q", "d.k"]


def test_a_renamed_tensor_is_passed_on_not_copied():
    state = tensors(a=(2, 3))
    assert KeyMap((("^a$", "b"),)).apply(state)["b"] is state["a"]


def test_two_keys_that_become_one_are_an_error_that_names_both():
    with pytest.raises(KeyMapError, match=r"'x\.w' and 'y\.w' both become 'w'"):
        KeyMap(((r"^(x|y)\.", ""),)).plan({"x.w": (1,), "y.w": (1,)})


def test_its_errors_are_checkpoint_errors():
    assert issubclass(KeyMapError, CheckpointError)


@pytest.mark.parametrize(("pattern", "replacement"), [("(", ""), ("a", r"\1"), ("(a)", r"\g<2>"), ("a", "\\")])
def test_a_rule_that_can_never_work_is_refused_when_it_is_written(pattern: str, replacement: str):
    with pytest.raises(KeyMapError, match="rule"):
        Rule(pattern, replacement)


def test_wrappers_are_stripped_wherever_they_occur():
    strip = KeyMap((Strip(),))
    keys = [
        "module.model._fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.attn._orig_mod.q.weight",
        "net._orig_mod.blocks.1.module.attn.q.weight",
        "head",
    ]
    assert list(strip.shapes(dict.fromkeys(keys, (1,)))) == ["blocks.0.attn.q.weight", "blocks.1.attn.q.weight", "head"]


def test_a_part_that_the_target_really_has_is_never_stripped():
    strip = KeyMap((Strip.before(["model.norm.weight", "model.ffn.net.0.weight"]),))
    keys = {"module.model.ffn.net.0.weight": (1,), "net.model.norm.weight": (1,)}
    assert list(strip.shapes(keys)) == ["model.ffn.net.0.weight", "model.norm.weight"]


def test_the_last_part_of_a_key_is_no_wrapper():
    assert list(KeyMap((Strip(),)).shapes({"model.module": (1,)})) == ["module"]


def test_dropped_keys_are_gone_and_others_stay():
    assert list(KeyMap((Drop("*.freqs", why="computed"),)).shapes({"a.freqs": (2,), "freqs.a": (2,)})) == ["freqs.a"]


def test_a_fused_tensor_is_its_parts_in_the_order_written():
    state = tensors(a__v__weight=(2, 3), a__q__weight=(2, 3), a__k__weight=(2, 3), b=(1,))
    out = KeyMap((QKV,)).apply(state)
    assert list(out) == ["a.qkv.weight", "b"]
    expected = torch.cat([state["a.q.weight"], state["a.k.weight"], state["a.v.weight"]])
    assert torch.equal(out["a.qkv.weight"], expected)


def test_splitting_undoes_fusing_and_the_parts_share_no_memory():
    state = tensors(a__q__weight=(2, 3), a__k__weight=(2, 3), a__v__weight=(2, 3))
    fused = KeyMap((QKV,)).apply(state)
    parts = KeyMap((QKV,)).inverse().apply(fused)
    assert all(torch.equal(parts[key], state[key]) for key in state)
    parts["a.q.weight"].zero_()
    assert fused["a.qkv.weight"].abs().sum() > 0


def test_parts_of_unequal_size_need_their_sizes():
    state = tensors(a__q=(4, 3), a__k=(2, 3))
    with pytest.raises(KeyMapError, match=r"'a\.k' is \[2, 3\]; as a part of 'a\.qk' it must be \[4, 3\]"):
        KeyMap((Fuse(("*.q", "*.k"), "*.qk"),)).plan(state)
    sized = KeyMap((Fuse(("*.q", "*.k"), "*.qk", sizes=(4, 2)),))
    back = sized.inverse().apply(sized.apply(state))
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_a_missing_part_is_named():
    with pytest.raises(KeyMapError, match=r"'a\.qkv\.weight' is made of 3 tensors; there is no 'a\.k\.weight'"):
        KeyMap((QKV,)).plan({"a.q.weight": (2, 3), "a.v.weight": (2, 3)})


def test_rows_that_do_not_divide_cannot_be_split():
    with pytest.raises(KeyMapError, match=r"'a\.qkv' is \[7, 3\].*multiple of 3 rows"):
        KeyMap((Split("*.qkv", ("*.q", "*.k", "*.v")),)).plan({"a.qkv": (7, 3)})


@pytest.mark.parametrize("entry", [lambda: Fuse(("*.q",), "*.x"), lambda: Split("*.x", ("*.q.*", "*.k.*"))])
def test_entries_whose_names_do_not_match_up_are_refused_when_they_are_written(entry):
    with pytest.raises(KeyMapError, match="as many"):
        entry()


def test_transposed_and_reshaped_tensors_are_contiguous_and_come_back():
    state = tensors(head=(2, 3), pos=(5, 4))
    key_map = KeyMap((Transpose("head"), Reshape("pos", (-1, 4), (1, -1, 4))))
    out = key_map.apply(state)
    assert torch.equal(out["head"], state["head"].T) and out["head"].is_contiguous()
    assert torch.equal(out["pos"], state["pos"][None])
    back = key_map.inverse().apply(out)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_a_shape_that_an_entry_does_not_expect_is_an_error():
    with pytest.raises(KeyMapError, match=r"'pos' is \[5, 4\]; expected \[6, 4\]"):
        KeyMap((Reshape("pos", (6, 4), (1, 6, 4)),)).plan({"pos": (5, 4)})
    with pytest.raises(KeyMapError, match=r"'pos' is \[5\]; it has no axes"):
        KeyMap((Transpose("pos"),)).plan({"pos": (5,)})


def test_a_plan_needs_no_tensor_and_says_what_each_one_needs():
    items = {
        item.target: item
        for item in KeyMap((QKV, ("^b$", "c"))).plan({"a.q.w": [2], "a.k.w": [2], "a.v.w": [2], "b": []})
    }
    assert items["a.qkv.w"].sources == ("a.q.w", "a.k.w", "a.v.w") and items["a.qkv.w"].shape == (6,)
    assert items["c"].sources == ("b",) and items["c"].shape == () and items["c"].is_rename
    q, k, v = (torch.full((2,), float(value)) for value in range(3))
    assert items["a.qkv.w"].operation(q, k, v).tolist() == [0, 0, 1, 1, 2, 2]


def test_shapes_give_shapes_and_meta_tensors_give_meta_tensors():
    key_map = KeyMap((QKV, Transpose("head")))
    state = tensors(a__q__w=(2, 3), a__k__w=(2, 3), a__v__w=(2, 3), head=(4, 5))
    shapes = key_map.apply({key: list(value.shape) for key, value in state.items()})
    meta = key_map.apply({key: value.to("meta") for key, value in state.items()})
    real = key_map.apply(state)
    assert all(value.is_meta for value in meta.values())
    assert shapes == {key: tuple(value.shape) for key, value in real.items()}
    assert shapes == {key: tuple(value.shape) for key, value in meta.items()}


@pytest.mark.parametrize(
    ("rule", "inverse"),
    [
        ((r"\.to_(q|k|v)\.", r".\1."), (r"\.(q|k|v)\.", r".to_\1.")),
        ((r"^blocks\.(\d+)\.(a|b)$", r"\2.layers.\1"), (r"^(a|b)\.layers\.(\d+)$", r"blocks.\2.\1")),
        ((r"^model\.", ""), ("^", "model.")),
        (("^", "model."), (r"^model\.", "")),
        ((r"(^|\.)attn1(?=\.)", r"\1self_attn"), (r"(^|\.)self_attn(?=\.)", r"\1attn1")),
        ((r"^x\.(\d+)\.", r"y.\1.\1."), (r"^y\.(\d+)\.\1(?!\d)\.", r"x.\1.")),
    ],
)
def test_the_inverse_of_a_rule(rule: tuple[str, str], inverse: tuple[str, str]):
    assert Rule(*rule).inverse() == Rule(*inverse)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (Rule(r"(a|b)\.", ""), "not in the replacement"),
        (Rule(r"(?:a|b)\.", "c."), "not captured"),
        (Rule(r"a.b", "c"), "more than one text"),
        (Rule(r"\d", "c"), "more than one text"),
        (Rule(r"ab?", "c"), "more than one text"),
        (Rule(r"a(?=x)b", "c"), "between two texts"),
        (Strip(), "where they stood"),
        (Drop("a"), "gone"),
    ],
)
def test_what_loses_something_has_no_inverse_and_says_why(step, why: str):
    with pytest.raises(KeyMapError, match=why):
        KeyMap((step,)).inverse()


def test_keys_that_are_no_image_of_the_map_cannot_be_taken_back():
    key_map = KeyMap(((r"\.to_(q|k)$", r".\1"),))
    assert list(key_map.inverse().shapes({"a.q": (1,)})) == ["a.to_q"]
    with pytest.raises(KeyMapError, match=r"'a\.to_q'.*no image of the map"):
        key_map.inverse().plan({"a.to_q": (1,)})


def test_the_source_of_a_map_defines_it_again():
    key_map = KeyMap(
        (Strip(), Drop("a", why='it\'s "odd"'), QKV, Transpose("h"), (r"\.a$", r".b"), ('"', "'"), ("\n", ""))
    )
    names: dict[str, object] = {}
    exec(f"from flashdreams.core.checkpoint.keymap import *\n{key_map.source('MADE')}", names)
    assert names["MADE"] == key_map


def test_the_hash_of_keys_and_shapes_tells_both_and_no_order():
    header = {"a": (2, 3), "b": ()}
    assert keyshape_md5(header) == keyshape_md5({"b": [], "a": torch.empty(2, 3)})
    assert len({keyshape_md5(other) for other in (header, {"a": (3, 2), "b": ()}, {"a": (2, 3), "c": ()})}) == 3
