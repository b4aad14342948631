# SPDX-License-Identifier: Apache-2.0
"""Runs Mesa's PowerVR driver and its shader compiler without the hardware: see docs/powervr.md."""
