"""DistributedDataParallel against ZeRO: memory of a rank and time of a step, for models of growing size.

A way whose memory exceeds --budget is not tried with larger models. Memory is what the system counts for the process
while it trains, less what it was before the model was made: private pages, and 1/n of a page shared by n processes,
without the pages of files (libraries).
"""

import argparse
import ctypes
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

import libzero

WAYS = {"DDP": "#222222", "stage 0": "#999999", "stage 1": "#4477aa", "stage 2": "#66aa55", "stage 3": "#ee7733"}
FILES = "stage 3, files"
VOCABULARY, TOKENS = 1024, 64


def fail(text: str) -> NoReturn:
    print(f"ddp_vs_zero.py: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, usage="zero run -n N python ddp_vs_zero.py [options]")
    add = parser.add_argument
    add("--budget", type=positive, default=300, metavar="MB", help="memory of a rank (%(default)s)")
    add("--widths", type=positive, nargs="+", default=[128, 256, 512, 768], metavar="N",
        help="widths of the models, multiples of 64 (128 256 512 768)")  # fmt: skip
    add("--layers", type=positive, default=4, metavar="N", help="of each model (%(default)s)")
    add("--batch-size", type=positive, default=2, metavar="N", help=f"samples of {TOKENS} tokens a rank (%(default)s)")
    add("--steps", type=positive, default=5, metavar="N", help="timed steps, after 3 for the memory (%(default)s)")
    add("--files", metavar="DIR", help="a folder: also stage 3 with all states in files there")
    add("--svg", metavar="FILE", help="draw memory over size")
    add("--json", action="store_true", help="print bytes and seconds as JSON instead of the table")
    args = parser.parse_args()
    for width in args.widths:
        if width % 64 != 0:
            parser.error(f"--widths: got {width}, expected multiples of 64")
    return args


class Model(nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class PeakMemory(threading.Thread):
    """Samples this process's memory every 5 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # gives freed memory back, so that it is counted when used again
        self.base = self.peak = self.now()
        self.ended = threading.Event()
        self.start()

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, self.now())

    def stop(self) -> int:
        """Bytes above those at the start."""
        self.ended.set()
        self.join()
        return max(self.peak, self.now()) - self.base


Step = Callable[[torch.Tensor], None]


def ddp_step(model: Model) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)

    def step(tokens: torch.Tensor) -> None:
        wrapped(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero_step(model: Model, way: str, args: argparse.Namespace) -> tuple[Step, libzero.Engine]:
    stage: dict = {"stage": int(way[len("stage ")])}
    if way == FILES:
        stage["offload_param"] = stage["offload_optimizer"] = {"device": "nvme", "nvme_path": args.files}
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": stage,
    }
    engine = libzero.Engine(model, config)

    def step(tokens: torch.Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step, engine


def measure(way: str, width: int, args: argparse.Namespace) -> dict:
    """Peak bytes of the rank that used most, and the median time of a step."""
    memory = PeakMemory()
    torch.manual_seed(1)
    if way == "DDP":
        model = Model(width, args.layers)
        step, engine = ddp_step(model), None
    else:
        model = libzero.build(lambda: Model(width, args.layers))
        step, engine = zero_step(model, way, args)
    parameters = sum(p.numel() for p in model.parameters())
    random = torch.Generator().manual_seed(dist.get_rank())

    def timed_step() -> float:
        tokens = torch.randint(0, VOCABULARY, (args.batch_size, TOKENS), generator=random)
        dist.barrier()
        begin = time.monotonic()
        step(tokens)
        return time.monotonic() - begin

    for _ in range(3):
        timed_step()
    most = torch.tensor(memory.stop())  # before the timed steps: sampling takes time
    dist.all_reduce(most, dist.ReduceOp.MAX)
    seconds = statistics.median(timed_step() for _ in range(args.steps))
    if engine is not None:
        engine.close()
    return {"way": way, "parameters": parameters, "bytes": most.item(), "seconds": seconds}


def picture(found: list[dict], ways: dict[str, str], budget: int) -> str:
    """SVG: memory of a rank over the number of parameters, a line for each way, and the budget."""
    right, top = max(row["parameters"] for row in found), max(budget, *(row["bytes"] for row in found))

    def point(parameters: float, size: float) -> str:
        return f"{70 + 470 * parameters / right:.1f},{330 - 290 * size / top:.1f}"

    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 380" font-family="sans-serif" font-size="13">',
        '<rect width="700" height="380" fill="#ffffff"/>',
        '<text x="70" y="24">Memory of a rank in training, MB, over millions of parameters</text>',
        '<path d="M70,40 V330 H540" fill="none" stroke="#222222"/>',
        f'<polyline points="{point(0, budget)} {point(right, budget)}" stroke="#cc3311" stroke-dasharray="6 4"/>',
    ]
    for size, text in ((top, f"{top / 1e6:.0f}"), (0, "0"), (budget, "budget")):
        x, y = point(0, size).split(",")
        out.append(f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{text}</text>')
    for parameters in sorted({row["parameters"] for row in found}):
        x, _ = point(parameters, 0).split(",")
        out.append(f'<text x="{x}" y="350" text-anchor="middle">{parameters / 1e6:.1f}</text>')
    for i, (way, colour) in enumerate(ways.items()):
        points = " ".join(point(row["parameters"], row["bytes"]) for row in found if row["way"] == way)
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="560" y="{60 + 22 * i}" fill="{colour}">{way}</text>')
    return "\n".join([*out, "</svg>\n"])


def main() -> None:
    args = arguments()
    ways = WAYS if args.files is None else {**WAYS, FILES: "#aa3377"}
    if libzero.Communicator.launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, budget = dist.get_rank(), args.budget * 1_000_000
    for way in ways:
        measure(way, 64, args)  # not counted: loads the libraries' parts that the first use loads

    found: list[dict] = []
    left = list(ways)
    for width in sorted(args.widths):
        rows = [measure(way, width, args) for way in left]
        if rank == 0 and not args.json:
            if not found:
                head = f"{dist.get_world_size()} ranks, MB of a rank and ms of a step"
                print(f"{head}; * over the budget of {args.budget} MB")
                print(f"{'parameters':>12}" + "".join(f"{way:>16}" for way in ways))
            cells = {row["way"]: f"{row['bytes'] / 1e6:.0f}{'*' if row['bytes'] > budget else ' '}" for row in rows}
            times = {row["way"]: f"{1e3 * row['seconds']:.0f}" for row in rows}
            line = "".join(f"{cells[way]:>9}{times[way]:>7}" if way in cells else f"{'-':>16}" for way in ways)
            print(f"{rows[0]['parameters']:12,}{line}", flush=True)
        found += rows
        left = [row["way"] for row in rows if row["bytes"] <= budget]
        if not left:
            break
    if rank == 0 and args.json:
        print(json.dumps({"ranks": dist.get_world_size(), "budget": budget, "measurements": found}))
    if rank == 0 and args.svg is not None:
        Path(args.svg).write_text(picture(found, ways, budget))
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (libzero.ConfigError, OSError) as fault:
        fail(str(fault))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
