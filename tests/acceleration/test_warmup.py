"""``flashdreams warmup`` and ``--acceleration.prewarm``: every shape is met before the first frame is awaited."""

from __future__ import annotations

import itertools

import pytest

from cli import TEMPLATE
from flashdreams.acceleration import apply as module
from flashdreams.acceleration.compile import compile_modules
from flashdreams.acceleration.prewarm import chunks_until_steady, prewarm
from flashdreams.config import derive_config
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.errors import UserError
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE, RUNNER_TEMPLATE
from flashdreams.scripts.main import dispatch

pytestmark = pytest.mark.ci_cpu


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Compiles without the C++ compiler, and keeps its folders to itself."""
    monkeypatch.setattr(module, "compile_modules", lambda modules, known=(): compile_modules(modules, "eager", known))
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path / "caches"))
    monkeypatch.setenv("FLASHDREAMS_RUNNER_CONFIGS", TEMPLATE)
    monkeypatch.chdir(tmp_path)


def compiled(config=PIPELINE_TEMPLATE):
    pipeline = config.setup()
    module.apply(pipeline, AccelerationConfig(compile="on", reuse_compiled=False))
    return pipeline


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"first_len_t": None, "window_size_t": 6, "sink_size_t": 0},
        {"window_size_t": 8, "sink_size_t": 2, "rope": "cache_relative"},
        {"len_t": 1, "window_size_t": 3, "sink_size_t": 2, "guidance_scale": 3.0},
    ],
)
def test_after_it_no_chunk_compiles_anything(changes):
    pipeline = compiled(derive_config(PIPELINE_TEMPLATE, diffusion_model={"transformer": changes}))
    start = lambda: pipeline.rollout("a red circle")  # noqa: E731
    scheduler = pipeline.diffusion_model.scheduler
    assert prewarm(pipeline, start) == chunks_until_steady(pipeline)
    assert pipeline.diffusion_model.scheduler is scheduler
    graphs = pipeline.acceleration.graphs
    assert graphs > 1
    for _ in itertools.islice(start(), 12):
        assert pipeline.acceleration.graphs == graphs


def test_it_takes_one_step_per_chunk_and_changes_nothing_that_a_rollout_sees(monkeypatch):
    pipeline, plain = compiled(), PIPELINE_TEMPLATE.setup()
    transformer, calls = pipeline.diffusion_model.transformer, []
    predict = type(transformer).predict_flow
    monkeypatch.setattr(type(transformer), "predict_flow", lambda *a, **k: calls.append(1) or predict(*a, **k))
    made = prewarm(pipeline, lambda: pipeline.rollout("a red circle"))
    assert len(calls) == made
    for got, want in zip(*(p.rollout("a red circle", seed=2, num_chunk=3) for p in (pipeline, plain)), strict=True):
        assert (got.latent - want.latent).abs().max() <= 1e-5 * want.latent.abs().max()


def test_a_run_that_is_too_short_to_fill_the_window_compiles_its_own_shapes_alone():
    pipeline = compiled()
    assert prewarm(pipeline, lambda: pipeline.rollout("a red circle", num_chunk=2)) == 2
    assert pipeline.acceleration.graphs == 2


def test_the_scheduler_is_back_after_an_error():
    pipeline = compiled()
    scheduler = pipeline.diffusion_model.scheduler
    with pytest.raises(ValueError, match="multiple"):
        prewarm(pipeline, lambda: pipeline.rollout("a red circle", height=3))
    assert pipeline.diffusion_model.scheduler is scheduler


def test_a_prewarmed_run_compiles_nothing_after_its_first_frame(monkeypatch):
    """And its record says what was done."""
    seen = []
    config = derive_config(
        RUNNER_TEMPLATE, seed=1, num_chunk=6, acceleration={"compile": "on", "prewarm": True, "reuse_compiled": False}
    )
    runner = config.setup()
    generate = type(runner)._generate

    def watched(self, chunks, *rest, **options):
        def each():
            for chunk in chunks:
                seen.append(pipelines[-1].acceleration.graphs)
                yield chunk

        return generate(self, each(), *rest, **options)

    pipelines = []
    load = type(runner)._load
    monkeypatch.setattr(
        type(runner), "_load", lambda self, plan: pipelines.append((made := load(self, plan))[0]) or made
    )
    monkeypatch.setattr(type(runner), "_generate", watched)
    output = runner.run()
    assert len(seen) == 6 and len(set(seen)) == 1
    assert '"compiled: WanBlock"' in output.with_suffix(".json").read_text()


def test_the_command_says_what_it_did_and_where_that_is_kept(capsys):
    assert dispatch(["warmup", "template", "--acceleration.no-reuse-compiled"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("template: 4 shapes of WanBlock compiled in ") and "kept" not in out
    assert dispatch(["warmup", "template", "--compile", "off"]) == 0
    assert "there is nothing to compile" in capsys.readouterr().out


def test_the_command_explains_itself_and_refuses_what_it_cannot_do(capsys):
    assert dispatch(["warmup", "--help"]) == 0
    assert "FLASHDREAMS_CACHE" in capsys.readouterr().out
    assert dispatch(["warmup"]) == 2
    with pytest.raises(UserError, match="there is no flag --hight; did you mean '--height'"):
        dispatch(["warmup", "template", "--hight", "64"])
