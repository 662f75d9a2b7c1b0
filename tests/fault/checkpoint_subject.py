#!/usr/bin/env python3
# Other libraries as the subjects of tests/fault/checkpoint_faults.py: saves and loads as their documentation says.
#
#   checkpoint_subject.py SYSTEM SOCKET      run by the Python that has torch and deepspeed
#
# SYSTEM:
#   dcp            torch.distributed.checkpoint.save() and load(), a directory for each step; the newest is the one with
#                  the highest step that has a ".metadata", as torchtitan chooses
#   dcp-in-place   the same into one directory, over the checkpoint before
#   deepspeed      DeepSpeedEngine.save_checkpoint(ROOT) and load_checkpoint(ROOT), ZeRO stage 2, one tag for each step
#
# Imports the library once; each connection to the unix socket SOCKET is served by a forked process, which speaks the
# lines of save_program.cpp: "ready PID", "save ROOT N", "load ROOT"; and "load ROOT N" for the checkpoint of step N by
# name, as a person would who is told that the newest one cannot be read.
import os
import signal
import socket
import sys
import warnings

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TORCH_CPP_LOG_LEVEL="ERROR")
warnings.simplefilter("ignore")
import logging  # noqa: E402

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

LAYERS, WIDTH = 4, 256
STATES = ("master", "exp_avg", "exp_avg_sq")


def pattern(numel, n, state):
    return (torch.arange(numel, dtype=torch.float32) + 31 * state).remainder(1000) / 1024 + n


def names():
    return [(f"layer{i}.{part}", size) for i in range(LAYERS) for part, size in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))]


def numel(size):
    return size[0] * (size[1] if len(size) > 1 else 1)


class Dcp:
    def __init__(self, in_place):
        self.in_place = in_place

    def state(self, n):
        values = {kind: {name: pattern(numel(size), n, k).view(size) for name, size in names()}
                  for k, kind in enumerate(STATES)}
        return values | {"step": torch.tensor(n)}

    def folder(self, root, n):
        return root if self.in_place else os.path.join(root, f"step-{n}")

    def save(self, root, n):
        dcp.save(self.state(n), checkpoint_id=self.folder(root, n), no_dist=True)

    def load(self, root, n):
        if not self.in_place and n is None:
            steps = [int(name[5:]) for name in os.listdir(root)
                     if name.startswith("step-") and os.path.isfile(os.path.join(root, name, ".metadata"))]
            if not steps:
                raise FileNotFoundError("no directory with .metadata")
            n = max(steps)
        state = self.state(-1)
        dcp.load(state, checkpoint_id=self.folder(root, n), no_dist=True)
        found = int(state["step"])
        wanted = self.state(found)
        for kind in STATES:
            for name, _ in names():
                if not torch.equal(state[kind][name], wanted[kind][name]):
                    return found, f"{kind} {name}"
        return found, ""


class DeepSpeed:
    def __init__(self):
        import deepspeed
        deepspeed.utils.logging.logger.setLevel(logging.CRITICAL)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        deepspeed.init_distributed(dist_backend="gloo")
        model = torch.nn.Sequential()
        for i in range(LAYERS):
            model.add_module(f"layer{i}", torch.nn.Linear(WIDTH, WIDTH))
        self.engine = deepspeed.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}})[0]
        loss = self.engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().sum()
        self.engine.backward(loss)
        self.engine.step()  # makes the moments

    def tensors(self):
        master = self.engine.optimizer.single_partition_of_fp32_groups[0]
        moments = self.engine.optimizer.optimizer.state[master]
        return [master.data, moments["exp_avg"], moments["exp_avg_sq"]]

    def save(self, root, n):
        for k, tensor in enumerate(self.tensors()):
            tensor.copy_(pattern(tensor.numel(), n, k))
        for p in self.engine.module.parameters():
            p.data.copy_(pattern(p.numel(), n, 0).view(p.shape))
        if not self.engine.save_checkpoint(root, tag=f"step-{n}", client_state={"n": n}):
            raise RuntimeError("save_checkpoint() returned False")

    def load(self, root, n):
        path, client = self.engine.load_checkpoint(root, tag=None if n is None else f"step-{n}")
        if path is None:
            raise FileNotFoundError("load_checkpoint() returned None: training starts from step 0")
        found = client["n"]
        for k, tensor in enumerate(self.tensors()):
            if not torch.equal(tensor, pattern(tensor.numel(), found, k)):
                return found, STATES[k]
        return found, ""


def serve(connection, system):
    subject = DeepSpeed() if system == "deepspeed" else Dcp(system == "dcp-in-place")
    stream = connection.makefile("rw", buffering=1, encoding="utf-8", errors="replace")
    stream.write(f"ready {os.getpid()}\n")
    for line in stream:
        what, root, *rest = line.split()
        try:
            if what == "save":
                subject.save(root, int(rest[0]))
                stream.write(f"saved {rest[0]}\n")
            else:
                found, wrong = subject.load(root, int(rest[0]) if rest else None)
                stream.write(f"wrong {wrong}\n" if wrong else f"loaded {found}\n")
        except BaseException as e:  # whatever it is, it is not silence
            stream.write(f"failed 1 {type(e).__name__}: {' '.join(str(e).split())[:300]}\n")


def main():
    system, path = sys.argv[1:]
    if system == "deepspeed":
        import deepspeed
        print(f"versions deepspeed {deepspeed.__version__} torch {torch.__version__.split('+')[0]}", flush=True)
    else:
        print(f"versions torch {torch.__version__.split('+')[0]}", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(8)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 1)
                os.dup2(null.fileno(), 2)
            serve(connection, system)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main()
