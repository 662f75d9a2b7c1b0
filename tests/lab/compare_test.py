"""script/compare with stand-ins for `zero` and torchrun: which measurements it makes, in which order, and what happens when it is stopped."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
STAND_IN = r'''#!/usr/bin/env python3
import json, os, pathlib, sys, time
words = sys.argv[1:]
if words[0] == "-c":  # whether libzero can be imported
    sys.exit("import" not in words[1])
value = lambda name: words[words.index(name) + 1]
if "lab/peers/attention.py" in words:
    who, recipe = words[words.index("lab/peers/attention.py") + 1:][:2]
    name = os.environ["ZERO_TRANSPORT"] if who == "libzero" else who
    with open(os.environ["STAND_IN_LOG"], "a") as file:
        file.write(f"attention {name} {recipe} steps {value('--steps')}\n")
    half = [{"shm": 0.3, "gloo": 0.5, "deepspeed": 0.5, "local": 0.2}[name]] * int(value("--steps"))
    pathlib.Path(value("--out")).write_text(json.dumps({
        "schema": "zero.bench.attention/1", "who": who, "recipe": recipe, "world": 2, "heads": 8, "width": 64, "steps": 5, "warmup": 1,
        "runs": [{"sequence_tokens": int(n), "samples": {"forward_s": half, "backward_s": half}} for n in value("--sequences").split(",")]}))
    sys.exit()
if "experts" in words or "lab/peers/experts.py" in words:
    own = "experts" in words
    recipe = value("--recipes") if own else words[words.index("lab/peers/experts.py") + 1]
    stages, eps = (value("--stages"), value("--ep")) if own else (value("--stage"), value("--ep"))
    name = ("merged" if "--merged-batches" in words else value("--transport")) if own else "deepspeed"
    inner = " inner " + value("--inner") if "--inner" in words else ""
    with open(os.environ["STAND_IN_LOG"], "a") as file:
        file.write(f"experts {name} {recipe} stages {stages} ep {eps} hidden {value('--hidden')}{inner} steps {value('--steps')}\n")
    if f"{name} {value('--hidden')}" == os.environ.get("STAND_IN_FAILS"):
        sys.exit("Error: stand-in fails")
    samples = {"step_s": [{"shm": 0.1, "merged": 0.05, "gloo": 0.2, "deepspeed": 0.4}[name]] * int(value("--steps"))}
    if own:
        samples["floor_s"] = [] if inner == " inner 0" else [0.025] * 3
        print(json.dumps({"schema": "zero.bench.experts/1", "model": {"steps": 10, "warmup": 3}, "runs": [
            {"recipe": recipe, "stage": int(stage), "ep": int(ep), "samples": samples, "exchanged_bytes_per_step": 2**20,
             "formula_bytes_per_step": 2**20, "dropped": 0.25, "load": 1.5} for stage in stages.split(",") for ep in eps.split(",")],
            "machine": {"processor": "stand-in", "cores": 2, "system": "none", "libzero": "0", "threads_per_rank": 1}}))
    else:
        pathlib.Path(value("--out")).write_text(json.dumps({
            "recipe": recipe, "versions": {"deepspeed": "0"}, "task": {"stage": int(stages), "ep": int(eps)}, "samples": samples}))
    sys.exit()
if "checkpoint" in words or "lab/peers/checkpoints.py" in words:
    own = "checkpoint" in words
    name = "libzero" if own else words[words.index("lab/peers/checkpoints.py") + 1]
    with open(os.environ["STAND_IN_LOG"], "a") as file:
        file.write(f"checkpoints {name} layers {value('--layers')} steps {value('--steps')}\n")
    save = lambda seconds, **more: {"without_s": 1, "call_s": seconds, "stall_s": seconds, "durable_s": seconds, "bytes": 10**9,
                                    "peak_bytes": [2**20, 2**21], **more}
    load = lambda seconds: {"load_s": seconds, "read_bytes": [110, 100], "needed_bytes": [100, 100], "peak_bytes": [2**20, 2**20]}
    if own:
        print(json.dumps({"schema": "zero.bench.checkpoint/1", "task": {
            "threads": 1, "layers": 12, "hidden": 768, "stage": 2, "steps": 6}, "measurements": [
                {"what": "background", "world": 2, "rounds": [save(0.1)]}, {"what": "save", "world": 2, "rounds": [save(1.0)]},
                {"what": "disk", "world": 2, "rounds": [{"write_s": 0.5, "read_s": 0.25, "bytes": 10**9}]},
                {"what": "load", "world": 1, "rounds": [load(0.5)]}, {"what": "load", "world": 2, "rounds": [load(0.25)]},
                {"what": "load", "world": 8, "rounds": [load(0.25)]}],
            "machine": {"processor": "stand-in", "cores": 2, "system": "none", "libzero": "0"}}))
    else:
        converted = {"convert_s": 3.0, "load_converted_s": 1.0} if name.startswith("ds") else {}
        pathlib.Path(value("--out")).write_text(json.dumps(save({"dcp": 4.0, "dcp_async": 0.5}.get(name, 2.0), load_s=0.5, versions={"torch": "0"}, **converted)))
    sys.exit()
if words[0] == "models":
    print(json.dumps({"model_type": words[1]}))
    sys.exit()
is_peer = "--out" in words
if is_peer:
    at = next(i for i, word in enumerate(words) if word.endswith("peer.py"))
    what = f"{words[at + 1]} {words[at + 2]}"
else:
    what = f"{value('--transport')} {value('--recipes')} stages {value('--stages')}"
    what += "".join(f" {word[2:]} {value(word)}" for word in ("--tensor-parallel", "--sequence-parallel", "--segments") if word in words)
    what += "".join(f" {word}" for word in words if word.startswith("activation_checkpointing."))
model = "--model" in words and value("--model") or "--config" in words and json.loads(pathlib.Path(value("--config")).read_text())["model_type"]
sizes = ("sequence", "batch") if model else ("layers", "hidden", "heads", "vocabulary", "sequence", "batch")
shape = (model + " " if model else "") + "x".join(value("--" + name) for name in sizes)
log = pathlib.Path(os.environ["STAND_IN_LOG"])
with log.open("a") as file:
    file.write(f"{shape} {what} steps {value('--steps')}\n")
if os.environ.get("STAND_IN_WAITS") == f"{shape} {what}":
    while not pathlib.Path(os.environ["STAND_IN_LOG"] + ".go").exists():
        time.sleep(0.01)
if is_peer and words[at + 1] == os.environ.get("STAND_IN_FAILS"):
    sys.exit("Error: stand-in fails")
steps = [0.5 if not is_peer else 1.0] * int(value("--steps"))
samples = {"step_s": steps, "forward_s": steps, "backward_s": steps}
common = {"world": 2, "steps": int(value("--steps")), "warmup": int(value("--warmup")), "gradient_clipping": 1.0}
if is_peer:
    document = dict(common, schema="zero.bench.peer/1", peer=words[at + 1], recipe=words[at + 2], versions={"torch": "0"},
                    torch_commit="0", samples=dict(samples, optimizer_s=steps), peak_pss_bytes={"highest": 10},
                    first_loss=2, last_loss=1)
    if words[at + 1] == "alone":
        document["runs"] = [dict(document, peer=peer) for peer in ("plain", "libzero0", "libzero3")]
    pathlib.Path(value("--out")).write_text(json.dumps(document))
else:
    run = {"recipe": value("--recipes"), "samples": dict(samples, optimizer_s=steps), "peak_pss_bytes": {"highest": 5},
           "bytes_sent_per_step": 1, "first_loss": 2, "last_loss": 1}
    if "--tensor-parallel" in words or "--sequence-parallel" in words:
        run |= {"bytes_by_axis": {"zero": 0, "tensor_parallel": 1, "sequence_parallel": 0}, "collectives_alone_s": 0.25}
    floor = {"recipe": value("--recipes"), "samples": dict(samples, adamw_s=steps)}
    print(json.dumps(dict(common, schema="zero.bench.step/1", micro_batch_size=int(value("--batch")),
                          machine={"processor": "CPU", "cores": 2, "memory_bytes": 2**34, "system": "Linux", "libzero": "0", "libtorch": "0", "threads_per_rank": 1},
                          model={"layers": 1, "hidden": 1, "heads": 1, "vocabulary": 1, "sequence_tokens": 1, "parameters_elements": 1000000},
                          runs=[dict(run, stage=int(stage)) for stage in value("--stages").split(",")],
                          compute=[] if "--no-compute" in words else [floor])))
'''


class CompareTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in ("build/bin/zero", "venv/bin/torchrun", "venv/bin/python"):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(STAND_IN)
            path.chmod(0o755)
        self.log = self.folder / "log"
        self.into = self.folder / "run"
        self.into.mkdir()
        (self.into / "command").write_text("")  # as if begun earlier: the folder's name is known then

    def start(self, *words, **environment):
        environment = dict(os.environ, BUILD_DIR=str(self.folder / "build"), ZERO_PEERS_VENV=str(self.folder / "venv"), STAND_IN_LOG=str(self.log),
                           **environment)
        return subprocess.Popen([SOURCE / "script" / "compare", *words], env=environment, cwd=self.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def compare(self, *words, **environment):
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=100)
        return process.returncode, out + err

    OPTIONS = ("--only-size", "2x4x2x8x4x1", "--size", "3x4x2x8x4x1:rounds=1,steps=7,recipes=bf16,stages=03", "--rounds", "3", "--steps", "5", "--warmup", "1",
               "--peers", "ddp,ddpbf16", "--optimizer", "0", "--collectives", "0", "--results", "results", "--into", "run")

    def calls(self):
        return [line for line in self.log.read_text().splitlines() if not line.startswith("1x32")]  # less those for fixed memory

    def test_one_command_measures_everything_in_turns(self):
        code, said = self.compare(*self.OPTIONS)
        self.assertEqual(code, 0, said)
        fp32 = ["shm fp32 stages 0,1,2,3 steps 5", "ddp fp32 steps 5", "gloo fp32 stages 0,3 steps 5"]
        bf16 = ["shm bf16 stages 0,1,2,3 steps 5", "ddp bf16 steps 5", "ddpbf16 bf16 steps 5", "gloo bf16 stages 0,3 steps 5"]
        own = ["shm bf16 stages 0,3 steps 7", "ddp bf16 steps 7", "ddpbf16 bf16 steps 7", "gloo bf16 stages 3 steps 7"]
        first = [f"2x4x2x8x4x1 {one}" for one in fp32 + bf16]
        self.assertEqual(self.calls(), first + [f"3x4x2x8x4x1 {one}" for one in own] + first[::-1] + first)
        found = json.loads((self.folder / "results" / "performance.json").read_text())["sizes"]
        self.assertEqual(found["2x4x2x8x4x1"]["recipes"]["bf16"]["ratios"]["stage 3 / DDP, bf16 parameters"],
                         {"median": 0.5, "least_round": 0.5, "most_round": 0.5, "rounds": 3})
        self.assertEqual(found["3x4x2x8x4x1"]["recipes"]["bf16"]["ratios"]["stage 3 / DDP"]["rounds"], 1)
        self.assertIn("; 1) *", (self.folder / "results" / "performance.md").read_text())

    def test_a_run_cut_short_continues_where_it_was(self):
        process = self.start(*self.OPTIONS, STAND_IN_WAITS="2x4x2x8x4x1 ddp bf16")
        limit = time.time() + 60
        while not (self.log.exists() and "2x4x2x8x4x1 ddp bf16" in self.log.read_text()):
            self.assertLess(time.time(), limit)
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        pathlib.Path(f"{self.log}.go").touch()
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, out + err)
        self.assertIn("--resume", err)
        before = self.calls()
        self.assertEqual(before[-1], "2x4x2x8x4x1 ddp bf16 steps 5")  # measured to its end, and kept
        code, said = self.compare("--resume", "run")
        self.assertEqual(code, 0, said)
        whole = self.calls()
        self.assertEqual(whole[:len(before)], before)
        self.assertEqual(len(whole), 3 * 7 + 4)  # nothing twice, nothing left out
        found = json.loads((self.folder / "results" / "performance.json").read_text())["sizes"]["2x4x2x8x4x1"]["recipes"]["bf16"]
        self.assertEqual((found["ratios"]["stage 3 / DDP"]["rounds"], found["results"]["ddp"]["failed_rounds"]), (3, 0))

    def test_a_failing_peer_is_said_and_the_others_continue(self):
        code, said = self.compare(*self.OPTIONS, STAND_IN_FAILS="ddpbf16")
        self.assertEqual(code, 1, said)
        self.assertIn("DDP, bf16 parameters failed in 3 of 3 rounds: `Error: stand-in fails`", (self.folder / "results" / "performance.md").read_text())

    def test_the_python_package_is_measured_with_peers_and_the_page_keeps_the_rest(self):
        (self.folder / "results").mkdir()
        shutil.copy(SOURCE / "lab" / "results" / "performance.json", self.folder / "results")
        before = json.loads((self.folder / "results" / "performance.json").read_text())
        code, said = self.compare("--python", "--only-size", "2x4x2x8x4x1", "--rounds", "2", "--peers", "ddp,ds3",
                                  "--recipes", "fp32", "--results", "results", "--into", "run")
        self.assertEqual(code, 0, said)
        first = [f"2x4x2x8x4x1 {one} steps 10" for one in (
            "shm fp32 stages 0,3", "ddp fp32", "ds3 fp32", "libzero0 fp32", "libzero3 fp32", "twin0 fp32", "twin3 fp32",
            "alone fp32")]
        self.assertEqual(self.calls(), first + first[::-1])
        found = json.loads((self.folder / "results" / "performance.json").read_text())
        of = found["python"].pop("2x4x2x8x4x1")["recipes"]["fp32"]["ratios"]
        equal = ("from Python, stage 3 / DDP", "1 rank, from Python, stage 3 / plain PyTorch")
        self.assertEqual([of[text]["median"] for text in equal], [1.0, 1.0])
        self.assertEqual(of["from Python / from C++, stage 3"],
                         {"median": 2.0, "least_round": 2.0, "most_round": 2.0, "rounds": 2})
        self.assertEqual(found, {"python": {}, **before})

    def test_tensor_and_sequence_parallelism_is_measured_with_peers_and_the_page_keeps_the_rest(self):
        (self.folder / "results").mkdir()
        shutil.copy(SOURCE / "lab" / "results" / "performance.json", self.folder / "results")
        before = json.loads((self.folder / "results" / "performance.json").read_text())
        code, said = self.compare("--parallel", "--only-size", "2x4x2x8x4x1", "--size", "2x4x2x8x16x1:rounds=1,steps=3,axis=sp",
                                  "--rounds", "2", "--recipes", "fp32", "--attention", "2", "--results", "results", "--into", "run")
        self.assertEqual(code, 0, said)
        tensor = [f"2x4x2x8x4x1 {one} steps 5" for one in (
            "shm fp32 stages 0,3 tensor-parallel 2", "dtensor fp32", "autotp fp32", "autotpsegments fp32", "autotpparts fp32",
            "gloo fp32 stages 0,3 tensor-parallel 2",
            "shm fp32 stages 0 tensor-parallel 2 segments 2",
            "shm fp32 stages 0 tensor-parallel 2 segments 2 activation_checkpointing.partition_activations=true")]
        sequence = [f"2x4x2x8x16x1 {one} steps 3" for one in (
            "shm fp32 stages 0,3 sequence-parallel 2", "ulysses0 fp32", "ulysses3 fp32")]
        attention = [f"attention {name} fp32 steps 5" for name in ("local", "shm", "deepspeed", "gloo")]
        self.assertEqual(self.calls(), tensor + sequence + tensor[::-1] + attention + attention[::-1])
        found = json.loads((self.folder / "results" / "performance.json").read_text())
        parallel, alone = found.pop("parallel"), found.pop("attention")
        self.assertEqual([row["sequence_tokens"] for row in alone["results"]], [1024, 2048, 4096, 8192])
        self.assertEqual({name: round(one["median"], 9) for name, one in alone["results"][0].items() if name.count("over")}, {
            "shm_over_deepspeed": 0.6, "gloo_over_deepspeed": 1.0, "shm_over_local": 1.5, "local_over_deepspeed": 0.4})
        self.assertRegex((self.folder / "results" / "performance.md").read_text(), r"\| fp32 \| +1024 \| +600\.0 \| +1000\.0 \| +1000\.0 \| +400\.0 \| 0\.60")
        before.pop("parallel", None)
        before.pop("attention", None)
        self.assertEqual(found, before)
        of = parallel["2x4x2x8x4x1"]["recipes"]["fp32"]["ratios"]
        self.assertEqual({text: one["median"] for text, one in of.items() if "memory" not in text}, {
            "stage 0 / DTensor": 0.5, "stage 3 / DTensor": 0.5, "stage 0 over TCP / DTensor": 0.5, "stage 3 over TCP / DTensor": 0.5,
            "stage 0 / DeepSpeed AutoTP": 0.5, "stage 3 / DeepSpeed AutoTP": 0.5, "stage 0 over TCP / DeepSpeed AutoTP": 0.5,
            "stage 3 over TCP / DeepSpeed AutoTP": 0.5, "floor: (compute + AdamW share) / DTensor": 1.0,
            "floor: (compute + AdamW share) / DeepSpeed AutoTP": 1.0,
            "stage 0 / (compute + AdamW share + collectives alone)": 0.4, "stage 3 / (compute + AdamW share + collectives alone)": 0.4,
            "partitioned / whole activation checkpoints, stage 0": 1.0, "DeepSpeed's partitioned / whole activation checkpoints": 1.0,
            "whole activation checkpoints, stage 0 / DeepSpeed's": 0.5, "partitioned activation checkpoints, stage 0 / DeepSpeed's": 0.5})
        self.assertEqual(parallel["2x4x2x8x16x1"]["recipes"]["fp32"]["ratios"]["Ulysses, stage 3 / DeepSpeed's, stage 3"]["median"], 0.5)

    def test_checkpoints(self):
        self.compare("--only-size", "2x4x2x8x4x1", "--rounds", "1", "--recipes", "fp32", "--peers", "ddp", "--optimizer", "0",
                     "--collectives", "0", "--results", "results", "--into", "run")
        before = json.loads((self.folder / "results" / "performance.json").read_text())
        code, said = self.compare("--checkpoints", "2", "--results", "results", "--into", "run")
        self.assertEqual(code, 0, said)
        calls = [line for line in self.calls() if line.startswith("checkpoints")]
        self.assertEqual(calls[:6], [f"checkpoints {name} layers 12 steps 6" for name in ("libzero", "dcp", "dcp_async", "torch", "ds2", "ds3")])
        self.assertEqual(calls[6:], calls[5::-1])
        found = json.loads((self.folder / "results" / "performance.json").read_text())
        checkpoints = found.pop("checkpoints")
        self.assertEqual(found, before)
        ratios = {name: one["median"] for name, one in checkpoints["ratios"].items()}
        self.assertEqual((ratios["save / dcp.save"], ratios["stall in the background / dcp.async_save's"], ratios["load / dcp.load"],
                          ratios["load on 1 rank / on 2"], ratios["save / the disk alone"], ratios["load / the disk alone"],
                          ratios["load on 1 rank / DeepSpeed stage 3's conversion and load"]),
                         (0.25, 0.2, 0.5, 2, 2, 1, 0.125))
        self.assertEqual(checkpoints["results"]["load 2"]["read_over_needed"], 1.1)
        page = (self.folder / "results" / "performance.md").read_text()
        self.assertRegex(page, r"\| save / dcp.save +\| 0\.25 \(0\.25-0\.25; 2\) \* \| +at most 0\.5: reached")
        self.assertRegex(page, r"\| load on 1 rank / on 2 +\| 2\.00 \(2\.00-2\.00; 2\) \* \| +at most 1\.2: \*\*missed\*\*")

    def test_experts(self):
        self.compare("--only-size", "2x4x2x8x4x1", "--rounds", "1", "--recipes", "fp32", "--peers", "ddp", "--optimizer", "0",
                     "--collectives", "0", "--results", "results", "--into", "run")
        before = json.loads((self.folder / "results" / "performance.json").read_text())
        code, said = self.compare("--experts", "2", "--recipes", "fp32", "--results", "results", "--into", "run")
        self.assertEqual(code, 0, said)
        calls = [line for line in self.calls() if line.startswith("experts")]
        first = calls[:len(calls) // 2]
        self.assertEqual(calls[len(calls) // 2:], first[::-1])
        self.assertEqual(first[:5], [f"experts {one} hidden 256{inner} steps 8" for one, inner in (
            ("shm fp32 stages 1,2,3 ep 2", ""), ("merged fp32 stages 1,2,3 ep 2", ""), ("gloo fp32 stages 1,2,3 ep 2", ""),
            ("deepspeed fp32 stages 1 ep 2", " inner 1024"), ("deepspeed fp32 stages 2 ep 2", " inner 1024"))])
        # The gate and the exchange alone: one rank, identities, nothing over TCP.
        self.assertEqual(first[-2:], [f"experts {name} fp32 stages 2 ep 1 hidden 512 inner 0 steps 8" for name in ("shm", "deepspeed")])
        found = json.loads((self.folder / "results" / "performance.json").read_text())
        experts = found.pop("experts")
        self.assertEqual(found, before)
        row = next(row for row in experts["results"] if (row["case"], row["stage"], row["ep"]) == (0, 3, 2))
        self.assertEqual((row["shm_over_deepspeed"]["median"], row["gloo_over_deepspeed"]["median"], row["shm_over_deepspeed"]["rounds"]),
                         (0.25, 0.5, 2))
        page = (self.folder / "results" / "performance.md").read_text()
        self.assertIn("### Hidden 512, 64 experts, k 1, 4096 tokens a rank, gate and exchange alone\n\nTarget: at most 0.3 of DeepSpeed's step. Reached.", page)
        self.assertRegex(page, r"\| fp32, stage 3, ep 2 \| +100\.0 \| +50\.0 \| +200\.0 \| +400\.0 \| 0\.25 \(0\.25-0\.25; 2\)")
        self.assertEqual((row["merged_over_deepspeed"]["median"], row["shm_over_floor"]["median"], row["floor_shm_over_deepspeed"]["median"]),
                         (0.125, 4, 0.0625))

    def test_models(self):
        self.compare("--only-size", "2x4x2x8x4x1", "--rounds", "1", "--recipes", "fp32", "--peers", "ddp", "--optimizer", "0",
                     "--collectives", "0", "--results", "results", "--into", "run")
        before = json.loads((self.folder / "results" / "performance.json").read_text())
        code, said = self.compare("--models", "2", "--results", "results", "--into", "run", STAND_IN_FAILS="ddpbf16")
        self.assertEqual(code, 1, said)  # a peer failed
        calls = [line for line in self.calls() if line.startswith(("gpt2", "llama"))]
        first = calls[:len(calls) // 2]
        self.assertEqual(calls[len(calls) // 2:], first[::-1])
        self.assertEqual(first[:5], ["gpt2 256x1 shm bf16 stages 0,3 steps 3", *(f"gpt2 256x1 {peer} bf16 steps 3" for peer in
                                                                                ("ddpbf16", "fsdp2", "fsdp2bf16", "ds3"))])
        self.assertEqual(len(first), 4 * 5)
        found = json.loads((self.folder / "results" / "performance.json").read_text())
        models = found.pop("models")
        self.assertEqual(found, before)
        row = next(row for row in models["results"] if row["model"] == "llama-110m" and row["micro_batch_size"] == 4)
        self.assertEqual((row["ratios"]["ds3"]["median"], row["ratios"]["ds3"]["rounds"], row["seconds"]["zero3"]["median"]), (0.5, 2, 0.5))
        page = (self.folder / "results" / "performance.md").read_text()
        self.assertIn("## Models of Hugging Face", page)
        self.assertRegex(page, r"\| llama-110m, 4 x 256 tokens \| +500\.0 \| +500\.0 \|")
        self.assertIn("Reached.", page.split("## Models of Hugging Face")[1])
        self.assertIn("DDP, bf16 parameters failed", page)

    def test_all_programs_clip_at_the_same_norm(self):
        peer = re.search(r"^CLIPPING = (\S+)", (SOURCE / "lab/peers/peer.py").read_text(), re.M)
        own = re.search(r"kClipping = ([0-9.]+);", (SOURCE / "lab/bench/step_rank.cpp").read_text())
        self.assertEqual((peer[1], own[1]), ("1.0", "1.0"))


if __name__ == "__main__":
    unittest.main()
