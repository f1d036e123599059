"""A key map proposed for a checkpoint and a model that have never been seen: from names and shapes alone.

The evidence is what holds the same tensors (in a block, in a layer), the words that names share, and the order of
numbers; there is no list of known models. What the evidence leaves open is said, not guessed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flashdreams.core.checkpoint.keymap import KeyMap, Step
from flashdreams.core.checkpoint.keymap_steps import Drop, Strip
from flashdreams.core.checkpoint.keymap_tensors import Shape, shape_of
from flashdreams.core.checkpoint.suggest_entries import entries_of, patterns_for
from flashdreams.core.checkpoint.suggest_match import Matcher
from flashdreams.core.checkpoint.suggest_outcome import Doubt, Link, Match
from flashdreams.core.checkpoint.suggest_rules import make_rules
from flashdreams.core.checkpoint.suggest_tree import Node, build_tree
from flashdreams.core.checkpoint.suggest_words import template_of


@dataclass(frozen=True)
class Remaining:
    """Keys that were not mapped, and why. ``candidates`` are what each of them may be."""

    keys: tuple[str, ...]
    side: str
    """``"checkpoint"`` or ``"model"``."""
    why: str
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suggestion:
    """What was found.

    Attributes:
        key_map: turns the checkpoint's keys into the model's; keys in doubt are dropped, so that loading stops on them.
        mapping: for every model key that was found, the checkpoint keys it is made of.
        total: how many keys the model has.
        remaining: what is open, on both sides.
        evidence: one line for each decision, with the number of tensors that rest on it.
    """

    key_map: KeyMap
    mapping: Mapping[str, tuple[str, ...]]
    total: int
    remaining: tuple[Remaining, ...]
    evidence: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every key of the model was found."""
        return len(self.mapping) == self.total

    @property
    def rules(self) -> int:
        """How many steps the key map has, dropped keys apart."""
        return sum(not isinstance(step, Drop) for step in self.key_map.steps)

    def report(self) -> str:
        """The findings in words."""
        lines = [f"matched {len(self.mapping)}/{self.total} with {self.rules} rules"]
        lines += [f"  {line}" for line in self.evidence]
        for rest in self.remaining:
            shown = ", ".join(rest.keys[:3]) + (f" and {len(rest.keys) - 3} more" if len(rest.keys) > 3 else "")
            lines.append(f"left in the {rest.side}: {shown}: {rest.why}")
            if rest.candidates:
                lines.append("  may be: " + ", ".join(rest.candidates[:6]))
        return "\n".join(lines)

    def source(self) -> str:
        """Python source for a plugin: the key map and its ``state_dict_transform``."""
        names = sorted({"KeyMap", *(type(step).__name__ for step in self.key_map.steps)} - {"Rule"})
        return (
            f"from flashdreams.core.checkpoint.keymap import {', '.join(names)}\n\n"
            f"{self.key_map.source('KEY_MAP')}\ntransform = KEY_MAP.apply\n"
        )


def suggest(
    model: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
    *,
    ordered: bool | None = None,
    hints: Mapping[str, str] | None = None,
) -> Suggestion:
    """Propose a key map from ``checkpoint`` to ``model``.

    The rules are few and fit these keys; where one just takes a part out (``.net.`` -> ``.``), it does not say where to
    put it back, so a map that is also to export may need some of them written longer.

    Args:
        model: shapes (or tensors, real or meta) by key, best in the order of registration (``module.state_dict()``).
        checkpoint: the same for the checkpoint; its order does not matter.
        ordered: whether the order of ``model`` is that of registration. By default, unless it is just alphabetical.
        hints: what a name of the checkpoint is called in the model, where the reader knows: ``{"attn1": "self_attn"}``.
    """
    targets = {key: shape_of(value) for key, value in model.items()}
    sources = {key: shape_of(value) for key, value in checkpoint.items()}
    strip = _wrappers(sources, targets)
    stripped = {strip.rename(key) if strip else key: key for key in sources}
    if not _is_same(stripped, sources, targets) and len({key.partition(".")[0] for key in sources}) > 1:
        strip = _wrappers(sources, targets, marked_only=True)  # what leads only some keys, tells these from the others
        stripped = {strip.rename(key) if strip else key: key for key in sources}
    shapes = {key: sources[own] for key, own in stripped.items()}
    if _is_same(stripped, sources, targets):
        match = _same_names(shapes, targets)
    else:
        is_ordered = list(targets) != sorted(targets) if ordered is None else ordered
        match = Matcher(build_tree(shapes), build_tree(targets), ordered=is_ordered, hints=hints or {}).result
    match.doubts += _unsaid(match, shapes, targets)
    entries, renames, pieces = entries_of(match, shapes)
    steps: list[Step] = [*([strip] if strip else []), *_drops(match.doubts, shapes), *entries]
    key_map = KeyMap((*steps, *make_rules(renames, pieces)))
    mapping = {item.target: item.sources for item in key_map.plan(sources)}
    remaining = tuple(_remaining(match.doubts, stripped))
    return Suggestion(key_map, mapping, len(targets), remaining, tuple(_evidence(match)))


def _is_same(names: Mapping[str, str], sources: Mapping[str, Shape], targets: Mapping[str, Shape]) -> bool:
    """Whether ``names``, each of one of ``sources``, are the model's own, but for what is missing or too much."""
    same = sum(targets.get(name) == sources[key] for name, key in names.items())
    return same == min(len(names), len(targets))


def _wrappers(sources: Mapping[str, Shape], targets: Mapping[str, Shape], *, marked_only: bool = False) -> Strip | None:
    """The wrappers to take out of the checkpoint's keys; plain words (``model``) only where they lead."""
    free = Strip.before(targets)
    found = {part for key in sources for part in key.split(".")[:-1]}
    plain = tuple(name for name in (*free.anywhere, *free.leading) if name in found and not name.startswith("_"))
    marked = tuple(name for name in free.anywhere if name in found and name.startswith("_"))
    strip = Strip(marked, () if marked_only else plain)
    names = [strip.rename(key) for key in sources]
    return strip if names != list(sources) and len(set(names)) == len(names) else None


def _same_names(shapes: Mapping[str, Shape], targets: Mapping[str, Shape]) -> Match:
    root, other = build_tree(shapes), build_tree(targets)
    own = {leaf.key: leaf for leaf in root.tensors}
    links = [Link(own[leaf.key], leaf, (root, other), "the same name") for leaf in other.tensors if leaf.key in own]
    missing = [leaf for leaf in other.tensors if leaf.key not in own]
    extra = [leaf for leaf in root.tensors if leaf.key not in targets]
    doubts = [Doubt([], missing, "the checkpoint has no such key")] if missing else []
    doubts += [Doubt(extra, [], "the model has no such key")] if extra else []
    return Match(links, [], doubts)


def _unsaid(match: Match, shapes: Mapping[str, Shape], targets: Mapping[str, Shape]) -> Iterable[Doubt]:
    """Doubts about the tensors of which nothing was said: none may pass under its own name."""
    fused = [(bundle.outer, bundle.inner) for bundle in match.bundles]
    for side, header, open_keys in ((0, shapes, match.left), (1, targets, match.lacking)):
        known = {(link.source, link.target)[side].key for link in match.tensors} | {leaf.key for leaf in open_keys}
        known |= {leaf.key for nodes in fused for leaf in nodes[side]}
        nodes = [Node(tuple(key.split(".")), 0, key, shape) for key, shape in header.items() if key not in known]
        if nodes:
            yield Doubt(*((nodes, []) if side == 0 else ([], nodes)), "nothing is known about it")


def _drops(doubts: Iterable[Doubt], shapes: Mapping[str, Shape]) -> list[Drop]:
    """Entries that leave out every key in doubt, by pattern where it fits no other key."""
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for doubt in doubts:
        for node in doubt.sources:
            for leaf in node.tensors:
                groups[template_of(leaf.key)].append((leaf.key, doubt.why))
    return [
        Drop(pattern, keys[0][1])
        for keys in groups.values()
        for pattern in patterns_for([key for key, _ in keys], shapes)
    ]


def _remaining(doubts: Iterable[Doubt], stripped: Mapping[str, str]) -> Iterable[Remaining]:
    groups: dict[tuple[str, str], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for doubt in doubts:
        sources = [stripped[leaf.key] for node in doubt.sources for leaf in node.tensors]
        targets = [leaf.key for node in doubt.targets for leaf in node.tensors]
        for side, keys, others in (("checkpoint", sources, targets), ("model", targets, sources)):
            if keys:
                found = groups[side, doubt.why]
                found[0].extend(keys)
                found[1].extend(others)
    for (side, why), (keys, others) in groups.items():
        yield Remaining(tuple(keys), side, why, tuple(others))


def _evidence(match: Match) -> Iterable[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for link in match.links:
        old, new = ".".join(link.source.below(link.scope[0])), ".".join(link.target.below(link.scope[1]))
        if old != new or link.source.shape is None:
            counts[template_of(old), template_of(new), link.why] += len(link.source.tensors)
    for (old, new, why), count in counts.items():
        yield f"{old} -> {new} ({count} tensors): {why}"
