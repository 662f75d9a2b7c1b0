# script/setup on other systems: which packages it installs, and what it says where it may not. The systems are an
# os-release file and programs in PATH that answer as theirs do.
#   setup_test.py [NAME...]     unittest's arguments
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = [
    "awk",
    "bash",
    "cat",
    "df",
    "dirname",
    "env",
    "flock",
    "grep",
    "head",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sed",
    "sort",
    "touch",
    "uname",
]
SYSTEMS = {
    "Debian 13": ("Debian GNU/Linux 13 (trixie)", "debian", "", "13", ""),
    "Ubuntu 24.04": ("Ubuntu 24.04.2 LTS", "ubuntu", "debian", "24.04", "noble"),
    "Ubuntu 22.04": ("Ubuntu 22.04.5 LTS", "ubuntu", "debian", "22.04", "jammy"),
    "Mint 21": ("Linux Mint 21.3", "linuxmint", "ubuntu debian", "21.3", "jammy"),
    "Rocky 9": ("Rocky Linux 9.4 (Blue Onyx)", "rocky", "rhel centos fedora", "9.4", ""),
    "RHEL 9": ("Red Hat Enterprise Linux 9.4 (Plow)", "rhel", "fedora", "9.4", ""),
    "Fedora 42": ("Fedora Linux 42", "fedora", "", "42", ""),
    "Arch": ("Arch Linux", "arch", "", "", ""),
}
OS_RELEASE = ("PRETTY_NAME", "ID", "ID_LIKE", "VERSION_ID", "UBUNTU_CODENAME")
# Answers: its version, what it does not find in place of a preprocessed text, the path of a library.
COMPILER = """#!/bin/bash
case $1 in
  -dump*) echo {version} ;;
  --version) echo "{kind} {version}" ;;
  -print-file-name=*) name=${{1#*=}}
    case " {libraries} " in *" $name "*) echo "$name" ;; *) echo "/usr/lib/$name" ;; esac ;;
  *) while read -r line; do for header in {headers}; do
       if [[ $line = "@<$header>: not found" ]]; then echo "$line"; fi; done; done
     echo '{text}' ;;
esac
"""
PYTHON = """#!/bin/bash
case "$*" in
  *platform*) echo {version} ;;
  *--target*) while [ "$1" != --target ]; do shift; done; mkdir -p "$2" ;;
  *) {pip} ;;
esac
"""


def words_after(text: str, command: str) -> list[str]:
    """The arguments that a line of the message gives to this command."""
    return re.search(rf"^ +.*{re.escape(command)} (.*)$", text, re.M)[1].split()


class Setup(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        tree = self.folder / "tree"
        (tree / "script").mkdir(parents=True)
        shutil.copy(ROOT / "script/setup", tree / "script")
        for name in ("CMakeLists.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, tree)
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or self.fail(f"no {tool}"))
        (self.folder / "torch/lib").mkdir(parents=True)
        (self.folder / "torch/lib/libtorch_cpu.so").touch()
        self.program("id", "#!/bin/bash\necho 1000\n")

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def compiler(
        self, version: str, name: str = "g++", kind: str = "g++", headers: str = "", libraries: str = "", text: str = ""
    ) -> None:
        self.program(
            name, COMPILER.format(version=version, kind=kind, headers=headers or "''", libraries=libraries, text=text)
        )

    def tools(self, cmake: str = "3.31.6", python: str = "3.12.3", pip: str = "true") -> None:
        for tool in ("make", "ninja"):
            self.program(tool, "#!/bin/bash\n")
        self.program("cmake", f"#!/bin/bash\necho cmake version {cmake}\n")
        self.program("python3", PYTHON.format(version=python, pip=pip))

    def apt(self, installed: str = "", absent: str = "") -> None:
        """dpkg-query knows `installed`; apt-get has not the packages `absent`, and notes what it is asked for."""
        self.program(
            "dpkg-query",
            f"""#!/bin/bash
for package in "$@"; do
  if [[ " {installed} " = *" $package "* ]] || grep -qxF -- "$package" '{self.folder}/asked' 2>/dev/null; then
    echo "$package installed"
  fi
done
""",
        )
        self.program(
            "apt-get",
            f"""#!/bin/bash
[ "$1" = install ] || exit 0
for word in "$@"; do
  if [[ " {absent} " = *" $word "* ]]; then exit 100; fi
done
for word in "$@"; do
  case $word in -* | install | Dpkg*) ;; *) echo "$word" >>'{self.folder}/asked' ;; esac
done
""",
        )

    def asked(self) -> set[str]:
        path = self.folder / "asked"
        return set(path.read_text().split()) if path.exists() else set()

    def setup_on(self, system: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
        release = self.folder / "os-release"
        release.unlink(missing_ok=True)
        if system is not None:
            facts = zip(OS_RELEASE, SYSTEMS[system], strict=True)
            release.write_text("".join(f'{name}="{value}"\n' for name, value in facts if value))
        environment = {
            "PATH": str(self.bin),
            "ZERO_OS_RELEASE": str(release),
            "ZERO_TORCH_DIR": str(self.folder / "torch"),
            **variables,
        }
        return subprocess.run(
            [self.folder / "tree/script/setup"],
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    def refused(self, system: str | None, **variables: str) -> str:
        ended = self.setup_on(system, **variables)
        self.assertEqual(ended.returncode, 1, ended.stderr)
        self.assertFalse((self.folder / "tree/.deps/libtorch").exists())
        self.assertEqual(ended.stderr.count("error:"), 1, ended.stderr)
        return ended.stderr

    # ---- all is there ----
    def test_a_system_that_has_all_is_accepted(self) -> None:
        self.compiler("12.2.0")
        self.tools()
        for system in (*SYSTEMS, None):
            with self.subTest(system):
                ended = self.setup_on(system)
                self.assertEqual((ended.returncode, ended.stderr.count("error")), (0, 0), ended.stderr)

    # ---- RHEL 9 ----
    def test_rhel_without_anything_names_all_of_its_own_packages(self) -> None:
        for system, name in (("Rocky 9", "Rocky Linux 9.4"), ("RHEL 9", "Red Hat Enterprise Linux 9.4")):
            with self.subTest(system):
                text = self.refused(system)
                self.assertIn(name, text)
                packages = re.findall(r"^ +dnf install (gcc-toolset.*)$", text, re.M)[0].split()
                self.assertEqual(
                    packages,
                    [
                        "gcc-toolset-13-gcc-c++",
                        "make",
                        "cmake",
                        "ninja-build",
                        "python3.12",
                        "python3.12-pip",
                        "json-devel",
                        "highway-devel",
                        "xxhash-devel",
                        "libsodium-devel",
                        "zlib-devel",
                        "pcre2-devel",
                        "utf8proc-devel",
                        "gtest-devel",
                        "gmock-devel",
                    ],
                )
                for word in (
                    "epel-release",
                    "set-enabled crb",
                    "/opt/rh/gcc-toolset-13/enable",
                    "No package of this system has gloo/context.h: https://github.com/",
                    "there is no compiler: these are all of them",
                ):
                    self.assertIn(word, text)
                self.assertNotRegex(text, r"apt-get|libhwy-dev")

    def test_what_is_missing_is_said_at_once(self) -> None:
        self.compiler(
            "11.5.0", headers="hwy/highway.h gloo/context.h", libraries="libutf8proc.so libutf8proc.a libz.so"
        )
        self.tools(cmake="3.20.2", python="3.9.18", pip="exit 1")
        (self.bin / "ninja").unlink()
        text = self.refused("Rocky 9")
        for line in (
            "got g++ 11.5.0, expected 12 or newer",
            "got cmake 3.20.2, expected 3.25 or newer",
            "ninja: not found",
            "got python3 3.9.18, expected 3.10 or newer",
            "python3 -m pip: does not run",
            "<hwy/highway.h>: not found",
            "<gloo/context.h>: not found",
            "libutf8proc: not found",
        ):
            self.assertIn(f"\n  {line}\n", text)
        self.assertNotIn("libz", text)  # libz.a is there
        packages = re.findall(r"^ +dnf install (gcc-toolset.*)$", text, re.M)[0].split()
        self.assertEqual(
            packages,
            [
                "gcc-toolset-13-gcc-c++",
                "cmake",
                "ninja-build",
                "python3.12",
                "python3.12-pip",
                "highway-devel",
                "utf8proc-devel",
            ],
        )

    # ---- Debian and Ubuntu ----
    def test_apt_is_given_the_names_of_the_system(self) -> None:
        for system, column, absent in (
            ("Debian 13", 1, []),
            ("Ubuntu 24.04", 1, []),
            ("Ubuntu 22.04", 2, ["cmake", "libhwy-dev", "g++"]),
            ("Mint 21", 2, ["cmake", "libhwy-dev", "g++"]),
        ):
            with self.subTest(system):
                (self.folder / "asked").unlink(missing_ok=True)
                self.compiler("13.2.0")
                self.tools()
                self.apt()
                self.program("id", "#!/bin/bash\necho 0\n")
                ended = self.setup_on(system)
                self.assertEqual(ended.returncode, 0, ended.stderr)
                self.assertLessEqual(
                    {"g++" if column == 1 else "g++-12", "ninja-build", "libgloo-dev", "libpcre2-dev", "ccache"},
                    self.asked(),
                )
                for name in absent:
                    self.assertNotIn(name, self.asked())

    def test_an_optional_package_that_is_not_there_is_left_out_once(self) -> None:
        self.compiler("13.2.0")
        self.tools()
        self.apt(absent="chromium fio")
        self.program("id", "#!/bin/bash\necho 0\n")
        self.assertEqual(self.setup_on("Ubuntu 24.04").returncode, 0)
        self.assertEqual((self.folder / "tree/.deps/unavailable").read_text().split()[:2], ["fio", "chromium"])
        self.assertLessEqual({"g++", "ccache", "iso-codes"}, self.asked())
        (self.folder / "asked").unlink()
        self.apt(installed=" ".join(self.asked()), absent="chromium fio")
        self.assertEqual(self.setup_on("Ubuntu 24.04").returncode, 0)
        self.assertNotIn("fio", self.asked())

    def test_a_user_who_may_not_install_gets_the_whole_command(self) -> None:
        self.apt(installed="make")
        for system, compiler in (("Debian 13", "g++"), ("Ubuntu 24.04", "g++"), ("Ubuntu 22.04", "g++-12")):
            with self.subTest(system):
                text = self.refused(system)
                packages = words_after(text, "apt-get install --no-install-recommends")
                self.assertEqual(packages[0], compiler)
                self.assertLessEqual(
                    {"libgloo-dev", "libutf8proc-dev", "nlohmann-json3-dev", "libgtest-dev", "python3-pip"},
                    set(packages),
                )
                self.assertEqual("libhwy-dev" in packages, system != "Ubuntu 22.04")
        self.assertEqual(self.asked(), set())

    def test_ubuntu_22_04_takes_its_newer_compiler_and_other_sources(self) -> None:
        self.apt()
        self.compiler("11.4.0")
        self.compiler("12.3.0", name="g++-12", text="@<hwy/highway.h>: got version 0.16, expected 1.0 or newer")
        self.tools(cmake="3.22.1", python="3.10.12")
        text = self.refused("Ubuntu 22.04")
        self.assertIn("got g++ 11.4.0, expected 12 or newer. g++-12 is there: export CXX=g++-12\n", text)
        self.assertIn("has cmake: python3 -m pip install --user cmake\n", text)
        self.assertNotIn("libhwy", text)  # the old compiler is the one that was asked, and found it
        text = self.refused("Ubuntu 22.04", CXX="g++-12")
        self.assertNotIn("g++ 11.4.0", text)
        self.assertIn("<hwy/highway.h>: got version 0.16, expected 1.0 or newer\n", text)
        self.assertIn("has hwy/highway.h: https://github.com/google/highway", text)
        self.compiler("12.3.0", name="g++-12")
        self.tools(python="3.10.12")
        self.assertEqual(self.setup_on("Ubuntu 22.04", CXX="g++-12").returncode, 0)

    # ---- others ----
    def test_a_system_without_known_names_gets_those_of_debian(self) -> None:
        self.compiler("15.1.0", headers="utf8proc.h")
        self.tools()
        for system, name in (("Arch", "Arch Linux"), ("Fedora 42", "Fedora Linux 42"), (None, "unknown")):
            with self.subTest(system):
                text = self.refused(system)
                self.assertIn(f"this system ({name}", text)
                self.assertIn("<utf8proc.h>: not found", text)
                self.assertIn("In Debian 12 and 13 they are: libutf8proc-dev\n", text)
                self.assertNotRegex(text, "apt-get|dnf")

    def test_an_old_clang_is_refused(self) -> None:
        self.compiler("14.0.6", name="clang++", kind="Debian clang version")
        self.compiler("16.0.6", name="clang++-16", kind="Debian clang version")
        self.tools()
        self.assertIn("got clang++ 14.0.6, expected 16 or newer\n", self.refused("Debian 13", CXX="clang++"))
        self.assertEqual(self.setup_on("Debian 13", CXX="clang++-16").returncode, 0)


if __name__ == "__main__":
    unittest.main()
