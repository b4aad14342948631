# SPDX-License-Identifier: Apache-2.0
"""Which form of a text model a job takes: the full one, or one of 4-bit weights when the governor
asks for low precision. That is decided when a job begins and stays for the whole answer.

The low form of NAME is the model NAME.q4 where the store has one, else the same file compiled with
4-bit weights, in the cache beside the full one. A model that has no more bits stays as it is.
"""

from __future__ import annotations

from pvrd.errors import PvrdError
from pvrd.models import COMPILED, Model, ModelStore
from pvrd.supervisor import Supervisor
from pvrd.worker import WorkerLost

INSPECTOR = "precision"  # our name of a job in the worker protocol


class Precision:
    """Chooses, and remembers which models have a form of fewer bits."""

    def __init__(self, supervisor: Supervisor, store: ModelStore) -> None:
        self._supervisor = supervisor
        self._store = store
        self._narrows: dict[str, bool] = {}
        self._number = 0

    @property
    def why(self) -> str:
        """Why new jobs take low precision, "" when they do not."""
        decision = self._supervisor.decision
        return decision.reason or "the governor" if decision.precision == "low" else ""

    async def fitting(self, model: Model) -> Model:
        """The form of the model for a job that begins now."""
        if not self.why or model.kind != "text":
            return model
        twin = await self._store.ask(lambda: self._store.twin(model))
        if twin is not None:
            return twin
        if model.path.suffix == COMPILED:
            return model  # it is used as it lies
        if model.key not in self._narrows:
            known = await self._ask(model)
            if known is None:
                return model
            self._narrows[model.key] = known
        return model.narrowed() if self._narrows[model.key] else model

    async def _ask(self, model: Model) -> bool | None:
        """Has a worker look whether there is a narrow form; None when that cannot be told now."""
        self._number += 1
        job = f"{INSPECTOR}{self._number}"
        try:
            async with model.opened() as fd:
                worker = await self._supervisor.choose("cpu")
                with worker.route("job", job) as inbox:
                    worker.send({"t": "inspect", "job": job}, [fd], model.lane)
                    info = (await inbox.expect("inspected")).get("info")
        except (PvrdError, WorkerLost):
            return None
        return isinstance(info, dict) and bool(info.get("narrows"))
