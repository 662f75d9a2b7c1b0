"""Results of script/compare as one document (schema zero.compare/2): the figures of lab/results/performance.md.

FOLDER/SIZE/round-N/ has one file per configuration: libzero-TRANSPORT-RECIPE.json (`zero bench step --json`) and
peer-NAME-RECIPE.json (peer.py); FOLDER/fixed/ the same of a model with next to no parameters; FOLDER/python/ a folder
like this one from `script/compare --python`, FOLDER/parallel/ one from `script/compare --parallel`; FOLDER/optimizer/ the updates alone (`zero bench optimizer --json` and
adam.py), FOLDER/collectives/result.json `zero bench collectives --json`.

A figure of several rounds is the median of the rounds' figures, and a ratio the median of the rounds' ratios: the
machine's speed varies, so only figures of one round may be divided. Steps of different rounds are never pooled.
"""

import datetime
import json
import statistics

LEAST_ROUNDS = 3  # a figure of fewer is marked on the page
ORDER = ["floor", "compute", "zero0", "zero1", "zero2", "zero3", "tcp0", "tcp3", "libzero0", "libzero3", "twin0",
         "twin3", "ddp", "ddpbf16", "zro", "fsdp1", "fsdp1grad", "fsdp2", "fsdp2bf16", "fsdp2noreshard",
         "ds0", "ds1", "ds2", "ds3",
         "host3", "ds3cpu", "file3", "ds3nvme", "plain", "alone0", "alone3",
         "tp0", "tp3", "tptcp0", "tptcp3", "dtensor", "autotp", "segments0", "parts0",
         "autotpsegments", "autotpparts", "sp0", "sp3", "ulysses0", "ulysses3"]
ALONE = {"plain": "plain", "libzero0": "alone0", "libzero3": "alone3"}  # one rank: peer.py's name, the entry's
PARTS = ["forward_s", "backward_s", "optimizer_s"]
# libzero's files by their second word: what their entries' names begin with.
PREFIX = {"shm": "zero", "gloo": "tcp", "cpu": "host", "nvme": "file",
          "tp": "tp", "tpgloo": "tptcp", "segments": "segments", "parts": "parts", "sp": "sp"}


def quantile(values, q):
    values = sorted(values)
    at = q * (len(values) - 1)
    below = int(at)
    return values[below] + (at - below) * (values[min(below + 1, len(values) - 1)] - values[below])


def over_rounds(figures):
    """Of one figure a round: the median, the range and how many rounds; None without any."""
    if not figures:
        return None
    return {"median": statistics.median(figures), "least_round": min(figures), "most_round": max(figures), "rounds": len(figures)}


def ratio_of_turns(above, below):
    """Of two entries whose programs took turns at every step: a round's ratio is the median of its turns' ratios."""
    above, below = (entry.samples.get("step_s", {}) if entry else {} for entry in (above, below))
    both = sorted(above.keys() & below.keys())
    return over_rounds([statistics.median(a / b for a, b in zip(above[r], below[r])) for r in both])


def ratio_of(above, below):
    """{round: figure} by {round: figure}: each round's ratio, summed up. Rounds that only one of the two has do not count."""
    return over_rounds([above[r] / below[r] for r in sorted(above) if r in below])


class Entry:
    """One configuration: what each round measured."""

    def __init__(self):
        self.samples, self.peaks = {}, {}  # {part: {round: [seconds]}}, {round: bytes}
        self.sent, self.losses, self.fixed, self.errors = None, None, None, {}
        self.axes, self.alone = None, {}  # bytes by kind of parallelism; {round: seconds of their collectives alone}

    def add(self, round_number, samples, run):
        samples = dict(samples)
        if "adamw_s" in samples:  # compute alone, with its share of AdamW, which no stage can do without
            samples["optimizer_s"] = samples.pop("adamw_s")
            samples["step_s"] = [a + b for a, b in zip(samples["step_s"], samples["optimizer_s"])]
        for part, values in samples.items():
            self.samples.setdefault(part, {})[round_number] = values
        if "peak_pss_bytes" in run:
            self.peaks[round_number] = run["peak_pss_bytes"]["highest"]
        if "bytes_sent_per_step" in run:
            self.sent = run["bytes_sent_per_step"]
        if "bytes_by_axis" in run:
            self.axes, self.alone[round_number] = run["bytes_by_axis"], run["collectives_alone_s"]
        if "last_loss" in run:
            self.losses = [run["first_loss"], run["last_loss"]]

    def rounds(self, part="step_s"):
        """{round: median of its steps}"""
        return {r: statistics.median(values) for r, values in self.samples.get(part, {}).items()}

    def document(self):
        one = {"failed_rounds": len(self.errors), "errors": [self.errors[r] for r in sorted(self.errors)]}
        if not self.samples:
            return one
        for part in ["step_s"] + PARTS:
            every = [v for values in self.samples[part].values() for v in values]
            medians = self.rounds(part)
            one[part] = {"median": statistics.median(medians.values()), "min": min(every), "p99": quantile(every, 0.99)}
            if part == "step_s":
                one["steps"] = len(every)
                one["round_medians_s"] = [medians[r] for r in sorted(medians)]
        if self.axes:
            one |= {"bytes_by_axis": self.axes, "collectives_alone_s": statistics.median(self.alone.values())}
        return dict(one, rounds=sorted(self.samples["step_s"]), peak_pss_bytes=max(self.peaks.values()) if self.peaks else None,
                    round_peaks_bytes=[self.peaks[r] for r in sorted(self.peaks)], fixed_pss_bytes=self.fixed,
                    bytes_sent_per_step=self.sent, losses=self.losses)


def load(folder):
    """{size: {recipe: {name: Entry}}}, {size: what its files say of model, machine, clipping and versions}"""
    sizes, about = {}, {}
    for path in sorted(folder.glob("*/round-*/*.json")):
        if path.parts[-3] in ("optimizer", "attention", "experts", "models", "checkpoints"):
            continue
        size, round_number = path.parts[-3], int(path.parts[-2].split("-")[1])
        document = json.loads(path.read_text())
        of_size = about.setdefault(size, {"versions": {}, "rounds": 0})

        def entry(recipe, name):
            return sizes.setdefault(size, {}).setdefault(recipe, {}).setdefault(name, Entry())

        def agree(key, value, among=of_size):
            """Rounds of unlike steps, clipping or torch are not one measurement."""
            if among.setdefault(key, value) != value:
                raise SystemExit(f"results.py: error: got {key} {value} in {path}, "
                                 f"expected {among[key]} as in the files before")

        of_size["rounds"] = max(round_number, of_size["rounds"])
        if "error" in document:
            for name in ALONE.values() if document["peer"] == "alone" else [document["peer"]]:
                entry(document["recipe"], name).errors[round_number] = document["error"]
            continue
        for key in ("steps", "warmup", "gradient_clipping"):
            agree(key, document.get(key))
        for key, value in document.get("versions", {}).items():
            agree(key, value, of_size["versions"])
        if "torch_commit" in document:
            agree("torch_commit", document["torch_commit"])
        if document.get("peer") == "alone":
            for run in document["runs"]:
                entry(run["recipe"], ALONE[run["peer"]]).add(round_number, run["samples"], run)
            continue
        agree("world", document["world"])
        if document["schema"] == "zero.bench.step/1":
            of_size["machine"] = document["machine"]
            of_size["model"] = dict(document["model"], micro_batch_size=document["micro_batch_size"])
            prefix = PREFIX[path.name.split("-")[1]]
            for run in document["runs"]:
                entry(run["recipe"], f"{prefix}{run['stage']}").add(round_number, run["samples"], run)
            for run in document["compute"]:
                entry(run["recipe"], "floor").add(round_number, run["samples"], run)
        else:
            samples = dict(document["samples"])
            if document["peer"] == "compute":
                samples["adamw_s"] = samples.pop("optimizer_s")
            entry(document["recipe"], document["peer"]).add(round_number, samples, document)
    about.pop("fixed", None)
    for recipe, entries in sizes.pop("fixed", {}).items():
        for name, one in entries.items():
            for recipes in sizes.values():
                if one.peaks and name in recipes.get(recipe, {}):
                    recipes[recipe][name].fixed = max(one.peaks.values())
    return sizes, about


def figures(entry, of):
    """{round: what is divided}"""
    if entry is None:
        return {}
    if of == "step":
        return entry.rounds()
    if of == "pss":
        return entry.peaks
    return {r: peak - entry.fixed for r, peak in entry.peaks.items() if peak > entry.fixed} if entry.fixed else {}


def divided(entries, rows):
    """{what: over_rounds() or None} of rows (what, name above, name below, kind of figure)."""
    found = {}
    for text, a, b, of in rows:
        a, b = entries.get(a), entries.get(b)
        if of == "turns":
            found[text] = ratio_of_turns(a, b)
        elif of == "parts":  # by the sum of b's step and a's collectives, each measured by itself
            below = figures(b, "step")
            found[text] = ratio_of(figures(a, "step"), {r: below[r] + a.alone[r] for r in below if a and r in a.alone})
        else:
            found[text] = ratio_of(figures(a, of), figures(b, of))
    return found


def ratios(entries):
    """The ratios of one recipe, in the order of the page."""
    rows = [("stage 3 / FSDP2", "zero3", "fsdp2", "step"), ("stage 3 / FSDP2, bf16 reduction", "zero3", "fsdp2bf16", "step"),
            ("stage 3 / DeepSpeed stage 3", "zero3", "ds3", "step"), ("stage 3 over TCP / FSDP2", "tcp3", "fsdp2", "step"),
            ("stage 3 over TCP / FSDP2, bf16 reduction", "tcp3", "fsdp2bf16", "step")]
    rows += [(f"stage {s} / DeepSpeed stage {s}", f"zero{s}", f"ds{s}", "step") for s in range(3)]
    rows += [(f"stage {s} / DDP", f"zero{s}", "ddp", "step") for s in range(4)]
    rows += [(f"stage {s} / DDP, bf16 parameters", f"zero{s}", "ddpbf16", "step") for s in range(4)]
    rows += [(f"stage {s} / (compute + AdamW share)", f"zero{s}", "floor", "step") for s in range(4)]
    # The lower bound set by computation: no ratio to a peer can be below this.
    rows += [(f"floor: (compute + AdamW share) / {text}", "floor", name, "step") for text, name in [
        ("DDP", "ddp"), ("DDP, bf16 parameters", "ddpbf16"), ("FSDP2", "fsdp2"), ("DeepSpeed stage 3", "ds3")]]
    rows += [("stage 3 / stage 0", "zero3", "zero0", "step"), ("all states in host memory / DeepSpeed's offload to CPU", "host3", "ds3cpu", "step"),
             ("all states in files / DeepSpeed's offload to NVMe", "file3", "ds3nvme", "step")]
    for note, of in ("", "pss"), (", less fixed", "pss beyond fixed"):
        rows += [(f"peak memory{note}, {text}", a, b, of) for text, a, b in [
            ("stage 3 / FSDP2", "zero3", "fsdp2"), ("stage 3 / DeepSpeed stage 3", "zero3", "ds3"), ("stage 0 / DDP", "zero0", "ddp"),
            ("stage 0 / DDP, bf16 parameters", "zero0", "ddpbf16"), ("stage 3 / stage 0", "zero3", "zero0"),
            ("in host memory / DeepSpeed's offload to CPU", "host3", "ds3cpu"), ("in files / DeepSpeed's offload to NVMe", "file3", "ds3nvme")]]
    return divided(entries, rows)


def python_ratios(entries):
    """The ratios of one recipe in the section of the Python package.

    libzero0 and libzero3 are the peers' model from Python, twin0 and twin3 the model of the C++ program (zero0, zero3).
    """

    def beside_cpp(what, peers, of):
        return [(f"{what}from {language}, {text}", name + stage, peer, of)
                for text, stage, peer in peers for language, name in (("Python", "libzero"), ("C++", "zero"))]

    fsdp2, deepspeed = ("stage 3 / FSDP2", "3", "fsdp2"), ("stage 3 / DeepSpeed stage 3", "3", "ds3")
    others = [("stage 3 / DDP", "3", "ddp"), ("stage 3 / DDP, bf16 parameters", "3", "ddpbf16")]
    rows = beside_cpp("", [fsdp2, ("stage 3 / FSDP2, bf16 reduction", "3", "fsdp2bf16"), deepspeed, *others], "step")
    for what, name in ("from Python / from C++", "twin"), ("the peers' model from Python / from C++", "libzero"):
        rows += [(f"{what}, stage {s}", f"{name}{s}", f"zero{s}", "step") for s in (0, 3)]
    rows += [(f"1 rank, from Python, stage {s} / plain PyTorch", f"alone{s}", "plain", "turns") for s in (0, 3)]
    for note, of in ("", "pss"), (", less fixed", "pss beyond fixed"):
        rows += beside_cpp(f"peak memory{note}, ", [fsdp2, deepspeed, ("stage 0 / DDP", "0", "ddp")], of)
    return divided(entries, rows)


def parallel_ratios(entries):
    """The ratios of one recipe in the section of tensor and sequence parallelism."""
    stages = (0, 3)
    rows = [(f"stage {s} / DTensor", f"tp{s}", "dtensor", "step") for s in stages]
    rows += [(f"stage {s} over TCP / DTensor", f"tptcp{s}", "dtensor", "step") for s in stages]
    rows += [(f"stage {s} / DeepSpeed AutoTP", f"tp{s}", "autotp", "step") for s in stages]
    rows += [(f"stage {s} over TCP / DeepSpeed AutoTP", f"tptcp{s}", "autotp", "step") for s in stages]
    rows += [("floor: (compute + AdamW share) / DTensor", "floor", "dtensor", "step"),
             ("floor: (compute + AdamW share) / DeepSpeed AutoTP", "floor", "autotp", "step")]
    rows += [(f"stage {s} / (compute + AdamW share + collectives alone)", f"tp{s}", "floor", "parts") for s in stages]
    rows += [("partitioned / whole activation checkpoints, stage 0", "parts0", "segments0", "step"),
             ("DeepSpeed's partitioned / whole activation checkpoints", "autotpparts", "autotpsegments", "step"),
             ("whole activation checkpoints, stage 0 / DeepSpeed's", "segments0", "autotpsegments", "step"),
             ("partitioned activation checkpoints, stage 0 / DeepSpeed's", "parts0", "autotpparts", "step")]
    rows += [(f"Ulysses, stage {s} / DeepSpeed's, stage {s}", f"sp{s}", f"ulysses{s}", "step") for s in stages]
    rows += [(f"floor: (compute + AdamW share) / DeepSpeed's Ulysses, stage {s}", "floor", f"ulysses{s}", "step") for s in stages]
    rows += [(f"Ulysses, stage {s} / (compute + AdamW share + collectives alone)", f"sp{s}", "floor", "parts") for s in stages]
    rows += [(f"peak memory, stage {s} / {label}", f"tp{s}", peer, "pss")
             for label, peer in (("DTensor", "dtensor"), ("DeepSpeed AutoTP", "autotp")) for s in stages]
    rows += [("peak memory, partitioned / whole activation checkpoints, stage 0", "parts0", "segments0", "pss"),
             ("peak memory, DeepSpeed's partitioned / whole activation checkpoints", "autotpparts", "autotpsegments", "pss"),
             ("peak memory, partitioned activation checkpoints, stage 0 / DeepSpeed's", "parts0", "autotpparts", "pss")]
    rows += [(f"peak memory, Ulysses, stage {s} / DeepSpeed's, stage {s}", f"sp{s}", f"ulysses{s}", "pss") for s in stages]
    return divided(entries, rows)


def optimizers(folder):
    """What was measured of the updates alone, or nothing."""
    files, results, elements = sorted(folder.glob("optimizer/round-*/*.json")), {}, None
    for path in files:
        document = json.loads(path.read_text())
        elements = document["elements"]
        for run in document["runs"]:
            one = results.setdefault((run["job"], run["threads"]), {}).setdefault(document.get("peer", "libzero"), {})
            one[path.parts[-2]] = run
    if not files:
        return None
    found = {"command": (folder / "optimizer" / "command").read_text().strip(), "date": str(datetime.date.today()), "elements": elements,
             "load_average": load_of(folder / "optimizer" / "load"), "results": []}
    for (job, threads), entries in sorted(results.items(), key=lambda item: (item[0][0] != "fp32", item[0][1])):
        row = {"job": job, "threads": threads}
        for who, runs in entries.items():
            times = [v for run in runs.values() for v in run["samples_s"]]
            medians = {r: statistics.median(run["samples_s"]) for r, run in runs.items()}
            row[who] = {"time_s": {"median": statistics.median(medians.values()), "min": min(times), "p99": quantile(times, 0.99)},
                        "updates": len(times), "round_medians_s": [medians[r] for r in sorted(medians)]}
            for part in ("cast_s", "unscale_s", "update_s", "publish_s"):
                if all(part in run for run in runs.values()):
                    row[who][part] = statistics.median(statistics.median(run[part]) for run in runs.values())
            if who == "libzero":
                row[who]["bytes_per_s"] = next(iter(runs.values()))["bytes_per_element"] * elements / row[who]["time_s"]["median"]
                row[who]["triad_bytes_per_s"] = statistics.median(run["triad_bytes_per_s"] for run in runs.values())
        medians = {who: {r: statistics.median(run["samples_s"]) for r, run in runs.items()} for who, runs in entries.items()}
        peers = [medians[who] for who in medians if who != "libzero"]
        fastest = {r: min(of[r] for of in peers if r in of) for r in set().union(*peers)}
        row["faster_peer_over_libzero"] = ratio_of(fastest, medians.get("libzero", {}))
        found["results"].append(row)
    return found


def attention(folder):
    """What was measured of Ulysses' attention alone, or nothing: seconds of forward and backward, by recipe, tokens and file."""
    medians, about = {}, None
    for path in sorted(folder.glob("attention/round-*/*.json")):
        about = json.loads(path.read_text())
        for run in about["runs"]:
            both = [a + b for a, b in zip(run["samples"]["forward_s"], run["samples"]["backward_s"])]
            of_length = medians.setdefault((about["recipe"], run["sequence_tokens"]), {})
            of_length.setdefault(path.name.split("-")[0], {})[path.parts[-2]] = statistics.median(both)
    if not medians:
        return None
    found = {key: about[key] for key in ("world", "heads", "width", "steps", "warmup")}
    found |= {"command": (folder / "attention" / "command").read_text().strip(), "date": str(datetime.date.today()),
              "load_average": load_of(folder / "attention" / "load"), "results": []}
    for (recipe, tokens), whos in sorted(medians.items()):
        row = {"recipe": recipe, "sequence_tokens": tokens, **{who: over_rounds(list(rounds.values())) for who, rounds in whos.items()}}
        for name, a, b in (("shm_over_deepspeed", "shm", "deepspeed"), ("gloo_over_deepspeed", "gloo", "deepspeed"),
                           ("shm_over_local", "shm", "local"), ("local_over_deepspeed", "local", "deepspeed")):
            row[name] = ratio_of(whos.get(a, {}), whos.get(b, {}))
        found["results"].append(row)
    return found


def experts(folder):
    """What was measured of layers of experts, or nothing: seconds a step, by model, recipe, stage and ranks of the experts."""
    medians, sent, about, versions = {}, {}, None, {}

    def add(case, recipe, stage, ep, who, path, samples):
        if samples:
            of_case = medians.setdefault((int(case), recipe, stage, ep), {})
            of_case.setdefault(who, {})[path.parts[-2]] = statistics.median(samples)

    for path in sorted(folder.glob("round-*/*.json")):
        document, (case, who, recipe) = json.loads(path.read_text()), path.name.split("-")[:3]
        if who == "deepspeed":
            versions, task = document["versions"], document["task"]
            add(case, recipe, task["stage"], task["ep"], who, path, document["samples"]["step_s"])
            continue
        about = document
        for run in document["runs"]:
            sent[int(case), recipe, run["stage"], run["ep"]] = run
            add(case, recipe, run["stage"], run["ep"], who, path, run["samples"]["step_s"])
            if who in ("shm", "merged"):  # of batches as this run has them
                add(case, recipe, run["stage"], run["ep"], f"floor_{who}", path, run["samples"].get("floor_s"))
    if not about:
        return None
    cases = [line.split(":")[0] for line in (folder / "cases").read_text().splitlines()]
    found = {"machine": about["machine"], "versions": versions, "steps": about["model"]["steps"], "warmup": about["model"]["warmup"],
             "command": (folder / "command").read_text().strip(), "date": str(datetime.date.today()),
             "load_average": load_of(folder / "load"), "cases": cases, "results": []}
    for (case, recipe, stage, ep), whos in sorted(medians.items()):
        run = sent.get((case, recipe, stage, ep), {})
        # DeepSpeed has no stage 3 with experts: its stage 2 is compared with ours.
        peer = whos.get("deepspeed") or (medians.get((case, recipe, 2, ep), {}).get("deepspeed", {}) if stage == 3 else {})
        row = {"case": case, "recipe": recipe, "stage": stage, "ep": ep, "deepspeed": over_rounds(list(peer.values()))}
        row |= {who: over_rounds(list(whos[who].values())) for who in ("shm", "merged", "gloo") if who in whos}
        row |= {f"{who}_over_deepspeed": ratio_of(whos.get(who, {}), peer) for who in ("shm", "merged", "gloo", "floor_shm", "floor_merged")}
        row |= {f"{who}_over_floor": ratio_of(whos.get(who, {}), whos.get(f"floor_{who}", {})) for who in ("shm", "merged")}
        row |= {name: run[name] for name in ("exchanged_bytes_per_step", "formula_bytes_per_step", "dropped", "load") if name in run}
        found["results"].append(row)
    return found


def models(folder):
    """What was measured of transformers' models, or nothing: seconds a step by model, tokens and who, and ratios to the peers."""
    medians, about, versions, machine, failures = {}, {}, {}, None, {}
    for path in sorted(folder.glob("round-*/*.json")):
        document, (name, sequence, batch, who) = json.loads(path.read_text()), path.stem.rsplit("-", 3)
        case = (name, int(sequence), int(batch))
        if who != "libzero":
            if "error" in document:
                failures.setdefault(case, {})[who] = document["error"]
                continue
            versions |= document["versions"]
            medians.setdefault(case, {}).setdefault(who, {})[path.parts[-2]] = statistics.median(document["samples"]["step_s"])
            continue
        machine, about[case] = document["machine"], document
        for run in document["runs"]:
            medians.setdefault(case, {}).setdefault(f"zero{run['stage']}", {})[path.parts[-2]] = statistics.median(run["samples"]["step_s"])
    if not machine:
        return None
    found = {"machine": machine, "versions": versions, "command": (folder / "command").read_text().strip(),
             "date": str(datetime.date.today()), "load_average": load_of(folder / "load"), "results": []}
    for case, whos in sorted(medians.items()):
        own = about[case]
        row = dict(zip(("model", "sequence_tokens", "micro_batch_size"), case), world=own["world"], steps=own["steps"], warmup=own["warmup"],
                   parameters_elements=own["model"]["parameters_elements"], failures=failures.get(case, {}),
                   seconds={who: over_rounds(list(rounds.values())) for who, rounds in whos.items()}, ratios={})
        for who in whos:
            if not who.startswith("zero"):
                row["ratios"][who] = ratio_of(whos.get("zero3", {}), whos[who])
        found["results"].append(row)
    return found


def checkpoints(folder):
    """What was measured of saves and loads, or nothing: seconds and bytes, by who saves and how, and ratios to the peers."""
    rows, about, versions = {}, None, {}

    def add(name, path, document):
        rows.setdefault(name, {})[path.parts[-2]] = document

    for path in sorted(folder.glob("round-*/*.json")):
        document = json.loads(path.read_text())
        if path.stem != "libzero":
            versions |= document["versions"]
            add(path.stem, path, document)
            continue
        about = document
        for one in document["measurements"]:
            add(f"{one['what']} {one['world']}" if one["what"] == "load" else one["what"], path, one["rounds"][0])
    if not about:
        return None
    found = {"machine": about["machine"], "task": about["task"], "versions": versions,
             "command": (folder / "command").read_text().strip(), "date": str(datetime.date.today()), "load_average": load_of(folder / "load"),
             "results": {}, "ratios": {}}

    def of(name, field):
        return {rnd: one[field] for rnd, one in rows.get(name, {}).items() if field in one}

    for one in (one for rounds in rows.values() for one in rounds.values() if "convert_s" in one):
        one["convert_and_load_s"] = one["convert_s"] + one["load_converted_s"]
    for name, rounds in rows.items():
        own = found["results"][name] = {}
        for field in ("call_s", "stall_s", "durable_s", "load_s", "write_s", "read_s", "bytes", "convert_s", "load_converted_s"):
            if of(name, field):
                own[field] = over_rounds(list(of(name, field).values()))
        if "peak_bytes" in next(iter(rounds.values())):
            own["peak_bytes"] = max(max(one["peak_bytes"]) for one in rounds.values())
        if "read_bytes" in next(iter(rounds.values())):
            own["read_over_needed"] = max(read / needed for one in rounds.values() for read, needed in zip(one["read_bytes"], one["needed_bytes"]))
    world = 2
    for name, a, b in (("save / dcp.save", ("save", "durable_s"), ("dcp", "durable_s")),
                       ("save / torch.save and fsync", ("save", "durable_s"), ("torch", "durable_s")),
                       ("save / DeepSpeed stage 2", ("save", "durable_s"), ("ds2", "durable_s")),
                       ("stall in the background / dcp.async_save's", ("background", "stall_s"), ("dcp_async", "stall_s")),
                       ("call in the background / dcp.async_save's", ("background", "call_s"), ("dcp_async", "call_s")),
                       ("stall in the background / save", ("background", "stall_s"), ("save", "durable_s")),
                       ("load / dcp.load", (f"load {world}", "load_s"), ("dcp", "load_s")),
                       ("load / DeepSpeed stage 2", (f"load {world}", "load_s"), ("ds2", "load_s")),
                       ("save / the disk alone", ("save", "durable_s"), ("disk", "write_s")),
                       ("load / the disk alone", (f"load {world}", "load_s"), ("disk", "read_s")),
                       *((f"load on 1 rank / DeepSpeed stage {stage}'s conversion and load", ("load 1", "load_s"), (f"ds{stage}", "convert_and_load_s"))
                         for stage in (2, 3)),
                       ("load on 8 ranks / on 2", ("load 8", "load_s"), ("load 2", "load_s")),
                       ("load on 1 rank / on 2", ("load 1", "load_s"), ("load 2", "load_s"))):
        found["ratios"][name] = ratio_of(of(*a), of(*b))
    return found


def collectives(folder):
    """What was measured of the collectives alone, as `zero bench collectives` says it, or nothing."""
    file = folder / "collectives" / "result.json"
    if not file.exists():
        return None
    return dict(json.loads(file.read_text()), command=(folder / "collectives" / "command").read_text().strip(),
                date=str(datetime.date.today()), load_average=float((folder / "collectives" / "load").read_text()))


def load_of(file):
    """The machine's load average before each measurement."""
    average = [float(line) for line in file.read_text().split()]
    return {"median": statistics.median(average), "least": min(average), "most": max(average)}


def sections(folder, ratios_of):
    """{size: its section}, of the sizes that `zero bench step` has measured."""
    found = {}
    sizes, about = load(folder)
    for size, recipes in sizes.items():
        if "machine" not in about[size]:
            continue
        command = (folder / "command").read_text().strip()
        found[size] = dict(about[size], date=str(datetime.date.today()), command=command, recipes={
            recipe: {"ratios": {text: r for text, r in ratios_of(entries).items() if r},
                     "results": {name: entries[name].document() for name in ORDER if name in entries}}
            for recipe, entries in sorted(recipes.items())})
        if (folder / size / "load").exists():
            found[size]["load_average"] = load_of(folder / size / "load")
    return found


def summary(folder, kept=None):
    """The whole document. `kept`: that of an earlier page, whose sections stay where nothing was measured again."""
    found = {"schema": "zero.compare/2", "sizes": sections(folder, ratios),
             "python": sections(folder / "python", python_ratios),
             "parallel": sections(folder / "parallel", parallel_ratios)}
    layers = experts(folder / "experts")
    saves, named = checkpoints(folder / "checkpoints"), models(folder / "models")
    apart = found["python"] or found["parallel"] or layers or saves or named
    if not found["sizes"] and not (kept and apart):
        raise SystemExit(f"results.py: error: got no result of `zero bench step` under {folder}"
                         + (". Hint: --keep, with the folder of an earlier page" if apart else ""))
    found["optimizers"], found["collectives"] = optimizers(folder), collectives(folder)
    alone = attention(folder / "parallel") or (kept or {}).get("attention")
    if alone:
        found["attention"] = alone
    layers = layers or (kept or {}).get("experts")
    if layers:
        found["experts"] = layers
    named = named or (kept or {}).get("models")
    if named:
        found["models"] = named
    saves = saves or (kept or {}).get("checkpoints")
    if saves:
        found["checkpoints"] = saves
    if kept:
        clippings = {one["gradient_clipping"] for one in found["sizes"].values()}
        for size, one in kept["sizes"].items():
            if not clippings or one["gradient_clipping"] in clippings:  # do not mix figures of different recipes
                found["sizes"].setdefault(size, one)
        for part in ("python", "parallel"):
            for size, one in kept.get(part, {}).items():
                found[part].setdefault(size, one)
        for part in ("optimizers", "collectives"):
            found[part] = found[part] or kept[part]
    return found
