"""From prompts to embeddings: where the text encoder lives, and what needs none."""

from __future__ import annotations

import gc
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flashdreams._version import __version__
from flashdreams.config import to_dict
from flashdreams.core.checkpoint import LoadReport, open_checkpoint, parse_source
from flashdreams.infra.config import TextEncoderConfig
from flashdreams.infra.embedding_store import read_embedding, write_embedding
from flashdreams.infra.embeds import Embedding, load_embeds, save_embeds
from flashdreams.infra.encoder import TextEncoder

__all__ = ["GivenPrompts", "PromptEncoder", "load_embeds", "save_embeds"]

_REMEMBERED = 16
"""Prompts whose embeddings stay in memory."""


class PromptEncoder(nn.Module):
    """A text encoder that is there when a prompt needs it.

    With residence ``device`` and nothing kept on disk it is a submodule like any other, made at once. Otherwise it is
    made for the first prompt that is new, and with residence ``transient`` freed after it; embeddings of the last
    prompts are remembered. Each prompt is then encoded alone, so that remembered ones are bit-exact.
    """

    module: TextEncoder | None

    def __init__(self, config: TextEncoderConfig, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.device = torch.device(device)
        at_once = config.residence == "device" and not config.cache_embeddings
        self.module = config.setup(device=device) if at_once else None
        self._made: list[TextEncoder] = []  # in a list, since it is no submodule: nothing else moves or counts it
        self._memory: OrderedDict[str, Embedding] = OrderedDict()
        self._report: LoadReport | None = None
        self._digest: str | None = None
        self._facts = ""

    @property
    def checkpoint_digest(self) -> str | None:
        """Digest of the weights' file, as the loaded module says it; found without loading one."""
        if self.module is not None:
            return self.module.checkpoint_digest
        if self._report is not None:
            return self._report.digest
        if self._digest is None and self.config.checkpoint_path is not None:
            self._digest = open_checkpoint(self.config.checkpoint_path).digest()
        return self._digest

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """``[B, S, D]`` embeddings of ``B`` prompts, on the pipeline's device; an empty prompt is unconditional."""
        return self._encode(prompts)[0]

    def slots(self, prompts: Sequence[str], negative_prompt: str | None = None) -> dict[str, Tensor]:
        """``text`` of the prompts and, if one is given, ``negative_text``; a text encoder is made once for both."""
        if negative_prompt is None:
            return {"text": self.encode(prompts)}
        text, negative = self._encode(prompts, [negative_prompt])
        return {"text": text, "negative_text": negative.expand(len(prompts), -1, -1)}

    def _encode(self, *groups: Sequence[str]) -> list[Tensor]:
        if self.module is not None:
            return [self.module.encode(prompts) for prompts in groups]
        known = self._known([prompt for prompts in groups for prompt in prompts])
        length = max(embedding.length for embedding in known.values())
        return [torch.stack([known[prompt].whole(length) for prompt in prompts]) for prompts in groups]

    def _known(self, prompts: Sequence[str]) -> dict[str, Embedding]:
        """Embeddings of the prompts: remembered, kept on disk, or made now."""
        known: dict[str, Embedding] = {}
        for prompt in dict.fromkeys(prompts):
            found = self._memory.get(prompt)
            if found is None and self._on_disk and (kept := read_embedding(self._key(prompt))) is not None:
                found = Embedding(kept.rows.to(self.device), kept.length)
            if found is not None:
                known[prompt] = found
        known |= self._make([prompt for prompt in dict.fromkeys(prompts) if prompt not in known])
        for prompt, embedding in known.items():
            self._memory[prompt] = embedding
            self._memory.move_to_end(prompt)
        while len(self._memory) > _REMEMBERED:
            self._memory.popitem(last=False)
        return known

    @torch.no_grad()
    def _make(self, prompts: Sequence[str]) -> dict[str, Embedding]:
        if not prompts:
            return {}
        transient = self.config.residence == "transient"
        encoder = self._made[0] if self._made else self.config.setup(device=self._place)
        made = {prompt: Embedding.of(encoder.encode([prompt])[0].to(self.device)) for prompt in prompts}
        self._report = encoder.load_report  # the file may have been exchanged since it was looked at
        self._made = [] if transient else [encoder]
        del encoder
        if transient:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        for prompt, embedding in made.items():
            if self._on_disk and torch.isfinite(embedding.rows).all():
                write_embedding(self._key(prompt), embedding)
        return made

    @property
    def _on_disk(self) -> bool:
        """Whether embeddings are kept; not without a checkpoint, which says what made them."""
        return self.config.cache_embeddings and self.config.checkpoint_path is not None

    @property
    def _place(self) -> str:
        return "cpu" if self.config.residence == "cpu" else str(self.device)

    def _key(self, prompt: str) -> str:
        """A name for all that the embeddings of ``prompt`` depend on, bit for bit."""
        if not self._facts:
            elsewhere = ("residence", "cache_embeddings", "checkpoint_path")
            fields = {name: value for name, value in to_dict(self.config).items() if name not in elsewhere}
            entry = getattr(parse_source(self.config.checkpoint_path or ""), "entry", None)
            self._facts = json.dumps([self.config._target, fields, entry, self.config.identity()], default=str)
        words = [self.checkpoint_digest, self._facts, *_machine(self._place), prompt]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()


class GivenPrompts(nn.Module):
    """Stands where a text encoder would, and knows the embeddings of one prompt: those of a file."""

    checkpoint_digest = None

    def __init__(self, slots: Mapping[str, Tensor], prompt: str = "", device: str = "cpu") -> None:
        super().__init__()
        self.prompt = prompt
        self._slots = {name: value.to(device) for name, value in slots.items()}

    def slots(self, prompts: Sequence[str], negative_prompt: str | None = None) -> dict[str, Tensor]:
        """The given embeddings, of ``negative_text`` too where a negative prompt is asked for, whatever it says."""
        other = next((prompt for prompt in prompts if prompt != self.prompt), None)
        if other is not None:
            raise ValueError(
                f"the prompt {other[:40]!r} cannot be encoded: this pipeline was given the embeddings of one prompt "
                "in place of a text encoder; load it with its text encoder"
            )
        names = ["text"] if negative_prompt is None else ["text", "negative_text"]
        return {name: self._slots[name].expand(len(prompts), -1, -1) for name in names}


def _machine(device: str) -> tuple[str, ...]:
    """What the last bits of a result depend on besides its inputs."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else torch.backends.cpu.get_cpu_capability()
    return (__version__, torch.__version__, device.partition(":")[0], name, str(torch.get_num_threads()))
