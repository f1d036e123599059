"""Prompts to the hidden states of a language model, as the Cosmos DiT takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2._tokenizer import CHAT, PAD, load_tokenizer
from cosmos_predict2.config import ReasonConfig
from flashdreams.core.checkpoint.sources import RandomSource, parse_source
from flashdreams.core.notices import say_once
from flashdreams.infra.encoder import TextEncoder
from flashdreams.recipes.wan.tokenizer import WITHOUT


class ReasonTextEncoder(TextEncoder):
    """The language model of Qwen2.5-VL, from transformers, and its tokenizer, which is read first, so that a missing
    one is noticed before gigabytes of weights are."""

    config: ReasonConfig

    def __init__(self, config: ReasonConfig) -> None:
        super().__init__(config)
        place = config.tokenizer_place
        if config.tokenizer is None and place is not None and isinstance(parse_source(place), RandomSource):
            place = None
        self.tokenizer: Any = None if place is None else load_tokenizer(place, config.vocab_size)
        self.model = language_model(config)

    @property
    def checkpoint_root(self) -> Any:
        """A checkpoint holds the language model's own keys."""
        return self.model

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """``[B, text_len, num_layers * dim]``: of each token, the output of every layer, standardised, side by side.

        Raises:
            ValueError: there is no tokenizer.
        """
        ids = torch.tensor([self.tokenize(prompt) for prompt in prompts], device=self.model.embed_tokens.weight.device)
        hidden = self.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        # The first are the word embeddings; the last layer's come after the final norm.
        return torch.cat([standardise(states) for states in hidden[1:]], dim=-1)

    def tokenize(self, prompt: str) -> list[int]:
        """The ids of a prompt in its chat, ``text_len`` of them."""
        if self.tokenizer is None:
            raise ValueError(f"this text encoder has no tokenizer; set its tokenizer to a tokenizer.json, or {WITHOUT}")
        ids, limit = self.tokenizer.encode(CHAT.format(prompt), add_special_tokens=False).ids, self.config.text_len
        if len(ids) > limit:
            say_once(f"a prompt has {len(ids)} tokens; the text encoder takes {limit}, so its end is not read")
        return (ids + [self.tokenizer.token_to_id(PAD)] * (limit - len(ids)))[:limit]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves and casts as any module, but the rotary frequencies stay in float32, as where transformers loads it:
        in bfloat16 positions beyond a few dozen would be wrong."""
        rotary = self.model.rotary_emb
        kept = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(rotary, name, buffer.to(getattr(rotary, name).device))
        return self


def language_model(config: ReasonConfig) -> Any:
    """``Qwen2_5_VLTextModel`` of these sizes.

    Text has the same position on all three axes of its rotary embedding, so that how a head is split among them
    (``mrope_section``) means nothing here.
    """
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    half = config.dim // config.num_heads // 2
    space = 3 * half // 8
    sizes = Qwen2_5_VLTextConfig(
        vocab_size=config.vocab_size, hidden_size=config.dim, intermediate_size=config.ffn_dim,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.eps,
        rope_parameters={
            "rope_type": "default", "rope_theta": config.rope_theta, "mrope_section": [half - 2 * space, space, space],
        },
    )  # fmt: skip
    return Qwen2_5_VLTextModel(sizes)


def standardise(states: Tensor) -> Tensor:
    """``[..., D]`` with mean 0 and (unbiased) deviation 1 over each vector, computed in at least float32."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    return (wide / (wide.std(-1, keepdim=True) + 1e-8)).to(states.dtype)
