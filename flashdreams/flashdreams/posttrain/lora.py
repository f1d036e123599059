"""Trainable LoRAs. The layers hold the merged weights all the while, as they do in serving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from flashdreams.core.checkpoint.lora_file import LowRank


class TrainableLora:
    """Factors of the linear layers of ``root`` whose names end in one of ``targets``.

    The forward pass is the serving one, on ``base + up @ down``. As soon as backward has the gradient of such a weight,
    it becomes that of the two factors and is freed, so that no more than one layer's is held.

    Args:
        root: what a checkpoint of the model is for; layers have the names they have there.
        seed: of the first values of ``down``; ``up`` begins at 0, so that nothing changes at first.
    """

    def __init__(self, root: nn.Module, targets: tuple[str, ...], rank: int, seed: int) -> None:
        layers = {
            name: module
            for name, module in root.named_modules()
            if isinstance(module, nn.Linear) and any(f".{name}".endswith(f".{target}") for target in targets)
        }
        if not layers:
            raise ValueError(
                f"{type(root).__name__} has no linear layers named {', '.join(targets) or 'by its family'}"
            )
        generator = torch.Generator().manual_seed(seed)
        self.weights = {name: layer.weight for name, layer in layers.items()}
        self.base = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.down: dict[str, nn.Parameter] = {}
        self.up: dict[str, nn.Parameter] = {}
        for name, weight in self.weights.items():
            wide = torch.promote_types(weight.dtype, torch.float32)
            first = torch.randn(rank, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
            self.down[name] = nn.Parameter(first.to(weight.device, wide))
            self.up[name] = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device, dtype=wide))
            weight.requires_grad_(True)
            weight.register_post_accumulate_grad_hook(partial(self._hand_on, name))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser changes; call :meth:`merge` after it."""
        return [*self.down.values(), *self.up.values()]

    @torch.no_grad()
    def merge(self) -> None:
        """Bring the layers up to date with the factors, rounded once, as when the LoRA's file is loaded."""
        for name, weight in self.weights.items():
            base, up, down = self.base[name], self.up[name], self.down[name]
            change = LowRank(down, up, 1.0)(tuple(weight.shape), weight.device, up.dtype)
            weight.copy_(base.to(up.dtype).add(change))

    def state_dict(self) -> dict[str, Tensor]:
        """A LoRA file's tensors, by the model's own names of the layers; its alpha is the rank."""
        return {
            f"{name}.{part}.weight": factors[name].detach()
            for name in self.weights
            for part, factors in (("lora_A", self.down), ("lora_B", self.up))
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of :meth:`state_dict` and merge them."""
        for key, value in self.state_dict().items():
            value.copy_(state[key])
        self.merge()

    def _hand_on(self, name: str, weight: Tensor) -> None:
        """Turn the gradient of a merged weight into that of its factors."""
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        up, down = self.up[name], self.down[name]
        gradient = gradient.to(up.dtype)
        for factor, part in ((up, gradient @ down.detach().T), (down, up.detach().T @ gradient)):
            factor.grad = part if factor.grad is None else factor.grad.add_(part)
