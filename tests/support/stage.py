"""A scheduler with its worker in a thread, and what a test does with it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from flashdreams.serving.config import ServeConfig
from flashdreams.serving.metrics import Metrics
from flashdreams.serving.outbox import Delivery
from flashdreams.serving.scene import Scene
from flashdreams.serving.scheduler import Scheduler
from flashdreams.serving.sessions import Session, SessionOptions
from flashdreams.serving.steered import latent_digest
from serving import ThreadLink

Body = Callable[["Stage"], Coroutine[Any, Any, None]]


class Stage:
    """A scheduler at work, and what a test does with it."""

    def __init__(self, pipeline: Any, folder: Path, clock: Callable[[], float], **settings: Any) -> None:
        self.link = ThreadLink(pipeline)
        self.pipeline = pipeline
        self.metrics = Metrics()
        config, pixels = ServeConfig(**settings), pipeline.config.height * pipeline.config.width
        self.scheduler = Scheduler(self.link, config, pixels, self.metrics, folder, clock)

    def open(self, seed: int = 0, *, attach: bool = True, lossless: bool = True, **options: Any) -> Session:
        config = self.pipeline.config
        scene = Scene("a ball", seed, config.height, config.width)
        takes = config.encoder.takes
        session = self.scheduler.admit(scene, SessionOptions(config.fps, takes, lossless, **options))
        if attach:
            session.attached, session.left = True, None
        self.scheduler.wake()
        return session

    async def chunks(self, session: Session, count: int) -> list[Delivery]:
        """The next so many chunks."""
        got = []
        while len(got) < count:
            item = await self.next(session)
            if isinstance(item, Delivery):
                got.append(item)
        return got

    async def next(self, session: Session) -> Any:
        item = await session.outbox.next()
        self.scheduler.wake()
        assert isinstance(item, Delivery) or item["type"] != "closed", item
        return item

    async def message(self, session: Session, kind: str) -> dict[str, Any]:
        while True:
            item = await session.outbox.next()
            self.scheduler.wake()
            if not isinstance(item, Delivery) and item["type"] == kind:
                return item

    def offline(self, count: int, seed: int = 0, **options: Any) -> list[Any]:
        """The same without a server."""
        config = self.pipeline.config
        with self.pipeline.rollout(
            "a ball", seed=seed, num_chunk=count, height=config.height, width=config.width, **options
        ) as rollout:
            return list(rollout)


def same(got: list[Delivery], wanted: list[Any]) -> bool:
    """Frames and latents, bit for bit."""
    return [each.about["digest"] for each in got] == [latent_digest(chunk) for chunk in wanted] and all(
        torch.equal(torch.from_numpy(each.frames.copy()), chunk.frames) for each, chunk in zip(got, wanted, strict=True)
    )
