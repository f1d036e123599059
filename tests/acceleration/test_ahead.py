"""Compiling while the weights are read: the same code for the same shapes, and nobody notices where it fails."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import small_flashvsr
from flashdreams import load_pipeline
from flashdreams.acceleration import ahead as module
from flashdreams.acceleration import apply as applied
from flashdreams.acceleration.blank import blank_conditions, blank_control, blank_layout
from flashdreams.acceleration.compile import compile_modules
from flashdreams.config import derive_config
from flashdreams.core import notices
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.sources import ZEROS
from flashdreams.infra import loading
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.plugins.registry import get_runner
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from member import shrunk
from mini_wan import RUNNER as MINI

pytestmark = pytest.mark.ci_cpu

ON = AccelerationConfig(compile="on", reuse_compiled=False)
SEED = {"checkpoint_path": "random:3"}
CONFIG = derive_config(
    PIPELINE_TEMPLATE, diffusion_model={"transformer": {**SEED, "network": {"num_layers": 4}}}, text_encoder=SEED,
    encoder=SEED, decoder=SEED,
)  # fmt: skip


class Backend:
    """Compiles nothing, and remembers in which thread it was asked to, and in which it ran."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.ran: list[str] = []
        self.sizes: list[int] = []
        self.asked = threading.Event()

    def __call__(self, graph, inputs):
        self.threads.append(threading.current_thread().name)
        self.sizes.append(torch.get_num_threads())
        self.asked.set()

        def run(*args):
            self.ran.append(threading.current_thread().name)
            return graph.forward(*args)

        return run


@pytest.fixture
def backend(monkeypatch, tmp_path):
    backend = Backend()
    monkeypatch.setattr(applied, "compile_modules", lambda modules, known=(): compile_modules(modules, backend, known))
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path))
    return backend


def loading_waits_for(monkeypatch, event: threading.Event, fails: bool = False) -> list[bool]:
    """Weights are read only once ``event`` has come; the list is told whether it did."""
    came: list[bool] = []
    load = loading.load_checkpoint

    def wait(module, source, **options):
        if source != ZEROS:
            came.append(event.wait(60))
            if fails:
                raise CheckpointError("the file broke off")
        return load(module, source, **options)

    monkeypatch.setattr(loading, "load_checkpoint", wait)
    return came


def latents(pipeline, **options):
    return [chunk.latent for chunk in pipeline.rollout("a red circle", seed=1, num_chunk=6, **options)]


def test_what_is_compiled_before_the_weights_are_there_is_what_the_rollout_runs(backend, monkeypatch):
    plain = load_pipeline(CONFIG, device="cpu")
    came = loading_waits_for(monkeypatch, backend.asked)
    pipeline = load_pipeline(CONFIG, device="cpu", acceleration=ON)
    assert came and all(came)
    assert backend.threads == ["compile-ahead"]
    assert not backend.ran, "what stands in need not be computed"
    assert "compiled while the weights were read" in pipeline.acceleration.notes
    rollout = pipeline.rollout("a red circle", seed=1)
    next(rollout)
    assert pipeline.acceleration.graphs == 1
    for got, want in zip(latents(pipeline), latents(plain), strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    alone = CONFIG.setup()
    applied.apply(alone, ON)
    latents(alone)
    assert pipeline.acceleration.graphs == alone.acceleration.graphs > 1


def test_with_prewarm_all_shapes_are_compiled_by_then(backend):
    pipeline = load_pipeline(CONFIG, device="cpu", acceleration=replace(ON, prewarm=True))
    graphs = pipeline.acceleration.graphs
    latents(pipeline)
    latents(pipeline)
    assert pipeline.acceleration.graphs == graphs > 2
    assert set(backend.threads) == {"compile-ahead"}
    assert "compile-ahead" not in backend.ran and backend.ran


@pytest.mark.parametrize("changes", [{"guidance_scale": 3.0}, {"window_size_t": None, "first_len_t": None}])
def test_guidance_and_models_of_one_chunk_have_their_own_shapes(backend, changes):
    config = derive_config(CONFIG, diffusion_model={"transformer": {**changes, "sink_size_t": 0}})
    pipeline = load_pipeline(config, device="cpu", acceleration=ON)
    next(pipeline.rollout("a red circle", seed=1))
    assert backend.threads == ["compile-ahead"]


def test_keys_and_values_in_eight_bits_are_compiled_as_such(backend):
    pipeline = load_pipeline(CONFIG, device="cpu", acceleration=replace(ON, kv_dtype="int8"))
    next(pipeline.rollout("a red circle", seed=1))
    assert backend.threads == ["compile-ahead"]


def test_the_number_of_threads_is_that_of_the_program(backend):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pipeline = load_pipeline(CONFIG, device="cpu", acceleration=ON)
        next(pipeline.rollout("a red circle", seed=1))
    finally:
        torch.set_num_threads(before)
    assert backend.sizes == [1] and backend.threads == ["compile-ahead"]


def test_the_random_state_of_the_program_is_left_alone(backend):
    torch.manual_seed(11)
    want = torch.randn(3)
    torch.manual_seed(11)
    load_pipeline(CONFIG, device="cpu", acceleration=ON)
    assert torch.equal(torch.randn(3), want)


def test_a_stand_in_that_fails_is_said_and_changes_nothing(backend, monkeypatch):
    notices.reset()
    want = latents(load_pipeline(CONFIG, device="cpu"))
    said = []
    monkeypatch.setattr(module, "say_once", said.append)
    monkeypatch.setattr(module, "prewarm", lambda *_: 1 / 0)
    pipeline = load_pipeline(CONFIG, device="cpu", acceleration=ON)
    assert len(said) == 1 and "ZeroDivisionError" in said[0]
    for got, expected in zip(latents(pipeline), want, strict=True):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert "compile-ahead" not in backend.threads and backend.threads


def test_an_error_of_the_weights_is_the_one_that_is_raised_and_ends_the_compiling(backend, monkeypatch):
    loading_waits_for(monkeypatch, backend.asked, fails=True)
    with pytest.raises(CheckpointError, match="broke off"):
        load_pipeline(CONFIG, device="cpu", acceleration=replace(ON, prewarm=True))
    for thread in threading.enumerate():
        if thread.name == "compile-ahead":
            thread.join(60)
            assert not thread.is_alive()
    assert not backend.ran and len(backend.threads) < 4, "more was compiled, or run, for nobody"


def test_a_model_that_cannot_be_built_says_so_itself(backend, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "_stand_in", broken)
    assert latents(load_pipeline(CONFIG, device="cpu", acceleration=ON))


@pytest.mark.parametrize(
    ("config", "acceleration"),
    [
        (CONFIG, AccelerationConfig(compile="off")),
        (CONFIG, replace(ON, quantize="int8")),
        (CONFIG, replace(ON, offload="blocks")),
        (PIPELINE_TEMPLATE, ON),
        (derive_config(CONFIG, text_encoder={"checkpoint_path": None}), ON),
        (derive_config(CONFIG, diffusion_model={"swap_experts": True}), ON),
    ],
    ids=["not compiled", "quantized", "offloaded", "drawn", "text encoder drawn", "swapped"],
)
def test_it_is_not_begun_where_modules_or_weights_come_otherwise(config, acceleration):
    assert module.begin(config, acceleration, "cpu") is None


def test_controls_without_weights_do_not_keep_it_from_beginning(backend):
    config = derive_config(CONFIG, encoder={"checkpoint_path": None})
    begun = module.begin(config, ON, "cpu")
    assert begun is not None
    begun.wait()
    assert backend.threads == ["compile-ahead"]


def test_a_block_that_cannot_be_compiled_is_said_once_and_runs_as_it_is(monkeypatch, tmp_path):
    notices.reset()
    asked = []

    def refuses(graph, inputs):
        asked.append(threading.current_thread().name)
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(applied, "compile_modules", lambda modules, known=(): compile_modules(modules, refuses, known))
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path))
    pipeline = load_pipeline(CONFIG, device="cpu", acceleration=ON)
    for got, want in zip(latents(pipeline), latents(load_pipeline(CONFIG, device="cpu")), strict=True):
        assert torch.equal(got, want)
    assert asked == ["compile-ahead"]


def test_a_network_of_which_the_layers_cannot_be_fewer_has_all_of_them():
    network = derive_config(CONFIG).diffusion_model.transformer.network
    assert len(module._stand_in(CONFIG, "cpu").diffusion_model.transformer.blocks) == module.LAYERS
    assert network.num_layers == 4
    config = derive_config(CONFIG, diffusion_model={"transformer": {"network": {"num_layers": 1}}})
    assert len(module._stand_in(config, "cpu").diffusion_model.transformer.blocks) == 1


def test_weights_of_a_stand_in_share_their_memory():
    model = module._stand_in(CONFIG, "cpu").diffusion_model.transformer
    queries = [block.self_attn.q.weight for block in model.blocks]
    assert queries[0].data_ptr() == queries[1].data_ptr() == model.blocks[0].cross_attn.o.weight.data_ptr()
    assert queries[0] is not queries[1]
    assert not any(parameter.any() for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_rollouts_in_another_thread_than_the_load_have_as_many_shapes_as_they_need(backend):
    """The compiler's limits hold for the thread that sets them; its own is eight shapes."""
    transformer = {"window_size_t": 12, "sink_size_t": 0, "len_t": 1}
    pipeline = derive_config(MINI.pipeline, diffusion_model={"transformer": transformer}).setup()
    applied.apply(pipeline, ON)
    text = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))

    def roll() -> None:
        for _ in pipeline.rollout("", conditions={"text": text}, height=32, width=32, num_chunk=14):
            pass

    thread = threading.Thread(target=roll)
    thread.start()
    thread.join()
    assert pipeline.acceleration.graphs == 12
    assert not any(region.broken for region in pipeline.acceleration.regions)


def seeded(config):
    """``config`` with drawn weights for every part, and without a text encoder and swapping."""
    parts = {name: SEED for name in ("decoder", "encoder", "image_encoder") if getattr(config, name) is not None}
    high = {index: {"transformer": SEED} for index in range(len(config.diffusion_model.high_noise))}
    model = {"transformer": SEED, "swap_experts": False, **({"high_noise": high} if high else {})}
    if isinstance(config.decoder, WanVAEConfig):
        parts["decoder"] = SEED | {"dim": 8}
    return derive_config(config, **parts, text_encoder=None, diffusion_model=model)


@pytest.mark.parametrize(
    "slug", ["lingbot-world-cam", "wan22-t2v-a14b", "wan21-i2v-14b-480p", "self-forcing-t2v-1.3b-taehv", "flashvsr"]
)
def test_cameras_two_experts_pictures_and_videos_are_compiled_for_as_they_will_be(backend, slug):
    config = seeded(small_flashvsr.RUNNER.pipeline if slug == "flashvsr" else shrunk(get_runner(slug)).pipeline)
    pipeline = load_pipeline(config, device="cpu", acceleration=replace(ON, compile_decoder="on"))
    layout = blank_layout(pipeline, config.height, config.width)
    control = blank_control(config, layout)
    rollout = pipeline.rollout(
        conditions=blank_conditions(config, layout, "cpu"),
        control=None if control is None else lambda start, stop: [[control] * (stop - start)],
    )
    next(rollout)
    rollout.flush()
    assert backend.threads and set(backend.threads) == {"compile-ahead"}
