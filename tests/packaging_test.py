# The files of deploy/ for other package managers, and the navigation of the documentation site, agree with the places where
# versions, dependencies, paths and pages are decided. Needs no network and none of those programs (script/deploy-check).
#   packaging_test.py SOURCES
import json
import re
import subprocess
import sys
from pathlib import Path

sources = Path(sys.argv[1]).resolve()
faults = []


def text(name: str) -> str:
    return (sources / name).read_text()


def same(what: str, got: object, expected: object, home: str) -> None:
    if isinstance(got, dict) and isinstance(expected, dict):
        got, expected = set(got.items()), set(expected.items())
    if isinstance(got, set) and isinstance(expected, set):  # only what differs
        got, expected = sorted(got - expected), sorted(expected - got)
    if got != expected:
        faults.append(f"{what}: got {got}, expected {expected} as in {home}")


# A library of script/setup: its names in conda-forge, vcpkg and Conan Center. None: the recipe takes it from elsewhere.
LIBRARIES = {
    "libgloo-dev": (None, "gloo", None),
    "libhwy-dev": ("libhwy", "highway", "highway"),
    "libpcre2-dev": ("pcre2", "pcre2", "pcre2"),
    "libsodium-dev": ("libsodium", "libsodium", "libsodium"),
    "liburing-dev": ("liburing", "liburing", "liburing"),
    "libutf8proc-dev": ("libutf8proc", "utf8proc", "utf8proc"),
    "libxxhash-dev": ("xxhash", "xxhash", "xxhash"),
    "nlohmann-json3-dev": ("nlohmann_json", "nlohmann-json", "nlohmann_json"),
    "zlib1g-dev": ("zlib", "zlib", "zlib"),
}
# Only tests, benchmarks, fuzzing and the Python package need these.
NOT_LINKED = r"lib(gtest|gmock|benchmark|omp|clang-rt(-\d+)?|hwloc)-dev|python3-dev"
asked = set(re.findall(r"(?<![\w.-])(?:lib[\w.-]+|nlohmann-json3|zlib1g|python3)-dev\b", text("script/setup")))
asked = {name for name in asked if not re.fullmatch(NOT_LINKED, name)}
same("tests/packaging_test.py's LIBRARIES", set(LIBRARIES), asked, "script/setup: add it here and to the recipes")


def tested_versions() -> dict[str, str]:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", text("docs/dependencies.md"), re.M)
    found = {}
    for package in LIBRARIES:
        versions = [version for names, version in rows if re.search(rf"(?<![\w.-]){package}\b", names)]
        if len(versions) == 1 and re.match(r"[\d.]+", versions[0]):
            found[package] = re.match(r"[\d.]+", versions[0])[0]
        else:
            faults.append(f"docs/dependencies.md has {len(versions)} rows for {package}, expected one, with its version")
    return found


def least(column: int) -> dict[str, str]:
    """Names in one package manager, with the versions that libzero is tested with."""
    return {LIBRARIES[package][column]: version for package, version in tested_versions().items() if LIBRARIES[package][column]}


version = re.search(r'#define ZERO_VERSION "(.*)"', text("include/zero/version.h"))[1]
tested = re.search(r"ZERO_TESTED_TORCH (.*)\)", text("cmake/TorchVersions.cmake"))[1].split()
minors = [each.rpartition(".")[0] for each in tested]

# The image
expressions = re.findall(r"(\w+)=\$\(sed -nE '(.*?)' /setup\)", text("deploy/Dockerfile"))
same("deploy/Dockerfile's versions", [name for name, _ in expressions], ["torch", "numpy"], "what it installs")
for name, expression in expressions:
    command = ["sed", "-nE", expression, sources / "script/setup"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if not re.fullmatch(r"[\d.]+\n", found):
        faults.append(f"deploy/Dockerfile finds {found!r} for {name} in script/setup, expected one version")

# conda
recipe = text("deploy/conda/recipe.yaml")
same("recipe.yaml's version", re.findall(r'^  version: "(.*)"', recipe, re.M), [version], "include/zero/version.h")
window = [re.findall(rf'^  torch_{end}: "(.*)"', recipe, re.M) for end in ("oldest", "newest")]
same("recipe.yaml's torch", window, [[minors[0]], [minors[-1]]], "cmake/TorchVersions.cmake")
host = recipe.partition("  host:\n")[2].partition("\n\n")[0]
libraries = dict(re.findall(r"^    - (\S+) >=([\d.]+)$", host, re.M))
same("recipe.yaml's host packages", libraries, least(0), "docs/dependencies.md")
cmake = re.search(r"cmake_minimum_required\(VERSION (.*)\)", text("CMakeLists.txt"))[1]
same("recipe.yaml's CMake", re.findall(r"- cmake >=(.*)", recipe), [cmake], "CMakeLists.txt")
source = sources / "deploy/conda" / re.search(r"- path: (.*)", recipe)[1]
for inside in re.findall(r"source: \[(.*)\]", recipe) + re.findall(r"license_file: (.*)", recipe):
    if not (source / inside).exists():
        faults.append(f"recipe.yaml names {inside}, which does not exist")
for script in re.findall(r"^  script: (.*)", recipe, re.M):
    if not (sources / "deploy/conda" / script).is_file():
        faults.append(f"recipe.yaml names {script}, which does not exist")

# What an installation has.
programs = {"zero"}
for file in ("tools/CMakeLists.txt", "apps/CMakeLists.txt", "lab/CMakeLists.txt"):
    programs.update(re.findall(r"^zero_torch_program\(\w+ (\S+)", text(file), re.M))
same("recipe.yaml's programs", set(re.findall(r"bin/([\w-]+)", recipe)), programs, "CMakeLists.txt of tools, apps and lab")
for header in re.findall(r"include/zero/\w+\.h", recipe):
    if not (sources / header).exists():
        faults.append(f"recipe.yaml names {header}, which does not exist")

# vcpkg
port = json.loads(text("deploy/vcpkg/libzero/vcpkg.json"))
fields = {"name", "version", "description", "license", "supports", "dependencies", "features"}
same("vcpkg.json's fields", set(port), fields, "vcpkg's schema, with which these were compared")
same("vcpkg.json's version", port["version"], version, "include/zero/version.h")
same("vcpkg.json's licence", port["license"], re.search(r"license = \{ text = \"(.*)\"", text("pyproject.toml"))[1], "pyproject.toml")
names = {each for each in port["dependencies"] if isinstance(each, str)}
same("vcpkg.json's dependencies", names, {row[1] for row in LIBRARIES.values()}, "script/setup")
portfile = text("deploy/vcpkg/libzero/portfile.cmake")
tools = re.search(r"TOOL_NAMES (.*) AUTO_CLEAN", portfile)[1].split()
same("portfile.cmake's programs", set(tools), programs, "CMakeLists.txt of tools, apps and lab")

# Conan reads the version itself.
conan = text("deploy/conan/conanfile.py")
same("conanfile.py's requirements", dict(re.findall(r'requires\("(\w+)/\[>=([\d.]+) ', conan)), least(2), "docs/dependencies.md")
system = re.search(r"def system_requirements.*?Apt", conan, re.S)[0]
same("conanfile.py's packages of the system", set(re.findall(r'"([\w-]+-dev)"', system)), set(LIBRARIES), "script/setup")
exported = set(re.findall(r'"(\w+)"', re.search(r"for folder in \((.*)\)", conan)[1]))
folders = set(re.findall(r"^add_subdirectory\((\w+)\)", text("CMakeLists.txt"), re.M)) | {"cmake", "include"}
same("conanfile.py's folders", exported, folders, "CMakeLists.txt")

# The site: every page of docs/ can be reached, and nothing else is in the navigation.
entries = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", text("mkdocs.yml"), re.M)
for page in sorted({f"docs/{path.name}" for path in (sources / "docs").glob("*.md")} | {"README.md"}):
    if entries.count(page) != 1:
        faults.append(f"mkdocs.yml's navigation has {page} {entries.count(page)} times, expected once")
faults.extend(f"mkdocs.yml's navigation has {page}, which does not exist" for page in entries if not (sources / page).exists())

for fault in faults:
    print(fault)
print(f"{len(LIBRARIES)} libraries, {len(programs)} programs, {len(entries)} pages, {len(faults)} faults")
sys.exit(1 if faults else 0)
