"""Configs as YAML and as plain data: back and forth without loss, and nothing but values of fields comes in."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdreams.config import ConfigError, InstantiateConfig, apply_dict, apply_yaml, to_dict, to_yaml

pytestmark = pytest.mark.ci_cpu


@dataclass(frozen=True, kw_only=True)
class Part(InstantiateConfig):
    _target: ClassVar[str] = "nowhere:Part"
    size: int = 1
    rate: float = 1.0
    word: str | None = None


@dataclass(frozen=True, kw_only=True)
class Special(Part):
    extra: bool = True


@dataclass(frozen=True, kw_only=True)
class Whole(InstantiateConfig):
    _target: ClassVar[str] = "nowhere:Whole"
    text: str = ""
    maybe: str | None = None
    seed: int | None = None
    scale: float | None = None
    on: bool = False
    mode: Literal["one", "2", 2, True] = "one"
    file: Path | None = None
    sizes: tuple[int, int] = (1, 2)
    words: tuple[str, ...] = ()
    number_or_word: int | float | str = 0
    anything: Any = None
    limit: float = math.inf
    part: Part = Special()
    none: Part | None = None
    parts: tuple[Part, ...] = (Part(), Special())


BASE = Whole()

texts = st.text() | st.sampled_from(
    [
        "null",
        "~",
        "true",
        "no",
        "1",
        "1e3",
        "0x10",
        "nan",
        ".inf",
        "- a",
        "a: b",
        "#",
        "!x",
        "&a",
        "*a",
        "{",
        "%",
        "\x85",
    ]
)
finite = st.floats(allow_nan=False, allow_infinity=False)
part_values = {"size": st.integers(), "rate": finite, "word": st.none() | texts}
wholes = st.builds(
    Whole,
    text=texts,
    maybe=st.none() | texts,
    seed=st.none() | st.integers(min_value=0, max_value=2**64 - 1),
    scale=st.none() | finite,
    on=st.booleans(),
    mode=st.sampled_from(["one", "2", 2, True]),
    file=st.none() | st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0")).map(Path),
    sizes=st.tuples(st.integers(), st.integers()),
    words=st.lists(texts).map(tuple),
    number_or_word=st.integers() | finite | texts,
    anything=st.none() | st.booleans() | st.integers() | finite | texts,
    limit=st.floats(allow_nan=False),
    part=st.builds(Special, **part_values, extra=st.booleans()),
    parts=st.tuples(st.builds(Part, **part_values), st.builds(Special, **part_values)),
)


@given(wholes)
def test_yaml_gives_back_the_same_config(config: Whole) -> None:
    back = apply_yaml(BASE, to_yaml(config))
    assert back == config
    assert repr(back) == repr(config)  # 1, 1.0 and True are equal, and different


@given(wholes)
def test_json_gives_back_the_same_config(config: Whole) -> None:
    text = json.dumps(to_dict(config), allow_nan=False)
    assert repr(apply_dict(BASE, json.loads(text))) == repr(config)


def test_a_nan_comes_back_where_it_is_allowed() -> None:
    assert math.isnan(apply_yaml(BASE, to_yaml(Whole(limit=math.nan))).limit)


def test_a_file_that_sets_nothing_changes_nothing() -> None:
    for text in ("", "# only a comment\n", "{}"):
        assert apply_yaml(BASE, text) == BASE
    assert apply_dict(BASE, {}) == BASE


def test_a_file_may_set_a_part() -> None:
    changed = apply_yaml(BASE, "part: {size: 5}\nparts: [{}, {extra: false}]\n")
    assert changed == Whole(part=Special(size=5), parts=(Part(), Special(extra=False)))


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        ("seed: 007", "seed", 7),
        ("seed: 18446744073709551615", "seed", 2**64 - 1),
        ("seed: 9007199254740993", "seed", 9007199254740993),
        ("seed: null", "seed", None),
        ("seed:", "seed", None),
        ("scale: 3", "scale", 3.0),
        ("scale: 1e-6", "scale", 1e-6),
        ("scale: .5", "scale", 0.5),
        ("maybe: null", "maybe", None),
        ("maybe: 'null'", "maybe", "null"),
        ("maybe: 23.976", "maybe", "23.976"),
        ("text: yes", "text", "yes"),
        ("text: 24", "text", "24"),
        ("text: |\n  a\n  b\n", "text", "a\nb\n"),
        ("on: true", "on", True),
        ("mode: 2", "mode", 2),
        ("mode: '2'", "mode", "2"),
        ("file: a/b.png", "file", Path("a/b.png")),
        ("sizes: [3, 4]", "sizes", (3, 4)),
        ("number_or_word: 3", "number_or_word", 3),
        ("number_or_word: '3'", "number_or_word", "3"),
        ("limit: .inf", "limit", math.inf),
    ],
)
def test_the_field_decides_what_a_word_means(line: str, field: str, expected: object) -> None:
    value = getattr(apply_yaml(BASE, line), field)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("_target: os:system", "_target: .*cannot name or change classes"),
        ("part: {_target: os:system}", r"part\._target: .*cannot name or change classes"),
        ("part: !!python/object/new:os.system {}", "line 1: tags"),
        ("text: !!python/name:os.system", "line 1: tags"),
        ("a: &x 1\nb: *x", "line 1: tags"),
        ("textt: x", "did you mean 'text'"),
        ("part: {siez: 1}", r"part\.siez: .*did you mean 'size'"),
        ("none: {size: 1}", "a file cannot add one"),
        ("parts: [{}]", "a list of 2"),
        ("parts: {}", "a list of 2"),
        ("part: null", "part is 'null'"),
        ("part: 3", "part is '3'"),
        ("seed: 1.0", "seed is '1.0'; expected a whole number or None"),
        ("seed: 0x10", "seed is '0x10'"),
        ("seed: 1_000", "seed is '1_000'"),
        ("seed: '7'", "seed is '7'"),
        ("seed: true", "seed is 'true'"),
        ("scale: nan", "scale is nan; expected a finite number"),
        ("scale: .inf", "scale is inf"),
        ("scale: 1e999", "scale is inf"),
        ("on: yes", "on is 'yes'; expected true or false"),
        ("mode: two", "mode is 'two'; expected one of"),
        ("sizes: [1]", "a list of 2"),
        ("sizes: 1", "sizes is '1'"),
        ("text: [a]", "text is a list; expected text"),
        ("text: a\ntext: b", "line 2: 'text' is given twice"),
        ("- text", "the config is a list"),
        ("text", "the config is 'text'"),
        ("? [a]\n: b", "line 1: a key must be the name of a field"),
        ("text: 'a", "not valid YAML"),
        ("text: \x00", "not valid YAML"),
        ("--- {}\n--- {}", "not valid YAML"),
        ("[" * 2000 + "]" * 2000, "nested too deeply"),
    ],
)
def test_what_a_file_may_not_say(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        apply_yaml(BASE, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.0, "1", [1], {"a": 1}, math.nan])
def test_plain_data_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="seed "):
        apply_dict(BASE, {"seed": value})


def test_an_infinity_is_not_written_where_it_could_not_be_read() -> None:
    with pytest.raises(ConfigError, match=r"part\.rate is inf"):
        to_yaml(Whole(part=Part(rate=math.inf)))
