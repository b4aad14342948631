# SPDX-License-Identifier: Apache-2.0
"""Measured claims: `python -m benchmarks.NAME` prints our figure, the peer's of the same run, and the ratio."""
