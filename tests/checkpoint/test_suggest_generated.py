"""`suggest` on naming schemes nobody wrote: drawn from a seed, of models whose right mapping is thereby known.

What cannot be told (names replaced by nonsense, say) may be left open. A wrong mapping is never allowed.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashdreams.core.checkpoint.suggest import Suggestion, suggest

pytestmark = pytest.mark.ci_cpu

DATA = Path(__file__).parent / "data"
Header = dict[str, tuple[int, ...]]
Place = tuple[str, int | None]  # key of the checkpoint, first row in it if that is fused
Rename = Callable[[str], str]

MODELS = (
    "wan2.1-t2v-1.3b.native",
    "wan2.1-i2v-14b-480p.native",
    "wan2.1-i2v-14b-480p.diffusers",
    "cosmos-predict2.5-2b.native",
    "cosmos-predict2.5-2b.diffusers",
    "umt5-xxl-encoder.native",
    "clip-vit-h14-vision-proj.transformers4",
    "clip-xlmr-vit-h14-full.native",
    "matrix-game-2.universal",
    "lingbot-world-act.native",
    "wan2.2-vae.native",
    "taew2_1",
)
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


@functools.cache
def model_header(name: str) -> Header:
    """A model with three blocks to a list; more are the same again."""
    manifest = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    short = re.compile(r"(?:^|\.)(?:blocks|layers|transformer)\.(\d+)\.|_blocks\.(\d+)\.")
    found = {key: (short.search(key), tuple(entry["shape"])) for key, entry in manifest["tensors"].items()}
    return {key: shape for key, (match, shape) in found.items() if not match or int(match[1] or match[2]) < 3}


@dataclass
class Scheme:
    """A checkpoint in the making: key, shape and the model's keys that are in it, for every tensor."""

    tensors: list[tuple[str, tuple[int, ...], list[str]]]
    rng: random.Random

    def rename_parts(self, rename: Rename) -> None:
        self.rename(lambda key: ".".join(part if part.isdecimal() else rename(part) for part in key.split(".")))

    def rename(self, rename: Rename) -> None:
        self.tensors = [(rename(key), shape, targets) for key, shape, targets in self.tensors]

    def parts(self) -> list[str]:
        """Every part of a key that is no number and no common name of a parameter."""
        found = {part for key, _, _ in self.tensors for part in key.split(".") if not part.isdecimal()}
        return sorted(found - {"weight", "bias", "gamma"})

    def nonsense(self) -> str:
        return "".join(self.rng.choice("bdfgmnprstz") + self.rng.choice("aeiou") for _ in range(3))


def unchanged(scheme: Scheme) -> None:
    """Names as they are, so that only what is done to them afterwards counts."""


def synonyms(scheme: Scheme) -> None:
    style = scheme.rng.randrange(1, len(SYNONYMS[0]))
    known = {row[0]: row[style] for row in SYNONYMS}
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
    """The same, counted anew in every module, so that one label has many meanings."""
    children: dict[str, list[str]] = {}
    for key, _, _ in scheme.tensors:
        path = key.split(".")
        for at, part in enumerate(path):
            known = children.setdefault(re.sub(r"\d+", "#", ".".join(path[:at])), [])
            if part not in known and not part.isdecimal() and part not in ("weight", "bias", "gamma"):
                known.append(part)
    for known in children.values():
        scheme.rng.shuffle(known)

    def rename(key: str) -> str:
        path = key.split(".")
        modules = [children[re.sub(r"\d+", "#", ".".join(path[:at]))] for at in range(len(path))]
        return ".".join(f"c{known.index(part)}" if part in known else part for part, known in zip(path, modules))

    scheme.rename(rename)


def camel_case(scheme: Scheme) -> None:
    scheme.rename_parts(lambda part: "".join(word[:1].upper() + word[1:] for word in part.split("_")))


def shortened(scheme: Scheme) -> None:
    length = scheme.rng.randint(2, 5)
    made = {part: re.sub("[a-z]+", lambda word: word[0][:length], part) for part in scheme.parts()}
    if len(set(made.values())) == len(made):
        scheme.rename_parts(lambda part: made.get(part, part))


def fuse(scheme: Scheme) -> None:
    """Queries, keys and values in one tensor; sometimes under a name that does not say so."""
    name = scheme.rng.choice(("qkv", "to_qkv", "Wqkv", "query_key_value", "in_proj"))
    rows: dict[str, dict[str, int]] = {}
    for at, (key, _, _) in enumerate(scheme.tensors):
        found = re.fullmatch(r"(.*\.)(?:to_)?([qkv])(?:_proj)?(\.\w+)", key)
        if found:
            rows.setdefault(found[1] + name + found[3], {})[found[2]] = at
    gone: set[int] = set()
    for key, parts in rows.items():
        old = [scheme.tensors[parts[part]] for part in "qkv" if part in parts]
        if len(old) == 3 and len({shape for _, shape, _ in old}) == 1:
            gone |= set(parts.values())
            shape = (sum(shape[0] for _, shape, _ in old), *old[0][1][1:])
            scheme.tensors.append((key, shape, [target for _, _, targets in old for target in targets]))
    scheme.tensors = [tensor for at, tensor in enumerate(scheme.tensors) if at not in gone]


def wrap(scheme: Scheme) -> None:
    prefix = scheme.rng.choice(("model.", "module.model.", "net._orig_mod.", "student.network."))
    inside = scheme.rng.choice(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_shell"))
    where = set(scheme.rng.sample(scheme.parts(), 3))
    scheme.rename(lambda key: prefix + key)

    def rename(key: str) -> str:
        *modules, name = key.split(".")
        return ".".join([*(part + f".{inside}" if part in where else part for part in modules), name])

    scheme.rename(rename)


def renumber(scheme: Scheme) -> None:
    """All lists from 1, or with leading zeros."""
    how = scheme.rng.choice((lambda number: f"{number + 1}", lambda number: f"{number:03d}"))
    scheme.rename(lambda key: ".".join(how(int(part)) if part.isdecimal() else part for part in key.split(".")))


def add_buffers(scheme: Scheme) -> None:
    modules = sorted({re.sub(r"\d+", "#", key.rpartition(".")[0]) for key, _, _ in scheme.tensors if "." in key})
    chosen, shape = scheme.rng.choice(modules), scheme.rng.choice(scheme.tensors)[1]
    places = {key.rpartition(".")[0] for key, _, _ in scheme.tensors}
    scheme.tensors += [(f"{place}.ema", shape, []) for place in places if re.sub(r"\d+", "#", place) == chosen]
    scheme.tensors.append(("iteration", (), []))


def lose_a_module(scheme: Scheme) -> None:
    modules = sorted({re.sub(r"\d+", "#", key.rpartition(".")[0]) for key, _, _ in scheme.tensors})
    chosen = scheme.rng.choice(modules)
    scheme.tensors = [
        tensor for tensor in scheme.tensors if re.sub(r"\d+", "#", tensor[0].rpartition(".")[0]) != chosen
    ]


DIALECTS = (
    unchanged,
    synonyms,
    synonyms,
    camel_case,
    shortened,
    some_nonsense,
    nonsense,
    labels,
    labels_in_every_module,
)
CHANGES = (wrap, renumber, add_buffers, lose_a_module)


def generate(seed: int) -> tuple[Header, Header, dict[str, Place], str]:
    """A model, a checkpoint of it, where each of its tensors is in that, and how the names came about."""
    rng = random.Random(seed)
    model = model_header(MODELS[seed % len(MODELS)])
    scheme = Scheme([(key, shape, [key]) for key, shape in model.items()], rng)
    done = [*([fuse] if rng.random() < 0.3 else []), rng.choice(DIALECTS)]
    done += [change for change in CHANGES if rng.random() < 0.25]
    for change in done:
        change(scheme)
    rng.shuffle(scheme.tensors)
    checkpoint = {key: shape for key, shape, _ in scheme.tensors}
    assert len(checkpoint) == len(scheme.tensors), "the generator made one key twice"
    right: dict[str, Place] = {}
    for key, _, targets in scheme.tensors:
        start = 0
        for target in targets:
            right[target] = key, start if len(targets) > 1 else None
            start += model[target][0] if model[target] else 0
    return model, checkpoint, right, ", ".join([MODELS[seed % len(MODELS)], *(change.__name__ for change in done)])


def places(found: Suggestion, checkpoint: Header) -> dict[str, Place]:
    items = found.key_map.plan(checkpoint)
    return {item.target: (item.sources[0], getattr(item.tensor, "start", None)) for item in items}


@pytest.mark.parametrize("first", range(0, 72, 12))
def test_no_scheme_is_mapped_wrongly(first: int):
    for seed in range(first, first + 12):
        model, checkpoint, right, how = generate(seed)
        found = suggest(model, checkpoint)
        said = places(found, checkpoint)
        assert said.keys() == found.mapping.keys()
        wrong = {key: (place, right.get(key)) for key, place in said.items() if place != right.get(key)}
        assert wrong == {}, f"seed {seed}: {how}"
        remaining = {key for rest in found.remaining for key in rest.keys}
        assert remaining >= model.keys() - said.keys(), "every key that is left open is listed"


def test_names_that_mean_something_are_nearly_all_understood():
    counts = {True: [0, 0], False: [0, 0]}
    for seed in range(100, 124):
        model, checkpoint, right, how = generate(seed)
        meaningful = not re.search("nonsense|labels|shortened|lose|add_buffers|fuse", how)
        count = counts[meaningful]
        count[0] += len(suggest(model, checkpoint).mapping)
        count[1] += len(right)
    assert counts[True][0] >= 0.9 * counts[True][1] > 0
    assert counts[False][0] >= 0.4 * counts[False][1] > 0


def test_the_test_notices_a_wrong_mapping():
    model, checkpoint, right, _ = generate(12)
    said = places(suggest(model, checkpoint), checkpoint)
    assert all(place == right[key] for key, place in said.items())
    first, second = sorted(said)[:2]
    said[first], said[second] = said[second], said[first]
    assert sum(place != right[key] for key, place in said.items()) == 2
