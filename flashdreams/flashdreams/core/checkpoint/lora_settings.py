"""What a LoRA's training tool wrote beside the tensors: alpha, its exceptions, and variants of the method."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashdreams.core.checkpoint.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
"""The file of peft."""
_NOTE = "lora_adapter_metadata"
"""The same content in the notes of a safetensors file that diffusers wrote, each name after its component's."""


@dataclass(frozen=True)
class LoraSettings:
    """``alpha`` of all layers but those that a pattern names; ``rank_stabilized`` divides it by the rank's root."""

    alpha: float | None = None
    patterns: Mapping[str, float] = field(default_factory=dict)
    rank_stabilized: bool = False
    dora: bool = False

    def scale(self, base: str, rank: int, alpha: float | None) -> float:
        """The factor of a layer: ``alpha`` stands in the file and overrules the rest."""
        if alpha is None:
            named = (a for text, a in self.patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{text})", base))
            alpha = next(named, self.alpha)
        if alpha is None:
            return 1.0
        return alpha / (rank**0.5 if self.rank_stabilized else rank)


def read_settings(config: bytes | None, notes: Mapping[str, str], source: str) -> LoraSettings:
    """From the content of ``adapter_config.json``, if there is one, else from a file's notes.

    Raises:
        CheckpointError: they are there and damaged.
    """
    try:
        if config is not None:
            return _parse(json.loads(config.decode()))
        if _NOTE in notes:
            named = json.loads(notes[_NOTE])
            return _parse({name.rpartition(".")[2] if "pattern" not in name else name: v for name, v in named.items()})
    except (ValueError, TypeError, AttributeError, re.error) as error:
        where = ADAPTER_CONFIG if config is not None else _NOTE
        why = str(error)[:120]
        raise CheckpointError(f"{source}: its {where} is damaged ({why}), so its alpha is unknown") from None
    return LoraSettings()


def _parse(values: Mapping[str, Any]) -> LoraSettings:
    alpha = values.get("lora_alpha")
    patterns = next((v for name, v in values.items() if name.endswith("alpha_pattern")), None) or {}
    for text in patterns:
        re.compile(text)
    return LoraSettings(
        None if alpha is None else float(alpha),
        {text: float(value) for text, value in patterns.items()},
        bool(values.get("use_rslora", False)),
        bool(values.get("use_dora", False)),
    )
