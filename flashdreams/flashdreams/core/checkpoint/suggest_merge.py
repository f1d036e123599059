"""Rules that differ in one word made one: ``to_(q|k|v)`` -> ``\\1``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from flashdreams.core.checkpoint.keymap_steps import Rule


def runs(rules: Sequence[Rule], renames: Mapping[str, str]) -> bool:
    return all(_renamed(rules, key) == target for key, target in renames.items())


def _renamed(rules: Sequence[Rule], key: str) -> str:
    for rule in rules:
        key = rule.rename(key)
    return key


def merge_rules(rules: list[Rule], sample: Mapping[str, str]) -> list[Rule]:
    """Rules that differ in one word, kept on both sides, become one: ``to_(q|k|v)`` -> ``\\1``."""
    at = 0
    while at < len(rules):
        trials = [_joined(rules, at, hole) for hole in range(len(_tokens(rules[at].pattern)))]
        good = [trial for trial in trials if len(trial) < len(rules) and runs(trial, sample)]
        rules = min(good, key=len, default=rules)
        at += not good
    return rules


def _joined(rules: list[Rule], at: int, hole: int) -> list[Rule]:
    """``rules`` with all those in one, in the place of the first, that are like rule ``at`` but for word ``hole``."""
    tokens = _tokens(rules[at].pattern)
    number = sum(token == "(" for token in tokens[:hole]) + 1
    alike: dict[str, dict[str, Rule]] = defaultdict(dict)
    for rule in rules[at:]:
        own = _tokens(rule.pattern)
        shifted = re.sub(r"\\(\d)", lambda found: f"\\{int(found[1]) + (int(found[1]) >= number)}", rule.replacement)
        parts = _tokens(shifted)
        same = own[:hole] == tokens[:hole] and own[hole + 1 :] == tokens[hole + 1 :]
        if same and own[hole].isalnum() and parts.count(own[hole]) == 1:
            alike["".join(rf"\g<{number}>" if part == own[hole] else part for part in parts)][own[hole]] = rule
    text, group = next(((text, found) for text, found in alike.items() if rules[at] in found.values()), ("", {}))
    if len(group) < 2:
        return rules
    pattern = "".join([*tokens[:hole], f"({'|'.join(group)})", *tokens[hole + 1 :]])
    joined = Rule(pattern, re.sub(r"\\g<(\d)>(?!\d)", r"\\\1", text))
    rest = [rule for rule in rules if rule not in group.values()]
    return [*rest[:at], joined, *rest[at:]]


def _tokens(text: str) -> list[str]:
    return re.findall(r"\\.|[A-Za-z]+|\d+|.", text)
