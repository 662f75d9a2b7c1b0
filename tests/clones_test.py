"""script/check-clones: the sources have no long block twice, and a block that is planted is found."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "script" / "check-clones"


def check(*folders):
    return subprocess.run([sys.executable, "-B", str(SCRIPT), *map(str, folders)], capture_output=True, text=True)


class Clones(unittest.TestCase):
    def test_the_sources_have_none(self):
        result = check()
        self.assertEqual(result.returncode, 0, result.stdout)

    def test_thirteen_equal_lines_are_found_twelve_are_not(self):
        for count, code in ((12, 0), (13, 1)):
            with tempfile.TemporaryDirectory() as folder:
                block = [f"  total += weight[{i}] * value[{i}];" for i in range(count)]
                for name in ("a", "b"):
                    lines = [f"int {name}() {{", "  // Other words.", *block, f"  return {name}_total;", "}"]
                    pathlib.Path(folder, name + ".cpp").write_text("\n".join(lines))
                result = check(folder)
                self.assertEqual(result.returncode, code, result.stdout)


if __name__ == "__main__":
    unittest.main()
