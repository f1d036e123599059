"""Arguments as tensors and a key."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from flashdreams.acceleration.graph_tree import HOST_FIELDS, HostOnly, NotGraphable, flatten, rebuild

pytestmark = pytest.mark.ci_cpu

Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Chunk:
    rope: torch.Tensor
    start: int
    visible: int = 3
    kept: dict[int, Any] = field(default_factory=dict)


def test_a_tree_is_rebuilt_around_other_tensors_in_fresh_containers():
    state = [1, 2]
    tree = {
        "x": [torch.zeros(2), None, "word"],
        "c": Chunk(torch.ones(3), 7),
        "p": Pair(torch.ones(1), 2.5),
        "s": state,
    }
    tensors, form = flatten(tree, {id(state): "branches"}, HOST_FIELDS)
    other = [tensor + 1 for tensor in tensors]
    made = rebuild(form, other, {"branches": state})
    assert made["x"][0] is other[0] and made["x"][1:] == [None, "word"] and made["s"] is state
    assert made["c"].rope is other[1] and made["c"].visible == 3 and made["c"].kept is not tree["c"].kept
    assert isinstance(made["p"], Pair) and made["p"].a is other[2] and made["p"].b == 2.5


def test_everything_but_values_of_tensors_and_host_fields_tells_keys_apart():
    def key(tree: Any) -> Any:
        return flatten(tree, {}, HOST_FIELDS)[1]

    assert key(Chunk(torch.ones(3), 7)) == key(Chunk(torch.zeros(3), 8))
    different = [
        1, True, 1.0, "1", None, (1,), [1], {"a": 1}, {"b": 1}, torch.ones(1), torch.ones(2), torch.ones(1).double(),
        Chunk(torch.ones(3), 7), Chunk(torch.ones(4), 7), Chunk(torch.ones(3), 7, 4),
        Chunk(torch.ones(3), 7, 3, {1: 2}),
    ]  # fmt: skip
    keys = [key(tree) for tree in different]
    assert len(set(keys)) == len(different), "hashable, and none equal to another"


@pytest.mark.parametrize(
    "read",
    [lambda x: x + 1, lambda x: 1 + x, lambda x: range(x), lambda x: x == 3, lambda x: bool(x), lambda x: {x: 1},
     lambda x: torch.arange(x), lambda x: torch.ones(3) * x, lambda x: [0][x], lambda x: float(x)],
)  # fmt: skip
def test_a_host_field_cannot_be_read_in_a_captured_pass(read):
    made = rebuild(flatten(Chunk(torch.ones(3), 7), {}, HOST_FIELDS)[1], [torch.ones(3)])
    assert isinstance(made.start, HostOnly)
    with pytest.raises((NotGraphable, TypeError)):
        read(made.start)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(NotGraphable, match="it has a set"):
        flatten({"a": {1, 2}})
