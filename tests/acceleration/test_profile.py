"""``--profile``: a line for each chunk, a trace, and nothing at all where it is not asked for."""

from __future__ import annotations

import json
import re

import pytest
import torch

from flashdreams.acceleration.apply import apply
from flashdreams.acceleration.profile import TRACE_CHUNKS, line
from flashdreams.config import ConfigError
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.errors import UserError
from flashdreams.scripts.short_flags import expand
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

LINE = re.compile(
    r"chunk (\d+): encode [\d.]+, steps [\d.]+ [\d.]+(, commit [\d.]+)?, decode [\d.]+, overlap [\d.]+ ms; "
    r"memory \d+ MiB"
)


def profiled(profile, chunks: int = 3, **request):
    pipeline = template_pipeline()
    apply(pipeline, AccelerationConfig(compile="off", profile=str(profile)))
    said: list[str] = []
    pipeline.acceleration.profiler.write = said.append
    latents = [chunk.latent for chunk in pipeline.rollout("a red circle", seed=1, num_chunk=chunks, **request)]
    pipeline.acceleration.finish()
    return latents, said


def test_phases_are_added_up_and_what_two_share_is_overlap():
    spans = [("encode", 0.0, 0.001), ("step", 0.001, 0.011), ("step", 0.011, 0.021), ("commit", 0.021, 0.031)]
    assert line(7, [*spans, ("decode", 0.031, 0.051)], 3 * 2**20) == (
        "chunk 7: encode 1.0, steps 10.0 10.0, commit 10.0, decode 20.0, overlap 0.0 ms; memory 3 MiB"
    )
    # decoding beside the commit, and 10 ms longer
    assert "overlap 10.0 ms" in line(0, [*spans, ("decode", 0.021, 0.041)], 0)
    # inside a step
    assert "overlap 5.0 ms" in line(0, [*spans, ("decode", 0.002, 0.007)], 0)


def test_every_chunk_has_one_line_with_all_its_phases_and_the_video_is_the_same():
    latents, said = profiled("lines")
    chunks = [LINE.fullmatch(text) for text in said]
    assert [int(match[1]) for match in chunks if match] == [0, 1, 2], said
    assert [bool(match[2]) for match in chunks if match] == [True, True, False]  # nothing follows the last one
    plain = [chunk.latent for chunk in template_pipeline().rollout("a red circle", seed=1, num_chunk=3)]
    assert all(torch.equal(*pair) for pair in zip(latents, plain, strict=True))


def test_a_line_comes_when_its_chunk_is_complete_and_not_at_the_end():
    pipeline = template_pipeline()
    apply(pipeline, AccelerationConfig(compile="off", profile="lines"))
    said: list[str] = []
    pipeline.acceleration.profiler.write = said.append
    rollout = pipeline.rollout("a red circle")
    counts = [(next(rollout), len(said))[1] for _ in range(4)]
    assert counts == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["t.json", "deep/er/t.json"])
def test_a_trace_names_the_phases_and_is_of_the_first_chunks_alone(tmp_path, name):
    _, said = profiled(tmp_path / name, chunks=TRACE_CHUNKS + 2)
    events = json.loads((tmp_path / name).read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert names.count("decode") == TRACE_CHUNKS and names.count("step") == 2 * TRACE_CHUNKS
    assert {"encode", "commit"} <= set(names)
    assert [text for text in said if text.startswith(f"trace of {TRACE_CHUNKS} chunks: ")]


def test_without_it_nothing_is_wrapped():
    pipeline = template_pipeline()
    assert apply(pipeline, AccelerationConfig(compile="off")) == [] and pipeline.acceleration.profiler is None
    wrapped = {"encode_controls", "decode", "predict_flow", "finalize", "generate"}
    for module in (pipeline, pipeline.diffusion_model, *pipeline.diffusion_model.experts):
        assert not wrapped & vars(module).keys()


def test_a_place_that_cannot_be_written_or_is_no_trace_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        profiled(tmp_path / "file" / "t.json")
    with pytest.raises(ConfigError, match="expected lines, or a file that ends in .json"):
        AccelerationConfig(profile="trace.txt").validate()


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("slug --profile", "slug --acceleration.profile lines"),
        ("--profile slug", "--acceleration.profile lines slug"),
        ("slug --profile t.json --seed 1", "slug --acceleration.profile t.json --seed 1"),
        ("slug --profile=t.json.gz", "slug --acceleration.profile=t.json.gz"),
        ("--compile --profile slug", "--acceleration.compile on --acceleration.profile lines slug"),
        ("slug --compile off --prompt --compiled", "slug --acceleration.compile off --prompt --compiled"),
        ("slug --compile=maybe", "slug --acceleration.compile=maybe"),
    ],
)
def test_short_flags_stand_for_the_nested_ones_and_take_no_word_that_is_not_theirs(words, written):
    assert expand(words.split()) == written.split()
