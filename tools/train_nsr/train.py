# SPDX-License-Identifier: Apache-2.0
"""Trains networks of the nsr family side by side on one device and writes their folded weights.

    python train.py --data FOLDER --out FOLDER --networks nsr-fast,nsr-fast-x4 --minutes 9
                    [--resume] [--rate 0.5] [--start FOLDER] [--bench FOLDER ...] [--smoke]
                    [--teacher FOLDER] [--bfloat16] [--optimizer soap] [--loss decibels]
                    [--least 1.5e-4] [--crops 4] [--sizes 0.7 0.5]

--data holds pictures; with --teacher the networks learn to make of the small ones what the teacher
in that folder makes of them (teacher.py), instead of the large ones; --bench folders hold
image_SRF_<scale>/NAME_HR.png and NAME_LR.png, which are only measured, never trained on and never
used to choose weights: the average of the weights at the end is what counts. The learning rate
follows the clock, so a run ends `minutes` after its start, preparation included. OUT gets NAME.npz
(folded float32 weights: all that --resume needs) and NAME.log. A network begins with --resume's
NAME.npz, or with the weights that family.py names, looked for in OUT and then in --start, or at
random. Each network has a thread, a stream and a captured step of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import SIZES, Benchmark, Crops, Photographs, Planes, Source
from degrade import codec
from family import NETWORKS, Network
from net import Nsr
from soap import Soap
from teacher import Taught

DECIBELS_FROM, DECIBELS_WHOLE = 0.6, 0.75  # shares of the time between which L1 gives way
EXACT_FROM = 0.85  # share of the time after which no layer runs in bfloat16
LEAST_SQUARE = 3e-5  # mean square error, in 0..1, under which a crop counts little
TURN = 200  # steps between two looks at SOAP's eigenvectors
WARM_UP_S = 4.0
REPORTS = 12  # reports and checkpoints of a run
AVERAGE = 0.0005  # weight of a step in the running average
BURST = 20  # steps between two looks at the clock


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--bench", type=Path, action="append", default=[])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--start", type=Path)
    p.add_argument("--networks", required=True, help="names of family.py, joined by commas")
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--teacher", type=Path, help="learn from the networks in this folder")
    p.add_argument("--optimizer", choices=("adam", "soap"), default="adam")
    p.add_argument("--loss", choices=("both", "decibels"), default="both")
    p.add_argument("--least", type=float, default=LEAST_SQUARE, help="a crop's error that is none")
    p.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="of photographs")
    p.add_argument("--crops", type=int, default=1, help="factor of the crops of a step")
    p.add_argument("--bfloat16", action="store_true", help="on CPUs, too (those that can)")
    p.add_argument("--smoke", action="store_true", help="two pictures, a few steps: does it run?")
    return p.parse_args()


class Trainer:
    """One network, its optimiser, its running average, and a step that is captured once where there
    is CUDA.
    """

    def __init__(
        self, network: Network, planes: Planes, half: bool, options: argparse.Namespace
    ) -> None:
        """`half`: layers may run in bfloat16. SOAP trains the collapsed weights themselves."""
        self.network, self.device = network, planes.device
        torch.manual_seed(network.seed)
        wide = 0 if options.optimizer == "soap" else 128
        self.net = Nsr(network.shape, wide).to(self.device)
        self.mean = Nsr(network.shape, wide).to(self.device)
        self.least = options.least
        degrade = codec if network.flavour == "compressed" else None
        self.crops = Crops(
            planes,
            network.patch,
            self.net.radius,
            network.batch * options.crops,
            network.seed,
            degrade,
        )
        self.rate = torch.zeros((), device=self.device)
        self.decibels = torch.zeros((), device=self.device)  # 0: L1, 1: mean PSNR of the crops
        self.cuda = self.device.type == "cuda"
        self.soap: Soap | None = None
        if options.optimizer == "soap":
            layers = [b.direct for b in (self.net.first, self.net.inner, self.net.last)]
            known = {id(layer) for layer in layers}
            others = [p for p in self.net.parameters() if id(p) not in known]
            self.soap = Soap(layers, others, self.rate)
        self.opt = self.soap or torch.optim.Adam(
            self.net.parameters(),
            lr=self.rate,
            betas=(0.9, 0.99),
            capturable=self.cuda,
            fused=self.cuda,
        )
        self.loss = torch.zeros((), device=self.device)
        self.dtype = torch.bfloat16 if network.half and half else torch.float32
        self.exact = False
        self.steps = 0

    def _step(self, dtype: torch.dtype) -> None:
        low, high = self.crops.batch()
        e = self.net(low, dtype) - high
        # The factor brings both gradients to a like size near the end of training (|e| is about
        # 0.01).
        squares = e.square().mean((1, 2, 3))
        square = squares.mean()
        decibels = (squares + self.least).log().mean()
        loss = (1 - self.decibels) * e.abs().mean() + self.decibels * 0.015 * decibels
        self.opt.zero_grad(set_to_none=False)
        loss.backward()
        self.opt.step()
        with torch.no_grad():
            mean, now = list(self.mean.parameters()), list(self.net.parameters())
            torch._foreach_lerp_(mean, now, AVERAGE)
            self.loss.lerp_(square, 0.01)

    def capture(self) -> None:
        """Captures the step, and the exact one; the learning rate is 0 meanwhile."""
        if not self.cuda:
            return
        self.stream = torch.cuda.Stream()
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        for exact in (False, True):
            dtype = torch.float32 if exact else self.dtype
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    self._step(dtype)
            self.stream.synchronize()
            self.graphs[exact] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[exact], stream=self.stream):
                self._step(dtype)

    def begin_with(self, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            self.net.start_from(saved)
        self.mean.load_state_dict(self.net.state_dict())
        if self.soap:
            self.soap.forget()

    def step(self) -> None:
        if self.cuda:
            self.graphs[self.exact].replay()
        else:
            self._step(self.dtype)
        self.steps += 1
        # At the start the eigenvectors are far off.
        if self.soap and (self.steps % TURN == 0 or self.steps in (4, 10, 30, 60, 100)):
            self.soap.refresh()


class Run:
    """The trainings of one process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        self.lock = threading.Lock()
        self.measuring = threading.Lock()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        paths = sorted(p for p in args.data.iterdir() if p.suffix in (".jpg", ".png"))
        self.paths = [paths[0], paths[-1]] if args.smoke else paths
        photographs: Source = Photographs(self.paths, self.device, tuple(args.sizes))
        if args.teacher:
            photographs = Taught(photographs, args.teacher)
        networks = [NETWORKS[name] for name in args.networks.split(",")]
        least = max(n.patch for n in networks)
        kinds = {(n.shape.scale, n.shape.siting) for n in networks}
        self.planes = {kind: Planes(photographs, *kind, least) for kind in sorted(kinds)}
        self.benches = {
            scale: [Benchmark(b, scale, self.device) for b in args.bench] for scale in (2, 3, 4)
        }
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        self.trainers = []
        for n in networks:
            half = self.device.type == "cuda" or args.bfloat16
            trainer = Trainer(n, self.planes[n.shape.scale, n.shape.siting], half, args)
            trainer.capture()
            self.trainers.append(trainer)
        # Everything that trains is captured by now; what is left to run is measuring.
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False

    def say(self, name: str, **values: object) -> None:
        line = json.dumps(values)
        with self.lock:
            with open(self.args.out / f"{name}.log", "a", encoding="utf-8") as log:
                log.write(line + "\n")
            print(name, line, flush=True)

    def saved(self, network: Network) -> tuple[str, dict[str, Any] | None]:
        """Where a network's first weights come from, and they."""
        out = self.args.out
        places = [out / f"{network.name}.npz"] if self.args.resume else []
        if network.start:
            places += [out / f"{network.start}.npz"] if network.start != network.name else []
            places += [self.args.start / f"{network.start}.npz"] if self.args.start else []
        for place in places:
            if place.exists():
                return str(place), dict(np.load(place))
        return "", None

    def scores(self, trainer: Trainer) -> dict[str, float]:
        shape = trainer.network.shape
        if shape.siting:
            return {}
        with self.measuring:
            return {
                b.name: round(b.psnr(trainer.mean, shape.convs), 3)
                for b in self.benches[shape.scale]
                if b.pairs
            }

    def save(self, trainer: Trainer, spent: float) -> None:
        n = trainer.network
        meta = {
            "name": n.name,
            "tier": n.tier,
            "flavour": n.flavour,
            "seed": n.seed,
            "minutes": round(spent / 60, 2),
            "steps": trainer.steps,
        }
        target = self.args.out / f"{n.name}.npz"
        part = target.with_suffix(".part.npz")
        np.savez(
            part,
            scale=np.int32(n.shape.scale),
            skip=np.array(n.shape.skip, np.int32).reshape(-1, 2),
            meta=json.dumps(meta),
            **trainer.mean.folded(),
        )
        part.replace(target)

    def train(self, trainer: Trainer) -> None:
        n, args = trainer.network, self.args
        total = args.minutes * 60
        first = time.monotonic() - self.began
        # With --resume every network has its start and takes the whole time.
        start = first if args.resume else max(first, total * n.begin)
        seconds = total * (1.0 if args.resume else n.end) - start
        time.sleep(0 if args.smoke else max(0.0, start - first))
        place, saved = self.saved(n)
        trainer.begin_with(saved)
        planes = trainer.crops.planes
        self.say(
            n.name,
            event="start",
            network=str(n),
            macs=n.shape.macs,
            began_with=Path(place).name,
            pictures=len(self.paths),
            pixels=planes.pixels,
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if trainer.cuda else "cpu",
            dtype=str(trainer.dtype),
            prepared_s=round(first, 1),
        )
        began, told = time.monotonic(), 0
        while True:
            spent = time.monotonic() - began
            part = spent / seconds
            if part >= 1 or (args.smoke and trainer.steps >= 8):
                break
            warm = min(1.0, (spent + 0.1) / WARM_UP_S)
            rate = args.rate * n.rate * warm * 0.5 * (1 + math.cos(math.pi * part))
            trainer.rate.fill_(max(rate, 1e-6))
            share = (part - DECIBELS_FROM) / (DECIBELS_WHOLE - DECIBELS_FROM)
            share = 1.0 if args.loss == "decibels" else share
            trainer.decibels.fill_(min(1.0, max(0.0, share)))
            trainer.exact = part >= EXACT_FROM
            for _ in range(2 if args.smoke else BURST):
                trainer.step()
            if trainer.cuda:
                trainer.stream.synchronize()
            if int(part * REPORTS) > told:
                told = int(part * REPORTS)
                self.save(trainer, spent)
                self.say(
                    n.name,
                    step=trainer.steps,
                    spent=round(spent, 1),
                    train_psnr=round(-10 * math.log10(float(trainer.loss) + 1e-12), 3),
                    rate=round(rate, 7),
                    **self.scores(trainer),
                )
        self.save(trainer, spent)
        self.say(
            n.name, event="end", step=trainer.steps, spent=round(spent, 1), **self.scores(trainer)
        )

    def _guarded(self, trainer: Trainer) -> None:
        """One network's failure is told and leaves the others running."""
        try:
            if trainer.cuda:
                with torch.cuda.stream(trainer.stream):
                    self.train(trainer)
            else:
                self.train(trainer)
        except Exception:
            self.say(trainer.network.name, event="failed", why=traceback.format_exc())

    def run(self) -> None:
        if self.device.type == "cpu":
            for trainer in self.trainers:
                self._guarded(trainer)
            return
        threads = [threading.Thread(target=self._guarded, args=(t,)) for t in self.trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    Run(args).run()


if __name__ == "__main__":
    main()
