"""The LoRAs of a run of the command line: ``--lora SOURCE[:WEIGHT[:EXPERT]]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from flashdreams.core.checkpoint.lora import check_weights, read_lora
from flashdreams.core.checkpoint.sources import LocalSource, parse_source
from flashdreams.core.notices import say_once
from flashdreams.infra.config import PipelineConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.loading import build_on_meta, expert_configs

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

_CHOICE = re.compile(r"(?P<source>.+?)(?:[:=](?P<weight>[^:=/\\]*))?(?::(?P<expert>\d+))?")


@dataclass(frozen=True)
class LoraChoice:
    """A LoRA, its weight, and the expert it is for where there are several."""

    name: str
    source: str
    weight: float
    expert: int | None = None


def parse_loras(texts: Sequence[str]) -> tuple[LoraChoice, ...]:
    """The LoRAs that ``texts`` name, each called after its file.

    Raises:
        UserError: a weight is no number.
    """
    choices: list[LoraChoice] = []
    for text in texts:
        source, weight, expert = _take_apart(text)
        stem = PurePosixPath(source.partition("#")[0].rstrip("/")).name.partition("@")[0].removesuffix(".safetensors")
        taken = [choice.name for choice in choices]
        name = next(name for i in range(1, len(taken) + 2) if (name := f"{stem}-{i}" if i > 1 else stem) not in taken)
        choices.append(LoraChoice(name, source, weight, expert))
    return tuple(choices)


def _take_apart(text: str) -> tuple[str, float, int | None]:
    if isinstance(source := parse_source(text), LocalSource) and source.path.exists():
        return text, 1.0, None
    match = _CHOICE.fullmatch(text)
    if match is None or match["weight"] is None:
        return text, 1.0, None
    try:
        weight = float(match["weight"])
        check_weights({text: weight}, (text,))
    except ValueError:
        raise UserError(
            f"the LoRA is {text!r}; expected SOURCE or SOURCE:WEIGHT, such as style.safetensors:0.8 (and "
            "SOURCE:WEIGHT:EXPERT for a model of several experts)"
        ) from None
    return match["source"], weight, None if match["expert"] is None else int(match["expert"])


def check_loras(config: PipelineConfig, choices: Iterable[LoraChoice]) -> None:
    """Match every LoRA with the model, of which no weight is loaded yet.

    Raises:
        CheckpointError: one does not fit in full.
        UserError: it must be said which expert one is for.
    """
    experts = expert_configs(config.diffusion_model)
    for choice in choices:
        if choice.expert is None and len(experts) > 1:
            raise UserError(
                f"{config.name} has {len(experts)} experts; say which one {choice.source} is for: "
                f"{choice.source}:{choice.weight:g}:EXPERT, where 0 is the one of the highest noise"
            )
        if (choice.expert or 0) >= len(experts):
            raise UserError(f"--lora {choice.source} is for expert {choice.expert}; there are {len(experts)}, from 0")
        module = build_on_meta(experts[choice.expert or 0])
        root = getattr(module, "checkpoint_root", module)
        lora = read_lora(choice.source, root.state_dict(), module.layouts.values())
        say_once(f"{choice.source}: {lora.summary}, weight {choice.weight:g}")


def load_loras(pipeline: StreamInferencePipeline, choices: Iterable[LoraChoice]) -> None:
    """Bring the LoRAs into a pipeline, at their weights for every rollout from now on."""
    for choice in choices:
        pipeline.loras.load(choice.name, choice.source, weight=choice.weight, expert=choice.expert)
