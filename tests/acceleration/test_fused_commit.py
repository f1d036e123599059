"""A commit done in one pass with the first step of the next chunk: the same video as by the two passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdreams.acceleration import cuda_graph
from flashdreams.acceleration.apply import apply
from flashdreams.acceleration.compile import compile_modules
from flashdreams.acceleration.plan import plan_model
from flashdreams.acceleration.prewarm import prewarm
from flashdreams.config import ConfigError, derive_config
from flashdreams.core import notices
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.config import ExpertConfig
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.recipes.wan.network import WanBlock
from flashdreams.rollout import Kernel, plan_for, replay
from flashdreams.rollout import rollout as sampled
from odd_networks import LazyTransformer, OtherConfig, StatefulConfig, of_template
from tape_graphs import TapeBackend

pytestmark = pytest.mark.ci_cpu

CONTROL = [0.1 * (i % 9) - 0.4 for i in range(400)]
LENGTHS = 3
"""Of a window of five while it fills: 1, 3, 5 latent frames."""


def pipeline_of(fused: bool = True, model: dict[str, Any] | None = None, **transformer: Any) -> Any:
    """The template's pipeline, with weights that make its controls matter, and ``pipeline.passes`` a list of the names
    of the passes that are run."""
    torch.manual_seed(7)
    given = {"transformer": transformer, "fused_commit": fused, **(model or {})}
    pipeline: Any = derive_config(PIPELINE_TEMPLATE, diffusion_model=given).setup()
    transformer_module = pipeline.diffusion_model.transformer
    torch.nn.init.normal_(transformer_module.network.brightness.weight, std=0.5)
    pipeline.passes = []
    for name in ("commit", "predict_flow", "commit_and_predict_flow"):
        setattr(transformer_module, name, _told(pipeline.passes, name, getattr(transformer_module, name)))
    return pipeline


def _told(passes: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        passes.append(name)
        return function(*args, **kwargs)

    return call


def latents(pipeline: Any, chunks: int, steer: dict[int, Callable[[Any], None]] | None = None, **options: Any) -> Any:
    """Of a rollout; ``steer`` is done before the chunks of these numbers."""
    options = {"prompt": "a red circle", "seed": 3, "control": CONTROL, **options}
    rollout, made = pipeline.rollout(num_chunk=chunks, **options), []
    for i in range(chunks):
        if steer and i in steer:
            steer[i](rollout)
        made.append(next(rollout).latent)
    return made


def close(found: list[Tensor], want: list[Tensor]) -> bool:
    """Equal in the sense of the design: 1e-5 of the largest, in float32."""
    return len(found) == len(want) and all(
        (got - expected).abs().max() <= 1e-5 * expected.abs().max() for got, expected in zip(found, want, strict=True)
    )


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batched guidance": {"guidance_scale": 2.5},
    "sequential guidance": {"guidance_scale": 2.5, "cfg": "sequential"},
    "a window of one chunk": {"window_size_t": 2, "sink_size_t": 0},
    "no sink, relative positions": {"sink_size_t": 0, "rope": "cache_relative"},
    "a sink that splits a chunk": {"sink_size_t": 2},
    "chunks of one length": {"first_len_t": 2},
    "commits at a noise level": {"context_noise": 0.2},
    "a network with hooks and state": {"network": of_template(StatefulConfig)},
}


@pytest.mark.parametrize("model", MODELS)
def test_chunks_are_those_of_two_passes(model):
    """Filling and eviction included. The pass sees chunks of one length: after a shorter first one it begins later."""
    pipeline, plain = pipeline_of(**MODELS[model]), pipeline_of(False, **MODELS[model])
    chunks = 40 if model == "plain" else 12
    assert close(latents(pipeline, chunks), latents(plain, chunks))
    alone = 0 if "first_len_t" in MODELS[model] else 1
    assert pipeline.passes.count("commit_and_predict_flow") == chunks - 1 - alone
    assert pipeline.passes.count("commit") == alone
    assert pipeline.passes.count("predict_flow") == chunks + 1 + alone, "of two steps a chunk, those left"
    assert plain.passes.count("commit") == chunks - 1


def test_batches_and_sizes_interleave_as_if_each_ran_alone():
    pipeline, options = (
        pipeline_of(guidance_scale=2.0),
        (
            {"prompt": "a", "seed": 1, "height": 32, "width": 48, "control": CONTROL},
            {"prompt": ["b", "c"], "seed": 2, "height": 48, "width": 32, "control": [CONTROL, CONTROL]},
        ),
    )
    alone = [latents(pipeline, 8, **option) for option in options]
    assert all(close(made, latents(pipeline_of(False, guidance_scale=2.0), 8, **o)) for made, o in zip(alone, options))
    rollouts, mixed = [pipeline.rollout(num_chunk=8, **option) for option in options], ([], [])
    for i in (0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1):
        mixed[i].append(next(rollouts[i]).latent)
    assert all(torch.equal(*pair) for made, want in zip(mixed, alone) for pair in zip(made, want, strict=True))


def lora() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"A": (4, 48), "B": (48, 4)}
    return {
        f"blocks.{block}.{layer}.lora_{side}.weight": torch.randn(shape, generator=generator) / 3
        for block in (0, 1) for layer in ("self_attn.k", "cross_attn.k") for side, shape in shapes.items()
    }  # fmt: skip


def change_weights(rollout: Any) -> None:
    rollout.flush()
    with torch.no_grad():
        for block in rollout.pipeline.diffusion_model.transformer.network.blocks:
            block.self_attn.v.weight.mul_(1.5)


def update_weights(rollout: Any) -> None:
    change_weights(rollout)
    rollout.pipeline.diffusion_model.weights_changed()


BETWEEN: dict[str, Callable[[Any], None]] = {
    "a new prompt": lambda rollout: rollout.set_prompt("something else", policy="keep"),
    "a new prompt, recached": lambda rollout: rollout.set_prompt("something else", policy="recache"),
    "a cut": lambda rollout: rollout.set_prompt("something else", policy="reset"),
    "a LoRA": lambda rollout: rollout.set_loras({"style": 1.0}),
    "a control": lambda rollout: rollout.set_control(0.9),
    "other weights": change_weights,
    "other weights, said": update_weights,
    "flush": lambda rollout: rollout.flush(),
}


@pytest.mark.parametrize("event", BETWEEN)
def test_a_waiting_chunk_is_committed_by_itself_before(event):
    """With what it was made with: as by two passes, before and after the window is full."""
    made = []
    for fused in (True, False):
        pipeline = pipeline_of(fused, guidance_scale=2.0)
        pipeline.loras.load("style", lora(), weight=0.0)
        commits: list[int] = []

        def steered(rollout: Any, passes: list[str] = pipeline.passes, commits: list[int] = commits) -> None:
            before = passes.count("commit")
            BETWEEN[event](rollout)
            commits.append(passes.count("commit") - before)

        made.append(latents(pipeline, 10, {3: steered, 7: steered}))
        assert commits == [1, 1]
    assert close(*made)
    assert close(made[0][:3], latents(pipeline_of(guidance_scale=2.0), 3))
    if event != "flush":
        assert not close(made[0], latents(pipeline_of(guidance_scale=2.0), 10)), "it matters"


def test_a_saved_rollout_goes_on_bit_for_bit(tmp_path):
    pipeline = pipeline_of()
    rollout = pipeline.rollout("a", seed=3, control=CONTROL)
    for _ in range(6):
        next(rollout)
    rollout.save(tmp_path / "state")
    assert pipeline.passes[-1] == "commit" and not rollout.cache.pending
    resumed = pipeline.resume(tmp_path / "state", control=CONTROL)
    for _ in range(4):
        assert torch.equal(next(rollout).latent, next(resumed).latent)


def test_the_last_chunk_is_dropped_uncommitted_when_a_rollout_ends_or_is_closed():
    pipeline = pipeline_of()
    latents(pipeline, 3)
    with pipeline.rollout("a") as rollout:
        next(rollout)
    assert pipeline.passes.count("commit") == 1, "the short first chunk of the three"


def test_given_frames_are_committed_by_themselves():
    given = torch.randn(1, 3, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    pipeline, plain = pipeline_of(), pipeline_of(False)
    assert close(latents(pipeline, 8, initial_latents=given), latents(plain, 8, initial_latents=given))
    assert pipeline.passes.count("commit") == 2 and pipeline.passes.count("commit_and_predict_flow") == 5


def test_frames_that_stand_in_the_sample_are_committed_by_themselves():
    """The clean chunk and the noisy one would not be told apart by what is put into either."""
    made, passes = [], []
    for fused in (True, False):
        pipeline = pipeline_of(fused, stamp_image_latent=True, first_len_t=2)
        image = torch.rand(3, 32, 48, generator=torch.Generator().manual_seed(1))
        made.append(latents(pipeline, 6, image=(255 * image).to(torch.uint8).permute(1, 2, 0)))
        passes.append(pipeline.passes)
    assert close(*made)
    assert passes[0].count("commit") >= 1 and passes[0].count("commit_and_predict_flow") >= 3
    assert passes[0].count("commit") + passes[0].count("commit_and_predict_flow") == passes[1].count("commit") == 5


def test_a_rollout_that_is_recorded_commits_each_chunk_by_itself():
    pipeline, plain = pipeline_of(), pipeline_of(False)
    segments = [
        sampled(each, ["a"], plan_for(each, sde=Kernel("flow_sde", eta=0.7)), num_chunk=6, seed=3, control=[CONTROL])
        for each in (pipeline, plain)
    ]
    assert "commit_and_predict_flow" not in pipeline.passes
    assert torch.equal(*(segment.log_probs() for segment in segments))
    assert torch.equal(replay(pipeline, segments[0]).log_probs, segments[0].log_probs())


def test_chunks_can_still_be_finalized_one_by_one():
    pipeline, plain = pipeline_of(), pipeline_of(False)
    made = []
    for each in (pipeline, plain):
        cache = each.initialize_cache(["a"])
        made.append([])
        for i in range(4):
            made[-1].append(each.diffusion_model.generate(i, cache))
            each.finalize(i, cache)
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))
    with pytest.raises(ValueError, match="generate\\(6\\) is out of order: the next chunk is 4"):
        pipeline.diffusion_model.generate(6, cache)
    pipeline.diffusion_model.generate(4, cache)
    for number in (4, 6):
        with pytest.raises(ValueError, match="out of order: chunk 4 waits for finalize"):
            pipeline.diffusion_model.generate(number, cache)


def test_a_pass_that_fails_ends_the_rollout_and_a_failure_before_it_does_not(monkeypatch):
    pipeline, plain = pipeline_of(), pipeline_of(False)
    rollout, same = (each.rollout("a", seed=3, control=CONTROL) for each in (pipeline, plain))
    for each in (rollout, same):
        for _ in range(5):
            next(each)
    with monkeypatch.context() as patch:
        patch.setattr(type(rollout.cache.noise), "initial", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(rollout)
    assert close([next(rollout).latent], [next(same).latent])
    with monkeypatch.context() as patch:
        patch.setattr(WanBlock, "remember", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(rollout)
    for go_on in (lambda: next(rollout), rollout.flush, lambda: rollout.set_prompt("b")):
        with pytest.raises(RuntimeError, match="commit chunk 5 and begin the next one failed and left the context"):
            go_on()


@pytest.mark.parametrize(
    ("model", "transformer", "message"),
    [
        (
            {"high_noise": (ExpertConfig(sigma_low=0.9, transformer=PIPELINE_TEMPLATE.diffusion_model.transformer),)},
            {},
            "several experts",
        ),
        ({}, {"window_size_t": None, "sink_size_t": 0}, "a single chunk, which is not committed"),
        ({}, {"rope": "cache_relative"}, "a sink that moves between a commit and the next step"),
        ({}, {"network": of_template(OtherConfig)}, "OtherAttention has a forward of its own"),
    ],
)
def test_a_model_that_it_does_not_fit_is_refused(model, transformer, message):
    with pytest.raises(ConfigError, match=message):
        pipeline_of(model=model, **transformer)


def test_a_model_that_commits_in_its_own_way_is_refused():
    with pytest.raises(ConfigError, match="LazyTransformer has a commit of its own"):
        LazyTransformer(PIPELINE_TEMPLATE.diffusion_model.transformer).check_fused_commit()


def test_compiled_it_is_one_shape_more_for_each_length_and_none_after_the_window_is_full(monkeypatch):
    monkeypatch.setattr(
        "flashdreams.acceleration.apply.compile_modules", lambda modules: compile_modules(modules, "eager")
    )
    pipeline, plain = (pipeline_of(fused, window_size_t=5) for fused in (True, False))
    for each in (pipeline, plain):
        each.loras.load("style", lora(), weight=0.0)
    apply(pipeline, AccelerationConfig(compile="on", reuse_compiled=False))
    events = {15: BETWEEN["a new prompt"], 20: BETWEEN["a new prompt, recached"], 25: BETWEEN["a LoRA"]}
    graphs: list[int] = []

    def counted(i: int) -> Callable[[Any], None]:
        return lambda rollout: [graphs.append(pipeline.acceleration.graphs), events.get(i, bool)(rollout)][1]

    assert close(latents(pipeline, 40, {i: counted(i) for i in range(40)}), latents(plain, 40, events))
    (region,) = pipeline.acceleration.regions
    assert not region.broken
    assert graphs[:5] == [0, 1, 2, 4, 5] and set(graphs[4:]) == {5}, "2 a length; a short first chunk goes by itself"


@pytest.mark.parametrize("guidance", ["plain", "sequential guidance"])
def test_it_runs_from_cuda_graphs(guidance):
    """A capture repeats the pass, which would read what it has overwritten; it leaves no trace."""
    notices.reset()
    pipeline, plain = (pipeline_of(window_size_t=5, **MODELS[guidance]) for _ in range(2))
    (graphs,) = cuda_graph.apply(pipeline, backend=TapeBackend())
    want = latents(plain, 6)
    assert all(torch.equal(*pair) for pair in zip(latents(pipeline, 6), want, strict=True))
    captures = graphs.captures
    assert all(torch.equal(*pair) for pair in zip(latents(pipeline, 6), want, strict=True))
    assert graphs.captures == captures == (1 if guidance == "plain" else 2) * (LENGTHS + 1 + LENGTHS - 1)
    assert not graphs.refused


def test_prewarming_meets_every_pass_of_a_rollout():
    notices.reset()
    pipeline = pipeline_of(window_size_t=5)
    (graphs,) = cuda_graph.apply(pipeline, backend=TapeBackend())
    prewarm(pipeline, lambda: pipeline.rollout("a", control=CONTROL))
    captures = graphs.captures
    latents(pipeline, 6)
    assert graphs.captures == captures


def test_the_line_of_a_profile_says_which_step_committed():
    pipeline = pipeline_of()
    apply(pipeline, AccelerationConfig(compile="off", profile="lines"))
    said: list[str] = []
    pipeline.acceleration.profiler.write = said.append
    counts, rollout = [], pipeline.rollout("a")
    for _ in range(6):
        next(rollout)
        counts.append(len(said))
    rollout.flush()
    pipeline.acceleration.finish()
    assert counts == [0, 0, 1, 2, 3, 4], "a line comes when the chunk after it has committed it"
    steps = [line.partition("steps ")[2].partition(", decode")[0] for line in said]
    kinds = [[part.partition("+")[0] for part in line.replace(",", "").split() if "+" in part] for line in steps]
    assert kinds == [[], [], *[["commit"]] * 4]
    assert ["commit " in line for line in steps] == [True, False, False, False, False, True]


def test_a_plan_counts_one_pass_less_and_the_same_work():
    fused, plain = (plan_model(pipeline_of(flag, guidance_scale=2.0).config) for flag in (True, False))
    assert set(plain.flops) == {"control", "denoise", "commit", "decode"}
    assert set(fused.flops) == {"control", "denoise", "commit+step", "decode"}
    assert fused.total_flops == pytest.approx(plain.total_flops, rel=1e-3)
    assert fused.transient["commit+step"] > 1.3 * plain.transient["denoise"], "two chunks at once"
