"""What a rollout begins with, as one value that is sent, kept and begun again. No torch here."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Scene:
    """Prompt, seed, size and first frame of a rollout. ``image`` is uint8 ``[H, W, 3]`` of the size the model takes."""

    prompt: str
    seed: int
    height: int
    width: int
    negative_prompt: str | None = None
    image: np.ndarray | None = None

    def to_json(self) -> dict[str, Any]:
        """As a session recording holds it. The seed is text: programs that read JSON may not have 64-bit numbers."""
        value = {**vars(self), "seed": str(self.seed)}
        if self.image is not None:
            value["image"] = {"shape": self.image.shape, "rgb": base64.b64encode(self.image.tobytes()).decode()}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scene:
        """What :meth:`to_json` wrote."""
        fields: dict[str, Any] = dict(value) | {"seed": int(value["seed"])}
        if (image := fields.get("image")) is not None:
            pixels = np.frombuffer(base64.b64decode(image["rgb"]), np.uint8)
            fields["image"] = pixels.reshape(image["shape"])
        return cls(**fields)
