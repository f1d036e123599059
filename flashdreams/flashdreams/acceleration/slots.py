"""Slots: the tensors of a rollout's cache, leased to one rollout after another, so that they keep their addresses."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashdreams.acceleration.graph_tree import NotGraphable, flatten, rebuild
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.notices import say_once


@dataclass(eq=False)
class Slot:
    """Memory of one rollout, and the graphs that read and write it."""

    key: Hashable
    """Which rollouts fit in: those of one size."""
    pins: dict[str, Pin] = field(default_factory=dict)
    """What stays where it is, by its path in the cache tree."""
    zeros: list[Tensor | None] = field(default_factory=list)
    """Tensors that were made as zeros for this cache, in order; they serve the next rollout."""
    graphs: dict[Hashable, Any] = field(default_factory=dict)
    captured: int = 0
    """Captures since it was leased."""
    checked: bool = False
    """Whether the place of the weights was looked at since the last chunk: that takes as long as a replay."""

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that graphs may keep the addresses of."""
        return [tensor for pin in self.pins.values() for tensor in pin.tensors]

    def hold(self, node: Any, path: str, own: frozenset[Memory] = frozenset()) -> tuple[list[Place], bool]:
        """Bring all that lies under ``node`` into the slot's tensors: values from elsewhere are copied in, and their
        places given to the slot's tensors.

        Args:
            path: of ``node`` in the cache tree.
            own: memory of tensors that may be kept as they are where the slot has none yet; others may be somebody
                else's, and are copied.

        Returns:
            Every place under ``node`` with what belongs there, and whether something does not fit what was there, so
            that graphs of the slot are of no use any more.
        """
        places, changed = [], False
        for container, key, where, value in _places(node, path):
            if not is_node(value):
                value, other = self._pinned(where, value, own)
                container[key] = value
                changed |= other
            places.append((container, key, value))
        return places, changed

    def _pinned(self, path: str, value: Any, own: frozenset[Memory]) -> tuple[Any, bool]:
        """What stands at ``path`` from now on, and whether it is of another form than before."""
        pin = self.pins.get(path)
        if pin is not None and value is pin.value:
            return value, False
        tensors, form = flatten(value)
        if pin is not None and form == pin.form and not self._elsewhere(tensors, pin):
            for mine, theirs in zip(pin.tensors, tensors, strict=True):
                if _memory(mine) != _memory(theirs):
                    mine.copy_(theirs)
            return pin.value, False
        kept = [tensor if _memory(tensor) in own else tensor.clone() for tensor in tensors]
        self.pins[path] = Pin(form, kept, rebuild(form, kept) if kept else value)
        return self.pins[path].value, pin is not None

    def _elsewhere(self, tensors: list[Tensor], pin: Pin) -> bool:
        """Whether one of ``tensors`` has another place in this slot, where it will be written to."""
        others = set(map(_memory, self.tensors)) - set(map(_memory, pin.tensors))
        return any(tensor.numel() and _memory(tensor) in others for tensor in tensors)


@dataclass(frozen=True)
class Pin:
    """A value of the cache tree that stays: the tensors in it, and its form around them."""

    form: Hashable
    tensors: list[Tensor]
    value: Any


Memory = tuple[Any, ...]
"""What two tensor objects have in common that are the same tensor."""

Place = tuple[Any, Any, Any]
"""A container (list, dict, or an object's attributes), a key of it, and what belongs there."""


@dataclass(eq=False)
class Node:
    """A part of a leased cache, as passes are given it."""

    value: Any
    path: str
    slot: Slot
    _places: list[Place] | None = None

    def refresh(self) -> bool:
        """Copy what was replaced since the last call (the text of another prompt) into the slot's tensors.

        Returns:
            Whether graphs of the slot are of no use any more.
        """
        if self._places is not None and all(container[key] is value for container, key, value in self._places):
            return False
        self._places, changed = self.slot.hold(self.value, self.path)
        return changed


class SlotPool:
    """At most ``max_slots`` slots. A cache has its slot as long as anyone holds the cache.

    Args:
        discard: called with a slot whose graphs are of no use any more.
    """

    def __init__(self, max_slots: int, discard: Callable[[Slot], None]) -> None:
        if max_slots < 1:
            raise ValueError(f"max_slots is {max_slots}; expected 1 or more")
        self.max_slots = max_slots
        self._discard = discard
        self._free: list[Slot] = []  # least recently used first
        self._leases: dict[int, tuple[Slot, dict[int, Node]]] = {}

    @property
    def slots(self) -> list[Slot]:
        """All there are, free ones first."""
        return [*self._free, *(slot for slot, _ in self._leases.values())]

    @property
    def free(self) -> int:
        """How many could be leased without making another."""
        return len(self._free)

    def lease(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The cache that ``make`` returns, its tensors moved into a slot; as it is where there is none left.

        Args:
            key: ``make`` of one key makes caches of one form (or the slot's graphs are given up).
        """
        slot = self._take(key)
        if slot is None:
            say_once(
                f"all {self.max_slots} slots of CUDA graphs are taken: a rollout that begins now runs without graphs "
                "(close another first, or raise cuda_graph_slots)"
            )
            return make()
        with torch.inference_mode(False), torch.no_grad():
            try:
                with _Zeros(slot.zeros) as zeros:
                    cache = make()
            except BaseException:
                self._free.append(slot)
                raise
            try:
                nodes = self._bind(slot, cache, frozenset(map(_memory, zeros.made)))
            except NotGraphable as reason:
                say_once(f"{type(cache).__name__} takes no slot of CUDA graphs: {reason}")
                return cache
        kept = set(map(_memory, slot.tensors))
        slot.zeros = [tensor if _memory(tensor) in kept else None for tensor in zeros.made]
        slot.captured, slot.checked = 0, False
        self._leases[id(cache)] = slot, nodes
        weakref.finalize(cache, self._release, id(cache)).atexit = False
        return cache

    def slot(self, cache: Any) -> Slot | None:
        """The slot of a leased cache."""
        lease = self._leases.get(id(cache))
        return None if lease is None else lease[0]

    def node(self, value: Any) -> Node | None:
        """What is known of ``value``, if it is part of a leased cache."""
        for _, nodes in list(self._leases.values()):  # a lease may end meanwhile, in a garbage collection
            if (node := nodes.get(id(value))) is not None and node.value is value:
                return node
        return None

    def _take(self, key: Hashable) -> Slot | None:
        fitting = [slot for slot in self._free if slot.key == key]
        if fitting:
            self._free.remove(fitting[-1])
            return fitting[-1]
        if len(self._free) + len(self._leases) >= self.max_slots:
            if not self._free:
                return None
            self._discard(self._free.pop(0))
        return Slot(key)

    def _bind(self, slot: Slot, cache: Any, own: frozenset[Memory]) -> dict[int, Node]:
        """The nodes under ``cache``, not itself: it would live as long as its own lease."""
        nodes, changed = {}, False
        for _, _, path, value in _places(cache, "", deep=False):
            if is_node(value):
                changed |= slot.hold(value, path, own)[1]
                below = ((item, where) for _, _, where, item in _places(value, path) if is_node(item))
                nodes |= {id(item): Node(item, where, slot) for item, where in ((value, path), *below)}
        if changed:
            self._discard(slot)
        return nodes

    def _release(self, lease: int) -> None:
        self._free.append(self._leases.pop(lease)[0])


class _Zeros(TorchDispatchMode):
    """Lets whoever makes zeros have those of an earlier cache again: the buffers of a window are most of a GPU's
    memory, and would else be there twice while a rollout begins."""

    def __init__(self, stock: list[Tensor | None]) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self._stock = stock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func is aten.zeros.default:
            like, size = None, args[0]
        elif func is aten.zeros_like.default:
            like, size = args[0], args[0].shape
        elif func is aten.new_zeros.default:
            like, size = args
        else:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
        device = kwargs.get("device") or (torch.device("cpu") if like is None else like.device)
        old = self._stock[len(self.made)] if len(self.made) < len(self._stock) else None
        if old is not None and (tuple(old.shape), old.dtype) == (tuple(size), dtype) and _same(old.device, device):
            self.made.append(old.zero_())
        else:
            self.made.append(func(*args, **kwargs))
        return self.made[-1]


def _memory(tensor: Tensor) -> Memory:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def _same(device: torch.device, other: torch.device) -> bool:
    """Whether ``other``, which may leave out the number, is ``device``."""
    return device.type == other.type and other.index in (None, device.index)


def is_node(value: Any) -> bool:
    """Parts of a cache tree that are changed in place. Anything else is a value, replaced as a whole."""
    if isinstance(value, (dict, list, RollingKVCache)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not _frozen(value)


def _frozen(value: Any) -> bool:
    return type(value).__dataclass_params__.frozen


def _places(node: Any, path: str, deep: bool = True) -> Iterator[tuple[Any, Any, str, Any]]:
    """Container, key, path and value of everything under ``node``; derived fields are made anew when they are missing,
    and left out."""
    container: Any = node if isinstance(node, (dict, list)) else vars(node)
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
    derived = {item.name for item in fields if item.metadata.get("derived")}
    keys = range(len(node)) if isinstance(node, list) else [key for key in container if key not in derived]
    for key in keys:
        value, where = container[key], f"{path}.{key}"
        yield container, key, where, value
        if deep and is_node(value):
            yield from _places(value, where)
