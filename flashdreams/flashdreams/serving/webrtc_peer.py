"""One WebRTC connection: made from a browser's offer, it carries a video to it and messages from it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from aiortc import (
    RTCBundlePolicy,
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)
from aiortc.sdp import MediaDescription, SessionDescription

from flashdreams.serving.config import ServeConfig
from flashdreams.serving.webrtc_playout import Playout
from flashdreams.serving.webrtc_track import COLORSPACES, SessionTrack

log = logging.getLogger("flashdreams.serving")
CHANNEL = "control"
CONNECT_TIMEOUT = 15.0
SILENCE = 5.0
"""Seconds without a report of the receiver, which tells about once a second what it got."""
CLOSE_TIMEOUT = 4.0
MAX_CANDIDATES = 16
MAX_BUFFERED = 65536


class OfferError(ValueError):
    """An offer that cannot be answered."""


class Peer:
    """The server's end of a connection.

    Args:
        heard: called with each message of the channel ``control``; must not raise.
    """

    def __init__(self, config: ServeConfig, playout: Playout, heard: Callable[[str | bytes], None]) -> None:
        self._config, self._heard = config, heard
        servers = [RTCIceServer(**server) for server in config.ice()]
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=servers, bundlePolicy=RTCBundlePolicy.MAX_BUNDLE))
        self.playout = playout
        self._track = SessionTrack(playout)
        self._transceiver = self._pc.addTransceiver(self._track, "sendonly")
        codecs = RTCRtpSender.getCapabilities("video").codecs
        self._transceiver.setCodecPreferences(sorted(codecs, key=lambda codec: codec.mimeType != "video/H264"))
        self._channel: RTCDataChannel | None = None
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[str] = loop.create_future()
        self._report: datetime | None = None
        self._reported: float | None = None
        self._pc.on("connectionstatechange", self._state_changed)
        self._pc.on("datachannel", self._opened)
        self._track.on("ended", lambda: self._end("the video stopped"))

    @property
    def connected(self) -> bool:
        """Whether pictures can go this way."""
        return self._up.done() and not self._over.done()

    async def answer(self, offer: str) -> str:
        """The answer (SDP, with all candidates) to an offer.

        Raises:
            OfferError: it is none, or asks for something else than one video and messages.
        """
        try:
            checked = check_offer(offer, keep_candidates=bool(self._config.ice_servers))
            await self._pc.setRemoteDescription(RTCSessionDescription(checked, "offer"))
            self._gather_at(self._config.media_address)
            await self._pc.setLocalDescription()
        except OfferError:
            raise
        except Exception as error:  # aiortc's parser checks by assertions, indices and names
            raise OfferError(f"the offer cannot be used ({type(error).__name__}: {error!s:.200})") from None
        answer = self._pc.localDescription.sdp
        video = next(media for media in SessionDescription.parse(answer).media if media.kind == "video")
        self._track.colorspace = COLORSPACES[video.rtp.codecs[0].mimeType.lower()]
        return answer

    def _gather_at(self, address: str | None) -> None:
        """Listen at this address alone; aiortc would take all of the machine's but 127.0.0.1."""
        if address is None:
            return
        connection = self._transceiver.receiver.transport.transport.iceGatherer._connection
        gather = connection.get_component_candidates

        def gather_there(component: int, addresses: list[str]) -> Any:
            return gather(component=component, addresses=[address])

        setattr(connection, "get_component_candidates", gather_there)  # noqa: B010

    async def ended(self) -> str:
        """Wait until the connection is over, or does not come about; returns why."""
        await asyncio.wait({self._up, self._over}, timeout=CONNECT_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if not self._up.done() and not self._over.done():
            return f"no connection came about in {CONNECT_TIMEOUT:g} seconds (UDP may be blocked)"
        while not self._over.done():
            await asyncio.wait({self._over}, timeout=1.0)
            if await self._silence() > SILENCE:
                return f"nothing was heard of the receiver for {SILENCE:g} seconds"
        return self._over.result()

    async def _silence(self) -> float:
        """Seconds since the receiver's last report, or since the first frame; 0 before that."""
        stats = (await self._transceiver.sender.getStats()).values()
        told = next((each.timestamp for each in stats if each.type == "remote-inbound-rtp"), None)
        if told != self._report:
            self._report, self._reported = told, time.monotonic()
        since = self._reported or self._track.began
        return 0.0 if since is None else time.monotonic() - since

    def send(self, text: str) -> None:
        """Say something over the channel; left out where the client does not take it."""
        channel = self._channel
        if channel is not None and channel.readyState == "open" and channel.bufferedAmount < MAX_BUFFERED:
            channel.send(text)

    async def close(self) -> None:
        """End the connection. Returns in any case, within seconds."""
        self._end("closed")
        self.playout.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._pc.close()
        except Exception as error:  # whatever is wrong with it, it is over
            log.warning("a WebRTC connection did not close well: %s", repr(error)[:200])

    def _end(self, why: str) -> None:
        if not self._over.done():
            self._over.set_result(why)

    def _state_changed(self) -> None:
        state = self._pc.connectionState
        if state == "connected" and not self._up.done():
            self._up.set_result(None)
        elif state in ("failed", "closed"):
            self._end(f"the connection {'failed' if state == 'failed' else 'was closed'}")

    def _opened(self, channel: RTCDataChannel) -> None:
        if channel.label != CHANNEL or (self._channel is not None and self._channel.readyState == "open"):
            channel.close()
            return
        self._channel = channel
        channel.on("message", self._heard)


def check_offer(offer: str, *, keep_candidates: bool) -> str:
    """An offer of what this server gives, without the addresses that it names: the server answers where a check with
    this connection's password comes from, and so sends nothing to where a client only points.

    Args:
        keep_candidates: keep up to 16 numeric addresses, which is needed to get through a NAT at the server.

    Raises:
        OfferError: it asks for something else.
    """
    lines, kept = [], 0
    for line in offer.splitlines():
        if line.startswith("a=candidate:"):
            kept += keep_candidates and _is_numeric(line)
            if not keep_candidates or not _is_numeric(line) or kept > MAX_CANDIDATES:
                continue
        if not line.startswith("a=end-of-candidates"):  # checks may still come from elsewhere
            lines.append(line)
    text = "\r\n".join(lines) + "\r\n"
    session = SessionDescription.parse(text)
    kinds = [media.kind for media in session.media]
    if sorted(kinds) not in (["video"], ["application", "video"]):
        raise OfferError(f"the offer has {kinds or 'nothing'!s:.100}; expected one video, and a data channel if wanted")
    names = sorted(media.rtp.muxId for media in session.media)
    if [sorted(group.items) for group in session.group if group.semantic == "BUNDLE"] != [names] or "" in names:
        raise OfferError("the offer does not bundle what it has; use the offer of a browser")
    for media in session.media:
        _check_media(media)
    return text


def _check_media(media: MediaDescription) -> None:
    if media.dtls is None or not media.dtls.fingerprints:
        raise OfferError(f"the offer's {media.kind} is not encrypted; use the offer of a browser")
    if media.kind == "video" and media.direction not in ("recvonly", "sendrecv"):
        raise OfferError(f"the offer's video is {media.direction}; expected recvonly")
    if media.kind == "application" and (media.sctp_port is None or media.profile == "DTLS/SCTP"):
        raise OfferError("the offer's data channel has no a=sctp-port; use the offer of a present browser")


def _is_numeric(candidate: str) -> bool:
    try:
        ipaddress.ip_address(candidate.split()[4])
    except (IndexError, ValueError):
        return False
    return True
