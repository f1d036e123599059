"""A real server process and Debian's Chromium, for tests and figures of the page."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, WebSocket, sync_playwright

from serving import until

CHROMIUM = Path("/usr/bin/chromium")
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}

LOOK = """
// Where the shape is that the page shows and what colour it has: what differs from the colour of most of the border.
window.look = () => {
  const video = document.getElementById("video"), canvas = document.getElementById("canvas");
  const small = window.small ??= new OffscreenCanvas(64, 64).getContext("2d", { willReadFrequently: true });
  small.drawImage(video.className === "shown" ? video : canvas, 0, 0, 64, 64);
  const { data } = small.getImageData(0, 0, 64, 64);
  const at = (x, y) => data.subarray(4 * (64 * y + x), 4 * (64 * y + x) + 3);
  const border = [];
  for (let i = 0; i < 64; i++) border.push(at(i, 0), at(i, 63), at(0, i), at(63, i));
  const back = [0, 1, 2].map((c) => border.map((pixel) => pixel[c]).sort((a, b) => a - b)[border.length / 2]);
  let n = 0, sx = 0, sy = 0, colour = [0, 0, 0];
  for (let y = 0; y < 64; y++) for (let x = 0; x < 64; x++) {
    const pixel = at(x, y);
    if (Math.max(...back.map((value, c) => Math.abs(pixel[c] - value))) < 80) continue;
    n++; sx += x; sy += y;
    for (let c = 0; c < 3; c++) colour[c] += pixel[c];
  }
  return { n, x: sx / n / 64, y: sy / n / 64, colour: colour.map((sum) => sum / n), back };
};
// Every picture that is presented from now on: [ms, x, y, frame]; the frame is known for those over the WebSocket.
window.watch = () => {
  const seen = window.seen = [], video = document.getElementById("video"), canvas = document.getElementById("canvas");
  const note = (now, frame) => { const { x, y } = look(); seen.push([now, x, y, frame]); };
  const presented = (now) => {
    if (video.className === "shown") note(now, null);
    video.requestVideoFrameCallback(presented);
  };
  video.requestVideoFrameCallback(presented);
  let last = "";
  const drawn = (now) => {
    const { frame, generation } = canvas.dataset, name = `${generation}.${frame}`;
    if (video.className !== "shown" && name !== last) note(now, Number(frame));
    last = name;
    requestAnimationFrame(drawn);
  };
  requestAnimationFrame(drawn);
};
"""


@contextmanager
def served(*flags: str) -> Generator[str]:
    """``flashdreams serve tiny-world`` in a process of its own; gives its address."""
    program = "import sys; from flashdreams.scripts.main import main; sys.exit(main())"
    server = subprocess.Popen(
        [sys.executable, "-c", program, "serve", "tiny-world", "--port", "0", *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found, f"the server says {line!r}"
        until(lambda: is_ready(found.group()), 300)
        yield found.group()
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/readyz", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextmanager
def chromium() -> Generator[Browser]:
    """Debian's browser, without a window."""
    assert CHROMIUM.exists(), f"{CHROMIUM} is missing; install it with: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """The page as a person has it open, and what passes over its WebSockets."""

    def __init__(self, browser: Browser, url: str, before: str = "", query: str = "", **options: Any) -> None:
        self.complaints: list[str] = []
        self.said: list[dict[str, Any]] = []
        self.heard: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.context = browser.new_context(**options)
        self.context.add_init_script(LOOK + before)
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda line: line.type == "error" and self.complaints.append(line.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("websocket", self._listen)
        self.page.goto(f"{url}/{query}")

    def _listen(self, socket: WebSocket) -> None:
        socket.on("framesent", lambda data: self.said.append(json.loads(data)))
        socket.on("framereceived", lambda data: isinstance(data, str) and self.heard.append(json.loads(data)))

    def wait_state(self, name: str, seconds: float = 30) -> None:
        self.page.wait_for_selector(f"body[data-state={name}]", timeout=1000 * seconds)

    def start(self, prompt: str | None = None, seed: str | None = None, frames: int = 3) -> dict[str, Any]:
        """Begin a session and wait until so many frames came and one is shown; gives what the server said to it."""
        self.wait_state("idle", 120)
        if prompt is not None:
            self.page.fill("#prompt", prompt)
        if seed is not None:
            self.page.evaluate("document.getElementById('next').open = true")
            self.page.fill("#seed", seed)
        self.page.click("#start")
        self.wait_state("live")
        self.until(lambda: any(m["first_frame"] + m["frames"] > frames for m in self.said_by_server("chunk")))
        self.wait_true("Number(canvas.dataset.frame) >= 0 || video.className === 'shown'")
        return self.said_by_server("created")[-1]

    def said_by_server(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["type"] == kind]

    def until(self, condition: Any, seconds: float = 30.0) -> Any:
        """Wait for ``condition`` while the page goes on."""
        for _ in range(int(20 * seconds)):
            if value := condition():
                return value
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not happen")

    def wait_true(self, expression: str, seconds: float = 30.0) -> None:
        """Wait for something on the page. (Playwright's own way needs eval, which the page forbids.)"""
        self.until(lambda: self.page.evaluate(expression), seconds)

    def look(self) -> dict[str, Any]:
        return self.page.evaluate("look()")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def over_webrtc(self) -> None:
        """Wait until the pictures come over WebRTC."""
        self.wait_true("document.getElementById('transport').textContent === 'WebRTC'", 15)

    def close(self) -> None:
        self.context.close()
