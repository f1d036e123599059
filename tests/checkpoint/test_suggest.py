"""What `suggest` finds out about checkpoints it has no table for, what it leaves open, and traps it must not fall into.

Right means: the published mapping, key for key. A bijection that is not that mapping is a failure.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashdreams.core.checkpoint.keymap import Drop, Fuse, Split, Transpose
from flashdreams.core.checkpoint.suggest import suggest
from flashdreams.recipes.wan.config import WanNetworkConfig
from flashdreams.recipes.wan.network import WanNetwork
from suggest_pairs import PAIRS, header, published

pytestmark = pytest.mark.ci_cpu

Header = dict[str, tuple[int, ...]]


@pytest.mark.parametrize("name", PAIRS)
def test_a_published_pair_is_found_key_for_key_with_few_rules(name: str):
    pair = PAIRS[name]
    model = pair.model()
    found = suggest(model, header(pair.checkpoint))
    assert found.mapping == pair.right()
    assert found.rules <= pair.rules
    assert found.key_map.shapes(header(pair.checkpoint)) == {key: model[key] for key in pair.right()}


def test_of_cosmos_just_the_buffers_are_left_that_the_checkpoint_lacks():
    found = suggest(header("cosmos-predict2.5-2b.native"), header("cosmos-predict2.5-2b.diffusers"))
    left = {key for rest in found.remaining for key in rest.keys}
    assert left == {key for key in header("cosmos-predict2.5-2b.native") if "accum_" in key or "pos_embedder" in key}
    assert {rest.side for rest in found.remaining} == {"model"}


def test_the_gate_of_umt5_is_left_open_without_the_order_of_registration_and_nothing_else_is():
    found = suggest(header("umt5-xxl-encoder.native"), header("umt5-xxl-encoder.transformers-saved"))
    right = published("umt5-xxl-encoder.native")
    open_keys = {key for rest in found.remaining if rest.side == "model" for key in rest.keys}
    assert open_keys == {key for key in right if "ffn.gate" in key or "ffn.fc1" in key}
    assert found.mapping == {key: sources for key, sources in right.items() if key not in open_keys}


def test_a_model_on_the_meta_device_has_the_order_too():
    with torch.device("meta"):
        model = WanNetwork(WanNetworkConfig()).state_dict()
    found = suggest(model, header("wan2.1-t2v-1.3b.diffusers"))
    assert found.mapping == published("wan2.1-t2v-1.3b.native")


def test_the_order_of_the_checkpoints_keys_does_not_matter():
    model, checkpoint = header("wan2.1-t2v-1.3b.native"), header("wan2.1-t2v-1.3b.diffusers")
    backwards = dict(reversed(checkpoint.items()))
    assert suggest(model, backwards).mapping == published("wan2.1-t2v-1.3b.native")


def block(*modules: str, dim: int = 8, **shapes: tuple[int, ...]) -> Header:
    """Three equal blocks of linear layers, and other tensors by name."""
    found: Header = {}
    for number in range(3):
        for module in modules:
            found[f"{module}.weight".replace("#", str(number))] = (dim, dim)
            found[f"{module}.bias".replace("#", str(number))] = (dim,)
    return found | {key.replace("__", "."): shape for key, shape in shapes.items()}


def layer_norms(*modules: str) -> Header:
    return {f"{module}.{part}": (8,) for module in modules for part in ("weight", "bias")}


def test_what_names_and_order_do_not_tell_is_left_open_and_dropped_so_that_loading_stops():
    model, checkpoint = block("b.#.q", "b.#.k"), block("b.#.zu", "b.#.ma")
    found = suggest(model, checkpoint)
    assert found.mapping == {} and not found.is_complete
    assert found.key_map.shapes(checkpoint) == {}
    assert {key for rest in found.remaining for key in rest.keys} == model.keys() | checkpoint.keys()
    assert "neither names nor order tell" in found.report()


def test_a_hint_settles_it_for_all_blocks():
    found = suggest(block("b.#.q", "b.#.k"), block("b.#.zu", "b.#.ma"), hints={"zu": "k", "ma": "q"})
    assert found.is_complete and found.mapping["b.2.k.weight"] == ("b.2.zu.weight",)


def test_keys_in_doubt_that_are_called_like_model_keys_do_not_load_by_accident():
    """The norms of Wan: numbered 1, 3, 2 in the order in which they run, where others number them 1, 2, 3."""
    model = layer_norms("b.0.norm1", "b.0.norm3", "b.0.norm2") | {"b.0.self_attn.q.weight": (8, 8)}
    checkpoint = layer_norms("b.0.norm1", "b.0.norm2", "b.0.norm3") | {"b.0.attn1.to_q.weight": (8, 8)}
    for ordered in (True, False):
        found = suggest(model, checkpoint, ordered=ordered)
        assert found.mapping == {"b.0.self_attn.q.weight": ("b.0.attn1.to_q.weight",)}
        assert list(found.key_map.shapes(checkpoint)) == ["b.0.self_attn.q.weight"]


def test_the_one_norm_of_wan_that_has_weights_is_found_though_its_number_differs():
    found = suggest(header("wan2.1-t2v-1.3b.native"), header("wan2.1-t2v-1.3b.diffusers"))
    assert found.mapping["blocks.7.norm3.weight"] == ("blocks.7.norm2.weight",)


def test_a_norm_after_attention_is_not_taken_for_the_norm_of_attention():
    model = layer_norms("b.0.attn_norm", "b.0.ffn_norm")
    assert suggest(model, layer_norms("b.0.pre_cross_norm", "b.0.post_attention_layernorm")).mapping == {}
    llama = layer_norms("b.0.input_layernorm", "b.0.post_attention_layernorm")
    assert suggest(model, llama).mapping == {}
    right = {"b.0.norm1.weight": ("b.0.input_layernorm.weight",)}
    assert right.items() <= suggest(layer_norms("b.0.norm1", "b.0.norm2"), llama).mapping.items()


def test_numbers_that_are_only_labels_count_nothing():
    model = block("b.#.pre", "b.#.post") | {"b.0.x": (3,), "b.1.x": (3,), "b.2.x": (3,)}
    labels = block("b.#.c1", "b.#.c0") | {"b.0.c2": (3,), "b.1.c2": (3,), "b.2.c2": (3,)}
    assert all(key.endswith(".x") for key in suggest(model, labels).mapping)


def test_numbers_count_self_attention_before_cross_attention_and_the_order_of_the_model_may_contradict():
    names = "self_attn.q", "self_attn.o", "cross_attn.q", "cross_attn.o"
    model = block(*(f"b.#.{name}" for name in names))
    checkpoint = block("b.#.attn1.to_q", "b.#.attn1.to_out.0", "b.#.attn2.to_q", "b.#.attn2.to_out.0")
    assert suggest(model, checkpoint).mapping["b.1.cross_attn.o.bias"] == ("b.1.attn2.to_out.0.bias",)
    built_otherwise = {key: model[key] for key in sorted(model, key=lambda key: "self" in key)}
    assert suggest(built_otherwise, checkpoint, ordered=True).mapping == {}


def test_what_shapes_prove_in_one_block_helps_the_others_with_the_same_names():
    model = {f"b.{at}.{name}.weight": (8, 8) for at in range(3) for name in ("foo", "bar")}
    checkpoint = {f"b.{at}.{name}.weight": (8, 8) for at in range(3) for name in ("xy", "zw")}
    assert suggest(model, checkpoint).mapping == {}
    model["b.1.foo.weight"] = checkpoint["b.1.zw.weight"] = (16, 8)
    found = suggest(model, checkpoint)
    assert found.is_complete and found.mapping["b.2.foo.weight"] == ("b.2.zw.weight",)


def test_lists_of_unlike_things_are_not_paired_by_place():
    """Norms, then layers, on the one side; by turns on the other. The odd head keeps the blocks from being equal."""
    linear, norm = {"w": (8, 4)}, {"w": (8,)}
    layouts = (norm, linear, norm, linear), (norm, norm, linear, linear)
    model, checkpoint = (
        {f"b.{at}.{name}": shape for at, layer in enumerate(layers) for name, shape in layer.items()}
        for layers in layouts
    )
    found = suggest(model, checkpoint | {"b.3.scale": (9,)})
    assert "b.2.w" not in found.mapping


def test_numbers_in_a_list_are_not_identities_where_the_other_side_counts_from_one():
    model = {f"m.l.{at}.{name}.weight": (8, 8) for at in range(3) for name in ("q", "o")}
    checkpoint = {f"m.l.{at + 1}.{name}.weight": (8, 8) for at in range(3) for name in ("q", "o")}
    found = suggest(model, checkpoint | {"m.l.3.q.tied": (8, 8)})
    assert all(found.mapping.get(key, (right,)) == (right,) for key, right in zip(model, checkpoint, strict=True))
    assert "m.l.1.o.weight" in found.mapping


def test_which_of_two_numbers_counts_the_blocks_is_left_open_where_there_are_as_many_of_both():
    model = {f"b.{at}.norms.{norm}.weight": (8,) for at in range(3) for norm in range(3)} | {"b.0.x": (3,)}
    checkpoint = {f"b.ln_{norm + 1}.{at}.weight": (8,) for at in range(3) for norm in range(3)} | {"b.x.0": (3,)}
    assert not any("norms" in key for key in suggest(model, checkpoint).mapping)


def test_fused_projections_are_taken_apart_in_the_order_that_their_name_spells():
    model = block("b.#.attn.q", "b.#.attn.k", "b.#.attn.v", "b.#.attn.o")
    fused = block("b.#.attn.o") | {
        f"b.{at}.attn.to_qkv.{part}": shape for at in range(3) for part, shape in (("weight", (24, 8)), ("bias", (24,)))
    }
    found = suggest(model, fused)
    assert found.is_complete and any(isinstance(step, Split) for step in found.key_map.steps)
    starts = {item.target: getattr(item.tensor, "start", None) for item in found.key_map.plan(fused)}
    assert [starts[f"b.0.attn.{part}.weight"] for part in "qkv"] == [0, 8, 16]
    back = suggest(fused, model)
    assert back.is_complete and any(isinstance(step, Fuse) for step in back.key_map.steps)
    assert back.mapping["b.1.attn.to_qkv.bias"] == tuple(f"b.1.attn.{part}.bias" for part in "qkv")


def test_fused_projections_without_such_a_name_are_left_open_with_a_word_on_what_they_may_be():
    model = block("b.#.attn.q", "b.#.attn.k", "b.#.attn.v", "b.#.attn.o")
    fused = block("b.#.attn.o") | {f"b.{at}.attn.in_proj.weight": (24, 8) for at in range(3)}
    found = suggest(model, fused)
    assert {key for key in found.mapping if key.endswith("weight")} <= {f"b.{at}.attn.o.weight" for at in range(3)}
    assert "may be fused with it or split from it, but no name says in which order" in found.report()


def test_square_matrices_are_transposed_with_the_others_or_left_open():
    model = {"b.0.up.weight": (16, 8), "b.0.up.bias": (16,), "b.0.q.weight": (8, 8)}
    turned = {"b.0.up.weight": (8, 16), "b.0.up.bias": (16,), "b.0.q.weight": (8, 8)}
    found = suggest(model, turned)
    assert found.is_complete
    assert {step.pattern for step in found.key_map.steps if isinstance(step, Transpose)} == {
        "b.0.up.weight",
        "b.0.q.weight",
    }
    model["b.0.in.weight"] = turned["b.0.in.weight"] = (5, 8)
    assert "b.0.q.weight" not in suggest(model, turned).mapping


def test_a_tensor_with_a_worse_name_does_not_take_the_place_of_one_that_is_left():
    model = {"b.0.m.1.weight": (4, 8), "b.0.m.2.weight": (24, 4)}
    checkpoint = {"c.0.m.1.weight": (4, 8), "c.0.m.1.ema": (24, 4), "c.0.m.2.weight": (24, 4), "c.0.m.2.ema": (24, 4)}
    assert "b.0.m.2.weight" not in suggest(model, checkpoint).mapping


def test_what_the_model_does_not_have_is_dropped_by_name_and_what_the_checkpoint_lacks_is_listed():
    model = block("b.#.q", "b.#.o") | {"head": (3, 8), "new": (7,)}
    checkpoint = block("b.#.to_q", "b.#.to_out") | {"head": (3, 8), "iteration": ()}
    found = suggest(model, checkpoint)
    assert found.mapping.keys() == model.keys() - {"new"}
    assert [step for step in found.key_map.steps if isinstance(step, Drop)] == [
        Drop("iteration", "the model has no tensor of shape [] there")
    ]
    assert {(rest.side, rest.keys) for rest in found.remaining} == {("model", ("new",)), ("checkpoint", ("iteration",))}


def test_a_checkpoint_in_the_models_own_names_is_taken_as_it_is_whatever_is_missing_or_too_much():
    model = layer_norms("b.0.norm1", "b.0.norm3", "b.0.norm2")
    more = {"step": ()} | model
    assert suggest(model, more).mapping == {key: (key,) for key in model}
    assert suggest(model, more).remaining[0].keys == ("step",)
    assert suggest(more, model).mapping == {key: (key,) for key in model}


def test_two_tied_tables_for_one_place_are_not_chosen_between():
    found = suggest(header("umt5-xxl-encoder.native"), header("umt5-xxl-encoder.transformers"))
    assert "token_embedding.weight" not in found.mapping
    [rest] = [rest for rest in found.remaining if "token_embedding.weight" in rest.keys]
    assert set(rest.candidates) == {"shared.weight", "encoder.embed_tokens.weight"}


def test_a_model_that_is_another_one_is_not_forced_into_place():
    found = suggest(header("wan2.1-t2v-1.3b.native"), header("wan2.1-vae.native"))
    assert found.mapping == {}


def test_the_source_it_prints_is_the_transform():
    model, checkpoint = header("wan2.1-t2v-1.3b.native"), header("wan2.1-t2v-1.3b.diffusers")
    names: dict[str, Callable[[Header], Header]] = {}
    exec(suggest(model, checkpoint).source(), names)
    assert names["transform"](checkpoint) == model


def test_rules_that_rename_in_a_ring_do_not_run_into_each_other():
    model = {"a.x.weight": (3, 4), "b.x.weight": (5, 4), "c.x.weight": (7, 4), "c.y": (6,)}
    ring = {key.translate(str.maketrans("abc", "bca")): shape for key, shape in model.items()}
    found = suggest(model, ring)
    assert found.is_complete and found.key_map.shapes(ring) == model


def test_shapes_that_say_that_two_names_were_swapped_are_not_believed():
    """A transposed checkpoint looks like this where two layers have opposite shapes."""
    model = {"fc1.weight": (4, 2), "fc2.weight": (2, 4), "norm.weight": (2,)}
    turned = {"fc1.weight": (2, 4), "fc2.weight": (4, 2), "norm.weight": (2,)}
    found = suggest(model, turned)
    assert found.mapping == {"norm.weight": ("norm.weight",)}
    assert "is the checkpoint transposed?" in found.report()


@pytest.mark.parametrize(
    "checkpoint", [{}, {"": (1,)}, {"a": (2,), "a.b": (2,)}, {"..": (2, 2)}, {"0": ()}, {"a": (0, 3)}]
)
def test_odd_headers_are_no_crash(checkpoint: Header):
    assert suggest({"a": (2,), "b.c": (2, 2)}, checkpoint).total == 2
    assert suggest(checkpoint, {"a": (2,), "b.c": (2, 2)}).total == len(checkpoint)
