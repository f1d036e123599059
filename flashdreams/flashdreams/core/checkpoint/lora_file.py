"""What a LoRA file adds to which layers, whichever tool wrote it: peft, diffusers, kohya, ComfyUI, or the model's own.

A layer ``base`` is changed by ``scale * up @ down``. The two factors are called ``lora_B`` and ``lora_A``, or
``lora_up`` and ``lora_down``; the scale is ``alpha / rank``, with alpha in the file, in its notes, in the
``adapter_config.json`` beside it, or equal to the rank. ``.diff`` and ``.diff_b`` are added as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.lora_settings import LoraSettings
from flashdreams.core.checkpoint.values import check_finite

_FACTOR = re.compile(
    r"(?P<base>.+?)[._](?P<part>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
_ALPHA = re.compile(r"(?P<base>.+)\.(?:lora_)?alpha")
_DIFFERENCE = re.compile(r"(?P<base>.+)\.(?P<part>diff|diff_b)")
_DORA = re.compile(r".*[._](?:dora_scale|lora_magnitude_vector|magnitude)(?:\.(?!lora_)[^.]+){0,2}")
_OTHER = {
    "LoHa": re.compile(r".*\.hada_[wt]\d.*"),
    "LoKr": re.compile(r".*\.lokr_[wt]\d.*"),
    "OFT": re.compile(r".*\.(?:oft_blocks|oft_diag|boft_\w+).*"),
    "LoCon with a middle factor": re.compile(r".*\.lora_mid.*"),
}
_DOWN = ("lora_A", "lora_down", "lora.down")


@dataclass(frozen=True)
class LowRank:
    """``scale * up @ down``: ``down`` ``[rank, ...]`` (a convolution's kernel is in it), ``up`` ``[out, rank]``."""

    down: Tensor
    up: Tensor
    scale: float

    @property
    def is_zero(self) -> bool:
        return not (self.scale and self.down.any() and self.up.any())

    def fits(self, shape: tuple[int, ...]) -> bool:
        rank, out = self.down.shape[0], self.up.shape[0]
        return (
            len(shape) > 1
            and self.up.numel() == out * rank
            and shape[0] == out
            and math.prod(shape[1:]) * rank == self.down.numel()
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.up.shape[0], *self.down.shape[1:])

    def __call__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        up, down = (factor.to(device, dtype).flatten(1) for factor in (self.up, self.down))
        return (up @ down).mul_(self.scale).view(shape)


@dataclass(frozen=True)
class Difference:
    """``scale * value``, of the tensor's own shape."""

    value: Tensor
    scale: float = 1.0

    @property
    def is_zero(self) -> bool:
        return not (self.scale and self.value.any())

    def fits(self, shape: tuple[int, ...]) -> bool:
        return tuple(self.value.shape) == shape

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def __call__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.value.to(device, dtype) * self.scale


@dataclass(frozen=True)
class Addition:
    """One change, by the file's own name of the layer; ``leaf`` is the layer's tensor, ``weight`` or ``bias``."""

    base: str
    leaf: str
    change: LowRank | Difference


@dataclass
class _Layer:
    factors: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    alpha: float | None = None


def read_additions(state: Mapping[str, Tensor], source: str, settings: LoraSettings | None = None) -> list[Addition]:
    """The changes that the tensors of a LoRA file stand for.

    Raises:
        CheckpointError: DoRA and other methods, by name and key; a factor without its partner; keys of no LoRA; NaN.
    """
    settings = settings or LoraSettings()
    _refuse_others(state, source, settings)
    layers: dict[str, _Layer] = {}
    additions: list[Addition] = []
    strange: list[str] = []
    for key, value in state.items():
        if match := _FACTOR.fullmatch(key):
            layer = layers.setdefault(match["base"], _Layer())
            place = layer.biases if match["leaf"] == "bias" else layer.factors
            side = "down" if match["part"] in _DOWN else "up"
            if side in place:
                raise CheckpointError(f"{source} holds several LoRAs ({key} is the second); give a file with one")
            place[side] = _usable(value, key, source)
            layer.keys.append(key)
        elif match := _ALPHA.fullmatch(key):
            layers.setdefault(match["base"], _Layer()).alpha = _alpha(value, key, source)
        elif match := _DIFFERENCE.fullmatch(key):
            leaf = "bias" if match["part"] == "diff_b" else "weight"
            additions.append(Addition(match["base"], leaf, Difference(_usable(value, key, source))))
        else:
            strange.append(key)
    if strange or not state:
        held = f"{len(strange)} keys that belong to no LoRA ({', '.join(strange[:3])})" if state else "nothing"
        raise CheckpointError(
            f"{source} holds {held}; expected pairs of lora_A/lora_B or lora_down/lora_up, alpha, diff, diff_b"
        )
    for base, layer in layers.items():
        if layer.keys:  # ComfyUI writes an alpha beside a plain difference too, where it means nothing
            additions += _from_layer(base, layer, source, settings)
    return additions


def _from_layer(base: str, layer: _Layer, source: str, settings: LoraSettings) -> Iterable[Addition]:
    if layer.factors.keys() != {"down", "up"} or "down" in layer.biases:
        raise CheckpointError(f"{source} has {layer.keys[0]} without the factor that belongs to it; it is incomplete")
    down, up = layer.factors["down"], layer.factors["up"]
    rank = down.shape[0] if down.ndim > 1 else 0
    if not rank or up.ndim < 2 or up.shape[1] != rank:
        raise CheckpointError(
            f"{source}: the factors of {base} are {list(up.shape)} and {list(down.shape)}; expected [out, rank] and "
            "[rank, in]"
        )
    scale = settings.scale(base, rank, layer.alpha)
    yield Addition(base, "weight", LowRank(down, up, scale))
    if "up" in layer.biases:
        yield Addition(base, "bias", Difference(layer.biases["up"], scale))


def _refuse_others(state: Mapping[str, Tensor], source: str, settings: LoraSettings) -> None:
    dora = next((key for key in state if _DORA.fullmatch(key)), None)
    if dora or settings.dora:
        shown = f"its key {dora}" if dora else "use_dora in its adapter_config.json"
        raise CheckpointError(
            f"{source} is a DoRA ({shown} is a magnitude), and merging it as a LoRA would scale the weights wrongly; "
            "train a plain LoRA, or export a plain LoRA or merged weights with the tool that made it"
        )
    for name, pattern in _OTHER.items():
        if found := next((key for key in state if pattern.fullmatch(key)), None):
            raise CheckpointError(
                f"{source} is a {name} (its key {found}), not a LoRA; export a plain LoRA or merged weights with the "
                "tool that made it"
            )


def _usable(value: Tensor, key: str, source: str) -> Tensor:
    if not value.is_floating_point():
        raise CheckpointError(f"{source}: {key} is stored as {value.dtype}; a LoRA is read in bf16, fp16 or fp32")
    if value.numel():
        check_finite(value, key, source, value.dtype)
    return value.detach()


def _alpha(value: Tensor, key: str, source: str) -> float:
    if value.numel() != 1 or not math.isfinite(float(value)):
        raise CheckpointError(f"{source}: {key} is {value.flatten()[:3].tolist()}; expected one finite number")
    return float(value)
