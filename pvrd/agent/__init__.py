# SPDX-License-Identifier: Apache-2.0
"""pvr-agent: a small program of each user session that tells pvrd how the compositor fares."""
