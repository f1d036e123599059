"""Offers of WebRTC: which are answered, from which address, and what a bad one leaves behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
import random

import pytest

from flashdreams.infra.errors import UserError
from flashdreams.serving import webrtc_peer
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.webrtc_peer import OfferError, Peer, check_offer
from flashdreams.serving.webrtc_playout import Playout
from webrtc_client import Browser

pytestmark = pytest.mark.ci_cpu


def make_peer(config: ServeConfig | None = None) -> Peer:
    return Peer(config or ServeConfig(), Playout(16, lambda: 0, False), lambda message: None)


@pytest.fixture(scope="module")
def good() -> str:
    async def make() -> str:
        here = Browser(None)  # type: ignore[arg-type]
        try:
            return await here.offer()
        finally:
            await here.leave()

    return asyncio.run(make())


def test_addresses_that_an_offer_names_are_not_used(good: str) -> None:
    """The server sends nothing to where a client only points; with ICE servers, to 16 numeric addresses at most."""
    assert good.count("a=candidate:") == 2
    assert "a=candidate" not in check_offer(good, keep_candidates=False)
    named = "a=candidate:1 1 udp 1 {} 9 typ host\r\n"
    more = good + named.format("secret.local") + named.format("example.org") + named.format("10.0.0.1") * 20
    kept = check_offer(more, keep_candidates=True)
    assert kept.count("a=candidate:") == 16 and "local" not in kept and "example" not in kept


def test_the_answer_names_the_server_s_own_address_alone(good: str) -> None:
    async def answer(config: ServeConfig) -> list[str]:
        peer = make_peer(config)
        try:
            text = await peer.answer(good)
        finally:
            await peer.close()
        return [line.split()[4] for line in text.splitlines() if line.startswith("a=candidate:")]

    for host, address in (("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")):
        assert set(asyncio.run(answer(ServeConfig(host=host)))) == {address}
    assert ServeConfig(host="192.0.2.7").media_address == "192.0.2.7"
    assert ServeConfig(host="0.0.0.0").media_address is ServeConfig(host="::").media_address is None


@pytest.mark.parametrize(
    ("find", "put", "says"),
    [
        ("m=application", "m=audio 9 UDP/TLS/RTP/SAVPF 0\r\nm=application", "expected one video"),
        ("a=recvonly", "a=sendonly", "expected recvonly"),
        ("a=group:BUNDLE 0 1", "a=group:BUNDLE 0", "does not bundle"),
        ("a=group:BUNDLE 0 1", "a=group:BUNDLE 7 0 1", "does not bundle"),
        ("a=mid:1", "a=mid:0", "does not bundle"),
        ("a=sctp-port:5000", "a=x", "no a=sctp-port"),
        ("a=setup:actpass", "a=x", "not encrypted"),
    ],
)
def test_an_offer_of_something_else_is_refused(good: str, find: str, put: str, says: str) -> None:
    assert find in good
    with pytest.raises(OfferError, match=says):
        check_offer(good.replace(find, put), keep_candidates=False)


def test_no_offer_leaves_a_task_that_failed(good: str, caplog: pytest.LogCaptureFixture) -> None:
    """150 offers that are nearly good: an answer, or a sentence, and nothing else."""
    random_, outcomes = random.Random(0), set()

    def spoiled() -> str:
        lines = good.split("\r\n")
        place = random_.randrange(len(lines))
        match random_.randrange(4):
            case 0:
                del lines[place]
            case 1:
                lines.insert(place, random_.choice(lines))
            case 2:
                lines[place] = lines[place][: random_.randrange(len(lines[place]) + 1)]
            case _:
                lines[place] += random_.choice([" 7", ":", "\x00", "9" * 30, "é"])
        return "\r\n".join(lines)

    async def main() -> None:
        for _ in range(150):
            peer = make_peer()
            try:
                await peer.answer(spoiled())
                outcomes.add("answered")
            except OfferError:
                outcomes.add("refused")
            await asyncio.sleep(0)
            await peer.close()
        gc.collect()
        async with asyncio.timeout(5):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert outcomes == {"answered", "refused"}
    assert "never retrieved" not in caplog.text and "did not close well" not in caplog.text


def test_a_connection_that_does_not_close_is_left(
    good: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B15: closing returns in any case."""
    monkeypatch.setattr(webrtc_peer, "CLOSE_TIMEOUT", 0.1)

    async def main() -> None:
        peer = make_peer()
        await peer.answer(good)
        close, peer._pc.close = peer._pc.close, asyncio.Event().wait
        async with asyncio.timeout(10):
            await peer.close()
        assert not peer.connected
        await close()

    asyncio.run(main())
    assert "did not close well" in caplog.text


@pytest.mark.parametrize(
    ("text", "ice"),
    [
        ("stun:stun.example.org", {"urls": "stun:stun.example.org"}),
        ("turn:me:secret@10.0.0.1:3478?transport=udp",
         {"urls": "turn:10.0.0.1:3478?transport=udp", "username": "me", "credential": "secret"}),
    ],
)  # fmt: skip
def test_ice_servers_are_told_as_browsers_take_them(text: str, ice: dict[str, str]) -> None:
    config = ServeConfig(ice_servers=(text,))
    assert config.ice() == [ice]
    assert "secret" not in repr(config)


@pytest.mark.parametrize("text", ["stun.example.org", "turn:10.0.0.1", "turn:me:secret@", "http://example.org", ""])
def test_an_ice_server_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected stun:HOST") as refused:
        ServeConfig(ice_servers=(text,)).validate()
    assert "secret" not in str(refused.value)
