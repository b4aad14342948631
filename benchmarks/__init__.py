# SPDX-License-Identifier: Apache-2.0
"""Measured claims: `python -m benchmarks.NAME` prints our figure, the peer's, and the ratio."""
