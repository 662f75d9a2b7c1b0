# Every file of tests runs: one that no entry of ctest names would never fail. And script/check names only tests that exist.
#   unregistered_test.py CTEST BUILD SOURCES [--python]     --python: the build has the Python package's tests
import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

ctest, build, sources = sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve()
declared = "".join(path.read_text() for path in (sources / "tests").rglob("CMakeLists.txt"))
words = set(re.findall(r"[\w./-]+", declared))
names = {Path(word).name for word in words}
case = re.compile(r"^(TYPED_)?TEST(_[FP])?\(", re.M)
wanted = [path for path in (sources / "tests").rglob("*.cpp") if case.search(path.read_text())]
missing = [path for path in wanted if str(path.relative_to(sources / "tests")) not in words]
programs = list((sources / "tests").rglob("*_test.py"))
missing += [path for path in programs if path.name not in names]
if "--python" in sys.argv[4:]:
    command = [ctest, "--test-dir", build, "--show-only=json-v1"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    entries = [test.get("command", []) for test in json.loads(listed.stdout)["tests"]]
    run = {str(Path(word).resolve()) for command in entries for word in command if word.endswith(".py")}
    package = list((sources / "python" / "tests").rglob("test_*.py"))
    programs += package
    missing += [path for path in package if str(path) not in run]
# What script/check would run exists.
loader = importlib.machinery.SourceFileLoader("check", str(sources / "script" / "check"))
check = importlib.util.module_from_spec(importlib.util.spec_from_loader("check", loader))
loader.exec_module(check)
entry = re.compile(r"(?:zero_test_file\(|add_test\(NAME )(\w+)")
known = {name for folder in ("tests", "examples") for path in (sources / folder).rglob("CMakeLists.txt")
         for name in entry.findall(path.read_text())}
known |= {f"python_{path.stem.removeprefix('test_')}_test" for path in (sources / "python" / "tests").glob("test_*.py")}
rows = {word for row in (check.ALWAYS, *check.ROWS.values()) for word in row}
unknown = {word for word in rows if not (word == "*" or word in known or (sources / "tests" / "unit" / word).is_dir())}
for word in sorted(unknown):
    print(f"script/check names {word}, which is no entry of ctest and no folder of tests/unit")
for path in sorted(missing):
    print(f"{path.relative_to(sources)} is in no entry of ctest")
print(f"{len(wanted) + len(programs)} files of tests, {len(missing)} without an entry")
sys.exit(1 if missing or unknown or not wanted else 0)
