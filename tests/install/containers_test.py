# libzero in what containers are like: little shared memory, no network, a read-only root file system, a user without a
# name, no HOME, and paths with blanks, quotes and other letters. Namespaces (unshare) take the place of a container's
# program; what is mounted there ends with each run.
#   containers_test.py BUILD [--python INTERPRETER] [NAME...]     NAME: unittest's. ZERO_NIGHTLY=1: the cases of the
#                                                                 class Nightly, without it the others
# Exit code 0; 1: a case failed, or all were skipped.
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(sys.argv.pop(1)).resolve()
PYTHON = os.path.abspath(sys.argv.pop(sys.argv.index("--python") + 1)) if "--python" in sys.argv else ""
if PYTHON:
    sys.argv.remove("--python")
ZERO = BUILD / "bin/zero"
USER = 12345
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3},
    "libzero": {"model": {"layers": 2, "hidden": 32, "heads": 2, "seq_length": 32}},
}
STRANGE = "a b'c\"d $e ü"
# ---- what a shell does in the new namespaces before the program ----
PRIVATE = "mount --make-rprivate /"
NO_LOOPBACK = ":"  # as a new namespace is
LOOPBACK = "ip link set lo up"
TMPFS = "mount -t tmpfs tmpfs /tmp"


def shared_memory(size: str) -> str:
    return f"mount -t tmpfs -o size={size} tmpfs /dev/shm"


def read_only(but: str = "") -> str:
    """All file systems that hold files, but this folder."""
    kinds = "proc|sysfs|devtmpfs|devpts|mqueue|cgroup2?"
    return (
        f"""awk '$3 !~ /^({kinds})$/ && $2 != "{but}" {{ print $2 }}' /proc/self/mounts | """
        'while read -r place; do mount -o remount,bind,ro "$place" 2>/dev/null || true; done; '
        f"for place in {ROOT} /dev/shm; do if touch $place/written 2>/dev/null; then "
        'echo "$place is not read-only" >&2; exit 99; fi; done'
    )


def as_user(command: list[str]) -> list[str]:
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]


def reachable(prefix: str) -> str:
    """An interpreter whose folder is in one that only root may enter becomes one that all may."""
    closed = next((folder for folder in reversed(Path(prefix).parents) if not folder.stat().st_mode & 1), None)
    if closed is None:
        return "true"
    if closed in BUILD.parents or closed in ROOT.parents:
        raise unittest.SkipTest(f"{closed}, which has the build, is closed to other users")
    return (
        f"exec 3<{prefix}; mount -t tmpfs -o mode=755 tmpfs {closed}; mkdir -p {prefix}; "
        f"mount -c --bind /proc/self/fd/3 {prefix}; exec 3<&-"
    )


class Container(unittest.TestCase):
    def setUp(self) -> None:
        # Not in /tmp, over which some cases mount.
        self.folder = Path(tempfile.mkdtemp(prefix="containers-", dir=BUILD / "tests"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.folder.chmod(0o755)
        self.config = self.folder / "config.json"
        self.config.write_text(json.dumps(CONFIG))

    def inside(
        self,
        lines: list[str],
        command: list,
        network: bool = True,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
        limit: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Runs the command after these lines of a shell, in namespaces of its own."""
        unshare = ["unshare", "--mount", *([] if network else ["--net"])]
        probe = subprocess.run([*unshare, "sh", "-c", PRIVATE], capture_output=True, text=True)
        if probe.returncode != 0:
            raise unittest.SkipTest(f"no namespaces here: {probe.stderr.strip()}")
        script = "\n".join(["set -eu", PRIVATE, *lines, f"exec {shlex.join(map(str, command))}"])
        return self.run_in(cwd or self.folder, [*unshare, "sh", "-c", script], environment, limit)

    def run_in(
        self, cwd: Path, command: list, environment: dict[str, str] | None = None, limit: float = 120
    ) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": os.environ["PATH"],
            "OMP_WAIT_POLICY": "passive",
            **({"HOME": "/root", "USER": "root"} if environment is None else environment),
        }
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=limit,
        )

    def training(self, out: Path, *more: object) -> list:
        return [
            ZERO,
            "run",
            "-n",
            "2",
            ZERO,
            "train",
            self.config,
            "--steps",
            "2",
            "--sample",
            "0",
            "--out",
            out,
            *more,
        ]

    def python(self, *words: object) -> list:
        if not PYTHON:
            raise unittest.SkipTest("no Python package in this build: script/setup --python")
        return [
            "env",
            f"PYTHONPATH={BUILD}/python",
            "PYTHONDONTWRITEBYTECODE=1",
            ZERO,
            "run",
            "-n",
            "2",
            PYTHON,
            *words,
        ]

    def prefix(self) -> str:
        if not PYTHON:
            raise unittest.SkipTest("no Python package in this build: script/setup --python")
        return subprocess.run(
            [PYTHON, "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True
        ).stdout.strip()

    def line_of(self, ended: subprocess.CompletedProcess[str], pattern: str) -> str:
        self.assertEqual(ended.returncode, 0, ended.stderr)
        found = re.search(pattern, ended.stdout, re.M)
        self.assertIsNotNone(found, ended.stdout)
        return found[0]

    def losses(self, ended: subprocess.CompletedProcess[str]) -> str:
        return self.line_of(ended, r"^\[0\] steps 2  loss (\S+)  held-out (\S+)")

    def expected(self) -> str:
        return self.losses(self.run_in(self.folder, self.training(self.folder / "expected")))

    def accessible(self) -> None:
        """Other users can start what was built, and read libtorch."""
        if os.getuid() != 0:
            raise unittest.SkipTest("only root can start a program as a user without a name")
        started = subprocess.run(as_user([str(ZERO), "train", "--help"]), capture_output=True, text=True, cwd="/")
        if started.returncode != 0:
            raise unittest.SkipTest(f"other users cannot start {ZERO}: {started.stderr.strip()}")

    def writable(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        os.chown(path, USER, USER)
        return path


class Containers(Container):
    # ---- shared memory ----
    def test_ranks_share_more_than_dev_shm_has(self) -> None:
        # Parameters and gradients of the model alone have 139 KB each.
        ended = self.inside([shared_memory("64k")], self.training(self.folder / "out"))
        self.assertIn("transport shm", ended.stderr)
        self.assertEqual(self.losses(ended), self.expected())

    def test_doctor_says_that_dev_shm_is_not_needed(self) -> None:
        ended = self.inside([shared_memory("32m")], [ZERO, "doctor", "--json"])
        rows = {row["item"]: row for row in json.loads(ended.stdout)["items"]}
        self.assertEqual(rows["/dev/shm"]["values"]["total_bytes"], 32 << 20)
        self.assertIn("do not need it", rows["/dev/shm"]["hint"])
        self.assertIn("--shm-size", rows["/dev/shm"]["hint"])

    # ---- network ----
    def test_ranks_of_one_host_need_no_network(self) -> None:
        if shutil.which("ip") is None:
            self.skipTest("no ip, which makes loopback available: script/setup (iproute2)")
        expected = self.expected()
        for number, loopback in enumerate((NO_LOOPBACK, LOOPBACK)):
            with self.subTest(loopback):
                ended = self.inside([loopback], self.training(self.folder / f"out{number}"), network=False)
                self.assertEqual(self.losses(ended), expected)

    # ---- files ----
    def test_a_read_only_root_with_tmp(self) -> None:
        ended = self.inside(
            [TMPFS, shared_memory("1m"), read_only(but="/tmp")],
            [*self.training(Path("/tmp/out")), "--checkpoint-dir", "/tmp/ck"],
        )
        self.assertEqual(self.losses(ended), self.expected())

    def test_nothing_writable_is_one_error_with_the_option(self) -> None:
        ended = self.inside(
            [shared_memory("1m"), read_only()], [ZERO, "run", "-n", "2", ZERO, "train", self.config, "--steps", "2"]
        )
        self.assertEqual(ended.returncode, 5, ended.stderr)
        error = re.findall(r"^  error +(.*)$", ended.stderr, re.M)
        self.assertEqual(len(error), 1, ended.stderr)
        self.assertRegex(
            error[0], r"^\[--out\] cannot write to runs/\S+: Read-only file system\. Hint: --out DIR names a folder"
        )
        self.assertEqual(ended.stderr.count("root cause"), 1)

    def test_commands_without_files_need_no_writable_folder(self) -> None:
        for words in (
            ["plan", "--model", "gpt2", "-n", "4"],
            ["explain", "stage", "3"],
            ["config", "check", self.config],
            ["doctor"],
        ):
            with self.subTest(words[0]):
                ended = self.inside([shared_memory("1m"), read_only()], [ZERO, *words])
                self.assertEqual(ended.returncode, 0, ended.stderr)
                self.assertEqual(ended.stderr, "")

    # ---- users ----
    def test_a_user_without_a_name_and_without_home(self) -> None:
        self.accessible()
        out = self.writable("out")
        ended = self.run_in(out, as_user(self.training(out / "run", "--checkpoint-dir", out / "ck")), environment={})
        self.assertEqual(self.losses(ended), self.expected())
        ended = self.run_in(out, as_user(["/bin/sh", "-c", "id -un 2>&1; exit 0"]), environment={})
        self.assertIn("cannot find name", ended.stdout)  # else this case shows nothing

    # ---- all at once, with Python, whose torch looks for a user's name and for a folder ----
    def test_python_in_a_bare_container(self) -> None:
        self.accessible()
        lines = [reachable(self.prefix()), NO_LOOPBACK, shared_memory("64k"), read_only()]
        ended = self.inside(
            lines,
            as_user(self.python(ROOT / "deploy/train.py", "--steps", "1")),
            network=False,
            environment={},
            cwd=Path("/"),
        )
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertRegex(ended.stdout, r"\[0\] 2 ranks, steps 0 to 1, loss [\d.]+, state \w+\n")

    # ---- paths ----
    def test_paths_with_blanks_quotes_and_other_letters(self) -> None:
        place = self.folder / STRANGE
        place.mkdir()
        shutil.copy(self.config, place / "my config.json")
        (place / "my script.sh").write_text('printf "%s\\n" "$@" >"rank $LOCAL_RANK"\n')
        ended = self.run_in(
            place,
            [
                ZERO,
                "run",
                "-n",
                "2",
                "--log-dir",
                "my logs",
                "--save-pid",
                "my pid",
                "-c",
                "my config.json",
                "--",
                "sh",
                "my script.sh",
                "an 'argument'",
                STRANGE,
            ],
        )
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertEqual([(place / f"rank {rank}").read_text() for rank in (0, 1)], [f"an 'argument'\n{STRANGE}\n"] * 2)
        self.assertEqual(len(list((place / "my logs").glob("*/rank-1.out"))), 1)
        train = [
            ZERO,
            "run",
            "-n",
            "2",
            ZERO,
            "train",
            "my config.json",
            "--sample",
            "0",
            "--checkpoint-dir",
            "my 'checkpoints'",
        ]
        ended = self.run_in(place, [*train, "--steps", "2", "--out", f"out {STRANGE}"])
        self.assertEqual(self.losses(ended), self.expected())
        self.assertTrue((place / f"out {STRANGE}" / "result.json").exists())
        ended = self.run_in(place, [*train, "--steps", "3", "--out", "continued", "--resume", "auto"])
        self.assertEqual(ended.returncode, 0, ended.stderr)
        ended = self.run_in(place, [ZERO, "checkpoint", "verify", "my 'checkpoints'"])
        self.assertEqual(
            (ended.returncode, ended.stdout.count("have the right hashes")), (0, 2), ended.stdout + ended.stderr
        )
        # The programs themselves: they find zero-torch and libzero next to them by their own path.
        for name in ("bin", "lib"):
            (place / name).mkdir()
        for name in ("zero", "zero-torch", "zero-train"):
            os.link(BUILD / "bin" / name, place / "bin" / name)
        ended = self.run_in(
            place,
            [
                place / "bin/zero",
                "run",
                "-n",
                "2",
                place / "bin/zero",
                "train",
                "my config.json",
                "--sample",
                "0",
                "--steps",
                "2",
                "--out",
                "moved",
            ],
        )
        self.assertEqual(self.losses(ended), self.expected())

    def test_offloaded_files_in_a_strange_folder(self) -> None:
        place = self.folder / STRANGE
        place.mkdir()
        offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(place)}}}
        self.config.write_text(json.dumps({**CONFIG, **offload}))
        ended = self.run_in(place, self.training(place / "out"))
        self.config.write_text(json.dumps(CONFIG))
        self.assertEqual(self.losses(ended), self.expected())


class Nightly(Container):
    def trained(self, ended: subprocess.CompletedProcess[str]) -> str:
        return self.line_of(ended, r"^\[0\] 2 ranks, .*$")

    def test_python_in_each_of_them(self) -> None:
        command = self.python(ROOT / "deploy/train.py", "--steps", "2")
        expected = self.trained(self.run_in(self.folder, command))
        for name, lines, network, user in (
            ("shared memory", [shared_memory("64k")], True, False),
            ("no loopback", [NO_LOOPBACK], False, False),
            ("loopback", [LOOPBACK], False, False),
            ("tmp only", [TMPFS, shared_memory("1m"), read_only(but="/tmp")], True, False),
            ("nothing writable", [shared_memory("1m"), read_only()], True, False),
            ("a user", [reachable(self.prefix())], True, True),
        ):
            with self.subTest(name):
                if user:
                    self.accessible()
                ended = self.inside(
                    lines, as_user(command) if user else command, network=network, environment={}, cwd=Path("/")
                )
                self.assertEqual(self.trained(ended), expected)

    def test_python_environment_and_scripts_with_blanks(self) -> None:
        place = self.folder / STRANGE
        place.mkdir()
        shutil.copy(ROOT / "deploy/train.py", place / "my script.py")
        expected = self.trained(self.run_in(self.folder, self.python(ROOT / "deploy/train.py", "--steps", "2")))
        packages = subprocess.run(
            [PYTHON, "-c", "import sys; print(':'.join(sys.path[1:]))"], capture_output=True, text=True, check=True
        ).stdout.strip()
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", place / "my env"], check=True)
        command = ["env", f"PYTHONPATH={BUILD}/python:{packages}", "PYTHONDONTWRITEBYTECODE=1", ZERO, "run", "-n", "2"]
        ended = self.run_in(
            place,
            [
                *command,
                place / "my env/bin/python",
                "my script.py",
                "--steps",
                "2",
                "--checkpoints",
                "my 'checkpoints'",
            ],
        )
        self.assertEqual(self.trained(ended), expected)
        self.assertTrue((place / "my 'checkpoints'" / "latest").exists())

    def test_a_clone_whose_path_has_blanks(self) -> None:
        with tempfile.TemporaryDirectory(prefix="clone a'b ü ", dir=self.folder) as name:
            clone = Path(name)
            files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "--null", "-T", "-", "-cf", clone / "files.tar"], cwd=ROOT, input=files, check=True)
            subprocess.run(["tar", "-xf", "files.tar"], cwd=clone, check=True)
            (clone / ".deps").mkdir()
            (clone / ".deps/libtorch").symlink_to((ROOT / ".deps/libtorch").resolve())
            ended = self.run_in(clone, ["script/build", "zero_program", "zero", "minimal"], limit=3000)
            self.assertEqual(ended.returncode, 0, ended.stdout[-4000:] + ended.stderr)
            for words in (
                [clone / "build/bin/zero", "plan", "--model", "gpt2"],
                [clone / "build/bin/zero", "run", "-n", "2", clone / "build/examples/minimal"],
            ):
                ended = self.run_in(clone, words)
                self.assertEqual(ended.returncode, 0, ended.stderr)


if __name__ == "__main__":
    names = sys.argv[1:] or ["Nightly" if "ZERO_NIGHTLY" in os.environ else "Containers"]
    result = unittest.TextTestRunner(verbosity=2).run(
        unittest.defaultTestLoader.loadTestsFromNames(names, sys.modules["__main__"])
    )
    for case, reason in result.skipped:
        print(f"skipped: {case}: {reason}")
    sys.exit(0 if result.wasSuccessful() and len(result.skipped) < result.testsRun else 1)
