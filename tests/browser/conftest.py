"""One server and one browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
from playwright.sync_api import Browser

from browser import Visit, chromium, served


@pytest.fixture(scope="session")
def url() -> Generator[str]:
    with served() as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Generator[Browser]:
    with chromium() as it:
        yield it


@pytest.fixture
def visit(browser: Browser, url: str) -> Generator[Callable[..., Visit]]:
    """Opens the page; where it complained in the console, the test has failed."""
    visits: list[Visit] = []

    def open_page(address: str = url, **options: str) -> Visit:
        visits.append(Visit(browser, address, **options))
        return visits[-1]

    yield open_page
    for each in visits:
        each.close()
    assert [each.complaints for each in visits if each.complaints] == []
