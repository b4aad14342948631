# SPDX-License-Identifier: Apache-2.0
"""YUV4MPEG2 streams, frame by frame and without copies: planes are read into and written from the
caller's memory.

The format is that of mjpegtools' yuv4mpeg(5): a header line, then for each frame a line `FRAME` and
the planes Y, U, V without gaps. Taken are 4:2:0 (every siting), 4:4:4 and mono with 8 to 16 bits
(two bytes a sample above 8, little-endian, as ffmpeg has it), only progressive ones. What this
program does not know (X tags, aspect, frame rate) goes through as it came.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAGIC = b"YUV4MPEG2"
MAX_LINE = 4096
MAX_SIDE = 32768  # beyond that a header is nonsense, not a picture
_IOV_MAX = 1024
# 420paldv has Cb and Cr on alternate lines; across it is sited like mpeg2, and that is what pvrd
# can be told.
_SITINGS = {"420": "centre", "420jpeg": "centre", "420mpeg2": "left", "420paldv": "left"}
# What stands behind C: the kind of planes, then the bits where they are more than 8.
_COLOUR = re.compile(r"(?:(420|444)(?:p(9|10|12|14|16))?|(mono)(9|10|12|14|16)?)", re.ASCII)


class Y4mError(Exception):
    """The stream is damaged or not of a kind that pvrd takes; the message is one plain sentence."""


@dataclass(frozen=True)
class Header:
    """The stream's header: sizes in pixels, all other parameters as the text that came."""

    width: int
    height: int
    rate: str = "25:1"
    aspect: str = ""
    interlace: str = ""
    colour: str = ""
    extras: tuple[str, ...] = ()

    @property
    def pixel(self) -> str:
        """The kind of planes: i420, i444 or gray."""
        kind = self.colour[:4]
        return "gray" if kind == "mono" else "i444" if kind.startswith("444") else "i420"

    @property
    def mono(self) -> bool:
        """Is there luma alone?"""
        return self.pixel == "gray"

    @property
    def bits(self) -> int:
        """Bits of a sample, 8 to 16; above 8 it takes two bytes, of which these are the low
        ones."""
        found = _COLOUR.fullmatch(self.colour)
        return int((found and (found[2] or found[4])) or 8)

    @property
    def siting(self) -> str:
        """Where a chroma sample lies across its two luma samples: centre or left."""
        return _SITINGS.get(self.colour, "centre" if self.bits == 8 else "left")

    @property
    def full_range(self) -> bool:
        """Does the XCOLORRANGE tag say that samples use 0..255?"""
        return "COLORRANGE=FULL" in self.extras

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each plane in the stream, in samples."""
        whole = (self.width, self.height)
        half = ((self.width + 1) // 2, (self.height + 1) // 2)
        return {"gray": (whole,), "i420": (whole, half, half), "i444": (whole,) * 3}[self.pixel]

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame's planes."""
        return sum(w * h for w, h in self.planes) * (1 if self.bits == 8 else 2)

    def sized(self, width: int, height: int) -> Header:
        """The header of the enlarged stream: another size, everything else kept."""
        return replace(self, width=width, height=height)

    def line(self) -> bytes:
        """The header as it is written, with its newline."""
        words = ["YUV4MPEG2", f"W{self.width}", f"H{self.height}", f"F{self.rate}"]
        for letter, value in (("I", self.interlace), ("A", self.aspect), ("C", self.colour)):
            if value:
                words.append(letter + value)
        words += ["X" + extra for extra in self.extras]
        return " ".join(words).encode("latin-1") + b"\n"


def parse_header(line: bytes) -> Header:
    """Reads the first line of a stream, with or without its newline.

    Raises:
        Y4mError: it is no y4m header, or one of a stream that pvrd does not take.
    """
    words = line.rstrip(b"\n").decode("latin-1").split(" ")
    if words[0] != "YUV4MPEG2":
        raise Y4mError("The input is not a y4m stream: it does not begin with YUV4MPEG2.")
    fields: dict[str, str] = {}
    extras = []
    for word in words[1:]:
        if not word:
            continue
        if word[0] == "X":
            extras.append(word[1:])
        elif word[0] in fields:
            raise Y4mError(f"The y4m header gives the parameter {word[0]} twice.")
        else:
            fields[word[0]] = word[1:]
    header = Header(
        _side(fields, "W"),
        _side(fields, "H"),
        _ratio(fields.get("F", "25:1"), "frame rate"),
        _ratio(fields.get("A", ""), "aspect"),
        fields.get("I", ""),
        fields.get("C", ""),
        tuple(extras),
    )
    if header.interlace not in ("", "p", "?"):
        raise Y4mError(
            "The clip is interlaced; deinterlace it first (ffmpeg: -vf yadif), "
            "pvrd takes progressive video."
        )
    if header.colour not in ("", *_SITINGS) and not _COLOUR.fullmatch(header.colour):
        raise Y4mError(
            f"The clip has the pixel format {header.colour!r}; pvrd takes 4:2:0, 4:4:4 and mono "
            "(ffmpeg: -pix_fmt yuv420p)."
        )
    return header


def _side(fields: dict[str, str], letter: str) -> int:
    text = fields.get(letter, "")
    if not text:
        raise Y4mError(f"The y4m header lacks the {'width' if letter == 'W' else 'height'}.")
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MAX_SIDE):
        raise Y4mError(f"The y4m header gives a size that cannot be: {letter}{text[:20]}.")
    return int(text)


def _ratio(text: str, what: str) -> str:
    if not text:
        return text
    left, _, right = text.partition(":")
    if not all(part.isascii() and part.isdigit() and len(part) <= 12 for part in (left, right)):
        raise Y4mError(f"The y4m header gives a {what} that cannot be: {text[:20]!r}.")
    return text


class Gather:
    """A list of memory pieces that is filled or emptied from front to back by readv and writev."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._index = 0
        self._offset = 0

    @property
    def done(self) -> bool:
        """Is nothing left?"""
        return self._index == len(self._views)

    def _rest(self) -> list[memoryview]:
        rest = self._views[self._index : self._index + _IOV_MAX]
        if self._offset:
            rest[0] = rest[0][self._offset :]
        return rest

    def _advance(self, count: int) -> None:
        count += self._offset
        while self._index < len(self._views) and count >= len(self._views[self._index]):
            count -= len(self._views[self._index])
            self._index += 1
        self._offset = count

    def read(self, fd: int) -> int:
        """One readv; returns the bytes read, 0 at the end of the file."""
        count = os.readv(fd, self._rest())
        self._advance(count)
        return count

    def write(self, fd: int) -> int:
        """One writev; returns the bytes written."""
        count = os.writev(fd, self._rest())
        self._advance(count)
        return count


class Reader:
    """Takes a stream apart, at most one blocking read a step, so that the caller can poll in
    between."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._line = bytearray()
        self._target: Gather | None = None
        self.params = b""  # what stood behind the word FRAME, with its leading blank
        self.frames = 0

    def fileno(self) -> int:
        """The descriptor, to poll before step()."""
        return self._fd

    def header(self, seen: bytes = b"") -> Header:
        """Reads the stream's header, blocking; `seen` is what was read of it before, to tell the
        format.

        Raises:
            Y4mError: the stream is empty, ends within the header, or is none that pvrd takes.
        """
        line = bytearray(seen)
        while not line.endswith(b"\n"):
            piece = os.read(self._fd, 1)
            if not piece and not line:
                raise Y4mError("The input is empty.")
            if not piece:
                raise Y4mError("The input ends within the y4m header.")
            line += piece
            if not MAGIC.startswith(line[: len(MAGIC)]):
                raise Y4mError("The input is not a y4m stream: it does not begin with YUV4MPEG2.")
            if len(line) > MAX_LINE:
                raise Y4mError(f"The y4m header is longer than {MAX_LINE} bytes.")
        return parse_header(bytes(line))

    def begin(self, target: Sequence[memoryview]) -> None:
        """The memory for the next frame: pieces in the order of the stream, as many bytes as a
        frame has."""
        self._target = Gather(target)
        self._line.clear()
        self.params = b""

    def step(self) -> bool | None:
        """One read. True: the frame is complete; False: call again; None: the stream ended before
        this frame.

        Raises:
            Y4mError: the stream ends within the frame, or something else than a frame follows.
        """
        assert self._target is not None
        if not self._line.endswith(b"\n"):
            # Never read past the line's end: what follows goes straight into the target.
            piece = os.read(self._fd, 1 if len(self._line) >= 6 else 6 - len(self._line))
            if not piece and not self._line:
                return None
            if not piece:
                raise Y4mError(f"The clip ends within the mark of frame {self.frames}.")
            self._line += piece
            self._check_line()
            return False
        if self._target.read(self._fd) == 0:
            raise Y4mError(f"The clip ends within frame {self.frames}.")
        if not self._target.done:
            return False
        self.frames += 1
        return True

    def _check_line(self) -> None:
        line = self._line
        if not b"FRAME".startswith(line[:5]) or (len(line) > 5 and line[5:6] not in b" \n"):
            raise Y4mError(f"The clip is damaged: no frame mark before frame {self.frames}.")
        if len(line) > MAX_LINE:
            raise Y4mError(f"The mark of frame {self.frames} is longer than {MAX_LINE} bytes.")
        if not line.endswith(b"\n"):
            return
        self.params = bytes(line[5:-1])
        for word in self.params.split():
            if word[:1] == b"I" and word[2:3] == b"i":
                raise Y4mError(f"Frame {self.frames} is interlaced; pvrd takes progressive video.")

    def read_frame(self, target: Sequence[memoryview]) -> bool:
        """Reads one whole frame, blocking; False at the end of the stream. Raises as step()."""
        self.begin(target)
        while (got := self.step()) is False:
            pass
        return bool(got)


def write_all(fd: int, views: Sequence[memoryview]) -> None:
    """Writes all pieces, waiting where the descriptor does not block.

    Raises:
        OSError: as write(2), BrokenPipeError and ENOSPC among them.
    """
    rest = Gather(views)
    while not rest.done:
        try:
            rest.write(fd)
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def plane_views(
    memory: memoryview, offset: int, stride: int, width: int, height: int
) -> list[memoryview]:
    """The pieces of one plane: a single one where rows lie without gaps, else one a row."""
    if stride == width or height == 1:
        return [memory[offset : offset + width * height]]
    return [
        memory[start : start + width] for start in range(offset, offset + stride * height, stride)
    ]
