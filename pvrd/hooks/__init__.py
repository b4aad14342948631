# SPDX-License-Identifier: Apache-2.0
"""Where cameras and players meet pvrd: clients of the daemon, nothing of the engine."""
