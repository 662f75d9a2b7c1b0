"""Which torch a build of the package takes, and what the package then requires (packaging/libzero_metadata.py)."""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "packaging/libzero_metadata.py"


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("ZERO_TORCH_DIR", raising=False)
    spec = importlib.util.spec_from_file_location("libzero_metadata", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_torch(site: Path, version: str) -> Path:
    folder = site / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text(f"__all__ = []\n__version__ = '{version}'\n")
    return folder


def wheel_of(metadata: ModuleType) -> dict[str, object]:
    provider = metadata.Provider()
    provider.build_state("metadata_wheel")
    fields: dict[str, object] = provider.dynamic_metadata({}, {})
    return fields


def test_a_wheel_is_named_after_its_torch_and_requires_it(
    metadata: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_TORCH_DIR", str(fake_torch(tmp_path, "2.13.1+cu130")))
    header = (SOURCE.parents[2] / "include/zero/version.h").read_text()
    version = header.split('#define ZERO_VERSION "')[1].split('"')[0]
    assert wheel_of(metadata) == {"version": f"{version}+torch2.13", "dependencies": ["torch==2.13.*"]}
    assert metadata.Provider().get_requires_for_dynamic_metadata({}) == []


def test_a_source_distribution_is_for_every_tested_torch(
    metadata: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_TORCH_DIR", str(fake_torch(tmp_path, "2.13.1")))
    provider = metadata.Provider()
    provider.build_state("sdist")
    fields = provider.dynamic_metadata({}, {})
    tested = metadata.tested_minors()
    assert "+" not in fields["version"]
    assert fields["dependencies"] == [f"torch>={tested[0]},<2.{int(tested[-1].split('.')[1]) + 1}"]
    assert provider.dynamic_wheel({}) == {"dependencies": True}

    # What is built from an unpacked one keeps the version that its name has.
    (tmp_path / "cmake").mkdir()
    (tmp_path / "include/zero").mkdir(parents=True)
    for file in ("cmake/TorchVersions.cmake", "include/zero/version.h"):
        (tmp_path / file).write_text((SOURCE.parents[2] / file).read_text())
    (tmp_path / "PKG-INFO").touch()
    monkeypatch.setattr(metadata, "ROOT", tmp_path)
    assert wheel_of(metadata) == {"version": fields["version"], "dependencies": ["torch==2.13.*"]}


@pytest.mark.parametrize("version", ["2.10.0", "2.99.0+cpu", "1.13.1"])
def test_another_torch_is_refused_with_the_remedy(
    metadata: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    folder = fake_torch(tmp_path, version)
    monkeypatch.setenv("ZERO_TORCH_DIR", str(folder))
    for refuse in (lambda: wheel_of(metadata), lambda: metadata.Provider().get_requires_for_dynamic_metadata({})):
        with pytest.raises(SystemExit) as error:
            refuse()
        text = str(error.value)
        assert f"got torch {version.rpartition('.')[0]} in {folder}" in text and "pip install 'torch==" in text


def test_a_folder_without_torch_is_refused(
    metadata: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_TORCH_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match=f"{tmp_path}/version.py has no version. Hint: ZERO_TORCH_DIR="):
        wheel_of(metadata)


def test_build_isolation_hides_no_torch(tmp_path: Path) -> None:
    """pip takes the interpreter's own folders out of sys.path, by PYTHONPATH and a sitecustomize.py."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    python = tmp_path / "environment/bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "environment")}))
    torch = fake_torch(tmp_path / "elsewhere", "2.14.0")
    (site / "elsewhere.pth").write_text(f"{torch.parent}\n")
    isolated = tmp_path / "isolated"
    isolated.mkdir()
    (isolated / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p and 'elsewhere' not in p]\n"
    )
    hidden = {"PYTHONPATH": str(isolated), "PATH": "/usr/bin:/bin"}
    assert subprocess.run([python, "-c", "import torch"], env=hidden, capture_output=True).returncode == 1
    found = subprocess.run([python, SOURCE], env=hidden, capture_output=True, text=True)
    assert found.stdout.strip() == str(torch), found

    (site / "elsewhere.pth").unlink()
    missing = subprocess.run([python, SOURCE], env=hidden, capture_output=True, text=True)
    assert missing.returncode == 1 and "no torch" in missing.stderr
