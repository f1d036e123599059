"""Draw the example pictures: ``python -m flashdreams.examples.draw``."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from flashdreams.examples import FIRST, LAST

HEIGHT, WIDTH, HORIZON = 480, 832, 270


def bay(boat: float, sun: float) -> Image.Image:
    """A bay at sunset; ``boat`` is the boat's place in widths, ``sun`` the sun's height in heights."""
    rows = np.linspace(0, 1, HEIGHT)[:, None, None]
    sky = (1 - rows) * np.array([70, 80, 140]) + rows * np.array([400, 190, 90])
    canvas = np.broadcast_to(sky, (HEIGHT, WIDTH, 3)).copy()
    distance = np.hypot(*np.meshgrid(np.arange(WIDTH) - 0.62 * WIDTH, np.arange(HEIGHT) - sun * HEIGHT))
    canvas += 160 * np.exp(-((distance / 90) ** 2))[..., None] * np.array([1.0, 0.8, 0.5])
    canvas[distance < 34] = 255, 236, 190
    picture = Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for shade, low, seed in (((96, 84, 120), 46, 1), ((60, 58, 92), 26, 2)):
        hills = np.convolve(np.random.default_rng(seed).normal(size=WIDTH + 120), np.hanning(121), "valid")
        tops = HORIZON - low - 9 * hills / np.abs(hills).std() / 2
        draw.polygon([(0, HORIZON), *zip(range(WIDTH), tops, strict=True), (WIDTH, HORIZON)], fill=shade)
    scene = np.asarray(picture, dtype=float).copy()
    depth = np.arange(HEIGHT - HORIZON)
    drift = np.round(2.2 * np.sin(depth / 3.1) + np.random.default_rng(4).normal(size=depth.size)).astype(int)
    mirrored = scene[(HORIZON - 1 - depth)[:, None], (np.arange(WIDTH) + drift[:, None]) % WIDTH]
    scene[HORIZON:] = 0.6 * mirrored + 0.4 * np.array([40, 60, 100])
    water = Image.fromarray(scene.clip(0, 255).astype(np.uint8))
    sail = draw_boat(boat * WIDTH, HORIZON + 42)
    reflection = sail.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    offset = 2 * (HORIZON + 60) - HEIGHT  # about the boat's waterline
    faint = reflection.getchannel("A").point(lambda alpha: alpha * 2 // 5)
    water.paste(reflection, (0, offset), faint)
    water.paste(sail, (0, 0), sail)
    return water.filter(ImageFilter.GaussianBlur(0.6))


def draw_boat(x: float, y: float) -> Image.Image:
    """The boat with its waterline at ``y + 18``, on nothing."""
    layer = Image.new("RGBA", (WIDTH, HEIGHT))
    draw = ImageDraw.Draw(layer)
    draw.polygon([(x - 48, y), (x + 52, y), (x + 34, y + 18), (x - 36, y + 18)], fill=(58, 34, 30))
    draw.polygon([(x + 4, y - 104), (x + 4, y - 6), (x + 56, y - 6)], fill=(250, 236, 214))
    draw.polygon([(x - 2, y - 96), (x - 2, y - 6), (x - 40, y - 6)], fill=(226, 120, 84))
    draw.line([(x + 1, y - 112), (x + 1, y)], fill=(40, 26, 24), width=3)
    return layer


if __name__ == "__main__":
    bay(0.22, 0.40).save(FIRST, quality=88)
    bay(0.70, 0.50).save(LAST, quality=88)
