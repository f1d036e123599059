"""Linear layers of the blocks in eight bits: an approximation that halves the weights of a model in bfloat16."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.infra.diffusion_model import DiffusionModel
from flashdreams.infra.errors import UserError

LAYERS = (
    r"(self|cross)_attn\.(q|k|v|o|k_img|v_img|[qkv]_proj|output_proj)",
    r"ffn\.\d+",
    r"mlp\.layer\d",
    r"cam_(injector_layer\d|scale_layer|shift_layer)",
)
"""Names, within a block, of the layers that are quantized: nearly all of a block's weights. Embeddings, the head, norms
and what makes modulation of the timestep are few and matter more; they stay as they are."""

Change = Callable[[nn.Linear, torch.device], nn.Module]
"""Makes the quantized form of a layer, on a device."""


class Int8Linear(nn.Module):
    """A linear layer with ``weight`` in int8 and one scale per output channel: ``|error| <= scale / 2``.

    The product is computed in the dtype of its input, so that this saves memory and not work.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        wide = linear.weight.detach().to(device).float()
        scale = (wide.abs().amax(1, keepdim=True) / 127).to(linear.weight.dtype)
        codes = (wide / scale.float().clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
        self.register_buffer("weight", codes.to(torch.int8))
        self.register_buffer("scale", scale.flatten())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().to(device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale[:, None].to(x.dtype), self.bias)


def quantize_blocks(model: DiffusionModel, form: str) -> int:
    """Quantize the layers of :data:`LAYERS` in every block; returns how many there were.

    Weights that are not on ``model.device`` yet are brought there one by one to be quantized, and ``int8`` takes them
    back to where they were.

    Args:
        form: ``int8``: weights only, on any device. ``int8-dynamic`` and ``fp8``: inputs too, by torchao.

    Raises:
        UserError: LoRAs are loaded, the model has no such layers, or torchao or the device cannot do it.
    """
    if model.loras.names:
        raise UserError(
            f"the LoRA {model.loras.names[0]!r} is loaded, and quantized weights take none; merge it first "
            "(flashdreams checkpoint merge-lora), or leave quantize out"
        )
    change = Int8Linear if form == "int8" else _torchao(form, model.device)
    count = sum(quantize(block, change, model.device) for expert in list[Any](model.experts) for block in expert.blocks)
    if not count:
        raise UserError("this model has no layers that can be quantized; leave quantize out")
    return count


def quantize(block: nn.Module, change: Change, device: torch.device) -> int:
    """Put ``change(layer, device)`` in place of every chosen layer of ``block``; returns how many there were."""
    layers = [(name, layer) for name, layer in block.named_modules() if type(layer) is nn.Linear and chosen(name)]
    for name, layer in layers:
        owner, _, last = name.rpartition(".")
        setattr(block.get_submodule(owner), last, change(layer, device).to(layer.weight.device))
    return len(layers)


def chosen(name: str) -> bool:
    """Whether the layer called ``name`` within a block is quantized."""
    return any(re.fullmatch(pattern, name) for pattern in LAYERS)


def _torchao(form: str, device: torch.device) -> Change:
    """What turns a layer into torchao's."""
    try:
        from torchao import quantization  # ty: ignore[import-not-found]  (an extra)
    except ImportError:
        raise UserError(
            f"quantize {form} needs torchao, which is not installed: pip install 'flashdreams[quantize]'; int8 needs "
            "nothing"
        ) from None
    if form == "fp8":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            raise UserError(
                f"quantize fp8 needs a GPU that multiplies in fp8 (compute capability 8.9 or more), not {device}; "
                "use int8"
            )
        config: Any = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    else:
        config = quantization.Int8DynamicActivationInt8WeightConfig()

    def change(layer: nn.Linear, device: torch.device) -> nn.Module:
        holder = nn.Sequential(deepcopy(layer).to(device))
        quantization.quantize_(holder, config)
        return holder[0]

    return change
