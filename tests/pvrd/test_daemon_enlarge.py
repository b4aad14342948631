# SPDX-License-Identifier: Apache-2.0
"""Sizes and families of models that jobs ask for, and the picture of who made each tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pvrd.config import KEYS, Config, Paths
from pvrd.ctl.tile_picture import draw
from pvrd.enlarge import check_sides, family, out_size, smaller
from pvrd.errors import InvalidArgument, UnknownModel
from pvrd.models import ModelStore

PVRM = b"PVRM1\0\0\0" + bytes(8)


def asked(**values: Any) -> dict[str, Any]:
    given = {"width": 15, "height": 9, "scale": 2.0, "out_width": None, "out_height": None}
    return {**given, **values}


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({}, (30, 18)),
        ({"scale": 2.5}, (38, 23)),
        ({"scale": 1.0}, (15, 9)),
        ({"out_width": 120, "out_height": 9}, (120, 9)),
    ],
)
def test_size(values: dict[str, Any], size: tuple[int, int]) -> None:
    assert out_size(asked(**values)) == size


@pytest.mark.parametrize("values", [{"out_width": 14}, {"out_width": 121}, {"out_height": 73}])
def test_size_that_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="out_"):
        out_size(asked(**{"out_width": 30, "out_height": 18, **values}))


def test_one_side_alone_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="together"):
        check_sides(asked(out_width=30))


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    where = Paths(tmp_path / "etc", tmp_path / "state", tmp_path / "cache")
    where.models.mkdir(parents=True)
    for name in ("nsr-fast", "nsr-fast-x3", "nsr-fast-x4", "mine", "nsr-fast-compressed"):
        (where.models / f"{name}.pvrm").write_bytes(PVRM + name.encode())
    (where.models / "mine-x4.gguf").write_bytes(b"GGUF")
    return ModelStore(where, Config({key: rule.default for key, rule in KEYS.items()}))


@pytest.mark.parametrize(
    ("name", "ratio", "names"),
    [
        ("nsr-fast", 2, ["nsr-fast"]),
        ("fast", 2.5, ["nsr-fast", "nsr-fast-x3", "nsr-fast-x4"]),
        ("fast", None, ["nsr-fast", "nsr-fast-x3", "nsr-fast-x4"]),
        ("fast-compressed", 4, ["nsr-fast-compressed"]),
        ("nsr-fast-x3", 8, ["nsr-fast-x3"]),
        ("mine", 8, ["mine"]),
    ],
)
def test_family(store: ModelStore, name: str, ratio: float | None, names: list[str]) -> None:
    assert [model.name for model in family(store, name, ratio)] == names
    with pytest.raises(UnknownModel):
        family(store, "quality-of-another-kind", ratio)


@pytest.mark.parametrize(
    ("name", "ratio", "names"),
    [
        ("nsr-fast", 2, []),
        ("nsr-fast-x3", 3, []),
        ("balanced", 2, ["nsr-fast"]),
        ("quality", 2, ["nsr-balanced", "nsr-fast"]),
        ("balanced-compressed", 2, ["nsr-fast-compressed"]),
        ("fast-compressed", 2, []),
        ("mine", 2, ["nsr-fast"]),
        ("mine", 4, ["nsr-fast", "nsr-fast-x3", "nsr-fast-x4"]),
    ],
)
def test_smaller_networks(store: ModelStore, name: str, ratio: float, names: list[str]) -> None:
    first = family(store, name, ratio)[0]
    assert [m.name for models in smaller(store, first, ratio) for m in models] == names


def test_tiles_are_drawn_as_large_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tiles.png"
    path.write_bytes(draw("3 2 40 30 2g1c1i2r", 100, 50))
    with Image.open(path) as file:
        image = file.convert("RGB")
    assert image.size == (100, 50)
    seen = [image.getpixel(at) for at in ((10, 10), (70, 10), (90, 10), (10, 40), (60, 40))]
    green, blue, red, grey = (64, 160, 80), (64, 96, 200), (208, 64, 48), (150, 150, 150)
    assert seen == [green, green, blue, red, grey]
    assert image.getpixel((40, 10)) == image.getpixel((10, 30)) == (0, 0, 0)


@pytest.mark.parametrize("tile_map", ["", "4 3 10 10 2g"])
def test_tiles_that_nobody_told_of_are_white(tmp_path: Path, tile_map: str) -> None:
    path = tmp_path / "tiles.png"
    path.write_bytes(draw(tile_map, 40, 30))
    with Image.open(path) as file:
        assert file.convert("RGB").getpixel((35, 25)) == (255, 255, 255)
