# SPDX-License-Identifier: Apache-2.0
"""pvrd, the control plane: D-Bus, supervision, sessions. Imports neither numpy nor vulkan."""

__version__ = "0.1.0"
