"""What a compiled call depends on: what is known of PyTorch's guards, and what survives being written down."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from flashdreams.acceleration.conditions import NotKept, conditions_of, from_json, reader, to_json, what_hangs_on

pytestmark = pytest.mark.ci_cpu


@dataclass
class Place:
    start: int
    visible: int
    mask: Tensor | None = None


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -0.5, "a", torch.bfloat16, torch.device("cpu"), nn.Linear, type(None), Place,
     (1, (torch.float32, None)), frozenset({"a"})],
)  # fmt: skip
def test_what_conditions_look_at_survives_being_written_down(value):
    read = from_json(json.loads(json.dumps(to_json(value))))
    assert read == value and type(read) is type(value)


def test_what_has_no_name_is_refused():
    class Local:
        pass

    for value in (Local, Local(), torch.ones(1), lambda: None, [1]):
        with pytest.raises(NotKept):
            to_json(value)


@dataclass
class Guard:
    kind: str
    name: str

    def create_fn_name(self) -> str:
        return self.kind


@pytest.mark.parametrize(
    ("kind", "name"),
    [("WEAKREF_ALIVE", "L['x']"), ("TENSOR_MATCH", "G['x']"), ("DUPLICATE_INPUT", "L['x']"),
     ("CLOSURE_MATCH", "L['f']"), ("CONSTANT_MATCH", "type(L['x']).y"), ("NEW_KIND", "G['x']")],
)  # fmt: skip
def test_a_guard_that_is_not_known_is_refused(kind, name):
    with pytest.raises(NotKept, match=kind):
        conditions_of([Guard("TYPE_MATCH", "L['x']"), Guard(kind, name)])


def test_a_change_that_hangs_anywhere_on_arguments_is_seen():
    class Slotted:
        __slots__ = ("value",)

    slotted, place, held = Slotted(), Place(0, 1), torch.ones(1)
    slotted.value = 1
    given = ({"a": [place, slotted]}, held)
    before = what_hangs_on(given)
    held += 1
    assert what_hangs_on(given) == before, "a tensor's values are the call's own affair"
    for change, back in (
        (lambda: setattr(place, "start", 1), lambda: setattr(place, "start", 0)),
        (lambda: setattr(place, "mask", held), lambda: setattr(place, "mask", None)),
        (lambda: setattr(slotted, "value", 2), lambda: setattr(slotted, "value", 1)),
        (lambda: given[0]["a"].append(None), lambda: given[0]["a"].pop()),
    ):
        change()
        assert what_hangs_on(given) != before
        back()
        assert what_hangs_on(given) == before


def test_conditions_tell_apart_what_the_tracer_told_apart():
    place, other = Place(0, 1), Place(0, 1)
    other.__dict__["more"] = 1
    for what, one, another in (
        ("key a", {"a": 1}, {}),
        ("keys", {"a": 1, "b": 1}, {"b": 1, "a": 1}),
        ("attribute more", other, place),
        ("own more", other, place),
        ("empty", {}, {"a": 1}),
        ("length", [1], [1, 2]),
        ("value", 1, True),
        ("tensor", torch.ones(2, 3), torch.ones(3, 2).T),
        ("type", place, {}),
    ):
        read = reader([(what, "L['x']")])
        assert read({"x": one}) != read({"x": another}) and read({"x": one}) == read({"x": one}), what
