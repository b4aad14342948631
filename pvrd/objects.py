# SPDX-License-Identifier: Apache-2.0
"""Objects on the bus: methods and properties declared beside their code, dispatch, introspection.

A method that fails answers with one named error and one sentence. A traceback never leaves: what
was not foreseen becomes `Internal`; the journal gets the place, no values that may be a prompt.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pvrd import systemd
from pvrd.bus import BUS, INTROSPECTABLE, PEER, PROPERTIES, BusError, Call, Connection
from pvrd.bus_values import V
from pvrd.errors import NoSuchSession, PvrdError, shortage

ROOT = "/org/pvrd/Pvrd1"
SESSIONS = f"{ROOT}/session"
NAMESPACE = "org.pvrd.Pvrd1"
METHOD_S = 20.0  # callers give up at 25
CALLS_A_SENDER = 64

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass
class Answer:
    """Results of a method. Its fds are closed once sent; `h` values are indexes into them."""

    body: Sequence[Any]
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Closes the fds."""
        while self.fds:
            os.close(self.fds.pop())


@dataclass(frozen=True)
class _Method:
    name: str
    arguments: tuple[tuple[str, str], ...]  # (name, type)
    results: tuple[tuple[str, str], ...]
    timeout: float | None
    attribute: str = ""

    @property
    def signature(self) -> str:
        return "".join(t for _, t in self.arguments)

    @property
    def returns(self) -> str:
        return "".join(t for _, t in self.results)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((n, t) for n, _, t in (part.partition(":") for part in text.split()))


def method(
    name: str, arguments: str = "", results: str = "", timeout: float | None = METHOD_S
) -> Callable[[_F], _F]:
    """Declares a coroutine method: `arguments` and `results` are like "file:h options:a{sv}".

    It is called with the Call and the arguments, and returns None, one value, or an Answer.
    """

    def mark(function: _F) -> _F:
        made = _Method(name, _pairs(arguments), _pairs(results), timeout, function.__name__)
        function.__dict__["bus_method"] = made
        return function

    return mark


def prop(name: str, signature: str) -> Callable[[_F], _F]:
    """Declares a readable property."""

    def mark(function: _F) -> _F:
        function.__dict__["bus_property"] = (name, signature, function.__name__)
        return function

    return mark


class Object:
    """One object with one interface. `owner`: the only caller that sees it, None for all."""

    INTERFACE: ClassVar[str]
    methods: ClassVar[dict[str, _Method]]
    properties: ClassVar[dict[str, tuple[str, str]]]  # name -> (signature, attribute)

    def __init_subclass__(cls) -> None:
        cls.methods, cls.properties = {}, {}
        for base in reversed(cls.__mro__):
            for value in vars(base).values():
                made = getattr(value, "bus_method", None)
                if isinstance(made, _Method):
                    cls.methods[made.name] = made
                found = getattr(value, "bus_property", None)
                if found is not None:
                    cls.properties[found[0]] = (found[1], found[2])

    def __init__(self, path: str, owner: str | None = None) -> None:
        self.path = path
        self.owner = owner

    def values(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Properties as variants; all of them by default."""
        return {
            n: V(self.properties[n][0], getattr(self, self.properties[n][1])())
            for n in (self.properties if names is None else names)
        }


def interface_xml(cls: type[Object]) -> str:
    """The <interface> element of a class."""
    out = [f'  <interface name="{cls.INTERFACE}">']
    for m in cls.methods.values():
        out.append(f'    <method name="{m.name}">')
        for direction, arguments in (("in", m.arguments), ("out", m.results)):
            out += [
                f'      <arg name="{n}" type="{t}" direction="{direction}"/>' for n, t in arguments
            ]
        out.append("    </method>")
    for name, (signature, _) in cls.properties.items():
        out.append(f'    <property name="{name}" type="{signature}" access="read"/>')
    out.append("  </interface>")
    return "\n".join(out)


_STANDARD = f"""  <interface name="{PROPERTIES}">
    <method name="Get">
      <arg name="interface" type="s" direction="in"/>
      <arg name="name" type="s" direction="in"/>
      <arg name="value" type="v" direction="out"/>
    </method>
    <method name="GetAll">
      <arg name="interface" type="s" direction="in"/>
      <arg name="values" type="a{{sv}}" direction="out"/>
    </method>
    <method name="Set">
      <arg name="interface" type="s" direction="in"/>
      <arg name="name" type="s" direction="in"/>
      <arg name="value" type="v" direction="in"/>
    </method>
    <signal name="PropertiesChanged">
      <arg name="interface" type="s"/>
      <arg name="changed" type="a{{sv}}"/>
      <arg name="invalidated" type="as"/>
    </signal>
  </interface>
  <interface name="{INTROSPECTABLE}">
    <method name="Introspect">
      <arg name="xml" type="s" direction="out"/>
    </method>
  </interface>
  <interface name="{PEER}">
    <method name="Ping"/>
    <method name="GetMachineId">
      <arg name="id" type="s" direction="out"/>
    </method>
  </interface>"""


class ObjectTree:
    """All objects of a connection; answers its calls."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._objects: dict[str, Object] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: Counter[str] = Counter()
        connection.on_call = self._on_call

    def add(self, thing: Object) -> None:
        """Puts an object on the bus."""
        self._objects[thing.path] = thing

    def remove(self, thing: Object) -> None:
        """Takes it away; calls under way go on."""
        self._objects.pop(thing.path, None)

    def changed(self, thing: Object, *names: str) -> None:
        """PropertiesChanged: to the owner alone, or to all."""
        if self._connection.closed.done() or thing.path not in self._objects:
            return
        self._connection.signal(
            thing.path, PROPERTIES, "PropertiesChanged", "sa{sv}as",
            [thing.INTERFACE, thing.values(names), []], thing.owner,
        )  # fmt: skip

    async def drain(self, seconds: float) -> None:
        """Waits for calls under way, at most so long."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)

    def _on_call(self, call: Call) -> None:
        if self._running[call.sender] >= CALLS_A_SENDER:
            call.fds.close()
            text = f"{CALLS_A_SENDER} calls of this caller are under way"
            self._connection.error(call, f"{BUS}.Error.LimitsExceeded", text)
            return
        self._running[call.sender] += 1
        task = asyncio.get_running_loop().create_task(self._serve(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, call: Call) -> None:
        answer: Answer | None = None
        try:
            try:
                try:
                    signature, answer = await self._answer(call)
                finally:
                    call.fds.close()  # before the caller hears of it
                self._connection.reply(call, signature, answer.body, answer.fds)
            except PvrdError as e:
                self._connection.error(call, e.bus_name, str(e))
            except BusError as e:
                self._connection.error(call, e.name, e.message)
            except TimeoutError:
                text = f"{call.member} did not finish within {METHOD_S:g} s"
                self._connection.error(call, f"{NAMESPACE}.Error.Timeout", text)
            except Exception as e:
                if short := shortage(e):
                    self._connection.error(call, short.bus_name, str(short))
                    return
                systemd.log(systemd.ERROR, f"{call.member}: {where(e)}", PVRD_REASON="internal")
                text = f"{call.member} met a fault of pvrd's own; the journal has the place"
                self._connection.error(call, f"{NAMESPACE}.Error.Internal", text)
        except BusError:
            pass  # the bus is gone; the daemon ends elsewhere
        finally:
            if answer is not None:
                answer.close()
            self._running[call.sender] -= 1
            if not self._running[call.sender]:
                del self._running[call.sender]

    async def _answer(self, call: Call) -> tuple[str, Answer]:
        if call.interface == PEER or (not call.interface and call.member == "Ping"):
            return self._peer(call)
        thing = self._objects.get(call.path)
        if thing is not None and thing.owner not in (None, call.sender):
            thing = None
        if thing is None and call.path.startswith(SESSIONS + "/"):
            raise NoSuchSession(f"there is no session {call.path} of yours")
        if call.interface == INTROSPECTABLE and call.member == "Introspect":
            return "s", Answer([self._introspect(call, thing)])
        if thing is None:
            raise BusError(f"{BUS}.Error.UnknownObject", f"there is no object {call.path}")
        if call.interface == PROPERTIES:
            return self._properties(call, thing)
        if call.interface not in ("", thing.INTERFACE):
            raise BusError(
                f"{BUS}.Error.UnknownInterface", f"{call.path} has no interface {call.interface}"
            )
        found = thing.methods.get(call.member)
        if found is None:
            raise BusError(
                f"{BUS}.Error.UnknownMethod", f"{thing.INTERFACE} has no method {call.member}"
            )
        _expect(call, found.signature)
        # What is not asked for would lie here as long as the method waits, for a dialog perhaps.
        if len(call.fds) > found.signature.count("h"):
            count = found.signature.count("h")
            raise BusError(
                f"{BUS}.Error.InvalidArgs",
                f"{call.member} takes {count} file descriptors, not {len(call.fds)}",
            )
        function: Callable[..., Awaitable[Any]] = getattr(thing, found.attribute)
        value = await asyncio.wait_for(function(call, *call.body), found.timeout)
        if isinstance(value, Answer):
            return found.returns, value
        return found.returns, Answer([value] if found.results else [])

    def _peer(self, call: Call) -> tuple[str, Answer]:
        if call.member == "Ping":
            return "", Answer([])
        if call.member == "GetMachineId":
            for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
                try:
                    with open(path, encoding="ascii") as file:
                        return "s", Answer([file.read().strip()])
                except (OSError, ValueError):
                    continue
            raise BusError(f"{BUS}.Error.FileNotFound", "this machine has no machine-id")
        raise BusError(f"{BUS}.Error.UnknownMethod", f"{PEER} has no method {call.member}")

    def _properties(self, call: Call, thing: Object) -> tuple[str, Answer]:
        wanted = {"Get": "ss", "GetAll": "s", "Set": "ssv"}.get(call.member)
        if wanted is None:
            raise BusError(
                f"{BUS}.Error.UnknownMethod", f"{PROPERTIES} has no method {call.member}"
            )
        _expect(call, wanted)
        if call.body[0] not in ("", thing.INTERFACE):
            if call.member == "GetAll" and call.body[0] in (PROPERTIES, INTROSPECTABLE, PEER):
                return "a{sv}", Answer([{}])
            raise BusError(
                f"{BUS}.Error.UnknownInterface", f"{call.path} has no interface {call.body[0]}"
            )
        if call.member == "GetAll":
            return "a{sv}", Answer([thing.values()])
        if call.body[1] not in thing.properties:
            raise BusError(
                f"{BUS}.Error.UnknownProperty", f"{thing.INTERFACE} has no property {call.body[1]}"
            )
        if call.member == "Set":
            raise BusError(
                f"{BUS}.Error.PropertyReadOnly", f"the property {call.body[1]} can only be read"
            )
        return "v", Answer([thing.values([call.body[1]])[call.body[1]]])

    def _introspect(self, call: Call, thing: Object | None) -> str:
        prefix = call.path.rstrip("/") + "/"
        below = [
            path[len(prefix) :].split("/")[0]
            for path, other in self._objects.items()
            if path.startswith(prefix) and other.owner in (None, call.sender)
        ]
        if thing is None and not below and not SESSIONS.startswith(prefix[:-1]):
            raise BusError(f"{BUS}.Error.UnknownObject", f"there is no object {call.path}")
        parts = ["<node>", _STANDARD]
        if thing is not None:
            parts.append(interface_xml(type(thing)))
        parts += [f'  <node name="{name}"/>' for name in dict.fromkeys(below)]
        return "\n".join([*parts, "</node>"])


def _expect(call: Call, signature: str) -> None:
    if call.signature != signature:
        raise BusError(
            f"{BUS}.Error.InvalidArgs",
            f"{call.member} takes the arguments {signature!r}, not {call.signature!r}",
        )


def where(error: BaseException) -> str:
    """An unforeseen error for the journal: its type and the innermost places, never its values."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in reversed(frames))
    return f"{type(error).__name__} at {places or 'an unknown place'}"
