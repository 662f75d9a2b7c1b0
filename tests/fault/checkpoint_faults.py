#!/usr/bin/env python3
# Faults during and after a save, with one judge for every library: kills at random times (S1), kills at every system
# call of the save (S2), flipped bits (S10), a full disk (S11).
#
#   checkpoint_faults.py S1|S2|S10|S11 ... [--count N] [--seed S] [--json FILE] [--build DIR] [--set key=value ...]
#   checkpoint_faults.py S11 --disk tmpfs|ext4 --work save|export      a file system in memory, or on a loop device
#   checkpoint_faults.py S2 --matrix              every stage, tier and way to save, one after the other
#   checkpoint_faults.py ... --system dcp|dcp-in-place|deepspeed --python PYTHON     the others, on the same states
#
# The subject is a process: tests/fault/save_program.cpp, or tests/fault/checkpoint_subject.py. A checkpoint of step 1 is
# there; the fault meets the save of step 2, or the checkpoint that it made. Then another process loads the newest
# checkpoint as a run does that starts again. Right is: the whole state of step 2, or of step 1 if the save had not
# returned, or an error at a load where a file was changed. Wrong is: nothing can be loaded, other values without an
# error, step 1 although the save had returned. --count: trials of S1 and S10, calls of S2, fill levels of S11; S2 needs
# strace and ptrace, S11 the right to mount, and loop devices for ext4; without them they are skipped with the reason.
# --set background=1 saves in the background. Exit code 0, or 1 if something was lost.
import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
# Calls that change files, or say that they are changed.
CALLS = ("openat mkdir mkdirat rename renameat renameat2 unlink unlinkat rmdir link linkat symlinkat write pwrite64 writev "
         "pwritev pwritev2 copy_file_range sendfile fallocate ftruncate fsync fdatasync flock io_uring_enter").split()


class Subject:
    """A process that saves and loads."""

    def __init__(self, maker):
        self.process, self.stream = maker()
        self.pid = int(self.line().split()[1])

    def line(self):
        return self.stream.readline().decode(errors="replace").rstrip("\n")

    def send(self, text):
        try:
            self.stream.write(text.encode() + b"\n")
            self.stream.flush()
        except (BrokenPipeError, ConnectionError):
            pass

    def ask(self, text):
        self.send(text)
        try:
            return self.line()
        except ConnectionError:
            return ""

    def kill(self):
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def end(self):
        self.kill()
        self.stream.close()
        if self.process is not None:
            self.process.wait()
        else:
            while Path(f"/proc/{self.pid}").exists():
                time.sleep(0.001)


class Pipes:
    def __init__(self, process):
        self.readline, self.write, self.flush = process.stdout.readline, process.stdin.write, process.stdin.flush
        self.process = process

    def close(self):
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass


def libzero(build, settings):
    program = build / "tests" / "save_program"
    if not program.exists():
        sys.exit(f"checkpoint_faults: error: got no {program}, expected a build")

    def make():
        process = subprocess.Popen([program, *settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
        return process, Pipes(process)
    return make, "libzero"


def peer(system, python, folder):
    path = str(folder / "socket")
    server = subprocess.Popen([python, ROOT / "tests/fault/checkpoint_subject.py", system, path],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    versions = ""
    while not versions.startswith("versions "):
        versions = server.stdout.readline()
        if not versions:
            sys.exit(f"checkpoint_faults: error: {python} does not run {system}")
    while not os.path.exists(path):
        time.sleep(0.01)

    def make():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.settimeout(LIMIT_S)
        return None, connection.makefile("rwb")
    return make, versions.removeprefix("versions ").strip(), server


class Trials:
    """What happened, by outcome."""

    def __init__(self, name):
        self.name, self.outcomes, self.examples, self.seconds, self.points = name, {}, {}, 0, 0

    def add(self, outcome, example=""):
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.examples.setdefault(outcome, example)

    def count(self, *kinds):
        return sum(n for text, n in self.outcomes.items() if text.startswith(kinds))

    def total(self):
        return sum(self.outcomes.values())

    def figures(self):
        return {"trials": self.total(), "outcomes": self.outcomes, "examples": self.examples,
                "seconds": round(self.seconds, 1)} | ({"points": self.points} if self.points else {})

    def join(self, other, seconds):
        for outcome, n in other.outcomes.items():
            self.outcomes[outcome] = n + self.outcomes.get(outcome, 0)
        self.examples = other.examples | self.examples
        self.seconds += seconds
        self.points += other.points


# Outcomes that no library should have.
BAD = ("lost", "wrong", "hung")


class Bench:
    def __init__(self, make, folder, chance, is_peer, disk, work):
        self.make, self.folder, self.chance, self.is_peer, self.disk, self.work = make, folder, chance, is_peer, disk, work
        self.loader = None
        self.number = 0

    def fresh(self, steps=1, inside=None):
        """A root with checkpoints of the steps 1 to `steps`, made once and copied."""
        model = self.folder / f"model-{steps}"
        if not model.exists():
            subject = Subject(self.make)
            for step in range(1, steps + 1):
                answer = subject.ask(f"save {model} {step}")
                if answer != f"saved {step}":
                    sys.exit(f"checkpoint_faults: error: a save without a fault: {answer}")
            subject.end()
        self.number += 1
        root = (inside or self.folder) / f"root-{self.number}"
        shutil.copytree(model, root, symlinks=True)
        return root

    def load(self, root, step=None):
        return self.loader_answer(f"load {root}" + ("" if step is None else f" {step}"))

    def loader_answer(self, question):
        if self.loader is None:
            self.loader = Subject(self.make)
        answer = self.loader.ask(question)
        if answer == "" or not answer.startswith("loaded"):
            self.loader.end()  # whatever state it is in
            self.loader = None
        return answer

    def judge(self, trials, root, returned, what):
        """After a fault in the save of step 2. returned: the save had said that it was done."""
        answer = self.load(root)
        if answer == "loaded 2" or (answer == "loaded 1" and not returned):
            trials.add("step 2" if answer == "loaded 2" else "step 1", what)
        elif answer == "loaded 1":
            trials.add("lost: the save had returned", what)
        elif answer.startswith("loaded") or answer.startswith("wrong"):
            trials.add("wrong values without an error", f"{what}: {answer}")
        elif self.is_peer and self.load(root, 1) == "loaded 1":
            trials.add("lost unless step 1 is named by hand", f"{what}: {answer}")
        else:
            trials.add("lost: nothing can be loaded", f"{what}: {answer}")
        shutil.rmtree(root)

    def end(self):
        if self.loader is not None:
            self.loader.end()


def s1(bench, count):
    trials, times = Trials("S1"), []
    for _ in range(5):
        root, subject = bench.fresh(), Subject(bench.make)
        began = time.monotonic()
        subject.ask(f"save {root} 2")
        times.append(time.monotonic() - began)
        subject.end()
        shutil.rmtree(root)
    usual = sorted(times)[2]
    for _ in range(count):
        root, subject = bench.fresh(), Subject(bench.make)
        delay = bench.chance.uniform(0, 1.3 * usual)
        subject.send(f"save {root} 2")
        time.sleep(delay)
        subject.kill()
        try:
            returned = subject.line() == "saved 2"
        except OSError:
            returned = False
        subject.end()
        bench.judge(trials, root, returned, f"after {1e3 * delay:.1f} ms of {1e3 * usual:.1f}")
    return trials


def why_no_ptrace():
    if shutil.which("strace") is None:
        return "strace is not installed"
    ended = subprocess.run(["strace", "-o", "/dev/null", "-e", "inject=getcwd:signal=SIGKILL:when=1", "pwd"],
                           capture_output=True, text=True)
    return "" if ended.returncode in (-9, 137) else "strace cannot inject signals here: " + ended.stderr.strip()[-200:]


def traced(subject, arguments):
    tracer = subprocess.Popen(["strace", "-f", "-p", str(subject.pid), *arguments], stderr=subprocess.PIPE, text=True)
    # Each thread is attached before the first is said to be.
    while "attached" not in tracer.stderr.readline():
        if tracer.poll() is not None:
            sys.exit("checkpoint_faults: error: strace ended")
    return tracer


def calls_of_a_save(bench):
    """How often each call comes in a save, at most, in one thread."""
    root, log = bench.fresh(), bench.folder / "strace.log"
    subject = Subject(bench.make)
    tracer = traced(subject, ["-o", str(log), "-e", "trace=" + ",".join("?" + call for call in CALLS)])
    answer = subject.ask(f"save {root} 2")
    if answer != "saved 2":
        sys.exit(f"checkpoint_faults: error: a save without a fault: {answer}")
    subject.end()
    tracer.wait()
    counts = {}
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"(\d+) +(\w+)\(", line)
        if match:
            counts[match.groups()] = counts.get(match.groups(), 0) + 1
    shutil.rmtree(root)
    most = {}
    for (_, call), n in counts.items():
        most[call] = max(n, most.get(call, 0))
    return most


def s2(bench, count):
    trials = Trials("S2")
    points = [(call, k) for call, n in sorted(calls_of_a_save(bench).items()) for k in range(1, n + 1)]
    trials.points = len(points)
    if count and count < len(points):
        points = [points[i * len(points) // count] for i in range(count)]
    for call, k in points:
        root, subject = bench.fresh(), Subject(bench.make)
        tracer = traced(subject, ["-o", "/dev/null", "-e", f"trace={call}", "-e",
                                  f"inject={call}:signal=SIGKILL:when={k}"])
        answer = subject.ask(f"save {root} 2")
        subject.end()
        tracer.wait()
        tracer.stderr.close()
        bench.judge(trials, root, answer == "saved 2", f"{call} number {k}")
    return trials


def files_under(root):
    return sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 0)


def s10(bench, count):
    trials = Trials("S10")
    for _ in range(count):
        root = bench.fresh(steps=2)
        # The lock says who holds it, and is no part of a checkpoint.
        file = bench.chance.choice([path for path in files_under(root)
                                    if "step-1/" not in str(path) and path.name != ".lock"])
        data = bytearray(file.read_bytes())
        at, bit = bench.chance.randrange(len(data)), bench.chance.randrange(8)
        data[at] ^= 1 << bit
        file.write_bytes(data)
        what = f"bit {bit} of byte {at} of {file.relative_to(root)}"
        answer = bench.load(root)
        if answer == "loaded 2":
            trials.add("step 2 with the right values", what)
        elif answer == "loaded 1":
            trials.add("found, and step 1 taken", what)
        elif answer.startswith("failed"):
            trials.add("found: an error", f"{what}: {answer}")
        elif answer == "":
            trials.add("found: the process died", what)
        else:
            trials.add("wrong values without an error", f"{what}: {answer}")
        shutil.rmtree(root)
    return trials


class Disk:
    """A small file system of its own at `place`."""

    def __init__(self, kind, place, size):
        self.place = place
        place.mkdir(exist_ok=True)
        words = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
        if kind == "ext4":
            self.image = place.with_name(place.name + ".image")
            with open(self.image, "wb") as image:
                image.truncate(size + (8 << 20))  # tables and a journal
            self.run("mkfs.ext4", "-q", "-m", "0", str(self.image))
            words = ["-o", "loop", str(self.image)]
        self.run("mount", *words, str(place))

    @staticmethod
    def run(*words):
        ended = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ, PATH=os.environ["PATH"] + ":/usr/sbin:/sbin"))
        if ended.returncode != 0:
            raise OSError(ended.stderr.strip())

    def fill(self, free):
        """Leaves that many bytes."""
        with open(self.place / "filler", "wb") as filler:
            now = os.statvfs(self.place)
            os.posix_fallocate(filler.fileno(), 0, max(1, now.f_bavail * now.f_frsize - free))

    def end(self):
        self.run("umount", str(self.place))


def why_no_disk(kind, folder):
    try:
        Disk(kind, folder / "probe", 16 << 20).end()
    except OSError as error:
        return f"{kind} cannot be mounted here: {error}"
    return ""


def judge_export(bench, trials, place, root, answer, what):
    """An export that failed leaves nothing, and the checkpoints as they were."""
    out = place / "out"
    if answer == "exported 2":
        found = bench.loader_answer(f"import {out} 2")
        trials.add("exported" if found == "loaded 2" else "wrong: no error", f"{what}: {found}")
    elif left := [path.name for path in place.iterdir() if path not in (root, place / "lost+found")]:
        trials.add("wrong: a failed export leaves files", f"{what}: {left}")
    elif (found := bench.load(root)) != "loaded 1":
        trials.add("lost: the checkpoint before", f"{what}: {found}")
    else:
        trials.add("no export", what)


def s11(bench, count):
    trials = Trials("S11")
    exports = bench.work == "export"
    model = bench.fresh()
    need = sum(path.stat().st_blocks * 512 for path in files_under(model))
    shutil.rmtree(model)
    place = bench.folder / "small"
    shares = [0.98 * i / max(1, count - 1) for i in range(count)]
    # The same with room for all of it.
    for share in shares if bench.is_peer else [*shares, 2]:
        disk = Disk(bench.disk, place, 4 * need + (4 << 20))
        try:
            root = bench.fresh(inside=place)
            # Masters are a third of the states.
            disk.fill(int(share * (need // 3 if exports else need)))
            subject = Subject(bench.make)
            answer = subject.ask(f"export {place / 'out'} 2" if exports else f"save {root} 2")
            subject.end()
            os.unlink(place / "filler")
            what = f"{share:.0%} of {need >> 10} KiB free: {answer[:200]}"
            wanted = r"(saved|exported) 2$" if share > 1 else r"(saved|exported) 2$|failed 5 "
            if not bench.is_peer and not re.match(wanted, answer):
                trials.add("wrong: an unexpected answer", what)
            elif exports:
                judge_export(bench, trials, place, root, answer, what)
            elif answer == "saved 2":
                trials.add("wrong: no error" if bench.load(root) != "loaded 2" else "fitted", what)
            else:
                bench.judge(trials, root, False, what)
        finally:
            if bench.loader is not None:
                bench.loader.end()
                bench.loader = None
            disk.end()
    return trials


EXPERIMENTS = {"S1": (s1, 30), "S2": (s2, 0), "S10": (s10, 200), "S11": (s11, 12)}


def matrix():
    """Settings of save_program.cpp; `nvme` gets its folder later."""
    tiers = {0: ["none"], 1: ["none", "cpu", "nvme"], 2: ["none", "cpu", "nvme"], 3: ["none", "cpu", "nvme"]}
    for stage, devices in tiers.items():
        for optimizer in devices:
            for param in ["none", "cpu", "nvme"] if stage == 3 else ["none"]:
                for background in "01":
                    yield [f"stage={stage}", f"optimizer={optimizer}", f"param={param}", f"background={background}"]


def sentence(trials):
    parts = [f"{count} {text}" for text, count in sorted(trials.outcomes.items())]
    name = {"S1": "kills at random times", "S2": "kills at system calls", "S10": "flipped bits",
            "S11": "fill levels of a disk"}[trials.name]
    if trials.points:
        name += f" (of {trials.points} of a save)"
    return f"{trials.total()} {name}: " + ", ".join(parts)


def main():
    parser = argparse.ArgumentParser(description="Faults during and after a save.")
    parser.add_argument("experiments", nargs="+", choices=list(EXPERIMENTS))
    parser.add_argument("--count", type=int, help="trials")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--system", choices=["libzero", "dcp", "dcp-in-place", "deepspeed"], default="libzero")
    parser.add_argument("--python", default=sys.executable, help="that has the other libraries")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--disk", choices=["tmpfs", "ext4"], default="tmpfs", help="of S11")
    parser.add_argument("--work", choices=["save", "export"], default="save", help="of S11; export: of libzero alone")
    parser.add_argument("--set", nargs="*", default=[], help="key=value of save_program.cpp")
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("BUILD_DIR", ROOT / "build")))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    words = parser.parse_args()
    if words.work == "export" and words.system != "libzero":
        parser.error("--work export is for libzero alone")
    seed = words.seed if words.seed is not None else random.SystemRandom().randrange(1 << 31)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-faults-"))
    settings = list(matrix()) if words.matrix else [words.set]
    figures, texts, bad = {"system": words.system, "seed": seed}, [], 0
    chance, total = random.Random(seed), {}
    (folder / "nvme").mkdir()
    for setting in settings:
        server = None
        if words.system == "libzero":
            make, versions = libzero(words.build.resolve(), [*setting, f"nvme={folder / 'nvme'}"])
        else:
            make, versions, server = peer(words.system, words.python, folder)
        figures["versions"] = versions
        print(f"seed {seed}, {words.system} ({versions}) {' '.join(setting)}", flush=True)
        own = folder / f"bench-{len(list(folder.iterdir()))}"
        own.mkdir()
        bench = Bench(make, own, chance, words.system != "libzero", words.disk, words.work)
        try:
            for name in words.experiments:
                why = why_no_ptrace() if name == "S2" else why_no_disk(words.disk, own) if name == "S11" else ""
                if why:
                    texts.append(f"{name} skipped: {why}")
                    continue
                run, count = EXPERIMENTS[name]
                began = time.monotonic()
                trials = run(bench, count if words.count is None else words.count)
                if words.system == "libzero" and trials.count(*BAD):
                    print(json.dumps(trials.examples, indent=1), file=sys.stderr)
                seconds = time.monotonic() - began
                if name in total:
                    total[name].join(trials, seconds)
                else:
                    total[name] = trials
                    trials.seconds = seconds
        finally:
            bench.end()
            if server is not None:
                server.kill()
                server.wait()
    shutil.rmtree(folder, ignore_errors=True)
    for name, trials in total.items():
        bad += trials.count(*BAD)
        figures[name] = trials.figures()
        texts.append(sentence(trials) + (f"; {len(settings)} settings" if len(settings) > 1 else ""))
    print("; ".join(texts))
    if words.json:
        words.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if bad and words.system == "libzero" else 0


if __name__ == "__main__":
    sys.exit(main())
