"""Biases of linear layers, in compiled code for CPUs.

PyTorch copies a bias over the whole output before the product adds to it there. Added after the product it costs
nothing: the compiler adds it where it reads the output next. (For GPUs the compiler decides this by itself.)
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional as F


def add_biases_after(graph: fx.GraphModule) -> int:
    """Take the biases out of the linear layers of a traced ``graph`` on a CPU; returns of how many.

    Sums are rounded in another order: within 1e-6 in float32, and within what compiled code rounds anyway in bfloat16.
    """
    count = 0
    for node in graph.graph.find_nodes(op="call_function", target=F.linear):
        input, weight, bias = _arguments(*node.args, **node.kwargs)
        made = node.meta.get("example_value")
        if bias is None or not isinstance(made, Tensor) or made.device.type != "cpu":
            continue
        with graph.graph.inserting_after(node):
            added = graph.graph.call_function(torch.add, (node, bias))
        added.meta = dict(node.meta)
        node.replace_all_uses_with(added)
        added.args, node.args, node.kwargs = (node, bias), (input, weight), {}
        count += 1
    if count:
        graph.recompile()
    return count


def _arguments(input: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    return input, weight, bias
