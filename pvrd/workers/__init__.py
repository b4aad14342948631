# SPDX-License-Identifier: Apache-2.0
"""The worker program: owns one device, runs slices, answers pvrd over one socket."""
