"""Embeddings of prompts in files: ``text`` and ``negative_text``, saved by one run and given to others."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.content import file_size, kind_of
from flashdreams.core.checkpoint.header import read_file_header
from flashdreams.core.checkpoint.pickle import read_object

if TYPE_CHECKING:
    from flashdreams.infra.config import PipelineConfig

SLOTS = ("text", "negative_text")
EXPECTED = "'text' [tokens, width] or [1, tokens, width] and optionally 'negative_text'"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST = 1 << 30
"""Bytes; a prompt has some megabytes at most."""


@dataclass(frozen=True)
class Embedding:
    """The ``[n, D]`` rows of one prompt's embeddings, and how many there are with the zeros that follow them."""

    rows: Tensor
    length: int

    @classmethod
    def of(cls, whole: Tensor) -> Embedding:
        """Of embeddings ``[S, D]``; a negative zero is not taken for padding, so that :meth:`whole` is bit-exact."""
        used = whole.contiguous().view(torch.uint8).any(dim=1).nonzero()
        count = int(used[-1]) + 1 if len(used) else 1
        return cls(whole[:count].clone(), len(whole))

    def whole(self, length: int | None = None) -> Tensor:
        """``[S, D]``; or with more zeros."""
        return F.pad(self.rows, (0, 0, 0, (length or self.length) - len(self.rows)))


def save_embeds(path: str | Path, text: Tensor, negative_text: Tensor | None = None) -> None:
    """Write the embeddings ``[1, S, D]`` or ``[S, D]`` of a prompt, and of a negative one, for :func:`load_embeds`.

    Raises:
        ValueError: they are of several prompts.
        OSError: the file cannot be written.
    """
    path, tensors, lengths = Path(path), {}, {}
    for name, value in zip(SLOTS, (text, negative_text), strict=True):
        if value is None:
            continue
        kept = Embedding.of(_single(value, name, "this batch").cpu())
        tensors[name], lengths[name] = kept.rows, str(kept.length)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(save(tensors, metadata=lengths))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_embeds(path: str | Path, config: PipelineConfig | None = None) -> dict[str, Tensor]:
    """``text`` and, if the file has it, ``negative_text``, both ``[1, S, D]`` on the CPU: ``conditions`` of a rollout.

    The file is safetensors, or of ``torch.save`` with such a dict or the tensor ``text`` alone; it is read under
    weights-only rules.

    Args:
        config: the model that they are for, which they are then checked against.

    Raises:
        CheckpointError: there is no such file, it holds something else, or it does not fit the model.
    """
    path = Path(path)
    values, lengths = _read(path)
    if "text" not in values or values.keys() - set(SLOTS):
        raise CheckpointError(f"{path} holds {_listed(values)}; embeddings of a prompt are {EXPECTED}")
    slots = {}
    for name, value in values.items():
        rows = _single(_checked(value, name, path), name, str(path))
        stated = lengths.get(name, "")
        length = max(int(stated) if stated.isdecimal() and len(stated) < 5 else 0, len(rows))
        if config is not None:
            _check_fit(name, length, rows.shape[1], config, path)
        if not torch.isfinite(rows).all():
            raise CheckpointError(f"{path}: {name!r} holds NaN or infinity; encode the prompt again")
        slots[name] = Embedding(rows, length).whole()[None]
    if config is not None and len(slots) == 1 and config.diffusion_model.negative_prompt(None) is not None:
        raise CheckpointError(
            f"{path} has no 'negative_text', which guidance needs; save it too, or set --guidance-scale 1"
        )
    return slots


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What stands in the file by name, and its metadata."""
    try:
        size, kind = file_size(path), kind_of(path)
    except CheckpointError as error:
        if not path.exists():
            raise CheckpointError(f"no embeddings at {path}; give a file that --save-embeds wrote") from None
        raise CheckpointError(f"these are no embeddings of a prompt: {error}") from None
    if size > _LARGEST:
        raise CheckpointError(f"{path} has {size} bytes, more than embeddings of a prompt; expected {EXPECTED}")
    if kind == "safetensors":
        header = read_file_header(path)
        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key).clone() for key in header.tensors}, header.metadata
        except SafetensorError as error:  # number formats that PyTorch lacks
            raise CheckpointError(f"{path} holds no embeddings: {error}") from None
    if kind == "index":
        raise CheckpointError(f"{path} is JSON text, not embeddings; expected a safetensors file with {EXPECTED}")
    content = read_object(path)
    return (content if isinstance(content, dict) else {"text": content}), {}


def _checked(value: Any, name: str, path: Path) -> Tensor:
    """``value``, if it is a plain tensor of numbers that embeddings have."""
    plain = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    if not plain or value.dtype not in _DTYPES:
        kind = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise CheckpointError(f"{path}: {name!r} is {kind}; expected a tensor of float32, bfloat16 or float16")
    return value.detach()


def _single(value: Tensor, name: str, where: str) -> Tensor:
    """``[S, D]`` of one prompt."""
    rows = value[0] if value.ndim == 3 and len(value) == 1 else value
    if rows.ndim != 2 or not math.prod(rows.shape):
        raise CheckpointError(
            f"{where}: {name!r} has shape {list(value.shape)}; expected [tokens, width] or [1, tokens, width]"
        )
    return rows


def _check_fit(name: str, length: int, width: int, config: PipelineConfig, path: Path) -> None:
    """Compare with what the model's network takes."""
    most, wanted = config.diffusion_model.transformer.text_shape
    if wanted is not None and width != wanted:
        raise CheckpointError(
            f"{path}: {name!r} is {width} wide, but {config.name} takes {wanted}; these are embeddings of another text "
            "encoder"
        )
    if most is not None and length > most:
        raise CheckpointError(f"{path}: {name!r} has {length} tokens; {config.name} takes at most {most}")


def _listed(values: dict[str, Any]) -> str:
    names = [repr(str(name)[:40]) for name in list(values)[:5]]
    return (", ".join(names) or "nothing") + (f" and {len(values) - 5} more" if len(values) > 5 else "")
