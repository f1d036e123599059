"""Sizes snap to what the model can make, and say so; FIELD_NOTES rows 11 (674x389) and 29 (1280x720 on a /32 model)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdreams.core.sizes import area_size, cells_size, snap_size

pytestmark = pytest.mark.ci_cpu

sides = st.integers(1, 5000)
multiples = st.integers(1, 64)


@given(sides, sides, multiples)
def test_the_nearest_positive_multiple_is_taken(height, width, multiple):
    for side, snapped in zip((height, width), snap_size(height, width, multiple), strict=True):
        valid = range(multiple, side + 2 * multiple, multiple)
        assert snapped in valid
        assert abs(snapped - side) == min(abs(candidate - side) for candidate in valid)


@given(sides, sides, multiples)
def test_a_size_that_fits_stays_as_it_is_also_when_strict(height, width, multiple):
    size = (height * multiple, width * multiple)
    assert snap_size(*size, multiple) == size == snap_size(*size, multiple, strict=True)


def test_a_size_that_was_rejected_for_ever_elsewhere_is_snapped_and_said_once(capsys):
    assert snap_size(389, 674, 16) == (384, 672)
    assert snap_size(389, 674, 16) == (384, 672)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "389x674" in said and "384x672" in said and "16" in said


def test_720p_on_a_model_that_needs_32_takes_its_published_704(capsys):
    assert snap_size(720, 1280, 32) == (704, 1280)
    assert "720x1280" in capsys.readouterr().err


def test_a_fitting_size_is_not_mentioned(capsys):
    snap_size(704, 1280, 32)
    assert capsys.readouterr().err == ""


def test_strict_refuses_and_names_the_nearest_valid_sizes():
    with pytest.raises(ValueError, match=r"720x1280.*heights are 704 and 736.*widths 1280$"):
        snap_size(720, 1280, 32, strict=True)


def test_strict_names_no_size_of_zero():
    with pytest.raises(ValueError, match=r"heights are 32, .*widths 64$"):
        snap_size(5, 64, 32, strict=True)


@pytest.mark.parametrize(("height", "width", "named"), [(0, 64, "height is 0"), (64, -8, "width is -8")])
@pytest.mark.parametrize("strict", [False, True])
def test_zero_and_negative_sides_are_refused_by_name(height, width, named, strict):
    with pytest.raises(ValueError, match=named):
        snap_size(height, width, 16, strict=strict)


SHAPES = [(480, 832), (720, 1280), (1080, 1920), (90, 320), (640, 60), (1, 1), (333, 777), (4000, 3000)]


@pytest.mark.parametrize("image", SHAPES)
@pytest.mark.parametrize("area", [480 * 832, 720 * 1280])
def test_size_of_an_image_at_a_given_area_is_the_published_rule(image, area):
    """Latent rows, cut off to whole rows and then to even ones; times the compression of 8."""
    ratio = image[0] / image[1]
    rows, columns = (math.floor(math.floor(math.sqrt(side) / 8) / 2) * 2 for side in (area * ratio, area / ratio))
    assert area_size(image, area, 16) == (8 * rows, 8 * columns)


@pytest.mark.parametrize(
    ("image", "size"),
    [((1080, 1920), (704, 1248)), ((704, 1280), (704, 1280)), ((1000, 1000), (928, 960)), ((1920, 1080), (1248, 704))],
)
def test_size_in_cells_distorts_least(image, size):
    height, width = cells_size(image, 704 * 1280, 32)
    assert (height % 32, width % 32) == (0, 0) and height * width <= 704 * 1280
    assert (height, width) == size


def test_an_extreme_image_still_has_a_size():
    assert area_size((1, 10_000), 480 * 832, 16) == (16, 63184)
    assert min(cells_size((10_000, 1), 704 * 1280, 32)) == 32
