# SPDX-License-Identifier: Apache-2.0
"""Video and pictures: a luma network and learned chroma filters, run in tiles over bands of a
frame.
"""
