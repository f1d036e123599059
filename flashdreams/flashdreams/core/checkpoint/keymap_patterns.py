"""The two pattern languages of key maps: regular expressions that can be turned round, and ``*`` for entries."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from flashdreams.core.checkpoint.keymap_tensors import KeyMapError

_ASSERTIONS = ("(?=", "(?!", "(?<=", "(?<!")
_Token = tuple[str, str | int]  # ("text", literal) | ("group", number) | ("edge", assertion)


def compile_regex(pattern: str) -> re.Pattern[str]:
    """``re.compile``, with an error that shows the pattern."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise KeyMapError(f"rule {pattern!r} is no regular expression: {error}") from None


def invert_rule(pattern: str, replacement: str) -> tuple[str, str]:
    r"""The rule that undoes ``re.sub(pattern, replacement, ...)``.

    That is possible where the pattern is literal text and groups, and the replacement keeps every group:
    ``\.to_(q|k|v)\.`` -> ``.\1.`` gives ``\.(q|k|v)\.`` -> ``.to_\1.``. Anchors and lookarounds stay in their place.

    Raises:
        KeyMapError: several texts match the pattern outside of its groups, or a group is thrown away.
    """
    groups: dict[int, str] = {}
    tokens = list(_parse_pattern(pattern, groups))
    target = list(_parse_replacement(replacement, len(groups)))
    lost = [groups[number] for number in groups if ("group", number) not in target]
    if lost:
        raise _no_inverse(pattern, replacement, f"{lost[0]!r} is not in the replacement, so what it matched is lost")
    start = _leading_edges(tokens)
    inside = range(start, len(tokens) - _leading_edges(tokens[start:][::-1]))
    if any(tokens[index][0] == "edge" for index in inside):
        raise _no_inverse(pattern, replacement, "it has an anchor or lookaround between two texts")
    numbers = {number: index for index, number in enumerate(dict.fromkeys(n for kind, n in target if kind == "group"))}
    regex, seen = [str(tokens[index][1]) for index in range(inside.start)], set()
    for kind, value in target:
        if kind == "text":
            regex.append(re.escape(str(value)))
        elif value in seen:
            regex.append(f"\\{numbers[value] + 1}(?!\\d)")
        else:
            seen.add(value)
            regex.append(groups[int(value)])
    regex += [str(tokens[index][1]) for index in range(inside.stop, len(tokens))]
    parts = [
        f"\\g<{numbers[value] + 1}>" if kind == "group" else str(value).replace("\\", r"\\")
        for kind, value in (tokens[index] for index in inside)
    ]
    text = re.sub(r"\\g<(\d)>(?!\d)", r"\\\1", "".join(parts))
    return "".join(regex), text


def _parse_pattern(pattern: str, groups: dict[int, str]) -> Iterator[_Token]:
    at = 0
    while at < len(pattern):
        char, start = pattern[at], at
        if char in "^$":
            at += 1
            token: _Token = ("edge", char)
        elif char == "\\":
            at += 2
            escaped = pattern[start + 1 : at]
            if escaped in ("b", "A", "Z"):
                token = ("edge", "\\" + escaped)
            elif escaped and not escaped.isalnum():
                token = ("text", escaped)
            else:
                raise _no_inverse(pattern, "", f"\\{escaped} outside of a group matches more than one text")
        elif char == "(":
            at = _closing(pattern, at)
            inner = pattern[start:at]
            if inner.startswith(_ASSERTIONS):
                token = ("edge", inner)
            elif inner.startswith("(?"):
                raise _no_inverse(pattern, "", f"{inner!r} is not captured; write it as a numbered group")
            elif re.compile(inner).groups != 1:
                raise _no_inverse(pattern, "", f"{inner!r} has groups within a group")
            else:
                groups[len(groups) + 1] = inner
                token = ("group", len(groups))
        elif char in "[].*+?{}|)":
            raise _no_inverse(pattern, "", f"{char!r} outside of a group matches more than one text")
        else:
            at += 1
            token = ("text", char)
        if at < len(pattern) and pattern[at] in "*+?{":
            raise _no_inverse(pattern, "", f"{pattern[start : at + 1]!r} matches more than one text; put it in a group")
        yield token


def _closing(pattern: str, opening: int) -> int:
    """The index after the parenthesis that closes the one at ``opening``."""
    depth, at, in_class = 0, opening, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
            if not depth:
                return at + 1
        at += 1
    raise KeyMapError(f"rule {pattern!r} has an open parenthesis")


def _parse_replacement(replacement: str, groups: int) -> Iterator[_Token]:
    at = 0
    for match in re.finditer(r"\\(?:g<(\d+)>|(\d+)|(.))", replacement):
        if match.start() > at:
            yield "text", replacement[at : match.start()]
        at = match.end()
        number = match[1] or match[2]
        if number is None:
            yield "text", match[3]
        elif not 0 < int(number) <= groups:
            raise KeyMapError(f"replacement {replacement!r} refers to group {number}; its rule has {groups}")
        else:
            yield "group", int(number)
    if at < len(replacement):
        yield "text", replacement[at:]


def _leading_edges(tokens: Sequence[_Token]) -> int:
    return next((index for index, (kind, _) in enumerate(tokens) if kind != "edge"), len(tokens))


def _no_inverse(pattern: str, replacement: str, why: str) -> KeyMapError:
    rule = f"rule {pattern!r}" + (f" -> {replacement!r}" if replacement else "")
    return KeyMapError(f"{rule} has no inverse: {why}")


def compile_glob(pattern: str) -> re.Pattern[str]:
    """The whole key, where each ``*`` stands for any text: ``blocks.*.attn.qkv.*``."""
    return re.compile("(.*?)".join(re.escape(part) for part in pattern.split("*")))


def fill_glob(pattern: str, texts: Sequence[str]) -> str:
    """``pattern`` with its stars replaced by ``texts``, in order."""
    first, *rest = pattern.split("*")
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))
