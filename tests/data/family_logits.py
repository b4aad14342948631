# SPDX-License-Identifier: Apache-2.0
"""Writes family_logits.json: what transformers answers for the models of
tests/engine/family_models.py.

Needs torch (its CPU build will do), transformers and gguf; from the project's root:

    PYTHONPATH=. python tests/data/family_logits.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests.engine.family_models import CASES, IDS, write_folder

OUT = Path(__file__).with_suffix(".json")


def main() -> int:
    """Logits after the last of IDS in float32, rounded to six digits; 0."""
    found: dict[str, list[float]] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), case)
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            wrong = {k: v for k, v in report.items() if v}
            if wrong:
                print(f"{name}: {wrong}", file=sys.stderr)
                return 1
            with torch.no_grad():
                logits = model(torch.tensor([IDS])).logits[0, -1]
        found[name] = [float(f"{v:.6g}") for v in logits.tolist()]
        print(name, found[name][:4])
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in found.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
