# SPDX-License-Identifier: Apache-2.0
"""The y4m parser and writer: what goes through, what is refused in one sentence."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvrd import y4m


@contextmanager
def piped(data: bytes) -> Iterator[int]:
    """The read end of a pipe that a thread fills with `data`."""
    reading, writing = os.pipe()

    def fill() -> None:
        with open(writing, "wb", buffering=0) as stream, suppress(BrokenPipeError):
            y4m.write_all(stream.fileno(), [memoryview(data)])

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield reading
    finally:
        os.close(reading)
        thread.join()


def frames_of(data: bytes) -> tuple[y4m.Header, list[bytes]]:
    with piped(data) as fd:
        reader = y4m.Reader(fd)
        header = reader.header()
        found = []
        memory = bytearray(header.frame_bytes)
        while reader.read_frame([memoryview(memory)]):
            found.append(bytes(memory))
        return header, found


sides = st.integers(1, 40)
words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
headers = st.builds(
    y4m.Header,
    sides,
    sides,
    st.sampled_from(["25:1", "30000:1001", "0:0"]),
    st.sampled_from(["", "1:1", "0:0"]),
    st.sampled_from(["", "p", "?"]),
    st.sampled_from(["", "420", "420jpeg", "420mpeg2", "420paldv", "mono"]),
    st.lists(words, max_size=3).map(tuple),
)


@given(headers)
def test_a_header_survives_writing_and_reading(header: y4m.Header) -> None:
    assert y4m.parse_header(header.line()) == header


@given(headers, st.integers(0, 3), st.data())
def test_frames_survive(header: y4m.Header, count: int, data: st.DataObject) -> None:
    frames = [
        data.draw(st.binary(min_size=header.frame_bytes, max_size=header.frame_bytes))
        for _ in range(count)
    ]
    stream = header.line() + b"".join(b"FRAME\n" + frame for frame in frames)
    assert frames_of(stream) == (header, frames)


@given(st.binary(max_size=200))
def test_nonsense_is_a_sentence(data: bytes) -> None:
    with pytest.raises(y4m.Y4mError, match=r"^[A-Z].*\.$"):
        frames_of(data)


@given(headers, st.data())
def test_a_truncated_stream_is_a_sentence(header: y4m.Header, data: st.DataObject) -> None:
    whole = header.line() + b"FRAME\n" + bytes(header.frame_bytes)
    cut = data.draw(st.integers(0, len(whole) - 1).filter(lambda at: at != len(header.line())))
    with pytest.raises(y4m.Y4mError, match=r"^[A-Z].*\.$"):
        frames_of(whole[:cut])


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b"YUV4MPEG2 W4 H4 It", "interlaced"),
        (b"YUV4MPEG2 W4 H4 Ib C420jpeg", "interlaced"),
        (b"YUV4MPEG2 W4 H4 Im", "interlaced"),
        (b"YUV4MPEG2 W4 H4 C422", "'422'"),
        (b"YUV4MPEG2 W4 H4 C420p11", "'420p11'"),
        (b"YUV4MPEG2 W4 H4 C444alpha", "'444alpha'"),
        (b"YUV4MPEG2 W4 H4 Cmono17", "'mono17'"),
        (b"YUV4MPEG2 H4", "lacks the width"),
        (b"YUV4MPEG2 W4", "lacks the height"),
        (b"YUV4MPEG2 W0 H4", "W0"),
        (b"YUV4MPEG2 W-4 H4", "W-4"),
        (b"YUV4MPEG2 W99999999999999999999 H4", "W999"),
        (b"YUV4MPEG2 W4 H4 W5", "twice"),
        (b"YUV4MPEG2 W4 H4 F25", "frame rate"),
        (b"YUV4MPEG2 W4 H4 F25:x", "frame rate"),
        (b"YUV4MPEG2 W4 H4 A1", "aspect"),
        (b"YUV4MPEG3 W4 H4", "does not begin"),
        (b"RIFF....AVI ", "does not begin"),
    ],
)
def test_refused_headers(line: bytes, part: str) -> None:
    with pytest.raises(y4m.Y4mError) as caught:
        y4m.parse_header(line)
    assert part in str(caught.value)


def test_what_is_not_understood_goes_through() -> None:
    line = b"YUV4MPEG2 W3 H5 F30000:1001 Ip A10:11 C420mpeg2 XYSCSS=420MPEG2 XCOLORRANGE=FULL\n"
    header = y4m.parse_header(line)
    assert header.line() == line
    assert header.sized(6, 10).line() == line.replace(b"W3 H5", b"W6 H10")
    assert (header.siting, header.full_range, header.planes) == (
        "left",
        True,
        ((3, 5), (2, 3), (2, 3)),
    )


@pytest.mark.parametrize(
    ("colour", "siting"),
    [("", "centre"), ("420", "centre"), ("420jpeg", "centre"), ("420mpeg2", "left")],
)
def test_siting(colour: str, siting: str) -> None:
    assert y4m.Header(2, 2, colour=colour).siting == siting


def test_frame_parameters_are_kept_and_interlaced_frames_refused() -> None:
    head = b"YUV4MPEG2 W2 H2 Cmono\n"
    with piped(head + b"FRAME Ippp Xa=b\n0123FRAME Itip\n0123") as fd:
        reader = y4m.Reader(fd)
        memory = bytearray(reader.header().frame_bytes)
        assert reader.read_frame([memoryview(memory)])
        assert reader.params == b" Ippp Xa=b"
        with pytest.raises(y4m.Y4mError, match="Frame 1 is interlaced"):
            reader.read_frame([memoryview(memory)])


@pytest.mark.parametrize("mark", [b"FRAMES\n", b"GARBAGE", b"frame\n", b"FRAME" + b"x" * 5000])
def test_damaged_frame_marks(mark: bytes) -> None:
    with pytest.raises(y4m.Y4mError, match="no frame mark"):
        frames_of(b"YUV4MPEG2 W2 H2 Cmono\n" + mark)


def test_endless_lines_are_refused() -> None:
    with pytest.raises(y4m.Y4mError, match="longer than"):
        frames_of(b"YUV4MPEG2 W2 H2 X" + b"x" * 9000)
    with pytest.raises(y4m.Y4mError, match="longer than"):
        frames_of(b"YUV4MPEG2 W2 H2 Cmono\nFRAME X" + b"x" * 9000)


@given(sides, sides, st.integers(0, 7), st.integers(0, 5))
def test_planes_with_gaps_between_rows(width: int, height: int, gap: int, offset: int) -> None:
    stride = width + gap
    memory = memoryview(bytearray(offset + stride * height))
    plane = bytes(index % 251 + 1 for index in range(width * height))
    with piped(y4m.Header(width, height, colour="mono").line() + b"FRAME\n" + plane) as fd:
        reader = y4m.Reader(fd)
        reader.header()
        assert reader.read_frame(y4m.plane_views(memory, offset, stride, width, height))
    out, into = os.pipe()
    y4m.write_all(into, y4m.plane_views(memory, offset, stride, width, height))
    os.close(into)
    with open(out, "rb") as stream:
        assert stream.read() == plane
    assert sum(map(bool, memory)) == width * height  # nothing was written into the gaps


def test_more_rows_than_a_call_takes() -> None:
    rows = [memoryview(bytearray(2)) for _ in range(5000)]
    data = os.urandom(10000)
    with piped(b"YUV4MPEG2 W2 H5000 Cmono\nFRAME\n" + data) as fd:
        reader = y4m.Reader(fd)
        reader.header()
        assert reader.read_frame(rows)
    assert b"".join(rows) == data
    out = io.BytesIO()
    with open(os.memfd_create("out"), "w+b", buffering=0) as file:
        y4m.write_all(file.fileno(), rows)
        file.seek(0)
        out.write(file.read())
    assert out.getvalue() == data


def test_bytes_seen_before_are_part_of_the_header() -> None:
    with piped(b"MPEG2 W2 H2\n") as fd:
        assert y4m.Reader(fd).header(b"YUV4").width == 2
