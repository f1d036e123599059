"""From a prompt to the ids that the text encoder reads: the chat it stands in, and the tokenizer of the checkpoint."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.digest import file_digest
from flashdreams.recipes.wan.tokenizer import WITHOUT, find_tokenizer

SYSTEM = "You are a helpful assistant who will provide prompts to an image generator."
CHAT = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n"
"""What stands around a prompt, in the words of Qwen's template."""
PAD = "<|endoftext|>"


def load_tokenizer(place: str, vocab_size: int) -> Any:
    """The ``tokenizers.Tokenizer`` found at or near ``place``.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    from tokenizers import Tokenizer

    path = find_tokenizer(place)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what the package raises is a bare Exception
        raise CheckpointError(f"{path} is not a tokenizer ({error}); download it again") from None
    missing = [word for word in (PAD, "<|im_start|>", "<|im_end|>") if tokenizer.token_to_id(word) is None]
    if missing or tokenizer.get_vocab_size() > vocab_size:
        raise CheckpointError(
            f"{path} is the tokenizer of another model: it lacks {missing or 'nothing'} and has "
            f"{tokenizer.get_vocab_size()} tokens; expected that of Qwen2.5-VL, of at most {vocab_size}"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def identity(place: str | None) -> tuple[str, ...]:
    """What embeddings depend on besides weights and config: the tokenizer's digest, and versions.

    Raises:
        CheckpointError: there is no tokenizer.
    """
    if place is None:
        raise CheckpointError(f"this text encoder has neither weights nor a tokenizer; {WITHOUT}")
    return (file_digest(find_tokenizer(place)), *(f"{name} {version(name)}" for name in ("tokenizers", "transformers")))
