"""The page in Debian's Chromium, against a server as people start it.

Needs ``apt-get install chromium``; then ``uv run pytest -m manual tests/browser``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Route

from browser import PHONE, Visit
from flashdreams.client import Session
from serving import PROMPT, running, template_service

pytestmark = pytest.mark.manual
Open = Callable[..., Visit]
KEEP_PARTS = """
window.sockets = []; window.peers = [];
window.WebSocket = class extends WebSocket { constructor(...a) { super(...a); sockets.push(this); } };
window.RTCPeerConnection = class extends RTCPeerConnection { constructor(...a) { super(...a); peers.push(this); } };
"""
BLOCKED = {
    "no WebRTC at all": "delete window.RTCPeerConnection;",
    "forbidden": "window.RTCPeerConnection = class { constructor() { throw new DOMException('no'); } };",
    "no way through": "RTCPeerConnection.prototype.setRemoteDescription = async () => {};",
}


def steer(page: Visit, key: str) -> tuple[int, int]:
    """Hold ``key``, for two more chunks than it needs to be seen; gives the chunk that was the last to arrive when it
    was pressed, and the first that took it."""

    def took() -> list[int]:
        wanted = {"keys": [key.removeprefix("Arrow").lower()]}
        return [chunk["chunk"] for chunk in page.said_by_server("chunk")[before:] if wanted in chunk["controls"]]

    before = len(page.said_by_server("chunk"))
    page.page.keyboard.down(key)
    page.until(lambda: len(took()) >= 3)
    page.page.keyboard.up(key)
    return page.said_by_server("chunk")[before - 1]["chunk"], took()[0]


def test_the_page_loads_and_asks_only_this_server(visit: Open, url: str) -> None:
    page = visit()
    page.start()
    assert page.text("#status") == "Live"
    assert page.text("#model") == "tiny-world"
    assert {address.split("/")[2] for address in page.asked if not address.startswith(("blob:", "data:"))} == {
        url.removeprefix("http://")
    }


def test_nothing_of_elsewhere_would_run_on_the_page(visit: Open) -> None:
    page = visit()
    page.wait_state("idle")
    ran = page.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
        return window.ran === true;
    }""")
    assert not ran
    assert "Content Security Policy" in page.complaints.pop()


@pytest.mark.parametrize("query", ["?transport=websocket", ""], ids=["websocket", "webrtc"])
def test_a_key_changes_the_motion_within_two_chunks(visit: Open, query: str) -> None:
    page = visit(query=query)
    page.start("a red circle moves right on a blue background", seed="1", frames=8)
    if not query:
        page.over_webrtc()
    page.page.evaluate("watch()")
    page.page.wait_for_timeout(600)
    last, taken = steer(page, "ArrowDown")
    assert taken <= last + 2
    seen = page.page.evaluate("seen")
    if query:
        first = next(m["first_frame"] for m in page.said_by_server("chunk") if m["chunk"] == taken)
        before = [y for _, _, y, frame in seen if frame < first]
        after = [y for _, _, y, frame in seen if first <= frame < first + 8]
    else:
        before, after = [y for _, _, y, _ in seen[:8]], [y for _, _, y, _ in seen]
    assert np.ptp(before) < 0.03, "it moved to the right alone"
    assert after[-1] - before[-1] > 0.04, "now it moves down"


def test_the_video_over_webrtc_plays(visit: Open) -> None:
    page = visit()
    page.start()
    page.over_webrtc()
    assert {"type": "video", "over": "webrtc"} in page.said
    begun = page.page.evaluate("document.getElementById('video').currentTime")
    page.wait_true(f"document.getElementById('video').currentTime > {begun} + 1")
    assert page.page.evaluate("getComputedStyle(video).opacity") == "1"
    assert page.look()["colour"][0] > 150 > page.look()["colour"][2], "the circle is red"


@pytest.mark.parametrize("why", BLOCKED)
def test_without_webrtc_pictures_come_over_the_websocket(visit: Open, why: str) -> None:
    page = visit(before=BLOCKED[why])
    page.start(frames=24)
    assert page.text("#transport") == "WebSocket"
    assert page.page.evaluate("getComputedStyle(video).opacity") == "0"
    assert page.look()["n"] > 50


def test_where_webrtc_falls_silent_pictures_go_on(visit: Open) -> None:
    page = visit(before=KEEP_PARTS)
    page.start()
    page.over_webrtc()
    page.page.evaluate("peers.at(-1).close()")
    page.wait_true("document.getElementById('transport').textContent === 'WebSocket'")
    frame = page.page.evaluate("Number(canvas.dataset.frame ?? 0)")
    page.wait_true(f"Number(canvas.dataset.frame) > {frame} + 8")
    assert page.text("#status") == "Live"


def test_a_new_prompt_changes_the_colour(visit: Open) -> None:
    page = visit()
    page.start("a red circle stays still on a black background", seed="3", frames=8)
    red, green, _ = page.look()["colour"]
    assert red > green + 80
    page.page.fill("#prompt", "a green circle stays still on a black background")
    page.page.press("#prompt", "Enter")

    def is_green() -> bool:
        red, green, _ = page.look()["colour"]
        return green > red + 40

    page.until(is_green)
    assert page.said_by_server("created")[-1]["generation"] == 0
    assert not page.said_by_server("reset"), "the session went on"


@pytest.mark.parametrize("seed", ["9007199254740993", "18446744073709551615", "0"])
def test_a_seed_of_64_bits_arrives_as_it_was_typed(visit: Open, seed: str) -> None:
    page = visit()
    assert page.start(seed=seed)["seed"] == seed
    page.wait_true(f"document.getElementById('seed-used').textContent === '{seed}'")
    assert [m["seed"] for m in page.said if m["type"] == "create"] == [seed]


@pytest.mark.parametrize("seed", ["-1", "18446744073709551616", "1e3", "0x10", "007", "None"])
def test_a_seed_that_is_none_is_said_and_not_sent(visit: Open, seed: str) -> None:
    page = visit()
    page.wait_state("idle")
    page.page.click("#next summary")
    page.page.fill("#seed", seed)
    page.page.click("#start")
    assert f"The seed is “{seed}”; it has to be a whole number from 0 to 18446744073709551615" in page.text("#notice")
    assert not page.said


def test_pause_restart_and_new_session(visit: Open) -> None:
    page = visit()
    first = page.start(seed="5")
    page.page.click("#pause")
    page.wait_state("paused")
    made = len(page.said_by_server("chunk"))
    page.page.wait_for_timeout(800)
    assert len(page.said_by_server("chunk")) <= made + 1
    page.page.click("#pause")
    page.wait_state("live")
    digest = page.said_by_server("chunk")[0]["digest"]
    page.page.click("#restart")
    page.until(lambda: any(m["generation"] == 1 for m in page.said_by_server("chunk")))
    again = next(m for m in page.said_by_server("chunk") if m["generation"] == 1)
    assert (again["chunk"], again["digest"]) == (0, digest), "the same seed gives the same video"
    page.page.fill("#seed", "")
    page.page.click("#renew")
    page.until(lambda: len(page.said_by_server("created")) == 2)
    assert page.said_by_server("created")[1]["session"] != first["session"]


def test_the_video_of_a_session_can_be_saved(visit: Open, tmp_path: Path) -> None:
    page = visit()
    page.start(seed="7", frames=12)
    page.page.click("#end")
    page.wait_state("ended")
    with page.page.expect_download() as download:
        page.page.click("#save-after")
    assert download.value.suggested_filename == "tiny-world-7.mp4"
    download.value.save_as(tmp_path / "it.mp4")
    with av.open(tmp_path / "it.mp4") as clip:
        assert sum(1 for _ in clip.decode(video=0)) >= 12


def test_a_session_begins_with_an_image_of_the_person(visit: Open, tmp_path: Path) -> None:
    pixels = np.zeros((200, 200, 3), np.uint8)
    pixels[60:140, 60:140] = 255, 235, 0
    Image.fromarray(pixels).save(tmp_path / "first.png")
    page = visit()
    page.wait_state("idle")
    page.page.set_input_files("#image", tmp_path / "first.png")
    page.wait_true("document.getElementById('preview').naturalWidth === 200")
    page.start("a yellow square stays still on a black background", frames=1)
    red, green, blue = page.look()["colour"]
    assert min(red, green) > blue + 100


def test_a_session_outlives_its_connection(visit: Open) -> None:
    page = visit(before=KEEP_PARTS)
    session = page.start()["session"]
    page.page.evaluate("sockets.at(-1).close()")
    page.wait_state("broken")
    page.wait_state("live")
    assert page.said_by_server("created")[-1]["session"] == session
    chunks = len(page.said_by_server("chunk"))
    page.until(lambda: len(page.said_by_server("chunk")) > chunks + 2)


def test_a_phone_shows_all_of_it_and_can_steer(visit: Open) -> None:
    page = visit(**PHONE)
    page.start()
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    sizes = page.page.eval_on_selector_all(
        "button, summary, textarea, #stage", "all => all.filter(e => e.offsetParent).map(e => [e.id, e.offsetHeight])"
    )
    assert [name for name, height in sizes if height < 40] == [""], "only the line that opens more is less high"
    pad = page.page.locator("[data-key=left]").bounding_box()
    assert pad is not None
    assert pad["y"] + pad["height"] < 844, "picture and pad are on one screen"
    assert min(pad["width"], pad["height"]) >= 48
    touch = page.context.new_cdp_session(page.page)
    finger = {"x": pad["x"] + pad["width"] / 2, "y": pad["y"] + pad["height"] / 2}
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [finger]})
    page.until(lambda: any({"keys": ["left"]} in chunk["controls"] for chunk in page.said_by_server("chunk")))
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.until(lambda: {"keys": []} in page.said_by_server("chunk")[-1]["controls"])


def test_a_world_to_walk_in_gets_a_pad_for_each_hand_and_the_mouse(visit: Open) -> None:
    page = visit(query="?transport=websocket")
    page.wait_state("idle")
    walk, look = ("forward", "to the left", "back", "to the right"), ("look up", "turn left", "look down", "turn right")
    keys = dict(zip("wasd", walk)) | dict(zip("ijkl", look)) | {"up": "forward", "space": "jump"}

    def as_such_a_world(route: Route) -> None:
        models = route.fetch().json()
        models["data"][0]["takes"] = {"keys": keys, "mouse": [0.1, 0.1], "words": ["sunrise"]}
        route.fulfill(json=models)

    page.page.route("**/v1/models", as_such_a_world)
    page.page.reload()
    page.start(frames=1)
    names = page.page.eval_on_selector_all("[data-key]", "all => all.map(e => e.getAttribute('aria-label'))")
    assert [name.partition(":")[0] for name in names] == [*walk, *look, "jump"]
    assert page.page.locator(".cross").count() == 2
    page.page.keyboard.press("w")
    page.page.keyboard.press("Space")
    page.page.click("text=sunrise")
    page.page.hover("#stage")
    page.page.mouse.down()
    page.page.mouse.move(640, 300, steps=3)
    page.page.mouse.up()
    page.until(lambda: any(m.get("control", {}).get("mouse", {}).get("dx") for m in page.said))
    said = [m["control"] for m in page.said if m["type"] == "control" and "mouse" not in m["control"]]
    assert said == [{"keys": ["w"]}, {"keys": []}, {"keys": ["space"]}, {"keys": []}, {"word": "sunrise"}]


def test_a_model_that_loads_and_a_token(browser: Browser) -> None:
    service = template_service(token="only-for-this-test-7f3a")
    with running(service.config, service) as server, ExitStack() as stack:
        page = Visit(browser, server.url)
        stack.callback(page.close)
        page.wait_state("locked")
        assert page.text("#message") == "This server asks for a token."
        loading = iter(["the model is being loaded\n"])
        page.page.route("**/readyz", lambda route: route.fulfill(status=503, body=text) if (text := next(loading, None))
                        else route.continue_())  # fmt: skip
        page.page.fill("#token", "another-one-of-16-letters")
        page.page.press("#token", "Enter")
        page.until(lambda: "not the token" in page.text("#message"))
        page.page.fill("#token", "only-for-this-test-7f3a")
        page.page.press("#token", "Enter")
        page.until(lambda: page.text("#message") == "The model is being loaded.")
        page.start(frames=1)
        assert not [address for address in page.asked if "only-for-this-test" in address]
        page.page.locator("#pads input").fill("0.5")
        page.until(lambda: any({"number": 0.5} in chunk["controls"] for chunk in page.said_by_server("chunk")))


def test_a_busy_server_says_so(browser: Browser) -> None:
    service = template_service(max_sessions=1)
    with running(service.config, service) as server, ExitStack() as stack:
        page = Visit(browser, server.url)
        stack.callback(page.close)
        page.wait_state("idle")
        with Session(server.url, PROMPT):
            page.page.click("#start")
            page.until(lambda: "The server is busy" in page.text("#message"))
        page.start(frames=1)
