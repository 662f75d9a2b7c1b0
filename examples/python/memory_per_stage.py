"""Memory and time of a training step of a BERT, by ZeRO stage, with and without offload.

Prints the bytes in use by rank 0 before forward, after forward, after backward and after the step, on the device and in
host memory; the device's peak in a step, with buffers that are kept for the next step; and the time of some
iterations. Weights and tokens are random.
"""

import argparse
import json
import sys
import time
from typing import NoReturn

import torch
import transformers

import libzero

HOST = {"device": "cpu", "pin_memory": True}
CASES = {
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 2, offload": {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}},
    "stage 3": {"zero_optimization": {"stage": 3}},
    "stage 3, offload": {"zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}},
    "stage 3, fp16": {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
}
MOMENTS = ["before", "forward", "backward", "step"]


def fail(text: str) -> NoReturn:
    print(f"memory_per_stage.py: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, usage="zero run -n N python memory_per_stage.py [options]")
    add = parser.add_argument
    add("--layers", type=positive, default=4, metavar="N", help="of the BERT (%(default)s)")
    add("--hidden", type=positive, default=128, metavar="N", help="its width (%(default)s)")
    add("--heads", type=positive, default=4, metavar="N", help="attention heads (%(default)s)")
    add("--vocabulary", type=positive, default=4096, metavar="N", help="different tokens (%(default)s)")
    add("--sequence", type=positive, default=64, metavar="N", help="tokens of a sample (%(default)s)")
    add("--batch-size", type=positive, default=3, metavar="N", help="samples of a rank (%(default)s)")
    add("--iterations", type=positive, default=20, metavar="N", help="timed training steps (%(default)s)")
    add("--json", action="store_true", help="print bytes and seconds as JSON instead of the table")
    args = parser.parse_args()
    if args.hidden % args.heads != 0:
        parser.error(f"--hidden: got {args.hidden}, expected a multiple of --heads {args.heads}")
    return args


def measure(args: argparse.Namespace, case: dict) -> dict:
    """Bytes of this rank by tier at the four moments, and seconds of the iterations."""
    sizes = transformers.BertConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.sequence,
    )
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **case,
    }
    torch.manual_seed(1)
    model = libzero.build(lambda: transformers.BertForMaskedLM(sizes), config)
    engine = libzero.Engine(model, config)
    random = torch.Generator().manual_seed(engine.comm.rank)

    def forward() -> torch.Tensor:
        tokens = torch.randint(0, args.vocabulary, (args.batch_size, args.sequence), generator=random)
        return engine(input_ids=tokens, labels=tokens).loss

    def train(steps: int) -> None:
        for _ in range(steps):
            engine.backward(forward())
            engine.step()

    train(2)  # learns the order of the units, makes the buffers
    engine.reset_peak_memory()
    engine.comm.barrier()
    begin = time.monotonic()
    train(args.iterations)
    found: dict = {"parameters": sum(n for _, n in engine.units()), "seconds": time.monotonic() - begin}
    found |= {"peak": engine.memory().peak(), "device": [], "host": []}

    def look() -> None:
        engine.reset_peak_memory()  # frees buffers that are not in use
        for tier in ("device", "host"):
            found[tier].append(engine.memory().current(tier))

    look()
    loss = forward()
    look()
    engine.backward(loss)
    del loss
    look()
    engine.step()
    look()
    engine.close()
    return found


def main() -> None:
    args = arguments()
    comm = libzero.default_communicator()
    found = {}
    for name, case in CASES.items():
        found[name] = measure(args, case)
    if comm.rank != 0:
        return
    if args.json:
        print(json.dumps({"ranks": comm.size, "moments": MOMENTS, "iterations": args.iterations, "cases": found}))
        return
    parameters = found["stage 1"]["parameters"]
    tokens = f"{args.batch_size} x {args.sequence} tokens each"
    print(f"BERT, {parameters:,} parameters; {comm.size} ranks, {tokens}; MB of rank 0")
    print(f"{'':16}{'device memory':^45} {'host memory':^36}{f'{args.iterations} steps':>10}")
    print(f"{'':16}" + "".join(f"{title:>9}" for title in [*MOMENTS, "peak", *MOMENTS]) + f"{'seconds':>11}")
    for name, row in found.items():
        cells = [*row["device"], row["peak"], *row["host"]]
        print(f"{name:16}" + "".join(f"{cell / 1e6:9.2f}" for cell in cells) + f"{row['seconds']:11.2f}")


if __name__ == "__main__":
    try:
        main()
    except libzero.ConfigError as fault:
        fail(str(fault))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
