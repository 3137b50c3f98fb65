"""Regenerate the protobuf code, or check that it is up to date: `python protos/generate.py [--check]`.

The generator is old on purpose: code from an old generator runs on every newer runtime, never the reverse. It cannot
share an environment with a current grpcio, so it gets a virtual environment of its own in the user's cache folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

GENERATOR = ("grpcio-tools==1.66.2", "setuptools<81")  # setuptools: the generator still imports pkg_resources
SOURCE = Path(__file__).resolve().parent / "src"
PACKAGE = Path("treadle_protos", "v1")


def generator_python() -> Path:
    """Return the interpreter of the generator's own environment, made on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    version = GENERATOR[0].partition("==")[2]
    home = cache / f"treadle-protoc-{version}-py{sys.version_info.major}{sys.version_info.minor}"
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *GENERATOR], check=True)
        (home / "ready").touch()
    return python


def generate(target: Path) -> None:
    """Write the generated modules of every proto file under `target`."""
    protos = sorted(str(path.relative_to(SOURCE)) for path in (SOURCE / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [generator_python(), "-m", "grpc_tools.protoc", "-I", SOURCE, *outputs, *protos]
    subprocess.run(command, check=True, cwd=SOURCE)


def generated(root: Path) -> dict[str, bytes]:
    """Return the generated files under `root` by name."""
    files = sorted((root / PACKAGE).glob("*_pb2*.py*"))
    return {path.name: path.read_bytes() for path in files if path.suffix != ".pyc"}


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the code is out of date")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        new, old = generated(Path(folder)), generated(SOURCE)
        stale = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
        if not check:
            for name in stale:
                if name in new:
                    shutil.copyfile(Path(folder, PACKAGE, name), SOURCE / PACKAGE / name)
                else:
                    (SOURCE / PACKAGE / name).unlink()
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run python protos/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
