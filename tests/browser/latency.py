"""From the press of a key to the picture that shows it: ``python tests/browser/latency.py [--presses N]``.

Two measures, for each transport, p50 and p95: until the first frame in which the shape moves the new way, seen from the
pixels on the page; and, where a picture's number is known (WebSocket), until the first frame that took the control.
Times are of the page's clock, from the key event to the animation frame (WebSocket) or video frame (WebRTC).
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from playwright.sync_api import Browser

from browser import Visit, chromium, served

KEYS = ("ArrowRight", "ArrowLeft")
MOVED = 0.004
"""Widths of the picture from one frame to the next: half a pixel, a quarter of what the shape moves when it does."""
PRESSED = """
window.pressed = [];
addEventListener("keydown", (event) => event.repeat || pressed.push(event.timeStamp), true);
"""


def measure(browser: Browser, url: str, query: str, presses: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each press, by pixels and by numbers of frames."""
    page, random_ = Visit(browser, url, query=query, before=PRESSED), random.Random(0)
    page.start("a red circle stays still on a black background", seed="1", frames=8)
    if not query:
        page.over_webrtc()
    page.page.evaluate("watch()")
    for i in range(presses):
        page.page.keyboard.down(KEYS[i % 2])
        page.page.wait_for_timeout(random_.uniform(500, 900))
        page.page.keyboard.up(KEYS[i % 2])
    page.page.wait_for_timeout(1000)
    pressed, seen = page.page.evaluate("pressed"), page.page.evaluate("seen")
    assert len(pressed) == presses
    chunks = page.said_by_server("chunk")
    page.close()
    return by_pixels(pressed, seen), by_numbers(pressed, seen, chunks)


def by_pixels(pressed: list[float], seen: list[Any]) -> list[float]:
    found = []
    for i, moment in enumerate(pressed):
        way = 1 if i % 2 == 0 else -1
        end = pressed[i + 1] if i + 1 < len(pressed) else float("inf")
        moves = ((b[0], way * (b[1] - a[1])) for a, b in zip(seen, seen[1:]) if moment < b[0] < end + 300)
        first = next((time for time, moved in moves if moved > MOVED), None)
        if first is not None:
            found.append(first - moment)
    return found


def by_numbers(pressed: list[float], seen: list[Any], chunks: list[Any]) -> list[float]:
    """Each press is the next change of the held key among the frames."""
    held, numbers = None, []
    for chunk in chunks:
        for i, control in enumerate(chunk["controls"]):
            keys = (control or {}).get("keys", held)
            if keys != held and keys:
                numbers.append(chunk["first_frame"] + i)
            held = keys
    shown = [(frame, time) for time, _, _, frame in seen if frame is not None]
    if not shown or len(numbers) != len(pressed):
        return []
    return [next(time for frame, time in shown if frame >= number) - moment for number, moment in zip(numbers, pressed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presses", type=int, default=32)
    presses = parser.parse_args().presses
    with served() as url, chromium() as browser:
        for name, query in (("WebSocket", "?transport=websocket"), ("WebRTC", "")):
            for how, times in zip(("by pixels", "by frame number"), measure(browser, url, query, presses)):
                if len(times) > 1:
                    p95 = statistics.quantiles(times, n=20)[-1]
                    print(f"{name}, {how}: p50 {statistics.median(times):.0f} ms, p95 {p95:.0f} ms, n={len(times)}")


if __name__ == "__main__":
    main()
