# SPDX-License-Identifier: Apache-2.0
"""The data plane: models, Graphs, Programs and the backends that run them; no D-Bus."""
