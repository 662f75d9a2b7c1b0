"""script/gpu-check with programs that only print: in time, a result after every part, faults that are seen. No GPU.

python3 tests/gpu/check_test.py BUILD_FOLDER_OF_TESTS  (for its fake libcuda.so.1)
"""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FAKE_CUDA = pathlib.Path(sys.argv.pop(1)).resolve() / "fake_cuda"
TESTS = ["gpu_kernels_test", "gpu_engine_test", "gpu_paths_test", "gpu_streams_test", "nccl_test", "gpu_shared_test", "gpu_alone_test"]
# In the profiler's format, of two steps: an own kernel twice, another's while a copy runs on a second stream, two calls.
UPDATE = "void zero::cuda::(anonymous namespace)::update_kernel<zero::cuda::Adam<true> >(zero::cuda::(anonymous namespace)::Updates<zero::cuda::Adam<true> >)"
SQUARES = "zero::cuda::(anonymous namespace)::square_pieces_kernel(zero::cuda::(anonymous namespace)::Squares)"
ADD = ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >"
       "(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)")
TRACE = """{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1790857026000000000, "traceEvents": [
  {"ph": "M", "name": "process_name", "ts": 4850520445403.265, "pid": 0, "tid": 0, "args": {"name": "overhead_bench"}},
""" + ",\n".join(f"""  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": 0, "tid": {stream},
    "ts": {4850520440000 + at}, "dur": {us},
    "args": {{
      "External id": 7, "device": 0, "context": 1, "stream": {stream}, "correlation": {at}, "grid": [24, 1, 1], "block": [256, 1, 1]
    }}
  }}""" for cat, name, stream, at, us in [
    ("kernel", "nvjet_hsh_256x128", 7, 0, 400.0), ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 380, 30.0), ("kernel", ADD, 7, 500, 80.0),
    ("kernel", UPDATE, 7, 600, 90.0), ("kernel", SQUARES, 7, 700, 20.0), ("kernel", "nvjet_hsh_256x128", 7, 1000, 600.0), ("kernel", UPDATE, 7, 1700, 110.0),
    ("cuda_runtime", "cudaStreamSynchronize", 1031, 10, 600.0), ("cuda_driver", "cuLaunchKernel", 1031, 5, 5.0), ("cuda_driver", "cuLaunchKernel", 1031, 990, 3.0),
    ("cpu_op", "aten::mm", 1031, 0, 9.0)]) + """,
  {"ph": "f", "id": 3, "pid": 0, "tid": 7, "ts": 4850520440000.5, "cat": "ac2g", "name": "ac2g", "bp": "e"},
  {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 4850520449999}
  ], "traceName": "trace.json"}"""
PASSES = 'echo "[ RUN      ] A.B"; echo "[       OK ] A.B (1 ms)"'


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class Pack:
    def __init__(self, folder):
        self.folder = folder
        for name in ("bin", "tests", "lib", "torch/lib"):
            (folder / name).mkdir(parents=True)
        (folder / "tests/entries.txt").write_text("".join(f"{name}\t{name}\tA.*\n" for name in TESTS))
        for name in TESTS:
            self.program(f"tests/{name}", PASSES)
        self.program("tests/gpu_bandwidth", """echo '{"kernels": []}'""")
        self.program("bin/zero", 'if [ "$1" = --version ]; then echo "zero 1.2.3"; else exit 3; fi')
        for name in ("overhead_bench", "offload_bench"):
            self.program(f"bin/{name}", """echo '{"ratio_of_medians": 0.5}'""")
        (folder / "torch/lib/libtorch_cpu.so").touch()

    def program(self, name, text):
        (self.folder / name).write_text(f"#!/bin/bash\n{text}\n")

    def environment(self, driver=True, mode=""):
        environment = {**os.environ, "ZERO_TORCH_DIR": str(self.folder / "torch"), "FAKE_CUDA": mode}
        environment["LD_LIBRARY_PATH"] = f"{FAKE_CUDA if driver else ''}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        return environment

    def command(self, out, *options):
        return [sys.executable, ROOT / "script/gpu-check", "--packed", self.folder, "--out", out, *map(str, options)]


class GpuCheck(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.folder = pathlib.Path(self.temporary.name)
        self.pack = Pack(self.folder / "pack")
        self.out = self.folder / "out"

    def run_check(self, *options, driver=True, mode=""):
        begin = time.monotonic()
        environment = self.pack.environment(driver, mode)
        ended = subprocess.run(self.pack.command(self.out, *options), env=environment, capture_output=True, text=True, timeout=100)
        return ended, time.monotonic() - begin

    def document(self):
        return json.loads((self.out / "gpu-check.json").read_text())

    def test_every_part_has_its_figures(self):
        ended, _ = self.run_check("--parts", "gpu_kernels_test,nccl_test,step_bf16_0,bandwidth,offload_7b")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        parts = self.document()["parts"]
        self.assertEqual(parts["gpu_kernels_test"]["passed"], 1)
        self.assertEqual(parts["step_bf16_0"]["ratio_of_medians"], 0.5)
        self.assertEqual(self.document()["versions"]["libzero"], "zero 1.2.3")

    def test_a_name_chooses_the_parts_that_begin_with_it(self):
        ended, _ = self.run_check("--parts", "step,gpu_paths_test")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertEqual(list(self.document()["parts"]), ["gpu_paths_test", "step_bf16_0", "step_bf16_3", "step_fp32_0", "step_fp32_3"])

    def test_with_a_gpu_a_case_is_skipped_only_for_want_of_more(self):
        for reason, wrong in (("1 GPUs on this machine, expected 2 or more", False), ("0 GPUs on this machine, expected 2 or more", True), ("needs a GPU: got no plug-in at /x", True)):
            self.pack.program("tests/nccl_test", f'{PASSES}; echo "[ RUN      ] A.C"; echo "a.cpp:7: Skipped"; echo "{reason}"; echo "[  SKIPPED ] A.C (1 ms)"')
            ended, _ = self.run_check("--parts", "nccl_test")
            part = self.document()["parts"]["nccl_test"]
            self.assertEqual(part["skipped"], {"A.C": reason})
            self.assertEqual(part["passed"], 1)
            self.assertEqual(part.get("error"), f"1 skipped: A.C: {reason}" if wrong else None)
            self.assertEqual(ended.returncode, int(wrong))

    def trace_program(self, trace):
        (self.folder / "trace").write_text(trace)
        self.pack.program("bin/overhead_bench", f"""while [ "$1" != --kernels ]; do shift; done; cp {self.folder}/trace "$2"
            echo '{{"steps_per_turn": 2, "engine_ms": 2.0}}'""")

    def test_the_kernels_of_a_step_are_listed_libzeros_first(self):
        self.trace_program(TRACE)
        ended, _ = self.run_check("--parts", "kernels")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        parts = self.document()["parts"]
        self.assertEqual(list(parts), ["kernels_0", "kernels_3_of_8"])
        part = parts["kernels_0"]
        self.assertEqual([(row["kernel"], row["own"], row["count"], row["us"], row["share"]) for row in part["kernels"]], [
            ("update_kernel<Adam<true> >", True, 1, 100, 0.05),
            ("square_pieces_kernel", True, 0.5, 10, 0.005),
            ("nvjet_hsh_256x128", False, 1, 500, 0.25),
            ("vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>, array<char*, ...", False, 0.5, 40, 0.02),
            ("Memcpy HtoD (Pinned -> Device)", False, 0.5, 15, 0.0075)])
        self.assertEqual([part[key] for key in ("step_us", "gpu_us", "own_us", "own_share", "streams", "launches")], [2000, 665, 110, 0.055, 2, 3.5])
        self.assertEqual(part["busy_us"], 655, "the copy overlaps a kernel by 20 of its 30 us")
        self.assertEqual(part["calls"], [{"call": "cudaStreamSynchronize", "count": 0.5, "us": 300}, {"call": "cuLaunchKernel", "count": 1, "us": 4}])
        self.assertNotIn("table", part)
        log = (self.out / "gpu-check.log").read_text()
        for text in (log, ended.stderr):
            self.assertRegex(text, r"update_kernel<Adam<true> > +1\.0 +100\.0 +5\.00%")
            self.assertRegex(text, r"cudaStreamSynchronize: 0\.5 calls, 300 us")

    def test_without_a_profiler_the_part_says_so(self):
        for trace, error in ((json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.5, "dur": 2}]}), "no kernel among the trace's 1 events"),
                             ('{"traceEvents": [', "JSONDecodeError")):
            self.trace_program(trace)
            ended, _ = self.run_check("--parts", "kernels_0,bandwidth")
            self.assertEqual(ended.returncode, 1)
            self.assertIn(error, self.document()["parts"]["kernels_0"]["error"])
            self.assertNotIn("error", self.document()["parts"]["bandwidth"])
        self.pack.program("bin/overhead_bench", 'echo "{}"; echo "overhead_bench: --kernels: no profiler" >&2; exit 1')
        self.run_check("--parts", "kernels_0")
        self.assertEqual(self.document()["parts"]["kernels_0"]["error"], "ended with 1: overhead_bench: --kernels: no profiler")

    def test_a_failed_a_crashed_and_a_silent_part_are_named_and_the_rest_continues(self):
        self.pack.program("tests/gpu_kernels_test", 'echo "[ RUN      ] A.B"; echo "[  FAILED  ] A.B (1 ms)"; exit 1')
        self.pack.program("tests/gpu_engine_test", 'echo "[ RUN      ] A.C"; kill -SEGV $$')
        self.pack.program("tests/gpu_paths_test", 'echo "[ RUN      ] A.D"; echo "[  SKIPPED ] A.D (1 ms)"')
        self.pack.program("bin/overhead_bench", "true")
        self.pack.program("tests/gpu_bandwidth", """echo '{"skipped": "no kernels"}'""")
        ended, _ = self.run_check("--parts", "gpu_kernels_test,gpu_engine_test,gpu_paths_test,step_bf16_0,bandwidth,offload_7b")
        self.assertEqual(ended.returncode, 1)
        document = self.document()
        self.assertEqual(sorted(document["failed"]), ["bandwidth", "gpu_engine_test", "gpu_kernels_test", "gpu_paths_test", "step_bf16_0"])
        self.assertEqual(document["parts"]["gpu_kernels_test"]["failed"], ["A.B"])
        self.assertEqual(document["parts"]["gpu_engine_test"]["ended_in"], "A.C")
        self.assertEqual(document["parts"]["gpu_paths_test"]["error"], "no case passed, 1 skipped")
        self.assertIn("no kernels", document["parts"]["bandwidth"]["error"])
        self.assertNotIn("error", document["parts"]["offload_7b"])

    def test_the_result_is_there_before_the_end_and_the_deadline_holds(self):
        pid_file = self.folder / "pid"
        self.pack.program("tests/gpu_engine_test", f"sleep 500 & echo $! > {pid_file}; wait")
        check = subprocess.Popen(self.pack.command(self.out, "--deadline", 12), env=self.pack.environment(), stderr=subprocess.DEVNULL)
        self.addCleanup(check.kill)
        begin = time.monotonic()
        while not pid_file.exists() or not pid_file.read_text().strip():
            self.assertLess(time.monotonic() - begin, 60)
            time.sleep(0.1)
        self.assertEqual(self.document()["parts"]["gpu_kernels_test"]["passed"], 1, "while the next part runs")
        self.assertEqual(check.wait(60), 1)
        self.assertLess(time.monotonic() - begin, 20)
        document = self.document()
        self.assertIn("cut off", document["parts"]["gpu_engine_test"]["error"])
        self.assertIn("no time was left", document["parts"]["offload_7b"]["error"])
        self.expect_end(pid_file)

    def expect_end(self, pid_file):
        left = pathlib.Path(f"/proc/{int(pid_file.read_text())}/stat")
        begin = time.monotonic()
        while left.exists() and left.read_text().rsplit(")", 1)[1].split()[0] != "Z":  # a zombie has ended
            self.assertLess(time.monotonic() - begin, 10, "a process of the part still runs")
            time.sleep(0.1)

    def test_a_check_that_is_terminated_leaves_no_process_and_its_result(self):
        pid_file = self.folder / "pid"
        self.pack.program("tests/gpu_engine_test", f"sleep 500 & echo $! > {pid_file}; wait")
        environment = self.pack.environment() | {"TMPDIR": str(self.folder / "tmp")}
        (self.folder / "tmp").mkdir()
        check = subprocess.Popen(self.pack.command(self.out), env=environment, stderr=subprocess.DEVNULL)
        self.addCleanup(check.kill)
        begin = time.monotonic()
        while not pid_file.exists() or not pid_file.read_text().strip():
            self.assertLess(time.monotonic() - begin, 60)
            time.sleep(0.1)
        check.terminate()
        self.assertEqual(check.wait(20), 1)
        self.expect_end(pid_file)
        self.assertEqual(list(self.document()["parts"]), ["gpu_kernels_test"])
        self.assertEqual(list((self.folder / "tmp").iterdir()), [])

    def test_a_driver_that_crashes_is_a_result(self):
        ended, _ = self.run_check(mode="crash")
        self.assertEqual(ended.returncode, 1)
        self.assertEqual(self.document()["failed"], ["driver"])
        self.assertIn("query of the CUDA driver ended with -11", self.document()["error"])

    @unittest.skipIf(has_driver(), "this machine has a CUDA driver")
    def test_without_a_driver_the_packed_programs_start_and_say_so(self):
        skips = 'echo "[ RUN      ] A.B"; echo "a.cpp:7: Skipped"; echo "{}"; echo "[  SKIPPED ] A.B (1 ms)"'
        for name in TESTS:
            self.pack.program(f"tests/{name}", skips.format("needs a GPU: got no GPU on this machine"))
        for name in ("bin/zero", "bin/overhead_bench", "bin/offload_bench", "tests/gpu_bandwidth"):
            self.pack.program(name, 'if [ "$1" = --version ]; then echo "zero 1.2.3"; else echo "got cuda, but no GPU" >&2; exit 2; fi')
        ended, _ = self.run_check(driver=False)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertIn("no CUDA driver", self.document()["skipped"])
        for name, part in self.document()["parts"].items():
            self.assertRegex(str(part["skipped"]), "no GPU", name)
        # What cannot start, crashes, pretends to work or skips for another reason is a fault without a GPU, too.
        self.pack.program("tests/gpu_engine_test", 'echo "error while loading shared libraries: libx.so" >&2; exit 127')
        self.pack.program("tests/nccl_test", skips.format("no libnccl"))
        self.pack.program("tests/gpu_bandwidth", "kill -SEGV $$")
        self.pack.program("bin/offload_bench", "true")
        ended, _ = self.run_check(driver=False)
        self.assertEqual(ended.returncode, 1)
        document = self.document()
        self.assertEqual(document["failed"], ["gpu_engine_test", "nccl_test", "bandwidth", "offload_xl_delayed_0", "offload_xl_delayed_1", "offload_7b"])
        self.assertEqual(document["parts"]["gpu_engine_test"]["error"], "ended with 127: error while loading shared libraries: libx.so")
        self.assertEqual(document["parts"]["nccl_test"]["error"], "1 skipped: A.B: no libnccl")
        self.assertIn("expected that it says that there is no GPU", document["parts"]["offload_7b"]["error"])

    @unittest.skipIf(has_driver(), "this machine has a CUDA driver")
    def test_without_a_driver_a_build_is_not_tried(self):
        command = [sys.executable, ROOT / "script/gpu-check", "--out", self.out]
        ended = subprocess.run(command, env=self.pack.environment(driver=False), capture_output=True, text=True, timeout=20)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertIn("no CUDA driver", self.document()["skipped"])
        self.assertNotIn("parts", self.document())

    def test_an_unknown_part_and_a_pack_without_programs_are_refused(self):
        ended, _ = self.run_check("--parts", "bandwith")
        self.assertEqual(ended.returncode, 2)
        self.assertIn("got bandwith, expected some of gpu_kernels_test", ended.stderr)
        (self.pack.folder / "bin/zero").unlink()
        ended, _ = self.run_check()
        self.assertEqual(ended.returncode, 2)
        self.assertIn("bin/zero, expected a build", ended.stderr)


if __name__ == "__main__":
    unittest.main()
