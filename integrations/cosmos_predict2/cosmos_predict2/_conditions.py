"""What a rollout of a Cosmos model is told once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

_AXES = {
    "text": "[batch, tokens, width]",
    "negative_text": "[batch, tokens, width]",
    "image_latent": "[batch, channels, frames, rows, columns]",
}


@dataclass(frozen=True)
class CosmosConditions:
    """Text embeddings ``[B, S, text_dim]``, those of the negative prompt, and the latents of given first frames.

    Without ``image_latent`` the world is made from text alone; with the one frame of a picture, or the two of a clip of
    five pixel frames, it goes on from there.
    """

    text: Tensor
    negative_text: Tensor | None = None
    image_latent: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if value.ndim != _AXES[name].count(",") + 1 or value.shape[0] != self.text.shape[0]:
                raise ValueError(f"condition {name!r} has shape {list(value.shape)}; expected {_AXES[name]}")

    def to_dict(self) -> dict[str, Tensor]:
        """The filled slots by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @classmethod
    def from_dict(cls, slots: dict[str, Tensor]) -> CosmosConditions:
        """Inverse of :meth:`to_dict`."""
        if slots.keys() - _AXES.keys() or "text" not in slots:
            raise ValueError(
                f"condition slots are {sorted(slots)}; expected 'text' and any of negative_text, image_latent"
            )
        return cls(**slots)
