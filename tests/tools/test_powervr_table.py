# SPDX-License-Identifier: Apache-2.0
"""The table of pipelines: written, read again, compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.powervr import probe, table
from tools.powervr.table import Row

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "powervr.md"
CORES = {"one": "One-1", "two": "Two-2"}
GOOD = Row("ok", True, 100, 20)
TABLE = {
    ("one", "add", "base"): GOOD,
    ("two", "add", "base"): Row("ok", True, 101, 21),
    ("one", "add", "fp16"): Row("gated", False, detail="it needs fp16"),
    ("two", "add", "fp16"): Row("ok", False, 50, 200, 3, 64),
    ("one", "mul", "wide"): Row("hung", False),
    ("two", "mul", "wide"): Row("aborted", False),
}


def test_what_is_written_is_read() -> None:
    text = table.insert(
        f"# A\n\n{table.BEGIN}\n{table.END}\nB\n", table.render(TABLE, CORES, "X 1")
    )
    assert text.startswith("# A\n")
    assert text.endswith("\nB\n")
    assert "| `add` | `fp16` | extra | gated | 50 / 200 / 3 +64 B |" in text
    read = table.parse(text, CORES)
    assert {k: r.cell() for k, r in read.items()} == {k: r.cell() for k, r in TABLE.items()}
    assert table.insert(text, table.render(read, CORES, "X 1")) == text


def test_marks_and_cells_are_checked() -> None:
    with pytest.raises(ValueError, match="lost the marks"):
        table.insert("no marks", "")
    spoilt = table.render(TABLE, CORES, "X").replace("hung", "perhaps")
    with pytest.raises(ValueError, match="no cell of the table: 'perhaps'"):
        table.parse(spoilt, CORES)
    with pytest.raises(ValueError, match="has 2 cores"):
        table.parse(table.render(TABLE, CORES, "X").replace(" | 101 / 21 / 0", ""), CORES)
    assert table.parse("no table", CORES) == {}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (GOOD, ""),
        (Row("ok", True, 1, 1, spills=2), "spills 2 registers"),
        (Row("ok", True, 1, 1, scratch=640), "640 bytes of scratch"),
        (Row("gated", True, detail="it needs fp16"), "gated: it needs fp16"),
        (Row("hung", True, detail="no answer within 60 s"), "hung: no answer"),
        (Row("aborted", True, detail="signal 6"), "aborted: signal 6"),
        (Row("refused", True, detail="VkResult -1"), "refused: VkResult -1"),
        (Row("ok", False, 1, 1, spills=2), ""),
        (Row("hung", False), ""),
    ],
)
def test_what_a_baseline_kernel_may_not_do(row: Row, says: str) -> None:
    found = table.faults({("one", "add", "v"): row})
    assert (says in found[0]) if says else not found


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (Row("ok", False, 9, 9, 3), Row("ok", False, 99, 99, 3), ""),
        (Row("ok", False, 9, 9, 3), Row("ok", False, 9, 9, 2), ""),
        (Row("ok", False, 9, 9, 3), Row("ok", False, 9, 9, 4), "spills 4 registers, 3 before"),
        (Row("ok", False, 9, 9), Row("ok", False, 9, 9, scratch=8), "8 bytes of scratch"),
        (Row("ok", False, 9, 9), Row("hung", False, detail="60 s"), "hung, compiled before: 60 s"),
        (Row("hung", False), Row("hung", False), ""),
        (Row("ok", False, 9, 9), Row("gated", False), ""),
        (None, Row("ok", False, 9, 9, 1), "spills 1 registers, 0 before"),
        (None, Row("ok", False, 9, 9), ""),
    ],
)
def test_what_is_worse_than_before(old: Row | None, new: Row, says: str) -> None:
    key = ("one", "add", "v")
    found = table.regressions({key: old} if old else {}, {key: new})
    assert (says in found[0]) if says else not found


def test_changes_are_named_for_the_cores_of_the_run() -> None:
    new = {k: r for k, r in TABLE.items() if k[0] == "one"}
    new["one", "add", "base"] = Row("ok", True, 90, 20)
    del new["one", "mul", "wide"]
    assert table.changes(TABLE, new, ["one"]) == [
        "one: add.base: 100 / 20 / 0 -> 90 / 20 / 0",
        "one: mul.wide: hung -> gone",
    ]


def test_statistics_by_the_drivers_names() -> None:
    words = {"Inst group count": 7, "Temp count": 5, "Spill count": 3, "Scratch size": 2, "X": 1}
    assert table.from_statistics(words, True) == Row("ok", True, 7, 5, 3, 2)


def test_kept_table_has_no_fault() -> None:
    kept = table.parse(DOCUMENT.read_text("utf-8"), probe.CORES)
    assert {core for core, _, _ in kept} == set(probe.CORES)
    assert {op for _, op, _ in kept} >= {"matmul", "matvec", "conv3x3", "topk"}
    assert table.faults(kept) == []
