"""Prompts to umT5 embeddings, as the Wan DiTs take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdreams.core.checkpoint.sources import RandomSource, ZeroSource, parse_source
from flashdreams.core.notices import say_once
from flashdreams.infra.encoder import TextEncoder
from flashdreams.recipes.wan.keymaps import UMT5_FROM_TRANSFORMERS
from flashdreams.recipes.wan.tokenizer import PAD, WITHOUT, clean_prompt, load_tokenizer
from flashdreams.recipes.wan.umt5 import UMT5Encoder
from flashdreams.recipes.wan.umt5_config import UMT5Config


class UMT5TextEncoder(TextEncoder):
    """umT5 and its tokenizer, which is read first, so that a missing one is noticed before gigabytes of weights are."""

    config: UMT5Config
    layouts: ClassVar = {"transformers": UMT5_FROM_TRANSFORMERS}

    def __init__(self, config: UMT5Config) -> None:
        super().__init__(config)
        place = config.tokenizer_place
        if (
            config.tokenizer is None
            and place is not None
            and isinstance(parse_source(place), RandomSource | ZeroSource)
        ):
            place = None
        self.tokenizer: Any = None if place is None else load_tokenizer(place, config.vocab_size)
        self.encoder = UMT5Encoder(config)

    @property
    def checkpoint_root(self) -> UMT5Encoder:
        """A checkpoint holds the encoder's own keys."""
        return self.encoder

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """``[B, text_len, dim]`` embeddings of ``B`` prompts, zero beyond the tokens of each.

        Raises:
            ValueError: there is no tokenizer.
        """
        rows = [self.tokenize(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        device = self.encoder.token_embedding.weight.device
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
        # Padding beyond the longest prompt would change nothing: no token attends to it, and its rows are zeroed.
        hidden = self.encoder(ids, mask).masked_fill(mask[..., None] == 0, 0)
        return F.pad(hidden, (0, 0, 0, self.config.text_len - longest))

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a cleaned prompt, end mark included; at most ``text_len``."""
        if self.tokenizer is None:
            raise ValueError(f"this text encoder has no tokenizer; set its tokenizer to a tokenizer.json, or {WITHOUT}")
        ids = self.tokenizer.encode(clean_prompt(prompt)).ids
        limit = self.config.text_len
        if len(ids) > limit:
            say_once(f"a prompt has {len(ids)} tokens; the text encoder takes {limit}, so its end is not read")
            ids = ids[: limit - 1] + ids[-1:]
        return ids
