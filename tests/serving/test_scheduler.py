"""Sessions in turn on one worker: fairness, room, resets, and a worker that dies. The worker is a thread here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdreams.core.controls import ControlError, ControlSpec
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.metrics import Metrics
from flashdreams.serving.outbox import Delivery
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.scene import Scene
from flashdreams.serving.scheduler import Scheduler
from flashdreams.serving.sessions import Session, SessionOptions
from flashdreams.serving.steered import latent_digest
from serving import ThreadLink

pytestmark = pytest.mark.ci_cpu
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


def same(got: list[Delivery], wanted: list[Any]) -> bool:
    """Frames and latents, bit for bit."""
    return [each.about["digest"] for each in got] == [latent_digest(chunk) for chunk in wanted] and all(
        torch.equal(torch.from_numpy(each.frames.copy()), chunk.frames) for each, chunk in zip(got, wanted, strict=True)
    )


def test_a_session_is_the_rollout(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        got = await on.chunks(on.open(seed=7), 4)
        assert same(got, on.offline(4, seed=7))
        assert [each.first_frame for each in got] == [0, 1, 9, 17]

    stage(body)


def test_scripted_and_live_controls_are_those_of_the_rollout(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        script = [0.5] * 12
        session = on.open(script=[on.pipeline.config.encoder.takes.validate(each) for each in script], num_chunk=4)
        session.control(-0.5)  # counts from where the script ends
        got = await on.chunks(session, 4)
        wanted = on.offline(4, control=[*script, *[-0.5] * 100])
        assert same(got, wanted)
        assert not same(got, on.offline(4))
        assert got[2].about["controls"] == [{"number": 0.5}] * 3 + [{"number": -0.5}] * 5

    stage(body)


def test_a_control_that_the_model_does_not_take_changes_nothing(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        session = on.open()
        with pytest.raises(ControlError):
            session.control(7.0)
        assert same(await on.chunks(session, 2), on.offline(2))

    stage(body)


def test_sessions_take_turns(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        sessions = [on.open(seed) for seed in range(3)]
        got = await asyncio.gather(*(on.chunks(session, 5) for session in sessions))
        for seed, chunks in enumerate(got):
            assert same(chunks, on.offline(5, seed=seed))
        steps = [request["session"] for request in on.link.asked if request["op"] == "step"]
        counts = [[steps[:end].count(session.number) for session in sessions] for end in range(len(steps))]
        assert max(max(each) - min(each) for each in counts) <= 2

    stage(body)


def test_one_session_too_many_is_refused_and_welcome_when_another_left(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        first, _ = on.open(), on.open()
        with pytest.raises(ProtocolError, match="all 2 sessions are taken") as refused:
            on.open()
        assert refused.value.code == "busy"
        on.scheduler.end(first, "closed")
        assert same(await on.chunks(on.open(seed=4), 2), on.offline(2, seed=4))

    stage(body, max_sessions=2)


def test_a_session_that_does_not_fit_the_memory_is_refused_with_the_figures(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        on.scheduler.room = type(on.scheduler.room)(8, on.scheduler.room.pixels, state=2**30, free=3 * 2**30)
        on.open(attach=False), on.open(attach=False)
        with pytest.raises(ProtocolError, match="needs 1024 MiB, and 717 MiB .* are left beside 2 sessions"):
            on.open()

    stage(body)


def test_a_stalled_lossless_client_holds_up_itself_alone(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        stalled, other = on.open(), on.open(seed=1)
        assert same(await on.chunks(other, 8), on.offline(8, seed=1))
        assert len(stalled.outbox) == 3
        assert same(await on.chunks(stalled, 6), on.offline(6))

    stage(body)


def test_a_slow_live_client_gets_the_newest_and_is_told_of_the_rest(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        session = on.open(lossless=False)
        session.options = type(session.options)(1e6, session.options.takes)  # a video that never waits
        while session.chunks_made < 9:
            await asyncio.sleep(0.01)
        session.pause()
        await asyncio.sleep(0.1)
        made, told, shown = session.chunks_made, [], []
        while len(told) + len(shown) < made:
            item = await on.next(session)
            if isinstance(item, Delivery):
                shown.append(item.chunk)
            elif item["type"] == "chunk":
                assert item["skipped"]
                told.append(item["chunk"])
        assert shown == [made - 3, made - 2, made - 1]
        assert told == list(range(made - 3))

    stage(body)


def test_a_live_session_keeps_the_pace_of_the_video(stage: Callable[..., None]) -> None:
    now = [0.0]

    async def body(on: Stage) -> None:
        session = on.open(lossless=False)
        for made, frames in ((1, 1), (2, 8), (3, 8)):  # each is due once the one before has been shown
            while session.chunks_made < made:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert session.chunks_made == made
            now[0] += frames / on.pipeline.config.fps

    stage(body, clock=lambda: now[0])


def test_a_prompt_counts_from_the_next_chunk_and_the_last_one_wins(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        session = on.open(num_chunk=4)
        got = await on.chunks(session, 1)
        session.prompt("a house", None, None)
        session.prompt("a tree", None, "keep")
        got += await on.chunks(session, 3)
        changed = next(each.chunk for each in got if each.about["events"])
        rollout, wanted = on.pipeline.rollout("a ball", seed=0, num_chunk=4), []
        for i in range(4):
            if i == changed:
                rollout.set_prompt("a tree", policy="keep")
            wanted.append(next(rollout))
        assert same(got, wanted)
        assert [len(each.about["events"]) for each in got].count(1) == 1

    stage(body)


def test_a_reset_begins_anew_with_the_present_prompt_and_shows_nothing_stale(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        session = on.open()
        await on.chunks(session, 2)
        session.prompt("a tree", None, None)
        await on.chunks(session, 2)
        session.reset(seed=9)
        assert len(session.outbox) == 0
        got = await on.chunks(session, 3)
        assert {each.generation for each in got} == {1}
        wanted = list(on.pipeline.rollout("a tree", seed=9, num_chunk=3))
        assert same(got, wanted)

    stage(body)


def test_a_snapshot_is_gone_back_to(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        session = on.open()
        await on.chunks(session, 2)
        session.wants_snapshots += 1
        kept = await on.message(session, "snapshot")
        session.control(0.9)
        await on.chunks(session, 2)
        session.restore(kept["snapshot"])
        assert session.generation == 1
        begun = await on.message(session, "begun")
        assert begun["chunk"] == kept["chunk"]
        (again,) = await on.chunks(session, 1)
        assert again.chunk == kept["chunk"]

    stage(body)


@pytest.mark.parametrize("fate", ["before", "after"])
@pytest.mark.parametrize("every", [0, 2])
def test_sessions_outlive_the_worker(stage: Callable[..., None], fate: str, every: int) -> None:
    """It dies twice, before the chunk is made or after its frames are out; what clients get is the same as without."""

    async def body(on: Stage) -> None:
        fatal = iter([5, 13])
        due = [next(fatal)]

        def dies(request: dict[str, Any]) -> str | None:
            steps = sum(each["op"] == "step" for each in on.link.asked)
            if request["op"] == "step" and due[0] is not None and steps >= due[0]:
                due[0] = next(fatal, None)
                return fate
            return None

        on.link.dies_at = dies
        sessions = [on.open(seed, num_chunk=8) for seed in (0, 1)]
        sessions[0].control(0.25)
        got = await asyncio.gather(*(on.chunks(session, 8) for session in sessions))
        assert on.link.epoch == 3
        assert on.metrics.restarts == 2
        assert same(got[1], on.offline(8, seed=1))
        assert same(got[0], on.offline(8, control=[0.25] * 100))

    stage(body, snapshot_every=every)


def test_a_session_of_which_workers_die_is_ended_and_the_others_go_on(stage: Callable[..., None]) -> None:
    async def body(on: Stage) -> None:
        good, bad = on.open(seed=1), on.open(seed=2)
        on.link.dies_at = lambda request: (
            "before" if request["op"] == "step" and request["session"] == bad.number else None
        )
        closed = await on.message(bad, "closed")
        assert closed["reason"] == "failed"
        assert same(await on.chunks(good, 6), on.offline(6, seed=1))

    stage(body)


def test_a_session_that_fails_takes_no_other_down(
    stage: Callable[..., None], template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = type(template.diffusion_model).generate

    def fails(self: Any, index: int, cache: Any, input: Any = None) -> Any:
        if cache.noise.seed == 13 and index == 1:
            raise RuntimeError("out of luck")
        return generate(self, index, cache, input)

    monkeypatch.setattr(type(template.diffusion_model), "generate", fails)

    async def body(on: Stage) -> None:
        good, bad = on.open(seed=1), on.open(seed=13)
        closed = await on.message(bad, "closed")
        assert "out of luck" in closed["message"]
        assert same(await on.chunks(good, 4), on.offline(4, seed=1))
        assert (await on.link.ask({"op": "ping"}))["sessions"] == [good.number]

    stage(body)


def test_nobody_there_means_no_work_and_soon_no_session(stage: Callable[..., None]) -> None:
    now = [0.0]

    async def body(on: Stage) -> None:
        session = on.open()
        await on.chunks(session, 1)
        session.leave()
        await asyncio.sleep(0.1)
        made = session.chunks_made
        await asyncio.sleep(0.1)
        assert session.chunks_made == made
        now[0] += 2.0
        on.scheduler.wake()
        await asyncio.sleep(0.05)
        assert session.closed is None
        now[0] += 2.0
        on.scheduler.wake()
        await asyncio.sleep(0.05)
        assert session.closed == "lost"
        assert not on.scheduler.sessions
        assert (await on.link.ask({"op": "ping"}))["sessions"] == []

    stage(body, clock=lambda: now[0], linger=3.0)


def test_a_silent_client_is_let_go(stage: Callable[..., None]) -> None:
    now = [0.0]

    async def body(on: Stage) -> None:
        session = on.open(lossless=False)
        now[0] += 61
        on.scheduler.wake()
        assert (await on.message(session, "closed"))["reason"] == "idle"

    stage(body, clock=lambda: now[0], idle_timeout=60.0)


def test_a_full_disk_costs_the_saved_state_alone(stage: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from flashdreams.serving import steered

    def full(self: Any, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(steered.SteeredRollout, "save", full)

    async def body(on: Stage) -> None:
        session = on.open()
        session.wants_snapshots += 1
        assert "No space left" in (await on.message(session, "error"))["message"]
        assert same(await on.chunks(session, 5), on.offline(5))

    stage(body, snapshot_every=1)


def test_nothing_of_a_session_stays_on_the_disk(stage: Callable[..., None], tmp_path: Path) -> None:
    async def body(on: Stage) -> None:
        session = on.open()
        for _ in range(6):
            session.wants_snapshots += 1
            await on.message(session, "snapshot")
            await on.chunks(session, 1)
        assert len(session.snapshots) == 4
        assert 4 <= len(list(tmp_path.iterdir())) <= 5
        on.scheduler.end(session, "closed")
        assert list(tmp_path.iterdir()) == []

    stage(body, snapshot_every=2)


def test_a_model_without_controls_refuses_them() -> None:
    session = Session(1, Scene("", 0, 8, 8), SessionOptions(16.0, ControlSpec()))
    with pytest.raises(ControlError, match="takes no controls"):
        session.control("left")
