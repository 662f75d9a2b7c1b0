# The version has one home, include/zero/version.h. What people read, and what the program says, agree with it.
#   version_test.py PROGRAM SOURCES     PROGRAM: zero
import re
import subprocess
import sys
from pathlib import Path

program, sources = sys.argv[1], Path(sys.argv[2])
header = (sources / "include/zero/version.h").read_text()
version = re.search(r'#define ZERO_VERSION "(.*)"', header)[1]
faults = []


def compare(place: str, found: list[str]) -> None:
    if not found:
        faults.append(f"{place} names no version")
    faults.extend(f"{place} has {other}, expected {version} as in include/zero/version.h" for other in found if other != version)


compare("ZERO_VERSION_MAJOR, _MINOR and _PATCH", [".".join(re.findall(r"#define ZERO_VERSION_[A-Z]+ (\d+)", header))])
compare("CHANGELOG.md's newest release", re.findall(r"^## \[(\d.*?)\]", (sources / "CHANGELOG.md").read_text(), re.M)[:1])
compare("README.md's status", re.findall(r"status of version (\S+)", (sources / "README.md").read_text()))
minor = version.rpartition(".")[0]
compare("README.md's wheel", re.findall(r"libzero-([\d.]+)\+torch", (sources / "README.md").read_text()))
for file in ("README.md", "tests/install/consumer/CMakeLists.txt"):
    found = re.findall(r"find_package\(zero (\S+) ", (sources / file).read_text())
    compare(f"{file}'s find_package()", [version if other == minor else other for other in found])
for path in sorted(path for path in (sources / "deploy").rglob("*") if path.is_file()):
    images = re.findall(r"libzero:(\d\S*)", path.read_text())
    if images:
        compare(str(path.relative_to(sources)), images)

# The versions of torch have theirs in cmake/TorchVersions.cmake.
tested = re.search(r"ZERO_TESTED_TORCH (.*)\)", (sources / "cmake/TorchVersions.cmake").read_text())[1].split()
minors = [int(each.split(".")[1]) for each in tested]
if minors != list(range(minors[0], minors[-1] + 1)):
    faults.append(f"ZERO_TESTED_TORCH has {tested}, expected one of each minor version, the oldest first")
chosen = re.search(r"^torch=\$\{ZERO_TORCH:-(.*)\}", (sources / "script/setup").read_text(), re.M)[1]
if chosen != tested[-1]:
    faults.append(f"script/setup takes torch {chosen}, expected {tested[-1]}, the newest tested one")
for file in ("README.md", "docs/dependencies.md"):
    if f"2.{minors[0]} to 2.{minors[-1]}" not in (sources / file).read_text():
        faults.append(f"{file} does not say that torch may be 2.{minors[0]} to 2.{minors[-1]}")
answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
compare("zero --version", re.findall(r"zero (\S+)", answer))
for fault in faults:
    print(fault)
sys.exit(1 if faults else 0)
