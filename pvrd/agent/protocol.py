# SPDX-License-Identifier: Apache-2.0
"""The few Wayland interfaces that pvr-agent speaks, each in its version 1.

Sources: wayland.xml, xdg-shell.xml, presentation-time.xml, wlr-layer-shell-unstable-v1.xml. A row
is (name, types): the place in the list is the opcode, the types are those of wayland-scanner (i
int, u uint, s string, a array, o object, n new object, h file descriptor). Rows that are never used
keep their places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Row = tuple[str, str]


@dataclass(frozen=True)
class Interface:
    """One interface: what may be asked of it and what it tells."""

    name: str
    requests: tuple[Row, ...] = ()
    events: tuple[Row, ...] = ()


DISPLAY = Interface(
    "wl_display",
    (("sync", "n"), ("get_registry", "n")),
    (("error", "ous"), ("delete_id", "u")),
)
REGISTRY = Interface(
    "wl_registry", (("bind", "usun"),), (("global", "usu"), ("global_remove", "u"))
)
CALLBACK = Interface("wl_callback", (), (("done", "u"),))
COMPOSITOR = Interface("wl_compositor", (("create_surface", "n"), ("create_region", "n")))
SHM = Interface("wl_shm", (("create_pool", "nhi"),), (("format", "u"),))
SHM_POOL = Interface("wl_shm_pool", (("create_buffer", "niiiiu"), ("destroy", "")))
BUFFER = Interface("wl_buffer", (("destroy", ""),), (("release", ""),))
REGION = Interface("wl_region", (("destroy", ""),))
SURFACE = Interface(
    "wl_surface",
    (
        ("destroy", ""), ("attach", "oii"), ("damage", "iiii"), ("frame", "n"),
        ("set_opaque_region", "o"), ("set_input_region", "o"), ("commit", ""),
    ),
    (("enter", "o"), ("leave", "o")),
)  # fmt: skip
WM_BASE = Interface(
    "xdg_wm_base",
    (("destroy", ""), ("create_positioner", "n"), ("get_xdg_surface", "no"), ("pong", "u")),
    (("ping", "u"),),
)
XDG_SURFACE = Interface(
    "xdg_surface",
    (
        ("destroy", ""), ("get_toplevel", "n"), ("get_popup", "noo"),
        ("set_window_geometry", "iiii"), ("ack_configure", "u"),
    ),
    (("configure", "u"),),
)  # fmt: skip
TOPLEVEL = Interface(
    "xdg_toplevel",
    (
        ("destroy", ""), ("set_parent", "o"), ("set_title", "s"), ("set_app_id", "s"),
        ("show_window_menu", "ouii"), ("move", "ou"), ("resize", "ouu"), ("set_max_size", "ii"),
        ("set_min_size", "ii"), ("set_maximized", ""), ("unset_maximized", ""),
        ("set_fullscreen", "o"), ("unset_fullscreen", ""), ("set_minimized", ""),
    ),
    (("configure", "iia"), ("close", "")),
)  # fmt: skip
LAYER_SHELL = Interface("zwlr_layer_shell_v1", (("get_layer_surface", "noous"),))
LAYER_SURFACE = Interface(
    "zwlr_layer_surface_v1",
    (
        ("set_size", "uu"), ("set_anchor", "u"), ("set_exclusive_zone", "i"),
        ("set_margin", "iiii"), ("set_keyboard_interactivity", "u"), ("get_popup", "o"),
        ("ack_configure", "u"), ("destroy", ""),
    ),
    (("configure", "uuu"), ("closed", "")),
)  # fmt: skip
PRESENTATION = Interface(
    "wp_presentation", (("destroy", ""), ("feedback", "on")), (("clock_id", "u"),)
)
FEEDBACK = Interface(
    "wp_presentation_feedback",
    (),
    (("sync_output", "o"), ("presented", "uuuuuuu"), ("discarded", "")),
)

# What is bound from the registry, by the name that stands there.
GLOBALS: Mapping[str, Interface] = {
    interface.name: interface for interface in (COMPOSITOR, SHM, WM_BASE, LAYER_SHELL, PRESENTATION)
}
