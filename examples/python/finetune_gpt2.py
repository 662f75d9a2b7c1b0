"""Fine-tunes GPT-2 of Hugging Face on a text. Written for DeepSpeed's interface.

The configuration is DeepSpeed's, as a file (--deepspeed_config FILE) or, without the option, as the dictionary below.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import NoReturn

import deepspeed
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="python -m libzero.deepspeed.run --num_gpus N finetune_gpt2.py --text FILE [options]",
    )
    add = parser.add_argument
    add("--text", required=True, metavar="FILE", help="the text to learn, UTF-8")
    add("--sequence", type=positive, default=64, metavar="N", help="tokens of a sample (%(default)s)")
    add("--steps", type=positive, default=100, metavar="N", help="optimizer steps in total (%(default)s)")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate, without an optimizer in FILE (%(default)s)")
    add("--seed", type=int, default=1, help="of the initial weights and of the samples' order (%(default)s)")
    add("--log-interval", type=positive, default=10, metavar="N", help="print every N steps (%(default)s)")
    add("--save", metavar="DIR", help="folder of the checkpoints")
    add("--save-interval", type=positive, default=50, metavar="N", help="and at the end (%(default)s)")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --save DIR")
    add("--export", metavar="DIR", help="write the trained model as a folder for from_pretrained()")
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # passed by the launcher

    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="DIR", help="folder with config.json, the weights and, if any, a tokenizer")
    group.add_argument("--layers", type=positive, default=2, help="of a model with random weights (%(default)s)")
    group.add_argument("--width", type=positive, default=64, help="its hidden size (%(default)s)")
    group.add_argument("--heads", type=positive, default=4, help="its attention heads (%(default)s)")

    group = parser.add_argument_group("configuration without --deepspeed_config")
    group.add_argument("--stage", type=int, choices=range(4), default=2, help="ZeRO stage (%(default)s)")
    group.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="(%(default)s)")
    group.add_argument("--batch-size", type=positive, default=8, metavar="N", help="samples of a rank (%(default)s)")
    group.add_argument("--accumulation", type=positive, default=1, metavar="N", help="of micro-batches (%(default)s)")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    if args.sequence < 2:
        parser.error("--sequence: got 1, expected 2 or more: each token is predicted from those before it")
    if not 0 < args.lr < 1:
        parser.error(f"--lr: got {args.lr:g}, expected a number between 0 and 1")
    if args.deepspeed_config is not None:
        names = ("stage", "dtype", "batch_size", "accumulation")
        given = [name for name in names if getattr(args, name) != parser.get_default(name)]
        if given:
            parser.error(f"--{given[0].replace('_', '-')} cannot be used with --deepspeed_config: set it in the file")
    if args.resume and args.save is None:
        parser.error("--resume needs --save DIR, the folder of the checkpoints")
    return args


def fail(text: str) -> NoReturn:
    print(f"finetune_gpt2.py: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def config_dictionary(args: argparse.Namespace) -> dict:
    """The second way to configure DeepSpeed: a dictionary in the program."""
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": max(2, args.steps),
                "warmup_min_lr": 0,
                "warmup_max_lr": args.lr,
                "warmup_num_steps": max(2, args.steps // 10),
            },
        },
        "fp16": {"enabled": args.dtype == "fp16"},
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": {"stage": args.stage, "stage3_gather_16bit_weights_on_model_save": True},
        "steps_per_print": 10**9,
    }


def has_optimizer(file: str) -> bool:
    """Then DeepSpeed makes it, and the program's is not needed."""
    try:
        return "optimizer" in json.loads(Path(file).read_text())
    except json.JSONDecodeError as fault:
        fail(f"--deepspeed_config: {file} is not JSON: {fault}")


def load_model(args: argparse.Namespace) -> tuple:
    """The model, and its tokenizer; None stands for bytes."""
    if args.model is None:
        if args.width % args.heads != 0:
            fail(f"--width: got {args.width}, expected a multiple of --heads {args.heads}")
        sizes = transformers.GPT2Config(
            vocab_size=256, n_positions=args.sequence, n_layer=args.layers, n_embd=args.width, n_head=args.heads,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(sizes), None
    folder = Path(args.model)
    if not (folder / "config.json").is_file():
        fail(f"--model: {folder} has no config.json. Hint: a folder of save_pretrained(), or --layers and --width")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    if args.sequence > model.config.n_positions:
        fail(f"--sequence: got {args.sequence}, expected at most the model's {model.config.n_positions} positions")
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if model.config.vocab_size < 256:
        fail(f"--model: {folder} has no tokenizer, and bytes do not fit its vocabulary of {model.config.vocab_size}")
    return model, None


def read_samples(args: argparse.Namespace, tokenizer) -> TensorDataset:
    """The text in pieces of --sequence tokens. What is left at its end is not used."""
    try:
        text = Path(args.text).read_bytes()
    except OSError as fault:
        fail(f"--text: cannot read {args.text}: {fault.strerror}. Hint: script/demo-text makes a text")
    tokens = list(text) if tokenizer is None else tokenizer(text.decode(errors="replace"), verbose=False)["input_ids"]
    count = len(tokens) // args.sequence
    return TensorDataset(torch.tensor(tokens[: count * args.sequence]).view(count, args.sequence))


def main() -> None:
    args = arguments()
    transformers.utils.logging.disable_progress_bar()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model, tokenizer = load_model(args)
    model.loss_type = "ForCausalLM"  # what transformers takes after a warning
    samples = read_samples(args, tokenizer)

    if args.deepspeed_config is not None:
        optimizer = None if has_optimizer(args.deepspeed_config) else torch.optim.Adam(model.parameters(), lr=args.lr)
        engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_dictionary(args))
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(args.seed + 1000 + rank)  # each rank has its own dropout

    sampler = DistributedSampler(samples, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(
        samples,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        sampler=sampler,
        drop_last=True,
        generator=torch.Generator(),  # leaves torch's own generator, which checkpoints store, as it is
    )
    if len(loader) == 0:
        fail(
            f"--text: {args.text} has {len(samples)} samples of {args.sequence} tokens, expected at least "
            f"{engine.train_micro_batch_size_per_gpu() * world} for one batch on {world} ranks"
        )

    if args.resume:
        path, _ = engine.load_checkpoint(args.save)
        if path is None:
            fail(f"--resume: {args.save} has no checkpoint")
        if rank == 0:
            print(f"continuing from {path}, {engine.global_steps} of {args.steps} steps done", flush=True)

    def batches():
        """From the first one that has not been trained on, over all epochs."""
        done = engine.global_steps * engine.gradient_accumulation_steps()
        for epoch in itertools.count(done // len(loader)):
            sampler.set_epoch(epoch)
            skipped = done % len(loader) if epoch == done // len(loader) else 0
            yield from itertools.islice(loader, skipped, None)

    for (tokens,) in batches():
        if engine.global_steps >= args.steps:
            break
        tokens = tokens.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        updates, lr, scale = engine.is_gradient_accumulation_boundary(), engine.get_lr()[0], engine.optimizer.loss_scale
        engine.backward(loss)
        engine.step()
        step = engine.global_steps
        if not updates:
            continue
        if step % args.log_interval == 0 or step == args.steps:
            mean = loss.detach().float()
            deepspeed.comm.all_reduce(mean)
            if rank == 0:
                print(f"step {step:5d}  loss {mean.item() / world:.4f}  lr {lr:.3e}  loss scale {scale:g}", flush=True)
        if args.save is not None and (step % args.save_interval == 0 or step == args.steps):
            engine.save_checkpoint(args.save)

    if args.export is not None:
        if engine.save_16bit_model(args.export):
            if rank == 0:
                engine.module.config.save_pretrained(args.export)
                if tokenizer is not None:
                    tokenizer.save_pretrained(args.export)
                print(f"the model is in {args.export}")
        elif rank == 0:
            fail("--export at stage 3 needs stage3_gather_16bit_weights_on_model_save in the file")


if __name__ == "__main__":
    try:
        main()
    except (deepspeed.DeepSpeedConfigError, OSError) as fault:
        fail(str(fault))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
