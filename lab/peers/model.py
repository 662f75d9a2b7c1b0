"""transformers' side of script/model-speed: forward and backward of the model of a config.json, in turns with ours.

For each line of standard input it takes --steps steps and answers with the milliseconds of processor time of one.
"""

import argparse
import sys
import time

import torch
from huggingface import HuggingFace

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--recipe", choices=["fp32", "bf16"], default="fp32")
for name, value in dict(batch=1, sequence=128, steps=3, threads=1).items():
    parser.add_argument("--" + name, type=int, default=value)
o = parser.parse_args()

torch.set_num_threads(o.threads)
torch.manual_seed(1)
model = HuggingFace(o.config)
if o.recipe == "bf16":
    model.bfloat16()
tokens = torch.randint(model.config.vocab_size, (o.batch, o.sequence + 1))
for _ in sys.stdin:
    start = time.process_time()
    for _ in range(o.steps):
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    print((time.process_time() - start) / o.steps * 1e3, flush=True)
