"""Compiled calls that are made without the compiler: the same numbers, and no call that is not theirs."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flashdreams.acceleration import conditions, kept_calls, native
from flashdreams.acceleration.call_notes import Note, Sight
from flashdreams.acceleration.compile import Region
from flashdreams.acceleration.conditions import NotKept, what_hangs_on
from flashdreams.acceleration.generated import Generated
from flashdreams.acceleration.kept_calls import KeptCalls

pytestmark = [
    pytest.mark.ci_cpu,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

SCALE = 2.0


@dataclass
class Place:
    """What a block is told beside its tokens."""

    start: int
    visible: int
    mask: Tensor | None = None


class OtherPlace(Place):
    pass


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Block(nn.Module):
    """Reads some of its arguments, writes into one, and keeps states by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.eps = 1e-3

    def forward(self, x: Tensor, place: Place, window: Tensor, states: dict[str, Tensor], bias: Any = None) -> Tensor:
        x = scaled(self.layer(x)) + self.eps
        window[:, : place.visible].copy_(x.mean(1, keepdim=True))
        if place.mask is not None:
            x = x * place.mask
        before = states.get("last")
        states["last"] = torch.sin(x)
        states["sum"] = x.sum(0)
        if before is not None:
            x = x + before
        return torch.tanh(x if bias is None else x + bias)


def arguments(states: dict[str, Tensor] | None = None, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    given = {"x": draw(2, 3, 8), "place": Place(0, 2), "window": draw(2, 4, 8), "states": dict(states or {})}
    return {**given, **changes}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def region(calls: KeptCalls, module: nn.Module) -> Region:
    made = Region(type(module))
    made.calls = calls
    made.take(module)
    return made


def noted(module: nn.Module, *calls: dict[str, Any]) -> KeptCalls:
    """What is noted of these calls of ``module``."""
    found = KeptCalls(type(module).forward)
    region(found, module)
    for call in calls:
        module(**call)
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Calls without states and with them, as a file would hold them."""
    torch.manual_seed(0)
    with torch.no_grad():
        first = arguments()
        Block()(**first)
        found = noted(Block(), arguments(), arguments(first["states"]))
    assert not found.refused
    return json.loads(json.dumps(found.noted)), native.collect()


def taken_up(told, tmp_path, module: nn.Module) -> Region:
    """As in a process that has nothing but what was noted."""
    calls, libraries = told
    made = region(KeptCalls(type(module).forward, calls, libraries, tmp_path), module)
    made.prepare = lambda: pytest.fail("the compiler was asked")
    return made


def both(module: Block, plain: Block, given: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What a call returns and leaves behind, kept and plain."""
    results = []
    for one in (module, plain):
        call = {**given, "window": given["window"].clone(), "states": dict(given["states"])}
        returned = one(**call)
        assert list(call["states"])[-2:] == ["last", "sum"]
        results.append([returned, call["window"], *call["states"].values()])
    return results[0], results[1]


def test_a_kept_call_computes_what_the_module_does_and_writes_what_it_writes(told, tmp_path):
    module, plain = Block(), Block()
    plain.load_state_dict(module.state_dict())
    made = taken_up(told, tmp_path, module)
    states: dict[str, Tensor] = {}
    for start in range(3):
        got, want = both(module, plain, arguments(states, place=Place(start, 2)))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        states = dict(zip(("last", "sum"), want[2:], strict=True))
    assert made.graphs == 0 and len(made.calls.taken) == 2
    assert not list(tmp_path.iterdir()), "a library was left behind"


def test_it_is_to_the_bit_what_was_compiled(told, tmp_path):
    module, compiled = Block(), Block()
    compiled.load_state_dict(module.state_dict())
    taken_up(told, tmp_path, module)
    region(KeptCalls(Block.forward), compiled)
    got, want = both(module, compiled, arguments())
    assert all(map(torch.equal, got, want))


def test_a_dry_call_returns_memory_and_writes_no_tensor(told, tmp_path):
    module = Block()
    taken_up(told, tmp_path, module).dry = True
    given = arguments()
    before = given["window"].clone()
    assert module(**given).shape == (2, 3, 8)
    assert torch.equal(given["window"], before)
    assert {name: x.shape for name, x in given["states"].items()} == {"last": (2, 3, 8), "sum": (3, 8)}


def test_what_was_compiled_dry_is_noted_when_it_runs(told, tmp_path):
    module, found = Block(), KeptCalls(Block.forward)
    made = region(found, module)
    wide = arguments(x=torch.ones(2, 6, 8))
    made.dry = True
    for given in (arguments(), wide):
        module(**{**given, "states": {}})
    assert made.graphs == 2 and not found.noted
    made.dry = False
    for count, given in enumerate((wide, wide, arguments()), 1):
        module(**{**given, "states": {}})
        assert len(found.noted) == (count + 1) // 2
    assert made.graphs == 2 and not found.refused
    assert found.noted[1]["values"] == told[0][0]["values"]


def hook(module: Block) -> None:
    module.layer.register_forward_hook(lambda *args: None)


def without_bias(module: Block) -> None:
    module.layer.bias = None


def other_eps(module: Block) -> None:
    module.eps = 1e-2


def other_layer(module: Block) -> None:
    module.layer = nn.Sequential(module.layer)


def own_forward(module: Block) -> None:
    module.layer.forward = torch.relu


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.ones(2, 5, 8)},
        {"x": torch.ones(2, 3, 8, dtype=torch.float64)},
        {"x": nn.Parameter(torch.ones(2, 3, 8))},
        {"x": torch.ones(2, 8, 3).mT},
        {"window": torch.ones(2, 4, 16)[..., ::2]},
        {"place": Place(0, 1)},
        {"place": Place(0, True + True, torch.ones(8))},
        {"place": OtherPlace(0, 2)},
        {"states": {"last": torch.ones(2, 3, 8)}},
        {"states": {"other": torch.ones(2, 3, 8)}},
        {"states": []},
        {"bias": torch.ones(8)},
        {"bias": 0.0},
    ],
)
def test_other_arguments_are_another_call(told, tmp_path, changes):
    module = Block()
    made = taken_up(told, tmp_path, module)
    assert made.calls.find((), {"self": module, **arguments()}) is not None
    assert made.calls.find((), {"self": module, **arguments(), **changes}) is None


@pytest.mark.parametrize("change", [hook, without_bias, other_eps, other_layer, own_forward])
def test_another_module_is_another_call(told, tmp_path, change):
    module = Block()
    made = taken_up(told, tmp_path, module)
    change(module)
    assert made.calls.find((), {"self": module, **arguments()}) is None


def test_the_same_tensor_twice_is_another_call(told, tmp_path):
    module, given = Block(), arguments()
    made = taken_up(told, tmp_path, module)
    states = {"last": given["x"], "sum": torch.ones(3, 8)}
    assert made.calls.find((), {"self": module, **given, "states": states}) is None


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "state",
    [torch.enable_grad, lambda: threads(7), lambda: torch.autocast("cpu"), lambda: FlopCounterMode(display=False),
     lambda: torch.device("meta")],
)  # fmt: skip
def test_another_state_of_pytorch_is_another_call(told, tmp_path, state):
    module, given = Block(), arguments()
    made = taken_up(told, tmp_path, module)
    with state():
        assert made.calls.find((), {"self": module, **given}) is None
    assert made.calls.find((), {"self": module, **given}) is not None


def test_what_does_not_fit_is_compiled(told, tmp_path):
    module, plain = Block(), Block()
    plain.load_state_dict(module.state_dict())
    made, prepared = taken_up(told, tmp_path, module), []
    made.prepare = lambda: prepared.append(1)
    for _ in range(3):
        got, want = both(module, plain, arguments(x=torch.ones(2, 5, 8)))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert made.graphs == 1 and len(made.calls.noted) == 1 and prepared == [1] and not made.calls.taken


@pytest.mark.parametrize(
    "spoil",
    [
        lambda call: call["files"].update({__name__: "other"}),
        lambda call: call["files"].update({"no_such_module": "other"}),
        lambda call: call["generated"].update(source="def call(args: return"),
        lambda call: call["generated"].update(kernels={"cpp_fused": "ab/none.so"}),
        lambda call: call.update(values={"tuple": []}),
        lambda call: call.update(conditions=[["type", "L['x"]]),
        lambda call: call.update(state="{"),
        lambda call: call.pop("files"),
    ],
)
def test_a_call_that_was_made_from_other_code_or_is_damaged_is_not_taken(told, tmp_path, spoil):
    calls, libraries = json.loads(json.dumps(told[0])), told[1]
    for call in calls:
        spoil(call)
    module = Block()
    assert taken_up((calls, libraries), tmp_path, module).calls.find((), {"self": module, **arguments()}) is None


def test_global_names_that_stand_for_something_else_are_noticed(told, tmp_path, monkeypatch):
    def found() -> bool:
        module = Block()
        return taken_up(told, tmp_path, module).calls.find((), {"self": module, **arguments()}) is not None

    assert found()
    for name, value in (("SCALE", 3.0), ("scaled", conditions.digest)):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, value)
            assert not found()
    assert found()


class Marks(nn.Module):
    def forward(self, x: Tensor, place: Place) -> Tensor:
        place.start = 7
        return x + place.visible


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x[:1]


class Returns(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x + 1, 3


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_what_is_drawn_is_drawn_as_the_compiled_code_does(tmp_path):
    found, x = noted(Draws(), {"x": torch.ones(5)}), torch.ones(5)
    kept, compiled = Draws(), Draws()
    taken_up((found.noted, native.collect()), tmp_path, kept)
    region(KeptCalls(Draws.forward), compiled)
    compiled(x)
    drawn = []
    for module in (kept, compiled):
        torch.manual_seed(3)
        drawn += [module(x), module(x)]
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3]) and not torch.equal(*drawn[:2])


class Takes(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return x.pop("a") + 1


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + HELD


HELD = torch.ones(3)


class Many(nn.Module):
    def forward(self, *x: Tensor) -> Tensor:
        return x[0] + x[1]


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("kind", "give", "why"),
    [(Marks, lambda: (ONES, Place(0, 2)), "it changes more than tensors"),
     (Counts, lambda: (ONES,), "DICT_NOT_CONTAINS"),
     (Views, lambda: (ONES,), "what the compiler generated needs"),
     (Returns, lambda: (ONES,), "it returns a int"),
     (Reads, lambda: (ONES,), "TENSOR_MATCH G"),
     (Takes, lambda: ({"a": ONES},), "it takes from a dictionary"),
     (Many, lambda: (ONES, ONES), None)],
)  # fmt: skip
def test_what_cannot_be_written_down_is_compiled_as_ever_and_not_kept(kind, give, why):
    module, found = kind(), KeptCalls(kind.forward)
    made = region(found, module)
    for _ in range(3):
        module(*give())
    assert not made.broken and made.graphs and not found.noted
    assert bool(found.refused) == bool(why) and all(why in reason for reason in found.refused)


def sight(**changes: Any) -> Sight:
    """One that can be written down, but for ``changes``."""
    x = torch.ones(4)
    note = Note(Generated("", {}, 1, 1), [], [], {}, lambda named: (), ())
    return replace(Sight(note, {id(x): "L['x']"}, {}, {}, what_hangs_on(()), ((x,), (x + 1,))), **changes)


def test_a_call_is_written_down_only_if_it_is_all_that_was_generated():
    assert sight().told(Block.forward, None)["inputs"] == ["L['x']"]
    good = sight()
    (tensors, outputs), (x,) = good.seen, good.seen[0]
    for seen, why in (
        ((tensors, (*outputs, *outputs)), "more than what the compiler generated"),
        (((x, x + 1), outputs), "more than what the compiler generated"),
        ((tensors, (x[:2],)), "a view of what it is given"),
        ((tensors, (torch.empty(4, device="meta"),)), "no inference with plain tensors"),
        (((torch.ones(4),), outputs), "is none of its arguments"),
    ):
        with pytest.raises(NotKept, match=why):
            replace(good, seen=seen).told(Block.forward, None)
    with torch.enable_grad(), pytest.raises(NotKept, match="no inference"):
        good.told(Block.forward, None)
    twice = replace(good, note=replace(good.note, generated=Generated("", {}, 2, 1)), seen=((x, x), outputs))
    with pytest.raises(NotKept, match="is none of its arguments"):
        twice.told(Block.forward, None)


def test_a_version_of_pytorch_that_keeps_no_account_of_its_tracing_compiles_all_the_same(monkeypatch):
    monkeypatch.setattr(kept_calls, "TracingContext", SimpleNamespace(get=lambda: None))
    module, found = Block(), KeptCalls(Block.forward)
    made = region(found, module)
    module(**arguments())
    assert (made.broken, made.graphs, found.noted) == (False, 1, []) and "AttributeError" in found.refused[0]
