"""The sound of a video for another one that was made from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from heapq import merge
from itertools import takewhile
from pathlib import Path
from typing import Any

import av

from flashdreams.core.media.output import reason
from flashdreams.core.notices import say_once


def copy_sound(source: Path, target: Path, start: Fraction, until: Fraction | None = None) -> bool:
    """Give the finished mp4 ``target`` the sound of ``source``, as it is, without encoding anew.

    A sound that an mp4 cannot hold is left out, which is said once; ``target`` then stays as it is.

    Args:
        start: seconds of ``source`` at which ``target`` begins.
        until: seconds of ``source`` at which ``target`` ends; all of the sound by default.

    Returns:
        Whether ``target`` has sound now.
    """
    target = Path(os.path.realpath(target))
    temporary = target.with_name(f".{target.name}.part")
    codec = "its sound"
    try:
        with av.open(os.path.realpath(source)) as given, av.open(str(target)) as silent:
            if not given.streams.audio:
                return False
            audio: Any = given.streams.best("audio")
            codec = f"its sound ({audio.codec_context.name})"
            if len(given.streams.audio) > 1:
                say_once(f"video {str(source)!r} has {len(given.streams.audio)} sound tracks; one of them is kept")
            with av.open(str(temporary), "w", format="mp4", options={"movflags": "faststart"}) as out:
                picture = _moved(silent, silent.streams.video[0], out, Fraction(0))
                sound = takewhile(
                    lambda each: until is None or each[0] < until - start, _moved(given, audio, out, start)
                )
                for _, packet in merge(picture, sound, key=lambda each: each[0]):
                    out.mux_one(packet)
        temporary.replace(target)
    except (OSError, ValueError, av.FFmpegError) as error:
        say_once(f"video {str(source)!r}: {codec} could not be copied into an mp4 ({reason(error)}), which is silent")
        return False
    finally:
        with suppress(OSError):
            temporary.unlink()
    return True


def _moved(container: Any, stream: Any, out: Any, start: Fraction) -> Iterator[tuple[Fraction, Any]]:
    """The packets of a stream, ``start`` seconds earlier, for a stream of ``out`` like it, each after its time."""
    copy = out.add_stream_from_template(stream)
    return _packets(container, stream, copy, start)


def _packets(container: Any, stream: Any, copy: Any, start: Fraction) -> Iterator[tuple[Fraction, Any]]:
    for packet in container.demux(stream):
        if packet.dts is None:
            continue
        earlier = round(start / packet.time_base)
        packet.dts -= earlier
        packet.pts = None if packet.pts is None else packet.pts - earlier
        packet.stream = copy
        yield packet.dts * packet.time_base, packet
