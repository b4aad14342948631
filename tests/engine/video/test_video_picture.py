# SPDX-License-Identifier: Apache-2.0
"""Pictures from file to file: every kind of pixel, what has to stay with them, damaged files."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import png
import pytest
from PIL import Image, ImageCms

from engine import memory
from engine.backends.base import Backend
from engine.backends.null import NullBackend
from engine.errors import DeviceLost, InvalidArgument, OutOfMemory
from engine.video import picture_files
from engine.video.network import VideoModel
from engine.video.picture import PictureJob
from tests.engine.video.conftest import FAST, psnr, scene

Array = npt.NDArray[Any]
W, H = 37, 26


def rgb(seed: int = 0) -> Array:
    """[H, W, 3] uint8."""
    planes = [scene(H, W, seed + i) for i in range(3)]
    return np.round(np.stack(planes, 2)).astype(np.uint8)


def png_bytes(image: Image.Image, **extra: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", **extra)
    return out.getvalue()


def deep_png(pixels: Array, **extra: Any) -> bytes:
    """A 16-bit PNG [h, w, 1 to 4]."""
    out = io.BytesIO()
    h, w, c = pixels.shape
    writer = png.Writer(w, h, greyscale=c < 3, alpha=c in (2, 4), bitdepth=16, **extra)
    writer.write(out, pixels.reshape(h, -1).tolist())
    return out.getvalue()


def run(backend: Backend, model: VideoModel, data: bytes, **settings: Any) -> PictureJob:
    job = PictureJob(backend, [model], data, settings)
    while not job.step():
        done, total = job.progress
        assert done <= total or total == 0
    assert job.progress[0] == job.progress[1] > 0
    assert job.info["bytes"] == len(job.encoded())
    assert job.tiles_fallback == 0
    return job


def finish(job: PictureJob) -> None:
    while not job.step():
        pass


def opened(job: PictureJob) -> Image.Image:
    image = Image.open(io.BytesIO(job.encoded()))
    image.load()
    assert image.size == (job.width, job.height)
    return image


def doubled(a: Array) -> Array:
    return a.repeat(2, 0).repeat(2, 1)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("RGB", "RGB"), ("RGBA", "RGBA"), ("L", "L"), ("LA", "LA"), ("P", "RGB"), ("1", "L")],
)
def test_kinds_of_png(cpu_backend: Backend, model: VideoModel, mode: str, wanted: str) -> None:
    source = Image.fromarray(rgb())
    if "A" in mode:
        source.putalpha(Image.fromarray(np.tile(np.arange(W, dtype=np.uint8) * 6, (H, 1))))
    source = source.convert(mode)
    out = opened(run(cpu_backend, model, png_bytes(source)))
    assert out.mode == wanted
    before = np.asarray(source.convert(wanted)).astype(float)
    after = np.asarray(out).astype(float)
    assert np.abs(after.mean((0, 1)) - before.mean((0, 1))).max() < 3
    if mode in ("RGB", "LA"):
        assert psnr(after, doubled(before)) > 20
    if "A" in mode:
        # Alpha is a ramp: it stays one, and is not sharpened.
        assert np.abs(after[10, 4:-4, -1] - (np.arange(4, 2 * W - 4) * 3 - 1.5)).max() <= 1


def test_palette_with_transparency(cpu_backend: Backend, model: VideoModel) -> None:
    source = Image.fromarray(rgb()).quantize(16)
    index = int(np.asarray(source)[0, 0])
    out = opened(run(cpu_backend, model, png_bytes(source, transparency=index)))
    assert out.mode == "RGBA"
    assert np.asarray(out)[0, 0, 3] == 0


def test_transparent_colour(cpu_backend: Backend, model: VideoModel) -> None:
    pixels = rgb()
    pixels[:, :10] = 1, 2, 3
    data = png_bytes(Image.fromarray(pixels), transparency=(1, 2, 3))
    alpha = np.asarray(opened(run(cpu_backend, model, data)))[:, :, 3]
    assert (alpha[:, :12] == 0).all()
    assert (alpha[:, 30:] == 255).all()
    gray = png_bytes(Image.fromarray(np.full((4, 4), 9, np.uint8)), transparency=9)
    assert opened(run(cpu_backend, model, gray)).mode == "LA"


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_16_bit_png(cpu_backend: Backend, model: VideoModel, channels: int) -> None:
    base = np.stack([scene(H, W, i) for i in range(channels)], 2)
    pixels = np.round(base * 257).astype(np.uint16)
    job = run(cpu_backend, model, deep_png(pixels))
    width, height, rows, info = png.Reader(bytes=job.encoded()).read()
    out = np.array([np.asarray(r) for r in rows]).reshape(height, width, -1)
    assert (info["bitdepth"], out.shape[2]) == (16, channels)
    eight = np.round(base).astype(np.uint8)
    image = Image.fromarray(eight[:, :, 0] if channels == 1 else eight)
    low = np.asarray(opened(run(cpu_backend, model, png_bytes(image))))
    assert psnr(out / 257, low.reshape(out.shape).astype(float)) > 45
    assert len(np.unique(out)) > 3 * len(np.unique(low))  # not 8 bits blown up


def test_16_bit_transparent_colour(cpu_backend: Backend, model: VideoModel) -> None:
    pixels = np.full((6, 6, 3), 30000, np.uint16)
    pixels[:, :3] = 1000, 2000, 3000
    data = deep_png(pixels, transparent=(1000, 2000, 3000))
    _, _, rows, info = png.Reader(bytes=run(cpu_backend, model, data).encoded()).read()
    out = np.array([np.asarray(r) for r in rows]).reshape(12, 12, 4)
    assert info["planes"] == 4
    assert (out[:, :2, 3] == 0).all()
    assert (out[:, 10:, 3] == 65535).all()


def test_colours_stay(cpu_backend: Backend, model: VideoModel) -> None:
    for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (90, 120, 7)):
        data = png_bytes(Image.new("RGB", (9, 9), colour))
        out = np.asarray(opened(run(cpu_backend, model, data))).astype(int)
        assert np.abs(out - colour).max() <= 1


def test_better_than_bicubic_in_colour(cpu_backend: Backend, model: VideoModel) -> None:
    high = Image.fromarray(np.stack([np.round(scene(128, 96, 5))] * 3, 2).astype(np.uint8))
    small = high.resize((48, 64), Image.Resampling.BICUBIC)
    ours = np.asarray(opened(run(cpu_backend, model, png_bytes(small)))).astype(float)
    plain = np.asarray(small.resize((96, 128), Image.Resampling.BICUBIC)).astype(float)
    want = np.asarray(high).astype(float)
    assert psnr(ours, want) > psnr(plain, want) + 1.5


def profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    found[0x010F] = "a camera"
    return found


@pytest.mark.parametrize("source", ["PNG", "JPEG"])
@pytest.mark.parametrize("target", ["png", "jpeg"])
def test_profile_exif_and_resolution_stay(
    cpu_backend: Backend, model: VideoModel, source: str, target: str
) -> None:
    out = io.BytesIO()
    Image.fromarray(rgb()).save(out, source, icc_profile=profile(), exif=exif(6), dpi=(300, 300))
    job = run(cpu_backend, model, out.getvalue(), format=target)
    assert job.info["format"] == target
    image = opened(job)
    assert image.info["icc_profile"] == profile()
    assert image.getexif()[0x0112] == 6
    assert image.getexif()[0x010F] == "a camera"
    assert tuple(round(v) for v in image.info["dpi"]) == (300, 300)


def test_colour_chunks_stay(cpu_backend: Backend, model: VideoModel) -> None:
    gamma = picture_files._chunk(b"gAMA", struct.pack(">I", 45455))
    aspect = picture_files._chunk(b"pHYs", struct.pack(">IIB", 11, 13, 0))
    data = png_bytes(Image.fromarray(rgb()))
    image = opened(run(cpu_backend, model, data[:33] + gamma + aspect + data[33:]))
    assert image.info["gamma"] == 0.45455
    assert image.info["aspect"] == (11, 13)


def test_jpeg_to_jpeg(cpu_backend: Backend, model: VideoModel) -> None:
    for pixels, mode in ((rgb(), "RGB"), (rgb()[:, :, 0], "L")):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=95, progressive=True)
        job = run(cpu_backend, model, out.getvalue())
        image = opened(job)
        assert (image.format, image.mode) == ("JPEG", mode)
        assert psnr(np.asarray(image).astype(float), doubled(pixels).astype(float)) > 20
    assert job.encoded()[:2] == b"\xff\xd8"


def test_cmyk_jpeg_becomes_rgb(cpu_backend: Backend, model: VideoModel) -> None:
    out = io.BytesIO()
    Image.fromarray(rgb()).convert("CMYK").save(out, "JPEG", quality=95, icc_profile=b"cmyk")
    image = opened(run(cpu_backend, model, out.getvalue()))
    assert image.mode == "RGB"
    assert "icc_profile" not in image.info


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (3, 2)])
def test_tiny(cpu_backend: Backend, model: VideoModel, size: tuple[int, int]) -> None:
    out = opened(run(cpu_backend, model, png_bytes(Image.new("RGB", size, (10, 200, 99)))))
    assert np.abs(np.asarray(out).astype(int) - (10, 200, 99)).max() <= 1


def test_tiles_leave_no_seam(cpu_backend: Backend, model: VideoModel) -> None:
    data = png_bytes(Image.fromarray(rgb()))
    one = np.asarray(opened(run(cpu_backend, model, data)))
    many = run(cpu_backend, model, data, tile=8)
    assert many.tiles == 5 * 4
    np.testing.assert_array_equal(np.asarray(opened(many)), one)


@pytest.fixture
def whole() -> bytes:
    return png_bytes(Image.fromarray(rgb()))


def bomb() -> bytes:
    """A valid beginning that promises 60000 x 60000 pixels."""
    head = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    data = picture_files._chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return picture_files.PNG_MAGIC + picture_files._chunk(b"IHDR", head) + data


@pytest.mark.parametrize("keep", [0, 7, 20, 60, 0.5, 0.95])
@pytest.mark.parametrize("kind", ["png", "deep", "jpeg"])
def test_cut_short(cpu_backend: Backend, model: VideoModel, keep: float, kind: str) -> None:
    if kind == "png":
        data = png_bytes(Image.fromarray(rgb()))
    elif kind == "deep":
        data = deep_png(rgb().astype(np.uint16) * 257)
    else:
        out = io.BytesIO()
        Image.fromarray(rgb()).save(out, "JPEG")
        data = out.getvalue()
    cut = data[: int(keep if keep > 1 else keep * len(data))]
    with pytest.raises(InvalidArgument) as caught:
        run(cpu_backend, model, cut)
    assert str(caught.value).endswith(".")
    assert str(caught.value).count(".") == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"GIF89a" + b"\0" * 50, bomb(), picture_files.PNG_MAGIC + b"\0" * 40],
    ids=["empty", "text", "gif", "bomb", "zeros"],
)
def test_no_picture_or_too_large(cpu_backend: Backend, model: VideoModel, data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        PictureJob(cpu_backend, [model], data, {})


def test_settings_that_make_no_sense(cpu_backend: Backend, model: VideoModel, whole: bytes) -> None:
    for settings in ({"scale": 9}, {"width": 9}, {"width": 3, "height": 3}, {"format": "gif"}):
        with pytest.raises(InvalidArgument):
            PictureJob(cpu_backend, [model], whole, settings)
    clear = png_bytes(Image.new("RGBA", (4, 4)))
    with pytest.raises(InvalidArgument, match="transparent"):
        run(cpu_backend, model, clear, format="jpeg")


def test_memory_is_asked_for_first(
    cpu_backend: Backend, model: VideoModel, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    with pytest.raises(OutOfMemory, match="MiB"):
        PictureJob(cpu_backend, [model], whole, {})


def test_device_loss_reaches_the_caller_and_frees(whole: bytes) -> None:
    backend = NullBackend(lose_at=1)
    job = PictureJob(backend, [VideoModel.load(str(FAST), backend)], whole, {})
    with pytest.raises(DeviceLost):
        finish(job)
    assert job._pipeline is None


@pytest.mark.gpu
def test_gpu_within_one_step_of_the_cpu(
    cpu_backend: Backend,
    gpu_backend: Backend,
    model: VideoModel,
    gpu_model: VideoModel,
    whole: bytes,
) -> None:
    ours = np.asarray(opened(run(cpu_backend, model, whole))).astype(int)
    theirs = np.asarray(opened(run(gpu_backend, gpu_model, whole))).astype(int)
    assert np.abs(ours - theirs).max() <= 1


def test_large_pictures_pass_in_bounded_pieces() -> None:
    """A PNG's result is compressed as it comes; no part of it is held as pixels."""
    writer = picture_files.PngWriter(1000, 4000, 3, 8, picture_files.Picture(np.zeros((1, 1, 3))))
    for _ in range(100):
        writer.rows(np.zeros((40, 1000, 3), np.uint8))
    writer.finish()
    assert sum(map(len, writer.parts)) < 100_000
    with Image.open(io.BytesIO(b"".join(writer.parts))) as image:
        image.load()
        assert image.size == (1000, 4000)


@pytest.mark.parametrize("kind", ["png", "palette", "deep", "jpeg"])
def test_damaged_bytes_are_decoded_or_refused(kind: str) -> None:
    out = io.BytesIO()
    if kind == "deep":
        out.write(deep_png(rgb().astype(np.uint16) * 257))
    elif kind == "palette":
        Image.fromarray(rgb()).quantize(8).save(out, "PNG", transparency=3)
    else:
        Image.fromarray(rgb()).save(out, kind, icc_profile=profile())
    rng = np.random.default_rng(7)
    refused = 0
    for _ in range(200):
        data = bytearray(out.getvalue())
        for at in rng.integers(0, len(data), int(rng.integers(1, 5))):
            data[at] = rng.integers(0, 256)
        try:
            assert picture_files.decode(bytes(data)).pixels.ndim == 3
        except InvalidArgument:
            refused += 1
    assert refused > 20
