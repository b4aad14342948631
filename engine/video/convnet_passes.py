# SPDX-License-Identifier: Apache-2.0
"""Passes over a Net: what can be done in the weights or in the kernel that computes a value anyway.

Each turns a Net into a Net that computes the same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.graph import Node
from engine.video.convnet_graph import Net, changed


def optimised(net: Net) -> Net:
    """The network after all passes."""
    for step in PASSES:
        net = step(net)
    return net.check()


def fold_affine(net: Net) -> Net:
    """A scale and a shift behind a convolution (a folded batch norm) go into its weights."""
    producers, users = net.producers(), net.users()
    arrays, nodes, gone = dict(net.arrays), [], {}
    for node in net.nodes:
        conv = producers.get(node.inputs[0])
        fits = node.op == "affine" and conv is not None and conv.op == "conv"
        if not fits or conv is None or not net.single(users, conv.output):
            nodes.append(node)
            continue
        scale, shift = net.array(node, 0), net.array(node, 1)
        w, bias, _ = conv.weights
        arrays[w] = arrays[w] * scale[:, None, None, None]
        arrays[bias] = arrays[bias] * scale + shift
        gone[conv.output] = node.output
    nodes = [replace(n, output=gone.get(n.output, n.output)) for n in nodes]
    return changed(net, "fold_affine", f"{len(gone)} into convolutions", nodes, arrays=arrays)


def find_silu(net: Net) -> Net:
    """x * sigmoid(x) is one activation."""
    producers, nodes, found = net.producers(), [], 0
    for node in net.nodes:
        made = node
        if node.op == "product":
            for x, gate in (node.inputs, node.inputs[::-1]):
                act = producers.get(gate)
                sigmoid = act is not None and act.attrs.get("act") == "sigmoid"
                if act is not None and sigmoid and act.op == "act" and act.inputs == (x,):
                    made = Node(node.name, "act", (x,), node.output, (), {"act": "silu"})
        found += made is not node
        nodes.append(made)
    return changed(net, "find_silu", f"{found} products with a sigmoid", nodes)


def find_gates(net: Net) -> Net:
    """(a + b) * (sigmoid(a) - 1/2), the gate of SPAN's blocks: a convolution's activation."""
    producers, users = net.producers(), net.users()
    convs: dict[str, Node] = {}
    drop: set[str] = set()
    for node in net.nodes:
        if node.op != "product":
            continue
        for total, gate in (node.inputs, node.inputs[::-1]):
            added, shifted = producers.get(total), producers.get(gate)
            if added is None or shifted is None or added.op != "sum" or shifted.op != "affine":
                continue
            act = producers.get(shifted.inputs[0])
            if act is None or act.op != "act" or act.attrs["act"] != "sigmoid":
                continue
            a = act.inputs[0]
            conv = producers.get(a)
            inner = (added.output, shifted.output, act.output)
            if (
                conv is None
                or conv.op != "conv"
                or conv.attrs["residual"]
                or a not in added.inputs
                or added.inputs[0] == added.inputs[1]
                or (added.attrs["alpha"], added.attrs["beta"]) != (1.0, 1.0)
                or not np.all(net.array(shifted, 0) == 1)
                or not np.all(net.array(shifted, 1) == -0.5)
                or not np.all(net.array(conv, 2) == 1)
                or {n.output for n in users[a]} != {added.output, act.output}
                or not all(net.single(users, v) for v in inner)
                or a == net.output
            ):
                continue
            other = added.inputs[1] if added.inputs[0] == a else added.inputs[0]
            convs[node.output] = replace(
                conv,
                inputs=(conv.inputs[0], other),
                output=node.output,
                attrs={**conv.attrs, "act": "gate", "residual": True},
            )
            drop.update((conv.output, *inner))
            break
    nodes = [convs.get(n.output, n) for n in net.nodes if n.output not in drop]
    return changed(net, "find_gates", f"{len(convs)} gates", nodes)


def fuse_acts(net: Net) -> Net:
    """An activation behind a convolution is done by it."""
    producers, users = net.producers(), net.users()
    taken: dict[str, Node] = {}
    drop = set()
    arrays = dict(net.arrays)
    for node in net.nodes:
        conv = producers.get(node.inputs[0])
        if node.op != "act" or conv is None or conv.op != "conv" or conv.attrs["residual"]:
            continue
        if not net.single(users, conv.output) or not np.all(net.array(conv, 2) == 1):
            continue
        if node.attrs["act"] == "slope":
            arrays[conv.weights[2]] = net.array(node, 0)
        attrs = {**conv.attrs, "act": node.attrs["act"]}
        taken[node.output] = replace(conv, output=node.output, attrs=attrs)
        drop.add(conv.output)
    nodes = [taken.get(n.output, n) for n in net.nodes if n.output not in drop]
    return changed(net, "fuse_acts", f"{len(taken)} into convolutions", nodes, arrays=arrays)


def fuse_sums(net: Net) -> Net:
    """A sum with the result of a convolution or of a resizing is done by it: the other value is its
    residual. A factor of the convolution goes into its weights.
    """
    users = net.users()
    arrays, nodes, found = dict(net.arrays), list(net.nodes), 0
    for node in net.nodes:
        if node.op != "sum":
            continue
        at = {n.output: k for k, n in enumerate(nodes)}
        for mine, other in ((0, 1), (1, 0)):
            k = at.get(node.inputs[mine])
            factors = (float(node.attrs["alpha"]), float(node.attrs["beta"]))
            if k is None or factors[other] != 1 or node.inputs[0] == node.inputs[1]:
                continue
            made, residual = nodes[k], node.inputs[other]
            if made.op not in ("conv", "resize") or not net.single(users, made.output):
                continue
            if len(made.inputs) > 1 or (made.op == "resize" and factors[mine] != 1):
                continue
            if factors[mine] != 1:
                if made.attrs["act"] != "slope" or factors[mine] < 0:
                    continue
                for name in made.weights[:2]:
                    arrays[name] = arrays[name] * np.float32(factors[mine])
            attrs = {**made.attrs, "residual": True}
            fused = replace(
                made, inputs=(made.inputs[0], residual), output=node.output, attrs=attrs
            )
            # In the place of the sum: the residual is there by then.
            nodes[at[node.output]] = fused
            del nodes[k]
            found += 1
            break
    return changed(net, "fuse_sums", f"{found} residuals", nodes, arrays=arrays)


PASSES: tuple[Callable[[Net], Net], ...] = (
    fold_affine,
    find_silu,
    find_gates,
    fuse_acts,
    fuse_sums,
)
