"""The fixed prompt, as the embedding it is published as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashdreams.infra.encoder import TextEncoder
from flashvsr.config import FixedPromptConfig


class FixedPrompt(TextEncoder):
    """Says one thing whatever the run; the person has no words in it."""

    prompt: Tensor

    def __init__(self, config: FixedPromptConfig) -> None:
        super().__init__(config)
        self.register_buffer("prompt", torch.zeros(1, config.text_len, config.text_dim))

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """The embedding ``[B, text_len, text_dim]``, once for each of ``prompts``, which are empty.

        Raises:
            ValueError: one is not.
        """
        if given := next(filter(None, prompts), None):
            raise ValueError(f"this model has a prompt of its own and takes no other, but got {given[:40]!r}")
        return self.prompt.expand(len(prompts), -1, -1)


def sole_tensor(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State-dict transform: the only tensor of a file, whatever it is called there, with or without a batch axis."""
    if len(state) != 1:
        return dict(state)
    (tensor,) = state.values()
    return {"prompt": tensor if tensor.ndim == 3 else tensor[None]}
