"""What a rollout of a Wan model is told once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

_AXES = {
    "text": "[batch, tokens, width]",
    "negative_text": "[batch, tokens, width]",
    "image_latent": "[batch, channels, frames, rows, columns]",
    "image_mask": "[batch, 4, frames, rows, columns]",
    "image_embed": "[batch, tokens, width]",
}


@dataclass(frozen=True)
class WanConditions:
    """Text embeddings ``[B, S, text_dim]``, those of the negative prompt, and what is known of given images; for models
    without text, the latter alone.

    ``image_latent`` holds the latents of given first frames or, with ``image_mask`` (1 where a frame is given; four
    channels, one per pixel frame of a latent one), of a clip that is empty elsewhere; the last of them stands for all
    frames after it. ``image_embed`` holds the tokens of a vision encoder.
    """

    text: Tensor | None = None
    negative_text: Tensor | None = None
    image_latent: Tensor | None = None
    image_mask: Tensor | None = None
    image_embed: Tensor | None = None

    def __post_init__(self) -> None:
        slots = self.to_dict()
        for name, value in slots.items():
            if value.ndim != _AXES[name].count(",") + 1 or value.shape[0] != next(iter(slots.values())).shape[0]:
                raise ValueError(f"condition {name!r} has shape {list(value.shape)}; expected {_AXES[name]}")

    def to_dict(self) -> dict[str, Tensor]:
        """The filled slots by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @classmethod
    def from_dict(cls, slots: dict[str, Tensor]) -> WanConditions:
        """Inverse of :meth:`to_dict`."""
        unknown = slots.keys() - {f.name for f in fields(cls)}
        if unknown or not slots:
            raise ValueError(f"condition slots are {sorted(slots)}; expected some of {', '.join(_AXES)}")
        return cls(**slots)
