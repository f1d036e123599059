"""Which of several alike things is which, by their names and their order; or an answer that this cannot be told.

Everything here looks at things that hold the same shapes in the same place, so only names and order are left as
evidence. Evidence that contradicts other evidence is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from flashdreams.core.checkpoint.suggest_numbers import ELIMINATED, Context, Pair, Side, by_numbers
from flashdreams.core.checkpoint.suggest_words import GENERAL, PLACES, SEQUENCES, Name, contradict


def decide(sources: Sequence[Name], targets: Sequence[Name], context: Context) -> list[Pair]:
    """Pairs that the evidence settles; the rest is ambiguous."""
    return _by_words(list(range(len(sources))), list(range(len(targets))), sources, targets, context)


def decide_some(sources: Sequence[Name], targets: Sequence[Name], context: Context) -> list[Pair]:
    """:func:`decide` where one side has more things than the other: names only, and every one of the fewer or none."""
    few, many = (sources, targets) if len(sources) < len(targets) else (targets, sources)
    shared = frozenset.intersection(*(name.telling for name in many))
    pairs: list[Pair] = []
    for index, name in enumerate(few):
        same = [other for other, its in enumerate(many) if its.text == name.text]
        alike = [
            other for other, its in enumerate(many) if its.telling - shared == name.telling - shared != frozenset()
        ]
        if len(same or alike) == 1:
            pairs.append((index, (same or alike)[0], "the same name" if same else "the same words"))
    if len({other for _, other, _ in pairs}) < len(few):
        pairs = _one_of_a_sequence(few, many)
    if len(pairs) < len(few):
        return []
    return [pair if few is sources else (pair[1], pair[0], pair[2]) for pair in pairs]


def _one_of_a_sequence(few: Sequence[Name], many: Sequence[Name]) -> list[Pair]:
    """``attn2`` alone, beside self- and cross-attention, is the second of them."""
    for chain in SEQUENCES:
        places = [[chain.index(word) for word in chain if word in name.words] for name in many]
        counted = sorted(place for found in places for place in found) == list(range(len(many)))
        one = few[0] if len(few) == 1 and len(few[0].numbers) == 1 and not few[0].is_index else None
        alike = one is not None and bool(one.telling & frozenset.intersection(*(name.telling for name in many)))
        if counted and alike and one is not None and not one.telling & set(chain) and 1 <= one.numbers[0] <= len(many):
            wanted = one.numbers[0] - 1
            return [(0, places.index([wanted]), f"{one.text!r} counts {' and '.join(chain[: len(many)])}")]
    return []


def _telling(indices: list[int], names: Sequence[Name]) -> dict[int, frozenset[str]]:
    """The words of each that the others do not all share."""
    shared = frozenset.intersection(*(names[index].telling for index in indices)) if indices else frozenset()
    return {index: names[index].telling - shared for index in indices}


def _by_words(
    left: list[int], right: list[int], sources: Sequence[Name], targets: Sequence[Name], context: Context
) -> list[Pair]:
    """Settle what equal or overlapping words settle, and hand the rest to :func:`by_numbers`."""
    count, pairs = len(left), []
    while len(left) == len(right) > 0:
        found = _equal_words(left, right, sources, targets, context)
        found = found or _shared_words(left, right, sources, targets, context)
        if not found:
            break
        pairs += found
        left = [index for index in left if index not in {pair[0] for pair in found}]
        right = [index for index in right if index not in {pair[1] for pair in found}]
    if len(pairs) == 1 and count > 2:
        return []  # one word that fits, among strange ones, is an accident
    if len(left) == len(right) == 1 and pairs and _may_be(left[0], right[0], sources, targets):
        return [*pairs, (left[0], right[0], ELIMINATED)]
    if len(left) == len(right) > 1:
        first, second = _telling(left, sources), _telling(right, targets)
        pairs += by_numbers(Side(left, sources, first, False), Side(right, targets, second, True), context)
    return pairs


def _equal_words(
    left: list[int], right: list[int], sources: Sequence[Name], targets: Sequence[Name], context: Context
) -> list[Pair]:
    """Pairs whose telling words are the same, and no one else's; sets of them go by numbers."""
    ours, theirs = _telling(left, sources), _telling(right, targets)
    if not any(ours.values()) or not any(theirs.values()):
        return []
    pairs: list[Pair] = []
    for words in dict.fromkeys(ours.values()):
        twins = [index for index in left if ours[index] == words]
        fits = [other for other in right if theirs[other] == words]
        if len(twins) == len(fits) == 1:
            related = words or sources[twins[0]].telling & targets[fits[0]].telling
            if related and not _are_apart(twins[0], fits[0], sources, targets):
                pairs.append((twins[0], fits[0], "the same words" if words else "no further word"))
        elif len(twins) == len(fits) > 1:
            pairs += _by_words(twins, fits, sources, targets, context)
    return pairs if any(ours[index] for index, _, _ in pairs) or len(left) == 2 else []


def _shared_words(
    left: list[int], right: list[int], sources: Sequence[Name], targets: Sequence[Name], context: Context
) -> list[Pair]:
    """Pairs settled within sets of names that share words with each other and with no one else."""
    ours, theirs = _telling(left, sources), _telling(right, targets)
    near = {
        index: [other for other, words in theirs.items() if ours[index] & words and not contradict(ours[index], words)]
        for index in left
    }
    pairs: list[Pair] = []
    for part_left, part_right in _components(near):
        if len(part_left) != len(part_right) or len(part_left) == len(left):
            continue
        if len(part_left) > 1:
            pairs += _by_words(part_left, part_right, sources, targets, context)
        elif _same_places(ours[part_left[0]], theirs[part_right[0]]) and not _are_swapped(
            part_left[0], part_right[0], sources, targets
        ):
            shared = ours[part_left[0]] & theirs[part_right[0]]
            if shared - GENERAL or all(_has_rival(shared, side.values()) for side in (ours, theirs)):
                pairs.append((part_left[0], part_right[0], f"only these share {', '.join(sorted(shared))!r}"))
    return pairs


def _are_apart(index: int, other: int, sources: Sequence[Name], targets: Sequence[Name]) -> bool:
    """Whether both end in a number, and not the same one: ``attn1`` is not ``attn2`` because both are attentions."""
    ends = [
        [number for number, listed in zip(name.numbers, name.listed, strict=True) if not listed]
        for name in (sources[index], targets[other])
    ]
    return (all(ends) and ends[0] != ends[1]) or _are_swapped(index, other, sources, targets)


def _are_swapped(index: int, other: int, sources: Sequence[Name], targets: Sequence[Name]) -> bool:
    """Whether they are items of lists of one name, and what one is on its side is another thing on the other:
    ``net.2`` is not ``net.0`` where there are both."""
    ours, theirs = _indices(sources[index]), _indices(targets[other])
    unlike = [word for word in ours.keys() & theirs.keys() if ours[word] != theirs[word]]
    beside = [
        _indices(name)
        for side, own in ((sources, index), (targets, other))
        for at, name in enumerate(side)
        if at != own
    ]
    return any(found.get(word) in (ours[word], theirs[word]) for word in unlike for found in beside)


@cache
def _indices(name: Name) -> dict[str, str]:
    """The item of each list in a name."""
    parts = name.text.split(".")
    return {before: part for before, part in pairwise(parts) if part.isdecimal()}


def _has_rival(words: frozenset[str], others: Iterable[frozenset[str]]) -> bool:
    """Whether one of ``others`` has a word that is opposed to one of ``words``: ``out`` where these have ``in``."""
    return any(contradict(words, other) for other in others)


def _components(near: Mapping[int, list[int]]) -> list[tuple[list[int], list[int]]]:
    parts: list[tuple[set[int], set[int]]] = []
    for index, others in near.items():
        if not others:
            continue
        touching = [part for part in parts if part[1] & set(others)]
        parts = [part for part in parts if part not in touching]
        merged = {index}.union(*(part[0] for part in touching)), set(others).union(*(part[1] for part in touching))
        parts.append(merged)
    return [(sorted(first), sorted(second)) for first, second in parts]


def _may_be(index: int, other: int, sources: Sequence[Name], targets: Sequence[Name]) -> bool:
    first, second = sources[index].telling, targets[other].telling
    return not contradict(first, second) and _same_places(first, second)


def _same_places(first: frozenset[str], second: frozenset[str]) -> bool:
    return first & PLACES == second & PLACES
