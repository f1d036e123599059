"""Blocks of the transformers in the CPU's memory, two at a time on the device. Exact: the same weights, copied."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.acceleration.transfer import Copies, CudaCopies
from flashdreams.core.notices import say_once
from flashdreams.infra.diffusion_model import DiffusionModel
from flashdreams.infra.errors import UserError

ALIGNMENT = 512
"""Bytes; that of PyTorch's own allocations, so that a product takes the same path wherever its weight lies."""


def weights_of(block: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The tensors of ``block`` that come and go, each as a module's table and its name there: matrices.

    Vectors are small and stay on the device. So does what a block holds directly: tables that are read from outside.
    """
    for module in block.modules():
        if module is not block:
            for table in (module._parameters, module._buffers):
                yield from ((table, name) for name, tensor in table.items() if tensor is not None and tensor.ndim > 1)


def bytes_of(block: nn.Module) -> int:
    """Memory that the weights of ``block`` which come and go take in a row."""
    return sum(_room(table[name]) for table, name in weights_of(block))


@dataclass(frozen=True)
class Weight:
    """A tensor that comes and goes, and its place in the memory of its block."""

    table: dict[str, Any]
    name: str
    home: Tensor
    start: int


@dataclass(eq=False)
class Block:
    """``memory`` is in the CPU's memory and holds all ``weights`` in a row, so that it is one copy."""

    memory: Tensor
    weights: list[Weight]
    following: Block | None = None
    depth: int = 0
    """Modules of the block that are running, one within the other."""


@dataclass(eq=False)
class Slot:
    """Memory on the device for one block at a time."""

    memory: Tensor
    free: Any
    """The moment from which it may be overwritten."""
    block: Block | None = None
    """What is in it, or on its way."""
    version: int = -1
    """Of the block's memory, when it was copied."""
    ready: Any = None
    """The moment when it is there."""
    views: dict[Block, list[Tensor]] = field(default_factory=dict)
    """The weights of each block as they lie here."""


class Offload:
    """Keeps the matrices of stacks of blocks in the CPU's memory.

    While a module of a block runs, the block's weights are those in a slot on the device, and the block that comes next
    is on its way into the other slot. At all other times they are what the CPU holds, so that LoRAs and checkpoints
    find them there; a block whose weights were changed in place is copied anew.

    Args:
        stacks: the blocks of each transformer, in the order they run. The rest of it is left where it is.
    """

    def __init__(self, stacks: Sequence[Sequence[nn.Module]], device: torch.device, copies: Copies) -> None:
        self.copies = copies
        self.blocks: list[Block] = []
        for stack in stacks:
            blocks = [self._adopt(module) for module in stack]
            for block, following in zip(blocks, blocks[1:] + blocks[:1], strict=True):
                block.following = following  # after the last one, the next step begins
            self.blocks += blocks
        size = max((block.memory.numel() for block in self.blocks), default=0)
        with torch.inference_mode(False):
            self.slots = [self._slot(size, device) for _ in self.blocks[:2]]

    @property
    def resident(self) -> int:
        """Bytes of the device's memory for blocks."""
        return sum(slot.memory.numel() for slot in self.slots)

    def _adopt(self, module: nn.Module) -> Block:
        """Move the matrices of ``module`` into memory that can be copied in one go, and watch its modules."""
        memory, start, weights = self.copies.memory(bytes_of(module)), 0, []
        with torch.inference_mode(False), torch.no_grad():
            for table, name in weights_of(module):
                old = table[name]
                home = _view(memory, start, old)
                home.copy_(old)
                table[name] = home
                weights.append(Weight(table, name, home, start))
                start += _room(old)
        block = Block(memory, weights)
        module.register_forward_pre_hook(lambda *_: self._enter(block))
        module.register_forward_hook(lambda *_: self._leave(block), always_call=True)
        for part in module.modules():
            if part is not module:  # these are called from outside too, for keys and values of the text
                part.__dict__["_around"] = lambda: self._running(block)
                part.__class__ = _watched(type(part))
        return block

    def _slot(self, size: int, device: torch.device) -> Slot:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        slot = Slot(memory, self.copies.mark())
        slot.views = {
            block: [_view(memory, weight.start, weight.home) for weight in block.weights] for block in self.blocks
        }
        return slot

    @contextmanager
    def _running(self, block: Block) -> Generator[None]:
        self._enter(block)
        try:
            yield
        finally:
            self._leave(block)

    def _enter(self, block: Block) -> None:
        block.depth += 1
        if block.depth > 1:
            return
        slot = self._find(block) or self._copy(block, self.slots[-1])
        self.copies.wait(slot.ready)
        for weight, view in zip(block.weights, slot.views[block], strict=True):
            if weight.table[weight.name] is not weight.home:
                raise RuntimeError(
                    f"a weight ({weight.name}) of an offloaded block was exchanged for another tensor; copy new values "
                    "into it, or load them before blocks are offloaded"
                )
            weight.table[weight.name] = view
        self.slots.sort(key=lambda other: other is not slot)  # the one in use first, so that the last one can be given
        if block.following is not None and self._find(block.following) is None and len(self.slots) > 1:
            self._copy(block.following, self.slots[-1])

    def _leave(self, block: Block) -> None:
        block.depth -= 1
        if block.depth:
            return
        for weight in block.weights:
            weight.table[weight.name] = weight.home
        self.slots[0].free = self.copies.mark()

    def _find(self, block: Block) -> Slot | None:
        """The slot that has, or will have, the block as it is now."""
        version = block.memory._version
        return next((slot for slot in self.slots if slot.block is block and slot.version == version), None)

    def _copy(self, block: Block, slot: Slot) -> Slot:
        slot.block, slot.version = block, block.memory._version
        size = block.memory.numel()
        slot.ready = self.copies.start(slot.memory[:size], block.memory, slot.free)
        return slot


def offload_blocks(model: DiffusionModel, copies: Copies | None = None) -> Offload | None:
    """Take the blocks of every transformer off the device, and move all else there.

    Args:
        copies: how to copy; by default as ``model.device`` does. ``None`` comes back, and nothing is done, for devices
            whose memory is the CPU's.

    Raises:
        UserError: a transformer does not say what its blocks are.
    """
    if copies is None and model.device.type != "cuda":
        say_once(f"blocks are not offloaded: {model.device.type} works in the CPU's memory as it is")
        return None
    stacks = [list(expert.blocks) for expert in _experts(model)]
    if not all(stacks):
        raise UserError(
            "this model does not say what its blocks are, so that they cannot be offloaded; use offload none"
        )
    offload = Offload(stacks, model.device, copies or CudaCopies(model.device))
    away = {id(weight.home) for block in offload.blocks for weight in block.weights}
    for expert in _experts(model):
        for module in expert.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and id(tensor) not in away and tensor.device != model.device:
                        table[name] = _like(tensor, tensor.to(model.device))
    return offload


@cache
def _watched(kind: type[nn.Module]) -> type[nn.Module]:
    """``kind``, whose modules say when they run. Unlike hooks, it looks the same to a compiler in every block."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as part of a block, which has been entered
            return kind.forward(module, *args, **kwargs)
        with module._around():
            return kind.forward(module, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def _experts(model: DiffusionModel) -> list[Any]:
    return list(model.experts)


def _room(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes from ``start`` on as a tensor like ``like``."""
    size = like.numel() * like.element_size()
    return _like(like, memory[start : start + size].view(like.dtype).view(like.shape))


def _like(old: Tensor, new: Tensor) -> Tensor:
    """``new`` as a parameter, if ``old`` is one."""
    return nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
