"""Images of every mode become upright 8-bit RGB of the size asked for, or are refused in a sentence (B01 to B04)."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flashdreams.core.media import MediaError
from flashdreams.core.media.image import BACKGROUND, MAX_PIXELS, decode_image, read_image

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def upright(cases) -> np.ndarray:
    """The picture that most of the B02 files hold: a red disc on blue under a green bar."""
    return np.asarray(Image.open(cases / "B02" / "upright_expected.png").convert("RGB"))


@pytest.fixture
def grey_ramp(cases) -> np.ndarray:
    return np.asarray(Image.open(cases / "B01" / "grey8_ramp_expected.png").convert("RGB"))


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert a.shape == b.shape
    return np.abs(a.astype(int) - b.astype(int))


def save(folder: Path, image: Image.Image, name: str = "image.png", **options) -> Path:
    path = folder / name
    image.save(path, **options)
    return path


# B01: deep grey and colour are scaled, not clipped.


@pytest.mark.parametrize("name", ["grey16_ramp.png", "grey32f_ramp.tiff"])
def test_deep_grey_is_scaled_to_8_bits(cases, grey_ramp, name):
    assert difference(read_image(cases / "B01" / name).pixels, grey_ramp).max() <= 1


def test_16_bit_colour_is_scaled_to_8_bits(cases, upright):
    assert np.array_equal(read_image(cases / "B01" / "rgb16.png").pixels, upright)


def test_grey_tiff_of_12_bits_and_tiff_with_inverted_grey_are_scaled_by_their_own_range(tmp_path):
    levels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    inverted = save(tmp_path, Image.fromarray(levels), "inverted.tiff", tiffinfo={262: 0})
    assert difference(read_image(inverted).pixels[..., 0], 255 - levels // 257).max() <= 1

    twelve = save(tmp_path, Image.fromarray(levels), "twelve.tiff")
    data = bytearray(twelve.read_bytes())
    offset = int.from_bytes(data[4:8], "little")
    for entry in range(offset + 2, offset + 2 + 12 * int.from_bytes(data[offset : offset + 2], "little"), 12):
        if int.from_bytes(data[entry : entry + 2], "little") == 258:  # BitsPerSample
            data[entry + 8 : entry + 10] = (12).to_bytes(2, "little")
    packed = np.array([[0x00, 0x08, 0x00], [0xFF, 0xFF, 0xFF]], dtype=np.uint8)  # 0, half, full, full
    strip = data.rindex(levels.tobytes())
    data[strip : strip + 384] = np.tile(packed, (64, 1)).tobytes()
    twelve.write_bytes(data)
    assert sorted(set(read_image(twelve).pixels.ravel())) == [0, 128, 255]


@pytest.mark.parametrize("values", [[0.0, 4.0], [-1.0, 1.0], [float("nan"), 1.0], [0.0, float("inf")]])
def test_float_images_outside_0_to_1_are_refused_with_their_range(tmp_path, values):
    path = save(tmp_path, Image.fromarray(np.array([values], dtype=np.float32)), "image.tiff")
    with pytest.raises(MediaError, match="float values from .* expected 0 to 1"):
        read_image(path)


def test_32_bit_whole_numbers_have_no_defined_range_and_are_refused(tmp_path):
    path = save(tmp_path, Image.fromarray(np.array([[0, 10**9]], dtype=np.int32)), "image.tiff")
    with pytest.raises(MediaError, match="32-bit"):
        read_image(path)


def test_16_bit_pgm_is_scaled(tmp_path):
    path = tmp_path / "ramp.pgm"
    path.write_bytes(b"P5 3 1 65535\n" + np.array([0, 32768, 65535], dtype=">u2").tobytes())
    assert read_image(path).pixels[0, :, 0].tolist() == [0, 128, 255]


# B02: rare modes keep their colours.


@pytest.mark.parametrize("name", ["animated.gif", "cmyk.jpg", "webp_named.png"])
def test_opaque_images_of_rare_modes_match(cases, upright, name):
    assert difference(read_image(cases / "B02" / name).pixels, upright).mean() < 3


def test_one_bit_images_become_black_and_white(cases, upright):
    pixels = read_image(cases / "B02" / "one_bit.png").pixels
    assert pixels.shape == upright.shape
    assert set(np.unique(pixels)) == {0, 255}
    # It is dithered: bright areas hold more white pixels.
    bar, rest = slice(0, 9), slice(11, None)
    assert pixels[bar].mean() > 1.5 * pixels[rest].mean()


def test_palette_transparency_is_composited_over_white_and_said_once(cases, capsys):
    path = cases / "B02" / "palette_trns_bytes.png"
    rgba = np.asarray(Image.open(path).convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    expected = np.rint(rgba[..., :3] * alpha + np.array(BACKGROUND) * (1 - alpha))
    assert difference(read_image(path).pixels, expected).max() <= 1
    read_image(path)
    assert capsys.readouterr().err == f"image {str(path)!r} has transparent pixels; they are shown over white\n"


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_every_mode_with_alpha_is_composited(tmp_path, mode):
    clear = Image.new("RGBA", (4, 4), (200, 10, 10, 0))
    image = read_image(save(tmp_path, clear.quantize(4) if mode == "P" else clear.convert(mode)))
    assert np.array_equal(image.pixels, np.full((4, 4, 3), 255, dtype=np.uint8))
    assert len(image.notices) == 1


def test_a_16_bit_grey_level_that_means_transparent_is_composited(tmp_path):
    levels = np.array([[0, 30000, 65535]], dtype=np.uint16)
    path = save(tmp_path, Image.fromarray(levels), transparency=30000)
    assert read_image(path).pixels[0, :, 0].tolist() == [0, 255, 255]


def test_an_alpha_channel_that_hides_nothing_is_not_mentioned(tmp_path, upright):
    path = save(tmp_path, Image.fromarray(upright).convert("RGBA"))
    image = read_image(path)
    assert np.array_equal(image.pixels, upright)
    assert image.notices == ()


@pytest.mark.parametrize("name", ["clip.gif", "clip.webp", "clip.png"])
def test_of_an_animation_the_first_frame_is_used_and_said_once(tmp_path, name, capsys):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 0, 250))]
    path = tmp_path / name
    frames[0].save(path, save_all=True, append_images=frames[1:], **({"lossless": True} if "webp" in name else {}))
    assert difference(read_image(path).pixels, np.array(frames[0])).max() <= 2
    read_image(path)
    assert capsys.readouterr().err == f"image {str(path)!r} holds several frames; the first one is used\n"


def test_the_content_decides_the_format_whatever_the_name(tmp_path, upright):
    path = tmp_path / "picture.txt"
    Image.fromarray(upright).save(path, format="BMP")
    assert np.array_equal(read_image(path).pixels, upright)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, upright, suffix, orientation):
    undo = {2: 0, 3: 1 + 2, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the Image.Transpose that makes the stored picture
    stored = Image.fromarray(upright)
    if orientation in undo:
        stored = stored.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x112] = orientation
    path = save(tmp_path, stored, f"image.{suffix}", exif=exif)
    assert difference(read_image(path).pixels, upright).mean() < 3


def test_a_damaged_exif_block_is_ignored_without_a_library_warning(tmp_path, upright):
    path = save(tmp_path, Image.fromarray(upright), exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff garbage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(read_image(path).pixels, upright)


# B03: the shape of things is kept.


def disc(pixels: np.ndarray) -> tuple[int, int, int, int]:
    """Height and width of the red disc, and its centre's distance from the middle, in pixels."""
    red = (pixels[..., 0] > 128) & (pixels[..., 2] < 120)
    rows, columns = np.flatnonzero(red.any(1)), np.flatnonzero(red.any(0))
    middle = [(line[0] + line[-1] + 1 - side) // 2 for line, side in zip((rows, columns), red.shape, strict=True)]
    return (len(rows), len(columns), *middle)


@pytest.mark.parametrize(
    ("name", "size", "cropped"),
    [
        ("tall_disc_90x320.png", (128, 128), "71.9%"),
        ("tall_disc_90x320.png", (160, 128), "64.8%"),
        ("wide_disc_640x60.png", (128, 128), "90.6%"),
        ("wide_disc_640x60.png", (480, 832), "83.8%"),
    ],
)
def test_a_disc_stays_round_and_in_the_middle_and_the_cropped_share_is_said_once(cases, capsys, name, size, cropped):
    path = cases / "B03" / name
    pixels = read_image(path, *size).pixels
    assert pixels.shape == (*size, 3)
    height, width, *off_centre = disc(pixels)
    assert abs(height / width - 1) < 0.05
    assert max(map(abs, off_centre)) <= 1 + max(size) / 100
    read_image(path, *size)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{size[0]}x{size[1]}" in said and f"{cropped} of it is cropped" in said


def test_without_a_size_the_image_keeps_its_own_and_nothing_is_said(cases, capsys):
    assert read_image(cases / "B03" / "tall_disc_90x320.png").pixels.shape == (320, 90, 3)
    assert capsys.readouterr().err == ""


def test_an_image_of_the_right_size_passes_unchanged(cases, upright):
    image = read_image(cases / "B02" / "upright_expected.png", 96, 160)
    assert np.array_equal(image.pixels, upright)
    assert image.notices == ()


def test_scaling_down_averages_instead_of_picking_pixels(tmp_path):
    checkers = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)
    pixels = read_image(save(tmp_path, Image.fromarray(checkers)), 32, 32).pixels
    assert difference(pixels[4:-4, 4:-4], np.full((24, 24, 3), 128)).max() <= 3


def test_one_pixel_fills_the_frame(cases):
    path = cases / "B03" / "one_pixel.png"
    colour = read_image(path).pixels
    assert colour.shape == (1, 1, 3)
    assert np.array_equal(read_image(path, 48, 80).pixels, np.broadcast_to(colour, (48, 80, 3)))


# B04: what is no image, or too large a one, is refused before it is unpacked.

MEASURE = """
import resource, sys, warnings
warnings.simplefilter("always")
from flashdreams.core.media import MediaError
from flashdreams.core.media.image import read_image
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_image(sys.argv[1], 128, 128)
except MediaError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_bomb_is_refused_with_pixel_count_and_limit_and_is_not_unpacked(cases):
    path = cases / "B04" / "bomb_40960x40960_1bit.png"
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    message, kilobytes = done.stdout.splitlines()
    assert "1,677,721,600 pixels" in message and f"{MAX_PIXELS:,}" in message
    assert int(kilobytes) < 50_000
    assert done.stderr == ""


def test_between_the_librarys_two_limits_ours_decides(cases):
    path = cases / "B04" / "between_limits_10240x10240_1bit.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MediaError, match=r"104,857,600 pixels; the limit is 67,108,864"):
            read_image(path)
        image = read_image(path, 128, 128, max_pixels=10240**2)
    assert image.pixels.shape == (128, 128, 3)


def test_a_webp_header_that_claims_the_largest_canvas_allocates_nothing(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 0, 250))]
    data = io.BytesIO()
    frames[0].save(data, "WEBP", save_all=True, append_images=frames[1:])
    raw = bytearray(data.getvalue())
    canvas = raw.index(b"VP8X") + 12
    raw[canvas : canvas + 6] = (16382).to_bytes(3, "little") * 2
    path = tmp_path / "bomb.webp"
    path.write_bytes(raw)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    message, kilobytes = done.stdout.splitlines()
    assert f"{MAX_PIXELS:,}" in message
    assert int(kilobytes) < 50_000


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_byte.png", r"is empty \(0 bytes\)"),
        ("truncated.png", r"damaged"),
        ("text_named.jpg", r"not an image that can be read"),
        ("missing.png", r"does not exist"),
        (".", r"not a file"),
    ],
)
def test_what_is_no_image_is_refused_by_name(cases, name, said):
    path = cases / "B04" / name
    with pytest.raises(MediaError, match=said) as caught:
        read_image(path)
    assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "tiff", "bmp"])
def test_a_file_cut_anywhere_is_refused_or_read_but_never_raises_anything_else(tmp_path, upright, suffix):
    whole = save(tmp_path, Image.fromarray(upright), f"whole.{suffix}").read_bytes()
    refused = 0
    for length in range(1, len(whole), max(1, len(whole) // 40)):
        try:
            decode_image(io.BytesIO(whole[:length]), "cut")
        except MediaError:
            refused += 1
    assert refused >= 30


def test_one_side_without_the_other_is_a_mistake_of_the_caller(cases):
    with pytest.raises(ValueError, match="both or neither"):
        read_image(cases / "B03" / "one_pixel.png", height=64)
