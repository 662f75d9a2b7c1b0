"""The machine code of libzero_cuda.so, disassembled: no local memory, wide loads, loads issued before their first use,
argument blocks that a launch accepts. No GPU.

python3 tests/gpu/assembly_test.py LIBRARY     Exit code 77: no library or no disassembler (script/setup fetches it)
"""

import collections
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOLS = ROOT / ".deps" / "disassembler" / "nvidia" / "cu13" / "bin"
LIBRARY = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 else ROOT / "build/lib/libzero_cuda.so"

# Optimizer states of each update rule, as the kernels' mangled names have it.
SLOTS = {"4AdamILb0ELb0E": 2, "4AdamILb1ELb0E": 2, "4AdamILb0ELb1E": 3, "4AdamILb1ELb1E": 3, "3SgdILb0E": 0, "3SgdILb1E": 1,
         "7Adagrad": 1, "4Lion": 1, "7RmsPropILb0ELb0E": 1, "7RmsPropILb1ELb0E": 2, "7RmsPropILb0ELb1E": 2,
         "7RmsPropILb1ELb1E": 3, "5NAdam": 2, "5RAdam": 2, "6Adamax": 2, "8Adadelta": 2}
BODIES = {"8SumParts": (1, 1), "10Accumulate": (2, 2), "5Scale": (1, 1)}  # loads of a quad: of fp32, of 16 bits
MOST_ARGUMENT_BYTES = 32764  # kMostArgumentBytes of launches.h
MOST_BYTES_OF_PARTS = 4096  # Parts of elements.h
LOADS_IN_FLIGHT = 8

Instruction = collections.namedtuple("Instruction", "at guard opcode target sources text")


def tool(name):
    return str(TOOLS / name) if (TOOLS / name).exists() else shutil.which(name)


def dump(*options):
    folders = [str(pathlib.Path(tool(name)).parent) for name in ("cuobjdump", "nvdisasm")]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])  # cuobjdump starts nvdisasm
    done = subprocess.run([tool("cuobjdump"), *options, str(LIBRARY)], capture_output=True, text=True,
                          env={**os.environ, "PATH": path})
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump {' '.join(options)}: {done.stderr}")
    return done.stdout


# Without the namespaces, whose last has a hash in its name: update_kernelI..4LionEE...
def short(name):
    return re.search(r"(?:\d)([a-z_]+_kernel(?!s_cu).*)", name).group(1)


# {kernel: (bytes of its stack, bytes of other local memory)}
def stacks(text):
    found = re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return {short(name): (int(stack), int(local)) for name, stack, local in found}


# 128 bits are four registers from the one that is named.
def registers(name, opcode):
    count = 4 if ".128" in opcode else 2 if ".64" in opcode else 1
    return {f"R{int(name[1:]) + k}" for k in range(count)} if re.fullmatch(r"R\d+", name) else set()


def instruction(line):
    found = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*(.*?)\s*;", line)
    if not found:
        return None
    at, guard, opcode, operands = found.groups()
    named = re.findall(r"\bR\d+\b", operands)
    first = operands.split(",")[0].strip()
    target = first if re.fullmatch(r"R\d+", first) else ""  # stores and jumps only read
    sources = set(named if not target else re.findall(r"\bR\d+\b", operands.partition(",")[2]))
    if opcode.startswith("STG"):
        sources |= registers(named[-1], opcode) if named else set()
    if opcode.startswith("D"):  # fp64: pairs of registers
        sources |= {f"R{int(name[1:]) + 1}" for name in sources}
    return Instruction(int(at, 16), guard or "", opcode, target, sources, line.split("/* 0x")[0].strip())


# {architecture: {kernel: instructions}}
def parse(text):
    kernels, architecture, code = collections.defaultdict(dict), "", None
    for line in text.splitlines():
        if line.startswith("arch = "):
            architecture = line.split()[2]
        elif "Function :" in line:
            code = kernels[architecture].setdefault(short(line.split(":")[1].strip()), [])
        elif code is not None and (one := instruction(line)):
            code.append(one)
    return kernels


@functools.cache
def disassembled():
    return dump("-sass")


# {kernel: bytes of its arguments}
def argument_bytes(text):
    sizes, name, wanted = {}, "", False
    for line in text.splitlines():
        if line.startswith(".nv.info._Z"):
            name = short(line.removeprefix(".nv.info."))
        elif "EIATTR_" in line:
            wanted = "EIATTR_CBANK_PARAM_SIZE" in line
        elif wanted and name and "Value:" in line:
            sizes[name] = int(line.split()[-1], 16)
    return sizes


def is_load(one):
    return one.opcode.startswith("LDG")


def basic_blocks(code):
    starts = {target for one in code if (target := branch_target(one)) is not None}
    block = []
    for one in code:
        if one.at in starts and block:
            yield block
            block = []
        block.append(one)
        if one.opcode.startswith(("BRA", "EXIT", "RET")):
            yield block
            block = []
    if block:
        yield block


def branch_target(one):
    found = re.search(r"BRA\S*\s.*?(0x[0-9a-f]+)", one.text)
    return int(found.group(1), 16) if found else None


def local_memory(code):
    return [one.text for one in code if one.opcode.startswith(("LDL", "STL"))]


def wide_loads(code):
    return [sum(is_load(one) and width in one.opcode for one in code) for width in (".128", ".64")]


# Loads of a block before the first instruction that reads the result of one of them.
def loads_before_use(block):
    loaded, count = set(), 0
    for one in block:
        if loaded & one.sources:
            return count
        if is_load(one):
            loaded |= registers(one.target, one.opcode)
            count += 1
    return count


# The loops of square_pieces_kernel that are one block: {dtype: loads before the first use of each, in order}. One loop
# with a single load may be there: what the compiler puts before a loop that it unrolls.
def square_loops(code):
    loops = collections.defaultdict(list)
    for block in basic_blocks(code):
        loads = [one for one in block if is_load(one)]
        adds = any(one.opcode == "DFMA" for one in block)
        if not loads or not adds or branch_target(block[-1]) != block[0].at:
            continue
        bits16 = all(".U16" in one.opcode for one in loads)
        dtype = "fp32" if not bits16 else "fp16" if any("HADD2" in one.opcode for one in block) else "bf16"
        loops[dtype].append(loads_before_use(block))
    return {dtype: sorted(counts) for dtype, counts in loops.items()}


# What is wrong on the paths of an update that begin with its first load of 128 bits: a result is read before all
# `needed` loads are issued, or the path ends before.
def early_reads(code, needed):
    index = {one.at: k for k, one in enumerate(code)}
    faults, seen, complete = set(), set(), 0
    stack = [(0, frozenset(), 0)]
    while stack:
        k, loaded, count = stack.pop()
        while k < len(code) and (k, loaded, count) not in seen:
            seen.add((k, loaded, count))
            one = code[k]
            if loaded & one.sources:
                faults.add(f"read after {count} of {needed} loads: {one.text}")
                break
            if is_load(one) and (count > 0 or ".128" in one.opcode):
                loaded, count = loaded | registers(one.target, one.opcode), count + 1
                if count == needed:
                    complete += 1
                    break
            if one.opcode.startswith(("EXIT", "RET")) and not one.guard:
                if count > 0:
                    faults.add(f"only {count} of {needed} loads before {one.text}")
                break
            target = branch_target(one)
            if target is not None:
                if one.guard:
                    stack.append((k + 1, loaded, count))
                if target == one.at:  # behind the end
                    break
                k = index[target]
            else:
                k += 1
    if complete == 0:
        faults.add(f"no path has {needed} loads")
    return faults


def find(kernels, pattern):
    return {name: code for name, code in kernels.items() if re.match(pattern, name)}


def argument_faults(sizes):
    limits = {name: MOST_BYTES_OF_PARTS if "SumParts" in name else MOST_ARGUMENT_BYTES for name in sizes}
    return [f"{name}: {size} bytes of arguments, expected at most {limits[name]}"
            for name, size in sizes.items() if size > limits[name]]


# Everything that is wrong with the instructions, as lines.
def faults_of(text):
    faults = []
    architectures = parse(text)
    for architecture, kernels in architectures.items():
        def wrong(name, what):
            faults.append(f"{architecture} {name}: {what}")

        def one_of(pattern):
            found = find(kernels, pattern)
            if len(found) != 1:
                wrong(pattern, f"got {len(found)} kernels of this name, expected one")
            return next(iter(found.items()), ("", []))
        for name, code in kernels.items():
            for line in local_memory(code):
                wrong(name, f"local memory: {line}")
        for body, expected in BODIES.items():
            name, code = one_of(rf"quads_kernel.*{body}E")
            got = wide_loads(code)
            if any(g < e for g, e in zip(got, expected)):
                wrong(name, f"got {got} loads of 128 and 64 bits, expected at least {expected}")
            one_of(rf"elements_kernel.*{body}E")
        for rule, slots in SLOTS.items():
            name, code = one_of(rf"update_kernelINS\d_{rule}")
            got = wide_loads(code)
            if got[0] < slots + 2 or got[1] < 1:
                wrong(name, f"got {got} loads of 128 and 64 bits, expected at least {slots + 2} and 1")
            # Of masters and states in 16 bits: the dtype of each is known when the kernel runs.
            narrow, narrow_code = one_of(rf"update_kernelINS\d_6NarrowINS\d_{rule}")
            got = wide_loads(narrow_code)
            if min(got) < slots + 2:
                wrong(narrow, f"got {got} loads of 128 and 64 bits, expected at least {slots + 2} of both")
            for line in sorted(early_reads(code, slots + 2)):
                wrong(name, line)
        name, code = one_of("square_pieces_kernel")
        loops = square_loops(code)
        for dtype in ("fp32", "bf16", "fp16"):
            counts = loops.get(dtype, [])
            rows = counts[1:] if counts[:1] == [1] else counts
            if not rows or rows[0] < LOADS_IN_FLIGHT:
                wrong(name, f"{dtype}: got loops with {counts} loads before the first use, expected {LOADS_IN_FLIGHT}")
        one_of("add_pieces_kernel")
        one_of("non_finite_kernel")
    if "sm_90" not in architectures:
        faults.append(f"got code for {sorted(architectures)}, expected sm_90 too")
    return faults


class Assembly(unittest.TestCase):
    def test_no_local_memory_and_loads_that_are_wide_and_early(self):
        self.assertEqual(faults_of(disassembled()), [])

    def test_no_kernel_has_a_stack(self):
        for architecture, kernels in parse(disassembled()).items():
            found = stacks(dump("-arch", architecture, "-res-usage"))
            self.assertEqual(set(found), set(kernels))
            self.assertEqual({name: sizes for name, sizes in found.items() if sizes != (0, 0)}, {}, architecture)

    def test_arguments_fit_into_a_launch(self):
        for architecture, kernels in parse(disassembled()).items():
            sizes = argument_bytes(dump("-arch", architecture, "-elf"))
            self.assertEqual(set(sizes), set(kernels))
            self.assertEqual(argument_faults(sizes), [], architecture)


# Changed text of the disassembler, to show that each check can fail.
class PlantedFaults(unittest.TestCase):
    # Of sm_90 only, which is enough.
    def whole(self):
        return disassembled()[disassembled().rindex("arch = sm_90"):]

    def test_without_a_fault(self):
        self.assertEqual(faults_of(self.whole()), [])

    # Calls change(line, the number of loads without a line between them) for the lines of the kernels that match.
    def planted(self, kernel, change):
        lines, inside, row = [], False, 0
        for line in self.whole().splitlines():
            if "Function :" in line:
                inside = re.match(kernel, short(line.split(":")[1].strip())) is not None
            one = instruction(line)
            if inside and one:
                row = row + 1 if is_load(one) else 0
                lines += change(line, one, row)
            else:
                lines.append(line)
        return "\n".join(lines)

    def expect(self, text, words):
        faults = faults_of(text)
        self.assertTrue(any(words in fault for fault in faults), f"{words!r} is not in {faults[:5]}")

    def test_a_spilled_register(self):
        def spill(line, one, row):
            return [line, line.replace(one.text.split("*/")[1].strip(), "STL [R1], R0 ;")]
        self.expect(self.planted("add_pieces_kernel", spill), "local memory: ")

    def test_narrow_loads(self):
        def narrow(width):
            return lambda line, one, row: [line.replace(f"LDG.E{width}", "LDG.E")]
        for width in (".128", ".64"):
            for kernel in ("quads_kernel.*5Scale", "quads_kernel.*8SumParts", r"update_kernelINS\d_4AdamILb1ELb0E"):
                self.expect(self.planted(kernel, narrow(width)), "loads of 128 and 64 bits, expected at least")

    # After the seventh load of a row, its result is used.
    def test_a_use_between_the_loads_of_a_square_sum(self):
        def use(line, one, row):
            return [line] + ([f"        /*{one.at:04x}*/  F2F.F64.F32 R2, {one.target} ;"] if row == 7 else [])
        text = self.planted("square_pieces_kernel", use)
        for dtype in ("fp32", "bf16", "fp16"):
            self.expect(text, f"{dtype}: got loops with [1, 7, 7] loads before the first use")

    def test_a_use_between_the_loads_of_an_update(self):
        def use(line, one, row):
            return [line, f"        /*{one.at:04x}*/  FMUL R0, {one.target}, R0 ;"] if ".128" in one.opcode else [line]
        for rule, slots in SLOTS.items():
            self.expect(self.planted(rf"update_kernelINS\d_{rule}", use), f"read after 1 of {slots + 2} loads: ")

    def test_a_loop_that_loads_one_by_one(self):
        def one_load(line, one, row):
            return [line] if row < 2 else []
        self.expect(self.planted("square_pieces_kernel", one_load), "got loops with [1, 1, 1] loads")

    def test_a_kernel_that_is_not_there(self):
        self.expect(self.whole().replace("17non_finite_kernel", "13no_one_kernel"),
                    "got 0 kernels of this name")
        self.expect(self.whole().replace("arch = sm_90", "arch = sm_86"), "expected sm_90 too")

    def test_arguments_that_are_too_long(self):
        self.assertEqual(len(argument_faults({"update_kernel": 32768, "quads_kernelI8SumParts": 4104, "a": 32764})), 2)


if __name__ == "__main__":
    for name in ("cuobjdump", "nvdisasm"):
        if tool(name) is None:
            print(f"skipped: no {name}. Hint: script/setup")
            sys.exit(77)
    if not LIBRARY.exists():
        print(f"skipped: this build has no {LIBRARY} (no nvcc, or ZERO_CUDA=OFF)")
        sys.exit(77)
    unittest.main()
