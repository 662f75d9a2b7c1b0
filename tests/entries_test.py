# Every case of every test program belongs to exactly one entry of ctest (those of a matrix also to its nightly entry), and
# every entry has cases.
#   entries_test.py FOLDER gate|nightly   the build's tests folder, with entries.txt and the programs; gate: but those whose
#                                         whole files run at night, which script/test does not build
import collections
import fnmatch
import subprocess
import sys
from pathlib import Path

folder = Path(sys.argv[1])
entries = collections.defaultdict(list)  # program: (entry, patterns of its cases, patterns of those it leaves out)


def matches(case, patterns):
    return any(fnmatch.fnmatchcase(case, pattern) for pattern in patterns)


for line in (folder / "entries.txt").read_text().splitlines():
    name, program, choice = line.split("\t")
    chosen, _, left_out = choice.partition("-")
    if sys.argv[2] == "gate" and program.endswith("_nightly"):
        continue
    entries[program].append((name, chosen.split(":"), left_out.split(":")))
faults, count = [], 0
for program, parts in entries.items():
    listed = subprocess.run([folder / program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    suite, cases, found = "", [], collections.Counter()
    for line in listed.splitlines():
        line = line.split("#")[0].rstrip()
        if line.endswith(".") and not line.startswith(" "):
            suite = line
        elif line.startswith("  "):
            case = suite + line.strip()
            owners = [name for name, chosen, left_out in parts if matches(case, chosen) and not matches(case, left_out)]
            found.update(owners)
            cases.append(case)
            count += 1
            if len({owner.removesuffix("_nightly") for owner in owners}) != 1:
                faults.append(f"{program}: {case} belongs to {' and '.join(owners) or 'no entry'}")
    faults += [f"{program}: entry {name} has no case" for name, *_ in parts if not found[name]]
    faults += [f"{program}: entry {name}: no case is {pattern}" for name, chosen, _ in parts for pattern in chosen
               if not any(matches(case, [pattern]) for case in cases)]
for fault in faults:
    print(fault)
print(f"{count} cases, {sum(map(len, entries.values()))} entries, {len(entries)} programs, {len(faults)} faults")
sys.exit(1 if faults or not count else 0)
