"""Two trees of keys matched from the root down: first by what holds alike tensors, then by names and order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashdreams.core.checkpoint.suggest_judge import judge
from flashdreams.core.checkpoint.suggest_leftovers import names_below, place_leftovers
from flashdreams.core.checkpoint.suggest_names import decide, decide_some
from flashdreams.core.checkpoint.suggest_numbers import RANKED, Context, Pair
from flashdreams.core.checkpoint.suggest_outcome import SHAPE, Doubt, Link, Match
from flashdreams.core.checkpoint.suggest_tree import Alignment, Group, Node, align, are_alike, squeeze
from flashdreams.core.checkpoint.suggest_words import GENERAL, ORDERED, Name, contradict, name_of, template_of

Path = tuple[str, ...]
Place = tuple[object, object]
Siblings = dict[tuple[bool, str], list[tuple[Name, Name | None]]]


@dataclass
class Question:
    """A group, with the names of its nodes below the modules in which it stands."""

    scope: tuple[Node, Node]
    group: Group
    names: tuple[list[Name], list[Name]]
    torn: bool
    """Whether beside the group, tensors are left without a counterpart on both sides."""

    @property
    def place(self) -> Place:
        """Where it stands: the same for every block of a list."""
        return self.scope[0].place, self.scope[1].place


class Matcher:
    """Matches ``source`` to ``target``, level by level, so that what one block proves helps its siblings.

    Args:
        ordered: whether the order of the target's keys is that of registration.
        hints: names of the source and what they are called in the target, as a person knows it.
    """

    def __init__(self, source: Node, target: Node, *, ordered: bool, hints: Mapping[str, str]) -> None:
        self._ordered = ordered
        self._facts: dict[tuple[Place, str], set[str]] = defaultdict(set)
        self._hints = dict(hints)
        self._learnt: dict[Place, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._beside: dict[tuple[Path, Path], Siblings] = {}
        self.result = Match()
        pending = [(source, target)]
        while pending:
            pending = self._round(pending)
        judge(self.result)

    def _round(self, scopes: list[tuple[Node, Node]]) -> list[tuple[Node, Node]]:
        questions: list[Question] = []
        links: list[Link] = []
        self._beside = {}
        for scope in scopes:
            alignment = self._align(scope)
            torn = place_leftovers(scope, alignment, self.result)
            for group in alignment.groups:
                questions.append(Question(scope, group, names_below(scope, *_sides(group)), torn))
            self._note_siblings(scope, alignment)
        single: dict[Path, list[Question]] = defaultdict(list)
        for question in questions:
            if len(question.group.sources) == 1:
                single[question.scope[0].path].append(question)
        links += [link for beside in single.values() for question in beside for link in self._single(question, beside)]
        several = [question for question in questions if len(question.group.sources) > 1]
        for _ in range(2):  # what one answer teaches may answer an earlier question
            answers: dict[object, list[Pair]] = {}
            settled = [self._ask(question, answers) for question in several]
        for question, pairs in zip(several, settled, strict=True):
            links += self._linked(question, pairs)
        self.result.links += links
        return [(link.source, link.target) for link in links if link.source.shape is None or link.target.shape is None]

    def _align(self, scope: tuple[Node, Node]) -> Alignment:
        source, target = scope
        items = source.items, target.items
        if source.content != target.content and len(items[0]) == len(items[1]) > 0 and are_alike(*items):
            return Alignment([Group([first], [second], "list") for first, second in zip(*items, strict=True)], [], [])

        def settle(sources: list[Node], targets: list[Node]) -> list[tuple[Node, Node]]:
            names = names_below(scope, sources, targets)
            pairs = [(sources[index], targets[other]) for index, other, _ in decide_some(*names, Context())]
            return [pair for pair in pairs if pair[0].row == pair[1].row or pair[0].path[-1] != pair[1].path[-1]]

        lefts = source.children.values() if source.shape is None else [source]
        rights = target.children.values() if target.shape is None else [target]
        return align(lefts, rights, settle)

    def _note_siblings(self, scope: tuple[Node, Node], alignment: Alignment) -> None:
        """Remember all names in a pair of modules, by template, with their counterparts as far as shapes tell."""
        beside: dict[tuple[bool, str], list[tuple[Name, Name | None]]] = defaultdict(list)
        for group in (*alignment.groups, Group(alignment.extra, [], ""), Group([], alignment.missing, "")):
            names = names_below(scope, *_sides(group))
            alone = len(names[0]) == len(names[1]) == 1
            for is_target in (False, True):
                for name in names[is_target]:
                    known = names[not is_target][0] if alone else None
                    beside[is_target, template_of(name.text)].append((name, known))
        for is_target, own in enumerate(scope):  # and those that were opened, as children whose place is unknown
            for part in own.children:
                alike = beside[bool(is_target), template_of(part)]
                if all(name.text != part for name, _ in alike):
                    alike.append((name_of((part,)), None))
        self._beside[scope[0].path, scope[1].path] = beside

    def _single(self, question: Question, beside: Sequence[Question]) -> list[Link]:
        (source,), (target,) = _sides(question.group)
        first, second = question.names[0][0], question.names[1][0]
        link = Link(source, target, question.scope, SHAPE if question.group.how != "settled" else "by name")
        crossed = question.group.how != "list" and any(
            other.group.sources[0].turned == source.turned and _are_crossed(first, second, *_only(other))
            for other in beside
            if other is not question
        )
        if contradict(first.telling, second.telling) or crossed:
            why = f"its shape fits {second.text!r} alone, but its name says otherwise (is the checkpoint transposed?)"
            self.result.doubts.append(Doubt([source], [target], why))
            return []
        is_vector = len(source.tensors) == 1 and len(squeeze(source.tensors[0].shape)) < 2
        if is_vector and not any(node.path for node in question.scope) and _are_strange(first, second):
            why = f"its shape fits {second.text!r} alone, but that is little evidence, and its name has none"
            self.result.doubts.append(Doubt([source], [target], why))
            return []
        self._facts[question.place, first.text].add(second.text)
        self._learn(question.place, first, second)
        return [link]

    def _learn(self, place: Place, first: Name, second: Name) -> None:
        """Remember, for the blocks like this one, that a word of the one side is a number on the other."""
        for name, other in ((first, second), (second, first)):
            words = name.telling - other.telling
            if len(words) == 1 and words <= ORDERED and len(other.numbers) == 1 and not name.numbers:
                self._learnt[place][next(iter(words))].add(other.numbers[0])

    def _ask(self, question: Question, answers: dict[object, list[Pair]]) -> list[Pair]:
        """The answer to a question, found once for all blocks in which it is asked."""
        asked = question.place, *(tuple(name.text for name in names) for names in question.names)
        if asked not in answers:
            answers[asked] = self._answer(question)
            for index, other, _ in answers[asked]:
                self._learn(question.place, question.names[0][index], question.names[1][other])
        return answers[asked]

    def _linked(self, question: Question, pairs: list[Pair]) -> list[Link]:
        """Links for the pairs, and a doubt about what they leave open."""
        sources, targets = _sides(question.group)
        found = {index for index, _, _ in pairs}, {other for _, other, _ in pairs}
        if len(pairs) < len(sources):
            texts = [
                ", ".join(repr(name.text) for at, name in enumerate(names) if at not in taken)
                for names, taken in zip(question.names, found, strict=True)
            ]
            rest = [
                [node for at, node in enumerate(nodes) if at not in taken]
                for nodes, taken in zip((sources, targets), found, strict=True)
            ]
            why = f"{texts[0]} have the shapes of {texts[1]}, and neither names nor order tell which is which"
            self.result.doubts.append(Doubt(*rest, why))
        return [Link(sources[index], targets[other], question.scope, why) for index, other, why in pairs]

    def _answer(self, question: Question) -> list[Pair]:
        sources, targets = question.names
        group, scope = question.group, question.scope
        texts = [name.text for name in targets]
        said = [self._hints.get(name.text) for name in sources]
        hinted = [(index, texts.index(text), "as hinted") for index, text in enumerate(said) if text in texts]
        if len(hinted) == len(sources):
            return hinted
        ranks = sorted(range(len(targets)), key=lambda at: group.targets[at].order)
        order = [ranks.index(at) for at in range(len(targets))] if self._ordered else None
        part, whole = sum(len(node.tensors) for node in group.targets), len(scope[1].tensors)
        stack = len(targets) > 3 and 4 * part >= 3 * whole
        learnt = {word: next(iter(found)) for word, found in self._learnt[question.place].items() if len(found) == 1}
        beside = self._beside[scope[0].path, scope[1].path]

        def others(is_target: bool, names: Sequence[Name]) -> list[tuple[Name, Name | None]]:
            heads = {name.text.partition(".")[0] for name in names}
            known = {template_of(text) for text in (*heads, *(name.text for name in names))}
            alike = [pair for text in known for pair in beside[is_target, text]]
            return [pair for pair in alike if pair[0] not in names and pair[0].text not in heads]

        pairs = decide(sources, targets, Context(order, stack, question.torn, learnt, others))
        if len({name.is_index for name in (*sources, *targets)}) > 1 and _is_square(group):
            pairs = [pair for pair in pairs if pair[2] != RANKED]
        proven = self._proven(question)
        if any(proven.get(index, other) != other for index, other, _ in pairs):
            return []  # an equal block, where shapes tell, says otherwise
        if len(proven) == len(sources) - 1 and len(set(proven.values())) == len(proven):
            rest = set(range(len(targets))) - set(proven.values())
            proven |= dict.fromkeys(set(range(len(sources))) - set(proven), rest.pop())
        if len(proven) == len(sources):
            return [(index, other, "as in a block where the shapes differ") for index, other in proven.items()]
        return pairs

    def _proven(self, question: Question) -> dict[int, int]:
        """Pairs that shapes have settled in other blocks of the same place."""
        sources, targets = question.names
        texts = [target.text for target in targets]
        proven: dict[int, int] = {}
        for index, name in enumerate(sources):
            seen = self._facts[question.place, name.text].intersection(texts) if not name.text.isdecimal() else set()
            if len(seen) == 1:
                proven[index] = texts.index(seen.pop())
        return proven if len(set(proven.values())) == len(proven) else {}


def _only(question: Question) -> tuple[Name, Name]:
    return question.names[0][0], question.names[1][0]


def _are_strange(source: Name, target: Name) -> bool:
    """Whether both have words, and none in common."""
    return bool(source.telling) and bool(target.telling) and not source.telling & target.telling


def _are_crossed(source: Name, target: Name, other_source: Name, other_target: Name) -> bool:
    """Whether names speak for the two pairs the other way round."""
    if source.text == other_target.text != target.text:
        return True
    counted = source.numbers == other_target.numbers and other_source.numbers == target.numbers
    if counted and source.numbers != target.numbers and not (source.is_index or target.is_index):
        return True
    shared = (source.telling & other_target.telling) - target.telling - other_source.telling
    others = (other_source.telling & target.telling) - source.telling - other_target.telling
    return bool((shared | others) - GENERAL) and not source.telling & target.telling


def _is_square(group: Group) -> bool:
    """Whether these are as many lists as each has items: which numbers count the lists, cannot be told."""
    counts = [[int(item.path[-1]) for item in node.items] for node in (*group.sources, *group.targets)]
    return all(len(row) == len(group.sources) == row[-1] - row[0] + 1 for row in counts)


def _sides(group: Group) -> tuple[list[Node], list[Node]]:
    return group.sources, group.targets
