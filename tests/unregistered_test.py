# Every file of tests runs: one that no entry of ctest names would never fail.
#   unregistered_test.py CTEST BUILD SOURCES [--python]     --python: the build has the Python package's tests
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
for path in sorted(missing):
    print(f"{path.relative_to(sources)} is in no entry of ctest")
print(f"{len(wanted) + len(programs)} files of tests, {len(missing)} without an entry")
sys.exit(1 if missing or not wanted else 0)
