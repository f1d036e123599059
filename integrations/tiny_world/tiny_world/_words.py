"""Words of the tiny world: closed vocabulary, tokenizer and control words (torch-free)."""

from __future__ import annotations

import re

COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan", "orange", "white")
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
BACKGROUNDS = ("black", "gray", "blue", "green", "red", "brown")
MOTIONS = ("still", "left", "right", "up", "down", "bounce")
ACTIONS = ("none", "left", "right", "up", "down")

PAD, UNK = "<pad>", "<unk>"
VOCABULARY: tuple[str, ...] = (
    (PAD, UNK, "a", "the", "on", "with", "background")
    + COLOURS
    + SHAPES
    + ("black", "gray", "brown", "striped", "plain")
    + ("moves", "moving", "stays", "still", "bounces", "bouncing", "around")
    + ("left", "right", "up", "down")
)
TEXT_LEN = 12
_INDEX = {word: i for i, word in enumerate(VOCABULARY)}
_ALIASES = {"grey": "gray", "an": "a"}


def tokenize(prompt: str) -> list[int]:
    """Ids of the first ``TEXT_LEN`` words, padded with 0; unknown words map to ``<unk>``.

    Every string is accepted: the empty prompt is all pads, which the model knows as "anything".
    """
    words = re.findall(r"[^\W_]+", prompt.lower())[:TEXT_LEN]
    ids = [_INDEX.get(_ALIASES.get(word, word), _INDEX[UNK]) for word in words]
    return ids + [_INDEX[PAD]] * (TEXT_LEN - len(ids))


KEYS = {"w": "up", "a": "left", "s": "down", "d": "right", "up": "up", "left": "left", "down": "down", "right": "right"}
"""Keys, and the action each stands for."""
