"""What is done to the names (and the layout) of a checkpoint to make it one that nobody has seen."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from suggest_models import Tensor

Rename = Callable[[str], str]
PARAMETERS = ("weight", "bias", "gamma")

SYNONYMS = (
    ("q", "query", "to_q", "q_proj", "wq", "q_lin"),
    ("k", "key", "to_k", "k_proj", "wk", "k_lin"),
    ("v", "value", "to_v", "v_proj", "wv", "v_lin"),
    ("o", "output", "to_out.0", "out_proj", "wo", "out"),
    ("self_attn", "self_attention", "attn1", "sa", "SelfAttention", "self_attn.inner"),
    ("cross_attn", "cross_attention", "attn2", "ca", "EncDecAttention", "cross_attn.inner"),
    ("norm_q", "query_norm", "q_norm", "ln_q", "qnorm", "q_layernorm"),
    ("norm_k", "key_norm", "k_norm", "ln_k", "knorm", "k_layernorm"),
    ("k_img", "image_k", "add_k_proj", "k_image", "wk_img", "k_img"),
    ("v_img", "image_v", "add_v_proj", "v_image", "wv_img", "v_img"),
    ("norm1", "ln_1", "layer_norm1", "attn_norm", "norm_1", "pre_attn_norm"),
    ("norm2", "ln_2", "layer_norm2", "ffn_norm", "norm_2", "pre_ffn_norm"),
    ("ffn", "mlp", "ff", "feed_forward", "MLP", "ffn.net"),
    ("blocks", "layers", "transformer_blocks", "h", "block", "stages"),
)


def numberless(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def home(key: str) -> str:
    return key.rpartition(".")[0]


@dataclass
class Scheme:
    """A checkpoint in the making; ``in_order``: as the parts of the model run, so that counting them says something."""

    tensors: list[Tensor]
    rng: random.Random
    in_order: bool

    @property
    def is_valid(self) -> bool:
        return len({tensor.key for tensor in self.tensors}) == len(self.tensors)

    def rename(self, rename: Rename) -> None:
        self.tensors = [replace(tensor, key=rename(tensor.key)) for tensor in self.tensors]

    def rename_parts(self, rename: Rename) -> None:
        self.rename(lambda key: ".".join(part if part.isdecimal() else rename(part) for part in key.split(".")))

    def parts(self) -> list[str]:
        """Every part of a key that is no number and no common name of a parameter."""
        found = {part for tensor in self.tensors for part in tensor.key.split(".") if not part.isdecimal()}
        return sorted(found - {*PARAMETERS})

    def modules(self) -> list[str]:
        """Every module that has tensors of its own, whatever the numbers."""
        return sorted({numberless(home(tensor.key)) for tensor in self.tensors if "." in tensor.key})

    def lists(self) -> list[str]:
        """Every part that is followed by numbers from 0 on, at least two of them."""
        items: dict[str, set[int]] = defaultdict(set)
        for tensor in self.tensors:
            for name, number in re.findall(r"(?:^|\.)([A-Za-z_]\w*)\.(\d+)(?=\.)", tensor.key):
                items[name].add(int(number))
        return sorted(name for name, numbers in items.items() if numbers == {*range(len(numbers))} and len(numbers) > 1)

    def nonsense(self) -> str:
        return "".join(self.rng.choice("bdfgmnprstz") + self.rng.choice("aeiou") for _ in range(3))


def unchanged(scheme: Scheme) -> None:
    """Names as they are, so that only what is done to them afterwards counts."""


def synonyms(scheme: Scheme) -> None:
    style = scheme.rng.randrange(1, len(SYNONYMS[0]))
    known = {row[0]: row[style] for row in SYNONYMS}
    scheme.rename_parts(lambda part: known.get(part, part))


def mixed_synonyms(scheme: Scheme) -> None:
    known = {row[0]: scheme.rng.choice(row) for row in SYNONYMS}
    scheme.rename_parts(lambda part: known.get(part, part))


def nonsense(scheme: Scheme) -> None:
    made = {part: scheme.nonsense() for part in scheme.parts()}
    scheme.rename_parts(lambda part: made.get(part, part))


def some_nonsense(scheme: Scheme) -> None:
    made = {part: scheme.nonsense() for part in scheme.parts() if scheme.rng.random() < 0.3}
    scheme.rename_parts(lambda part: made.get(part, part))


def labels(scheme: Scheme) -> None:
    """Numbered names whose numbers mean nothing."""
    parts = scheme.parts()
    scheme.rng.shuffle(parts)
    made = {part: f"m{number}" for number, part in enumerate(parts)}
    scheme.rename_parts(lambda part: made.get(part, part))


def labels_in_every_module(scheme: Scheme) -> None:
    """The same, counted anew in every module, so that one label has many meanings; or places in lists."""
    children: dict[str, list[str]] = {}
    for tensor in scheme.tensors:
        path = tensor.key.split(".")
        for at, part in enumerate(path):
            known = children.setdefault(numberless(".".join(path[:at])), [])
            if part not in known and not part.isdecimal() and part not in PARAMETERS:
                known.append(part)
    label = scheme.rng.choice(("c{}", "layer{}", "{}" if scheme.in_order else "c{}"))
    for known in children.values():
        if label != "{}" and len(known) > 2:  # two things that are counted are in order, and so are places in lists
            scheme.rng.shuffle(known)

    def rename(key: str) -> str:
        path = key.split(".")
        modules = [children[numberless(".".join(path[:at]))] for at in range(len(path))]
        return ".".join(
            label.format(known.index(part)) if part in known else part
            for part, known in zip(path, modules, strict=True)
        )

    scheme.rename(rename)


def camel_case(scheme: Scheme) -> None:
    scheme.rename_parts(lambda part: "".join(word[:1].upper() + word[1:] for word in part.split("_")))


def shortened(scheme: Scheme) -> None:
    length = scheme.rng.randint(2, 5)
    scheme.rename_parts(lambda part: part if part in PARAMETERS else re.sub("[a-z]+", lambda w: w[0][:length], part))


def without_vowels(scheme: Scheme) -> None:
    scheme.rename_parts(lambda part: part if part in PARAMETERS else re.sub("(?<=[a-z])[aeiou]", "", part))


def fuse(scheme: Scheme) -> None:
    """Queries, keys and values in one tensor, in some order; sometimes under a name that does not say so."""
    order, name = scheme.rng.choice(
        (
            *(("qkv", name) for name in ("qkv", "to_qkv", "Wqkv", "query_key_value", "in_proj", "c_attn")),
            *(("kv", name) for name in ("kv", "to_kv", "key_value")),
            *(("kqv", name) for name in ("kqv", "key_query_value", "in_proj")),
            *(("vqk", name) for name in ("vqk", "w_vqk", "proj_in")),
        )
    )
    rows: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor in scheme.tensors:
        found = re.fullmatch(r"(.*\.)(?:to_)?([qkv])(?:_proj)?(\.\w+)", tensor.key)
        if found:
            rows[found[1] + name + found[3]][found[2]] = tensor
    for key, parts in rows.items():
        old = [parts[part] for part in order if part in parts]
        if len(old) == len(order) and len({tensor.shape for tensor in old}) == 1:
            scheme.tensors = [tensor for tensor in scheme.tensors if tensor not in old]
            shape = (len(old) * old[0].shape[0], *old[0].shape[1:])
            scheme.tensors.append(Tensor(key, shape, tuple(part for tensor in old for part in tensor.holds)))


def split(scheme: Scheme) -> None:
    """What the model keeps as one ``qkv``, in three."""
    names = scheme.rng.choice(("q k v", "to_q to_k to_v", "query key value", "part0 part1 part2")).split()
    for tensor in list(scheme.tensors):
        found = re.fullmatch(r"(.*\.)(?:to_)?qkv(\.\w+)", tensor.key)
        if found:
            scheme.tensors.remove(tensor)
            shape = (tensor.shape[0] // 3, *tensor.shape[1:])
            for at, name in enumerate(names):
                scheme.tensors.append(Tensor(found[1] + name + found[2], shape, (f"{tensor.holds[0]}@{at}",)))


def wrap(scheme: Scheme) -> None:
    prefix = scheme.rng.choice(("model.", "module.model.", "net._orig_mod.", "student.network.", "state.0."))
    inside = scheme.rng.choice(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_shell", "inner"))
    where = set(scheme.rng.sample(scheme.parts(), min(3, len(scheme.parts()))))

    def rename(key: str) -> str:
        *modules, name = (prefix + key).split(".")
        return ".".join([*(part + f".{inside}" if part in where else part for part in modules), name])

    scheme.rename(rename)


def renumber(scheme: Scheme) -> None:
    """All lists from 1, or with leading zeros."""
    how = scheme.rng.choice((lambda number: f"{number + 1}", lambda number: f"{number:03d}"))
    scheme.rename(lambda key: ".".join(how(int(part)) if part.isdecimal() else part for part in key.split(".")))


def add_buffers(scheme: Scheme) -> None:
    chosen, shape = scheme.rng.choice(scheme.modules()), scheme.rng.choice(scheme.tensors).shape
    name = scheme.rng.choice(("ema", "running_mean", "inv_freq", "weight_scale", "mask"))
    places = {home(tensor.key) for tensor in scheme.tensors}
    scheme.tensors += [Tensor(f"{place}.{name}", shape, ()) for place in places if numberless(place) == chosen]
    scheme.tensors.append(Tensor("step_count", (), ()))


def lose_a_module(scheme: Scheme) -> None:
    chosen = scheme.rng.choice(scheme.modules())
    scheme.tensors = [tensor for tensor in scheme.tensors if numberless(home(tensor.key)) != chosen]


def flatten(scheme: Scheme) -> None:
    """Modules between a block and its tensors written as one name, or all that is written with dots."""
    mark = scheme.rng.choice(("_", "_", "/", "-"))
    whole = scheme.rng.random() < 0.2
    inner = r"\." if whole else r"(?<=[a-zA-Z])\.(?=[a-zA-Z]\w*\.)"
    scheme.rename(lambda key: re.sub(inner, mark, key))


def join_index(scheme: Scheme) -> None:
    """``blocks.0.`` -> ``blocks_0.``"""
    mark = scheme.rng.choice(("_", "", "-"))
    scheme.rename(lambda key: re.sub(r"(?<=[a-zA-Z])\.(?=\d+\.)", mark, key, count=1))


def index_last(scheme: Scheme) -> None:
    """``blocks.0.attn.q.weight`` -> ``blocks.attn.q.0.weight``: a list of every part."""
    name = scheme.rng.choice(scheme.lists() or ["none"])
    scheme.rename(lambda key: re.sub(rf"(^|\.){name}\.(\d+)\.(.*)\.(\w+)$", rf"\1{name}.\3.\2.\4", key))


def cut_list(scheme: Scheme) -> None:
    """A list in two: ``blocks.0-2`` -> ``early.0-1``, ``late.0``."""
    name = scheme.rng.choice(scheme.lists() or ["none"])
    first, second = scheme.rng.choice((("early", "late"), ("blocks_a", "blocks_b"), ("encoder", "decoder")))

    def rename(match: re.Match[str]) -> str:
        number = int(match[2])
        return f"{match[1]}{first}.{number}." if number < 2 else f"{match[1]}{second}.{number - 2}."

    scheme.rename(lambda key: re.sub(rf"(^|\.){name}\.(\d+)\.", rename, key))


def turn_matrices(scheme: Scheme) -> None:
    """Matrices transposed: all, or those of some lists, or some of a list (but so that one sees that it varies)."""
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for t in scheme.tensors:
        if len(t.shape) == 2 and t.key.endswith("weight") and "@" not in "".join(t.holds):
            before, number, _ = numberless(t.key).partition(".#.")
            groups[before if number else ""].append(t)
    turned: set[Tensor] = set()
    how = scheme.rng.choice(("all", "lists", "some"))
    for group in groups.values():
        modules = sorted({numberless(home(t.key)) for t in group})
        chosen = {module for module in modules if scheme.rng.random() < 0.5}
        some = {t for t in group if numberless(home(t.key)) in chosen}
        shapes = {t.shape for t in group}
        varies = all(any(t.shape[::-1] not in shapes for t in part) for part in (some, {*group} - some))
        if how == "all" or how == "lists" and scheme.rng.random() < 0.5:
            turned |= {*group}
        elif how == "some" and varies:
            turned |= some
    scheme.tensors = [replace(t, shape=t.shape[::-1], turned=True) if t in turned else t for t in scheme.tensors]


def as_convolutions(scheme: Scheme) -> None:
    ones = scheme.rng.choice(((1,), (1, 1), (1, 1, 1)))
    chosen = {module for module in scheme.modules() if scheme.rng.random() < 0.5}
    scheme.tensors = [
        replace(t, shape=(*t.shape, *ones)) if len(t.shape) == 2 and numberless(home(t.key)) in chosen else t
        for t in scheme.tensors
    ]


def tie(scheme: Scheme) -> None:
    """A tensor a second time, under another name."""
    tensor = scheme.rng.choice(scheme.tensors)
    scheme.tensors.append(replace(tensor, key=scheme.rng.choice(("shared.weight", f"{home(tensor.key)}.tied", "wte"))))


def add_lora(scheme: Scheme) -> None:
    chosen = {module for module in scheme.modules() if scheme.rng.random() < 0.3}
    rank = scheme.rng.choice((4, 16, 64))
    for t in list(scheme.tensors):
        if len(t.shape) == 2 and numberless(home(t.key)) in chosen and t.key.endswith(".weight"):
            scheme.tensors.remove(t)
            scheme.tensors.append(replace(t, key=f"{home(t.key)}.base_layer.weight"))
            scheme.tensors.append(Tensor(f"{home(t.key)}.lora_A.default.weight", (rank, t.shape[1]), ()))
            scheme.tensors.append(Tensor(f"{home(t.key)}.lora_B.default.weight", (t.shape[0], rank), ()))


def weight_norm(scheme: Scheme) -> None:
    """Weights in two parts, of which neither is the weight."""
    chosen = {module for module in scheme.modules() if scheme.rng.random() < 0.3}
    names = scheme.rng.choice(
        (("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1"))
    )
    for t in list(scheme.tensors):
        if len(t.shape) >= 2 and numberless(home(t.key)) in chosen and t.key.endswith(".weight"):
            scheme.tensors.remove(t)
            scheme.tensors.append(Tensor(f"{home(t.key)}.{names[0]}", (t.shape[0], *[1] * (len(t.shape) - 1)), ()))
            scheme.tensors.append(Tensor(f"{home(t.key)}.{names[1]}", t.shape, ()))


def average(scheme: Scheme) -> None:
    """A second copy of everything, which is the average of the weights."""
    first, second = scheme.rng.choice(
        (("model", "ema"), ("model", "model_ema"), ("generator", "generator_ema"), ("online", "target"))
    )
    copies = [Tensor(f"{second}.{tensor.key}", tensor.shape, ()) for tensor in scheme.tensors]
    scheme.rename(lambda key: f"{first}.{key}")
    scheme.tensors += copies


DIALECTS = (
    unchanged,
    synonyms,
    mixed_synonyms,
    mixed_synonyms,
    camel_case,
    shortened,
    without_vowels,
    some_nonsense,
    nonsense,
    labels,
    labels_in_every_module,
)
CHANGES = (  # in this order: what was lost cannot show how the rest is turned
    lose_a_module,
    weight_norm,
    turn_matrices,
    as_convolutions,
    add_lora,
    add_buffers,
    tie,
    cut_list,
    index_last,
    renumber,
    flatten,
    join_index,
    wrap,
    average,
)
