"""Trains a small convolutional network on CIFAR-10, or on pictures that the program draws itself.

With --data DIR: CIFAR-10's files in DIR, in the Python or the binary version. Without it, ten classes of shapes and
textures, 32 x 32 pixels in colour, which need no download and are the same in each run.

--moe puts layers with a mixture of experts before the last layer, one for each number of --num-experts.
"""

import argparse
import math
import pickle
import sys
import time
from pathlib import Path
from typing import NoReturn

import numpy
import torch
from torch import nn

import libzero

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
DRAWN = ["disc", "ring", "square", "triangle", "cross", "rows", "columns", "diagonals", "checks", "dots"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fail(text: str) -> NoReturn:
    print(f"cifar10.py: error: {text}", file=sys.stderr)
    raise SystemExit(2)


# ---- the model ----
class Net(nn.Module):
    """Two convolutions with pooling, three fully connected layers: 62,006 parameters; with --moe also experts."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.moe_layers = nn.ModuleList(
            libzero.MoE(
                hidden_size=84,
                expert=nn.Linear(84, 84),
                num_experts=experts,
                ep_size=args.ep_world_size,
                k=args.top_k,
                # In the test no picture is dropped: the answer for one must not depend on which are tested with it.
                eval_capacity_factor=experts,
                min_capacity=args.min_capacity,
                use_residual=args.mlp_type == "residual",
                noisy_gate_policy=args.noisy_gate_policy,
            )
            for experts in args.num_experts
        )
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores, and the auxiliary loss of the experts."""
        x = self.pool(self.conv1(x).relu())  # 6 x 14 x 14
        x = self.pool(self.conv2(x).relu())  # 16 x 5 x 5
        x = self.fc1(x.flatten(1)).relu()
        x, aux = self.fc2(x).relu(), torch.zeros(())
        for layer in self.moe_layers:
            x, l_aux, _ = layer(x)
            aux = aux + l_aux
        return self.fc3(x), aux


# ---- CIFAR-10's files ----
class ArraysOnly(pickle.Unpickler):
    """Reads numpy arrays and plain Python values. A pickle may call any function; others than these are refused."""

    allowed = {
        "numpy.ndarray": numpy.ndarray,
        "numpy.dtype": numpy.dtype,
        "numpy.core.multiarray._reconstruct": numpy.zeros(0).__reduce__()[0],
        "numpy.core.numeric._frombuffer": numpy.zeros(0).__reduce_ex__(5)[0],
        "_codecs.encode": lambda text, encoding: text.encode("latin1"),  # bytes, as Python 3 writes them for Python 2
    }

    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full not in self.allowed:
            raise pickle.UnpicklingError(f"it calls {full}, expected only numpy arrays")
        return self.allowed[full]


def read_pickle(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with file.open("rb") as stream:
            content = ArraysOnly(stream, encoding="latin1").load()
        content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        pictures, labels = torch.from_numpy(content["data"]), torch.tensor(content["labels"])
    except OSError:
        raise
    except Exception as fault:  # a damaged pickle raises nearly anything
        fail(f"--data: {file} is not a batch of CIFAR-10: {type(fault).__name__}: {fault}")
    return pictures, labels


def read_binary(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    content = bytearray(file.read_bytes())
    if len(content) == 0 or len(content) % 3073 != 0:
        fail(f"--data: {file} has {len(content)} bytes, expected a multiple of 3073: a label and 32 x 32 x 3 pixels")
    rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, 3073)
    return rows[:, 1:], rows[:, 0].long()


def read_cifar10(given: str) -> tuple[torch.Tensor, ...]:
    """Pictures (n, 3, 32, 32) and labels (n) for training, and the same for the test."""
    for folder in [Path(given), Path(given) / "cifar-10-batches-py", Path(given) / "cifar-10-batches-bin"]:
        for ending, read in (("", read_pickle), (".bin", read_binary)):
            files = [folder / f"data_batch_{i}{ending}" for i in range(1, 6)]
            if not files[0].is_file():
                continue
            both = []
            for part in (files, [folder / f"test_batch{ending}"]):
                batches = [read(file) for file in part]
                for file, (pictures, labels) in zip(part, batches, strict=True):
                    right = len(labels) > 0 and pictures.dtype == torch.uint8 and pictures.shape == (len(labels), 3072)
                    if not right or labels.dtype != torch.int64 or labels.min() < 0 or labels.max() > 9:
                        fail(f"--data: {file} has other content than a batch of CIFAR-10")
                both.append(torch.cat([pictures for pictures, _ in batches]).view(-1, 3, 32, 32))
                both.append(torch.cat([labels for _, labels in batches]))
            return tuple(both)
    fail(
        f"--data: {given} has no data_batch_1 and no data_batch_1.bin. Hint: get cifar-10-python.tar.gz or "
        f"cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html and unpack it there; "
        "or leave --data out to train on drawn pictures"
    )


# ---- drawn pictures ----
def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (count, 3, 32, 32) of bytes, and their classes: a figure or texture in two random colours, with noise.

    Position, size, period, phase, colours and noise are random.
    """
    random = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=random)

    labels = torch.randint(0, 10, (count,), generator=random)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    y, x, size = rows - uniform(11, 20), columns - uniform(11, 20), uniform(6, 11)
    distance = (x.square() + y.square()).sqrt()
    farther, nearer = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    period, phase, side = uniform(4, 8), uniform(50, 60), uniform(-1, 1).sign()

    def within_period(along: torch.Tensor) -> torch.Tensor:
        return ((along + phase) / period).frac() - 0.5

    in_row, in_column = within_period(rows), within_period(columns)
    figures = [
        distance < size,
        (distance < size) & (distance > 0.55 * size),
        farther < 0.85 * size,
        (y < 0.8 * size) & (2 * x.abs() < y + size),
        (farther < size) & (nearer < 0.28 * size),
        in_row < 0,
        in_column < 0,
        within_period((columns + side * rows) * math.sqrt(0.5)) < 0,
        (in_row < 0) ^ (in_column < 0),
        in_row.square() + in_column.square() < 0.08,
    ]
    ink = torch.stack(figures, 1)[torch.arange(count), labels].unsqueeze(1)
    colour = torch.rand(count, 3, 1, 1, generator=random)
    other = (colour + uniform(0.3, 0.7).unsqueeze(1)).frac()  # differs by 0.3 or more in each channel
    noise = torch.randn(count, 3, 32, 32, generator=random) * uniform(0.02, 0.12).unsqueeze(1)
    return ((torch.where(ink, colour, other) + noise).clamp(0, 1) * 255).to(torch.uint8), labels


# ---- training ----
def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="zero run -n N python cifar10.py [options]",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--data", metavar="DIR", help="CIFAR-10's files; without it, drawn pictures")
    add("--pictures", type=positive, default=10000, metavar="N", help="drawn for training, and a fifth more to test")
    add("--epochs", type=positive, default=6, metavar="N", help="passes over the training pictures (%(default)s)")
    add("--batch-size", type=positive, default=32, metavar="N", help="pictures of a step, over all ranks (%(default)s)")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate (%(default)s)")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of parameters and gradients (%(default)s)")
    add("--stage", type=int, choices=range(4), default=0, help="ZeRO stage (%(default)s)")
    add("--log-interval", type=positive, default=100, metavar="N", help="print every N steps (%(default)s)")
    add = parser.add_argument_group("experts").add_argument
    add("--moe", action="store_true", help="layers with experts, for which are the options below")
    add("--num-experts", type=positive, nargs="+", metavar="N", help="experts of each layer (1)")
    add("--ep-world-size", type=positive, metavar="N", help="ranks that share the experts (1)")
    add("--mlp-type", choices=["standard", "residual"], help="residual: also a dense expert (standard)")
    add("--top-k", type=int, choices=[1, 2], help="experts of a picture (1)")
    add("--min-capacity", type=int, metavar="N", help="pictures that an expert takes at least (0)")
    add("--noisy-gate-policy", choices=["None", "RSample", "Jitter"], help="noise while training (None)")
    add("--moe-param-group", action="store_true", help="groups of the optimizer for experts: not needed, no effect")
    args = parser.parse_args()
    check_experts(parser, args)
    if not 0 < args.lr < 1:
        parser.error(f"--lr: got {args.lr:g}, expected a number between 0 and 1")
    return args


def check_experts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in the values of options that are not given; the message of one that does not fit names it."""
    defaults = {"ep_world_size": 1, "mlp_type": "standard", "top_k": 1, "min_capacity": 0, "noisy_gate_policy": "None"}
    words = ["num_experts", "moe_param_group", *defaults]
    if not args.moe and (given := [word for word in words if getattr(args, word)]):
        parser.error(f"--{given[0].replace('_', '-')}: got it without --moe, expected both")
    for word, value in defaults.items():
        setattr(args, word, value if getattr(args, word) is None else getattr(args, word))
    args.num_experts = (args.num_experts or [1]) if args.moe else []
    for experts in args.num_experts:
        if experts % args.ep_world_size:
            parser.error(f"--ep-world-size: got {args.ep_world_size}, expected a divisor of --num-experts {experts}")
        if experts < args.top_k:
            parser.error(f"--top-k: got {args.top_k}, expected at most --num-experts {experts}")
    if args.noisy_gate_policy == "RSample" and args.top_k != 1:
        parser.error("--noisy-gate-policy: got RSample, expected None or Jitter with --top-k 2")
    if args.min_capacity < 0:
        parser.error(f"--min-capacity: got {args.min_capacity}, expected 0 or more")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


def config(args: argparse.Namespace) -> dict:
    return {
        "train_batch_size": args.batch_size,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": args.lr, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": args.lr, "warmup_num_steps": 100},
        },
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "loss_scale_window": 500, "initial_scale_power": 15},
        "zero_optimization": {"stage": args.stage},
    }


def main() -> None:
    args = arguments()
    if args.data is not None:
        names, (pictures, labels, test_pictures, test_labels) = CIFAR10, read_cifar10(args.data)
    else:
        names = DRAWN
        pictures, labels = draw(args.pictures, seed=1)
        test_pictures, test_labels = draw(max(10, args.pictures // 5), seed=2)

    torch.manual_seed(1)
    model = Net(args)
    engine = libzero.Engine(model, config(args))
    rank, world, batch = engine.comm.rank, engine.comm.size, engine.micro_batch_size
    if len(labels) < batch * world:
        fail(f"--batch-size: got {args.batch_size}, expected at most the {len(labels)} pictures for training")
    if rank == 0:
        what = f"CIFAR-10 from {args.data}" if args.data is not None else "drawn pictures (not CIFAR-10)"
        print(f"{what}: {len(labels)} for training, {len(test_labels)} for the test; {world} ranks, stage {args.stage}")
        if args.moe:
            ranks = f"over {args.ep_world_size} ranks" if args.ep_world_size > 1 else "on every rank"
            print(f"layers of {args.num_experts} experts, {ranks}; {args.top_k} of them for each picture")
        if args.moe_param_group:
            print("--moe-param-group has no effect: the engine's norm counts each expert once without groups")

    def prepared(some: torch.Tensor) -> torch.Tensor:
        """Bytes to numbers from -1 to 1 in the model's dtype."""
        return (some.float() / 127.5 - 1).to(DTYPES[args.dtype])

    begin = time.monotonic()
    for epoch in range(1, args.epochs + 1):
        # The same order on every rank; each rank takes its own part of each batch.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for i in range(len(labels) // (batch * world)):
            mine = order[(i * world + rank) * batch :][:batch]
            scores, aux = engine(prepared(pictures[mine]))
            loss = nn.functional.cross_entropy(scores.float(), labels[mine])
            engine.backward(loss + 0.01 * aux)
            result = engine.step()
            total += loss.item()
            if (i + 1) % args.log_interval == 0:
                if rank == 0:
                    scale = f"  loss scale {result.loss_scale:g}" if args.dtype == "fp16" else ""
                    print(f"epoch {epoch}  step {i + 1:5d}  loss {total / args.log_interval:.4f}{scale}", flush=True)
                total = 0.0

    # Each rank tests on its share. The first row counts pictures by class, the second right answers.
    counts = torch.zeros(2, 10)
    engine.eval()
    with torch.no_grad():
        for start in range(0, len(test_labels), 250 * world):  # as many forwards on each rank
            share = slice(start + rank, start + 250 * world, world)
            right = engine(prepared(test_pictures[share]))[0].argmax(1) == test_labels[share]
            counts[0] += torch.bincount(test_labels[share], minlength=10)
            counts[1] += torch.bincount(test_labels[share][right], minlength=10)
    counts = counts.flatten()
    engine.comm.all_reduce(counts).wait()
    if rank == 0:
        of, right = counts.view(2, 10).tolist()
        for name, n, good in zip(names, of, right, strict=True):
            print(f"{name:>10}  {100 * good / n:5.1f} % of {n:.0f}" if n else f"{name:>10}  no picture")
        print(f"accuracy {100 * sum(right) / sum(of):.2f} % after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except (libzero.ConfigError, OSError) as fault:
        fail(str(fault))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
