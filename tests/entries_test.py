# Every case of every test program belongs to exactly one entry of ctest (those of a matrix also to its nightly entry), and
# every entry has cases. With gate, also: docs/testing.md says how many faults of tests/mutants.txt these cases should detect.
#   entries_test.py FOLDER gate|nightly   the build's tests folder, with entries.txt and the programs; gate: but those whose
#                                         whole files run at night, which script/test does not build
import collections
import fnmatch
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

script = importlib.machinery.SourceFileLoader("mutants", str(Path(__file__).parents[1] / "script/mutants"))
mutants = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutants", script))
script.exec_module(mutants)
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
    cases, found = mutants.listed(folder / program), collections.Counter()
    for case in cases:
        owners = [name for name, chosen, left_out in parts if matches(case, chosen) and not matches(case, left_out)]
        found.update(owners)
        count += 1
        if len({owner.removesuffix("_nightly") for owner in owners}) != 1:
            faults.append(f"{program}: {case} belongs to {' and '.join(owners) or 'no entry'}")
    faults += [f"{program}: entry {name} has no case" for name, *_ in parts if not found[name]]
    faults += [f"{program}: entry {name}: no case is {pattern}" for name, chosen, _ in parts for pattern in chosen
               if not any(matches(case, [pattern]) for case in cases)]
for fault in faults:
    print(fault)
print(f"{count} cases, {sum(map(len, entries.values()))} entries, {len(entries)} programs, {len(faults)} faults")
page = mutants.show_classes(folder.parent, check=True, write=False) if sys.argv[2] == "gate" else 0
sys.exit(1 if faults or not count or page else 0)
