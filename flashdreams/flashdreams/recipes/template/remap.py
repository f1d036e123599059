"""Key map from the published checkpoint to the network's own names, as ordered rules."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

RULES = (
    (r"^(?:model|module|net)\.", ""),
    (r"^transformer_blocks\.", "blocks."),
)
"""Applied in this order to every key."""


def to_wan_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename every key of a checkpoint; two keys that would collide are an error."""
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        new = key
        for pattern, replacement in RULES:
            new = re.sub(pattern, replacement, new)
        if new in renamed:
            raise ValueError(f"two checkpoint keys become {new!r}; the second is {key!r}")
        renamed[new] = value
    return renamed
