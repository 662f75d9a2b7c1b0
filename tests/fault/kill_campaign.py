#!/usr/bin/env python3
# Kills processes of a training run at random times inside its saves, and checks after each kill that no committed
# checkpoint is lost or damaged, and at the end that every step has the numbers of a run that was never killed.
#
#   kill_campaign.py [--kills N] [--seed S] [--ranks R] [--build DIR] [--json FILE]
#   kill_campaign.py --job SECONDS [--mean S] ...     one job of `zero run --restarts` instead, see below
#
# Each round starts `zero run -n R zero train --resume auto --keep 3`, waits for a save to begin, and after a random
# time sends SIGKILL to one rank, to the launcher, or to all ranks. Then no process is left; the newest checkpoint that
# had been committed before the kill is still there; `zero checkpoint verify` reads every byte of all. The next round
# continues from them. With --job, one job runs so long, a random rank of it is killed S seconds (5) after the last kill
# on average, and the job restarts each time; then it is asked to stop, and must save. The seed is printed and repeats
# targets and delays, not what the operating system makes of them.
# Exit code 0: nothing lost, 1: something was, 2: usage.
import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAVE_EVERY = 2
KEEP = 3
START_S = 120  # a save must begin within this time after the start
END_S = 30  # and all processes must be gone within this time after the kill


class Lost(Exception):
    pass


def text_of_training(path):
    state, words = 7, []
    for i in range(12000):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        words.append(f"{(state >> 16) % 1000}{' ' if i % 9 else chr(10)}")
    path.write_text("".join(words))


def command(zero, folder, ranks, checkpoints, steps):
    return [zero, "run", "-n", str(ranks), "--grace", "1", "zero", "train", str(ROOT / "configs/stage3-bf16.json"),
            "--text", str(folder / "text.txt"), "--steps", str(steps), "--json", "--out", str(folder / "out"),
            "--sample", "0", "--checkpoint-dir", str(checkpoints), "--save-every", str(SAVE_EVERY), "--keep", str(KEEP),
            "--resume", "auto", "--set", "libzero.model.layers=2", "--set", "libzero.model.hidden=48",
            "--set", "libzero.model.heads=3", "--set", "libzero.model.seq_length=32",
            "--set", "libzero.data.eval_batches=1"]


def start(words, mark, log):
    environment = dict(os.environ, OMP_NUM_THREADS="1", ZERO_KILL_CAMPAIGN=mark)
    return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def processes_of(mark):
    """Process ids by rank; the launcher and its helpers have the rank None."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ZERO_KILL_CAMPAIGN=" + mark.encode() not in variables:
            continue
        ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
        found.append((int(entry.name), ranks[0] if ranks else None))
    return found


def committed(checkpoints):
    """Tags by step."""
    tags = {}
    for name in os.listdir(checkpoints) if checkpoints.exists() else []:
        if name.startswith("global_step"):
            tags[int(name[len("global_step"):])] = name
    return tags


def losses_in(text, into, where):
    for line in text.splitlines():
        at = line.find('{"step":')
        if at < 0:
            continue
        try:
            step = json.loads(line[at:])
        except ValueError:
            continue  # cut off by the kill
        numbers = (step["loss"], step["grad_norm"])
        if into.setdefault(step["step"], numbers) != numbers:
            raise Lost(f"{where}: step {step['step']} has {numbers}, and had {into[step['step']]} before")


def one_round(number, chance, zero, folder, ranks, checkpoints, steps, seen):
    mark = f"{os.getpid()}-{number}"
    log_path = folder / f"log-{number}"
    before = set(os.listdir(checkpoints)) if checkpoints.exists() else set()
    target = chance.choice(["rank", "rank", "launcher", "all"])
    victim = chance.randrange(ranks)
    saves = chance.randint(1, 3)
    delay = chance.uniform(0, 0.03)
    with open(log_path, "wb") as log:
        run = start(command(zero, folder, ranks, checkpoints, steps), mark, log)
        end = time.monotonic() + START_S
        met = set()
        while len(met) < saves:
            if run.poll() is not None or time.monotonic() > end:
                raise Lost(f"round {number}: no save began: {log_path.read_text(errors='replace')[-2000:]}")
            if checkpoints.exists():
                met |= {n for n in os.listdir(checkpoints)
                        if n.startswith(".tmp-") and not n.endswith("-latest") and n not in before}
            time.sleep(0.0002)
        whom = [pid for pid, rank in processes_of(mark)
                if (rank == victim if target == "rank" else rank is not None)] if target != "launcher" else [run.pid]
        time.sleep(delay)
        newest = max(committed(checkpoints), default=None)
        for pid in whom:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            code = run.wait(END_S)
        except subprocess.TimeoutExpired:
            raise Lost(f"round {number}: the launcher did not end within {END_S} s after {target} was killed") from None
    if target == "launcher":
        end = time.monotonic() + END_S
        while processes_of(mark) and time.monotonic() < end:
            time.sleep(0.02)
    left = processes_of(mark)
    if left:
        raise Lost(f"round {number}: processes are left: {left}")
    if target != "launcher" and code != 6:
        raise Lost(f"round {number}: exit code {code} after {target} was killed, expected 6")
    tags = committed(checkpoints)
    if newest is not None and newest not in tags:
        raise Lost(f"round {number}: global_step{newest} was committed before the kill, and is gone")
    if len(tags) > KEEP + 1:
        raise Lost(f"round {number}: {len(tags)} checkpoints, expected at most {KEEP + 1}")
    hidden = [n for n in os.listdir(checkpoints) if n.startswith((".tmp-", ".del-"))]
    if len(hidden) > 1:
        raise Lost(f"round {number}: {hidden}, expected at most one unfinished")
    if tags:
        verify = subprocess.run([zero, "checkpoint", "verify", str(checkpoints)], capture_output=True, text=True)
        if verify.returncode != 0:
            raise Lost(f"round {number}: zero checkpoint verify: {verify.stderr}")
    losses_in(log_path.read_text(errors="replace"), seen, f"round {number}")
    log_path.unlink()
    return target, bool(hidden), len(tags)


def rounds(words, chance, zero, folder, checkpoints, seen):
    # More steps than all rounds can make: a round makes its saves, and what it does until the signal arrives.
    steps = 1000 * words.kills
    counts, inside, most = {"rank": 0, "launcher": 0, "all": 0}, 0, 0
    began = time.monotonic()
    for number in range(words.kills):
        target, unfinished, whole = one_round(number, chance, zero, folder, words.ranks, checkpoints, steps, seen)
        counts[target] += 1
        inside += unfinished
        most = max(most, whole)
        if (number + 1) % 10 == 0:
            print(f"{number + 1} kills, {time.monotonic() - began:.0f} s", flush=True)
    text = (f"{words.kills} kills ({counts['rank']} of a rank, {counts['launcher']} of the launcher, {counts['all']} "
            f"of all ranks), {inside} left an unfinished save, at most {most} checkpoints; 0 lost")
    return text, {"kills": words.kills, "killed": counts, "unfinished_saves_left": inside, "most_checkpoints": most}


def job(words, chance, zero, folder, checkpoints, seen):
    mark, log_path, kills = f"{os.getpid()}-job", folder / "log-job", 0
    options = command(zero, folder, words.ranks, checkpoints, 1 << 40)
    options[4:4] = ["--restarts", "1000000"]
    began = time.monotonic()
    with open(log_path, "wb") as log:
        run = start(options, mark, log)
        while True:
            wait = chance.expovariate(1 / words.mean)
            last = time.monotonic() + wait - began > words.job
            end = min(began + words.job, time.monotonic() + wait)
            while time.monotonic() < end:
                if run.poll() is not None:
                    raise Lost(f"the job ended: {log_path.read_text(errors='replace')[-2000:]}")
                time.sleep(0.05)
            if last:
                break
            victim = chance.randrange(words.ranks)
            for pid in [pid for pid, rank in processes_of(mark) if rank == victim]:
                os.kill(pid, signal.SIGKILL)
                kills += 1
        # A signal between two attempts ends the job without a save: it comes when the ranks train.
        size = log_path.stat().st_size
        while log_path.stat().st_size < size + 3000 and time.monotonic() < began + words.job + START_S:
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        if run.wait(START_S) != 75:
            raise Lost(f"exit code {run.returncode}, expected 75: {log_path.read_text(errors='replace')[-2000:]}")
    text = log_path.read_text(errors="replace")
    losses_in(text, seen, "the job")
    restarts = text.count("zero run: warning: restart ")
    return (f"{kills} kills in {words.job:.0f} s, {restarts} restarts, exit code 75 when asked to stop",
            {"kills": kills, "restarts": restarts, "job_seconds": words.job})


def main():
    parser = argparse.ArgumentParser(description="Kills training runs inside their saves.")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--job", type=float, default=0, help="seconds of one job that restarts")
    parser.add_argument("--mean", type=float, default=5, help="seconds between its kills")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--build", type=Path, default=Path(os.environ.get("BUILD_DIR", ROOT / "build")))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    words = parser.parse_args()
    zero = str(words.build.resolve() / "bin" / "zero")
    if not os.access(zero, os.X_OK):
        print(f"kill_campaign: error: got no {zero}, expected a build", file=sys.stderr)
        return 2
    seed = words.seed if words.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}, {words.ranks} ranks", flush=True)
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-campaign-"))
    text_of_training(folder / "text.txt")
    checkpoints = folder / "checkpoints"
    seen = {}
    began = time.monotonic()
    try:
        text, figures = (job if words.job else rounds)(words, chance, zero, folder, checkpoints, seen)
        # An undisturbed run has the same numbers at every step that the killed ones made, and 20 more.
        last = max(seen, default=0) + 20
        for name, root in (("resumed", checkpoints), ("undisturbed", folder / "undisturbed")):
            log_path = folder / f"log-{name}"
            with open(log_path, "wb") as log:
                run = start(command(zero, folder, words.ranks, root, last), f"{os.getpid()}-{name}", log)
                if run.wait(START_S + last) != 0:
                    raise Lost(f"the {name} run: {log_path.read_text(errors='replace')[-2000:]}")
            losses_in(log_path.read_text(errors="replace"), seen, f"the {name} run")
        if sorted(seen) != list(range(1, last + 1)):
            raise Lost(f"{len(seen)} steps, expected {last}")
    except Lost as error:
        print(f"LOST: {error}\nseed {seed}, files in {folder}", file=sys.stderr)
        return 1
    figures |= {"seed": seed, "lost": 0, "steps_compared": last, "seconds": round(time.monotonic() - began, 1)}
    print(f"{text}; {last} steps bit-equal to an undisturbed run")
    if words.json:
        words.json.write_text(json.dumps(figures, indent=1) + "\n")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
