"""Regional compilation: one compilation for each shape, none after the window is full, and the same numbers."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn

from flashdreams.acceleration.apply import apply, compile_and_keep, wanted
from flashdreams.acceleration.channels_last import channels_last
from flashdreams.acceleration.compile import Region, compile_modules
from flashdreams.core import notices
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from template_model import lora, template_pipeline

pytestmark = pytest.mark.ci_cpu

OFF = AccelerationConfig(compile="off", compile_decoder="off")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale


class Other(Small):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale=scale) + 1


class Breaks(Small):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, scale=scale)


def rollout(pipeline, graphs=None) -> list[torch.Tensor]:
    """40 chunks over a window of four, another prompt from chunk 10 on, its context anew at 15, a LoRA from 20 to 30;
    ``graphs`` is told how many compilations there were after each chunk."""
    latents = []
    with pipeline.rollout("a red circle", seed=3, num_chunk=40) as chunks:
        for index in range(40):
            if index == 10:
                chunks.set_prompt("a blue square", policy="keep")
            if index == 15:
                chunks.set_prompt("a green square", policy="recache")
            if index in (20, 30):
                chunks.set_loras({"a": 1.0} if index == 20 else {})
            latents.append(next(chunks).latent)
            if graphs is not None:
                graphs.append(pipeline.acceleration.graphs)
    return latents


def test_forty_chunks_compile_as_many_shapes_as_the_window_takes_to_fill_and_then_nothing(monkeypatch):
    """Eviction, a prompt switch with and without a new context, and a LoRA swap included; the numbers are the same."""
    monkeypatch.setattr(
        "flashdreams.acceleration.apply.compile_modules", lambda modules: compile_modules(modules, "aot_eager")
    )
    torch._dynamo.utils.counters.clear()
    plain, compiled = template_pipeline(), template_pipeline()
    apply(plain, OFF)
    apply(compiled, AccelerationConfig(compile="on", reuse_compiled=False))
    for pipeline in (plain, compiled):
        pipeline.loras.load("a", lora(1), weight=0)
    graphs: list[int] = []
    found, want = rollout(compiled, graphs), rollout(plain)
    window = compiled.config.diffusion_model.transformer.window_size_t
    assert window == 7  # of chunks of two frames, after a first one of one: full at the fourth
    assert graphs[:4] == [1, 2, 3, 4] and set(graphs[4:]) == {4}
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    for got, expected in zip(found, want, strict=True):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not torch.allclose(want[20], rollout_without_lora(plain)[20], atol=1e-3), "the LoRA changes nothing"


def rollout_without_lora(pipeline) -> list[torch.Tensor]:
    pipeline.loras.unload("a")
    pipeline.loras.load("a", {name: 0 * value for name, value in lora(1).items()}, weight=0)
    return rollout(pipeline)


def test_modules_of_a_kind_share_what_is_compiled_and_kinds_do_not():
    modules = [Small(), Small(), Other(), Small(), Other()]
    want = [module(torch.ones(2, 4)) for module in modules]
    regions = compile_modules(modules, backend="eager")
    assert [torch.equal(module(torch.ones(2, 4)), value) for module, value in zip(modules, want)] == [True] * 5
    assert [(region.kind, region.graphs) for region in regions] == [(Small, 1), (Other, 1)]


def test_a_module_keeps_its_names_and_kind_and_is_freed_as_soon_as_nobody_has_it():
    module = Small()
    names = list(module.state_dict())
    region = Region(Small, "eager")
    region.take(module)
    module(torch.ones(2, 4))
    assert list(module.state_dict()) == names and isinstance(module, Small) and type(module).__name__ == "Small"
    gone = weakref.ref(module)
    del module
    assert gone() is None


def test_one_pipeline_s_shapes_are_counted_apart_from_another_s():
    first, second = Region(Small, "eager"), Region(Small, "eager")
    for region, rows in ((first, (2, 3)), (second, (2,))):
        module = Small()
        region.take(module)
        for count in rows:
            module(torch.ones(count, 4))
    assert (first.graphs, second.graphs) == (2, 1)


def test_more_shapes_than_pytorch_allows_by_itself_are_compiled():
    module, region = Small(), Region(Small, "eager")
    region.take(module)
    for rows in range(2, 22):
        module(torch.ones(rows, 4))
    assert region.graphs == 20 and not region.broken


def test_a_transposed_input_is_no_shape_of_its_own():
    """What comes out of a patch embedding is a transposed view; what comes out of a block is not."""
    module, region = Small(), Region(Small, "eager")
    region.take(module)
    square = torch.randn(4, 4)
    assert torch.equal(module(square.t()), module(square.t().contiguous()))
    assert region.graphs == 1


def test_what_cannot_be_compiled_runs_as_it_is_and_that_is_said_once(capsys):
    notices.reset()
    modules = [Breaks(), Breaks()]
    want = [module(torch.ones(2, 4), scale=3.0) for module in modules]
    (region,) = compile_modules(modules, backend="eager")
    for _ in range(2):
        assert [torch.equal(m(torch.ones(2, 4), scale=3.0), w) for m, w in zip(modules, want)] == [True, True]
    said = capsys.readouterr().err.splitlines()
    assert (
        region.broken and len(said) == 1 and said[0].startswith("Breaks cannot be compiled here and runs uncompiled:")
    )


def test_an_error_of_the_module_is_the_module_s(capsys):
    """A wrong input fails as it would uncompiled, with the module's own words."""
    module, region = Small(), Region(Small, "eager")
    region.take(module)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        module(torch.ones(2, 5))


def test_auto_compiles_on_a_gpu_and_on_nothing_else():
    device = torch.device
    assert wanted("auto", device("cuda")) and not wanted("auto", device("cpu")) and not wanted("auto", device("mps"))
    assert wanted("on", device("cpu")) and not wanted("off", device("cuda"))
    pipeline = template_pipeline()
    assert apply(pipeline, AccelerationConfig()) == []
    with pytest.raises(ValueError, match="accelerated already"):
        apply(pipeline, AccelerationConfig())


def test_a_decoder_that_says_so_is_compiled_for_the_four_shapes_of_its_stream():
    """Its states begin empty and are full at the fourth latent."""
    vae = WanVAEConfig(dim=8, num_res_blocks=1).setup()
    latents = torch.randn(1, 16, 6, 4, 6, generator=torch.Generator().manual_seed(0)).split(1, dim=2)
    cache = vae.initialize_cache()
    want = [vae.decode(latent, cache) for latent in latents]
    (region,) = compile_modules(vae.compiled_parts, backend="eager")
    for graphs in ([1, 2, 3, 4, 4, 4], [4] * 6):
        cache = vae.initialize_cache()
        for latent, expected, count in zip(latents, want, graphs, strict=True):
            torch.testing.assert_close(vae.decode(latent, cache), expected, rtol=1e-5, atol=1e-5)
            assert region.graphs == count and not region.broken


def test_channels_last_lays_out_every_convolution_and_changes_no_number():
    vae, other = (WanVAEConfig(dim=8, num_res_blocks=1).setup() for _ in range(2))
    keys = other.state_dict().keys()
    weights = [layer.weight for layer in other.modules() if isinstance(layer, (nn.Conv2d, nn.Conv3d))]
    assert channels_last(other) == len(weights) > 20 and other.state_dict().keys() == keys
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    assert all(weight.is_contiguous(memory_format=formats[weight.ndim]) for weight in weights)
    latents = torch.randn(1, 16, 5, 4, 6, generator=torch.Generator().manual_seed(0)).split(1, dim=2)
    caches = vae.initialize_cache(), other.initialize_cache()
    for latent in latents:
        want, got = vae.decode(latent, caches[0]), other.decode(latent, caches[1])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (region,) = compile_modules(other.compiled_parts, backend="eager")
    cache = other.initialize_cache()
    for latent in latents * 2:
        other.decode(latent, cache)
    assert region.graphs == 4 and not region.broken


def test_channels_last_is_asked_for_and_said():
    pipeline = template_pipeline()
    notes = apply(pipeline, AccelerationConfig(channels_last=True))
    assert notes == ["channels last: 0 convolutions"]


def test_what_runs_dry_has_the_layout_of_what_it_stands_for_and_writes_nothing():
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept.copy_(x)
            return (x + 1).transpose(0, 1), (x * 2).to(torch.bfloat16)

    module, x, kept = Writes(), torch.ones(2, 3), torch.zeros(2, 3)
    (region,) = compile_modules([module], backend="eager")
    region.dry = True
    dry = module(x, kept)
    assert not kept.any()
    region.dry = False
    wet = module(x, kept)
    assert torch.equal(kept, x) and region.graphs == 1
    assert torch.equal(wet[0], torch.full((3, 2), 2.0))
    for got, want in zip(dry, wet, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_processor_is_probed_beside_what_comes_next_for_code_that_runs_on_it(monkeypatch, device):
    from torch._inductor import cpu_vec_isa

    begun, answer, threads = threading.Event(), threading.Event(), []

    def slow_probe():
        threads.append(threading.current_thread())
        begun.set()
        answer.wait(60)

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", slow_probe)
    regions, _ = compile_and_keep([Small().to(device)], None)  # waits for no answer
    assert len(regions) == 1 and begun.wait(60 if device == "cpu" else 1) == (device == "cpu")
    answer.set()
    for thread in threads:
        assert thread is not threading.current_thread()
        thread.join(60)


def test_a_probe_that_fails_is_left_to_the_compiler_to_say(monkeypatch):
    from torch._inductor import cpu_vec_isa

    asked, loud = threading.Event(), []

    def no_compiler():
        asked.set()
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", no_compiler)
    monkeypatch.setattr(threading, "excepthook", loud.append)
    before = set(threading.enumerate())
    compile_and_keep([Small()], None)
    assert asked.wait(60)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert not loud
