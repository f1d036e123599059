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


KEYS = {"w": "up", "a": "left", "s": "down", "d": "right"}
DEFAULT_HOLD = 16
MAX_HOLD = 1_000_000


def action_name(control: str | None) -> str:
    """The action a control word or key means; ``None`` is no key. Raises ``ValueError`` naming those there are."""
    word = "none" if control is None else str(control).strip().lower()
    word = KEYS.get(word, word)
    if word not in ACTIONS:
        raise ValueError(f"control {control!r} is not known; expected one of {', '.join(ACTIONS)} or a key w, a, s, d")
    return word


def parse_actions(text: str) -> list[str]:
    """``"right:24 none:8 up"`` -> one action per frame; a word without a number holds for 16 frames (1 s)."""
    actions: list[str] = []
    for item in re.split(r"[\s,;]+", text.strip()):
        word, separator, count = item.partition(":")
        if separator and not (count.isdecimal() and len(count) < 8 and 0 < int(count) <= MAX_HOLD):
            raise ValueError(f"control {item!r}: {count!r} is not a number of frames; write for instance 'right:24'")
        actions += [action_name(word)] * (int(count) if separator else DEFAULT_HOLD)
    return actions
