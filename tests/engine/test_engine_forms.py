# SPDX-License-Identifier: Apache-2.0
"""A compiled model from a stranger: whatever is wrong with a node is one clear error, and what is
taken can be lowered.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from engine.backends.base import DeviceInfo, Limits
from engine.errors import BadModel, PvrError
from engine.forms import FORMS
from engine.graph import Graph
from engine.lower import lower
from engine.lower_batch import NoBatch, lower_batch
from engine.text.compiled import prepared
from engine.widths import check
from tests.engine.family_models import CASES, write_folder, write_tokenizer_json

DEVICES = [DeviceInfo(kind, "one", "none", False, Limits()) for kind in ("gpu", "cpu")]
# None of them is right for anything that is a size, a flag or a name.
WRONG: tuple[Any, ...] = (
    None, "", "x", -1, 1 << 40, 10**400, float("nan"), float("inf"), -0.5, [], {}, [1], 1e300,
)  # fmt: skip
SIZES = (0, 1, 2, 4, 32, 64, 320, 1 << 12, (1 << 24) - 1)
FAMILIES = ["gemma2", "phi3 long", "qwen2_moe"]  # caps, two tables, experts


@pytest.fixture(scope="module", params=FAMILIES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("forms") / "m"
    path = write_tokenizer_json(write_folder(folder, CASES[request.param]))
    return graph_of(path)


def graph_of(path: Path) -> Any:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with prepared(fd) as (metadata, _):
            return metadata["graph"]
    finally:
        os.close(fd)


def copied(data: Any) -> Any:
    """With nodes that may be changed."""
    nodes = [[*node[:2], list(node[2]), node[3], list(node[4]), dict(node[5])]
             for node in data["nodes"]]  # fmt: skip
    return {**data, "nodes": nodes}


def taken(data: Any) -> bool:
    """Whether a graph is taken; then every device can be told what to do."""
    try:
        graph = Graph.from_json(data)
        check(graph)
    except BadModel:
        return False
    for device in DEVICES:
        with contextlib.suppress(PvrError, NoBatch):
            lower(graph, device, 16, 4).check()
            lower_batch(graph, device, [16, 8])
    return True


def test_the_graph_itself(compiled: Any) -> None:
    assert taken(compiled)


def test_attributes(compiled: Any) -> None:
    """Of each operation's first node: each one missing, and with every kind of nonsense."""
    seen: set[str] = set()
    for i, node in enumerate(compiled["nodes"]):
        if node[1] in seen:
            continue
        seen.add(node[1])
        for key in node[5]:
            data = copied(compiled)
            attrs = data["nodes"][i][5]
            del attrs[key]
            assert not taken(data) or not FORMS[node[1]].attrs[key].needed, (node, key)
            for value in WRONG:
                attrs[key] = value
                assert not taken(data), (node, key, value)
            for value in SIZES:
                attrs[key] = value
                taken(data)
        data = copied(compiled)
        data["nodes"][i][5]["more"] = 1
        assert not taken(data)


def test_inputs_and_weights(compiled: Any) -> None:
    """Of each operation's first node: too few, too many, others."""
    seen: set[str] = set()
    for i, node in enumerate(compiled["nodes"]):
        if node[1] in seen:
            continue
        seen.add(node[1])
        for place, others in ((2, [n[3] for n in compiled["nodes"][:i]]), (4, [
            w[0] for w in compiled["weights"]])):  # fmt: skip
            for values in ([], node[place][:-1], node[place] * 2, [*node[place], *others[-1:]]):
                data = copied(compiled)
                data["nodes"][i][place] = values
                taken(data)
            for other in others[-12:]:
                data = copied(compiled)
                data["nodes"][i][place] = [other, *node[place][1:]]
                taken(data)


def test_operations(compiled: Any) -> None:
    """A node that says it is another, or that is not where it was."""
    for i in range(len(compiled["nodes"])):
        for op in FORMS:
            data = copied(compiled)
            data["nodes"][i][1] = op
            taken(data)
        data = copied(compiled)
        moved = data["nodes"].pop(i)
        taken(data)
        data["nodes"].append(moved)
        taken(data)


def test_marks(compiled: Any) -> None:
    """What lies inside of its readers has to be where a pass would have put it."""
    for i, node in enumerate(compiled["nodes"]):
        if "inside" in FORMS[node[1]].attrs:
            data = copied(compiled)
            data["nodes"][i][5]["inside"] = True
            taken(data)


def test_the_words(compiled: Any) -> None:
    nodes = copied(compiled)["nodes"]
    i = next(i for i, node in enumerate(nodes) if node[1] == "attend")

    def words(**attrs: Any) -> str:
        data = copied(compiled)
        data["nodes"][i][5] |= attrs
        for key in [key for key, value in attrs.items() if value is None]:
            del data["nodes"][i][5][key]
        with pytest.raises(BadModel) as e:
            Graph.from_json(data)
        return str(e.value)

    assert words(softcap=None) == "The graph's node l0.attention lacks softcap."
    assert words(dim="x") == (
        "The graph's node l0.attention has no right dim: it has to be a whole number from 1 to"
        " 16777216."
    )
    assert words(more=1) == "The graph's node l0.attention has 'more', which no attend has."
