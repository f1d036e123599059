"""Sessions in turn on one worker: fairness, room, pace, resets. The worker is a thread here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from flashdreams.core.controls import ControlError, ControlSpec
from flashdreams.serving.outbox import Delivery
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.scene import Scene
from flashdreams.serving.sessions import Session, SessionOptions
from stage import Stage, same

pytestmark = pytest.mark.ci_cpu


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


def test_a_model_without_controls_refuses_them() -> None:
    session = Session(1, Scene("", 0, 8, 8), SessionOptions(16.0, ControlSpec()))
    with pytest.raises(ControlError, match="takes no controls"):
        session.control("left")
