# SPDX-License-Identifier: Apache-2.0
"""The bill of materials names what pvrd asks for, with the versions that are there."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_bill_of_materials() -> None:
    said = subprocess.run(
        [sys.executable, ROOT / "tools/sbom"], capture_output=True, text=True, check=True
    )
    bill = json.loads(said.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    refs = [c["bom-ref"] for c in bill["components"]]
    assert len(refs) == len(set(refs))
    assert set(bill["dependencies"][0]["dependsOn"]) == set(refs)
    found = {c["name"].lower(): c.get("version") for c in bill["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        name = re.split(r"[^A-Za-z0-9._-]", line)[0]
        if ";" not in line:
            assert found[name] == importlib.metadata.version(name)
    assert "markupsafe" in found, "what Jinja needs in turn"
    models = [c for c in bill["components"] if c["type"] == "machine-learning-model"]
    assert len(models) == len(list((ROOT / "engine/video/models").glob("*.pvrm")))
    again = subprocess.run(
        [sys.executable, ROOT / "tools/sbom"], capture_output=True, text=True, check=True
    )
    assert again.stdout == said.stdout


def test_what_is_not_installed_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[]'\n")
    python.chmod(0o755)
    said = subprocess.run(
        [sys.executable, ROOT / "tools/sbom", "--python", python],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 1
    assert "not installed" in said.stderr
