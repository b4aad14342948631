#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Asks pvrd a question over D-Bus with GLib's Gio alone, as a GTK application would.

    text_gio.py [--bus ADDRESS] [--model NAME] [-n TOKENS] QUESTION

Needs PyGObject (Debian: python3-gi). The method answers at once with a pipe of JSON lines.
"""

import argparse
import json
import os
import sys

from gi.repository import Gio, GLib

NAME = "org.pvrd.Pvrd1"
PATH = "/org/pvrd/Pvrd1"


def connect(address):
    if address and address not in ("system", "user"):
        flags = Gio.DBusConnectionFlags
        return Gio.DBusConnection.new_for_address_sync(
            address, flags.AUTHENTICATION_CLIENT | flags.MESSAGE_BUS_CONNECTION, None, None
        )
    return Gio.bus_get_sync(Gio.BusType.SESSION if address == "user" else Gio.BusType.SYSTEM, None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bus", default=os.environ.get("PVRD_BUS", "system"))
    parser.add_argument("--model")
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("question")
    args = parser.parse_args()
    bus = connect(args.bus)

    options = {"model": GLib.Variant("s", args.model)} if args.model else {}
    session = bus.call_sync(
        NAME, PATH, NAME + ".Manager", "OpenText", GLib.Variant("(a{sv})", (options,)),
        GLib.VariantType("(o)"), Gio.DBusCallFlags.NONE, -1, None,
    ).unpack()[0]  # fmt: skip

    messages = [{"role": "user", "content": args.question}]
    options = {"max_tokens": GLib.Variant("u", args.n), "temperature": GLib.Variant("d", 0.0)}
    # The reply holds an index into the list of descriptors that came with it.
    reply, fds = bus.call_with_unix_fd_list_sync(
        NAME, session, NAME + ".TextSession", "Chat",
        GLib.Variant("(aa{ss}a{sv})", (messages, options)),
        GLib.VariantType("(h)"), Gio.DBusCallFlags.NONE, -1, None, None,
    )  # fmt: skip
    status = 1
    with os.fdopen(fds.get(reply.unpack()[0]), encoding="utf-8") as stream:
        for line in stream:
            event = json.loads(line)
            if event["type"] in ("token", "end"):
                print(event["text"], end="", flush=True)
            if event["type"] == "end":
                status = 0
            elif event["type"] == "error":
                print(f"{event['error']}: {event['message']}", file=sys.stderr)
    print()
    bus.call_sync(
        NAME, session, NAME + ".TextSession", "Close", None, None, Gio.DBusCallFlags.NONE, -1, None
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
