"""WebRTC beside a session's WebSocket: video and messages over it, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashdreams.serving import webrtc_peer
from flashdreams.serving.webrtc_playout import Playout
from serving import Running, one_thread, running, template_service, until
from webrtc_client import Browser, browser

pytestmark = pytest.mark.ci_cpu
SIZE = 32, 48
QUICK = {"ping_interval": 0.3, "ping_timeout": 0.5, "linger": 0.3}
"""So that a client that is gone is noticed in 1.1 seconds instead of 8."""
Body = Callable[[Browser], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    service = template_service(**QUICK)
    with one_thread(), running(service.config, service) as server:
        yield server


@pytest.fixture
def session(server: Running) -> Callable[..., Browser]:
    """Runs a test's body beside a session, and sees that nothing of it is left."""

    def play(body: Body, **create: Any) -> Browser:
        async def main() -> Browser:
            async with browser(server.url, prompt="a ball", seed=3, encoding="raw", **create) as here:
                await body(here)
                return here

        here = asyncio.run(main())
        gone(server)
        return here

    return play


def gone(server: Running) -> None:
    until(lambda: server.metric("webrtc_connections") == 0 and server.metric("sessions") == 0, 10)


def offline(server: Running, count: int, seed: int = 3, **options: Any) -> list[Any]:
    pipeline = server.service.scheduler.link.pipeline
    with pipeline.rollout("a ball", seed=seed, num_chunk=count, **options) as rollout:
        return list(rollout)


def psnr(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, np.mean((got.astype(float) - wanted) ** 2))))


async def over_webrtc(here: Browser, codec: str | None = None) -> None:
    await here.connect(codec)
    await here.say("video", over="webrtc")


@pytest.mark.parametrize(("codec", "mime"), [(None, "H264"), ("video/VP8", "VP8")])
def test_every_frame_is_shown_in_order_in_its_colours(
    server: Running, session: Callable[..., Browser], codec: str | None, mime: str
) -> None:
    """H.264 where the client has it. Within 30 dB of the rollout, which its neighbours are not."""

    async def body(here: Browser) -> None:
        await over_webrtc(here, codec)
        await here.say("resume")
        await here.told("finished")
        await here.until(lambda: len(here.frames) >= 17)

    here = session(body, delivery="all", num_chunk=3, paused=True)
    assert f"{mime}/90000" in here.answer
    wanted = np.concatenate([chunk.frames.numpy() for chunk in offline(server, 3)])
    assert len(wanted) == 17
    for i, frame in enumerate(wanted):
        shown = here.shown(i, *SIZE)
        assert psnr(shown, frame) > 30
        assert i == 0 or np.array_equal(frame, wanted[i - 1]) or psnr(shown, wanted[i - 1]) < 20
    assert here.pictures == []
    times = np.array([frame.pts for frame in here.frames[:17]]) / 90_000
    assert (np.diff(times) > 0).all() and times[-1] - times[0] >= 16 / 16 - 0.001


def test_a_control_over_the_channel_does_what_one_over_the_websocket_does(
    server: Running, session: Callable[..., Browser]
) -> None:
    """The chunk made next has it, frame for frame, and its latent is the rollout's."""
    chunks = {}
    for way in ("channel", "websocket"):

        async def body(here: Browser) -> None:
            await over_webrtc(here)
            message = {"type": "control", "control": "0.5"}
            if way == "channel":
                here.channel.send(json.dumps(message))
                here.channel.send(json.dumps({"type": "ping", "t": 7}))
                await here.until(lambda: here.pongs)
            else:
                await here.socket.send(json.dumps(message))
                await here.say("ping", t=8)
                await here.told("pong", t=8.0)
            await here.say("resume")
            await here.told("finished")

        here = session(body, delivery="all", num_chunk=3, paused=True)
        chunks[way] = [each for each in here.said if each["type"] == "chunk"]
        assert [json.loads(pong) for pong in here.pongs] == [{"type": "pong", "t": 7.0}] * (way == "channel")
    told = [[(each["digest"], each["controls"]) for each in chunks[way]] for way in chunks]
    assert told[0] == told[1]
    assert {row["number"] for each in chunks["channel"] for row in each["controls"]} == {0.5}


def test_pictures_come_the_way_that_was_chosen(session: Callable[..., Browser]) -> None:
    """Over the WebSocket until a peer is there and chosen, and again when it is not any more; none is lost."""

    async def body(here: Browser) -> None:
        await here.say("video", over="webrtc")
        assert "no WebRTC connection" in (await here.told("error", code="webrtc"))["message"]
        await here.connect()
        await here.until(lambda: len(here.pictures) >= 9)
        assert here.frames == []
        await here.say("video", over="webrtc")
        await here.until(lambda: len(here.frames) >= 9)
        over = len(here.pictures)
        await here.say("video", over="websocket")
        await here.until(lambda: len(here.pictures) > over)

    here = session(body, delivery="all", num_chunk=12)
    headers = [header.frame for header, _ in here.pictures]
    assert headers == sorted(headers) and headers[-1] - headers[0] >= len(headers) + 7


def test_after_a_reset_nothing_stale_is_shown(server: Running, session: Callable[..., Browser]) -> None:
    """The frames of the old generation that wait (a chunk of 8 or more) are dropped."""

    async def body(here: Browser) -> None:
        await over_webrtc(here)
        await here.say("resume")
        await here.until(lambda: len(here.frames) >= 12)
        await here.say("reset", seed="9")
        await here.told("reset")
        here.before = len(here.frames)
        await here.told("begun", generation=1)
        await here.until(lambda: len(here.frames) > here.before + 14)

    here = session(body, paused=True, delivery="all")
    new = np.concatenate([chunk.frames.numpy() for chunk in offline(server, 3, seed=9)])
    shown = [here.shown(i, *SIZE) for i in range(here.before, len(here.frames))]
    are_new = [max(psnr(frame, each) for each in new) > 30 for frame in shown]
    late = are_new.index(True)
    assert late < 6  # those that were on their way
    assert all(are_new[late:])


@pytest.mark.parametrize("how", ["closed", "stalled", "failing"])
def test_without_its_peer_a_session_goes_on_over_the_websocket(
    session: Callable[..., Browser], how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closed by the client; gone without a word (it reports nothing any more); and B15: an exception in the source of
    the frames at the third chunk."""
    if how == "stalled":
        monkeypatch.setattr(webrtc_peer, "SILENCE", 2.0)
    if how == "failing":
        calls, take = itertools.count(), Playout.next

        async def fail(self: Playout) -> Any:
            if next(calls) == 17:  # frames of the chunks before
                raise RuntimeError("the source is broken")
            return await take(self)

        monkeypatch.setattr(Playout, "next", fail)

    async def body(here: Browser) -> None:
        await over_webrtc(here)
        await here.say("resume")
        if how != "failing":
            await here.until(lambda: len(here.frames) > 3)
        if how == "closed":
            await here.pc.close()
        elif how == "stalled":
            here.cut()
        assert "over the WebSocket" in (await here.told("notice", code="webrtc_ended"))["message"]
        await here.until(lambda: len(here.pictures) > 8)
        await here.say("video", over="webrtc")
        await here.told("error", code="webrtc")

    session(body, paused=True)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_newer_offer_takes_the_place_of_the_older(server: Running, session: Callable[..., Browser]) -> None:
    async def body(here: Browser) -> None:
        await over_webrtc(here)
        await here.say("resume")
        await here.until(lambda: here.frames)
        first, here.pc = here.pc, type(here.pc)()
        here.said, here.frames = [each for each in here.said if each["type"] != "webrtc_answer"], []
        await here.connect()
        await here.until(lambda: first.connectionState == "closed")
        assert server.metric("webrtc_connections") == 1
        await here.say("video", over="webrtc")
        await here.until(lambda: len(here.frames) > 3)
        assert not [each for each in here.said if each["type"] == "notice"]

    session(body, paused=True)


def test_a_bad_offer_is_answered_and_the_session_goes_on(session: Callable[..., Browser]) -> None:
    async def body(here: Browser) -> None:
        for sdp, says in (("nonsense", "expected one video"), ("v=0\r\nm=video x", "cannot be used")):
            await here.say("webrtc_offer", sdp=sdp)
            assert says in (await here.told("error", code="webrtc"))["message"]
            here.said.clear()
        await here.say("webrtc_offer", sdp="x")
        assert "wait a second" in (await here.told("error", code="webrtc"))["message"]
        await here.say("webrtc_offer", sdp="x" * 65_537)
        assert "sdp" in (await here.told("error", code="invalid"))["message"]
        await here.say("resume")
        await here.until(lambda: len(here.pictures) > 3)

    session(body, paused=True)


@pytest.mark.parametrize("kind", ["binary", "rubbish"])
def test_the_channel_has_the_limits_of_the_websocket(session: Callable[..., Browser], kind: str) -> None:
    """Who sends what cannot be used, again and again, is shown out."""

    async def body(here: Browser) -> None:
        await here.connect()
        here.channel.send(b"\x00") if kind == "binary" else [here.channel.send("{") for _ in range(101)]
        await here.until(lambda: here.over)

    here = session(body, paused=True)
    assert here.said[-1]["code"] == "malformed"


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_vanishes_leaves_nothing_behind(server: Running, kind: signal.Signals) -> None:
    """B15: killed, or stopped with its connections open."""
    program = Path(__file__).parents[1] / "support/webrtc_client.py"
    threads = threading.active_count()
    client = subprocess.Popen([sys.executable, str(program), server.url], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None and client.stdout.readline() == "playing\n"
        assert server.metric("webrtc_connections") == 1
        client.send_signal(kind)
        gone(server)
        chunks = server.metric("chunks_total")
        time.sleep(0.5)
        assert server.metric("chunks_total") == chunks
        assert server.metric("session_bytes") == 0
        assert threading.active_count() <= threads + 8  # of asyncio's pool, which stay
    finally:
        client.kill()
        client.wait()


def test_a_session_that_ends_ends_its_peer(session: Callable[..., Browser]) -> None:
    async def body(here: Browser) -> None:
        await over_webrtc(here)
        await here.say("resume")
        await here.until(lambda: here.frames)
        await here.say("close")
        await here.told("closed")
        await here.until(lambda: here.pc.connectionState == "closed", 5)

    session(body, paused=True)


@pytest.mark.parametrize("why", ["switched off", "not installed"])
def test_without_webrtc_a_client_is_told_so(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "not installed":
        monkeypatch.delitem(sys.modules, "flashdreams.serving.webrtc_peer")
        monkeypatch.setitem(sys.modules, "aiortc", None)

    async def body(url: str) -> None:
        async with browser(url, prompt="a ball", paused=True) as here:
            assert here.said[0]["webrtc"] is False
            await here.say("webrtc_offer", sdp="v=0")
            assert "does not speak WebRTC" in (await here.told("error", code="webrtc"))["message"]

    service = template_service(webrtc=why != "switched off")
    with running(service.config, service) as server:
        asyncio.run(body(server.url))
