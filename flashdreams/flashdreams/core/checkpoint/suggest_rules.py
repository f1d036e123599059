"""From a mapping key by key to few, general rules that make it.

What is renamed comes in pieces (``attn1`` -> ``self_attn`` in a block, ``to_q`` -> ``q`` in an attention). A piece is
first tried wherever it occurs, and bound to its place only as far as the other keys demand. Whatever is tried is run
on the keys; only a list of rules that turns every key into its target is given out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashdreams.core.checkpoint.keymap_steps import Rule
from flashdreams.core.checkpoint.suggest_merge import merge_rules, runs
from flashdreams.core.checkpoint.suggest_words import template_of

Path = tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """``old`` becomes ``new`` below ``scope``, all of them parts of a key;"""

    scope: Path
    old: Path
    new: Path


@dataclass
class _Draft:
    """A rule in the making: its texts, and how many parts before it are named (``bound``)."""

    old: Path
    new: Path
    scopes: set[Path] = field(default_factory=set)
    bound: int = 0
    ends: set[bool] = field(default_factory=set)

    @property
    def most(self) -> int:
        return max(len(scope) for scope in self.scopes)

    def rules(self) -> list[Rule]:
        """One rule for every different way in which its ``bound`` last parts before it are written."""
        heads = {(scope[-self.bound :] if self.bound else (), len(scope) <= self.bound) for scope in self.scopes}
        if not self.bound:
            heads = {((), at_start) for _, at_start in heads}
            heads = {((), all(start for _, start in heads))} if len(heads) == 1 else {((), None)}
        return [self._rule(head, at_start) for head, at_start in sorted(heads, key=str)]

    def _rule(self, head: Path, at_start: bool | None) -> Rule:
        numbers = 0
        pattern, text = {True: ("^", ""), False: (r"\.", "."), None: (r"(^|\.)", r"\1")}[at_start]
        numbers += at_start is None
        for part in head:
            if part == "#":
                numbers += 1
                pattern, text = pattern + r"(\d+)\.", text + rf"\{numbers}."
            else:
                pattern, text = pattern + re.escape(part) + r"\.", text + part + "."
        first = numbers
        for at, part in enumerate(self.old):
            pattern += (r"\." if at else "") + (r"(\d+)" if part == "#" else re.escape(part))
            numbers += part == "#"
        for at, part in enumerate(self.new):
            first += part == "#"
            text += ("." if at else "") + (rf"\{first}" if part == "#" else part)
        if self.ends == {True}:
            return Rule(pattern + "$", text if self.new else text.removesuffix("."))
        if not self.new:
            return Rule(pattern + r"\.", text)
        return Rule(pattern + r"\.", text + ".") if self.ends == {False} else Rule(pattern + r"(?=\.|$)", text)


def make_rules(renames: Mapping[str, str], pieces: Mapping[str, Sequence[Piece]]) -> list[Rule]:
    """Ordered rules that turn every key of ``renames`` into its value.

    Args:
        pieces: for every key, what is renamed in it.
    """
    sample = _sample(renames)
    drafts, wanted = _drafts(sample, pieces)
    order = sorted(drafts, key=lambda draft: (-len(draft.old), -draft.most, draft.old))
    for _ in range(4 * len(order) + 20):
        rules, owners = _written(order)
        fault = _first_fault(rules, owners, sample, wanted)
        if fault is None:
            rules = merge_rules(rules, sample)
            if runs(rules, renames):
                return rules
            break
        if not _mend(order, *fault):
            break
    return _verbatim(renames)


def _sample(renames: Mapping[str, str]) -> dict[str, str]:
    """A few keys of every template: with the smallest and largest numbers, and all where numbers change."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, target in renames.items():
        same = re.findall(r"\d+", key) == re.findall(r"\d+", target)
        groups[template_of(key), template_of(target) if same else target].append(key)
    chosen: dict[str, str] = {}
    for keys in groups.values():
        keys.sort(key=lambda key: (len(key), key))
        for key in (keys[0], keys[len(keys) // 2], keys[-1]):
            chosen[key] = renames[key]
    return chosen


def _drafts(
    sample: Mapping[str, str], pieces: Mapping[str, Sequence[Piece]]
) -> tuple[list[_Draft], dict[str, list[_Draft]]]:
    drafts: dict[tuple[Path, Path], _Draft] = {}
    wanted: dict[str, list[_Draft]] = {}
    general = _general(piece for key in sample for piece in pieces[key])
    for key in sample:
        wanted[key] = []
        for piece in pieces[key]:
            old, new = _trim(piece.old, piece.new)
            lead = len(_common(piece.old, piece.new)) if old != piece.old else 0
            scope = (*piece.scope, *piece.old[:lead])
            if (template_of(".".join(old)), template_of(".".join(new))) in general:
                old, new = _numbered(old), _numbered(new)
            if old == new:
                continue
            draft = drafts.setdefault((old, new), _Draft(old, new))
            draft.scopes.add(_numbered(scope))
            draft.ends.add(len(scope) + len(old) == len(key.split(".")))
            wanted[key].append(draft)
    return list(drafts.values()), wanted


def _general(pieces: Iterable[Piece]) -> set[tuple[str, str]]:
    """Templates of pieces in which the numbers stay what they are, whatever they are."""
    seen: dict[tuple[str, str], list[tuple[list[str], list[str]]]] = defaultdict(list)
    for piece in pieces:
        old, new = _trim(piece.old, piece.new)
        texts = ".".join(old), ".".join(new)
        numbers = [part for part in old if part.isdecimal()], [part for part in new if part.isdecimal()]
        seen[template_of(texts[0]), template_of(texts[1])].append(numbers)
    return {
        key for key, found in seen.items() if all(old == new for old, new in found) and len({str(f) for f in found}) > 1
    }


def _numbered(path: Path) -> Path:
    return tuple("#" if part.isdecimal() else part for part in path)


def _common(old: Path, new: Path) -> Path:
    count = next(
        (at for at, (one, two) in enumerate(zip(old, new, strict=False)) if one != two), min(len(old), len(new))
    )
    return old[:count]


def _trim(old: Path, new: Path) -> tuple[Path, Path]:
    """Without what is the same at the end and at the start; ``old`` keeps at least one part."""
    while len(old) > 1 and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    while len(old) > 1 and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    return old, new


def _written(order: Sequence[_Draft]) -> tuple[list[Rule], list[_Draft]]:
    pairs = [(rule, draft) for draft in order for rule in draft.rules()]
    return [rule for rule, _ in pairs], [draft for _, draft in pairs]


def _first_fault(
    rules: Sequence[Rule], owners: Sequence[_Draft], sample: Mapping[str, str], wanted: Mapping[str, list[_Draft]]
) -> tuple[_Draft | None, _Draft | None, list[_Draft]] | None:
    """What went wrong with the first key that does not become its target: a rule that should not have fired, a rule
    that should have, and those that fired."""
    for key, target in sample.items():
        text, fired = key, []
        for rule, owner in zip(rules, owners, strict=True):
            changed = rule.rename(text)
            if changed != text:
                fired.append(owner)
            text = changed
        if text != target:
            wrong = next((draft for draft in fired if all(draft is not own for own in wanted[key])), None)
            lacking = next((draft for draft in wanted[key] if all(draft is not own for own in fired)), None)
            return wrong, lacking, fired
    return None


def _mend(order: list[_Draft], wrong: _Draft | None, lacking: _Draft | None, fired: Sequence[_Draft]) -> bool:
    """Bind the rule that fired wrongly more closely, or put the one that came too late before those that fired."""
    if wrong is not None and wrong.bound < wrong.most:
        wrong.bound += 1
        return True
    if lacking is not None and fired:
        first = min(order.index(draft) for draft in fired)
        if order.index(lacking) > first:
            order.remove(lacking)
            order.insert(first, lacking)
            return True
    loose = [draft for draft in fired if draft.bound < draft.most]
    if loose:
        loose[0].bound += 1
    return bool(loose)


def _verbatim(renames: Mapping[str, str]) -> list[Rule]:
    """A rule for every template of keys. Targets are marked, so that no later rule takes them for a key of the
    checkpoint; the last rule takes the marks off."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for key, target in renames.items():
        same = re.findall(r"\d+", key) == re.findall(r"\d+", target)
        groups[(template_of(key), template_of(target)) if same else (key, target)].append((key, target))
    rules: list[Rule] = []
    for pairs in sorted(groups.values(), key=len):
        key, target = pairs[0]
        if len(pairs) > 1:
            pattern, text = re.sub(r"\d+", lambda _: r"(\d+)", re.escape(key)), re.sub(r"\d+", "#", target)
            for number in range(1, text.count("#") + 1):
                text = text.replace("#", rf"\g<{number}>", 1)
            rules.append(Rule(f"^{pattern}$", "@" + text))
        else:
            rules.append(Rule(f"^{re.escape(key)}$", "@" + target))
    rules.append(Rule("^@", ""))
    if runs(rules, renames):
        return rules
    return [*(Rule(f"^{re.escape(key)}$", "@" + target) for key, target in renames.items()), Rule("^@", "")]
