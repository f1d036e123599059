"""One loaded template model for all tests of sessions, and a scheduler for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import template_pipeline
from stage import Body, Stage


@pytest.fixture(scope="session")
def template() -> Any:
    return template_pipeline()


@pytest.fixture
def stage(template: Any, tmp_path: Path) -> Callable[..., None]:
    """Runs a test's body beside a scheduler."""

    def play(body: Body, clock: Callable[[], float] | None = None, **settings: Any) -> None:
        async def main() -> None:
            made = Stage(template, tmp_path, clock or time.monotonic, **settings)
            await made.scheduler.start()
            task = asyncio.create_task(made.scheduler.run())
            play = asyncio.create_task(body(made))
            done, _ = await asyncio.wait({task, play}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
            for each in (task, play):
                each.cancel()
            await asyncio.gather(task, play, return_exceptions=True)
            assert done, "it did not end"
            done.pop().result()

        asyncio.run(main())

    return play
