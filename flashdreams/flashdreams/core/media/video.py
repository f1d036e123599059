"""mp4 files that grow while a video is made, in constant memory, and can be played at every moment.

While it is written the file is a fragmented mp4: after each :meth:`VideoWriter.write` it ends with a complete fragment
that holds all frames given so far, so that a killed process loses none of them. At close it is copied, without
encoding anew, into an ordinary mp4 with its index in front, which every player and browser can seek in.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream

from flashdreams.core.media import MediaError
from flashdreams.core.media.output import check_output, reason, remove_folders
from flashdreams.core.notices import say_once

# x264: quality near transparent also at 128x128; zerolatency gives each frame's packet at once, without look-ahead.
_ENCODER = {"crf": "16", "preset": "veryfast", "tune": "zerolatency"}
# One muxer per fragment: frag_discont and fragment_index continue the earlier ones, skip_trailer leaves the end open,
# and times are kept as they are instead of being shifted to zero.
_FRAGMENT = {
    "movflags": "empty_moov+default_base_moof+frag_custom+frag_discont+skip_trailer",
    "avoid_negative_ts": "disabled",
    "use_editlist": "0",
}
_BT709 = 1
_LIMITED_RANGE = 1
# Above this many pixels a frame is worth cutting into slices for several threads; below, they only cost quality.
_THREADED_PIXELS = 2**18
_ACCURATE = Interpolation.BILINEAR | Interpolation.ACCURATE_RND
_ACCURATE_RGB = _ACCURATE | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP


class VideoWriter:
    """Writes uint8 RGB frames to an mp4 (H.264, yuv420p, BT.709).

    Everything that can be checked is checked here, before any frame is made; the file appears with the first frame.
    As a context manager it finishes the file also when the block ends by an exception or Ctrl-C.

    Args:
        path: the file, ending in ``.mp4``; its folder is made, an existing file is replaced.
        fps: exact frame rate, see :func:`flashdreams.core.media.fps.parse_fps`.
        height: pixels. yuv420p needs even sizes: an odd one repeats its last row or column once, and this is said.
        width: pixels.

    Raises:
        MediaError: the file cannot be written, or not in this size.
    """

    def __init__(self, path: str | os.PathLike[str], fps: Fraction, height: int, width: int) -> None:
        self.path = Path(path)
        self.fps = Fraction(fps)
        self.num_frames = 0
        """Frames that are in the file."""
        self._size = (height, width)
        self._padding = ((0, height % 2), (0, width % 2), (0, 0))
        self._stream = _open_encoder(self.fps, height + height % 2, width + width % 2)
        self._reformatter = VideoReformatter()
        self._folders = check_output(self.path, ".mp4")
        self._target = Path(os.path.realpath(self.path))
        self._file: io.FileIO | None = None
        self._num_fragments = 0
        self._num_bytes = 0
        self._writable = True
        self._closed = False
        if height % 2 or width % 2:
            say_once(
                f"video size {height}x{width} (height x width) is odd; the file is "
                f"{height + height % 2}x{width + width % 2}, with the last row or column repeated"
            )

    def write(self, frames: np.ndarray) -> None:
        """Append ``frames``, uint8 ``[T, H, W, 3]``; when this returns, they are in the file.

        Raises:
            MediaError: the file cannot grow (disk full); what is in it stays.
        """
        frames = np.asarray(frames)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != (*self._size, 3):
            raise ValueError(
                f"frames are {frames.dtype} {list(frames.shape)}; expected uint8 [T, {self._size[0]}, "
                f"{self._size[1]}, 3]"
            )
        if not self._writable:
            raise MediaError(f"video {str(self.path)!r} takes no more frames: it is closed, or a write to it failed")
        if len(frames) == 0:
            return
        # Until the fragment is complete in the file, an interruption must not leave a gap in the video behind it.
        self._writable = False
        packets = [packet for index, frame in enumerate(frames) for packet in self._encode(frame, index)]
        fragment = self._fragment(packets)
        self._append(fragment)
        self._num_bytes += len(fragment)
        self.num_frames += len(packets)
        self._writable = True

    def close(self) -> None:
        """Finish the file. Without a single frame, no file and no new folder is left."""
        if self._closed:
            return
        self._closed, self._writable = True, False
        if self.num_frames == 0:
            if self._file is not None:  # the first write failed
                self._file.close()
                self._target.unlink(missing_ok=True)
            remove_folders(self._folders)
            return
        assert self._file is not None
        temporary = self._target.with_name(f".{self._target.name}.part")
        try:
            # A write that was interrupted may have left a torn fragment at the end.
            self._file.truncate(self._num_bytes)
            self._file.close()
            copied = _remux(self._target, temporary)
            if copied < self.num_frames:
                raise OSError(f"only {copied} of {self.num_frames} frames could be read back")
            temporary.replace(self._target)
        except (OSError, ValueError, av.FFmpegError) as error:
            say_once(
                f"video {str(self.path)!r} could not be rewritten with its index in front ({reason(error)}); "
                "it stays a fragmented mp4, which plays but may not seek everywhere"
            )
        finally:
            with suppress(OSError):
                temporary.unlink()

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, frame: np.ndarray, index: int) -> list[av.Packet]:
        padded = np.pad(frame, self._padding, mode="edge") if np.any(self._padding) else frame
        picture = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(np.ascontiguousarray(padded), format="rgb24"),
            format="yuv420p",
            src_color_range=ColorRange.JPEG,
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=_ACCURATE,
            threads=1,
        )
        picture.pts = self.num_frames + index
        picture.time_base = 1 / self.fps
        return self._stream.encode(picture)

    def _fragment(self, packets: list[av.Packet]) -> bytes:
        """The bytes that continue the file by ``packets``; the first fragment comes with the file's header."""
        buffer = io.BytesIO()
        options = {**_FRAGMENT, "fragment_index": str(self._num_fragments + 1)}
        with av.open(buffer, "w", format="mp4", options=options) as container:
            stream = container.add_stream_from_template(self._stream)
            for packet in packets:
                packet.stream = stream
                packet.duration = 1
                container.mux_one(packet)
        data = buffer.getvalue()
        self._num_fragments += 1
        # A box is [length, 4 bytes][name, 4 bytes]...; every muxer writes the same header before its first moof.
        return data if self._num_fragments == 1 else data[data.index(b"moof") - 4 :]

    def _append(self, data: bytes) -> None:
        try:
            if self._file is None:
                self._file = io.FileIO(self._target, "w")
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise MediaError(
                f"video {str(self.path)!r} cannot grow beyond {self.num_frames} frames: {reason(error)}; "
                "the frames before are kept"
            ) from error


def read_video_frames(path: str | os.PathLike[str]) -> np.ndarray:
    """All frames of a video, uint8 RGB ``[T, H, W, 3]`` (for tests and tools: the whole video is held in memory)."""
    reformatter = VideoReformatter()
    with av.open(os.path.realpath(path)) as container:
        frames = [
            reformatter.reformat(
                frame, format="rgb24", dst_color_range=ColorRange.JPEG, interpolation=_ACCURATE_RGB, threads=1
            ).to_ndarray()
            for frame in container.decode(video=0)
        ]
    return np.stack(frames)


def _open_encoder(fps: Fraction, height: int, width: int) -> VideoStream:
    """An x264 stream; its container is a stand-in that receives no packet."""
    if height < 1 or width < 1:
        raise MediaError(f"video size is {height}x{width} (height x width); expected positive numbers of pixels")
    try:
        container = av.open(io.BytesIO(), "w", format="mp4")
        stream = container.add_stream(
            "libx264", rate=fps, options=_ENCODER, height=height, width=width, pix_fmt="yuv420p", time_base=1 / fps
        )
        context = stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = _LIMITED_RANGE
        context.gop_size = max(1, min(250, round(2 * fps)))
        context.thread_count = 0 if height * width > _THREADED_PIXELS else 1
        container.start_encoding()
    except (ValueError, OSError, av.FFmpegError) as error:
        raise MediaError(
            f"a video of {height}x{width} (height x width) at {fps} fps cannot be encoded: {reason(error)}"
        ) from error
    return stream


def _remux(source: Path, target: Path) -> int:
    """Copy the video packets of ``source`` into an mp4 with its index in front; returns their number."""
    copied = 0
    options = {"movflags": "faststart"}
    with av.open(str(source)) as reader, av.open(str(target), "w", format="mp4", options=options) as out:
        video = reader.streams.video[0]
        stream = out.add_stream_from_template(video)
        for packet in reader.demux(video):
            if packet.dts is not None:
                packet.stream = stream
                out.mux_one(packet)
                copied += 1
    return copied
