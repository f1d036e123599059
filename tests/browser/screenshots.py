"""Pictures of the page for the docs: ``python tests/browser/screenshots.py [FOLDER]`` (docs/_static by default)."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser

from browser import PHONE, Visit, chromium, served

STATIC = Path(__file__).parents[2] / "docs/_static"
SEED = "9007199254740993"


def take(browser: Browser, url: str, path: Path, prompt: str, **options: Any) -> None:
    """A picture of a live session in which a key is held; few colours, for a small file."""
    page = Visit(browser, url, **options)
    page.start(prompt, SEED, frames=16)
    page.page.evaluate("document.getElementById('next').open = false")
    page.page.keyboard.down("ArrowRight")
    page.page.wait_for_timeout(3500)
    page.page.evaluate("scrollTo(0, 0)")
    picture = Image.open(io.BytesIO(page.page.screenshot()))
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    page.close()
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else STATIC
    desktop = {"viewport": {"width": 1280, "height": 880}}
    with served() as url, chromium() as browser:
        take(browser, url, folder / "serve_desktop.png", "a red circle moves right on a blue background", **desktop)
        take(browser, url, folder / "serve_phone.png", "a yellow triangle moves up on a striped gray background",
             color_scheme="dark", **PHONE)  # fmt: skip


if __name__ == "__main__":
    main()
