# Every case of every test program belongs to exactly one entry of ctest, and every entry has cases.
#   entries_test.py FOLDER      the build's tests folder, with entries.txt and the programs
import collections
import fnmatch
import subprocess
import sys
from pathlib import Path

folder = Path(sys.argv[1])
entries = collections.defaultdict(list)  # program: (entry, patterns)
for line in (folder / "entries.txt").read_text().splitlines():
    name, program, choice = line.split("\t")
    entries[program].append((name, choice.split(":")))
faults, count = [], 0
for program, parts in entries.items():
    listed = subprocess.run([folder / program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    suite, found = "", collections.Counter()
    for line in listed.splitlines():
        line = line.split("#")[0].rstrip()
        if line.endswith(".") and not line.startswith(" "):
            suite = line
        elif line.startswith("  "):
            case = suite + line.strip()
            owners = [name for name, patterns in parts if any(fnmatch.fnmatchcase(case, p) for p in patterns)]
            found.update(owners)
            count += 1
            if len(owners) != 1:
                faults.append(f"{program}: {case} belongs to {' and '.join(owners) or 'no entry'}")
    faults += [f"{program}: entry {name} has no case" for name, _ in parts if not found[name]]
for fault in faults:
    print(fault)
print(f"{count} cases, {sum(map(len, entries.values()))} entries, {len(entries)} programs, {len(faults)} faults")
sys.exit(1 if faults or not count else 0)
