# SPDX-License-Identifier: Apache-2.0
"""Each fault in each state: nothing is lost, doubled or left behind, and the reason is told.

`python -m tests.faults.report` runs all cells and writes docs/faults.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cells import Result, Row
from tests.faults.conftest import names
from tests.faults.place import Place
from tests.faults.rows import FAULTS, Fault
from tests.faults.work import STATES, State

pytestmark = [pytest.mark.long, pytest.mark.bus, pytest.mark.gpu]


@pytest.fixture(scope="module")
def rows(place: Place) -> Iterator[dict[str, Row]]:
    """The daemon of the row that runs now."""
    now: dict[str, Row] = {}
    yield now
    for row in now.values():
        row.stop()


def take(rows: dict[str, Row], place: Place, fault: Fault, state: State) -> Row:
    """The row's daemon; a new one where each cell has its own, or where one failed."""
    row = rows.get(fault.name)
    if row is None or fault.fresh:
        while rows:
            rows.popitem()[1].stop()
        rows[fault.name] = row = Row(fault, place, state.name if fault.fresh else "")
    return row


@pytest.mark.parametrize("state", STATES, ids=names(STATES))
@pytest.mark.parametrize("fault", FAULTS, ids=names(FAULTS))
def test_fault_matrix(
    place: Place, rows: dict[str, Row], results: list[Result], fault: Fault, state: State
) -> None:
    row = take(rows, place, fault, state)
    result = Result(fault.name, state.name)
    try:
        result = row.cell(state)
    except BaseException as e:
        result.error = str(e).strip().splitlines()[0][:300] if str(e).strip() else repr(e)
        rows.pop(fault.name)
        print(row.daemon.text()[-6000:])  # pytest shows it
        row.daemon.stop()
        raise
    finally:
        results.append(result)
