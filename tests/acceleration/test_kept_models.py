"""Whole models from kept calls, as a process does that was started after another one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from flashdreams.acceleration import native
from flashdreams.acceleration.apply import apply
from flashdreams.acceleration.compile import compile_modules
from flashdreams.acceleration.kept_calls import KeptCalls, of_kind
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from template_model import lora, template_pipeline

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def latents(pipeline) -> list[torch.Tensor]:
    """A full window and beyond it, with another prompt, the context anew, and a LoRA."""
    made = []
    with pipeline.rollout("a red circle", seed=3, num_chunk=12) as chunks:
        for index in range(12):
            if index in (6, 8):
                chunks.set_prompt(f"a blue square {index}", policy="keep" if index == 6 else "recache")
            if index in (5, 9):
                chunks.set_loras({"a": 1.0} if index == 5 else {})
            made.append(next(chunks).latent)
    return made


@pytest.mark.ci_cpu
def test_a_rollout_is_to_the_bit_what_it_was_and_compiles_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path))
    made, pipelines = [], []
    for _ in range(2):
        pipeline = template_pipeline()
        notes = apply(pipeline, AccelerationConfig(compile="on"))
        pipeline.loras.load("a", lora(1), weight=0)
        made.append(latents(pipeline))
        pipeline.acceleration.finish()
        pipelines.append((pipeline.acceleration.graphs, pipeline.acceleration.taken, notes))
    assert [(graphs, taken) for graphs, taken, _ in pipelines] == [(4, 0), (0, 4)]
    assert any(note.startswith("compiled code of an earlier run") for note in pipelines[1][2])
    assert all(map(torch.equal, *made))
    assert not capsys.readouterr().err, "something was said of what was kept"


@pytest.mark.manual
@torch.no_grad()
def test_a_decoder_keeps_its_states_as_it_did(tmp_path):
    """A minute of the C++ compiler: the dictionaries that it writes into are tested small in test_kept_calls.py."""
    vae = WanVAEConfig(dim=4, dim_mult=(1, 1, 1, 1), num_res_blocks=1).setup()
    stream = torch.randn(1, 16, 6, 4, 6, generator=torch.Generator().manual_seed(0)).split(1, dim=2)

    def frames(calls: KeptCalls) -> list[torch.Tensor]:
        (region,) = compile_modules([part])
        region.calls = calls
        cache = vae.initialize_cache()
        return [vae.decode(latent, cache) for latent in stream]

    (part,) = vae.compiled_parts
    kind, kept = type(part), KeptCalls(type(part).forward)
    want = frames(kept)
    part.__class__ = kind
    told = of_kind(json.loads(json.dumps(kept.noted)), kind.forward)
    again = KeptCalls(kind.forward, told, native.collect(), tmp_path)
    got = frames(again)
    assert (len(told), len(again.taken), again.noted, kept.refused) == (4, 4, [], [])
    assert all(map(torch.equal, got, want))
