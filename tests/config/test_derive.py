"""``derive_config``: a variant of a config, checked against the types of its fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from flashdreams.config import ConfigError, InstantiateConfig, derive_config
from flashdreams.config.fields import field_types

pytestmark = pytest.mark.ci_cpu


@dataclass(frozen=True, kw_only=True)
class Inner(InstantiateConfig):
    _target: ClassVar[str] = "nowhere:Inner"
    len_t: int = 3
    sigma: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Wider(Inner):
    width: int = 8


@dataclass(frozen=True, kw_only=True)
class Outer(InstantiateConfig):
    _target: ClassVar[str] = "nowhere:Outer"
    name: str = "outer"
    inner: Inner = Inner()
    other: Inner | None = None
    experts: tuple[Inner, ...] = (Inner(), Wider())
    window: int | None = 6
    on: bool = False
    mode: Literal["batched", "sequential", 3] = "batched"
    sizes: tuple[int, int] = (1, 2)
    widths: tuple[float, ...] = ()
    path: Path | None = None
    extra: Any = None


BASE = Outer()


def test_patches_nested_fields_and_leaves_the_base_alone() -> None:
    derived = derive_config(BASE, name="new", inner={"len_t": 4})
    assert derived == Outer(name="new", inner=Inner(len_t=4))
    assert BASE == Outer()


def test_dotted_paths_mean_the_same_as_nested_mappings() -> None:
    dotted = derive_config(BASE, {"inner.len_t": 4, "experts.1.width": 9, "inner.sigma": 0.1})
    assert dotted == derive_config(BASE, inner={"len_t": 4, "sigma": 0.1}, experts={1: {"width": 9}})
    assert dotted.experts == (Inner(), Wider(width=9))


def test_keywords_come_after_the_mapping() -> None:
    assert derive_config(BASE, {"inner.len_t": 4, "name": "a"}, inner={"len_t": 5}) == Outer(
        name="a", inner=Inner(len_t=5)
    )


def test_a_whole_config_may_take_the_place_of_one() -> None:
    derived = derive_config(BASE, inner=Wider(width=1), other=Inner(), experts=(Wider(),))
    assert derived == Outer(inner=Wider(width=1), other=Inner(), experts=(Wider(),))
    assert derive_config(derived, {"other": None, "inner.width": 2}).inner == Wider(width=2)


def test_shares_nothing_mutable_with_base_or_patch() -> None:
    shared = [1]
    derived, given = derive_config(Outer(extra=shared)), derive_config(BASE, extra=shared)
    shared.append(2)
    assert (derived.extra, given.extra) == ([1], [1])


@pytest.mark.parametrize(
    ("patch", "path", "suggestion"),
    [
        ({"nam": "x"}, "nam", "'name'"),
        ({"inner": {"len_tt": 1}}, "inner.len_tt", "'len_t'"),
        ({"inner.sigmma": 1}, "inner.sigmma", "'sigma'"),
        ({"experts": {1: {"widht": 1}}}, "experts.1.widht", "'width'"),
        ({"experts": {2: {"width": 1}}}, "experts.2", "0, 1"),
        ({"_target": "os:system"}, "_target", "its fields are"),
    ],
)
def test_an_unknown_path_is_a_key_error_with_the_nearest_name(patch: dict, path: str, suggestion: str) -> None:
    with pytest.raises(KeyError) as caught:
        derive_config(BASE, patch)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and suggestion in message
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "patch",
    [
        {"window": True}, {"window": 6.0}, {"window": "6"}, {"on": 1}, {"on": None}, {"name": None}, {"name": 3},
        {"mode": "other"}, {"mode": 3.0}, {"mode": True}, {"sizes": [1, 2]}, {"sizes": (1,)}, {"sizes": (1, True)},
        {"widths": (1.0, "2")}, {"path": "a/b"}, {"inner": None}, {"inner": Outer()}, {"inner.sigma": True},
        {"inner.sigma": "0.5"}, {"inner.sigma": 10**400}, {"inner": 3}, {"other": {"len_t": 1}}, {"name": {"a": 1}},
        {"experts": [Inner()]}, {"experts": (Inner(), 3)}, {"experts": {0: Outer()}},
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_of_another_type_is_a_type_error_that_names_the_path(patch: dict) -> None:
    with pytest.raises(TypeError) as caught:
        derive_config(BASE, patch)
    (path,) = patch
    assert path in str(caught.value)
    assert isinstance(caught.value, ConfigError)


def test_a_whole_number_serves_as_a_float_and_becomes_one() -> None:
    derived = derive_config(BASE, inner={"sigma": 1}, widths=(1, 2.5))
    assert repr(derived.inner.sigma) == "1.0"
    assert repr(derived.widths) == "(1.0, 2.5)"


VALUES: dict[str, st.SearchStrategy] = {
    "name": st.text(),
    "inner": st.builds(Inner, len_t=st.integers(), sigma=st.floats(allow_nan=False)),
    "other": st.none() | st.builds(Wider, width=st.integers()),
    "experts": st.lists(st.builds(Inner, len_t=st.integers())).map(tuple),
    "window": st.none() | st.integers(),
    "on": st.booleans(),
    "mode": st.sampled_from(["batched", "sequential", 3]),
    "sizes": st.tuples(st.integers(), st.integers()),
    "widths": st.lists(st.floats(allow_nan=False)).map(tuple),
    "path": st.none() | st.text(alphabet="ab/.").map(Path),
    "extra": st.integers(),
}


@for_all(st.fixed_dictionaries({}, optional=VALUES))
def test_equals_dataclasses_replace_for_values_of_the_right_type(values: dict[str, Any]) -> None:
    assert VALUES.keys() == field_types(Outer).keys()
    assert derive_config(BASE, **values) == dataclasses.replace(BASE, **values)


@dataclass(frozen=True, kw_only=True)
class Unresolvable(InstantiateConfig):
    value: NotImportedAtRunTime = None  # noqa: F821


def test_an_annotation_that_cannot_be_resolved_names_the_class() -> None:
    with pytest.raises(ConfigError, match=r"Unresolvable.*NotImportedAtRunTime"):
        derive_config(Unresolvable(), value=1)
