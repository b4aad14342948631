# SPDX-License-Identifier: Apache-2.0
"""pvrctl: what a person touches. One command a file; each has `arguments(parser)` and `run(args) ->
exit code`."""
