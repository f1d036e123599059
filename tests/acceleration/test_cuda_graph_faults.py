"""What would go wrong, and how it is noticed. The tape replays what was recorded and nothing else, so that a forgotten
input is stale in it as it would be on a GPU; and passes that no graph can hold are found before one is captured."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdreams.acceleration import cuda_graph
from flashdreams.acceleration.graph_audit import Audit
from flashdreams.acceleration.slots import Node
from flashdreams.core import notices
from flashdreams.recipes.template.modules import TemplateNetwork
from tape_graphs import TapeBackend
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


@pytest.fixture(autouse=True)
def _fresh_notices():
    notices.reset()


def latents(pipeline: Any, switch: int | None = None, chunks: int = 8) -> Tensor:
    rollout, made = pipeline.rollout("a", seed=3, num_chunk=chunks, control=[0.1 * (i % 9) for i in range(80)]), []
    for i in range(chunks):
        if i == switch:
            rollout.set_prompt("b")
        made.append(next(rollout).latent)
    return torch.cat(made, dim=2)


def graphed(network: type[TemplateNetwork] = TemplateNetwork) -> tuple[Any, cuda_graph.Graphs]:
    pipeline = template_pipeline()
    pipeline.diffusion_model.transformer.network.__class__ = network
    return pipeline, cuda_graph.apply(pipeline, backend=TapeBackend())[0]


class Fill:
    """Fills the inputs of graphs, except one after its first time; notes which of them ever change."""

    def __init__(self, forgotten: int | None = None) -> None:
        self.forgotten = forgotten
        self.filled: set[int] = set()
        self.changing: set[int] = set()

    @torch.no_grad()
    def __call__(self, inputs: list[Tensor], tensors: list[Tensor]) -> None:
        for place, (mine, given) in enumerate(zip(inputs, tensors, strict=True)):
            if mine.data_ptr() in self.filled and not torch.equal(mine, given):
                self.changing.add(place)
            if place != self.forgotten or mine.data_ptr() not in self.filled:
                mine.copy_(given)
            self.filled.add(mine.data_ptr())


def test_every_input_that_changes_is_missed_if_it_is_not_copied_in(monkeypatch):
    want = latents(template_pipeline(), chunks=4)
    fill = Fill()
    monkeypatch.setattr(cuda_graph, "_fill", fill)
    assert torch.equal(latents(graphed()[0], chunks=4), want)
    assert len(fill.changing) >= 7, "latent, tables of time, cos, sin, places in the window, brightness"
    unnoticed = set()
    for place in fill.changing:
        monkeypatch.setattr(cuda_graph, "_fill", Fill(place))
        if torch.equal(latents(graphed()[0], chunks=4), want):
            unnoticed.add(place)
    assert unnoticed == {1}, "the embedding of time, which only conditioners read, and this one does not"


def test_text_that_is_not_copied_in_is_missed(monkeypatch):
    want = latents(template_pipeline(), switch=6)
    assert torch.equal(latents(graphed()[0], switch=6), want)
    refresh = Node.refresh
    monkeypatch.setattr(Node, "refresh", lambda node: refresh(node) if node._places is None else False)
    stale = latents(graphed()[0], switch=6)
    assert torch.equal(stale[:, :, :11], want[:, :, :11]) and not torch.equal(stale, want)


class RemembersATensor(TemplateNetwork):
    """Adds what it kept from outside of the pass."""

    def condition(self, x: Tensor, time: Any, input: Tensor | None) -> tuple[Tensor, Any]:
        return super().condition(x + self.kept, time, input)

    def prepare(self, input: Any) -> Any:
        self.kept = input.mean().reshape(1, 1, 1)
        return input


class ReadsTheClock(TemplateNetwork):
    """Computes with the number of the chunk's first frame."""

    def pass_input(self, latent: Tensor, context: Any, cache: Any, input: Tensor) -> Tensor:
        return input * (context.start + 1)


class CountsUpOnTheDevice(TemplateNetwork):
    """The same, where PyTorch is what reads it."""

    def pass_input(self, latent: Tensor, context: Any, cache: Any, input: Tensor) -> Tensor:
        return input * torch.full((1,), context.start)


class AsksTheDevice(TemplateNetwork):
    """Decides by a value that the device has."""

    def condition(self, x: Tensor, time: Any, input: Tensor | None) -> tuple[Tensor, Any]:
        return super().condition(x * (2 if x.mean() > 0 else 1), time, input)


class MakesATensor(TemplateNetwork):
    """Brings numbers of the host to the device in every pass."""

    def condition(self, x: Tensor, time: Any, input: Tensor | None) -> tuple[Tensor, Any]:
        return super().condition(x * torch.tensor(1.5), time, input)


class ChangesItsInput(TemplateNetwork):
    """Works in place on what it is given."""

    def condition(self, x: Tensor, time: Any, input: Tensor | None) -> tuple[Tensor, Any]:
        assert input is not None
        return super().condition(x, time, input.mul_(0.5))


class CountsItsElements(TemplateNetwork):
    """Has a size that depends on values."""

    def condition(self, x: Tensor, time: Any, input: Tensor | None) -> tuple[Tensor, Any]:
        return super().condition(x + x[x > 0].numel(), time, input)


REFUSED = {
    RemembersATensor: r"aten.add.Tensor reads a torch.float32 tensor of shape \[1, 1, 1\] that is no argument",
    ReadsTheClock: "it reads 'start', which counts up with the rollout",
    CountsUpOnTheDevice: "HostOnly",
    AsksTheDevice: "aten._local_scalar_dense.default waits for the device's results",
    MakesATensor: "it makes a tensor from numbers of the host in every pass",
    ChangesItsInput: "aten.mul_.Tensor writes into one of its inputs",
    CountsItsElements: "aten.index.Tensor waits for the device's results",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_pass_that_no_graph_can_hold_runs_eagerly_and_that_is_said_once(kind, capsys):
    plain = template_pipeline()
    plain.diffusion_model.transformer.network.__class__ = kind
    pipeline, graphs = graphed(kind)
    assert torch.equal(latents(pipeline), latents(plain))
    assert not graphs.captures and set(graphs.refused) == {"forward", "remember"}
    said = capsys.readouterr().err
    assert said.count(f"{kind.__name__}.forward runs without CUDA graphs: ") == 1
    assert all(re.search(REFUSED[kind], reason) for reason in graphs.refused.values())


def test_without_the_rehearsal_a_remembered_tensor_would_be_stale(monkeypatch):
    plain = template_pipeline()
    plain.diffusion_model.transformer.network.__class__ = RemembersATensor
    monkeypatch.setattr(Audit, "_check", lambda *_: None)
    pipeline, graphs = graphed(RemembersATensor)
    assert not torch.equal(latents(pipeline), latents(plain)) and graphs.captures


def test_state_that_is_another_in_every_chunk_does_not_capture_for_ever(monkeypatch, capsys):
    monkeypatch.setattr(cuda_graph, "MAX_CAPTURES", 6)
    pipeline, graphs = graphed()
    rollout = pipeline.rollout("a", seed=3, num_chunk=8, control=[0.1 * (i % 9) for i in range(80)])
    made = []
    for i in range(8):
        rollout.flush()
        for block in rollout.cache.experts[0].branches[0].blocks:
            block.state = i
        made.append(next(rollout).latent)
    assert torch.equal(torch.cat(made, dim=2), latents(template_pipeline()))
    assert graphs.captures <= 6 and "6 graphs are captured for one rollout and none fits" in capsys.readouterr().err


def test_a_capture_that_fails_leaves_the_pass_as_it_is(monkeypatch, capsys):
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory\nand so on")

    monkeypatch.setattr(TapeBackend, "capture", fail)
    pipeline, graphs = graphed()
    assert torch.equal(latents(pipeline), latents(template_pipeline())) and not graphs.captures
    assert "TemplateNetwork.forward runs without CUDA graphs: CUDA out of memory\n" in capsys.readouterr().err


def test_an_error_of_the_pass_itself_is_not_hidden():
    pipeline, _ = graphed()
    rollout = pipeline.rollout("a")
    with pytest.raises(RuntimeError, match="expand|size|shape"):
        pipeline.diffusion_model.generate(0, rollout.cache, torch.zeros(1, 7))
