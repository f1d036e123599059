"""Count the work and the memory of code that runs on the meta device, where nothing is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flashdreams.acceleration.meta_memo import MetaMemo
from flashdreams.core.attention.backends import BACKENDS


class WorkCounter(TorchDispatchMode):
    """While active: ``flops`` (2 per multiply-add) by kind, and the ``peak`` of ``live`` bytes of the tensors made.

    Kinds are ``linear`` (matrix products), ``convolution`` and ``attention``. Tensors of ``modules`` do not count.
    """

    def __init__(self, modules: tuple[nn.Module, ...] = ()) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.peak = self._live = 0
        self._call = MetaMemo()
        self._storages: dict[StorageWeakRef, int] = {}
        tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
        self._foreign = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}

    @property
    def live(self) -> int:
        """Bytes of the tensors made so far that are still there."""
        self._forget(until=0)
        return self._live

    def reset(self) -> None:
        """Begin counting anew: no work, and a peak of what is there now."""
        self.flops.clear()
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counted = flop_registry.get(func._overloadpacket)
        if counted is None and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        made = self._call(func, args, kwargs)
        if counted is not None:
            kind = "convolution" if "convolution" in func._overloadpacket.__name__ else "linear"
            self.flops[kind] += counted(*args, **kwargs, out_val=made)
        self._track(made)
        return made

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """A backend that only counts: two products of every query with every key."""
        batch, queries, heads, width = q.shape
        self.flops["attention"] += 2 * batch * heads * queries * k.shape[1] * (width + v.shape[-1])
        made = q.new_empty(*q.shape[:-1], v.shape[-1])
        self._track(made)
        return made

    def _track(self, made: Any) -> None:
        """Add new storages. Those that are gone are only looked for where the peak is in question, and no further than
        until it is not."""
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor) or not tensor.is_meta:
                continue
            ref = StorageWeakRef(tensor.untyped_storage())
            if ref not in self._storages and ref not in self._foreign:
                self._storages[ref] = tensor.untyped_storage().nbytes()
                self._live += self._storages[ref]
        if self._live > self.peak:
            self._forget(until=self.peak)
            self.peak = max(self.peak, self._live)

    def _forget(self, until: int) -> None:
        """Drop storages that are gone, the youngest first, as most that go are young."""
        for ref in list(reversed(self._storages)):
            if self._live <= until:
                break
            if ref.expired():
                self._live -= self._storages.pop(ref)


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operation is made of others, which are then what is counted."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@contextmanager
def counting(*modules: nn.Module) -> Generator[WorkCounter]:
    """A :class:`WorkCounter` that sees attention too, whichever backend a model names."""
    counter, backends = WorkCounter(modules), dict(BACKENDS)
    BACKENDS.update(dict.fromkeys(BACKENDS, counter.attention))
    try:
        with counter:
            yield counter
    finally:
        BACKENDS.update(backends)
