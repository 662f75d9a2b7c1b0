"""Writes the page of script/compare: report.py FOLDER --json FILE --markdown FILE --svg FILE [--readme FILE] [--keep]

FOLDER has the output of a run. results.py computes all figures; this script only formats them. --readme also updates the figures
in README.md. --keep keeps the sections of an earlier FILE of --json that this run did not measure.
"""

import argparse
import json
import pathlib
import statistics

from results import LEAST_ROUNDS, ORDER, PARTS, over_rounds, parallel_ratios, python_ratios, ratio_of, ratios, summary

LABELS = {
    "compute": "compute + AdamW share, PyTorch", "ddp": "DDP", "ddpbf16": "DDP, bf16 parameters", "zro": "ZeroRedundancyOptimizer",
    "fsdp1": "FSDP1, full shard", "fsdp1grad": "FSDP1, shard grad-op", "fsdp2": "FSDP2", "fsdp2bf16": "FSDP2, bf16 reduction",
    "fsdp2noreshard": "FSDP2, no reshard", "ds0": "DeepSpeed stage 0", "ds1": "DeepSpeed stage 1", "ds2": "DeepSpeed stage 2",
    "ds3": "DeepSpeed stage 3", "floor": "compute + AdamW share, libtorch",
    **{f"zero{s}": f"**libzero stage {s}**" for s in range(4)}, **{f"tcp{s}": f"libzero stage {s} over TCP" for s in range(4)},
    "host3": "**libzero stage 3, all states in host memory**", "file3": "**libzero stage 3, all states in files**",
    "ds3cpu": "DeepSpeed stage 3, offload to CPU", "ds3nvme": "DeepSpeed stage 3, offload to NVMe",
    **{f"libzero{s}": f"**libzero stage {s}, from Python**" for s in (0, 3)}, "plain": "plain PyTorch, 1 rank",
    **{f"twin{s}": f"**libzero stage {s}, C++ model from Python**" for s in (0, 3)},
    **{f"alone{s}": f"libzero stage {s}, from Python, 1 rank" for s in (0, 3)},
    **{f"tp{s}": f"**libzero stage {s}**" for s in (0, 3)}, **{f"tptcp{s}": f"libzero stage {s} over TCP" for s in (0, 3)},
    "dtensor": "DTensor", "autotp": "DeepSpeed AutoTP",
    "autotpsegments": "DeepSpeed AutoTP, checkpointed layers", "autotpparts": "DeepSpeed AutoTP, checkpointed layers, partitioned", "segments0": "libzero stage 0, checkpointed layers",
    "parts0": "libzero stage 0, checkpointed layers, partitioned", **{f"sp{s}": f"**libzero stage {s}, Ulysses**" for s in (0, 3)},
    **{f"ulysses{s}": f"DeepSpeed stage {s}, Ulysses" for s in (0, 3)},
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


def shape(model, reader="rank"):
    return (f"{model['layers']} layers of {model['hidden']}, {model['heads']} heads, vocabulary {model['vocabulary']}, "
            f"{model['parameters_elements'] / 1e6:.1f} M parameters, {model['micro_batch_size']} x {model['sequence_tokens']} tokens a {reader} and step")


def shares(one):
    """Cells of what ranks that share samples send."""
    if "bytes_by_axis" not in one:
        return [""] * 3
    sent = (one["bytes_by_axis"][axis] for axis in ("tensor_parallel", "sequence_parallel"))
    return [f"{of / 2**20:.1f}" if of else "" for of in sent] + [ms(one["collectives_alone_s"])]


def steps_table(results, planned):
    rows = [["", "rounds", "step, ms", "min", "p99", "forward", "backward", "optimizer", "peak, MiB", "fixed", "sent, MiB", "by tp",
             "by sp", "tp, sp alone, ms", "last loss", "/ floor"]]
    rounds_of = {name: dict(zip(one.get("rounds", []), one.get("round_medians_s", []))) for name, one in results.items()}
    for name in ORDER:
        one = results.get(name)
        if one is None:
            continue
        if "step_s" not in one:
            rows.append([LABELS[name], f"0 of {planned}", "failed"] + [""] * (len(rows[0]) - 3))
            continue
        step, is_compute, over = one["step_s"], name in ("floor", "compute"), ratio_of(rounds_of[name], rounds_of.get("floor", {}))
        counts = len(one["rounds"])
        rows.append([
            LABELS[name], (f"{counts}" if counts == planned else f"{counts} of {planned}") + mark(counts), ms(step["median"]), ms(step["min"]),
            ms(step["p99"])] + [ms(one[part]["median"]) for part in PARTS] + [
            f"{one['peak_pss_bytes'] / 2**20:.0f}" if one["peak_pss_bytes"] and not is_compute else "",
            f"{one['fixed_pss_bytes'] / 2**20:.0f}" if one["fixed_pss_bytes"] and not is_compute else "",
            f"{one['bytes_sent_per_step'] / 2**20:.1f}" if one["bytes_sent_per_step"] is not None else "",
            *shares(one),
            f"{one['losses'][1]:.4f}" if one["losses"] else "", f"{over['median']:.2f}" if over else ""])
    measured = [i for i in range(len(rows[0])) if i == 0 or any(row[i] for row in rows[1:])]
    return table([[row[i] for i in measured] for row in rows])


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


def load_text(section):
    load = section.get("load_average")
    return "" if load is None else (f" Load average of the\nmachine before each: median {load['median']:.1f}, {load['least']:.1f} to "
                                    f"{load['most']:.1f}.")


def section_text(section, ratios_of):
    """Of one size: how it was measured with its ratios; (recipe, table of steps) of each recipe."""
    planned, recipes = section["rounds"], section["recipes"]
    text = (f"{section['date']}, {counted(planned, 'round')}, each with {counted(section['warmup'], 'warm-up step')} "
            f"and {counted(section['steps'], 'measured step')}. Measured by {', then '.join(f'`{line}`' for line in section['command'].splitlines())}.{load_text(section)}\n\n")
    names = [name for name in ratios_of({}) if any(name in of["ratios"] for of in recipes.values())]
    rows = [[name] + [cell(of["ratios"].get(name)) for of in recipes.values()] for name in names]
    text += table([["ratio"] + list(recipes)] + rows) + "\n"
    return text, [(recipe, f"{steps_table(of['results'], planned)}\n{failures(of['results'], planned)}")
                  for recipe, of in recipes.items()]


def verdicts(section, ratios_of, targets):
    """A line for each ratio with a target."""
    text = ""
    for name in ratios_of({}):
        target = next((most for start, most in targets.items() if name.startswith(start)), None)
        found = {recipe: of["ratios"].get(name) for recipe, of in section["recipes"].items()}
        results = [f"{recipe} {one['median']:.3f}, {'reached' if one['median'] <= target else '**missed**'}"
                   for recipe, one in found.items() if target and one]
        if results:
            text += f"- {name}, at most {target}: {', '.join(results)}.\n"
    return text


# Targets: the most that a ratio's median may be. The first of a dictionary that a ratio's name begins with counts.
PYTHON_TARGETS = {"from Python / from C++, stage": 1.03, "1 rank, from Python, stage": 1.03}


def python_section(sections):
    if not sections:
        return ""
    first = sections.get(SMALL) or next(iter(sections.values()))
    machine = first["machine"]
    text = f"""## From Python
{machine['processor']}, {machine['cores']} cores, {machine['system']}. libzero {machine['libzero']}, {first['world']} ranks,
{counted(machine['threads_per_rank'], 'thread')} each. All Python programs run in one interpreter with torch
{first['versions']['torch']} (commit {first['torch_commit'][:12]}), the C++ program with libtorch {machine['libtorch']}.

- "From Python" after the name of a peer is [lab/peers/gpt.py](../peers/gpt.py), which the peers train as well, with
  `libzero.Engine` under `zero run`. "From C++" is `zero bench step` with [models/gpt.cpp](../../models/gpt.cpp) ("libzero
  stage 3" in the tables of steps). Ranks use shared memory, the peers gloo.
- "From Python / from C++" compares the same network in both languages: [lab/peers/twin.py](../peers/twin.py)
  does the operations of models/gpt.cpp one by one. "The peers' model from Python / from C++" also includes what the
  other operations of gpt.py cost: `nn.Linear` in Python adds the bias within the product, and the loss is computed from
  a copy of all logits in fp32.
- "1 rank" compares the engine with a loop in plain PyTorch, the same model with the same AdamW and clipping:
  `loss.backward()`, `torch.nn.utils.clip_grad_norm_`, `torch.optim.AdamW(fused=True)`, `zero_grad(set_to_none=True)`.
  In bf16 its module is bf16, and the optimizer casts the gradients to fp32, clips them, updates fp32 masters with
  AdamW(fused=True) and copies them to the parameters. The three programs are processes that take turns at every step.
  A round's ratio is the median of the ratios of its turns.
- Memory is measured as in the other sections. Code that `torch.optim` loads with the first optimizer (`torch._dynamo`)
  is loaded before the model is built in all Python programs.

"""
    for section in sections.values():
        body, tables = section_text(section, python_ratios)
        text += f"### {shape(section['model'])}\n\n{body}"
        text += verdicts(section, python_ratios, PYTHON_TARGETS)
        tokens = f"{section['model']['micro_batch_size']} x {section['model']['sequence_tokens']} tokens"
        text += "\n" + "".join(f"#### {recipe}, {tokens}\n\n{one}" for recipe, one in tables)
    return text


PARALLEL_TARGETS = {
    **{f"stage {s} over TCP / DTensor": 0.8 for s in (0, 3)}, **{f"stage {s} / DTensor": 0.5 for s in (0, 3)},
    **{f"stage {s} / (compute": 1.15 for s in (0, 3)}, "partitioned / whole": 1.1,
    **{f"Ulysses, stage {s} / DeepSpeed": 0.6 for s in (0, 3)},
    **{f"peak memory, stage {s} / DTensor": 1 for s in (0, 3)}, **{f"peak memory, Ulysses, stage {s}": 1 for s in (0, 3)}}


def parallel_section(sections):
    if not sections:
        return ""
    first = next(iter(sections.values()))
    machine, versions = first["machine"], {}
    for section in sections.values():
        versions.update(section["versions"])
    text = f"""## Tensor and sequence parallelism
{machine['processor']}, {machine['cores']} cores, {machine['system']}. libzero {machine['libzero']}, libtorch {machine['libtorch']},
{', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}. {first['world']} ranks, {counted(machine['threads_per_rank'], 'thread')} each. All ranks
share each sample: ZeRO shards over one rank with tensor parallelism and over {first['world']} with Ulysses. Measurements with two ranks on two cores show
the cost of an implementation, not how it scales.

- libzero is `zero bench step --tensor-parallel {first['world']}` (or `--sequence-parallel {first['world']}`) with the built-in GPT, whose attention, MLP
  and vocabulary are cut; logits are all-gathered.
- "DTensor" is `parallelize_module` of [lab/peers/gpt.py](../peers/gpt.py) with `ColwiseParallel` and `RowwiseParallel`
  ([lab/peers/parallel.py](../peers/parallel.py)), heads divided, one sum for the gradients of q, k and v, and the vocabulary as in torch's
  tutorial: the embedding by rows, the output layer by columns with whole logits. q, k and v are three layers, because a part of the
  rows of a fused one would mix heads. In bf16 the module is bf16, and a wrapper of the optimizer holds fp32 masters (as in "DDP, bf16 parameters").
- "DeepSpeed AutoTP" is `tensor_parallel.autotp_size` with a `partition_config` for the same layers, at stage 0. The tied embedding is whole on
  every rank.
- "DeepSpeed, Ulysses" is `deepspeed.sequence.layer.DistributedAttention` around torch's attention, with `sequence_parallel_size`.
- "Compute + AdamW share" is here what **one rank** computes: forward and backward of a plain module that has this rank's parts of the cut weights, on
  its tokens, with its heads over all tokens, on all ranks at once and without communication; and AdamW over its part of the parameters.
  Norms, residuals and the embedding of positions are whole, the loss is of its part of the vocabulary, nothing is recomputed. It is the floor of
  a step that divides the work in this way with these kernels; "floor: ... / DTensor" is the ratio of an implementation whose communication
  takes no time.
- "tp, sp alone" is the time of a step's collectives of activations when nothing else runs: as many calls of the mean size.
- "Checkpointed layers" recompute every layer in backward; "partitioned" is `activation_checkpointing.partition_activations`.
  DeepSpeed's are `deepspeed.checkpointing.checkpoint` of every block of "DeepSpeed AutoTP", without and with `partition_activations`.

"""
    for section in sections.values():
        body, tables = section_text(section, parallel_ratios)
        text += f"### {shape(section['model'], 'data-parallel rank')}\n\n{body}{verdicts(section, parallel_ratios, PARALLEL_TARGETS)}"
        tokens = f"{section['model']['micro_batch_size']} x {section['model']['sequence_tokens']} tokens"
        text += "\n" + "".join(f"#### {recipe}, {tokens}\n\n{one}" for recipe, one in tables)
    return text


def attention_section(found):
    if not found:
        return ""
    rows = [["", "tokens", "libzero", "libzero over TCP", "DeepSpeed", "share alone", "libzero / DeepSpeed",
             "over TCP / DeepSpeed", "libzero / share alone", "floor: share alone / DeepSpeed"]]
    for row in found["results"]:
        times = [ms(row[who]["median"]) if row.get(who) else "" for who in ("shm", "gloo", "deepspeed", "local")]
        ratios = [cell(row[name]) for name in ("shm_over_deepspeed", "gloo_over_deepspeed", "shm_over_local", "local_over_deepspeed")]
        rows.append([row["recipe"], str(row["sequence_tokens"])] + times + ratios)
    load = found["load_average"]
    return f"""### Ulysses' attention alone
Milliseconds of forward and backward of one causal attention, {found['heads']} heads of {found['width']}, its tokens divided over {found['world']} ranks:
`libzero.attention_over_heads` from Python over shared memory and TCP, and DeepSpeed's `DistributedAttention` over gloo, around the same call of
torch's `scaled_dot_product_attention` ([lab/peers/attention.py](../peers/attention.py)). "Share alone" is that call with a rank's heads
and all tokens, on all ranks at once, without exchanges. Output and gradients were compared with the whole attention before. {found['date']},
measured by `{found['command']}`; rounds of {counted(found['warmup'], 'warm-up step')} and {counted(found['steps'], 'measured step')}. Load average of the machine
before each: median {load['median']:.1f}, {load['least']:.1f} to {load['most']:.1f}.

{table(rows)}
"""


# The most that a step with experts may take, over DeepSpeed's: of layers, and of the gate and the exchange alone.
EXPERTS_TARGETS, EXPERTS_ALONE_TARGET = {"shm": 0.5, "gloo": 0.8}, 0.3


def experts_section(found):
    if not found:
        return ""
    machine, load = found["machine"], found["load_average"]
    text = f"""## Layers of experts
{machine['processor']}, {machine['cores']} cores, {machine['system']}. libzero {machine['libzero']},
{', '.join(f'{name} {version}' for name, version in sorted(found['versions'].items()))}. Two ranks, {counted(machine['threads_per_rank'], 'thread')} each; "alone" one rank.
Milliseconds of a step of two layers x + MoE(LayerNorm(x)), forward, backward, clipping and AdamW: `zero bench experts` over shared memory and
TCP, and `deepspeed.moe.layer.MoE` over gloo ([lab/peers/experts.py](../peers/experts.py)), with the same sizes, capacities and routing
by the same rule. DeepSpeed refuses stage 3 with experts: its stage 2 is compared with libzero's stage 3. The bytes that all-to-alls send are those of
the formula in every run (`zero bench experts` fails otherwise); DeepSpeed sends every place of a padded [experts, capacity, hidden]. "Skewed":
expert 0's logits are higher, "load" is the most chosen expert's tokens over the mean. "Floor": forward and backward of a rank's experts alone on as
many kept rows, in the same batches, and a fused AdamW step over its share of them, on all ranks at once; "floor / DeepSpeed" is the ratio of an
implementation whose gate, exchange and everything else take no time. libzero runs an expert once for the rows of each rank, so that bits do not
depend on the degree; with `merged_batches` once for all, as DeepSpeed does. {found['date']}, measured by `{found['command']}`; rounds of
{counted(found['warmup'], 'warm-up step')} and {counted(found['steps'], 'measured step')}. Load average of the machine before each: median {load['median']:.1f},
{load['least']:.1f} to {load['most']:.1f}.

"""
    for case, options in enumerate(found["cases"]):
        rows = [["", "libzero", "merged batches", "over TCP", "DeepSpeed", "libzero / DeepSpeed", "merged batches / DeepSpeed", "over TCP / DeepSpeed",
                 "libzero / floor", "floor / DeepSpeed", "sent by all-to-alls", "dropped", "load"]]
        words = dict(zip(options.split()[::2], options.split()[1::2]))
        alone = words.get("--inner") == "0"
        compared, missed = False, []
        for row in (row for row in found["results"] if row["case"] == case):
            name = f"{row['recipe']}, stage {row['stage']}, ep {row['ep']}"
            times = [ms(row[who]["median"]) if row.get(who) else "" for who in ("shm", "merged", "gloo", "deepspeed")]
            ratios = ("shm_over_deepspeed", "merged_over_deepspeed", "gloo_over_deepspeed", "shm_over_floor", "floor_shm_over_deepspeed")
            rows.append([name] + times + [cell(row[one]) for one in ratios]
                        + [f"{row.get('exchanged_bytes_per_step', 0) / 2**20:.2f} MiB", f"{row.get('dropped', 0) * 100:.1f} %", f"{row.get('load', 0):.2f}"])
            for who, target in {"shm": EXPERTS_ALONE_TARGET}.items() if alone else EXPERTS_TARGETS.items():
                ratio = row[f"{who}_over_deepspeed"]
                compared = compared or bool(ratio)
                if ratio and ratio["median"] > target:
                    missed.append(f"{name}{'' if who == 'shm' else ' over TCP'} {ratio['median']:.2f} (at most {target})")
        title = f"hidden {words['--hidden']}, {words['--num-experts']} experts, k {words['--top-k']}, {words['--tokens']} tokens a rank"
        title += ", gate and exchange alone" if alone else ", skewed" if words["--skew"] != "0" else ""
        goal = f"{EXPERTS_ALONE_TARGET}" if alone else f"{EXPERTS_TARGETS['shm']} over shared memory and {EXPERTS_TARGETS['gloo']} over TCP"
        text += f"### {title[0].upper()}{title[1:]}\n\nTarget: at most {goal} of DeepSpeed's step. "
        text += ("**Missed**: " + "; ".join(missed) + "." if missed else "Reached." if compared else "DeepSpeed's step was not measured.")
        text += f"\n\n{table(rows)}\n"
    return text


MODELS_TARGET = 0.6  # of a step at stage 3, over FSDP2's and DeepSpeed's


def models_section(found):
    if not found:
        return ""
    machine, load = found["machine"], found["load_average"]
    text = f"""## Models of Hugging Face
{machine['processor']}, {machine['cores']} cores, {machine['system']}. libzero {machine['libzero']},
{', '.join(f'{name} {version}' for name, version in sorted(found['versions'].items()))}. {counted(found['results'][0]['world'], 'rank')}, {counted(machine['threads_per_rank'], 'thread')} each.
Milliseconds of a training step in bf16: `zero bench step --model NAME`, and transformers' `AutoModelForCausalLM` of the same config.json (`zero models
NAME`) with DDP, FSDP2 and DeepSpeed over gloo ([lab/peers/huggingface.py](../peers/huggingface.py)), random weights, the same tokens, AdamW, clipping,
no dropout. "FSDP2" reduces in fp32, "FSDP2, bf16 reduction" in bf16. Target: a step at stage 3 takes at most {MODELS_TARGET} of FSDP2's and of DeepSpeed's.
{found['date']}, measured by `{found['command']}`; rounds of {counted(found['results'][0]['warmup'], 'warm-up step')} and {counted(found['results'][0]['steps'], 'measured step')}.
Load average of the machine before each: median {load['median']:.1f}, {load['least']:.1f} to {load['most']:.1f}.

"""
    peers = [peer for peer in ("ddpbf16", "fsdp2", "fsdp2bf16", "ds3") if any(peer in row["seconds"] for row in found["results"])]
    rows = [["", "libzero stage 0", "libzero stage 3", *(LABELS[peer] for peer in peers), *(f"stage 3 / {LABELS[peer]}" for peer in peers)]]
    missed = []
    for row in found["results"]:
        name = f"{row['model']}, {row['micro_batch_size']} x {row['sequence_tokens']} tokens"
        seconds = row["seconds"]
        rows.append([name] + [ms(seconds[who]["median"]) if seconds.get(who) else "" for who in ("zero0", "zero3", *peers)]
                    + [cell(row["ratios"].get(peer)) for peer in peers])
        for peer in peers:
            ratio = row["ratios"].get(peer)
            if peer != "ddpbf16" and ratio and ratio["median"] > MODELS_TARGET:
                missed.append(f"{name}, of {LABELS[peer]}'s {ratio['median']:.2f}")
    text += table(rows) + "\n" + ("**Missed**: " + "; ".join(missed) + "." if missed else "Reached.") + "\n\n"
    for row in found["results"]:
        text += "".join(f"{row['model']}: {LABELS[who]} failed: {error}\n\n" for who, error in row["failures"].items())
    return text


# What the ratios of saves and loads may be at most.
CHECKPOINT_TARGETS = {"save / dcp.save": 0.5, "save / the disk alone": 1.4, "stall in the background / dcp.async_save's": 0.4,
                      "load / dcp.load": 1.0, "load on 8 ranks / on 2": 1.2, "load on 1 rank / on 2": 1.2,
                      **{f"load on 1 rank / DeepSpeed stage {s}'s conversion and load": 0.2 for s in (2, 3)}}
CHECKPOINT_ROWS = {"save": "libzero", "background": "libzero, in the background", "load 1": "libzero, on 1 rank", "load 2": "libzero, on 2 ranks",
                   "load 8": "libzero, on 8 ranks", "dcp": "dcp.save", "dcp_async": "dcp.async_save", "torch": "torch.save and fsync",
                   "ds2": "DeepSpeed, stage 2", "ds3": "DeepSpeed, stage 3"}


def checkpoints_section(found):
    if not found:
        return ""
    machine, load, task = found["machine"], found["load_average"], found["task"]
    size, disk = found["results"]["save"]["bytes"]["median"], found["results"]["disk"]
    rested = (f"All programs train for {task['rest']} s before a save and a load: this disk slows down after much work, and they do different amounts. "
              if task.get("rest") else "")
    text = f"""## Checkpoints
{machine['processor']}, {machine['cores']} cores, {machine['system']}. libzero {machine['libzero']},
{', '.join(f'{name} {version}' for name, version in sorted(found['versions'].items()))}. Two ranks, {counted(task['threads'], 'thread')} each, bf16 with fp32 masters,
AdamW; a GPT of {task['layers']} layers, hidden {task['hidden']}: {size / 1e9:.2f} GB a checkpoint. `zero bench checkpoint` at stage {task['stage']}, FSDP2 with
torch.distributed.checkpoint (dcp), one `torch.save` per rank with fsync, and DeepSpeed's `save_checkpoint`
([lab/peers/checkpoints.py](../peers/checkpoints.py)), in turns. Milliseconds. "Stall": {counted(task['steps'], 'step')} with a save at their beginning minus as many
without. "Complete": from the call until the checkpoint can be loaded. "Peak": proportional set size of a rank above the highest of training; of
loads, above the engine. Files are dropped from the cache before loads. {rested}DeepSpeed loads on another number of ranks after a
conversion (`ds_to_universal`), here in a process that has imported it, and then by one rank. "The disk alone" writes as many bytes into
new files with direct I/O, on two ranks, and reads them: {size / disk['write_s']['median'] / 1e9:.2f} and {size / disk['read_s']['median'] / 1e9:.2f} GB/s.
{found['date']}, measured by `{found['command']}`. Load average of the machine before each: median {load['median']:.1f}, {load['least']:.1f} to {load['most']:.1f}.

"""
    rows = [["", "call", "stall", "complete", "load", "peak of a rank", "read / needed"]]
    for name, title in CHECKPOINT_ROWS.items():
        own = found["results"].get(name)
        if own:
            rows.append([title] + [ms(own[field]["median"]) if field in own else "" for field in ("call_s", "stall_s", "durable_s", "load_s")]
                        + [f"{own['peak_bytes'] / 2**20:.0f} MiB", f"{own['read_over_needed']:.2f}" if "read_over_needed" in own else ""])
    text += table(rows) + "\n"
    rows = [["ratio", "of the rounds", "target"]]
    for name, ratio in found["ratios"].items():
        if not ratio:  # a peer that was not asked for
            continue
        target = CHECKPOINT_TARGETS.get(name)
        verdict = "" if target is None else f"at most {target}: {'reached' if ratio['median'] <= target else '**missed**'}"
        rows.append([name, cell(ratio), verdict])
    return text + table(rows) + "\n"


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
    return f"""## The update alone: AdamW, {found['elements'] / 1e6:.0f} M parameters in one flat tensor

{table(rows)}
{table(parts)}
fp32: gradient and master are fp32, and the master is the parameter. bf16: scaled bf16 gradients, fp32 master, bf16 parameters.
libzero performs the bf16 update in one pass (`zero bench optimizer`, every element checked). The peers cast and unscale the gradients,
update, and cast the parameters back. Above 1 libzero is faster. A ratio is the median over rounds of the ratio of that round's
medians, with the range and the number of rounds. Programs alternate, each in new processes; every second round is in reverse order.
GB/s is the minimum number of bytes per update divided by its time. The triad (sum = a + 3 b, 12 bytes per element) runs between the
updates. In fp32 all three programs do the same work and are memory-bound ([docs/performance.md](../../docs/performance.md) has an analysis).{load_text(found)} Measured {found['date']} by `{found['command']}`.

"""


# Targets: shared memory's speed as a multiple of gloo's, at these sizes.
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
        """GB/s from the median of the rounds' medians, as for all figures of this page."""
        return size / statistics.median(runs[operation, transport, size]["round_medians_s"]) / 1e9

    def faster(operation, gloo, size):
        """shm's speed divided by gloo's, by round."""
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
A size is that of the whole tensor. GB/s is this size divided by the median time of a call.

{text}{chr(10).join(verdicts)}

Above 1 shared memory is faster. Ratios are medians of the rounds' ratios, as above. Rounds: {found['rounds']}. In each round every transport
runs in new processes, in reverse order in every second round. All ranks start a call together, the first call is a warm-up, and results
are compared with exact ones. memcpy: all ranks copy that many bytes of their own memory at the same time. "gloo library": its own
algorithms, as torch.distributed calls them for CPU tensors (c10d's ProcessGroupGloo on 127.0.0.1: `all_gather_into_tensor`, and
`reduce_scatter_tensor`, which is an all-reduce of a copy). "libzero over gloo": libzero's transport for several hosts, which sends
every part directly. Load average of the machine before: {found['load_average']:.1f}. Measured {found['date']} by `{found['command']}`.

What limits each, as far as it was tested:
- If inputs and results fit in the last-level cache, calls run at the speed of the caches. They take microseconds, and rounds differ by
  up to a factor of two. Ratios of a hundred and more to the gloo library come from its slow calls for small messages.
- If the inputs and results of all ranks exceed the last-level cache by a third, results are written with streaming stores. Measured
  alternately with and without them (2 ranks, 2 cores of an EPYC with 32 MiB of cache), this made 64 and 256 MiB 1.3 to 1.6 times as fast;
  at 16 MiB the memcpy reference varied too much for a figure. A small program with the same pattern of copies (4 KiB pages, two
  processes) was not faster: 13 to 16 GB/s for an all-gather of 64 MiB. The probable reason for the gain, which was not measured, is
  that overwritten memory is not read first. Huge pages could not be tested, because that system refuses them for shared memory.
- memcpy is the C library's, with plain stores at these sizes. It is a baseline, not an upper limit.
- All figures depend on the host, which this virtual machine shares: memcpy alone changed by a factor of 1.8 between runs minutes apart.

"""


def clipping_text(sections):
    values = {section["gradient_clipping"] for section in sections.values()}
    text = f"""- **Everybody clips** gradients at {max(v for v in values if v is not None)} by their global norm, as is usual for GPTs and the default of libzero and DeepSpeed.
  DDP and ZeroRedundancyOptimizer use `torch.nn.utils.clip_grad_norm_`, FSDP1 its own `clip_grad_norm_`, FSDP2 torch's function on
  its sharded parameters. The floor does not clip, because it has no step.""" if values != {None} else ""
    unlike = [size for size, section in sections.items() if section["gradient_clipping"] is None]
    if unlike:  # measured by earlier versions of script/compare
        text += ("\n" if text else "") + (f"- In the runs of the sizes {', '.join(unlike)} libzero and DeepSpeed clipped at 1.0, DDP and FSDP2 **did not clip**. Their steps lack a norm and a\n"
                                         "  scaling, which the ratios do not correct for.")
    return text


def page(document, chart):
    sections = document["sizes"]
    newest = sections.get(SMALL) or next(iter(sections.values()))
    machine, versions, world = newest["machine"], {}, newest["world"]
    for section in sections.values():
        versions.update(section["versions"])
    text = f"""# Performance
Time and memory of a training step of libzero compared with its peers, with CPU ranks on one host: libzero uses shared memory, the peers
use gloo on the loopback interface. Each size is measured in one run on one machine. `script/compare` writes this page. The figures, with
the median of every round, are in [performance.json](performance.json). [docs/performance.md](../../docs/performance.md) explains what limits them.

{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}. libzero {machine['libzero']}, libtorch
{machine['libtorch']}, {', '.join(f'{name} {version}' for name, version in sorted(versions.items())) or 'no peers'}. {world} ranks, {counted(machine['threads_per_rank'], 'thread')} each.

A ratio is the **median of the rounds' ratios**, followed by the smallest and largest ratio of a round and the number of rounds. A star
marks fewer than {LEAST_ROUNDS} rounds. Below 1 libzero is faster or uses less memory.

![Step time of libzero and its peers]({chart})

"""
    for section in sections.values():
        body, tables = section_text(section, ratios)
        text += f"## {shape(section['model'])}\n\n{body}" + "".join(f"### {recipe}\n\n{one}" for recipe, one in tables)
    text += python_section(document.get("python", {})) + parallel_section(document.get("parallel", {}))
    text += attention_section(document.get("attention")) + experts_section(document.get("experts"))
    text += models_section(document.get("models")) + checkpoints_section(document.get("checkpoints"))
    text += optimizer_section(document["optimizers"]) + collectives_section(document["collectives"])
    return text + f"""## How it is measured
- All programs train the same GPT ([models/gpt.cpp](../../models/gpt.cpp), [lab/peers/gpt.py](../peers/gpt.py)) on the same tokens,
  with AdamW (lr 3e-4, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1; fused), no dropout, tied output layer. Initial values are drawn
  from the same distributions but are different numbers, so losses are similar, not equal. Within libzero the losses of all stages must
  be equal, otherwise the run fails.
{clipping_text(sections)}
- In each round every configuration runs in new processes. Every second round is in reverse order. A time is the median of the rounds'
  medians, min and p99 are over all steps, a ratio is the median of the rounds' ratios. If a peer fails in a round, this is stated below
  its table with the number of rounds that its figures are from.
- A step is forward, backward, clipping and update. The loss is read after the time is taken. Times are rank 0's.
- Ranks of libzero use shared memory, the peers use gloo on the loopback interface: the default of each on one host without GPUs.
  "Over TCP" is libzero over gloo on that interface, with sums in rank order. The peers have no alternative here: PyPI's torch is built
  without MPI and UCC (`python -c 'import torch.distributed as d; print(d.is_mpi_available(), d.is_ucc_available())'` prints
  `False False`), and Intel's oneCCL binding has no package for it (`pip download oneccl_bind_pt==2.11.0`: "from versions: none"; its
  successor in `intel-extension-for-pytorch` ends at 2.8.0). With a torch built with MPI, the ratios would differ.
- bf16 in the usual setting of each: libzero and DeepSpeed keep 16-bit parameters with fp32 masters; libzero sends bf16 gradients and sums
  them in fp32. FSDP1 and FSDP2 shard fp32 parameters, all-gather them in bf16 and reduce gradients in fp32. DDP and
  ZeroRedundancyOptimizer keep fp32 parameters under autocast and reduce fp32 gradients.
- "FSDP2, bf16 reduction" is FSDP2 with `reduce_dtype=torch.bfloat16`: gloo sums in bf16. "DDP, bf16 parameters" is DDP with a bf16
  module: gradients are sent and summed in bf16; a wrapper of the optimizer holds fp32 masters, casts the gradients to fp32, clips, updates
  the masters with fused AdamW and copies them back to bf16. These configurations show how much of a ratio is due to the dtypes.
- "Compute + AdamW share" is the sum of forward and backward of the plain module without communication, on all ranks at once, and a fused
  fp32 AdamW step over 1/{world} of the parameters. It is the floor of a step; "/ floor" is a step's ratio to it. "floor: ... / DDP" is the
  ratio of an implementation whose communication takes no time. If libzero's ratio is close to it, most of the step is compute that
  the peer has as well, and a smaller ratio is not possible on this machine. [docs/performance.md](../../docs/performance.md) has a detailed analysis.
- Peak memory is the proportional set size (shared pages count in parts), read every 2 ms in three more steps that are not timed, minus
  the rank's memory before it built the model. It is the maximum over ranks and, in the tables, over rounds. "Fixed" is the same for
  a model with almost no parameters, measured once: code and modules that are loaded when the first model is built.
- Sent is the payload in bytes per rank and step, as counted by libzero.

## Again
The command below each heading measures that size. `script/compare --resume DIR` continues an interrupted run. `script/compare --help`
lists sizes, rounds and peers. `zero bench step` is a part of the measurement without Python.
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
    return (f"Time of a stage-3 step relative to the peers, with 1 x 128 and with 8 x 128 tokens a rank: {world} CPU ranks of one host, shared memory against gloo,\n"
            f"a GPT of 29.5 M parameters, medians of the ratios of at least {counted(min(rounds), 'round')}{star} ([all figures](lab/results/performance.md), made by `script/compare`).\n\n{table(rows)}")


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
    for part in ("sizes", "python", "parallel"):
        order = sorted(document[part], key=lambda size: (size != SMALL, size != LARGE))
        document[part] = {size: document[part][size] for size in order}
    texts = {o.json: json.dumps(document, indent=1) + "\n", o.svg: svg(next(iter(document["sizes"].values()))),
             o.markdown: page(document, o.svg.name)}
    for file, text in texts.items():  # all or none
        file.write_text(text)
    if o.readme and (figures := readme(document)):
        o.readme.write_text(with_figures(o.readme.read_text(), figures))


if __name__ == "__main__":
    main()
