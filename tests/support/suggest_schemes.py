"""Checkpoints in naming schemes that nobody wrote, drawn from a seed, of models whose right mapping is thereby known.

    python tests/support/suggest_schemes.py --first 1000 --count 300

counts how `flashdreams checkpoint suggest` does on them; the exit status is 1 if a single tensor is mapped wrongly.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from flashdreams.core.checkpoint.keymap_tensors import Planned, Slice, Source, Swap
from flashdreams.core.checkpoint.suggest import Suggestion, suggest
from suggest_changes import CHANGES, DIALECTS, Scheme, fuse, split
from suggest_models import Shape, Speller, Tensor, draw_plan

DATA = Path(__file__).parents[1] / "checkpoint" / "data"
Header = dict[str, Shape]
Place = tuple[tuple[str, ...], int | None, bool]
"""Keys of the checkpoint, the first row taken from them where they hold more, and whether they are transposed."""

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


@dataclass(frozen=True)
class Case:
    """``right`` has, for every key of the model that the checkpoint holds, the places that are right."""

    model: Header
    checkpoint: Header
    right: dict[str, set[Place]]
    how: tuple[str, ...]


@functools.cache
def published(name: str) -> tuple[Tensor, ...]:
    """A model with three blocks to a list; more are the same again."""
    manifest = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    short = re.compile(r"(?:^|\.)(?:blocks|layers|transformer)\.(\d+)\.|_blocks\.(\d+)\.")
    found = {key: (short.search(key), tuple(entry["shape"])) for key, entry in manifest["tensors"].items()}
    return tuple(
        Tensor(key, shape, (key,))
        for key, (match, shape) in found.items()
        if not match or int(match[1] or match[2]) < 3
    )


def generate(seed: int) -> Case:
    rng = random.Random(seed)
    how: list[str] = []
    if rng.random() < 0.4:
        name = rng.choice(MODELS)
        model = list(published(name))
        scheme = Scheme(list(model), rng, in_order=False)
        changes = [*([rng.choice((fuse, split))] if rng.random() < 0.4 else []), rng.choice(DIALECTS)]
        how.append(name)
    else:
        plan = draw_plan(rng)
        first, second = Speller(plan, rng, ordinary=True), Speller(plan, rng)
        if not first.gate_first:  # which of two numbered layers is the gate, only the order of running tells
            second.gated = next(words for words in (second.gated, ("gate", "fc1", "fc2")) if words[0] != "wi_0")
        model = first.spell()
        scheme = Scheme(second.spell(), rng, in_order=True)
        changes = [rng.choice(DIALECTS)] if rng.random() < 0.3 else []
        how.append("invented")
        if len({tensor.key for tensor in model}) < len(model) or not scheme.is_valid:
            return generate(seed + 1_000_000)
    if rng.random() < 0.15:
        model.sort(key=lambda tensor: tensor.key)
        how.append("alphabetical")
    for change in (*changes, *(change for change in CHANGES if rng.random() < 0.12)):
        before = list(scheme.tensors)
        change(scheme)
        if scheme.is_valid:
            how.append(change.__name__)
        else:
            scheme.tensors = before
    rng.shuffle(scheme.tensors)
    return Case(
        {tensor.key: tensor.shape for tensor in model},
        {tensor.key: tensor.shape for tensor in scheme.tensors},
        _right(model, scheme.tensors),
        tuple(how),
    )


def _right(model: list[Tensor], checkpoint: list[Tensor]) -> dict[str, set[Place]]:
    homes: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in checkpoint:
        for part in tensor.holds:
            homes[part].append(tensor)
    right: dict[str, set[Place]] = defaultdict(set)
    for target in model:
        parts = sorted({part for part in homes if part.partition("@")[0] == target.holds[0]})
        if len(target.holds) > 1 or parts and "@" in parts[0]:  # each part from a tensor that holds nothing else
            parts = list(target.holds) if len(target.holds) > 1 else parts
            whole = [tensor for tensor in homes[parts[0]] if tensor.holds == target.holds]
            alone = [[tensor for tensor in homes[part] if tensor.holds == (part,)] for part in parts]
            for tensor in whole:
                right[target.key].add(((tensor.key,), None, tensor.turned))
            for tensors in itertools.product(*alone) if not whole else ():  # of a tied part, either copy is right
                right[target.key].add((tuple(tensor.key for tensor in tensors), None, tensors[0].turned))
            continue
        for tensor in homes[target.holds[0]]:
            at = tensor.holds.index(target.holds[0])
            rows = (tensor.shape[::-1] if tensor.turned else tensor.shape)[:1]
            start = None if len(tensor.holds) == 1 else at * rows[0] // len(tensor.holds)
            right[target.key].add(((tensor.key,), start, tensor.turned))
    return dict(right)


def place_of(planned: Planned) -> Place:
    start, turned, tensor = None, False, planned
    while not isinstance(tensor, Source) and hasattr(tensor, "of"):
        start = tensor.start if isinstance(tensor, Slice) else start
        turned ^= isinstance(tensor, Swap)
        tensor = tensor.of
    parts = getattr(tensor, "parts", ())
    turned ^= any(place_of(part)[2] for part in parts)
    return planned.sources, start, turned


def places(found: Suggestion, checkpoint: Header) -> dict[str, Place]:
    return {item.target: place_of(item.tensor) for item in found.key_map.plan(checkpoint)}


def wrong(case: Case, found: Suggestion) -> dict[str, tuple[Place, set[Place]]]:
    """What is mapped otherwise than it should be: key of the model, what was said, what is right."""
    said, shapes = places(found, case.checkpoint), found.key_map.shapes(case.checkpoint)
    return {
        key: (place, case.right.get(key, set()))
        for key, place in said.items()
        if not _is_right(place, case.right.get(key, set()), shapes[key]) or shapes[key] != case.model.get(key)
    }


def _is_right(place: Place, right: set[Place], shape: Shape) -> bool:
    """Whether it is one of ``right``; a vector is what it is transposed."""
    if sum(size > 1 for size in shape) < 2:
        return place[:2] in {one[:2] for one in right}
    return place in right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    keys = [0, 0]
    start = time.process_time()
    for seed in range(arguments.first, arguments.first + arguments.count):
        case = generate(seed)
        found = suggest(case.model, case.checkpoint)
        faults = wrong(case, found)
        keys[0] += len(found.mapping)
        keys[1] += len(case.right)
        left = {key for rest in found.remaining for key in rest.keys}
        if faults:
            counts["wrong"] += 1
            print(f"seed {seed}: {', '.join(case.how)}: {len(faults)} wrong, such as", *next(iter(faults.items())))
        elif case.model.keys() - found.mapping.keys() - left:
            counts["keys left unsaid"] += 1
            print(f"seed {seed}: {', '.join(case.how)}: left open, but not reported")
        else:
            counts["complete" if len(found.mapping) == len(case.right) else "open in part"] += 1
    print(f"{arguments.count} schemes: {dict(counts)}; {keys[0]} of {keys[1]} tensors mapped")
    print(f"{time.process_time() - start:.0f} s of one core")
    return 1 if counts["wrong"] or counts["keys left unsaid"] else 0


if __name__ == "__main__":
    sys.exit(main())
