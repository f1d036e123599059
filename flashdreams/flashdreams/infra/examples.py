"""``--example-data``: pictures of the package in place of the person's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flashdreams.core.notices import say_once
from flashdreams.examples import FIRST, LAST
from flashdreams.infra.config import RunnerConfig


def with_example_data(config: RunnerConfig) -> RunnerConfig:
    """``config`` with the example pictures where its model is made for images and none is given."""
    if not config.example_data:
        return config
    changes: dict[str, Path] = {}
    if config.image is None and config.video is None and config.pipeline.image_use != "context":
        changes["image"] = FIRST
    if config.last_image is None and config.pipeline.diffusion_model.transformer.takes_last_image:
        changes["last_image"] = LAST
    say_once("example data: " + (", ".join(map(str, changes.values())) or "nothing, as no image is needed"))
    return replace(config, **changes)
