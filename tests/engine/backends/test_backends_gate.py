# SPDX-License-Identifier: Apache-2.0
"""The capability gate: each reason, and that what does not fit never reaches the driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
from engine.backends.base import Limits
from engine.backends.gate import (
    CAPABILITY_FEATURE,
    call_misfit,
    misfit,
    misfits,
    variant_misfit,
)
from engine.backends.vulkan import VulkanBackend, api
from engine.errors import InvalidArgument
from engine.importers.families import import_model
from engine.importers.gguf import Gguf
from engine.lower import lower
from engine.passes import optimise
from engine.text.model import TextModel
from kernels import weights
from kernels.contract import FORMATS, Variant
from tests.engine.backends.conftest import chain, chain_data
from tests.kernels.harness import Runner

gpu = pytest.mark.gpu
LONG = 131072  # tokens: twice what an axis takes anywhere
FEW = Limits(max_workgroup_count=(1024, 1024, 1024))
ENTRY: dict[str, Any] = {
    "capabilities": ["Shader"],
    "extensions": [],
    "needs": [],
    "workgroup": [32, 1, 1],
    "shared_bytes": 128,
    "bindings": 4,
    "push_bytes": 24,
}


def test_a_baseline_variant_fits_the_least_device() -> None:
    assert misfit(ENTRY, Limits(), frozenset()) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"capabilities": ["Shader", "Int8"]}, "int8"),
        ({"capabilities": ["Shader", "Float16"]}, "fp16"),
        ({"capabilities": ["Shader", "GroupNonUniformArithmetic"]}, "subgroup_arithmetic"),
        ({"capabilities": ["Shader", "CooperativeMatrixKHR"]}, "it needs coopmat"),
        ({"capabilities": ["Shader", "CooperativeMatrixNV"]}, "not known"),
        ({"extensions": ["SPV_VENDOR_magic"]}, "SPV_VENDOR_magic"),
        ({"needs": ["fp16"]}, "fp16"),
        ({"workgroup": [256, 1, 1]}, "256 invocations"),
        ({"workgroup": [1, 1, 128]}, "1x1x128"),
        ({"shared_bytes": 16385}, "16385 bytes shared"),
        ({"bindings": 5}, "5 storage buffers"),
        ({"push_bytes": 132}, "132 bytes of push"),
    ],
)
def test_what_does_not_fit_is_not_handed_over(change: dict[str, Any], why: str) -> None:
    assert why in misfit({**ENTRY, **change}, Limits(), frozenset())


def test_features_admit_more() -> None:
    entry = {**ENTRY, "capabilities": ["Shader", "Int8", "GroupNonUniform"], "needs": ["int8"]}
    assert misfit(entry, Limits(), frozenset({"int8", "subgroup_basic"})) == ""


@pytest.mark.parametrize("capability", sorted(CAPABILITY_FEATURE))
def test_every_capability_asks_for_its_feature(capability: str) -> None:
    entry = {**ENTRY, "capabilities": [capability]}
    feature = CAPABILITY_FEATURE[capability]
    assert misfit(entry, Limits(), frozenset()) == (f"it needs {feature}" if feature else "")
    assert misfit(entry, Limits(), frozenset({feature})) == ""


def test_all_reasons_at_once() -> None:
    entry = {**ENTRY, "capabilities": ["Int8"], "workgroup": [2048, 1, 1], "push_bytes": 1000}
    found = list(misfits(entry, Limits(), frozenset()))
    assert [what for what, _ in found] == ["capability", "workgroup", "workgroup", "push"]
    assert misfit(entry, Limits(), frozenset()) == found[0][1]


def test_what_op_py_says_is_enough_for_sizes() -> None:
    op = kernels.op("swiglu")
    assert variant_misfit(op, op.variant("base"), Limits(), frozenset()) == ""
    wide = Variant("wide", (256, 1, 1), shared=1 << 20, needs=frozenset({"fp16"}))
    assert variant_misfit(op, wide, Limits(), frozenset()) == "it needs fp16"
    assert "256 inv" in variant_misfit(op, wide, Limits(), frozenset({"fp16"}))


@pytest.mark.parametrize(
    ("push", "groups", "ranges", "why"),
    [
        (4, (1, 1, 1), [("a", 0, 64)], "takes 2 bindings, got 1"),
        (8, (1, 1, 1), [("a", 0, 64), ("b", 0, 64)], "takes 4 bytes of push constants, got 8"),
        (4, (0, 1, 1), [("a", 0, 64), ("b", 0, 64)], "groups"),
        (4, (65536, 1, 1), [("a", 0, 64), ("b", 0, 64)], "at most (65535, 65535, 65535)"),
        (4, (1, 65536, 1), [("a", 0, 64), ("b", 0, 64)], "(1, 65536, 1) groups"),
        (4, (1, 1, 65536), [("a", 0, 64), ("b", 0, 64)], "(1, 1, 65536) groups"),
        (4, (1, 1, 1), [("a", 0, 64), ("b", 256, 257 + (128 << 20))], "134217729 bytes of 'b'"),
        (4, (1, 1, 1), [("a", 0, 64), ("b", 100, 164)], "no multiple of 256"),
    ],
)
def test_calls_that_are_not_recorded(
    push: int, groups: tuple[int, int, int], ranges: list[tuple[str, int, int]], why: str
) -> None:
    op = kernels.op("add_bias")
    base = op.variants[0]
    assert why in call_misfit(op, base, bytes(push), groups, ranges, Limits())
    good = [("a", 0, 128 << 20), ("b", 256, 512)]
    assert call_misfit(op, base, bytes(4), (65535, 65535, 65535), good, Limits()) == ""


@gpu
@pytest.mark.parametrize(
    ("change", "limit", "why"),
    [
        ({"capabilities": ["Shader", "CooperativeMatrixKHR"]}, {}, "it needs coopmat"),
        ({"capabilities": ["Shader", "CooperativeMatrixNV"]}, {}, "CooperativeMatrixNV"),
        ({"extensions": ["SPV_NV_magic"]}, {}, "SPV_NV_magic"),
        ({"needs": ["magic"]}, {}, "it needs magic"),
        ({}, {"max_workgroup_invocations": 63}, "64 invocations a workgroup, 63 allowed"),
        ({}, {"max_workgroup_size": (63, 1, 1)}, "64x1x1, 63x1x1 allowed"),
        ({"shared_bytes": 5}, {"max_shared_bytes": 4}, "5 bytes shared, 4 allowed"),
        ({}, {"max_storage_buffers": 1}, "2 storage buffers, 1 allowed"),
        ({}, {"max_push_bytes": 3}, "12 bytes of push constants, 3 allowed"),
    ],
)
def test_the_driver_never_sees_what_does_not_fit(
    change: dict[str, Any], limit: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = VulkanBackend(allow_software=True)
    seen: list[object] = []
    known = kernels.manifest()
    entry = {**known["swiglu"]["base"], **change}
    limits = replace(backend.info.limits, **limit)
    backend.info = replace(backend.info, limits=limits)
    try:
        with monkeypatch.context() as m:
            for function in ("vkCreateShaderModule", "vkCreateComputePipelines"):
                m.setattr(api.vk, function, lambda *args: seen.append(args))
            m.setattr(kernels, "manifest", lambda: {**known, "swiglu": {"base": entry}})
            with pytest.raises(InvalidArgument, match=why):
                backend.executable(chain(), backend.weights({"w": chain_data()[1]}))
        assert not seen
    finally:
        backend.close()


@pytest.fixture(scope="module")
def short_axes() -> Any:
    """The GPU, with 1024 groups an axis."""
    backend = VulkanBackend(allow_software=True)
    limits = replace(backend.info.limits, max_workgroup_count=FEW.max_workgroup_count)
    backend.info = replace(backend.info, limits=limits)
    yield backend
    backend.close()


@gpu
def test_no_pipeline_for_a_call_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = VulkanBackend(allow_software=True)
    limits = replace(backend.info.limits, max_workgroup_count=(1, 1, 1))
    backend.info = replace(backend.info, limits=limits)
    seen: list[object] = []
    try:
        with monkeypatch.context() as m:
            m.setattr(api.vk, "vkCreateComputePipelines", lambda *args: seen.append(args))
            with pytest.raises(InvalidArgument, match=r"groups, at most \(1, 1, 1\)"):
                backend.executable(chain(), backend.weights({"w": chain_data()[1]}))
        assert not seen
    finally:
        backend.close()


def _calls(op: str) -> tuple[str, dict[str, Any], dict[str, Any], int]:
    """Variant, push constants, arrays and how many of the tokens are there."""
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    n, k, some = 37, 32, 1300
    w = weights.pack("q8", normal(n, k))
    if op == "rmsnorm":
        arrays = {"x": normal(LONG, k), "w": normal(k), "y": normal(LONG, k)}
        return "base", {"k": k, "eps": 1e-5, "last": 0, "add": 0}, arrays, LONG
    if op == "swiglu":
        push: dict[str, float] = {"f": k, "act": 0, "each": 1}
        return "base", push, {"gu": normal(LONG, 2 * k), "h": normal(LONG, k)}, LONG
    if op == "embed":
        ids = rng.integers(0, n, LONG, np.uint32)
        push = {"fmt": FORMATS["q8"], "k": k, "row0": 0, "rows": n, "scale": 1.0}
        return "q8", push, {"ids": ids, "table": w, "out": normal(LONG, k)}, LONG
    if op == "matmul":
        push = {"fmt": FORMATS["q8"], "n": n, "k": k, "accumulate": 0, "y0": 0, "ldy": n}
        return "q8", push, {"w": w, "x": normal(LONG, k), "y": normal(LONG, n)}, LONG
    if op == "matvec":
        rows = 16 * 2500 + 3
        push = {"fmt": FORMATS["q8"], "n": rows, "k": k, "accumulate": 0, "y0": 0}
        w = weights.pack("q8", normal(rows, k))
        return "q8", push, {"w": w, "x": normal(k), "y": normal(rows)}, 1
    push = {"fmt": FORMATS["f16"], "heads": 2, "kv_heads": 1, "dim": 32, "ctx": some}
    cache = normal(some, 32).astype(np.float16)
    arrays = {"qkv": normal(some, 4 * 32), "kc": cache, "vc": cache[::-1].copy()}
    if op == "rope_kv":
        arrays["table"] = normal(some, 16, 2)
        return "f16", {**push, "rope_dims": 32, "neox": 0}, arrays, some
    arrays["out"] = normal(some, 64)
    return "f16", {**push, "scale": 0.2, "window": 0, "softcap": 0.0}, arrays, some


@gpu
@pytest.mark.parametrize(
    "op", ["embed", "rmsnorm", "matmul", "matvec", "swiglu", "rope_kv", "attention_prefill"]
)
def test_kernels_of_131072_tokens(short_axes: Any, op: str) -> None:
    """Recorded for all of them; the caches' operations get 1300, more than one axis takes."""
    variant, push, arrays, tokens = _calls(op)
    given = (tokens, 0, tokens - 1)
    recorded = 1 if op == "matvec" else LONG
    Runner(short_axes).check_op(op, variant, push, arrays, given, recorded, tolerance=(2e-3, 2e-3))


@gpu
def test_a_program_of_131072_tokens(
    short_axes: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.importers.decoder.MAX_CONTEXT", LONG)
    shape = tiny.shape(context=LONG, layers=1, hidden=32, ffn=32, heads=2, kv_heads=1)
    path = tiny.write(tmp_path / "m.gguf", "F16", shape)
    ids = [int(i) for i in np.random.default_rng(3).integers(3, 290, 1300)]
    model = TextModel.load(path, "", short_axes)
    with path.open("rb") as file:
        graph = optimise(import_model(Gguf(file.fileno())).graph)
    program = lower(graph, short_axes.info, LONG, LONG)
    exe = short_axes.executable(program, model.weights)
    exe.write("params", np.array([len(ids), 0, len(ids) - 1] + [0] * 13, np.uint32))
    exe.write("ids", np.array(ids, np.uint32))
    exe.run("prefill", "rest", "head")
    logits = exe.read("logits", shape.vocab * 4).view(np.float32)
    truth = tiny.truth(path, shape).logits(ids)[-1]
    assert np.abs(logits - truth).max() < 0.02
    exe.close()
    model.close()
