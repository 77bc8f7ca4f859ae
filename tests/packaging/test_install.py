"""The package as pip installs it: a copy of the sources, built, imported with nothing beside it;
its wheel where no compiler is.

The other tests import `src/`; only these see what a user's `pip install .` makes of the tree.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PATH = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])

# -S keeps site-packages, and with it the development tree, out of sys.path.
PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import statehold, statehold._core
fs = statehold._core.open_fs()
try:
    statehold._core.open_fs("io_uring")
    refused = None
except statehold.StateholdError as error:
    refused = str(error)
print(json.dumps({
    "version": statehold.__version__,
    "files": [statehold.__file__, statehold._core.__file__],
    "backend": fs.backend,
    "note": fs.note,
    "refused": refused,
    "torch": "torch" in sys.modules,
}))
"""


PROBE_SIM = """
import sys
sys.path.insert(0, sys.argv[1])
import statehold._sim
print(statehold._sim.SimFs(1).backend)
"""
CANNOT_HIDE = 99  # the exit status of tools/without_compiler.sh where it may not
# Classes of the simulated disk. A module that is built with it has their names in its symbols.
SIMULATED = (b"SimFs", b"SimDisk", b"SimTree")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the tree. Its build folder is kept from one installation to the next, so that
    only what differs between them is compiled again."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"building the package needs {tool}")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("native", "src"):
        built = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=built)
    return source


def settings(**defines: str) -> list[str]:
    # Without optimisation and symbols, and with headers read once for many sources, it compiles
    # in a third of the time, and behaves the same.
    defines |= {"CMAKE_CXX_FLAGS_DEBUG": "-O0", "CMAKE_UNITY_BUILD": "ON"}
    chosen = [f"--config-settings=cmake.define.{key}={value}" for key, value in defines.items()]
    return [*chosen, "--config-settings=cmake.build-type=Debug"]


def pip(verb: str, *words: str | Path, cwd: Path) -> str:
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check", "--no-input"]
    return run(sys.executable, "-m", "pip", verb, *offline, *words, cwd=cwd)


def install(source: Path, target: Path, **defines: str) -> Path:
    """Installs the copy into a folder of its own."""
    words = ["--no-build-isolation", *settings(**defines), "--target", target, "."]
    pip("install", *words, cwd=source)
    return target


@pytest.fixture(scope="module")
def wheels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel for this Python; all workers of a run share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheels"
    folder.mkdir(exist_ok=True)
    words = ["--no-build-isolation", *settings(STATEHOLD_URING="ON"), "-w", folder, "."]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            pip("wheel", *words, cwd=source)
    return folder


def probe(target: Path) -> dict[str, object]:
    facts = json.loads(run(sys.executable, "-I", "-S", "-c", PROBE, target, cwd=target))
    assert all(Path(file).is_relative_to(target) for file in facts["files"])
    return dict(facts)


def declared_version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def one_module(target: Path, name: str) -> Path:
    (path,) = (target / "statehold").glob(f"{name}.*.so")
    return path


def modules(package: Path) -> set[Path]:
    return {path.relative_to(package) for path in package.rglob("*.py")}


def test_installed_package_imports_alone(wheels: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip("install", "--target", target, *wheels.glob("*.whl"), cwd=tmp_path)
    facts = probe(target)
    assert facts["version"] == declared_version()
    assert not facts["torch"]
    # Where the kernel refuses io_uring, threads do the I/O and the note says why.
    assert facts["backend"] == "io_uring" or (facts["backend"] == "threads" and facts["note"])
    assert modules(target / "statehold") == modules(ROOT / "src" / "statehold")
    assert (target / "statehold" / "_core.pyi").is_file()
    core = one_module(target, "_core").read_bytes()
    assert b"StagingMemory" in core
    assert not any(word in core for word in SIMULATED)
    assert not list((target / "statehold").glob("_sim.*.so"))


@pytest.mark.skipif("STATEHOLD_BUILDS" not in os.environ, reason="compiles again: make campaigns")
def test_build_without_io_uring_uses_threads_and_says_so(source: Path, tmp_path: Path) -> None:
    target = install(source, tmp_path / "target", STATEHOLD_URING="OFF", STATEHOLD_SIM="ON")
    facts = probe(target)
    assert facts["backend"] == "threads"
    assert "built with io_uring" in str(facts["note"])
    assert "built with io_uring" in str(facts["refused"])
    # Who wants the simulated disk asks for it.
    assert all(word in one_module(target, "_sim").read_bytes() for word in SIMULATED)
    assert run(sys.executable, "-I", "-S", "-c", PROBE_SIM, target, cwd=target).strip() == "sim"


def contents(wheels: Path) -> tuple[list[str], str]:
    """The names in the wheel, and its metadata."""
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, opened.read(metadata).decode()


def test_links_of_the_readme_work_on_an_index(wheels: Path) -> None:
    _, text = contents(wheels)
    _, _, readme = text.partition("\n\n")
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text("utf-8"))) > 30
    assert [link for link in links if not link.startswith("https://")] == []
    files = [link.split("/blob/main/")[1] for link in links if "/blob/main/" in link]
    assert "docs/guide.md#levels" in files
    assert [file for file in files if not (ROOT / file.partition("#")[0]).exists()] == []


def test_a_wheel_has_the_licenses_of_all_that_is_in_it(wheels: Path) -> None:
    names, text = contents(wheels)
    licensed = {name.split("/licenses/")[1] for name in names if "/licenses/" in name}
    of_others = [path.relative_to(ROOT) for path in ROOT.glob("native/third_party/*/LICENSE")]
    assert licensed == {"LICENSE", *map(str, of_others)}
    assert len(of_others) == 3
    assert "License-Expression: Apache-2.0 AND BSD-2-Clause" in text


def without_compiler(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command in a namespace where an empty file lies over compilers, liburing and xxHash."""
    return bare(ROOT / "tools/without_compiler.sh", *command, cwd=cwd)


def bare(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == CANNOT_HIDE:
        pytest.skip(done.stderr.strip())
    return done


def test_a_compiler_and_liburing_are_hidden(tmp_path: Path) -> None:
    done = without_compiler("c++", "--version", cwd=tmp_path)
    assert done.returncode != 0
    assert not done.stdout
    load = "import ctypes; ctypes.CDLL('liburing.so.2')"
    assert "OSError" in without_compiler(sys.executable, "-c", load, cwd=tmp_path).stderr


def test_a_wheel_runs_the_demo_where_no_compiler_is(wheels: Path, tmp_path: Path) -> None:
    tiny = ["--dim=32", "--layers=1", "--heads=2", "--kv-heads=1", "--seq=16", "--batch=4"]
    words = ["--steps=4", "--data=examples", "--out", tmp_path / "demo", *tiny]
    done = bare(ROOT / "tools/try_wheel.sh", wheels, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal the reference in every bit" in done.stdout


def test_without_a_compiler_a_build_says_so_in_one_sentence(source: Path, tmp_path: Path) -> None:
    settings = ["-B", tmp_path / "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    done = without_compiler("cmake", "-S", source / "native", *settings, cwd=tmp_path)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "To build statehold from source, install a C++20 compiler (apt install g++" in said
    assert done.stderr.count("CMake Error") == 1


def test_a_build_for_free_threaded_python_is_refused(source: Path, tmp_path: Path) -> None:
    """No wheel fits such a Python, so pip builds one."""
    claim = "import sysconfig\nsysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
    (tmp_path / "sitecustomize.py").write_text(claim)
    settings = ["-B", tmp_path / "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    cmake = ["env", f"PYTHONPATH={tmp_path}", "cmake", "-S", source / "native", *settings]
    done = bare(*cmake, cwd=tmp_path)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "statehold does not run on the free-threaded build of Python." in said
    assert done.stderr.count("CMake Error") == 1
