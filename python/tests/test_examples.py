"""The programs of examples/python do what their page says."""

import importlib.util
import io
import json
import pickle
import re
import struct
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from conftest import REPOSITORY, Programs, find_zero, under_the_runner

EXAMPLES = REPOSITORY / "examples" / "python"


def run(programs: Programs, name: str, *words: str, ranks: int = 2) -> str:
    """What the example prints, without the ranks' numbers."""
    text = f"""
        import runpy
        sys.argv = {[name, *words]}
        runpy.run_path({str(EXAMPLES / name)!r}, run_name="__main__")
    """
    return re.sub(r"^\[\d\] ", "", programs.ranks(text, ranks), flags=re.MULTILINE)


def json_of(out: str) -> Any:
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def module_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- muon.py ----
def test_muon_trains_whole_matrices_at_stage_3(programs: Programs) -> None:
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", run(programs, "muon.py"))]
    assert len(losses) == 6 and losses[-1] < 0.1 < losses[0]


# ---- finetune_gpt2.py ----
@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(500)))
    return str(path)


@pytest.mark.nightly
def test_gpt2_with_a_file_and_with_the_dictionary(tmp_path: Path, text: str) -> None:
    pytest.importorskip("transformers")
    words = [str(EXAMPLES / "finetune_gpt2.py"), "--text", text, "--steps", "30", "--layers", "1", "--width", "32"]
    file = REPOSITORY / "configs" / "deepspeed-examples" / "gpt2-squad-offload.json"
    out = under_the_runner(tmp_path, *words, "--deepspeed_config", str(file))
    lines = re.findall(r"step +(\d+)  loss ([\d.]+)  lr (\S+)  loss scale (\S+)", out)
    assert [int(step) for step, *_ in lines] == [10, 20, 30]
    skipped = out.count("not finite") // 2  # on each of two ranks
    # The scale begins at 2^32. The first overflow leaves it (hysteresis 2), each further one halves it.
    assert skipped > 10 and float(lines[-1][3]) == 2.0 ** (32 - (skipped - 1))
    # 30 updates of warm-up to 3e-5, logarithmic; the schedule does not see skipped steps.
    warmed = numpy.log(30 - skipped - 1) / numpy.log(30)
    assert float(lines[-1][2]) == pytest.approx(3e-5 * warmed, rel=1e-3)


@pytest.mark.nightly
def test_gpt2_continues_from_a_checkpoint_with_the_same_bits(programs: Programs, text: str) -> None:
    pytest.importorskip("transformers")
    out = programs.run(f"""
        import runpy, signal
        from libzero.deepspeed._under_its_name import install
        install()
        import deepspeed

        def example(*words):
            sys.argv = ["finetune_gpt2.py", "--text", {text!r}, "--layers", "1", "--width", "32", "--sequence", "128",
                        "--log-interval", "1", "--batch-size", "4", "--accumulation", "2", *words]
            runpy.run_path({str(EXAMPLES / "finetune_gpt2.py")!r}, run_name="__main__")

        os.chdir({str(programs.folder)!r})
        training = ["--steps", "12", "--save-interval", "5"]
        example(*training, "--save", "whole")
        print("interrupted", flush=True)
        save = deepspeed.DeepSpeedEngine.save_checkpoint

        def save_and_interrupt(self, *words):
            save(self, *words)
            os.kill(os.getpid(), signal.SIGINT)

        deepspeed.DeepSpeedEngine.save_checkpoint = save_and_interrupt
        try:
            example(*training, "--save", "parts")
        except SystemExit as end:
            assert end.code == 130
        deepspeed.DeepSpeedEngine.save_checkpoint = save
        print("continued", flush=True)
        example(*training, "--save", "parts", "--resume", "--export", "model")
        print("exported", flush=True)
        example("--steps", "1", "--model", "model")
    """)
    runs = [re.findall(r"step +(\d+)  loss ([\d.]+)", part) for part in re.split("interrupted|continued|exported", out)]
    whole, first, second, further = runs
    assert len(whole) == 12 and first == whole[:5] and second == whole[5:]
    assert float(further[0][1]) < float(whole[0][1]) - 0.2
    files = [programs.folder / name / "global_step12" / "rank-00000.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


# ---- cifar10.py ----
@pytest.mark.nightly
def test_the_network_learns_the_drawn_pictures(programs: Programs) -> None:
    out = run(programs, "cifar10.py", "--epochs", "2", "--stage", "2", "--batch-size", "64", "--lr", "0.002")
    found = re.search(r"accuracy ([\d.]+) %", out)
    assert found is not None and float(found[1]) > 85, out
    of = [int(n) for n in re.findall(r"% of (\d+)", out)]
    assert len(of) == 10 and sum(of) == 2000  # both ranks' shares


@pytest.mark.nightly
def test_the_network_with_experts_has_one_loss_curve(programs: Programs) -> None:
    short = ["--epochs", "1", "--pictures", "640", "--log-interval", "5", "--moe"]
    kinds = [
        ["--num-experts", "2", "--ep-world-size", "2", "--mlp-type", "residual", "--moe-param-group"],
        ["--num-experts", "2", "4", "--ep-world-size", "2", "--top-k", "2", "--noisy-gate-policy", "Jitter"],
    ]
    for words in kinds:
        curves = []
        for stage in range(4):
            out = run(programs, "cifar10.py", *short, *words, "--stage", str(stage))
            curves.append(re.findall(r"loss [\d.]+|[\d.]+ % of \d+|accuracy [\d.]+", out))
            assert len(curves[-1]) == 4 + 10 + 1 and "experts, over 2 ranks" in out, out
            assert ("--moe-param-group has no effect" in out) == ("--moe-param-group" in words)
        assert all(curve == curves[0] for curve in curves), curves
    other = ["--num-experts", "4", "--dtype", "bf16", "--min-capacity", "4", "--noisy-gate-policy", "RSample"]
    assert "experts, on every rank" in run(programs, "cifar10.py", *short, *other, "--stage", "2")
    with pytest.raises(AssertionError, match="ep_size 3, expected a divisor of 2 ranks"):
        run(programs, "cifar10.py", "--moe", "--num-experts", "3", "--ep-world-size", "3")


def test_the_answer_for_a_picture_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cifar10 = module_of("cifar10")
    monkeypatch.setattr(sys, "argv", ["cifar10.py", "--moe", "--num-experts", "4", "--noisy-gate-policy", "Jitter"])
    torch.manual_seed(1)
    net = cifar10.Net(cifar10.arguments()).eval()
    pictures = cifar10.draw(40, seed=2)[0].float() / 127.5 - 1
    with torch.no_grad():
        together, one_by_one = net(pictures)[0], torch.cat([net(picture[None])[0] for picture in pictures])
    torch.testing.assert_close(together, one_by_one)


PythonPickler: Any = pickle._Pickler  # type: ignore[attr-defined]  # the one that can be changed


class Python2(PythonPickler):  # type: ignore[misc]
    """Writes texts and bytes as Python 2 wrote both: as strings of bytes."""

    dispatch = dict(PythonPickler.dispatch)

    def save_string(self, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def write_cifar10(folder: Path, kind: str) -> tuple[numpy.ndarray, list[int]]:
    """Returns the test pictures and all labels for training."""
    random = numpy.random.default_rng(0)
    trained: list[int] = []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = random.integers(0, 256, (7, 3072), dtype=numpy.uint8)
        labels = random.integers(0, 10, 7).tolist()
        if kind == "binary":
            rows = [bytes([label]) + row.tobytes() for label, row in zip(labels, data, strict=True)]
            (folder / f"{name}.bin").write_bytes(b"".join(rows))
        elif kind == "python 2":
            stream = io.BytesIO()
            Python2(stream, 2).dump({"batch_label": "a", "labels": labels, "data": data, "filenames": ["b.png"] * 7})
            old = stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
            (folder / name).write_bytes(old)
        else:
            content = {b"labels": labels, b"data": data}
            (folder / name).write_bytes(pickle.dumps(content, protocol=int(kind)))
        trained += labels if name != "test_batch" else []
    return data, trained


@pytest.mark.parametrize("kind", ["python 2", "2", "5", "binary"])
def test_cifar10_is_read_from_its_files(kind: str, tmp_path: Path) -> None:
    data, labels = write_cifar10(tmp_path, kind)
    pictures, found, test_pictures, _ = module_of("cifar10").read_cifar10(str(tmp_path))
    assert pictures.shape == (35, 3, 32, 32) and found.tolist() == labels
    assert (test_pictures.view(7, 3072).numpy() == data).all()


@pytest.mark.nightly
def test_the_program_in_cpp_reads_the_same_files(tmp_path: Path) -> None:
    program = Path(find_zero() or "").parents[1] / "examples" / "cifar10"
    if not program.exists():
        pytest.skip(f"{program} is not built")
    outputs = []
    for kind in ("binary", "2", "python 2", "5"):
        (tmp_path / kind).mkdir()
        write_cifar10(tmp_path / kind, kind)
        words = ["--epochs", "1", "--batch-size", "7", "--log-interval", "1"]
        end = subprocess.run([program, "--data", tmp_path / kind, *words], capture_output=True, text=True, timeout=120)
        outputs.append(end.stdout.splitlines()[1:] if end.returncode == 0 else end.stderr)
    assert len(outputs[0]) > 6 and outputs[0] == outputs[1] == outputs[2]
    assert "data_batch_1] got protocol 5 at byte 1, expected a pickle of protocol 2" in outputs[3]


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps({"data": Attack()}), pickle.dumps({"data": 1})])
def test_another_pickle_is_refused_and_not_executed(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path, "2")
    (tmp_path / "data_batch_3").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        module_of("cifar10").read_cifar10(str(tmp_path))
    assert end.value.code == 2 and "data_batch_3 is not a batch of CIFAR-10" in capsys.readouterr().err
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("cifar10", ["--top-k", "2"], "--top-k: got it without --moe, expected both"),
        (
            "cifar10",
            ["--moe", "--num-experts", "4", "6", "--ep-world-size", "4"],
            "expected a divisor of --num-experts 6",
        ),
        ("cifar10", ["--moe", "--top-k", "2"], "--top-k: got 2, expected at most --num-experts 1"),
        (
            "cifar10",
            ["--moe", "--num-experts", "2", "--top-k", "2", "--noisy-gate-policy", "RSample"],
            "--noisy-gate-policy: got RSample, expected None or Jitter with --top-k 2",
        ),
        ("cifar10", ["--data", "nowhere"], "https://www.cs.toronto.edu/~kriz/cifar.html"),
        ("cifar10", ["--epochs", "0"], "--epochs: got 0, expected 1 or more"),
        ("memory_per_stage", ["--hidden", "30"], "expected a multiple of --heads 4"),
        ("ddp_vs_zero", ["--widths", "64", "100"], "got 100, expected multiples of 64"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_to_do(
    name: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as end:
        module_of(name).main()
    assert end.value.code == 2 and message in capsys.readouterr().err


# ---- memory ----
@pytest.mark.nightly
def test_the_memory_of_each_stage_is_that_of_the_formulas(programs: Programs) -> None:
    pytest.importorskip("transformers")
    found = json_of(run(programs, "memory_per_stage.py", "--layers", "2", "--iterations", "2", "--json"))
    # Bytes of a parameter on two ranks at rest, and after backward where it differs: docs/memory.md.
    expected = {
        "stage 1": (4 + 8 / 2, 4 + 8 / 2 + 4, 0),
        "stage 2": (4 + 12 / 2, 4 + 12 / 2, 0),
        "stage 2, offload": (4, 4, 16 / 2),  # the parameters' own fp32 values are no masters: 4/2 more on the host
        "stage 3": (16 / 2, 16 / 2, 0),
        "stage 3, offload": (0, 0, 20 / 2),
        "stage 3, fp16": (16 / 2, 16 / 2, 0),
    }
    assert set(found["cases"]) == set(expected)
    for name, (at_rest, after_backward, host) in expected.items():
        case = found["cases"][name]
        before, forward, backward, step = (size / case["parameters"] for size in case["device"])
        assert (before, backward, step) == pytest.approx((at_rest, after_backward, at_rest), abs=0.05), name
        assert case["peak"] / case["parameters"] > forward > before + 1, name
        assert [size / case["parameters"] for size in case["host"]] == pytest.approx([host] * 4, abs=0.05), name


@pytest.mark.nightly
def test_ddp_leaves_the_budget_first(programs: Programs, tmp_path: Path) -> None:
    words = ["--widths", "256", "320", "--layers", "1", "--steps", "1", "--budget", "35", "--json"]
    out = run(programs, "ddp_vs_zero.py", *words, "--svg", str(tmp_path / "p.svg"))
    found = json_of(out)
    measured = {(row["way"], row["parameters"]): row["bytes"] for row in found["measurements"]}
    small, large = sorted({parameters for _, parameters in measured})
    # 16 bytes of a parameter, and DDP's buckets and a gradient on its way; half of it at stage 3.
    assert measured["DDP", small] > 16 * small and measured["DDP", small] > 35e6
    assert measured["stage 3", small] < 0.8 * measured["DDP", small]
    assert ("DDP", large) not in measured and ("stage 3", large) in measured
    lines = xml.dom.minidom.parse(str(tmp_path / "p.svg")).getElementsByTagName("polyline")
    points = [len(line.getAttribute("points").split()) for line in lines]
    assert points[:2] == [2, 1] and points[-1] == 2  # the budget, DDP, stage 3


def test_the_notebook(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "memory.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored with outputs"
    monkeypatch.setenv("PYTHONPATH", programs.environment()["PYTHONPATH"])  # the kernel is another process
    client.NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    tables = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert sum("<th>tier</th>" in table for table in tables) == 5  # one rank, four stages
    rows = re.findall(r"<tr><td>(\d)</td>.*?<td>([\d.]+)</td><td>([\d.]+)</td></tr>", tables[-1])
    assert [float(held) for _, held, _ in rows] == [16, 10, 9, 8] == [float(formula) for _, _, formula in rows]
    assert outputs[-1]["text"] == "the same bits at all stages\n"
