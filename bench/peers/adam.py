"""An optimizer step of the peers over one flat fp32 tensor: adam.py MILLIONS THREADS; prints one JSON line each, best and median of 10.

Beside it `optimizer_bench` measures libzero's. 28 bytes of memory traffic a parameter: the triad's line says what the machine can do.
"""

import json
import os
import statistics
import sys
import time

if len(sys.argv) != 3:
    sys.exit(__doc__)
elements, threads = int(float(sys.argv[1]) * 1e6), int(sys.argv[2])
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = str(threads)
import torch

torch.set_num_threads(threads)
settings = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def deepspeed_adam(p):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([p], adamw_mode=True, fp32_optimizer_states=True, **settings)


def measure(name, step, bytes_per_element):
    for _ in range(2):
        step()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    best, median = min(seconds), statistics.median(seconds)
    print(json.dumps({
        "peer": name, "elements": elements, "threads": threads, "best_elements_per_s": elements / best, "median_elements_per_s": elements / median,
        "best_bytes_per_s": bytes_per_element * elements / best}), flush=True)


for name, make in {
    "torch fused AdamW": lambda p: torch.optim.AdamW([p], fused=True, **settings),
    "torch foreach AdamW": lambda p: torch.optim.AdamW([p], foreach=True, **settings),
    "torch for-loop AdamW": lambda p: torch.optim.AdamW([p], foreach=False, **settings),
    "DeepSpeedCPUAdam": deepspeed_adam,
}.items():
    parameter = torch.nn.Parameter(torch.randn(elements))
    parameter.grad = torch.randn(elements) * 1e-3
    try:
        optimizer = make(parameter)
    except Exception as error:  # DeepSpeed compiles its own at the first use
        print(json.dumps({"peer": name, "error": str(error)[-300:]}), flush=True)
        continue
    measure(name, optimizer.step, 28)
a, b, c = torch.randn(elements), torch.randn(elements), torch.empty(elements)
measure("triad (torch.add with alpha)", lambda: torch.add(a, b, alpha=3.0, out=c), 12)
