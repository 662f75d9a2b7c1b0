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
        (folder / "lib/libzero.so").touch()

    def program(self, name, text):
        (self.folder / name).write_text(f"#!/bin/bash\n{text}\n")

    def environment(self, driver=True):
        environment = {**os.environ, "ZERO_TORCH_DIR": str(self.folder / "torch")}
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

    def run_check(self, *options, driver=True):
        begin = time.monotonic()
        ended = subprocess.run(self.pack.command(self.out, *options), env=self.pack.environment(driver), capture_output=True, text=True, timeout=100)
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

    def test_a_failed_a_crashed_and_a_silent_part_are_named_and_the_rest_goes_on(self):
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
        left = pathlib.Path(f"/proc/{int(pid_file.read_text())}/stat")
        begin = time.monotonic()
        while left.exists() and left.read_text().rsplit(")", 1)[1].split()[0] != "Z":  # a zombie has ended
            self.assertLess(time.monotonic() - begin, 10, "a process of the part goes on")
            time.sleep(0.1)

    @unittest.skipIf(has_driver(), "this machine has a CUDA driver")
    def test_without_a_driver_nothing_runs(self):
        ended, _ = self.run_check(driver=False)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertIn("no CUDA driver", self.document()["skipped"])

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
