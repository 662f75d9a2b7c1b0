"""script/gpu-check --pack and --packed with the built programs, in a root folder without the build's packages. No GPU.

python3 tests/gpu/pack_test.py BUILD_FOLDER

The folder has what an image with Python and a torch wheel has: the loader, glibc, libstdc++ and libgcc_s, bash, some of coreutils, ldd,
python3 with its standard library, and nothing of /usr else; the wheel under another path than here, the pack and the
tracked files, all read-only. Mounts and processes are in namespaces of each run (unshare), so nothing of them stays. Exit
code 77, with the reason, where the machine allows no namespaces.
"""

import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PYTHON = pathlib.Path(getattr(sys, "_base_executable", sys.executable)).resolve()
STDLIB = pathlib.Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})).resolve()
# Without ls, mkdir and cp: Debian's need libselinux and with it libpcre2-8, which the pack must bring.
TOOLS = ["bash", "env", "cat", "rm", "chmod", "uname", "sleep", "true", "ldd"]
CXX_RUNTIME = ["libstdc++.so.6", "libgcc_s.so.1"]
LOADERS_PATH = "/pack/lib:/wheels/torch/lib"
# These need no GPU: they pass without one.
OF_THE_HOST = {"gpu_paths_test", "gpu_streams_test"}
TESTS = {"gpu_kernels_test", "gpu_engine_test", "nccl_test", "gpu_shared_test", "gpu_alone_test"} | OF_THE_HOST


# Inside the namespaces, as their first process: makes the root, runs one command in it, and tells what it left.


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)


def bind(source, target, read_only=True):
    source, target = pathlib.Path(source), pathlib.Path(target)
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--bind", source, target)
    if read_only:
        # In a user's namespace these flags of the source may not be taken away.
        flags = os.statvfs(source).f_flag
        kept = [name for bit, name in ((os.ST_NOSUID, "nosuid"), (os.ST_NODEV, "nodev"), (os.ST_NOEXEC, "noexec")) if flags & bit]
        mount("-o", ",".join(["remount", "bind", "ro", *kept]), target)


def place(file, root):
    """Copies a file and the libraries that it is linked to, each to its own path."""
    said = subprocess.run(["ldd", file], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    for each in [str(file), *re.findall(r"(?:=> |^\s)(/\S+)", said, re.M)]:
        target = root / each.lstrip("/")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(each, target)


def make_root(root, spec):
    mount("-t", "tmpfs", "-o", "size=300m", "tmpfs", root)
    for link in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / link).mkdir(parents=True)
        (root / link).symlink_to(f"usr/{link}")
    for tool in TOOLS:
        place(shutil.which(tool, path="/usr/bin:/bin"), root)
    shutil.copy(root / "usr/bin/bash", root / "usr/bin/sh")
    place(PYTHON, root)
    for module in STDLIB.glob("lib-dynload/_ctypes.*.so"):
        place(module, root)
    for name in CXX_RUNTIME + ["libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1"]:
        place(library_path(name), root)
    bind(STDLIB, root / str(STDLIB).lstrip("/"))
    packages = root / str(STDLIB).lstrip("/") / "site-packages"
    if packages.exists():
        mount("-t", "tmpfs", "tmpfs", packages)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    for name in ("null", "zero", "random", "urandom"):
        bind(f"/dev/{name}", root / "dev" / name, read_only=False)
    for name in ("dev/shm", "tmp"):
        (root / name).mkdir()
        mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / name)
    (root / "proc").mkdir()
    mount("-t", "proc", "proc", root / "proc")
    (root / "sys").mkdir()
    mount("--rbind", "/sys", root / "sys")
    for source, target, read_only in spec["binds"]:
        bind(source, root / target.lstrip("/"), read_only)


def library_path(name):
    """As the loader finds it for this Python's _ctypes and the compiler's programs: in the system's folders."""
    said = subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, text=True).stdout
    return re.search(rf"^\s{re.escape(name)} \(libc6,[^)]*\) => (\S+)", said, re.M)[1]


def files_of(root):
    """Path: (size, time of the last change), or "folder", of all that is the root's own and in its temporary file systems."""
    found = {}
    skipped = [root / name for name in ("proc", "sys", "out", "wheels", "pack", "tree", "driver", str(STDLIB).lstrip("/"))]
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if pathlib.Path(folder, name) not in skipped]
        found |= {os.path.relpath(os.path.join(folder, name), root): "folder" for name in folders}
        for name in files:
            status = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(status.st_mode):
                found[os.path.relpath(os.path.join(folder, name), root)] = (status.st_size, status.st_mtime_ns)
    return found


def processes_left():
    """The command lines of others than this first process, once those that were killed have ended."""
    begin = time.monotonic()
    while True:
        left = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and entry.name != "1" and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    left.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                pass  # has ended
        if not left or time.monotonic() - begin > 5:
            return left
        time.sleep(0.1)


def inside(spec_file):
    spec = json.loads(pathlib.Path(spec_file).read_text())
    root = pathlib.Path(spec["root"])
    make_root(root, spec)
    mount("-t", "proc", "proc", "/proc")
    before = files_of(root)

    def enter():
        os.chroot(root)
        os.chdir("/")

    environment = {"PATH": "/usr/bin", "HOME": "/", "ZERO_TORCH_DIR": "/wheels/torch", **spec["environment"]}
    begin = time.monotonic()
    try:
        ended = subprocess.run(spec["command"], preexec_fn=enter, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", timeout=spec["seconds"])
        code, output = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        code, output = "timed out", (error.stdout or b"").decode(errors="replace")
    took = time.monotonic() - begin
    after = files_of(root)
    result = {"code": code, "output": output, "seconds": took, "left": processes_left(),
              "libraries": sorted({path.name for path in root.glob("usr/lib/**/*.so*")}),
              "written": sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))}
    pathlib.Path(spec["result"]).write_text(json.dumps(result))


# Outside.


def end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def namespaces():
    """The words before a command that give it mounts and processes of its own, or "" and the reason."""
    why = ""
    for more in ([], ["--user", "--map-root-user"]):
        words = ["unshare", *more, "--mount", "--pid", "--fork", "--kill-child"]
        with tempfile.TemporaryDirectory() as folder:
            try:
                script = 'mount -t tmpfs tmpfs "$1" && mount -t proc proc /proc && mkdir "$1/d" && mount --rbind /sys "$1/d"'
                tried = subprocess.run([*words, "sh", "-c", script, "sh", folder], capture_output=True, text=True, timeout=20)
            except OSError as error:
                return [], f"unshare: {error}"
        if tried.returncode == 0:
            return words, ""
        why = tried.stderr.strip() or f"{' '.join(words)} ended with {tried.returncode}"
    return [], why


class Pack(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = pathlib.Path(cls.temporary.name)
        packed = subprocess.run([sys.executable, "-B", ROOT / "script/gpu-check", "--no-build", "--pack", cls.folder / "pack"],
                                env={**os.environ, "BUILD_DIR": str(BUILD)}, capture_output=True, text=True, timeout=60)
        assert packed.returncode == 0, packed.stderr
        cls.pack = json.loads((cls.folder / "pack/pack.json").read_text())
        cls.brings = cls.pack["brings"]
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], stdout=subprocess.PIPE, check=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (cls.folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, cls.folder / "tree" / name)
        cache = (BUILD / "CMakeCache.txt").read_text()
        cls.torch = pathlib.Path(re.search(r"^ZERO_TORCH_DIR:\w+=(.*)$", cache, re.M)[1]).resolve()
        cls.has_plugin = (BUILD / "lib/libzero_cuda.so").exists()
        cls.has_cuda_libraries = (cls.torch.parent / "nvidia/nccl").exists()  # script/setup --cuda was run

    def setUp(self):
        self.out = self.folder / self._testMethodName
        self.out.mkdir()

    def run_inside(self, command, seconds, pack=None, driver=False, environment=None):
        """What `inside` tells. Nothing may be left there or written but the result."""
        binds = [[self.torch.parent, "/wheels", True], [pack or self.folder / "pack", "/pack", True], [self.folder / "tree", "/tree", True],
                 [self.out, "/out", False]]
        environment = dict(environment or {})
        if driver:
            binds.append([BUILD / "tests/fake_cuda", "/driver", True])
            environment["LD_LIBRARY_PATH"] = "/driver"
        with tempfile.TemporaryDirectory() as own:
            own = pathlib.Path(own)
            (own / "root").mkdir()
            spec = {"root": str(own / "root"), "binds": [[str(a), b, c] for a, b, c in binds], "command": list(map(str, command)),
                    "environment": environment, "seconds": seconds, "result": str(own / "result")}
            (own / "spec").write_text(json.dumps(spec))
            ended = subprocess.run([*NAMESPACES, sys.executable, "-B", __file__, "--inside", own / "spec"], capture_output=True, text=True,
                                   timeout=seconds + 60, preexec_fn=end_with_parent)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            result = json.loads((own / "result").read_text())
            self.assertEqual(list((own / "root").iterdir()), [], "a mount was left")
        self.assertEqual(result["left"], [], "processes still run")
        self.assertEqual(result["written"], [], "written outside --out")
        self.assertEqual(sorted(set(self.brings) & set(result["libraries"])), [], "the root has libraries that only the pack should bring")
        return result

    def run_check(self, *options, seconds=100, **more):
        return self.run_inside([PYTHON, "/tree/script/gpu-check", "--packed", "/pack", "--out", "/out", *options], seconds, **more)

    def document(self):
        self.assertEqual(sorted(path.name for path in self.out.iterdir()), ["gpu-check.json", "gpu-check.log"])
        return json.loads((self.out / "gpu-check.json").read_text())

    all_parts = set()

    def parts(self):
        """The names of all parts, as the script lists them."""
        if not self.all_parts:
            refused = self.run_check("--parts", "none")
            self.assertEqual(refused["code"], 2, refused["output"])
            self.all_parts.update(re.search(r"expected some of (.*)", refused["output"])[1].split(", "))
        return self.all_parts

    def test_every_program_starts_with_all_its_libraries(self):
        script = f"""
            export LD_BIND_NOW=1 LD_LIBRARY_PATH={LOADERS_PATH}
            for folder in /wheels/nvidia/*/lib; do LD_LIBRARY_PATH+=:$folder; done
            for file in /pack/bin/* /pack/tests/[!e]* /pack/lib/*; do ldd "$file" 2>&1 | while read -r line; do
              case $line in *"not found"*) echo "MISSING $file: $line" ;; esac; done; done
            for program in gpu_core gpu_runtime unit_layers; do /pack/tests/$program --gtest_list_tests >/dev/null || echo "MISSING $program"; done
            /pack/bin/zero --version >/dev/null || echo "MISSING zero"
            for program in zero-torch overhead_bench offload_bench; do  # refuse it
              /pack/bin/$program --help 2>&1; [ $? = 2 ] || echo "MISSING $program"; done
            /pack/tests/gpu_bandwidth || echo MISSING gpu_bandwidth"""
        result = self.run_inside(["/usr/bin/bash", "-c", script], 100)
        missing = [line for line in result["output"].splitlines() if line.startswith("MISSING")]
        if not self.has_cuda_libraries:
            missing = [line for line in missing if not line.startswith("MISSING /pack/lib/libzero_")]
        self.assertEqual(missing, [])
        self.assertEqual(result["output"].count("unknown option --help"), 2)
        libraries = [sorted(path.name for path in (folder / "lib").glob("libzero*.so*")) for folder in (BUILD, self.folder / "pack")]
        self.assertEqual(*libraries)

    def test_a_step_trains_there_and_the_profiler_of_the_wheel_traces_it(self):
        script = f"""
            export LD_LIBRARY_PATH={LOADERS_PATH}
            /pack/bin/overhead_bench --layers 1 --hidden 64 --heads 2 --steps 1 --turn 2 --kernels /out/trace.json --json || exit
            {PYTHON} -B /tree/lab/programs/kernel_list.py /out/trace.json 2 1.5"""
        result = self.run_inside(["/usr/bin/bash", "-c", script], 60)
        self.assertIn('"ratio_of_medians"', result["output"])
        self.assertEqual(result["code"], 1, result["output"])
        self.assertRegex(result["output"], r"no kernel among the trace's \d{3,} events")
        events = json.loads((self.out / "trace.json").read_text(), strict=False)["traceEvents"]
        for operator in ("aten::mm", "aten::embedding"):
            self.assertIn(("X", "cpu_op", operator), {(event["ph"], event.get("cat"), event["name"]) for event in events})

    def test_another_torch_is_refused(self):
        other = self.folder / "other"
        shutil.copytree(self.folder / "pack", other, symlinks=True, copy_function=os.link)
        (other / "pack.json").unlink()
        (other / "pack.json").write_text(json.dumps(self.pack | {"torch": "2.10"}))
        result = self.run_check(pack=other)
        self.assertEqual(result["code"], 2, result["output"])
        self.assertRegex(result["output"], rf"got torch {re.escape(self.pack['torch'])}\.\d.* in /wheels/torch, expected 2\.10, which this pack")

    def test_without_a_gpu_all_parts_are_named_and_those_that_can_run(self):
        result = self.run_check(environment={"LD_BIND_NOW": "1"})
        document = self.document()
        self.assertEqual(result["code"], 0, result["output"])
        self.assertEqual(document["failed"], [])
        self.assertIn("no CUDA driver", document["skipped"])
        self.assertIn("gpu-check: no GPU: no CUDA driver", result["output"])
        self.assertTrue(document["versions"]["torch"].startswith(self.pack["torch"] + "."), document["versions"])
        self.assertRegex(document["versions"]["commit"], "^[0-9a-f]{40}$")
        if self.has_cuda_libraries:
            self.assertEqual(document["versions"]["missing_libraries_of_plugins"], {})
        self.assertEqual(set(document["parts"]), self.parts())
        for name, part in document["parts"].items():
            if name not in TESTS:
                self.assertRegex(part["skipped"], "no GPU")
            elif name in OF_THE_HOST:
                self.assertGreater(part["passed"], 2)
                self.assertEqual(part["skipped"], {})
            else:
                self.assertGreater(len(part["skipped"]), 1, name)
                for reason in part["skipped"].values():
                    self.assertRegex(reason, "no GPU|0 GPUs on this machine|this build has no", name)
                    self.assertNotIn("libzero_cuda.so", reason if self.has_plugin else "", name)

    def test_with_a_driver_that_does_nothing_it_ends_in_time_and_every_part_has_its_reason(self):
        result = self.run_check("--deadline", "20", driver=True)
        document = self.document()
        self.assertLess(result["seconds"], 25)
        self.assertEqual(result["code"], 1, result["output"])
        self.assertNotIn("skipped", document)
        self.assertEqual(set(document["parts"]), self.parts())
        for name, part in document["parts"].items():
            if name in OF_THE_HOST and name not in document["failed"]:
                self.assertGreater(part["passed"], 2)
            else:
                self.assertIn(name, document["failed"])
                self.assertRegex(part["error"], r"skipped: |ended with |cut off after \d+ s|no time was left", name)
        self.assertRegex(document["parts"]["gpu_engine_test"]["error"], "GpuEngine.* needs a GPU: got .*(CUDA|plug-in)")

    def test_a_library_that_the_pack_lacks_is_named(self):
        self.assertIn("libxxhash.so.0", self.brings)
        for name in self.brings:
            lacking = self.folder / f"pack_without_{name}"
            shutil.copytree(self.folder / "pack", lacking, symlinks=True)
            (lacking / "lib" / name).unlink()
            result = self.run_check(pack=lacking)
            self.assertEqual(result["code"], 1, result["output"])
            self.assertEqual(self.document()["failed"], ["libraries"])
            self.assertIn(f"{name} => not found", self.document()["parts"]["libraries"]["error"])
            shutil.rmtree(lacking)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2])
        sys.exit(0)
    BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
    NAMESPACES, why_not = namespaces()
    if not NAMESPACES:
        print(f"skipped: this machine allows no namespaces of mounts and processes: {why_not}")
        sys.exit(77)
    unittest.main()
