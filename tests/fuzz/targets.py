# SPDX-License-Identifier: Apache-2.0
"""What is fuzzed: each reader of what strangers write, with seeds that it accepts.

A target gets bytes and returns, or raises an error of the closed list that users read. Anything
else is a finding: another exception, a crash, more memory or time than the runner allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz import callers, compiled, models, sessions


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


TARGETS: dict[str, Target] = {
    "gguf": Target(models.gguf, lambda: [models.tiny()]),
    "safetensors": Target(models.safetensors, models.safetensors_seeds),
    "onnx": Target(models.onnx, models.onnx_seeds),
    "onnx_text": Target(models.onnx_text, models.onnx_text_seeds),
    "ncnn": Target(models.ncnn, models.ncnn_seeds),
    "picture": Target(models.picture, models.picture_seeds),
    "pvrm": Target(compiled.pvrm, compiled.pvrm_seeds),
    "pvrm_text": Target(compiled.pvrm_text, compiled.pvrm_text_seeds),
    "pvrm_video": Target(compiled.pvrm_video, compiled.pvrm_video_seeds),
    "pvrm_net": Target(compiled.pvrm_net, compiled.pvrm_net_seeds),
    "template": Target(callers.template, callers.template_seeds),
    "schema": Target(callers.schema, callers.schema_seeds),
    "journal": Target(callers.journal, callers.journal_seeds),
    "journal_header": Target(
        callers.journal_header,
        lambda: [s.partition(b"\n")[0].rstrip() for s in callers.journal_seeds()],
    ),
    "y4m": Target(callers.y4m, callers.y4m_seeds),
    "slots": Target(callers.slots, callers.slots_seeds),
    "stream": Target(callers.stream, callers.stream_seeds),
    "worker": Target(callers.worker, callers.worker_seeds),
    "bus": Target(callers.bus, callers.bus_seeds),
    "config": Target(callers.config, callers.config_seeds),
    "text_session": Target(sessions.text, sessions.text_seeds),
    "video_session": Target(sessions.video, sessions.video_seeds),
}
