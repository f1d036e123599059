"""Biases that compiled code adds after the product."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flashdreams.acceleration.compile import compile_modules

pytestmark = pytest.mark.ci_cpu


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.second(torch.tanh(self.first(x))), self.third.weight, bias=self.third.bias)


def bias_of(node):
    return dict(zip(("input", "weight", "bias"), node.args), **node.kwargs).get("bias")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_products_of_a_compiled_module_take_no_bias(backend):
    module, x = Layers(), torch.randn(3, 8)
    with torch.no_grad():
        want, seen = module(x), []

        def look(graph, inputs):
            seen.extend(graph.graph.find_nodes(op="call_function", target=F.linear))
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        (region,) = compile_modules([module], backend=look)
        torch.testing.assert_close(module(x), want, rtol=1e-6, atol=1e-6)
    assert not region.broken
    assert [bias_of(node) for node in seen] == [None] * 3


def test_other_devices_keep_theirs():
    module, seen = Layers().to("meta"), []

    def look(graph, inputs):
        seen.extend(graph.graph.find_nodes(op="call_function", target=F.linear))
        return graph.forward

    compile_modules([module], backend=look)
    with torch.no_grad():
        module(torch.empty(3, 8, device="meta"))
    assert [bias_of(node) is None for node in seen] == [False, True, False]
