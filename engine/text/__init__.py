# SPDX-License-Identifier: Apache-2.0
"""Text models: tokenizer, chat template, sampler, the model on a device, generation."""
