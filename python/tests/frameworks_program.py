"""Runs cases of trainer_program, accelerate_program and so on, and writes what rank 0 observes as JSON.

    zero run --deepspeed --num_gpus 2 frameworks_program.py --folder F --out seen.json --cases trainer.whole ...
    python frameworks_program.py --plain --folder F --out plain.json --cases trainer.whole ...

plain: the same programs without DeepSpeed, in one process whose batch is that of all ranks.
"""

import argparse
import importlib
import json
import os

import torch

RANK = os.environ.get("RANK", "0")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--stages", type=int, nargs="+", default=[3])
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--own", action="store_true", help="accelerate: the program makes the plugin")
    parser.add_argument("--part", default="", help="trainer.resumed, trainer.resized: one of its parts")
    words = parser.parse_args()
    torch.set_num_threads(1)
    os.makedirs(words.folder, exist_ok=True)
    seen = {}
    for case in words.cases:
        module, name = case.split(".")
        program = getattr(importlib.import_module(f"{module}_program"), name)
        for stage in [None] if words.plain else words.stages:
            seen[f"{case} {stage}"] = program(words, stage)
            if RANK == "0":
                with open(words.out, "w") as file:
                    json.dump(seen, file, indent=1)


if __name__ == "__main__":
    main()
