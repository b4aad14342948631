# SPDX-License-Identifier: Apache-2.0
"""The pictures to train on are found again in the packages that they come from."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

TOOLS = Path(__file__).parents[2] / "tools/train_nsr"


def test_a_row_of_the_table_names_a_picture_or_the_byte_where_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import gather  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "gather")
    ramp = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    data = io.BytesIO()
    Image.fromarray(ramp).save(data, "PNG")
    (tmp_path / "a/img").mkdir(parents=True)
    (tmp_path / "a/img/one.png").write_bytes(data.getvalue())
    (tmp_path / "all.rcc").write_bytes(b"resource" + data.getvalue() + b"more")
    for name in ("img/one.png", "one.png", "all.rcc at byte 8"):
        picture = gather.original(tmp_path, name)
        assert picture is not None
        assert np.array_equal(np.asarray(picture), ramp)
    assert gather.original(tmp_path, "other/one.png") is None
    assert not gather.fetch("rendered by this project", tmp_path)
