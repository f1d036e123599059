"""The video track of a WebRTC connection: frames of a session as the encoders of aiortc take them."""

from __future__ import annotations

import asyncio

import numpy as np
from aiortc.mediastreams import VIDEO_CLOCK_RATE, VIDEO_TIME_BASE, MediaStreamTrack
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace

from flashdreams.serving.webrtc_playout import Playout

MIN_SIDE = 256
"""Pixels of the shorter side; smaller frames are magnified. At 128x128, colours at half the resolution and the smallest
bit rate of the encoder cost 3 dB more than at 256x256."""
COLORSPACES = {"video/h264": Colorspace.ITU709, "video/vp8": Colorspace.ITU601}
"""What Chromium takes a stream for that does not say (aiortc's do not): seen from the colours it shows."""


class SessionTrack(MediaStreamTrack):
    """Sends what ``playout`` gives."""

    kind = "video"

    def __init__(self, playout: Playout) -> None:
        super().__init__()
        self.colorspace = Colorspace.ITU601
        self._playout = playout
        self.began: float | None = None
        """Moment of the first frame, on the clock of ``playout``."""

    async def recv(self) -> VideoFrame:
        """The next frame, when its time has come."""
        pixels, moment = await self._playout.next()
        frame = await asyncio.to_thread(to_video_frame, pixels, self.colorspace)
        if self.began is None:
            self.began = moment
        frame.pts, frame.time_base = round((moment - self.began) * VIDEO_CLOCK_RATE), VIDEO_TIME_BASE
        return frame


def magnification(height: int, width: int) -> int:
    """The smallest whole factor that makes both sides even and the shorter one :data:`MIN_SIDE` pixels or more."""
    factor = -(-MIN_SIDE // min(height, width))
    return factor + (factor * height % 2 or factor * width % 2)


def to_video_frame(pixels: np.ndarray, colorspace: Colorspace) -> VideoFrame:
    """uint8 RGB ``[H, W, 3]``, magnified without smoothing, as YUV 4:2:0."""
    factor = magnification(*pixels.shape[:2])
    big = np.ascontiguousarray(pixels.repeat(factor, 0).repeat(factor, 1))
    return VideoFrame.from_ndarray(big, format="rgb24").reformat(format="yuv420p", dst_colorspace=colorspace)
