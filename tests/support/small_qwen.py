"""A small language model in the manner of Cosmos-Predict2.5's text encoder, and a tokenizer of bytes for it."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from cosmos_predict2.config import ReasonConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMALL = ReasonConfig(
    vocab_size=256 + len(SPECIAL), dim=48, ffn_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, text_len=180,
    dtype="float32", residence="device", cache_embeddings=False,
)  # fmt: skip


def write_tokenizer(path: Path) -> None:
    """A token for every byte, and the special ones of Qwen."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(list(SPECIAL))
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
