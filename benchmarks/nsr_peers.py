# SPDX-License-Identifier: Apache-2.0
"""A frame of luma by the peers, each at its best settings: u8 [height, width] to u8 [scale height,
scale width].
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import nsr_export

Bytes = npt.NDArray[np.uint8]
Runner = Callable[[], Bytes]

SETTINGS = {
    "onnxruntime": "all graph optimisations, CPU provider, one pool of so many threads",
    "onnxruntime int8": "the same; static QDQ model, u8 activations, s8 weights per channel",
    "ncnn": "float32 (no fp16 or bf16 storage), packed layouts, Winograd and sgemm as it chooses",
    "ncnn int8": "not measured: its wheel has no tool that quantises a model",
    "swscale": "SWS_LANCZOS, so many threads by sws_scale_frame",
}


def onnxruntime(file: Path, luma: Bytes, threads: int, folder: Path, int8: bool = False) -> Runner:
    """By onnxruntime, in float32 or int8 (calibrated on the picture itself)."""
    import onnxruntime as ort

    model = folder / f"{file.stem}.onnx"
    model.write_bytes(nsr_export.to_onnx(file))
    if int8:
        model = _quantised(model, luma)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    feed = {"input": luma[None, None]}
    return lambda: np.asarray(session.run(None, feed)[0])[0, 0]


def _quantised(model: Path, luma: Bytes) -> Path:
    from onnxruntime import quantization as q

    class Reader(q.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = [luma[None, None, :128, :128]]

        def get_next(self) -> dict[str, Bytes] | None:
            return {"input": self._left.pop()} if self._left else None

    out = model.with_suffix(".int8.onnx")
    q.quantize_static(
        str(model),
        str(out),
        Reader(),
        quant_format=q.QuantFormat.QDQ,
        per_channel=True,
        activation_type=q.QuantType.QUInt8,
        weight_type=q.QuantType.QInt8,
        op_types_to_quantize=["Conv", "PRelu"],
        nodes_to_exclude=["plain"],
        extra_options={"ActivationSymmetric": False},
    )
    return out


def ncnn(file: Path, luma: Bytes, threads: int, folder: Path, vulkan: bool = False) -> Runner:
    """By ncnn: its own conversions from and to 8 bits, float32, packed layouts."""
    import ncnn as peer

    param, binary = nsr_export.to_ncnn(file, folder)
    net = peer.Net()
    net.opt.num_threads = threads
    net.opt.use_vulkan_compute = vulkan
    net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = net.opt.use_bf16_storage = False
    net.load_param(str(param))
    net.load_model(str(binary))
    height, width = luma.shape
    gray = peer.Mat.PixelType.PIXEL_GRAY

    def frame() -> Bytes:
        mat = peer.Mat.from_pixels(luma, gray, width, height)
        mat.substract_mean_normalize([], [1 / 255.0])
        with net.create_extractor() as run:
            run.input("in", mat)
            _, out = run.extract("out")
        # The wheel has no way back to pixels; numpy's costs well under a millisecond.
        out.substract_mean_normalize([-0.5 / 255.0], [255.0])
        values = np.array(out)[0]
        return np.asarray(np.clip(values, 0, 255, out=values).astype(np.uint8))

    return frame


class _Frame(ctypes.Structure):
    """The beginning of libavutil's AVFrame, the same in its versions 57 to 60."""

    _fields_ = (
        ("data", ctypes.c_void_p * 8),
        ("linesize", ctypes.c_int * 8),
        ("extended_data", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("height", ctypes.c_int),
        ("nb_samples", ctypes.c_int),
        ("format", ctypes.c_int),
    )


def swscale(luma: Bytes, threads: int, scale: int = 2) -> Runner | None:
    """By libswscale's Lanczos; None where the library is not installed."""
    gray8, lanczos = 8, 0x200
    names = [ctypes.util.find_library(name) for name in ("swscale", "avutil")]
    if None in names:
        return None
    sws, util = (ctypes.CDLL(name) for name in names)
    sws.sws_alloc_context.restype = util.av_frame_alloc.restype = ctypes.c_void_p
    context = ctypes.c_void_p(sws.sws_alloc_context())
    height, width = luma.shape
    options = {"srcw": width, "srch": height, "dstw": scale * width, "dsth": scale * height}
    options |= {"src_format": gray8, "dst_format": gray8, "sws_flags": lanczos, "threads": threads}
    for name, value in options.items():
        util.av_opt_set_int(context, name.encode(), ctypes.c_int64(value), 0)
    if sws.sws_init_context(context, None, None) < 0:
        return None

    def frame(w: int, h: int) -> tuple[ctypes.c_void_p, Bytes]:
        handle = ctypes.c_void_p(util.av_frame_alloc())
        head = ctypes.cast(handle, ctypes.POINTER(_Frame)).contents
        head.width, head.height, head.format = w, h, gray8
        if util.av_frame_get_buffer(handle, 0) < 0:
            raise MemoryError("libavutil has no memory for a frame")
        size = head.linesize[0] * h
        raw = (ctypes.c_uint8 * size).from_address(head.data[0])
        return handle, np.frombuffer(raw, np.uint8).reshape(h, head.linesize[0])[:, :w]

    source, pixels = frame(width, height)
    target, out = frame(scale * width, scale * height)
    pixels[:] = luma

    def run() -> Bytes:
        if sws.sws_scale_frame(context, target, source) < 0:
            raise OSError("libswscale refused a frame")
        return out

    return run
