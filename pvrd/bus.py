# SPDX-License-Identifier: Apache-2.0
"""D-Bus, all of it: the only file that imports dbus_next. Serves the daemon and its clients.

dbus_next is the codec here (Message, Variant and its reader). The connection is our own
(pvrd/bus_wire.py has the socket), because dbus_next's dies at EAGAIN, loses the fds of a message
that did not fit the socket, hides the sender, leaks received fds, breaks off at a message that it
cannot read, and reads any size.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from collections.abc import Callable, Sequence
from typing import Any

from dbus_next._private.unmarshaller import Unmarshaller
from dbus_next.constants import MessageFlag, MessageType
from dbus_next.message import Message
from dbus_next.signature import SignatureTree, Variant
from dbus_next.validators import is_bus_name_valid

from pvrd.bus_types import BUS, BusAddress, BusError, Call, Fds, Reply, Signal, Subscription
from pvrd.bus_wire import MAX_MESSAGE, Received, Wire, log_in

__all__ = [
    "BUS", "INTROSPECTABLE", "PEER", "PROPERTIES", "BusAddress", "BusError", "Call", "Connection",
    "Fds", "Reply", "Signal", "Subscription", "Variant",
]  # fmt: skip

BUS_PATH = "/org/freedesktop/DBus"
PROPERTIES = "org.freedesktop.DBus.Properties"
INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"
PEER = "org.freedesktop.DBus.Peer"

MAX_FDS = 16

# The library has no types for these.
_Message: Any = Message
_Reader: Any = Unmarshaller


def _clean(value: Any) -> Any:
    """Strings without NUL and lone surrogates: the bus throws out a sender of either."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, Variant):
        return Variant(value.signature, _clean(value.value))
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    return value


def _sound(message: Message) -> bool:
    """Can it be dealt with and answered? A bus writes the sender down itself, and passes no header
    fields of wrong types and no serial number 0: this is for a broken one.
    """
    sender, answered = message.sender, message.reply_serial
    named = not sender or (isinstance(sender, str) and bool(is_bus_name_valid(sender)))
    return named and message.serial != 0 and (answered is None or isinstance(answered, int))


class Connection:
    """One connection to a bus.

    `closed` is a future that gets a sentence when the bus is lost (or "" after close()). `on_call`
    gets every method call; without it calls are answered with UnknownObject.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._wire = Wire(sock, self._received, self._lost)
        self._serial = 0
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._asked: dict[int, str] = {}  # whom, of those calls
        self._subscriptions: list[Subscription] = []
        self.closed: asyncio.Future[str] = self._loop.create_future()
        self.on_call: Callable[[Call], None] | None = None
        self.unique_name = ""
        self.address: BusAddress | None = None

    # -- connecting

    @classmethod
    async def connect(cls, address: BusAddress, timeout: float = 10.0) -> Connection:
        """Connects, authenticates by UID and says hello.

        Raises:
            BusError: one sentence that says what is wrong with the bus.
        """
        names = address.sockets()
        if not names:
            raise BusError(f"{BUS}.Error.BadAddress", f"{address.address!r} names no unix socket")
        reason = ""
        for name in names:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                await asyncio.wait_for(log_in(sock, name), timeout)
            except (OSError, TimeoutError, ValueError) as e:
                sock.close()
                shown = "@" + name[1:] if name.startswith("\0") else name
                why = e.strerror if isinstance(e, OSError) and e.strerror else str(e) or "no answer"
                reason = f"the {address.kind} bus at {shown} does not answer: {why}"
                continue
            except BaseException:
                sock.close()
                raise
            self = cls(sock)
            self.address = address
            self._wire.start()
            try:
                reply = await self.call(BUS, BUS_PATH, BUS, "Hello", timeout=timeout)
            except BusError as e:
                self.close()
                reason = f"the {address.kind} bus refuses us: {e.message}"
                continue
            except BaseException:
                self.close()
                raise
            self.unique_name = str(reply.body[0])
            return self
        raise BusError(f"{BUS}.Error.NoServer", reason)

    def close(self) -> None:
        """Ends the connection; calls under way fail."""
        self._lost("")

    def _lost(self, reason: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(reason)
        self._wire.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(
                    BusError(f"{BUS}.Error.Disconnected", reason or "the connection is closed")
                )
        self._pending.clear()

    # -- sending

    async def call(
        self,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: Sequence[Any] = (),
        fds: Sequence[int] = (),
        timeout: float | None = 25.0,
        interactive: bool = False,
    ) -> Reply:
        """Calls a method. `h` values in the body are indexes into `fds`, which stay the caller's.

        Raises:
            BusError: the error reply; or NoReply after `timeout` seconds, or Disconnected.
        """
        flags = MessageFlag.ALLOW_INTERACTIVE_AUTHORIZATION if interactive else MessageFlag.NONE
        message = _Message(
            destination, path, interface, member, flags=flags, signature=signature, body=list(body)
        )
        future: asyncio.Future[Message] = self._loop.create_future()
        serial = self._send(message, fds)
        self._pending[serial] = future
        self._asked[serial] = destination
        try:
            answer = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            text = f"{destination} did not answer {member} within {timeout:g} s"
            raise BusError(f"{BUS}.Error.NoReply", text) from None
        finally:
            self._pending.pop(serial, None)
            self._asked.pop(serial, None)
        received = Fds(answer.unix_fds)
        if answer.message_type is MessageType.ERROR:
            received.close()
            text = answer.body[0] if answer.body and isinstance(answer.body[0], str) else ""
            raise BusError(answer.error_name or "", text or str(answer.error_name))
        return Reply(answer.signature, answer.body, received)

    def reply(
        self, call: Call, signature: str = "", body: Sequence[Any] = (), fds: Sequence[int] = ()
    ) -> None:
        """Answers a call. `fds` are duplicated at once and stay the caller's.

        Raises:
            Exception: the body does not fit the signature; nothing was sent.
        """
        if call.message.flags & MessageFlag.NO_REPLY_EXPECTED:
            return
        self._send(
            Message(
                call.sender,
                message_type=MessageType.METHOD_RETURN,
                reply_serial=call.message.serial,
                signature=signature,
                body=list(body),
            ),
            fds,
        )

    def error(self, call: Call, name: str, text: str) -> None:
        """Answers a call with an error."""
        self._error(call.message, name, text)

    def _error(self, message: Message, name: str, text: str) -> None:
        if message.flags & MessageFlag.NO_REPLY_EXPECTED or not message.sender:
            return
        self._send(
            Message(
                message.sender,
                message_type=MessageType.ERROR,
                reply_serial=message.serial,
                error_name=name,
                signature="s",
                body=[text],
            )
        )

    def signal(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: Sequence[Any] = (),
        destination: str | None = None,
    ) -> None:
        """Sends a signal, to one receiver or to all who asked for it."""
        self._send(
            _Message(
                destination, path, interface, member, MessageType.SIGNAL,
                signature=signature, body=list(body),
            )
        )  # fmt: skip

    def _send(self, message: Any, fds: Sequence[int] = ()) -> int:
        if self.closed.done():
            raise BusError(f"{BUS}.Error.Disconnected", self.closed.result() or "closed")
        if len(fds) > MAX_FDS:  # the bus would end the connection
            raise BusError(f"{BUS}.Error.LimitsExceeded", f"{len(fds)} fds in a message")
        self._serial = self._serial % 0xFFFFFFFF + 1
        message.serial = self._serial
        message.body = _clean(message.body)
        # Only the count matters to the encoder; the duplicates travel.
        message.unix_fds = list(fds)
        data = message._marshall(negotiate_unix_fd=True)
        self._wire.send(data, fds)
        return self._serial

    # -- receiving

    def _received(self, received: Received) -> None:
        message = self._decode(received)
        if message is not None:
            self._dispatch(message)

    def _decode(self, received: Received) -> Message | None:
        problem = ""
        if received.overlong:
            problem = f"a message may have {MAX_MESSAGE} bytes"
        elif len(received.fds) > MAX_FDS:
            problem = f"a message may carry {MAX_FDS} file descriptors"
        if len(SignatureTree._cache) > 1000:  # it keeps every signature that it ever saw
            SignatureTree._cache.clear()
        message: Message | None = None
        if not problem:
            try:
                message = _Reader(io.BytesIO(received.data)).unmarshall()
            except Exception:
                problem = "the message cannot be read"
        if message is not None and _sound(message):
            message.unix_fds = received.fds
            return message
        received.close()
        # Read once more without its body, to tell the sender.
        received.data[4:8] = bytes(4)
        with contextlib.suppress(Exception):
            message = _Reader(io.BytesIO(received.data)).unmarshall()
        if message is None or not _sound(message):
            return None
        if message.message_type is MessageType.METHOD_CALL:
            self._error(message, f"{BUS}.Error.LimitsExceeded", problem)
        elif message.reply_serial in self._pending and self._answers(message):
            future = self._pending[message.reply_serial]
            if not future.done():
                future.set_exception(BusError(f"{BUS}.Error.LimitsExceeded", problem))
        return None

    def _dispatch(self, message: Message) -> None:
        kind = message.message_type
        if kind is MessageType.METHOD_CALL:
            call = Call(
                message.sender or "", message.path or "", message.interface or "",
                message.member or "", message.signature, message.body, Fds(message.unix_fds),
                bool(message.flags & MessageFlag.ALLOW_INTERACTIVE_AUTHORIZATION), message,
            )  # fmt: skip
            if self.on_call is not None:
                self.on_call(call)
            else:
                call.fds.close()
                self._error(message, f"{BUS}.Error.UnknownObject", "there are no objects here")
            return
        if kind is not MessageType.SIGNAL:
            future = self._pending.get(message.reply_serial or 0)
            # A bus may pass replies of others, too: who could send one would be whoever it likes.
            if future is not None and not future.done() and self._answers(message):
                future.set_result(message)
                return
        Fds(message.unix_fds).close()
        if kind is MessageType.SIGNAL:
            signal = Signal(
                message.sender or "", message.path or "", message.interface or "",
                message.member or "", message.body,
            )  # fmt: skip
            for subscription in list(self._subscriptions):
                if subscription.takes(signal):
                    subscription.callback(signal)

    def _answers(self, message: Message) -> bool:
        """Does the reply come from whom was asked, or from the bus (which says that it is gone)?
        Behind a well-known name may be anybody.
        """
        asked, sender = self._asked.get(message.reply_serial or 0, ""), message.sender
        return sender in (asked, BUS) or not (asked == BUS or asked.startswith(":"))

    # -- signals and names

    async def subscribe(self, callback: Callable[[Signal], None], **match: str) -> Subscription:
        """Signals that match go to `callback`. Keys: sender, path, interface, member, arg0.

        Raises:
            BusError: the bus refuses the rule.
        """
        rule = ",".join(["type='signal'", *(f"{k}='{v}'" for k, v in match.items())])
        subscription = Subscription(rule, match, callback, self.unsubscribe)
        self._subscriptions.append(subscription)
        try:
            await self.call(BUS, BUS_PATH, BUS, "AddMatch", "s", [rule])
        except BusError:
            self._subscriptions.remove(subscription)
            raise
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription; a second time is no error."""
        if subscription not in self._subscriptions:
            return
        self._subscriptions.remove(subscription)
        if not self.closed.done():
            message = Message(
                BUS, BUS_PATH, BUS, "RemoveMatch", flags=MessageFlag.NO_REPLY_EXPECTED,
                signature="s", body=[subscription.rule],
            )  # fmt: skip
            with contextlib.suppress(BusError):
                self._send(message)

    async def request_name(self, name: str) -> None:
        """Owns a well-known name; losing it later closes the connection.

        Raises:
            BusError: somebody else has it (NameTaken), or the bus does not allow it.
        """
        reply = await self.call(BUS, BUS_PATH, BUS, "RequestName", "su", [name, 4])
        if reply.body[0] not in (1, 4):
            raise BusError("NameTaken", f"the name {name} is taken on this bus")
        await self.subscribe(self._name_lost, sender=BUS, member="NameLost", arg0=name)

    def _name_lost(self, signal: Signal) -> None:
        self._lost(f"the bus took the name {signal.body[0]} away")

    async def release_name(self, name: str) -> None:
        """Gives a name back."""
        for subscription in list(self._subscriptions):
            if subscription.match.get("arg0") == name:
                self.unsubscribe(subscription)
        await self.call(BUS, BUS_PATH, BUS, "ReleaseName", "s", [name])

    async def name_owner(self, name: str) -> str | None:
        """The unique name behind a name, None when there is none."""
        try:
            return str((await self.call(BUS, BUS_PATH, BUS, "GetNameOwner", "s", [name])).body[0])
        except BusError as e:
            if e.name == f"{BUS}.Error.NameHasNoOwner":
                return None
            raise

    async def unix_user(self, name: str) -> int:
        """The UID of the process behind a name.

        Raises:
            BusError: it is gone.
        """
        reply = await self.call(BUS, BUS_PATH, BUS, "GetConnectionUnixUser", "s", [name])
        return int(reply.body[0])
