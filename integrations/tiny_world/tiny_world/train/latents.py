"""Stage ``encode``: training clips as latents on disk, and the bank that draws batches from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tiny_world._data import actions_by_latent, render, sample_clips
from tiny_world._network import START
from tiny_world._text import tokenize_batch
from tiny_world._words import TEXT_LEN, UNK, VOCABULARY
from tiny_world.train import parallel
from tiny_world.train._loop import load, save
from tiny_world.train.codec import TrainingCodec, load_codec, to_video
from tiny_world.train.packing import Batch

LONG_LATENTS, SHORT_LATENTS = 12, 2
LONG_PER_SHARD, SHORT_PER_SHARD = 50, 300


def encode_shards(out: Path, shards: int) -> None:
    """Write shard 0 to ``shards - 1`` (those already there are kept), each 50 long and 300 two-latent clips."""
    codec = TrainingCodec()
    load_codec(codec, out / "codec.pt")
    for i in range(shards):
        path = out / "latents" / f"{i:04d}.pt"
        if path.exists() or i % parallel.workers() != parallel.rank():
            continue
        long = encode_clips(codec, 5_000_000 + i, LONG_PER_SHARD, LONG_LATENTS, True)
        short = encode_clips(codec, 6_000_000 + i, SHORT_PER_SHARD, SHORT_LATENTS, i % 4 == 0)
        save(path, long=long, short=short)


@torch.no_grad()
def encode_clips(codec: TrainingCodec, seed: int, n: int, latents: int, with_actions: bool) -> dict[str, Tensor]:
    """``n`` training clips: latents float16 ``[n, T, 12, 8, 8]``, actions uint8 ``[n, T, 4]``, tokens ``[n, 12]``."""
    clips = sample_clips(seed, n, 4 * latents - 3, "train", with_actions)
    frames = render(clips)
    step = max(1, 24 // latents)
    encoded = torch.cat([codec.encode(to_video(frames[i : i + step])) for i in range(0, n, step)])
    actions = torch.from_numpy(actions_by_latent(clips.actions))
    actions[:, 0] = START
    return {"latents": encoded.half(), "actions": actions.byte(), "tokens": tokenize_batch(clips.captions).byte()}


class LatentBank:
    """All shards in memory; :meth:`refresh` picks up those written since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts: dict[str, dict[str, list[Tensor]]] = {"long": {}, "short": {}}
        self._seen: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        for path in sorted(self.folder.glob("*.pt")):
            if path.name not in self._seen and (shard := load(path)):
                self._seen.add(path.name)
                for kind, parts in self._parts.items():
                    for key, value in shard[kind].items():
                        parts.setdefault(key, []).append(value)
        if not self._seen:
            raise FileNotFoundError(f"{self.folder} is empty: run `python -m tiny_world.train --stage encode` first")
        for parts in self._parts.values():
            for key in parts:
                parts[key] = [torch.cat(parts[key])]

    def size(self, kind: str) -> int:
        return len(self._parts[kind]["tokens"][0])

    def sample(self, rng: np.random.Generator, kind: str, n: int, length: int, from_start: bool) -> Batch:
        """``n`` windows of ``length`` latents, at the start of their clips or anywhere after it."""
        latents, actions, tokens = (self._parts[kind][key][0] for key in ("latents", "actions", "tokens"))
        rows = torch.from_numpy(rng.integers(0, len(tokens), n))
        last = latents.shape[1] - length
        starts = np.zeros(n, int) if from_start else rng.integers(1, last + 1, n)
        index = torch.from_numpy(starts[:, None] + np.arange(length))
        thinned = torch.from_numpy(np.stack([thin(row, rng) for row in tokens[rows].numpy()]))
        return Batch(latents[rows[:, None], index].float(), actions[rows[:, None], index].long(), thinned)


def thin(tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Caption dropout: 9 % become empty, 6 % lose 40 % of their words and may gain an unknown one."""
    draw = rng.random()
    words = tokens[tokens > 0].astype(np.int64)
    if draw < 0.09:
        words = words[:0]
    elif draw < 0.15:
        words = words[rng.random(len(words)) < 0.6]
        if len(words) < TEXT_LEN and rng.random() < 0.5:
            words = np.insert(words, rng.integers(0, len(words) + 1), VOCABULARY.index(UNK))
    return np.pad(words, (0, TEXT_LEN - len(words)))
