"""Writes the page of script/compare: report.py FOLDER --json FILE --markdown FILE --svg FILE

FOLDER/SIZE/round-N/ holds what was measured: libzero-TRANSPORT-RECIPE.json (`zero bench step --json`) and
peer-NAME-RECIPE.json (peer.py); FOLDER/fixed/ the same of a model with next to no parameters, FOLDER/optimizer/ the
optimizers alone (`zero bench optimizer --json` and adam.py), and FOLDER/collectives/result.json the collectives alone
(`zero bench collectives --json`). Medians are over all steps of all rounds; the range beside a ratio is that of the rounds.
"""

import argparse
import datetime
import json
import pathlib
import statistics

LABELS = {
    "compute": "compute + AdamW share, PyTorch", "ddp": "DDP", "zro": "ZeroRedundancyOptimizer", "fsdp1": "FSDP1, full shard",
    "fsdp1grad": "FSDP1, shard grad-op", "fsdp2": "FSDP2", "fsdp2noreshard": "FSDP2, no reshard", "ds0": "DeepSpeed stage 0",
    "ds1": "DeepSpeed stage 1", "ds2": "DeepSpeed stage 2", "ds3": "DeepSpeed stage 3", "floor": "compute + AdamW share, libtorch",
    **{f"zero{s}": f"**libzero stage {s}**" for s in range(4)}, **{f"tcp{s}": f"libzero stage {s} over TCP" for s in range(4)},
    "host3": "**libzero stage 3, all states in host memory**", "file3": "**libzero stage 3, all states in files**",
    "ds3cpu": "DeepSpeed stage 3, offload to CPU", "ds3nvme": "DeepSpeed stage 3, offload to NVMe",
}
ORDER = ["floor", "compute", "zero0", "zero1", "zero2", "zero3", "tcp0", "tcp3", "ddp", "zro", "fsdp1", "fsdp1grad", "fsdp2", "fsdp2noreshard",
         "ds0", "ds1", "ds2", "ds3", "host3", "ds3cpu", "file3", "ds3nvme"]
PARTS = ["forward_s", "backward_s", "optimizer_s"]
COLOURS = {"forward_s": "#4477aa", "backward_s": "#ee9944", "optimizer_s": "#77aa66"}


class Entry:
    """One configuration: its samples of all rounds."""

    def __init__(self):
        self.samples, self.round_medians, self.peaks, self.sent, self.losses, self.error, self.fixed = {}, {}, [], None, None, None, None
        self.failed_rounds = 0

    def add(self, round_number, samples, run):
        for part, values in samples.items():
            self.samples.setdefault(part, []).extend(values)
        self.round_medians[round_number] = statistics.median(total(samples))
        if "peak_pss_bytes" in run:
            self.peaks.append(run["peak_pss_bytes"]["highest"])
        if "bytes_sent_per_step" in run:
            self.sent = run["bytes_sent_per_step"]
        if "last_loss" in run:
            self.losses = [run["first_loss"], run["last_loss"]]

    def median(self, part="step_s"):
        return statistics.median(self.samples[part])

    def step(self):
        return statistics.median(total(self.samples))


def total(samples):
    """Seconds of each step; for compute alone with its share of AdamW, which no stage can do without."""
    if "adamw_s" in samples:
        return [a + b for a, b in zip(samples["step_s"], samples["adamw_s"])]
    return samples["step_s"]


def quantile(values, q):
    values = sorted(values)
    at = q * (len(values) - 1)
    below = int(at)
    return values[below] + (at - below) * (values[min(below + 1, len(values) - 1)] - values[below])


def load(folder):
    """{size: {recipe: {name: Entry}}}, and what the documents say of the machine, the model and the versions."""
    sizes, about = {}, {"versions": {}, "models": {}}
    for path in sorted(folder.glob("*/round-*/*.json")):
        if path.parts[-3] == "optimizer":
            continue
        size, round_number = path.parts[-3], int(path.parts[-2].split("-")[1])
        document = json.loads(path.read_text())

        def entry(recipe, name):
            return sizes.setdefault(size, {}).setdefault(recipe, {}).setdefault(name, Entry())

        if document["schema"] == "zero.bench.step/1":
            about["machine"] = document["machine"]
            rounds = max(round_number, about["models"].get(size, {}).get("rounds", 0))
            about["models"][size] = dict(document["model"], micro_batch_size=document["micro_batch_size"], rounds=rounds,
                                         steps=document["steps"], warmup=document["warmup"])
            about["world"] = document["world"]
            prefix = {"shm": "zero", "gloo": "tcp", "cpu": "host", "nvme": "file"}[path.name.split("-")[1]]
            for run in document["runs"]:
                entry(run["recipe"], f"{prefix}{run['stage']}").add(round_number, run["samples"], run)
            for run in document["compute"]:
                entry(run["recipe"], "floor").add(round_number, run["samples"], run)
        else:
            one = entry(document["recipe"], document["peer"])
            if "error" in document:
                one.error = document["error"]
                one.failed_rounds += 1
                continue
            samples = document["samples"]
            if document["peer"] == "compute":
                samples = {"step_s": samples["step_s"], "forward_s": samples["forward_s"], "backward_s": samples["backward_s"],
                           "adamw_s": samples["optimizer_s"]}
            one.add(round_number, samples, document)
            about["versions"].update(document["versions"])
    for recipes in sizes.values():
        for entries in recipes.values():
            for one in entries.values():
                if one.samples:
                    one.error = None  # measured in another round; the page says in how many it failed
    for recipe, entries in sizes.pop("fixed", {}).items():
        for name, one in entries.items():
            for recipes in sizes.values():
                if one.peaks and name in recipes.get(recipe, {}):
                    recipes[recipe][name].fixed = max(one.peaks)
    about["models"].pop("fixed", None)
    if "machine" not in about or not sizes:
        raise SystemExit(f"report.py: error: got no result of `zero bench step` under {folder}")
    return sizes, about


def ratio(entries, above, below, of="step"):
    """(of the medians, smallest and largest of the rounds), or None when one of the two was not measured."""
    a, b = entries.get(above), entries.get(below)
    if a is None or b is None or a.error or b.error:
        return None
    if of == "pss":
        return (max(a.peaks) / max(b.peaks), None, None)
    if of == "pss beyond fixed":
        return ((max(a.peaks) - a.fixed) / (max(b.peaks) - b.fixed), None, None) if a.fixed and b.fixed else None
    rounds = [a.round_medians[r] / b.round_medians[r] for r in a.round_medians if r in b.round_medians]
    return (a.step() / b.step(), min(rounds), max(rounds))


def claims(entries):
    rows = [("stage 3 / FSDP2", "zero3", "fsdp2", "step"), ("stage 3 / DeepSpeed stage 3", "zero3", "ds3", "step"),
            ("stage 3 over TCP / FSDP2", "tcp3", "fsdp2", "step")]
    rows += [(f"stage {s} / DeepSpeed stage {s}", f"zero{s}", f"ds{s}", "step") for s in range(3)]
    rows += [(f"stage {s} / DDP", f"zero{s}", "ddp", "step") for s in range(4)]
    rows += [(f"stage {s} / (compute + AdamW share)", f"zero{s}", "floor", "step") for s in range(4)]
    # What compute leaves: nobody can be further below a peer than this.
    rows += [(f"floor: (compute + AdamW share) / {text}", "floor", name, "step") for text, name in [
        ("DDP", "ddp"), ("FSDP2", "fsdp2"), ("DeepSpeed stage 3", "ds3")]]
    rows += [("stage 3 / stage 0", "zero3", "zero0", "step"), ("all states in host memory / DeepSpeed's offload to CPU", "host3", "ds3cpu", "step"),
             ("all states in files / DeepSpeed's offload to NVMe", "file3", "ds3nvme", "step")]
    for note, of in ("", "pss"), (", less fixed", "pss beyond fixed"):
        rows += [(f"peak memory{note}, {text}", a, b, of) for text, a, b in [
            ("stage 3 / FSDP2", "zero3", "fsdp2"), ("stage 3 / DeepSpeed stage 3", "zero3", "ds3"), ("stage 0 / DDP", "zero0", "ddp"),
            ("stage 3 / stage 0", "zero3", "zero0"), ("in host memory / DeepSpeed's offload to CPU", "host3", "ds3cpu"),
            ("in files / DeepSpeed's offload to NVMe", "file3", "ds3nvme")]]
    return [(text, ratio(entries, a, b, of)) for text, a, b, of in rows]


def table(rows, aligned="right"):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for k, row in enumerate(rows):
        lines.append("| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) + " |")
        if k == 0:
            lines.append("|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|")
    return "\n".join(lines) + "\n"


def ms(seconds):
    return f"{seconds * 1e3:.1f}"


def steps_table(entries):
    rows = [["", "step, ms", "min", "p99", "forward", "backward", "optimizer", "peak, MiB", "fixed", "sent, MiB", "last loss", "/ floor"]]
    floor = entries.get("floor")
    for name in ORDER:
        one = entries.get(name)
        if one is None:
            continue
        if one.error is not None:
            rows.append([LABELS[name], "failed"] + [""] * 10)
            continue
        steps = total(one.samples)
        optimizer = one.samples.get("optimizer_s") or one.samples["adamw_s"]
        rows.append([
            LABELS[name], ms(statistics.median(steps)), ms(min(steps)), ms(quantile(steps, 0.99)), ms(one.median("forward_s")),
            ms(one.median("backward_s")), ms(statistics.median(optimizer)),
            f"{max(one.peaks) / 2**20:.0f}" if one.peaks and "adamw_s" not in one.samples else "",
            f"{one.fixed / 2**20:.0f}" if one.fixed and "adamw_s" not in one.samples else "",
            f"{one.sent / 2**20:.1f}" if one.sent is not None else "", f"{one.losses[1]:.4f}" if one.losses else "",
            f"{one.step() / floor.step():.2f}" if floor else ""])
    return table(rows)


def shape(model):
    return (f"{model['layers']} layers of {model['hidden']}, {model['heads']} heads, vocabulary {model['vocabulary']}, "
            f"{model['parameters_elements'] / 1e6:.1f} M parameters, {model['micro_batch_size']} x {model['sequence_tokens']} tokens a rank and step")


def svg(recipes, title):
    """One panel a recipe, one scale for all."""
    shown = {recipe: [n for n in ORDER if n in entries and not entries[n].error] for recipe, entries in recipes.items()}
    left, scale = 245, 460 / max(recipes[recipe][n].step() for recipe, names in shown.items() for n in names)
    height = 60 + sum(40 + 26 * len(names) for names in shown.values())
    label = title + "; " + "; ".join(
        f"{recipe}: " + ", ".join(f"{LABELS[n].strip('*')} {ms(recipes[recipe][n].step())}" for n in names) for recipe, names in shown.items())
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" width="820" height="{height}" font-family="sans-serif" '
           f'font-size="13" role="img" aria-label="{label}">', f'<rect width="820" height="{height}" fill="#ffffff"/>',
           f'<text x="16" y="26" font-size="15" fill="#222">{title}</text>']
    for i, part in enumerate(PARTS):
        x = left + 120 * i
        out.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{COLOURS[part]}"/><text x="{x + 18}" y="49" fill="#444">{part[:-2]}</text>')
    y = 60
    for recipe, names in shown.items():
        out.append(f'<text x="16" y="{y + 20}" font-size="14" fill="#222">{recipe}</text>')
        y += 32
        for name in names:
            one, x = recipes[recipe][name], float(left)
            weight = ' font-weight="bold"' if name.startswith("zero") else ""
            out.append(f'<text x="16" y="{y + 14}" fill="#222"{weight}>{LABELS[name].strip("*")}</text>')
            for part in PARTS:
                width = scale * statistics.median(one.samples.get(part) or one.samples["adamw_s"])
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{COLOURS[part]}"/>')
                x += width
            out.append(f'<text x="{x + 6:.1f}" y="{y + 14}" fill="#222">{ms(one.step())}</text>')
            y += 26
        y += 8
    return "\n".join(out + ["</svg>"]) + "\n"


def optimizers(folder):
    """What was measured of the updates alone: {"command", "load_average", "elements", "results": [...]}, or nothing."""
    files, results, elements = sorted(folder.glob("optimizer/round-*/*.json")), {}, None
    for path in files:
        document = json.loads(path.read_text())
        elements = document["elements"]
        who = document.get("peer", "libzero")
        for run in document["runs"]:
            one = results.setdefault((run["job"], run["threads"]), {}).setdefault(who, {"samples": {}, "rounds": {}, "triad": []})
            for name, values in run.items():
                if isinstance(values, list):
                    one["samples"].setdefault(name, []).extend(values)
            one["rounds"][path.parts[-2]] = statistics.median(run["samples_s"])
            if who == "libzero":
                one["bytes_per_element"] = run["bytes_per_element"]
                one["triad"].append(run["triad_bytes_per_s"])
    if not files:
        return None
    load = [float(line) for line in (folder / "optimizer" / "load").read_text().split()]
    found = {"command": (folder / "optimizer" / "command").read_text().strip(), "elements": elements,
             "load_average": {"median": statistics.median(load), "least": min(load), "most": max(load)}, "results": []}
    for (job, threads), entries in sorted(results.items(), key=lambda item: (item[0][0] != "fp32", item[0][1])):
        row = {"job": job, "threads": threads}
        for who, one in entries.items():
            times = one["samples"]["samples_s"]
            row[who] = {"time_s": {"median": statistics.median(times), "min": min(times), "p99": quantile(times, 0.99)}, "updates": len(times),
                        "round_medians_s": list(one["rounds"].values())}
            for part in ("cast_s", "unscale_s", "update_s", "publish_s"):
                if part in one["samples"]:
                    row[who][part] = statistics.median(one["samples"][part])
        if "libzero" in entries:
            ours = entries["libzero"]
            row["libzero"]["bytes_per_s"] = ours["bytes_per_element"] * elements / row["libzero"]["time_s"]["median"]
            row["libzero"]["triad_bytes_per_s"] = statistics.median(ours["triad"])
            peers = [who for who in entries if who != "libzero"]
            if peers:
                faster = min(peers, key=lambda who: row[who]["time_s"]["median"])
                rounds = [min(entries[who]["rounds"].get(r, float("inf")) for who in peers) / seconds for r, seconds in ours["rounds"].items()]
                row["faster_peer"] = faster
                row["faster_peer_over_libzero"] = {"median": row[faster]["time_s"]["median"] / row["libzero"]["time_s"]["median"],
                                                   "least_round": min(rounds), "most_round": max(rounds)}
        found["results"].append(row)
    return found


def optimizer_section(found):
    if found is None:
        return ""
    def times(row, who):
        return ["failed", ""] if who not in row else [ms(row[who]["time_s"]["median"]), ms(row[who]["time_s"]["min"])]

    rows = [["", "libzero, ms", "min", "GB/s", "triad", "torch fused, ms", "min", "DeepSpeedCPUAdam, ms", "min", "faster peer / libzero"]]
    parts = [["peers' parts in bf16, ms", "cast", "unscale", "update", "cast back"]]
    for row in found["results"]:
        name = f"{row['job']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        ours, over = row.get("libzero"), row.get("faster_peer_over_libzero")
        rates = [f"{ours[key] / 1e9:.1f}" for key in ("bytes_per_s", "triad_bytes_per_s")] if ours else ["", ""]
        rows.append([name] + times(row, "libzero") + rates + times(row, "torch") + times(row, "deepspeed")
                    + [cell((over["median"], over["least_round"], over["most_round"])) if over else ""])
        for who, label in ("torch", "torch fused"), ("deepspeed", "DeepSpeedCPUAdam"):
            if "cast_s" in row.get(who, {}):
                parts.append([f"{label}, {name}"] + [ms(row[who][part]) for part in ("cast_s", "unscale_s", "update_s", "publish_s")])
    load = found["load_average"]
    return f"""## The update alone: AdamW, {found['elements'] / 1e6:.0f} M parameters in one flat tensor

{table(rows)}
{table(parts)}
fp32: gradient and master in fp32, the master is the parameter. bf16: bf16 gradients under a loss scale in, fp32 master, bf16
parameters out; libzero does that in one pass (`zero bench optimizer`, every element checked), the peers by a cast, an unscaling, their
update and a cast back. Above 1 libzero is faster; the medians are over all updates of all rounds, in brackets the smallest and
largest ratio of a round. Programs take turns, each in new processes; every second round the other way round. GB/s counts the bytes
that a perfect pass moves, beside a triad (sum = a + 3 b, 12 bytes an element) between the updates. In fp32 all three do the same
work and wait for the same memory ([speed.md](speed.md) takes them apart). Load average of the machine
before each: median {load['median']:.1f}, {load['least']:.1f} to {load['most']:.1f}. Measured by `{found['command']}`.

"""


# What shared memory is to be worth: times the speed of gloo, at these sizes.
COLLECTIVE_TARGETS = {"reduce_scatter": 8, "all_gather": 5}
COLLECTIVE_TARGET_BYTES = [16 << 20, 64 << 20]
GLOOS = {"gloo_library": "gloo library", "gloo": "libzero over gloo"}


def collectives(folder):
    """What was measured of the collectives alone, as `zero bench collectives` says it, or nothing."""
    file = folder / "collectives" / "result.json"
    if not file.exists():
        return None
    return dict(json.loads(file.read_text()), command=(folder / "collectives" / "command").read_text().strip(),
                load_average=float((folder / "collectives" / "load").read_text()))


def size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def collectives_section(found):
    if found is None:
        return ""
    runs = {(run["operation"], run["transport"], run["bytes"]): run for run in found["runs"]}

    def faster(operation, gloo, size):
        """(shm's speed over gloo's by the medians, smallest and largest of the rounds)"""
        ours, theirs = runs[operation, "shm", size], runs[operation, gloo, size]
        rounds = [b / a for a, b in zip(ours["round_medians_s"], theirs["round_medians_s"])]
        return theirs["time_s"]["median"] / ours["time_s"]["median"], min(rounds), max(rounds)

    text, verdicts = "", []
    for operation, target in COLLECTIVE_TARGETS.items():
        sizes = sorted(size for of, transport, size in runs if of == operation and transport == "shm")
        rows = [[operation.replace("_", "-"), "memcpy, GB/s", "shm, GB/s", "ms", "min", "p99"] + [f"{label}, GB/s" for label in GLOOS.values()]
                + [f"shm / {label}" for label in GLOOS.values()]]
        for size in sizes:
            ours = runs[operation, "shm", size]
            rows.append([size_text(size), f"{runs['memcpy', None, size]['bytes_per_s'] / 1e9:.2f}", f"{ours['bytes_per_s'] / 1e9:.2f}"]
                        + [f"{ours['time_s'][key] * 1e3:.3f}" for key in ("median", "min", "p99")]
                        + [f"{runs[operation, gloo, size]['bytes_per_s'] / 1e9:.2f}" for gloo in GLOOS]
                        + ["{:.1f} ({:.1f}-{:.1f})".format(*faster(operation, gloo, size)) for gloo in GLOOS])
        text += table(rows) + "\n"
        for size in COLLECTIVE_TARGET_BYTES:
            ratios = {label: faster(operation, gloo, size)[0] for gloo, label in GLOOS.items()}
            rate = runs[operation, "shm", size]["bytes_per_s"] / runs["memcpy", None, size]["bytes_per_s"]
            verdicts.append(f"- {operation.replace('_', '-')}, {size_text(size)}, at least {target} times gloo: " + ", ".join(
                f"{over:.1f} times {label}, {'reached' if over >= target else '**missed**'}" for label, over in ratios.items())
                + f". {rate:.2f} times memcpy." + "".join(
                    f" {target} times {label} would be {target * runs[operation, gloo, size]['bytes_per_s'] / 1e9:.1f} GB/s, "
                    f"{target * runs[operation, gloo, size]['bytes_per_s'] / runs['memcpy', None, size]['bytes_per_s']:.2f} times memcpy."
                    for gloo, label in GLOOS.items() if ratios[label] < target))
    machine = found["machine"]
    return f"""## Collectives on one host

{machine['processor']}, {machine['cores']} cores, {found['world']} ranks as processes, {machine['threads_per_rank']} thread{'s' if machine['threads_per_rank'] > 1 else ''} each, {found['dtype']}, libtorch {machine['libtorch']}.
A size is that of the whole tensor, GB/s its bytes by the median time of a call.

{text}{chr(10).join(verdicts)}

Above 1 shared memory is faster; in brackets the smallest and largest ratio of a round. Rounds: {found['rounds']}. In each, every transport runs
in new processes, every second time the other way round; all ranks begin a call together, the first call only warms up, results are
compared with the exact ones. memcpy: all ranks copy that many bytes of their own at the same time. "gloo library": its own
algorithms as torch.distributed calls them for CPU tensors (c10d's ProcessGroupGloo on 127.0.0.1: `all_gather_into_tensor`, and
`reduce_scatter_tensor`, which is an all-reduce of a copy). "libzero over gloo": libzero's transport for several hosts, which sends
every part directly. Load average of the machine before: {found['load_average']:.1f}. Measured by `{found['command']}`.

What limits each, as far as it was tested:
- Sizes whose inputs and results stay in the last-level cache run at the caches' speed. Calls there last microseconds and single rounds
  differ by a factor of two; ratios to the gloo library of a hundred and more are its own slow calls with small messages.
- Where the ranks' inputs and results together exceed the last-level cache by a third, results are stored past the caches. With the
  library before and after that change in turns (2 ranks, 2 cores of an EPYC with 32 MiB of cache) it made 64 and 256 MiB 1.3 to 1.6 times as fast; at 16 MiB the
  copy beside it varied too much for a number. Copies of the same pattern in a small program, 4 KiB pages, two processes, did no better:
  13 to 16 GB/s for an all-gather of 64 MiB. That the gain is the spared reading of what is overwritten is the likely reason, not a
  measured one. Large pages could not be tried: that system refuses them for shared memory.
- memcpy is the C library's, with plain stores at these sizes: a baseline, not the memory's limit, which may be exceeded.
- All of it depends on the host, which this virtual machine shares: memcpy alone has changed by a factor of 1.8 between runs minutes apart.

"""


def page(sizes, about, command, chart, extra):
    machine, versions = about["machine"], about["versions"]
    text = f"""# Performance
How long a training step of libzero takes beside its peers, and what it holds, each size measured in one run, all on one machine. This page is
written by `script/compare`; the numbers, with every round's median, are in [performance.json](performance.json). What bounds them: [speed.md](speed.md).

{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}. libzero {machine['libzero']}, libtorch
{machine['libtorch']}, {', '.join(f'{name} {version}' for name, version in sorted(versions.items())) or 'no peers'}. {about['world']} ranks, {machine['threads_per_rank']} thread{'s' if machine['threads_per_rank'] > 1 else ''} each. {datetime.date.today()}.

![Step time of libzero and its peers]({chart})

"""
    for size, recipes in sizes.items():
        model = about["models"][size]
        text += f"## {shape(model)}\n\n"
        text += f"{model['rounds']} round{'s' if model['rounds'] > 1 else ''}, each of {model['warmup']} steps to warm up and {model['steps']} measured ones.\n\n"
        found = {recipe: dict(claims(entries)) for recipe, entries in recipes.items()}
        rows = [["ratio, below 1: libzero is faster or smaller"] + list(found)]
        for name in claims({}):
            cells = [cell(found[recipe][name[0]]) for recipe in found]
            if any(cells):
                rows.append([name[0]] + cells)
        text += table(rows) + "\n"
        for recipe, entries in recipes.items():
            text += f"### {recipe}\n\n{steps_table(entries)}\n"
            for name, one in entries.items():
                if one.error is not None:
                    text += f"{LABELS.get(name, name)} failed: `{one.error or 'no message'}`\n\n"
                elif one.failed_rounds:
                    text += f"{LABELS.get(name, name)} failed in {one.failed_rounds} round(s) and counts with the others.\n\n"
    text += extra + f"""## How it is measured
- The same GPT everywhere ([models/gpt.cpp](../models/gpt.cpp), [bench/peers/gpt.py](../bench/peers/gpt.py)), the same tokens, AdamW
  (lr 3e-4, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1; fused everywhere), no clipping, no dropout, tied output layer. Initial
  values are drawn from the same distributions but are not the same numbers, so losses agree in size, not in digits. Within libzero
  the losses of all stages are equal, or the run fails.
- In a round every configuration runs in new processes. Every second round goes the other way round. Medians are over all measured
  steps of all rounds, in brackets the smallest and largest ratio of a round.
- A step is forward, backward and update; the loss is read after the clock. Times are rank 0's.
- Ranks of libzero talk through shared memory, the peers through gloo on the loopback interface, which is what each takes on one host
  without GPUs. "Over TCP" is libzero over gloo on that interface, too, with its sums in rank order.
- bf16, as each is usually set: libzero and DeepSpeed keep 16-bit parameters with fp32 masters, libzero sums bf16 gradients in fp32;
  FSDP shards fp32 parameters, gathers them in bf16 and reduces gradients in fp32 (FSDP1 too); DDP and ZeroRedundancyOptimizer keep
  fp32 parameters under autocast and reduce fp32 gradients.
- "Compute + AdamW share": forward and backward of the plain module without communication, all ranks at once, and a fused AdamW step over
  1/{about['world']} of the parameters' number in fp32. It is the floor of a step, and "/ floor" the step's ratio to it. "floor: ... / DDP"
  is the ratio that an implementation would have whose communication took no time: where libzero's is near it, what is left of the step is
  the peer's own multiplications, and no smaller ratio can be had on this machine. [speed.md](speed.md) goes through it line by line.
- Peak memory is proportional set size (shared pages count in parts), read every 2 ms in three more steps that are not timed, less
  what the rank held before it built the model; the rank and round that hold most. "Fixed" is the same for a model with next to no
  parameters: code and modules that are loaded when the first model is built.
- Sent: payload bytes a rank and step, by libzero's count.

## Again
```
{command}
```
`script/compare --help` lists sizes, rounds and peers. A part of it without Python: `zero bench step`.
"""
    return text


def cell(found):
    if found is None:
        return ""
    return f"{found[0]:.2f}" if found[1] is None else f"{found[0]:.2f} ({found[1]:.2f}-{found[2]:.2f})"


def summary(sizes, about, command, optimizer, collective):
    def one(entry):
        if entry.error is not None:
            return {"error": entry.error}
        steps = total(entry.samples)
        parts = {part: {"median": statistics.median(v), "min": min(v), "p99": quantile(v, 0.99)} for part, v in entry.samples.items()}
        parts["step_s"] = {"median": statistics.median(steps), "min": min(steps), "p99": quantile(steps, 0.99)}
        return {**parts, "steps": len(steps), "round_medians_s": list(entry.round_medians.values()),
                "peak_pss_bytes": max(entry.peaks) if entry.peaks else None, "fixed_pss_bytes": entry.fixed, "bytes_sent_per_step": entry.sent, "losses": entry.losses}

    return {
        "schema": "zero.compare/1", "date": str(datetime.date.today()), "command": command, **about,
        "results": {size: {recipe: {name: one(entries[name]) for name in ORDER if name in entries} for recipe, entries in recipes.items()}
                    for size, recipes in sizes.items()},
        "ratios": {size: {recipe: {text: {"median": r[0], "least_round": r[1], "most_round": r[2]} for text, r in claims(entries) if r}
                          for recipe, entries in recipes.items()} for size, recipes in sizes.items()},
        "optimizers": optimizer,
        "collectives": collective,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    for name in ("--json", "--markdown", "--svg"):
        parser.add_argument(name, type=pathlib.Path, required=True)
    o = parser.parse_args()
    sizes, about = load(o.folder)
    command = (o.folder / "command").read_text().strip()
    first = next(iter(sizes))
    if "8x512x8x8192x128x1" in sizes:
        first = "8x512x8x8192x128x1"
        sizes = {first: sizes.pop(first), **sizes}
    chart = svg(sizes[first], f"Milliseconds a training step, {about['models'][first]['parameters_elements'] / 1e6:.1f} M parameters, {about['world']} ranks")
    found, moved = optimizers(o.folder), collectives(o.folder)
    o.json.write_text(json.dumps(summary(sizes, about, command, found, moved), indent=1) + "\n")
    o.svg.write_text(chart)
    o.markdown.write_text(page(sizes, about, command, o.svg.name, optimizer_section(found) + collectives_section(moved)))


main()
