"""The words in the parts of a key, brought to a common form.

The vocabulary is the field's (what people call queries, norms, embeddings), never a model's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

_VOCABULARY = {
    "q": "query queries wq",
    "k": "key keys wk",
    "v": "value values val wv",
    "o": "out output outputs wo",
    "in": "input inputs",
    "attn": "attention attentions att mha",
    "self attn": "selfattn selfattention sa",
    "cross attn": "crossattn crossattention xattn ca",
    "norm": "norms ln layernorm rmsnorm groupnorm layernorms rms",
    "ffn": "ff mlp feedforward",
    "emb": "embed embedding embeddings embedder embedders embd",
    "text": "txt caption captions",
    "image": "img images vision visual",
    "time": "timestep timesteps",
    "pos": "position positional positions",
    "cls": "class",
    "patch": "patchify patches",
    "mod": "modulation modulations adaln ada",
    "enc": "encoder encode encoders",
    "dec": "decoder decode decoders",
    "mid": "middle",
    "down": "downsample downsamples downsampler downsamplers",
    "up": "upsample upsamples upsampler upsamplers",
    "res": "resnet resnets residual residuals resblock resblocks",
    "short": "shortcut skip",
    "bias": "beta",
    "weight": "gamma kernel",
    "add": "added extra",
    "rel": "relative",
    "freq": "freqs frequency frequencies",
    "proj": "projection projections project",
    "lin": "linear dense",
}
_CONCEPTS = {word: concept.split() for concept, words in _VOCABULARY.items() for word in words.split()}
_PAIRS = {("feed", "forward"): ["ffn"], ("layer", "norm"): ["norm"], ("ada", "ln"): ["mod"], ("enc", "dec"): ["cross"]}

NOISE = frozenset(
    ("to", "proj", "lin", "layer", "layers", "module", "weight", "w", "fn", "the", "of", "wrapped", "conv", "fc")
)
"""Words that say how a thing is built, not which one it is."""

GENERAL = frozenset(("emb", "in", "net", "block", "blocks", "inner", "base"))
"""Words that many things have in their names: two that share no other are not the same for it."""

PLACES = frozenset(("pre", "post", "before", "after", "res"))
"""Words that put a thing beside another one: ``post_attention_norm`` is not the norm of the attention."""

RIVALS = tuple(
    frozenset(words.split())
    for words in ("q k v o", "self cross", "in o", "enc dec", "text image time", "up down gate", "weight bias")
)
"""Words of one set never mean each other."""

ENDS = frozenset(("post", "after"))
"""The places of :data:`PLACES` that put a thing where its other words are over."""

SEQUENCES = (
    ("self", "cross", "ffn"),
    ("attn", "ffn"),
    ("in", "o"),
    ("in", "post"),
    ("pre", "post"),
    ("first", "second", "third"),
)
"""What comes before what in every network: numbers on the other side count these off."""

ORDERED = frozenset(word for chain in SEQUENCES for word in chain)
"""The words of :data:`SEQUENCES`."""


@dataclass(frozen=True)
class Name:
    """A path below some node, taken apart.

    Attributes:
        text: the path as written.
        words: its words, in the common form.
        numbers: its numbers, in order.
        listed: for each number, whether it is a whole part of the path (an index in a list), not the end of a name.
    """

    text: str
    words: frozenset[str]
    numbers: tuple[int, ...]
    listed: tuple[bool, ...]

    @property
    def telling(self) -> frozenset[str]:
        """The words that may say which of several alike things this is."""
        return self.words - NOISE

    @property
    def is_index(self) -> bool:
        """Whether every number is an index in a list."""
        return all(self.listed)


@cache
def name_of(path: tuple[str, ...]) -> Name:
    """Take a path apart.

    >>> name_of(("layer", "0", "SelfAttention")).words
    frozenset({'layer', 'self', 'attn'})
    """
    words: list[str] = []
    numbers: list[int] = []
    listed: list[bool] = []
    for part in path:
        if part.isdecimal():
            numbers.append(int(part))
            listed.append(True)
            continue
        found = [text.lower() for text in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", part)]
        for token in _regroup(found):
            if token.isdecimal():
                numbers.append(int(token))
                listed.append(False)
            else:
                words.extend(_CONCEPTS.get(token, [token]))
    return Name(".".join(path), frozenset(words), tuple(numbers), tuple(listed))


def _regroup(tokens: list[str]) -> list[str]:
    """Words written apart joined (``feed_forward``), and ``qnorm`` taken apart."""
    joined: list[str] = []
    for token in tokens:
        if joined and (joined[-1], token) in _PAIRS:
            joined[-1:] = _PAIRS[joined[-1], token]
        elif glued := re.fullmatch(r"([qkv])(norm|proj|ln|img|lin)", token):
            joined.extend(glued.groups())
        else:
            joined.append(token)
    return joined


def template_of(text: str) -> str:
    """``text`` with every number replaced by ``#``."""
    return re.sub(r"\d+", "#", text)


def contradict(first: frozenset[str], second: frozenset[str]) -> bool:
    """Whether the two sets of words cannot mean one thing."""
    return any(first & rivals and second & rivals and not first & second & rivals for rivals in RIVALS)


def spelled_parts(name: Name) -> tuple[str, ...]:
    """What a fused tensor is made of, in order, where its name says so: ``to_qkv`` -> q, k, v."""
    for part in reversed(name.text.split(".")):
        tokens = [text.lower() for text in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)]
        for token in tokens:
            letters = re.fullmatch(r"w?(q?k?v?)", token)
            if letters and len(letters[1]) > 1:
                return tuple(letters[1])
        concepts = [concept for token in tokens for concept in _CONCEPTS.get(token, [token])]
        for rivals in RIVALS:
            run = tuple(concept for concept in concepts if concept in rivals)
            if len(run) > 1 and len(set(run)) == len(run):
                return run
    return ()
