"""The GPU work of a training step, from a trace that `overhead_bench --kernels FILE` wrote: kernels, copies, calls of CUDA.

  python3 lab/programs/kernel_list.py TRACE STEPS STEP_MS     prints the table

The trace is the profiler's, in Chrome's format: "X" events with a category, times in microseconds. Used by script/gpu-check.
"""

import collections
import json
import re
import sys

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
OWN = "zero::cuda::"
LONGEST = 76


def short(name):
    """A kernel's name without its return type, namespaces and arguments; template arguments as far as they fit."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    name = re.sub(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}", "_", name)
    name = re.sub(r"^void ", "", name)
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:at]
            break
    name = re.sub(r"\b(\w+::)+", "", name)
    return name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."


def covered(spans):
    """Length of the union of (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def read(path, steps, step_ms):
    """Figures of one step of `steps` traced ones; shares are of `step_ms`, the step's time without the profiler."""
    with open(path, encoding="utf-8", errors="replace") as file:
        events = json.load(file, strict=False)["traceEvents"]
    events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    work = [event for event in events if event.get("cat") in GPU]
    if not any(event["cat"] == "kernel" for event in work):
        raise ValueError(f"no kernel among the trace's {len(events)} events: the profiler did not see the GPU (CUPTI)")
    step_us = step_ms * 1e3
    sums = collections.defaultdict(lambda: [0, 0.0])
    for event in work:
        sums[event["name"]][0] += 1
        sums[event["name"]][1] += event["dur"]
    rows = [{"kernel": short(name), "own": OWN in name, "count": count / steps, "us": us / steps, "share": us / steps / step_us}
            for name, (count, us) in sums.items()]
    rows.sort(key=lambda row: (not row["own"], -row["us"]))
    calls = collections.defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("cat") in CALLS:
            calls[event["name"]][0] += 1
            calls[event["name"]][1] += event["dur"]
    own = sum(row["us"] for row in rows if row["own"])
    return {
        "steps": steps, "step_us": step_us, "launches": sum(row["count"] for row in rows), "gpu_us": sum(row["us"] for row in rows),
        "busy_us": covered((event["ts"], event["ts"] + event["dur"]) for event in work) / steps, "own_us": own, "own_share": own / step_us,
        "streams": len({event.get("args", {}).get("stream", event.get("tid")) for event in work}), "kernels": rows,
        "calls": sorted(({"call": name, "count": count / steps, "us": us / steps} for name, (count, us) in calls.items()),
                        key=lambda call: -call["us"]),
    }


def table(figures):
    """Text of what `read` returns: libzero's kernels first, then by time."""
    lines = [f"{'kernel, of one step':{LONGEST}} {'count':>8} {'us':>10} {'share':>7}"]
    own = [row for row in figures["kernels"] if row["own"]]
    for row in own + [None] + figures["kernels"][len(own):]:
        lines.append("-- other kernels, copies" if row is None else
                     f"{row['kernel']:{LONGEST}} {row['count']:8.1f} {row['us']:10.1f} {row['share']:7.2%}")
    lines.append(f"step {figures['step_us']:.0f} us; on the GPU {figures['gpu_us']:.0f} us in {figures['launches']:.0f} launches on "
                 f"{figures['streams']} streams, busy {figures['busy_us']:.0f} us; libzero's kernels {figures['own_us']:.0f} us")
    for call in figures["calls"]:
        lines.append(f"  {call['call']}: {call['count']:.1f} calls, {call['us']:.0f} us on the host")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    print(table(read(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
