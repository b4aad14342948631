# SPDX-License-Identifier: Apache-2.0
"""Prints requirements from a pyproject.toml, a line each.

requirements.py PYPROJECT SECTION…     build-system, dependencies, or the name of an extra
"""

import sys
import tomllib
from pathlib import Path


def main(argv: list[str]) -> int:
    project = tomllib.loads(Path(argv[1]).read_text())
    for section in argv[2:]:
        if section == "build-system":
            lines = project["build-system"]["requires"]
        elif section == "dependencies":
            lines = project["project"]["dependencies"]
        else:
            lines = project["project"]["optional-dependencies"][section]
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
