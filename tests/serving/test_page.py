"""The page as it is sent. What it does is tested in a browser: tests/browser."""

from __future__ import annotations

import re
from collections.abc import Generator
from urllib.request import urlopen

import pytest

from flashdreams.serving.app import PAGE
from serving import Running, running, template_service

pytestmark = pytest.mark.ci_cpu
FILES = sorted(path.name for path in PAGE.iterdir())


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    service = template_service(token="only-for-this-test-7f3a")
    with running(service.config, service) as server:
        yield server


@pytest.mark.parametrize("path", ["/", *(f"/static/{name}" for name in FILES)])
def test_the_page_needs_no_token_and_allows_nothing_from_elsewhere(server: Running, path: str) -> None:
    with urlopen(server.url + path) as answer:
        headers = answer.headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-cache"
    assert headers["content-type"].split(";")[0] == {
        "html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"
    }[path.rpartition(".")[2] if "." in path else "html"]  # fmt: skip


@pytest.mark.parametrize("path", ["/static/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"])
def test_nothing_but_the_page_is_sent(server: Running, path: str) -> None:
    assert server.request(path)[0] == 404


def test_every_file_that_is_named_is_there_and_nothing_is_named_elsewhere() -> None:
    named = {"index.html"}
    for path in PAGE.iterdir():
        text = path.read_text()
        named |= set(re.findall(r"/static/([\w.]+)", text)) | set(re.findall(r'from "\./([\w.]+)"', text))
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, f"{path.name} names another server"
        assert not re.search(r"<script(?![^>]*src=)|<style|style=| on\w+=\"", text), f"{path.name} has something inline"
    assert sorted(named) == FILES


def test_what_a_page_needs_to_know_of_a_model(server: Running) -> None:
    status, models = server.request("/v1/models", authorization="Bearer only-for-this-test-7f3a")
    assert status == 200
    facts = models["data"][0]
    assert (facts["takes"], facts["takes_image"], facts["needs_image"]) == ({"number": [-1.0, 1.0]}, True, False)
    assert facts["suggestions"] == []
