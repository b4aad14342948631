# SPDX-License-Identifier: Apache-2.0
"""Readers of model files: each gives a Graph over weights that stay in the file."""
