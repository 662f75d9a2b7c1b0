"""The page of script/compare from hand-made rounds: how rounds become figures, what is marked, what is said of failures."""

import json
import pathlib
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
RESULTS = SOURCE / "lab" / "results"
sys.path.insert(0, str(SOURCE / "lab" / "peers"))
import report
import results

MACHINE = {"processor": "CPU", "cores": 2, "memory_bytes": 2**34, "system": "Linux", "libzero": "0", "libtorch": "2.11.0", "threads_per_rank": 1}
SMALL, LARGE = report.SMALL, report.LARGE


def samples(step):
    return {"step_s": step, "forward_s": [s / 4 for s in step], "backward_s": [s / 2 for s in step], "optimizer_s": [s / 4 for s in step]}


class Run:
    """A folder as script/compare leaves it."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        (self.folder / "command").write_text("script/compare --some\n")

    def write(self, size, round_number, name, document):
        path = self.folder / size / f"round-{round_number}"
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.json").write_text(json.dumps(document))

    def libzero(self, size, round_number, steps, recipe="fp32", transport="shm", clipping=1.0, peak=100, stage=3, alone=None):
        batch = int(size.split("x")[-1])
        run = {"recipe": recipe, "stage": stage, "samples": samples(steps), "peak_pss_bytes": {"highest": peak}, "bytes_sent_per_step": 1,
               "first_loss": 2.0, "last_loss": 1.0}
        if alone is not None:
            run |= {"bytes_by_axis": {"zero": 0, "tensor_parallel": 3 << 20, "sequence_parallel": 0}, "collectives_alone_s": alone}
        floor = {"recipe": recipe, "samples": {"step_s": steps, "forward_s": steps, "backward_s": steps, "adamw_s": [0.0] * len(steps)}}
        self.write(size, round_number, f"libzero-{transport}-{recipe}", {
            "schema": "zero.bench.step/1", "machine": MACHINE, "world": 2, "steps": len(steps), "warmup": 1, "micro_batch_size": batch,
            "gradient_clipping": clipping, "runs": [run], "compute": [floor] if transport in ("shm", "tp") else [],
            "model": {"layers": 8, "hidden": 512, "heads": 8, "vocabulary": 8192, "sequence_tokens": 128, "parameters_elements": 29479936}})

    def peer(self, size, round_number, name, steps, recipe="fp32", clipping=1.0, peak=100, commit="70d9"):
        self.write(size, round_number, f"peer-{name}-{recipe}", {
            "schema": "zero.bench.peer/1", "peer": name, "recipe": recipe, "versions": {"torch": "2.11.0"},
            "torch_commit": commit, "world": 2, "steps": len(steps), "warmup": 1, "gradient_clipping": clipping,
            "samples": samples(steps), "peak_pss_bytes": {"highest": peak}, "first_loss": 2.0, "last_loss": 1.0})

    def alone(self, size, round_number, steps_of, recipe="fp32"):
        """{program: its steps}, in turns"""
        runs = [{"peer": peer, "recipe": recipe, "samples": samples(steps), "first_loss": 2.0, "last_loss": 1.0}
                for peer, steps in steps_of.items()]
        self.write(size, round_number, f"peer-alone-{recipe}", {
            "schema": "zero.bench.peer/1", "peer": "alone", "recipe": recipe, "versions": {"torch": "2.11.0"},
            "torch_commit": "70d9", "world": 1, "steps": len(steps_of["plain"]), "warmup": 1, "gradient_clipping": 1.0,
            "runs": runs})

    def failure(self, size, round_number, name, error, recipe="fp32"):
        self.write(size, round_number, f"peer-{name}-{recipe}", {"schema": "zero.bench.peer/1", "peer": name, "recipe": recipe, "error": error})


class ReportTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.run_of = Run(folder.name)

    def section(self, size=SMALL):
        return results.summary(self.run_of.folder)["sizes"][size]

    def ratio(self, text, size=SMALL, recipe="fp32"):
        return self.section(size)["recipes"][recipe]["ratios"][text]

    def phases(self):
        """A machine with phases: libzero takes half of FSDP2's step in each round, whatever the machine does."""
        for r, (slow, count) in enumerate([(1.0, 1), (10.0, 1), (2.0, 1)], 1):
            self.run_of.libzero(SMALL, r, [0.5 * slow] * 4, peak=50 * slow)
            self.run_of.peer(SMALL, r, "fsdp2", [slow] * 4 * count, peak=100 * slow)

    def test_a_ratio_is_the_median_of_the_rounds_ratios(self):
        # Pooled: libzero [5,5, 3,3, 1,1] -> 3, the peer [10,10, 1,1, 4,4] -> 4: 0.75, which no round has.
        for r, (ours, theirs) in enumerate([(5.0, 10.0), (3.0, 1.0), (1.0, 4.0)], 1):
            self.run_of.libzero(SMALL, r, [ours, ours])
            self.run_of.peer(SMALL, r, "fsdp2", [theirs, theirs])
        self.assertEqual(self.ratio("stage 3 / FSDP2"), {"median": 0.5, "least_round": 0.25, "most_round": 3.0, "rounds": 3})

    def test_the_ratio_lies_within_its_range_on_a_machine_with_phases(self):
        self.phases()
        for text in ("stage 3 / FSDP2", "peak memory, stage 3 / FSDP2"):
            self.assertEqual(self.ratio(text), {"median": 0.5, "least_round": 0.5, "most_round": 0.5, "rounds": 3})
        page = report.page(results.summary(self.run_of.folder), "chart.svg")
        self.assertRegex(page, r"\| stage 3 / FSDP2 +\| +0\.50 \(0\.50-0\.50; 3\) \|")

    def test_times_are_medians_of_the_rounds_medians(self):
        for r, steps in enumerate([[1, 1, 9], [2, 2, 2], [8, 8, 8]], 1):  # pooled: 2, too; of means: more
            self.run_of.libzero(SMALL, r, [float(s) for s in steps])
        for r, steps in enumerate([[1, 1, 1], [3, 3, 5], [5, 5, 5]], 1):  # pooled: 3
            self.run_of.peer(SMALL, r, "ddp", [float(s) for s in steps])
        of = self.section()["recipes"]["fp32"]["results"]
        self.assertEqual((of["zero3"]["step_s"]["median"], of["zero3"]["step_s"]["min"], of["zero3"]["round_medians_s"]), (2, 1, [1, 2, 8]))
        self.assertEqual(of["ddp"]["step_s"]["median"], 3)
        self.assertEqual(self.ratio("stage 3 / DDP")["median"], 1.0)  # 1/1, 2/3, 8/5

    def test_fewer_than_three_rounds_are_marked(self):
        self.phases()
        (self.run_of.folder / SMALL / "round-3" / "peer-fsdp2-fp32.json").unlink()
        page = report.page(results.summary(self.run_of.folder), "chart.svg")
        self.assertRegex(page, r"\| stage 3 / FSDP2 +\| +0\.50 \(0\.50-0\.50; 2\) \* \|")
        self.assertRegex(page, r"\| FSDP2 +\| +2 of 3 \* \|")
        self.assertRegex(page, r"\| \*\*libzero stage 3\*\* +\| +3 \|")

    def test_only_rounds_that_both_have_are_compared(self):
        self.phases()
        self.run_of.failure(SMALL, 2, "fsdp2", "gloo: connection reset")
        self.assertEqual(self.ratio("stage 3 / FSDP2"), {"median": 0.5, "least_round": 0.5, "most_round": 0.5, "rounds": 2})
        page = report.page(results.summary(self.run_of.folder), "chart.svg")
        self.assertIn("FSDP2 failed in 1 of 3 rounds; its figures are of the other 2: `gloo: connection reset`", page)

    def test_a_peer_that_always_fails_is_named(self):
        self.phases()
        for r in (1, 2, 3):
            self.run_of.failure(SMALL, r, "ds3", "no compiler")
        page = report.page(results.summary(self.run_of.folder), "chart.svg")
        self.assertIn("DeepSpeed stage 3 failed in 3 of 3 rounds: `no compiler`", page)
        self.assertRegex(page, r"\| DeepSpeed stage 3 +\| +0 of 3 \| +failed \|")

    def test_clipping_is_everybodys(self):
        self.phases()
        self.assertIn("**Everybody clips** gradients at 1.0 by their global norm", report.page(results.summary(self.run_of.folder), "chart.svg"))
        self.run_of.peer(SMALL, 3, "ddp", [1.0] * 4, clipping=0.0)
        with self.assertRaises(SystemExit):
            results.summary(self.run_of.folder)

    def test_rounds_of_unlike_steps_are_refused(self):
        self.phases()
        self.run_of.peer(SMALL, 2, "ddp", [1.0] * 5)
        with self.assertRaises(SystemExit):
            results.summary(self.run_of.folder)

    def test_the_sentence_of_the_readme_has_both_sizes(self):
        self.phases()
        self.assertIsNone(report.readme(results.summary(self.run_of.folder)))
        for r in (1, 2):
            self.run_of.libzero(LARGE, r, [0.8] * 4)
            self.run_of.peer(LARGE, r, "fsdp2", [1.0] * 4)
        text = report.readme(results.summary(self.run_of.folder))
        for words in ("1 x 128 and with 8 x 128 tokens", "2 CPU ranks of one host, shared memory against gloo", "at least 2 rounds", "* fewer than 3 rounds"):
            self.assertIn(words, text)
        self.assertRegex(text, r"\| FSDP2 +\| +0\.50 \| +- \| +0\.80\* \| +- \|")
        old = f"before\n{report.README_BEGIN}\nolder\n{report.README_END}\nafter\n"
        self.assertEqual(report.with_figures(old, "new\n"), f"before\n{report.README_BEGIN}\nnew\n{report.README_END}\nafter\n")

    def python_rounds(self, size=SMALL):
        """As `script/compare --python` leaves them. The machine slows down by rounds; libzero3 stalls in a step."""
        (self.run_of.folder / "python").mkdir(exist_ok=True)
        of = Run(self.run_of.folder / "python")
        for r in (1, 2, 3):
            of.libzero(size, r, [0.5 * r] * 4, peak=80)
            of.peer(size, r, "fsdp2", [1.0 * r] * 4)
            of.peer(size, r, "libzero3", [0.6 * r] * 4, peak=90)
            of.peer(size, r, "twin3", [0.51 * r] * 4)
            of.alone(size, r, {"plain": [1.0, 10.0, 1.0, 10.0], "libzero0": [1.5, 15.0, 1.5, 15.0],
                               "libzero3": [1.02, 10.2, 10.2, 10.2]})
        return of

    def test_the_section_from_python_has_its_own_rounds_and_verdicts(self):
        self.phases()
        self.python_rounds()
        found = results.summary(self.run_of.folder)
        ratios = found["python"][SMALL]["recipes"]["fp32"]["ratios"]
        self.assertEqual({text: r["median"] for text, r in ratios.items()}, {
            "from Python, stage 3 / FSDP2": 0.6, "from C++, stage 3 / FSDP2": 0.5,
            "from Python / from C++, stage 3": 1.02, "the peers' model from Python / from C++, stage 3": 1.2,
            "1 rank, from Python, stage 0 / plain PyTorch": 1.5,
            "1 rank, from Python, stage 3 / plain PyTorch": 1.02,  # of turns; the ratio of the medians is 1.85
            "peak memory, from Python, stage 3 / FSDP2": 0.9, "peak memory, from C++, stage 3 / FSDP2": 0.8})
        self.assertEqual(ratios["1 rank, from Python, stage 3 / plain PyTorch"]["rounds"], 3)
        page = report.page(found, "chart.svg")
        self.assertIn("- from Python / from C++, stage 3, at most 1.03: fp32 1.020, reached.", page)
        self.assertIn("- 1 rank, from Python, stage 0 / plain PyTorch, at most 1.03: fp32 1.500, **missed**.", page)
        self.assertNotIn("- the peers' model", page)  # without a bound
        for label in ("from Python", "C\\+\\+ model from Python"):
            self.assertRegex(page, rf"\| \*\*libzero stage 3, {label}\*\* +\| +3 \|")
        self.assertNotIn("python", str(found["sizes"]).lower())

    def test_failing_programs_of_one_rank_are_named(self):
        self.phases()
        self.python_rounds().failure(SMALL, 3, "alone", "out of memory")
        page = report.page(results.summary(self.run_of.folder), "chart.svg")
        self.assertIn("plain PyTorch, 1 rank failed in 1 of 3 rounds; its figures are of the other 2: `out of memory`",
                      page)

    def test_the_section_from_python_may_be_measured_without_the_others(self):
        self.phases()
        self.python_rounds()
        kept = results.summary(self.run_of.folder)
        with tempfile.TemporaryDirectory() as folder:
            self.run_of = Run(folder)
            self.python_rounds(LARGE)
            found = results.summary(self.run_of.folder, kept)
            self.assertEqual((found["sizes"], sorted(found["python"])), (kept["sizes"], sorted([SMALL, LARGE])))
            with self.assertRaises(SystemExit):
                results.summary(self.run_of.folder)

    def test_the_section_of_parallelism_has_floors_with_collectives_and_verdicts(self):
        self.phases()
        (self.run_of.folder / "parallel").mkdir()
        of = Run(self.run_of.folder / "parallel")
        for r in (1, 2, 3):
            of.libzero(SMALL, r, [0.6 * r] * 4, transport="tp", peak=80, alone=0.2 * r)
            of.libzero(SMALL, r, [0.7 * r] * 4, transport="tpgloo", alone=0.5 * r)
            of.libzero(SMALL, r, [1.0 * r] * 4, transport="segments", stage=0, alone=0.2 * r)
            of.libzero(SMALL, r, [1.2 * r] * 4, transport="parts", stage=0, alone=0.2 * r)
            of.peer(SMALL, r, "dtensor", [1.0 * r] * 4)
        found = results.summary(self.run_of.folder)
        ratios = found["parallel"][SMALL]["recipes"]["fp32"]["ratios"]
        self.assertEqual({text: round(one["median"], 9) for text, one in ratios.items()}, {
            "stage 3 / DTensor": 0.6, "stage 3 over TCP / DTensor": 0.7, "floor: (compute + AdamW share) / DTensor": 0.6,
            "stage 3 / (compute + AdamW share + collectives alone)": 0.75, "partitioned / whole activation checkpoints, stage 0": 1.2,
            "peak memory, stage 3 / DTensor": 0.8, "peak memory, partitioned / whole activation checkpoints, stage 0": 1.0})
        page = report.page(found, "chart.svg")
        for line in ("- stage 3 / DTensor, at most 0.5: fp32 0.600, **missed**.", "- stage 3 over TCP / DTensor, at most 0.8: fp32 0.700, reached.",
                     "- partitioned / whole activation checkpoints, stage 0, at most 1.1: fp32 1.200, **missed**.",
                     "- peak memory, stage 3 / DTensor, at most 1: fp32 0.800, reached."):
            self.assertIn(line, page)
        self.assertRegex(page, r"\| libzero stage 3 over TCP +\| +3 \|.*\| +3\.0 \| +1000\.0 \|")
        self.assertNotIn("tp, sp alone", page.split("## Tensor and sequence")[0])

    def test_python_programs_of_another_torch_are_refused(self):
        self.phases()
        self.python_rounds().peer(SMALL, 3, "ddp", [1.0] * 4, commit="other")
        with self.assertRaises(SystemExit):
            results.summary(self.run_of.folder)

    def test_what_was_not_measured_again_stays_if_it_clipped_at_the_same_norm(self):
        self.phases()
        kept = {"sizes": {LARGE: {"gradient_clipping": 1.0, "date": "then"}, "1x1x1x1x1x1": {"gradient_clipping": None}},
                "optimizers": {"date": "then"}, "collectives": None}
        found = results.summary(self.run_of.folder, kept)
        self.assertEqual((sorted(found["sizes"]), found["optimizers"]), (sorted([SMALL, LARGE]), {"date": "then"}))

    def test_the_updates_alone_go_by_rounds_too(self):
        self.phases()
        for r, (ours, torch, deepspeed) in enumerate([(1.0, 2.0, 3.0), (8.0, 8.0, 4.0), (2.0, 6.0, 6.0)], 1):
            folder = self.run_of.folder / "optimizer" / f"round-{r}"
            folder.mkdir(parents=True)
            for who, seconds in ("libzero", ours), ("torch", torch), ("deepspeed", deepspeed):
                run = {"job": "fp32", "threads": 1, "samples_s": [seconds] * 3, "bytes_per_element": 28, "triad_bytes_per_s": 1.0}
                document = {"elements": 1000, "runs": [run]} | ({} if who == "libzero" else {"peer": who})
                (folder / f"{who}-1.json").write_text(json.dumps(document))
        for name in ("load", "command"):
            (self.run_of.folder / "optimizer" / name).write_text("1.0\n")
        row = results.optimizers(self.run_of.folder)["results"][0]
        self.assertEqual(row["faster_peer_over_libzero"], {"median": 2.0, "least_round": 0.5, "most_round": 3.0, "rounds": 3})


class PublishedPageTest(unittest.TestCase):
    """lab/results/performance.* and README.md say what performance.json has."""

    def test_page_and_readme_are_of_the_published_numbers(self):
        document = json.loads((RESULTS / "performance.json").read_text())
        self.assertEqual((RESULTS / "performance.md").read_text(), report.page(document, "performance.svg"))
        self.assertEqual((RESULTS / "performance.svg").read_text(), report.svg(document["sizes"][SMALL]))
        text = (SOURCE / "README.md").read_text()
        self.assertEqual(text, report.with_figures(text, report.readme(document)))

    def test_every_ratio_lies_within_its_rounds(self):
        document = json.loads((RESULTS / "performance.json").read_text())
        for size, section in [*document["sizes"].items(), *document.get("python", {}).items(),
                              *document.get("parallel", {}).items()]:
            for recipe, of in section["recipes"].items():
                for text, r in of["ratios"].items():
                    self.assertTrue(r["least_round"] <= r["median"] <= r["most_round"], (size, recipe, text, r))


if __name__ == "__main__":
    unittest.main()
