"""Controls of a rollout: checked before a chunk is made, asked for once, recorded as consumed, replayed bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from flashdreams.config import derive_config
from flashdreams.core.controls import (
    Control,
    ControlError,
    ControlTimeline,
    Keys,
    LiveControls,
    load_controls,
    read_controls,
)
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE, TemplateControlConfig
from flashdreams.recipes.template.modules import TemplateControl
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

BRIGHT = [0.1 * (frame % 7) for frame in range(40)]


def latents(rollout):
    return [chunk.latent for chunk in rollout]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_encoder_gets_controls_in_one_form(pipeline, monkeypatch):
    seen = []
    encode = TemplateControl.encode
    monkeypatch.setattr(
        TemplateControl, "encode", lambda self, rows, *rest: seen.append(rows) or encode(self, rows, *rest)
    )
    list(pipeline.rollout("a", num_chunk=2, control=[0.5, "0.25", None, Control(number=1)]))
    assert seen == [[[Control(number=0.5)]], [[Control(number=0.25), None, Control(number=1.0)] + [None] * 5]]
    cache = pipeline.initialize_cache(["a"])
    pipeline.encode_controls([[0.5]], 0, cache)
    assert seen[2] == [[Control(number=0.5)]]


def test_a_control_the_model_does_not_take_leaves_the_rollout_as_it_was(pipeline):
    plain = latents(pipeline.rollout("a", seed=1, num_chunk=4, control=BRIGHT))
    rollout = pipeline.rollout("a", seed=1, num_chunk=4, control=BRIGHT)
    made = [next(rollout).latent]
    for bad in (Keys("w"), "right", 1.5, object()):
        with pytest.raises(ControlError, match=r"number from -1 to 1|expected Keys"):
            rollout.set_control(bad)
    assert same(made + latents(rollout), plain)


def test_a_source_that_gives_nonsense_stops_before_the_chunk_and_can_be_replaced(pipeline):
    listed = latents(pipeline.rollout("a", seed=1, num_chunk=3, control=[0.1] * 9 + [0.9] * 8))
    rollout = pipeline.rollout("a", seed=1, num_chunk=3, control=[0.1] * 9 + [0.9] * 3 + [Keys("w")] * 5)
    made = [next(rollout).latent, next(rollout).latent]
    for _ in range(2):
        with pytest.raises(ControlError, match=r"frame 12: .*Keys\('w'\).* says keys; this model takes a number"):
            next(rollout)
    rollout.set_control(0.9)
    assert same([*made, *latents(rollout)], listed)
    with pytest.raises(ValueError, match="9 frames; 1 were asked for"):
        next(pipeline.rollout("a", control=lambda start, stop: [0.5] * 9))
    with pytest.raises(ValueError, match=r"the text '0.5'; expected one control per frame.*takes a number"):
        pipeline.rollout("a", control="0.5")


def test_a_model_without_controls_says_so(tmp_path):
    deaf = derive_config(PIPELINE_TEMPLATE, encoder=None).setup()
    for options in ({"control": [0.5]}, {"control": []}, {"save_control": tmp_path / "a.jsonl"}):
        with pytest.raises(ValueError, match="template takes no controls"):
            deaf.rollout("a", num_chunk=1, **options)
    with pytest.raises(ValueError, match="template takes no controls"):
        deaf.rollout("a", num_chunk=1).set_control(0.5)
    assert len(list(deaf.rollout("a", num_chunk=1))) == 1


def test_what_was_consumed_is_recorded_and_replays_bit_for_bit(pipeline, tmp_path):
    file = tmp_path / "a.jsonl"
    rollout = pipeline.rollout("a", seed=1, num_chunk=4, control=BRIGHT[:5], save_control=file)
    first = [next(rollout).latent, next(rollout).latent]
    assert len(load_controls(file).controls) == 9, "what was consumed so far is in the file"
    rollout.set_control(-0.5)
    first += latents(rollout)
    recording = load_controls(file)
    assert (recording.fps, recording.model, recording.takes) == (16.0, "template", {"number": [-1.0, 1.0]})
    assert [control and control.number for control in recording.controls] == BRIGHT[:5] + [None] * 4 + [-0.5] * 16
    again = pipeline.rollout("a", seed=1, num_chunk=4, control=read_controls(str(file), pipeline.config.encoder.takes))
    assert same(latents(again), first)


def test_a_resumed_rollout_records_from_where_it_goes_on(pipeline, tmp_path):
    whole = latents(pipeline.rollout("a", seed=1, num_chunk=4, control=BRIGHT))
    rollout = pipeline.rollout("a", seed=1, num_chunk=4, control=BRIGHT, save_control=tmp_path / "a.jsonl")
    next(rollout), next(rollout)
    rollout.save(tmp_path / "s")
    rest = pipeline.resume(tmp_path / "s", num_chunk=4, control=BRIGHT, save_control=tmp_path / "b.jsonl")
    assert same(latents(rest), whole[2:])
    parts = load_controls(tmp_path / "a.jsonl").controls, load_controls(tmp_path / "b.jsonl").controls
    assert parts[1][:9] == [None] * 9
    assert same(latents(pipeline.rollout("a", seed=1, num_chunk=4, control=parts[0] + parts[1][9:])), whole)


def test_the_controls_of_several_samples_are_not_one_file(pipeline, tmp_path):
    with pytest.raises(ValueError, match="this rollout has 2"):
        pipeline.rollout(["a", "b"], num_chunk=1, save_control=tmp_path / "a.jsonl")
    list(pipeline.rollout(["a"], num_chunk=1, control=[BRIGHT], save_control=tmp_path / "a.jsonl"))
    assert len(load_controls(tmp_path / "a.jsonl").controls) == 1


def test_a_recording_that_fails_is_said_and_the_rollout_can_go_on(pipeline, tmp_path, monkeypatch):
    plain = latents(pipeline.rollout("a", seed=1, num_chunk=4, control=BRIGHT))
    rollout = pipeline.rollout("a", seed=1, num_chunk=4, control=BRIGHT, save_control=tmp_path / "a.jsonl")
    next(rollout)
    rollout._record._file.close()
    rollout._record._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (the writer closes it)
    with pytest.raises(ControlError, match="No space left"):
        next(rollout)
    assert same(latents(rollout), plain[2:])
    assert len(load_controls(tmp_path / "a.jsonl").controls) == 1


def test_a_timeline_steers_a_rollout(pipeline):
    made = ControlTimeline(16, pipeline.config.encoder.takes)
    made.add(9 / 16, 0.9)
    listed = latents(pipeline.rollout("a", seed=1, num_chunk=3, control=[None] * 9 + [0.9] * 8))
    assert same(latents(pipeline.rollout("a", seed=1, num_chunk=3, control=made)), listed)


def test_a_live_session_that_was_recorded_replays_bit_for_bit(pipeline, tmp_path):
    live, stop = LiveControls(pipeline.config.encoder.takes), threading.Event()

    def person():
        step = 0
        while not stop.wait(0.002):
            live.add((step % 21) / 10 - 1)
            step += 1

    thread = threading.Thread(target=person)
    thread.start()
    try:
        made = latents(pipeline.rollout("a", seed=1, num_chunk=8, control=live, save_control=tmp_path / "a.jsonl"))
    finally:
        stop.set()
        thread.join()
    controls = load_controls(tmp_path / "a.jsonl").controls
    assert len({control.number for control in controls if control}) > 2, "the person changed something"
    assert same(latents(pipeline.rollout("a", seed=1, num_chunk=8, control=controls)), made)


def test_a_recording_outlives_a_killed_process(tmp_path):
    program = f"""
import os, signal
from template_model import template_pipeline
half = lambda start, stop: [0.5] * (stop - start)
rollout = template_pipeline().rollout("a", control=half, save_control={str(tmp_path / "a.jsonl")!r})
next(rollout), next(rollout)
os.kill(os.getpid(), signal.SIGKILL)
"""
    support = os.path.dirname(sys.modules["template_model"].__file__)
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": support}, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert load_controls(tmp_path / "a.jsonl").controls == [Control(number=0.5)] * 9


class LookingAhead(TemplateControl):
    """Sees two frames more than it uses."""

    def encode(self, controls, start, stop, cache):
        self.seen.append([control and control.number for control in controls[0]])
        return super().encode([row[: -self.config.lookahead] for row in controls], start, stop, cache)


class LookingAheadConfig(TemplateControlConfig):
    lookahead = 2


def test_frames_looked_ahead_at_are_asked_for_once(tmp_path):
    pipeline = template_pipeline()
    plain = latents(pipeline.rollout("a", seed=1, num_chunk=3, control=BRIGHT))
    config = LookingAheadConfig()
    pipeline.encoder = LookingAhead(config).eval()
    pipeline.encoder.seen = []
    pipeline.config = derive_config(pipeline.config, encoder=config)
    asked = []

    def source(start, stop):
        asked.append((start, stop))
        return BRIGHT[start:stop]

    rollout = pipeline.rollout("a", seed=1, num_chunk=3, control=source, save_control=tmp_path / "a.jsonl")
    assert same(latents(rollout), plain)
    assert asked == [(0, 3), (3, 11), (11, 19)]
    assert pipeline.encoder.seen == [BRIGHT[0:3], BRIGHT[1:11], BRIGHT[9:19]]
    recorded = load_controls(tmp_path / "a.jsonl").controls
    assert [control.number for control in recorded] == BRIGHT[:19]
    assert same(latents(pipeline.rollout("a", seed=1, num_chunk=3, control=recorded)), plain)
    assert pipeline.encoder.seen[3:] == pipeline.encoder.seen[:3]
    rollout = pipeline.rollout("a", seed=1, num_chunk=3, control=BRIGHT)
    next(rollout)
    rollout.set_control(0.9)
    next(rollout)
    assert pipeline.encoder.seen[-1] == BRIGHT[1:3] + [0.9] * 8, "what was seen already stays"
