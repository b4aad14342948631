# SPDX-License-Identifier: Apache-2.0
"""Trains a luma network of the nsr family and writes its folded weights.

    python train.py --data FOLDER --out FOLDER --channels 8 --blocks 4 --minutes 4 [--resume]
                    [--bench FOLDER ...] [--seed 1] [--smoke]

--data holds photographs (a list of those used goes to the log); --bench folders hold NAME_HR.png
and NAME_LR.png, which are only measured, never trained on and never used to choose weights: the
average of the weights at the end is what counts. The learning rate follows the clock, so a run
takes the minutes that it is given. OUT gets NAME.npz (folded float32 weights), NAME.ckpt (to go on
with --resume) and NAME.log.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from data import Benchmark, Crops
from net import Nsr


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--bench", type=Path, action="append", default=[])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--name", default="nsr-fast")
    p.add_argument("--channels", type=int, default=8)
    p.add_argument("--blocks", type=int, default=4)
    p.add_argument("--minutes", type=float, default=4)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument(
        "--patch", type=int, default=60, help="side of the low-resolution patch, context included"
    )
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument(
        "--l2", type=float, default=0.75, help="share of the time after which the loss is L2"
    )
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--eager", action="store_true", help="do not capture the step in a CUDA graph")
    p.add_argument(
        "--smoke", action="store_true", help="two pictures, a few steps: does it run at all?"
    )
    return p.parse_args()


class Trainer:
    """One network, its optimiser, its running average, and a step that is captured once where there
    is CUDA.
    """

    def __init__(self, args: argparse.Namespace, crops: Crops, device: torch.device) -> None:
        self.args, self.crops, self.device = args, crops, device
        self.net = Nsr(args.channels, args.blocks).to(device)
        self.mean = Nsr(args.channels, args.blocks).to(device)
        self.mean.load_state_dict(self.net.state_dict())
        self.rate = torch.tensor(args.lr, device=device)
        self.squared = torch.zeros((), device=device)  # 0: L1, 1: L2
        cuda = device.type == "cuda"
        self.opt = torch.optim.Adam(
            self.net.parameters(), lr=self.rate, betas=(0.9, 0.99), capturable=cuda, foreach=cuda
        )
        self.loss = torch.zeros((), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _step(self) -> None:
        lr, hr = self.crops.batch(self.args.batch)
        e = self.net(lr) - hr
        # The factor brings both gradients to a like size near the end of training (|e| is about
        # 0.01).
        loss = (1 - self.squared) * e.abs().mean() + self.squared * 30 * e.square().mean()
        self.opt.zero_grad(set_to_none=False)
        loss.backward()
        self.opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.mean.parameters()), list(self.net.parameters()), 0.0005)
            self.loss.lerp_(e.square().mean(), 0.01)

    def step(self) -> None:
        if self.device.type != "cuda" or self.args.eager:
            self._step()
            return
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(5):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
        self.graph.replay()

    def state(self, step: int) -> dict[str, object]:
        return {
            "net": self.net.state_dict(),
            "mean": self.mean.state_dict(),
            "opt": self.opt.state_dict(),
            "step": step,
        }


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    args.out.mkdir(parents=True, exist_ok=True)

    def say(**values: object) -> None:
        line = json.dumps(values)
        with open(args.out / f"{args.name}.log", "a", encoding="utf-8") as log:
            log.write(line + "\n")
        print(line, flush=True)

    began = time.monotonic()
    paths = sorted(p for p in args.data.iterdir() if p.suffix in (".jpg", ".png"))[
        : 2 if args.smoke else None
    ]
    radius = args.blocks + 2
    crops = Crops(paths, device, args.patch, radius)
    benches = [Benchmark(b, device) for b in args.bench]
    trainer = Trainer(args, crops, device)
    step = 0
    checkpoint = args.out / f"{args.name}.ckpt"
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        trainer.net.load_state_dict(saved["net"])
        trainer.mean.load_state_dict(saved["mean"])
        step = saved["step"]
    say(
        event="start",
        args={k: str(v) for k, v in vars(args).items() if k not in ("data", "out", "bench")},
        pictures=[p.name for p in paths],
        pixels=crops.pixels,
        torch=torch.__version__,
        step=step,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        prepare_s=round(time.monotonic() - began, 1),
    )

    def save() -> None:
        torch.save(trainer.state(step), checkpoint)
        np.savez(
            args.out / f"{args.name}.npz",
            **{k: v.float().cpu().numpy() for k, v in trainer.mean.folded().items()},
        )

    began = time.monotonic()
    seconds = args.minutes * 60
    told = 0.0
    while True:
        spent = time.monotonic() - began
        part = spent / seconds
        if part >= 1 or (args.smoke and step >= 20):
            break
        warm = min(1.0, (spent + 0.1) / 3)
        trainer.rate.fill_(max(args.lr * warm * 0.5 * (1 + math.cos(math.pi * part)), 1e-6))
        trainer.squared.fill_(float(part >= args.l2))
        for _ in range(4 if args.smoke else 50):
            trainer.step()
            step += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        if part - told >= 0.05:
            told = part
            scores = {b.name: round(b.psnr(trainer.mean, radius), 3) for b in benches}
            psnr = -10 * math.log10(float(trainer.loss) + 1e-12)
            say(
                step=step,
                spent=round(spent, 1),
                train_psnr=round(psnr, 3),
                rate=float(trainer.rate),
                **scores,
            )
            save()
    save()
    scores = {b.name: round(b.psnr(trainer.mean, radius), 3) for b in benches}
    say(event="end", step=step, spent=round(time.monotonic() - began, 1), **scores)


if __name__ == "__main__":
    main()
