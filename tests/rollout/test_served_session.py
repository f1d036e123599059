"""A session of tiny-world as it is served, replayed: every log-probability equal, to the bit."""

from __future__ import annotations

import json

import pytest
import torch

from flashdreams import load_pipeline
from flashdreams.core.controls import Keys, control_from_json, control_to_json
from flashdreams.core.controls.types import Control
from flashdreams.rollout import Kernel, Segment, plan_for, replay
from flashdreams.serving.recording import SessionWriter
from flashdreams.serving.replay import segments
from flashdreams.serving.scene import Scene
from flashdreams.serving.steered import SteeredRollout, latent_digest

pytestmark = pytest.mark.ci_cpu

PROMPT = "a red circle moves right on a blue background"
SCENE = Scene(prompt=PROMPT, seed=11, height=128, width=128)
SWITCH = [{"type": "prompt", "prompt": "a green square moves left on a white background", "policy": "recache"}]
KEYS = [Control(keys=Keys("right")), None, Control(keys=Keys("up")), Control(keys=Keys("down", "left"))]


@pytest.fixture(scope="module")
def tiny():
    return load_pipeline("tiny-world", device="cpu")


def serve(rollout, num_chunk, switch_at=5):
    """What a worker does; yields each chunk with what was said."""
    for index in range(num_chunk):
        start, stop = rollout.next_controls
        events, rows = SWITCH if index == switch_at else [], [KEYS[index % 4]] * (stop - start)
        step = rollout.step(events, rows)
        assert not step.refused
        rollout.commit()
        yield step.chunk, events, rows


def test_replay_of_a_session_with_keys_a_changed_prompt_and_an_eviction_is_bit_exact(tiny, tmp_path):
    """Nine latent frames in a window of six, stored in bfloat16, guidance on; through a file and back."""
    plan = plan_for(tiny, sde=Kernel("flow_sde", eta=0.7), stochastic=[[0, 1, 2]], storage_dtype="bfloat16")
    rollout = SteeredRollout.open(tiny, SCENE)
    recorder = rollout.record(plan, PROMPT)
    assert len(list(serve(rollout, 9))) == 9
    recorder.segment.save(tmp_path / "session.safetensors")
    segment = Segment.load(tmp_path / "session.safetensors")
    assert max(chunk.kv_length for chunk in segment.chunks) == 6 < segment.chunks[-1].stop
    result = replay(tiny, segment)
    assert len(result.entries) == 27
    assert all(std > 0 for std in result.stds)
    assert torch.equal(result.log_probs, segment.log_probs())
    assert ((result.log_probs - segment.log_probs()).exp() == 1).all()
    alone = replay(tiny, segment, [(7, 1)])
    assert torch.equal(alone.log_probs[:, 0], result.log_probs[:, result.entries.index((7, 1))])


def test_packed_replay_of_tiny_world_equals_exact_replay(tiny):
    plan = plan_for(tiny, sde=Kernel("flow_sde", eta=0.7))
    rollout = SteeredRollout.open(tiny, SCENE)
    recorder = rollout.record(plan, PROMPT)
    list(serve(rollout, 8, switch_at=-1))
    select = [(0, 0), (3, 1), (7, 3)]
    exact, packed = (replay(tiny, recorder.segment, select, mode=mode).log_probs for mode in ("exact", "packed"))
    assert (exact - packed).abs().max() < 1e-5


def test_the_record_of_a_session_becomes_a_segment(tiny, tmp_path):
    """From what the client kept of it: made again, and compared with what was handed out."""
    rollout, path, latents = SteeredRollout.open(tiny, SCENE), tmp_path / "session.jsonl", []
    writer = SessionWriter(path)
    writer.begin({"model": "tiny-world", "fps": 16.0, "server": "test"})
    writer.add({"type": "begun", "generation": 0, "chunk": 0, "snapshot": None, "scene": SCENE.to_json()})
    for chunk, events, rows in serve(rollout, 3, switch_at=1):
        latents.append(chunk.latent)
        controls = [control_to_json(row) for row in rows]
        assert [control_from_json(row) for row in controls] == rows
        writer.add({
            "type": "chunk", "generation": 0, "chunk": chunk.index, "events": events, "controls": controls,
            "refused": [], "digest": latent_digest(chunk),
        })  # fmt: skip
    writer.close()
    (segment,) = segments(path, tiny)
    assert all(torch.equal(c.clean["video"], latent) for c, latent in zip(segment.chunks, latents, strict=True))
    assert [event.policy for event in segment.chunks[1].events] == ["recache"]
    assert segment.prompts == [PROMPT]
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"digest": "0" * 32})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="chunk 0 is not what was served"):
        segments(path, tiny)
