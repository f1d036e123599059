"""What befalls sessions: a worker that dies, a client that goes, a disk that is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stage import Stage, same

pytestmark = pytest.mark.ci_cpu


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
