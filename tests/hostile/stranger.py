# SPDX-License-Identifier: Apache-2.0
"""Another user at the bus: python -m tests.hostile.stranger BUS UID WHAT ARGUMENTS…

Says `there`, waits for a line, does WHAT and prints as JSON what it found. It becomes that user
when all is imported: a checkout need not be readable for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from pvrd.bus import BUS, INTROSPECTABLE, PROPERTIES, BusAddress, BusError, Connection, Reply
from pvrd.bus_values import V, plain

NAME, ROOT = "org.pvrd.Pvrd1", "/org/pvrd/Pvrd1"
MANAGER, TEXT, VIDEO = f"{NAME}.Manager", f"{NAME}.TextSession", f"{NAME}.VideoSession"


class Stranger:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def ask(self, path: str, interface: str, member: str, signature: str = "",
                  *body: Any) -> Reply:  # fmt: skip
        return await self.connection.call(NAME, path, interface, member, signature, body)

    async def error(self, *call: Any) -> str:
        """`NAME: sentence` of the error, "" when there was none."""
        try:
            (await self.ask(*call)).close()
        except BusError as e:
            return f"{e.name.rpartition('.')[2]}: {e.message}"
        return ""

    async def spy(self, path: str, owner: str) -> dict[str, Any]:
        """All ways to a session of somebody else's, told as errors; and all that is heard."""
        heard: list[list[Any]] = []

        def hear(signal: Any) -> None:
            heard.append([signal.path, signal.member, str(plain(signal.body))])

        await self.connection.subscribe(hear)
        for kind in ("signal", "method_call", "method_return", "error"):
            rule = [f"type='{kind}',eavesdrop='true'"]
            with contextlib.suppress(BusError):  # most buses refuse that by themselves
                await self.connection.call(BUS, "/org/freedesktop/DBus", BUS, "AddMatch", "s", rule)
        ways: list[Any] = [
            (TEXT, "Generate", "sa{sv}", "x", {}), (TEXT, "Chat", "aa{ss}a{sv}", [], {}),
            (TEXT, "Cancel"), (TEXT, "Close"), (TEXT, "CountTokens", "s", "x"),
            (TEXT, "Embed", "asa{sv}", ["x"], {}), (VIDEO, "Close"), (VIDEO, "Pause", "b", True),
            (PROPERTIES, "GetAll", "s", TEXT), (PROPERTIES, "Get", "ss", TEXT, "Model"),
            (PROPERTIES, "Set", "ssv", TEXT, "Model", V("s", "x")), (INTROSPECTABLE, "Introspect"),
            ("org.freedesktop.DBus.ObjectManager", "GetManagedObjects"), ("no.such", "Thing"),
        ]  # fmt: skip
        found: dict[str, Any] = {"there": [], "nowhere": []}
        for kind, at in (("there", path), ("nowhere", ROOT + "/session/999999")):
            for way in ways:
                found[kind].append((await self.error(at, *way)).replace(at, "PATH"))
        found["trees"] = []
        for at in ("/", "/org/pvrd", ROOT, ROOT + "/session"):
            reply = await self.ask(at, INTROSPECTABLE, "Introspect")
            found["trees"].append(str(reply.body[0]))
            manager = "org.freedesktop.DBus.ObjectManager"
            found["trees"].append(await self.error(at, manager, "GetManagedObjects"))
        jobs = await self.ask(ROOT, MANAGER, "ListJobs", "a{sv}", {})
        found["jobs"] = plain(jobs.body[0])
        every = {"all": V("b", True)}
        found["all jobs"] = await self.error(ROOT, MANAGER, "ListJobs", "a{sv}", every)
        found["trace"] = await self.error(ROOT, MANAGER, "Trace", "a{sv}", {})
        everything = [await self.ask(ROOT, PROPERTIES, "GetAll", "s", MANAGER)]
        for member in ("GetStatistics", "GetDiagnostics", "GetConfig", "ListModels"):
            everything.append(await self.ask(ROOT, MANAGER, member))
        found["manager"] = str([plain(reply.body) for reply in everything])
        # What the bus says of the owner, in our words: to all, and to pvrd itself.
        for to in (None, NAME):
            self.connection.signal("/org/freedesktop/DBus", BUS, "NameOwnerChanged", "sss",
                                   [owner, owner, ""], to)  # fmt: skip
        await self.ask(ROOT, PROPERTIES, "GetAll", "s", MANAGER)
        found["heard"] = heard
        return found

    async def open(self, count: str) -> list[str]:
        """Opens so many text sessions; the errors."""
        options: dict[str, Any] = {}
        return [
            await self.error(ROOT, MANAGER, "OpenText", "a{sv}", options) for _ in range(int(count))
        ]

    async def privileged(self) -> dict[str, str]:
        """Asks for what needs permission."""
        high = {"priority": V("u", 15)}
        return {
            "priority": await self.error(ROOT, MANAGER, "OpenText", "a{sv}", high),
            "hold": await self.error(ROOT, MANAGER, "Hold", "sa{sv}", "a film", {}),
            "config": await self.error(ROOT, MANAGER, "SetConfig", "a{sv}",
                                       {"limits.sessions": V("u", 99)}),
            "model": await self.error(ROOT, MANAGER, "RemoveModel", "s", "fake-text"),
        }  # fmt: skip


async def main() -> None:
    address, uid, what, *arguments = sys.argv[1:]
    if os.geteuid() != int(uid):
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    connection = await Connection.connect(BusAddress.parse(address))
    print("there", flush=True)
    sys.stdin.readline()
    print(json.dumps(await getattr(Stranger(connection), what)(*arguments)))
    connection.close()


if __name__ == "__main__":
    asyncio.run(main())
