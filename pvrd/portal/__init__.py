# SPDX-License-Identifier: Apache-2.0
"""A backend for the language interface that was proposed for xdg-desktop-portal
(https://github.com/flatpak/xdg-desktop-portal/pull/2112), a client of pvrd. docs/http.md."""
