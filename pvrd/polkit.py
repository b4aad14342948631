# SPDX-License-Identifier: Apache-2.0
"""Who may do what needs permission: polkit on the system bus, the own UID on any other."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Sequence

from pvrd.bus import BusAddress, BusError, Connection
from pvrd.bus_values import V
from pvrd.errors import NotAuthorized

PRIORITY = "org.pvrd.Pvrd1.high-priority"
MODELS = "org.pvrd.Pvrd1.manage-models"
HOLD = "org.pvrd.Pvrd1.hold"
CONFIGURE = "org.pvrd.Pvrd1.configure"
INSPECT = "org.pvrd.Pvrd1.inspect"

_SERVICE = "org.freedesktop.PolicyKit1"
_PATH = "/org/freedesktop/PolicyKit1/Authority"
_INTERFACE = "org.freedesktop.PolicyKit1.Authority"
_QUIET_S = 15.0

# What access.accounts admits: to the GPU ahead of others, not to what all users share.
_ADMITTED = (PRIORITY, HOLD)
_DIALOG_S = 300.0


class Polkit:
    """Decides about callers of one bus."""

    def __init__(
        self,
        connection: Connection,
        address: BusAddress,
        accounts: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        """`accounts`: names or UIDs of service accounts, which have no session that polkit could
        see as active (access.accounts).
        """
        self._connection = connection
        self._accounts = accounts
        self._system = address.kind == "system"

    @property
    def asks(self) -> bool:
        """True when polkit decides, False when the own UID is enough."""
        return self._system

    async def available(self) -> bool:
        """Does polkit answer, or could it be started? True where it is not asked."""
        if not self._system:
            return True
        try:
            reply = await self._connection.call(
                _SERVICE, _PATH, "org.freedesktop.DBus.Peer", "Ping", timeout=2.0
            )
        except BusError:
            return False
        reply.close()
        return True

    async def check(self, sender: str, uid: int, action: str, interactive: bool = False) -> None:
        """Lets an allowed caller pass.

        Args:
            interactive: polkit may show the user a dialog; that can take minutes.

        Raises:
            NotAuthorized: denied, or there is no polkit to ask.
        """
        if not self._system:
            if uid == os.getuid():
                return
            raise NotAuthorized(f"only the user who runs pvrd may do this ({action})")
        if action in _ADMITTED and self._admitted(uid):
            return
        try:
            reply = await self._connection.call(
                _SERVICE, _PATH, _INTERFACE, "CheckAuthorization", "(sa{sv})sa{ss}us",
                [["system-bus-name", {"name": V("s", sender)}], action, {}, int(interactive), ""],
                timeout=_DIALOG_S if interactive else _QUIET_S,
            )  # fmt: skip
        except BusError as e:
            raise NotAuthorized(f"polkit cannot be asked about {action}: {e.message}") from None
        allowed, challenge, _ = reply.body[0]
        reply.close()
        if not allowed:
            hint = "; an administrator may allow it" if challenge else ""
            raise NotAuthorized(f"polkit does not allow {action}{hint}")

    def _admitted(self, uid: int) -> bool:
        return any(_uid_of(account) == uid for account in self._accounts())

    def unknown_accounts(self) -> list[str]:
        """Those of access.accounts that this machine does not know."""
        return [account for account in self._accounts() if _uid_of(account) is None]


def _uid_of(account: str) -> int | None:
    """Of a name or a UID; None: there is no such account."""
    if account.isdecimal() and account.isascii():
        return int(account)
    try:
        return pwd.getpwnam(account).pw_uid
    except (KeyError, ValueError):
        return None
