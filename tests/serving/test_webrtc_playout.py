"""What a WebRTC track sends, and when: on a clock that only moves while everybody waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from av.video.reformatter import Colorspace

from flashdreams.serving.webrtc_playout import Playout
from flashdreams.serving.webrtc_track import SessionTrack, magnification, to_video_frame

pytestmark = pytest.mark.ci_cpu
FPS = 10.0


class _Jump(selectors.SelectSelector):
    """Waits for nothing: the time that would have been waited is over."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        self.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now


def play(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(body())


def playout(generation: Callable[[], int] = lambda: 0, *, lossless: bool = False) -> Playout:
    return Playout(FPS, generation, lossless, asyncio.get_running_loop().time)


def chunk(first: int, count: int = 4) -> np.ndarray:
    """Frames of 2x2 pixels that hold their number."""
    return np.arange(first, first + count, dtype=np.uint8)[:, None, None, None].repeat(3, -1)


async def take(on: Playout, count: int) -> tuple[list[int], list[float]]:
    """Numbers and moments of the next frames."""
    got = [await on.next() for _ in range(count)]
    return [int(frame.flat[0]) for frame, _ in got], [moment for _, moment in got]


def test_frames_come_in_order_and_evenly() -> None:
    async def body() -> None:
        on = playout()
        await on.put(0, chunk(0))
        numbers, moments = await take(on, 4)
        assert numbers == [0, 1, 2, 3]
        assert moments == pytest.approx([0.0, 0.1, 0.2, 0.3])

    play(body)


def test_the_last_frame_is_held_while_none_comes() -> None:
    """It is sent again once a second and no other is invented; the clock of the video goes on meanwhile."""

    async def body() -> None:
        on = playout()
        await on.put(0, chunk(0, 1))
        assert await take(on, 3) == ([0, 0, 0], pytest.approx([0.0, 1.1, 2.2]))
        waiting = asyncio.create_task(take(on, 2))
        await asyncio.sleep(0.5)
        await on.put(0, chunk(1, 2))
        assert await waiting == ([1, 2], pytest.approx([2.7, 2.8]))

    play(body)


def test_a_chunk_that_is_a_little_late_moves_nothing() -> None:
    async def body() -> None:
        on = playout()
        await on.put(0, chunk(0, 2))
        await take(on, 2)
        waiting = asyncio.create_task(take(on, 2))
        await asyncio.sleep(0.15)  # due after 0.1
        await on.put(0, chunk(2, 2))
        assert await waiting == ([2, 3], pytest.approx([0.2, 0.3]))

    play(body)


def test_live_frames_that_wait_are_caught_up_with() -> None:
    """Two chunks wait: they take the time of one and a bit, and then the delay is gone."""

    async def body() -> None:
        on = playout()
        await on.put(0, chunk(0))
        await on.put(0, chunk(4))
        numbers, moments = await take(on, 8)
        assert numbers == list(range(8))
        assert moments[-1] == pytest.approx(0.1 * (4 / 8 + 4 / 7 + 4 / 6 + 4 / 5 + 3))

    play(body)


def test_of_a_third_live_chunk_the_oldest_makes_room() -> None:
    async def body() -> None:
        on = playout()
        for first in (0, 4, 8):
            assert await on.put(0, chunk(first))
        assert (len(on), on.dropped) == (8, 4)
        assert (await take(on, 8))[0] == list(range(4, 12))

    play(body)


def test_lossless_chunks_wait_for_room_and_keep_their_speed() -> None:
    async def body() -> None:
        on = playout(lossless=True)

        async def fill() -> None:
            for first in range(0, 20, 4):
                assert await on.put(0, chunk(first))
                assert len(on) < 8

        filling = asyncio.create_task(fill())
        numbers, moments = await take(on, 20)
        assert numbers == list(range(20))
        assert moments == pytest.approx([i / FPS for i in range(20)])
        assert filling.done() and on.dropped == 0

    play(body)


def test_nothing_of_an_older_generation_is_shown() -> None:
    async def body() -> None:
        now = 0
        on = playout(lambda: now)
        await on.put(0, chunk(0))
        assert (await take(on, 1))[0] == [0]
        now = 1
        waiting = asyncio.create_task(take(on, 1))
        await asyncio.sleep(0.3)
        assert len(on) == 0 and not waiting.done()
        await on.put(0, chunk(50))  # was on its way when the session was reset
        await on.put(1, chunk(100))
        assert (await waiting)[0] == [100]

    play(body)


def test_what_is_stale_makes_room() -> None:
    async def body() -> None:
        now = 0
        on = playout(lambda: now, lossless=True)
        await on.put(0, chunk(0))
        waiting = asyncio.create_task(on.put(1, chunk(4)))
        await asyncio.sleep(0)
        now = 1
        assert (await take(on, 1))[0] == [4]
        assert waiting.done()

    play(body)


def test_a_playout_that_is_closed_takes_no_more_and_lets_go() -> None:
    async def body() -> None:
        on = playout(lossless=True)
        await on.put(0, chunk(0))
        waiting = asyncio.create_task(on.put(0, chunk(4)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        on.close()
        assert await waiting is False
        assert await on.put(0, chunk(8)) is False

    play(body)


def test_a_track_tells_moments_in_the_clock_of_video() -> None:
    """90,000 a second, from its first frame on."""

    class Given(Playout):
        moments = iter([7.0, 7.1, 9.5])

        async def next(self) -> tuple[np.ndarray, float]:
            return np.zeros((32, 48, 3), np.uint8), next(self.moments)

    async def body() -> None:
        track = SessionTrack(Given(FPS, lambda: 0, False))
        assert [(await track.recv()).pts for _ in range(3)] == [0, 9000, 225_000]

    asyncio.run(body())


@pytest.mark.parametrize(("height", "width", "factor"), [(32, 48, 8), (128, 128, 2), (480, 832, 1), (255, 300, 2),
                                                         (257, 300, 2), (1, 4000, 256)])  # fmt: skip
def test_small_pictures_are_magnified_by_a_whole_factor(height: int, width: int, factor: int) -> None:
    """To 256 pixels or more, and to even sides."""
    assert magnification(height, width) == factor


@pytest.mark.parametrize("colorspace", [Colorspace.ITU601, Colorspace.ITU709])
def test_colours_come_through_the_conversion(colorspace: Colorspace) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    frame = to_video_frame(pixels, colorspace)
    assert (frame.format.name, frame.width, frame.height) == ("yuv420p", 24 * 16, 16 * 16)
    back = frame.reformat(format="rgb24", src_colorspace=colorspace).to_ndarray()[8::16, 8::16]
    assert np.abs(back.astype(int) - pixels).max() <= 4
