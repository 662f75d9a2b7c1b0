# Every entry of golden/mesh_errors.txt is named by one literal of the tests' sources, and the entries are sorted.
import collections
import sys
from pathlib import Path

tests = Path(__file__).resolve().parent
names = [line for line in (tests / "golden" / "mesh_errors.txt").read_text().splitlines() if line[:1].strip()]
uses = collections.Counter()
for file in tests.rglob("*_test.cpp"):
    text = file.read_text()
    if "support/golden_texts.h" in text:
        uses.update({name: text.count(f'"{name}"') for name in names})
faults = [f"{name}: used {uses[name]} times, expected once" for name in names if uses[name] != 1]
if names != sorted(names):
    faults.append("the entries are not sorted")
for fault in faults:
    print(fault)
print(f"{len(names)} entries, {len(faults)} faults")
sys.exit(1 if faults or not names else 0)
