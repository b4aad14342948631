# SPDX-License-Identifier: Apache-2.0
"""Backends: vulkan, cpu and null, one interface (engine.backends.base)."""
