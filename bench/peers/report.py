"""Writes the page of script/compare: report.py FOLDER --json FILE --markdown FILE --svg FILE [--readme FILE] [--keep]

FOLDER is what a run left (results.py, which has all arithmetic); the page says what results.py's document says and nothing else.
--readme writes the one sentence of README.md that quotes figures; --keep keeps the sections of an earlier FILE of --json that
this run did not measure.
"""

import argparse
import json
import pathlib
import statistics

from results import LEAST_ROUNDS, ORDER, PARTS, over_rounds, ratio_of, ratios, summary

LABELS = {
    "compute": "compute + AdamW share, PyTorch", "ddp": "DDP", "ddpbf16": "DDP, bf16 parameters", "zro": "ZeroRedundancyOptimizer",
    "fsdp1": "FSDP1, full shard", "fsdp1grad": "FSDP1, shard grad-op", "fsdp2": "FSDP2", "fsdp2bf16": "FSDP2, bf16 reduction",
    "fsdp2noreshard": "FSDP2, no reshard", "ds0": "DeepSpeed stage 0", "ds1": "DeepSpeed stage 1", "ds2": "DeepSpeed stage 2",
    "ds3": "DeepSpeed stage 3", "floor": "compute + AdamW share, libtorch",
    **{f"zero{s}": f"**libzero stage {s}**" for s in range(4)}, **{f"tcp{s}": f"libzero stage {s} over TCP" for s in range(4)},
    "host3": "**libzero stage 3, all states in host memory**", "file3": "**libzero stage 3, all states in files**",
    "ds3cpu": "DeepSpeed stage 3, offload to CPU", "ds3nvme": "DeepSpeed stage 3, offload to NVMe",
}
COLOURS = {"forward_s": "#4477aa", "backward_s": "#ee9944", "optimizer_s": "#77aa66"}
SMALL, LARGE = "8x512x8x8192x128x1", "8x512x8x8192x128x8"  # the sizes of README.md's sentence
README_BEGIN, README_END = "<!-- figures: script/compare -->", "<!-- end of figures -->"


def table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for k, row in enumerate(rows):
        lines.append("| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) + " |")
        if k == 0:
            lines.append("|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|")
    return "\n".join(lines) + "\n"


def ms(seconds):
    return f"{seconds * 1e3:.1f}"


def mark(rounds):
    return "" if rounds >= LEAST_ROUNDS else " *"


def cell(found, digits=2):
    """median (least-most; rounds), with a star where the rounds are few."""
    if found is None:
        return ""
    range_text = f"{found['least_round']:.{digits}f}-{found['most_round']:.{digits}f}; {found['rounds']}"
    return f"{found['median']:.{digits}f} ({range_text}){mark(found['rounds'])}"


def counted(number, word):
    return f"{number} {word}{'' if number == 1 else 's'}"


def shape(model):
    return (f"{model['layers']} layers of {model['hidden']}, {model['heads']} heads, vocabulary {model['vocabulary']}, "
            f"{model['parameters_elements'] / 1e6:.1f} M parameters, {model['micro_batch_size']} x {model['sequence_tokens']} tokens a rank and step")


def steps_table(results, planned):
    rows = [["", "rounds", "step, ms", "min", "p99", "forward", "backward", "optimizer", "peak, MiB", "fixed", "sent, MiB", "last loss", "/ floor"]]
    rounds_of = {name: dict(zip(one.get("rounds", []), one.get("round_medians_s", []))) for name, one in results.items()}
    for name in ORDER:
        one = results.get(name)
        if one is None:
            continue
        if "step_s" not in one:
            rows.append([LABELS[name], f"0 of {planned}", "failed"] + [""] * 10)
            continue
        step, is_compute, over = one["step_s"], name in ("floor", "compute"), ratio_of(rounds_of[name], rounds_of.get("floor", {}))
        counts = len(one["rounds"])
        rows.append([
            LABELS[name], (f"{counts}" if counts == planned else f"{counts} of {planned}") + mark(counts), ms(step["median"]), ms(step["min"]),
            ms(step["p99"])] + [ms(one[part]["median"]) for part in PARTS] + [
            f"{one['peak_pss_bytes'] / 2**20:.0f}" if one["peak_pss_bytes"] and not is_compute else "",
            f"{one['fixed_pss_bytes'] / 2**20:.0f}" if one["fixed_pss_bytes"] and not is_compute else "",
            f"{one['bytes_sent_per_step'] / 2**20:.1f}" if one["bytes_sent_per_step"] is not None else "",
            f"{one['losses'][1]:.4f}" if one["losses"] else "", f"{over['median']:.2f}" if over else ""])
    return table(rows)


def failures(results, planned):
    text = ""
    for name, one in results.items():
        if one["failed_rounds"]:
            rest = f"; its figures are of the other {planned - one['failed_rounds']}" if "step_s" in one else ""
            text += (f"{LABELS[name].strip('*')} failed in {one['failed_rounds']} of {counted(planned, 'round')}{rest}: "
                     f"`{one['errors'][-1] or 'no message'}`\n\n")
    return text


def svg(section):
    """One panel a recipe, one scale for all."""
    title = f"Milliseconds a training step, {section['model']['parameters_elements'] / 1e6:.1f} M parameters, {section['world']} CPU ranks of one host"
    recipes = {recipe: of["results"] for recipe, of in section["recipes"].items()}
    shown = {recipe: [n for n in ORDER if "step_s" in results.get(n, {})] for recipe, results in recipes.items()}
    left, scale = 245, 460 / max(recipes[recipe][n]["step_s"]["median"] for recipe, names in shown.items() for n in names)
    height = 60 + sum(40 + 26 * len(names) for names in shown.values())
    label = title + "; " + "; ".join(
        f"{recipe}: " + ", ".join(f"{LABELS[n].strip('*')} {ms(recipes[recipe][n]['step_s']['median'])}" for n in names) for recipe, names in shown.items())
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
                width = scale * one[part]["median"]
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{COLOURS[part]}"/>')
                x += width
            out.append(f'<text x="{x + 6:.1f}" y="{y + 14}" fill="#222">{ms(one["step_s"]["median"])}</text>')
            y += 26
        y += 8
    return "\n".join(out + ["</svg>"]) + "\n"


def optimizer_section(found):
    if found is None:
        return ""

    def times(row, who):
        return ["failed", ""] if who not in row else [ms(row[who]["time_s"]["median"]), ms(row[who]["time_s"]["min"])]

    rows = [["", "libzero, ms", "min", "GB/s", "triad", "torch fused, ms", "min", "DeepSpeedCPUAdam, ms", "min", "faster peer / libzero"]]
    parts = [["peers' parts in bf16, ms", "cast", "unscale", "update", "cast back"]]
    for row in found["results"]:
        name = f"{row['job']}, {counted(row['threads'], 'thread')}"
        ours = row.get("libzero")
        rates = [f"{ours[key] / 1e9:.1f}" for key in ("bytes_per_s", "triad_bytes_per_s")] if ours else ["", ""]
        rows.append([name] + times(row, "libzero") + rates + times(row, "torch") + times(row, "deepspeed")
                    + [cell(row["faster_peer_over_libzero"])])
        for who, label in ("torch", "torch fused"), ("deepspeed", "DeepSpeedCPUAdam"):
            if "cast_s" in row.get(who, {}):
                parts.append([f"{label}, {name}"] + [ms(row[who][part]) for part in ("cast_s", "unscale_s", "update_s", "publish_s")])
    load = found["load_average"]
    return f"""## The update alone: AdamW, {found['elements'] / 1e6:.0f} M parameters in one flat tensor

{table(rows)}
{table(parts)}
fp32: gradient and master in fp32, the master is the parameter. bf16: bf16 gradients under a loss scale in, fp32 master, bf16
parameters out; libzero does that in one pass (`zero bench optimizer`, every element checked), the peers by a cast, an unscaling, their
update and a cast back. Above 1 libzero is faster; a ratio is the median of the rounds' ratios, each of that round's medians, with the
range and the number of the rounds. Programs take turns, each in new processes; every second round the other way round. GB/s counts the
bytes that a perfect pass moves, beside a triad (sum = a + 3 b, 12 bytes an element) between the updates. In fp32 all three do the same
work and wait for the same memory ([speed.md](speed.md) takes them apart). Load average of the machine before each: median
{load['median']:.1f}, {load['least']:.1f} to {load['most']:.1f}. Measured {found['date']} by `{found['command']}`.

"""


# What shared memory is to be worth: times the speed of gloo, at these sizes.
COLLECTIVE_TARGETS = {"reduce_scatter": 8, "all_gather": 5}
COLLECTIVE_TARGET_BYTES = [16 << 20, 64 << 20]
GLOOS = {"gloo_library": "gloo library", "gloo": "libzero over gloo"}


def size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def collectives_section(found):
    if found is None:
        return ""
    runs = {(run["operation"], run["transport"], run["bytes"]): run for run in found["runs"]}

    def rate(operation, transport, size):
        """GB/s by the median of the rounds' medians, as all figures here."""
        return size / statistics.median(runs[operation, transport, size]["round_medians_s"]) / 1e9

    def faster(operation, gloo, size):
        """shm's speed over gloo's, round by round."""
        ours, theirs = runs[operation, "shm", size]["round_medians_s"], runs[operation, gloo, size]["round_medians_s"]
        return over_rounds([b / a for a, b in zip(ours, theirs)])

    text, verdicts = "", []
    for operation, target in COLLECTIVE_TARGETS.items():
        sizes = sorted(size for of, transport, size in runs if of == operation and transport == "shm")
        rows = [[operation.replace("_", "-"), "memcpy, GB/s", "shm, GB/s", "ms", "min", "p99"] + [f"{label}, GB/s" for label in GLOOS.values()]
                + [f"shm / {label}" for label in GLOOS.values()]]
        for size in sizes:
            ours = runs[operation, "shm", size]
            rows.append([size_text(size), f"{rate('memcpy', None, size):.2f}", f"{rate(operation, 'shm', size):.2f}",
                         f"{statistics.median(ours['round_medians_s']) * 1e3:.3f}"]
                        + [f"{ours['time_s'][key] * 1e3:.3f}" for key in ("min", "p99")]
                        + [f"{rate(operation, gloo, size):.2f}" for gloo in GLOOS] + [cell(faster(operation, gloo, size), 1) for gloo in GLOOS])
        text += table(rows) + "\n"
        for size in COLLECTIVE_TARGET_BYTES:
            over = {gloo: faster(operation, gloo, size)["median"] for gloo in GLOOS}
            memcpy = rate("memcpy", None, size)
            verdicts.append(f"- {operation.replace('_', '-')}, {size_text(size)}, at least {target} times gloo: " + ", ".join(
                f"{over[gloo]:.1f} times {label}, {'reached' if over[gloo] >= target else '**missed**'}" for gloo, label in GLOOS.items())
                + f". {rate(operation, 'shm', size) / memcpy:.2f} times memcpy." + "".join(
                    f" {target} times {label} would be {target * rate(operation, gloo, size):.1f} GB/s, {target * rate(operation, gloo, size) / memcpy:.2f} times memcpy."
                    for gloo, label in GLOOS.items() if over[gloo] < target))
    machine = found["machine"]
    return f"""## Collectives on one host

{machine['processor']}, {machine['cores']} cores, {found['world']} ranks as processes, {counted(machine['threads_per_rank'], 'thread')} each, {found['dtype']}, libtorch {machine['libtorch']}.
A size is that of the whole tensor, GB/s its bytes by the median time of a call.

{text}{chr(10).join(verdicts)}

Above 1 shared memory is faster; ratios are medians of the rounds' ratios, as above. Rounds: {found['rounds']}. In each, every transport runs
in new processes, every second time the other way round; all ranks begin a call together, the first call only warms up, results are
compared with the exact ones. memcpy: all ranks copy that many bytes of their own at the same time. "gloo library": its own
algorithms as torch.distributed calls them for CPU tensors (c10d's ProcessGroupGloo on 127.0.0.1: `all_gather_into_tensor`, and
`reduce_scatter_tensor`, which is an all-reduce of a copy). "libzero over gloo": libzero's transport for several hosts, which sends
every part directly. Load average of the machine before: {found['load_average']:.1f}. Measured {found['date']} by `{found['command']}`.

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


def clipping_text(sections):
    values = {section["gradient_clipping"] for section in sections.values()}
    text = f"""- **Everybody clips** gradients at {max(v for v in values if v is not None)} by their global norm, for that is what GPTs are trained with and what the defaults of libzero and
  DeepSpeed do: DDP and ZeroRedundancyOptimizer with `torch.nn.utils.clip_grad_norm_`, FSDP1 with its own `clip_grad_norm_`, FSDP2 with
  torch's over its sharded parameters. The compute that serves as the floor does not clip: it has no step.""" if values != {None} else ""
    unlike = [size for size, section in sections.items() if section["gradient_clipping"] is None]
    if unlike:  # measured before script/compare saw to it
        text += ("\n" if text else "") + (f"- In the runs of the sizes {', '.join(unlike)} libzero and DeepSpeed clipped at 1.0, DDP and FSDP2 **did not clip**: their steps lack a norm and a\n"
                                         "  scaling, and the ratios to them are to libzero's disadvantage by that much.")
    return text


def page(document, chart):
    sections = document["sizes"]
    newest = sections.get(SMALL) or next(iter(sections.values()))
    machine, versions, world = newest["machine"], {}, newest["world"]
    for section in sections.values():
        versions.update(section["versions"])
    text = f"""# Performance
How long a training step of libzero takes beside its peers, and what it holds: CPU ranks of one host, libzero through shared memory against
peers over gloo on the loopback interface. Each size is measured in one run on one machine. This page is written by `script/compare`; the
numbers, with every round's median, are in [performance.json](performance.json). What bounds them: [speed.md](speed.md).

{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}. libzero {machine['libzero']}, libtorch
{machine['libtorch']}, {', '.join(f'{name} {version}' for name, version in sorted(versions.items())) or 'no peers'}. {world} ranks, {counted(machine['threads_per_rank'], 'thread')} each.

A ratio is the **median of the rounds' ratios**, then in brackets the smallest and the largest of a round, and how many rounds; a star
marks what has fewer than {LEAST_ROUNDS}. Below 1 libzero is faster or smaller.

![Step time of libzero and its peers]({chart})

"""
    for size, section in sections.items():
        planned = section["rounds"]
        text += f"## {shape(section['model'])}\n\n"
        text += (f"{section['date']}, {counted(planned, 'round')}, each of {section['warmup']} steps to warm up and {section['steps']} measured ones. "
                 f"Measured by {', then '.join(f'`{line}`' for line in section['command'].splitlines())}.\n\n")
        recipes = section["recipes"]
        names = [name for name in ratios({}) if any(name in of["ratios"] for of in recipes.values())]
        text += table([["ratio"] + list(recipes)] + [[name] + [cell(of["ratios"].get(name)) for of in recipes.values()] for name in names]) + "\n"
        for recipe, of in recipes.items():
            text += f"### {recipe}\n\n{steps_table(of['results'], planned)}\n{failures(of['results'], planned)}"
    text += optimizer_section(document["optimizers"]) + collectives_section(document["collectives"])
    return text + f"""## How it is measured
- The same GPT everywhere ([models/gpt.cpp](../models/gpt.cpp), [bench/peers/gpt.py](../bench/peers/gpt.py)), the same tokens, AdamW
  (lr 3e-4, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1; fused everywhere), no dropout, tied output layer. Initial values are drawn
  from the same distributions but are not the same numbers, so losses agree in size, not in digits. Within libzero the losses of all
  stages are equal, or the run fails.
{clipping_text(sections)}
- In a round every configuration runs in new processes. Every second round goes the other way round. A time is the median of the rounds'
  medians, min and p99 are of all steps, a ratio is the median of the rounds' ratios. A peer that fails in a round is named below its
  table, with how many rounds its figures are of.
- A step is forward, backward and update with the clipping; the loss is read after the clock. Times are rank 0's.
- Ranks of libzero talk through shared memory, the peers through gloo on the loopback interface, which is what each takes on one host
  without GPUs. "Over TCP" is libzero over gloo on that interface, too, with its sums in rank order. The peers have nothing else here:
  PyPI's torch is built without MPI and UCC
  (`python -c 'import torch.distributed as d; print(d.is_mpi_available(), d.is_ucc_available())'` prints `False False`), and Intel's
  oneCCL binding has no package for it (`pip download oneccl_bind_pt==2.11.0`: "from versions: none"; its successor inside
  `intel-extension-for-pytorch` ends at 2.8.0). On a torch built with MPI these ratios would be others.
- bf16, as each is usually set: libzero and DeepSpeed keep 16-bit parameters with fp32 masters, libzero sends bf16 gradients and sums them
  in fp32; FSDP shards fp32 parameters, gathers them in bf16 and reduces gradients in fp32 (FSDP1 too); DDP and ZeroRedundancyOptimizer
  keep fp32 parameters under autocast and reduce fp32 gradients.
- "FSDP2, bf16 reduction" is FSDP2 with `reduce_dtype=torch.bfloat16`: gloo adds in bf16. "DDP, bf16 parameters" is DDP over a bf16
  module: gradients travel and are added in bf16; the optimizer's wrapper holds fp32 masters, casts the gradients to fp32, clips, updates
  the masters with fused AdamW and copies them back to bf16. They show how much of a ratio is the recipe's.
- "Compute + AdamW share": forward and backward of the plain module without communication, all ranks at once, and a fused AdamW step over
  1/{world} of the parameters' number in fp32. It is the floor of a step, and "/ floor" the step's ratio to it. "floor: ... / DDP"
  is the ratio that an implementation would have whose communication took no time: where libzero's is near it, what is left of the step is
  the peer's own multiplications, and no smaller ratio can be had on this machine. [speed.md](speed.md) goes through it line by line.
- Peak memory is proportional set size (shared pages count in parts), read every 2 ms in three more steps that are not timed, less
  what the rank held before it built the model; of a round the rank that holds most, in the tables the round that holds most. "Fixed" is
  the same for a model with next to no parameters, measured once: code and modules that are loaded when the first model is built.
- Sent: payload bytes a rank and step, by libzero's count.

## Again
The command below each heading measures that size; cut short, `script/compare --resume DIR` goes on where it stopped.
`script/compare --help` lists sizes, rounds and peers. A part of it without Python: `zero bench step`.
"""


def readme(document):
    """The sentence of README.md; without one of its two sizes nothing."""
    if not all(size in document["sizes"] for size in (SMALL, LARGE)):
        return None

    def figure(size, recipe, text):
        found = document["sizes"][size]["recipes"].get(recipe, {"ratios": {}})["ratios"].get(text)
        return f"{found['median']:.2f}{mark(found['rounds']).strip()}" if found else "-"

    rows = [["a step at stage 3 takes, of the step of", "fp32, 1 x 128 tokens", "bf16, 1 x 128", "fp32, 8 x 128", "bf16, 8 x 128"]]
    for peer, text in ("FSDP2", "stage 3 / FSDP2"), ("FSDP2 with bf16 reduction", "stage 3 / FSDP2, bf16 reduction"), (
            "DeepSpeed stage 3", "stage 3 / DeepSpeed stage 3"), ("DDP", "stage 3 / DDP"), ("DDP with bf16 parameters", "stage 3 / DDP, bf16 parameters"), (
            "FSDP2, peak memory", "peak memory, stage 3 / FSDP2"), ("FSDP2, libzero over gloo too", "stage 3 over TCP / FSDP2"):
        rows.append([peer] + [figure(size, recipe, text) for size in (SMALL, LARGE) for recipe in ("fp32", "bf16")])
    world, rounds = document["sizes"][SMALL]["world"], [len(one.get("rounds", [])) for size in (SMALL, LARGE) for of in document["sizes"][size]["recipes"].values()
                                                       for one in of["results"].values() if one.get("rounds")]
    star = f"; * fewer than {LEAST_ROUNDS} rounds" if "*" in str(rows) else ""
    return (f"A step at stage 3 beside its peers', with 1 x 128 and with 8 x 128 tokens a rank: {world} CPU ranks of one host, shared memory against gloo,\n"
            f"a GPT of 29.5 M parameters, medians of the ratios of at least {counted(min(rounds), 'round')}{star} ([docs/performance.md](docs/performance.md), made by `script/compare`).\n\n{table(rows)}")


def with_figures(text, figures):
    """README.md with the part between its two marks replaced."""
    begin, end = text.index(README_BEGIN) + len(README_BEGIN), text.index(README_END)
    return f"{text[:begin]}\n{figures}{text[end:]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    for name in ("--json", "--markdown", "--svg"):
        parser.add_argument(name, type=pathlib.Path, required=True)
    parser.add_argument("--readme", type=pathlib.Path)
    parser.add_argument("--keep", action="store_true")
    o = parser.parse_args()
    kept = json.loads(o.json.read_text()) if o.keep and o.json.exists() else None
    document = summary(o.folder, kept if kept and kept["schema"] == "zero.compare/2" else None)
    sizes = document["sizes"]
    document["sizes"] = {size: sizes[size] for size in sorted(sizes, key=lambda size: (size != SMALL, size != LARGE))}
    o.json.write_text(json.dumps(document, indent=1) + "\n")
    o.svg.write_text(svg(next(iter(document["sizes"].values()))))
    o.markdown.write_text(page(document, o.svg.name))
    if o.readme and (figures := readme(document)):
        o.readme.write_text(with_figures(o.readme.read_text(), figures))


if __name__ == "__main__":
    main()
