"""Chunks decoded beside the next steps: the same chunks, sooner; nothing lost when something fails."""

from __future__ import annotations

import json
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from flashdreams.acceleration.apply import apply
from flashdreams.acceleration.lane import CudaOrder, DecodeLane
from flashdreams.config import derive_config
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.chunk import Chunk, Decoded, Made, hand_over, tensors_in
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE, RUNNER_TEMPLATE
from flashdreams.serving.scene import Scene
from flashdreams.serving.steered import SteeredRollout, latent_digest
from template_model import template_pipeline

ON = AccelerationConfig(overlap_decode="on")
ci_cpu = pytest.mark.ci_cpu


def beside(pipeline: StreamInferencePipeline) -> StreamInferencePipeline:
    apply(pipeline, ON)
    return pipeline


class Gate:
    """A decoder that waits to be let through, chunk by chunk; and what the model did meanwhile."""

    def __init__(self, pipeline: StreamInferencePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Semaphore(0)
        self.done: list[str] = []
        decode, commit = pipeline.decoder.decode, pipeline.diffusion_model.transformer.commit

        def slow(*args, **kwargs):
            assert self.open.acquire(timeout=60)
            self.done.append("decode")
            return decode(*args, **kwargs)

        def noted(*args, **kwargs):
            self.done.append("commit")
            return commit(*args, **kwargs)

        monkeypatch.setattr(pipeline.decoder, "decode", slow)
        monkeypatch.setattr(pipeline.diffusion_model.transformer, "commit", noted)


@ci_cpu
def test_it_is_off_on_a_cpu_unless_asked_for():
    pipeline = template_pipeline()
    apply(pipeline, AccelerationConfig())
    assert pipeline.decode_lane is None
    assert isinstance(beside(template_pipeline()).decode_lane, DecodeLane)
    bare = derive_config(PIPELINE_TEMPLATE, decoder=None).setup()
    assert beside(bare).decode_lane is None


@ci_cpu
@pytest.mark.parametrize("fused", [False, True])
def test_chunks_are_the_same_to_the_bit_whatever_is_steered(fused, tmp_path):
    """A prompt, its context made anew, controls, a saved state and what goes on from it."""

    def run(pipeline, file):
        control = lambda start, stop: [0.01 * (frame % 50) for frame in range(start, stop)]  # noqa: E731
        chunks = []
        rollout = pipeline.rollout("a red circle", seed=5, control=control)
        for index in range(9):
            if index == 3:
                rollout.set_prompt("a blue square", policy="recache")
            if index == 5:
                rollout.set_control(0.5)
            if index == 6:
                rollout.save(file)
            chunks.append(next(rollout))
        resumed = pipeline.resume(file, num_chunk=9, control=lambda start, stop: [0.5] * (stop - start))
        return [*chunks, *resumed]

    pipelines = [template_pipeline() for _ in range(2)]
    if fused:
        config = derive_config(PIPELINE_TEMPLATE, diffusion_model={"fused_commit": True})
        for pipeline in pipelines:
            pipeline.config, pipeline.diffusion_model.config = config, config.diffusion_model
    plain = run(pipelines[0], tmp_path / "plain")
    lane = run(beside(pipelines[1]), tmp_path / "lane")
    assert len(lane) == len(plain) == 12
    for got, want in zip(lane, plain, strict=True):
        assert got.index == want.index
        assert torch.equal(got.latent, want.latent)
        assert torch.equal(got.frames, want.frames)
        assert torch.equal(got.host_latent, want.latent)


@ci_cpu
def test_a_served_session_and_a_run_of_the_command_line_are_the_same(tmp_path):
    def steps(pipeline):
        rollout = SteeredRollout.open(pipeline, Scene("a red circle", seed=3, height=32, width=48))
        for index in range(5):
            events = [{"type": "prompt", "prompt": "a blue square"}] if index == 2 else []
            step = rollout.step(events, [])
            yield step.chunk.index, step.first_frame, latent_digest(step.chunk), step.chunk.frames
            rollout.commit()

    for got, want in zip(steps(beside(template_pipeline())), steps(template_pipeline()), strict=True):
        assert got[:3] == want[:3] and torch.equal(got[3], want[3])
    files = []
    for choice in ("on", "off"):
        config = derive_config(RUNNER_TEMPLATE, seed=1, num_chunk=5, acceleration={"overlap_decode": choice})
        files.append(derive_config(config, output=tmp_path / f"{choice}.mp4").setup().run())
    records = [json.loads(file.with_suffix(".json").read_text()) for file in files]
    assert records[0]["output"]["frames"] == records[1]["output"]["frames"] > 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all(records[0]["timings"][f"{phase}_fps"] > 0 for phase in ("dit", "decode", "commit"))


@ci_cpu
def test_a_batch_keeps_its_axis_and_a_rollout_that_decodes_nothing_has_no_frames():
    pipeline = beside(template_pipeline())
    chunk = next(pipeline.rollout(["a red circle", "a blue square"]))
    assert chunk.frames.shape[0] == 2 and chunk.frames.ndim == 5
    rollout = pipeline.rollout("a red circle")
    rollout.decodes = False
    assert next(rollout).frames.shape[0] == 0


@ci_cpu
def test_a_chunk_is_handed_out_and_committed_while_it_is_decoded(monkeypatch):
    pipeline = beside(template_pipeline())
    gate = Gate(pipeline, monkeypatch)
    rollout = pipeline.rollout("a red circle")
    chunk = next(rollout)
    assert gate.done == ["commit"] and rollout.cache.autoregressive_index == 1
    gate.open.release()
    assert chunk.frames.dtype == torch.uint8
    assert gate.done == ["commit", "decode"]


@ci_cpu
def test_the_next_chunk_is_made_while_one_is_decoded_and_no_more_than_one_waits(monkeypatch):
    pipeline = beside(template_pipeline())
    gate = Gate(pipeline, monkeypatch)
    rollout, predicted = pipeline.rollout("a red circle"), threading.Event()
    next(rollout)
    generate = pipeline.diffusion_model.generate

    def noted(*args):
        latent = generate(*args)
        predicted.set()
        return latent

    monkeypatch.setattr(pipeline.diffusion_model, "generate", noted)
    second: list[Chunk] = []
    thread = threading.Thread(target=lambda: second.append(next(rollout)))
    thread.start()
    assert predicted.wait(60), "the next chunk waited for the decoder"
    thread.join(0.2)
    assert thread.is_alive() and "decode" not in gate.done
    gate.open.release(2)
    thread.join(60)
    assert second[0].frames.shape[0] > 0
    assert gate.done == ["commit", "decode", "commit", "decode"] or gate.done == [
        "commit",
        "decode",
        "decode",
        "commit",
    ]


@ci_cpu
def test_the_last_chunk_is_not_committed(monkeypatch):
    pipeline = beside(template_pipeline())
    gate = Gate(pipeline, monkeypatch)
    gate.open.release(3)
    assert len(list(pipeline.rollout("a red circle", num_chunk=3))) == 3
    assert gate.done.count("commit") == 2


@ci_cpu
def test_timings_are_told_once_they_are_known():
    pipeline = beside(template_pipeline())
    chunks = []
    for chunk in pipeline.rollout("a red circle", num_chunk=3):
        assert len(chunk.frames)
        chunks.append(chunk)
    assert set(chunks[0].timings) == set(chunks[1].timings) == {"dit", "decode", "commit"}
    assert set(chunks[2].timings) == {"dit", "decode"}
    assert all(seconds > 0 for chunk in chunks for seconds in chunk.timings.values())


@ci_cpu
@pytest.mark.parametrize("error", [ValueError("no picture"), StopIteration("no more")])
def test_an_error_of_the_decoder_comes_with_the_frames_and_ends_the_rollout(monkeypatch, error):
    pipeline = beside(template_pipeline())

    def broken(*_):
        raise error

    monkeypatch.setattr(pipeline.decoder, "decode", broken)
    rollout = pipeline.rollout("a red circle")
    chunk = next(rollout)
    with pytest.raises((ValueError, RuntimeError), match="no picture|StopIteration"):
        _ = chunk.frames
    with pytest.raises((ValueError, RuntimeError), match="no picture|StopIteration"):
        next(rollout)


@ci_cpu
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_an_error_of_the_commit_is_told_after_the_chunk(monkeypatch, error):
    pipeline = beside(template_pipeline())

    def broken(*_):
        raise error

    monkeypatch.setattr(pipeline.diffusion_model.transformer, "commit", broken)
    rollout = pipeline.rollout("a red circle")
    assert len(next(rollout).frames)
    with pytest.raises(type(error)):
        next(rollout)


@ci_cpu
def test_on_a_gpu_the_work_waits_for_what_was_asked_for_before_it_and_is_done_at_its_end():
    """The order of events, recorded by a stand-in for the device."""
    log: list[str] = []
    lent: list[list[int]] = []

    class Order:
        def mark(self):
            log.append(f"mark in {threading.current_thread().name.partition('_')[0]}")
            return len(log)

        def lend(self, tensors):
            lent.append([id(tensor) for tensor in tensors])

        @contextmanager
        def beside(self, moment):
            log.append(f"wait for {moment}")
            yield
            log.append("synchronize")

        def seconds(self, begin, end):
            return float(end - begin)

    pipeline = template_pipeline()
    pipeline.decode_lane = DecodeLane(torch.device("cpu"), Order())
    decode = pipeline.decoder.decode
    pipeline.decoder.decode = lambda *args: log.append("decode") or decode(*args)
    rollout = pipeline.rollout("a red circle", num_chunk=1)
    state = rollout.cache.decoder.last = torch.zeros(1)
    chunk = next(rollout)
    assert len(chunk.frames)
    assert {id(chunk.latent), id(state)} <= set(lent[0])
    assert log == [
        "mark in MainThread", "mark in MainThread",  # the steps' time
        "mark in MainThread", "wait for 3",  # the latent
        "mark in decode", "decode", "mark in decode", "synchronize",
    ]  # fmt: skip


@ci_cpu
def test_what_lies_on_a_gpu_is_lent_to_the_stream_that_reads_it():
    told: list[tuple[str, object]] = []
    tensor = lambda name, on: SimpleNamespace(is_cuda=on, record_stream=lambda stream: told.append((name, stream)))  # noqa: E731
    order = CudaOrder.__new__(CudaOrder)  # no GPU here to make a stream on
    order.stream = "decode"
    order.lend([tensor("state", True), tensor("timestep", False), tensor("latent", True)])
    assert told == [("state", "decode"), ("latent", "decode")]


@ci_cpu
@pytest.mark.parametrize("make", [template_pipeline, lambda: beside(template_pipeline())], ids=["in turn", "beside"])
def test_a_state_that_the_decoder_replaces_is_gone(make):
    """Held until the chunk is decoded, a decoder's states would take their memory twice."""
    pipeline = make()
    rollout = pipeline.rollout("a red circle", num_chunk=2)
    rollout.cache.decoder.last = torch.zeros(3)
    watched, alive, decode = weakref.ref(rollout.cache.decoder.last), [], pipeline.decoder.decode

    def replacing(latent, cache, input):
        cache.last = torch.ones(3)
        alive.append(watched() is not None)
        return decode(latent, cache, input)

    pipeline.decoder.decode = replacing
    assert [len(chunk.frames) for chunk in rollout] == [1, 8]
    assert alive == [False, False]


@ci_cpu
def test_tensors_of_a_state_are_found_at_any_depth():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)

    class State:
        def __init__(self):
            self.parts = {"x": [a, (b, None)], "self": self, "name": "n"}
            self.module = torch.nn.Linear(2, 2)
            self.again = a
            self.last = c

    assert {id(tensor) for tensor in tensors_in(State())} == {id(a), id(b), id(c)}


def chunk(index: int) -> Chunk:
    return Chunk(index, torch.zeros(1), Made(Decoded(torch.zeros(1), torch.zeros(1))))


@ci_cpu
@pytest.mark.parametrize("behind", [False, True])
def test_chunks_are_handed_over_in_order_and_none_is_left(behind):
    asked: list[int] = []
    taken: list[tuple[int, int]] = []

    def chunks():
        for index in range(4):
            asked.append(index)
            yield chunk(index)

    hand_over(chunks(), lambda each: taken.append((each.index, len(asked))), behind=behind)
    assert [index for index, _ in taken] == [0, 1, 2, 3]
    assert [count for _, count in taken] == ([2, 3, 4, 4] if behind else [1, 2, 3, 4])


@ci_cpu
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_chunk_held_back_is_handed_over_when_the_model_stops(error):
    taken: list[int] = []

    def chunks():
        yield chunk(0)
        yield chunk(1)
        raise error

    with pytest.raises(error):
        hand_over(chunks(), lambda each: taken.append(each.index), behind=True)
    assert taken == [0, 1]


@ci_cpu
def test_ctrl_c_after_a_chunk_is_taken_loses_none():
    taken: list[int] = []

    def take(each):
        taken.append(each.index)
        if each.index == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hand_over((chunk(index) for index in range(5)), take, behind=True)
    assert taken == [0, 1]


@ci_cpu
def test_nothing_more_is_handed_to_what_failed():
    taken: list[int] = []

    def take(each):
        taken.append(each.index)
        raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="full"):
        hand_over((chunk(index) for index in range(5)), take, behind=True)
    assert taken == [0]


@pytest.mark.ci_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_chunks_are_the_same_to_the_bit():
    pipelines = [derive_config(PIPELINE_TEMPLATE).setup(device="cuda") for _ in range(2)]
    beside(pipelines[1])
    assert isinstance(pipelines[1].decode_lane._order, CudaOrder)
    runs = [list(pipeline.rollout("a red circle", seed=5, num_chunk=12)) for pipeline in pipelines]
    for got, want in zip(*runs, strict=True):
        assert torch.equal(got.frames, want.frames)
        assert torch.equal(got.latent, want.latent)
