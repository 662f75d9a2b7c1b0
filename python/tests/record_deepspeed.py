"""Records deepspeed-0.19.8.json: what deepspeed_program.py observes with DeepSpeed itself.

    PYTHON -B python/tests/record_deepspeed.py [CASE...]

The case "huggingface" is huggingface_program.py, where transformers and accelerate are installed as well.
PYTHON has deepspeed 0.19.8 and torch 2.11 (CPU). Other cases than those named keep their records. DeepSpeed refuses
fp16 on CPUs without an instruction for it, though torch computes it; here it is told that there is one.
"""

import importlib.metadata
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def rank() -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    program = str(HERE / sys.argv[sys.argv.index("--rank") + 1])
    sys.argv = [program, *sys.argv[3:]]
    runpy.run_path(program, run_name="__main__")


def record(program: str, *words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen.json"
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        subprocess.run(
            [sys.executable, *launcher, __file__, "--rank", program, "--out", str(out), *words],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            check=True,
        )
        return json.loads(out.read_text())


def main() -> None:
    version = importlib.metadata.version("deepspeed")
    file = HERE / f"deepspeed-{version}.json"
    seen = json.loads(file.read_text()) if file.exists() else {}
    only = sys.argv[1:]
    if "huggingface" in only or (not only and importlib.util.find_spec("transformers")):
        with tempfile.TemporaryDirectory() as folder:
            seen["huggingface"] = record("huggingface_program.py", "--folder", folder)
    cases = [case for case in only if case != "huggingface"]
    if cases or not only:
        seen.update(record("deepspeed_program.py", *(["--only", *cases] if cases else [])))
    file.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
