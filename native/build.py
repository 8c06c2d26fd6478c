"""Builds the kernels: a library of C++ operators for each kind of processor, which `caches/platform/native.py` loads.

    python native/build.py [FOLDER]

FOLDER: where the libraries go, by default beside that module. Those of this torch and these sources that are there stay
as they are, and those of other sources go. Needs a C++ compiler (`$CXX`, or c++) and torch, whose headers it includes:
its stable interface, so that a library fits several releases of torch.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

SOURCES = Path(__file__).parent
DESTINATION = SOURCES.parent / "caches" / "platform"
# The processors that have a library of their own, by the name in its file, and the compiler's options for it. With
# x86-64-v4 products of 16 rows take 1.2 times as long on an AMD EPYC as with these options. GCC 12 has no znver4.
_AVX512 = [f"-mavx512{name}" for name in ("f", "bw", "cd", "dq", "vl", "vnni", "bf16")]
KINDS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=skylake-avx512"],
    "vnni": ["-march=cascadelake"],
    "zen4": ["-march=znver3", *_AVX512],
    "amx": ["-march=sapphirerapids"],
}
# As fast as -ffast-math, but NaN and infinity keep their meaning and no other code changes its rounding.
OPTIONS = [
    *("-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-std=c++20", "-fPIC"),
    # torch's thread pool uses OpenMP on Linux; other systems' compilers lack it, and kernels run in one thread.
    *(["-fopenmp"] if sys.platform == "linux" else []),
]


def digest_of_sources() -> str:
    """Names the libraries of these sources."""
    files = sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h"), Path(__file__)])
    return sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def kinds() -> dict[str, list[str]]:
    """Those to build on this machine: elsewhere than on x86 one, for any processor of the architecture."""
    machine = platform.machine().lower()
    return KINDS if machine in ("x86_64", "amd64") else {machine: []}


def build(folder: Path = DESTINATION) -> list[Path]:
    """The libraries, for each of `kinds` that the compiler knows. Raises `OSError`, and `subprocess.CalledProcessError`
    where there is none."""
    import torch

    digest, release = digest_of_sources(), torch.__version__.partition("+")[0]
    paths = {kind: folder / f"kernels-{digest}-{release}-{kind}.so" for kind in kinds()}
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    installed = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    libraries = [f"-L{installed / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", *undefined]

    def run(*arguments: str) -> None:
        subprocess.run([*compiler, *arguments], check=True, capture_output=True, text=True)

    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as temporary, ThreadPoolExecutor() as pool:
        missing = {kind: options for kind, options in kinds().items() if not paths[kind].exists()}
        objects: dict[str, list[str]] = {kind: [] for kind in missing}
        compiling: dict[str, list[Future[None]]] = {kind: [] for kind in missing}
        for kind, options in missing.items():
            for source in sorted(SOURCES.glob("*.cpp")):
                made = os.path.join(temporary, f"{kind}-{source.stem}.o")
                include = f"-isystem{installed / 'include'}"
                command = (*OPTIONS, *options, abi, include, "-c", str(source), "-o", made)
                compiling[kind].append(pool.submit(run, *command))
                objects[kind].append(made)
        failure: subprocess.CalledProcessError | None = None
        for kind, made in objects.items():
            library = os.path.join(temporary, f"{kind}.so")
            try:
                for waiting in compiling[kind]:
                    waiting.result()
                run("-shared", *OPTIONS, *made, "-o", library, *libraries)
            except subprocess.CalledProcessError as error:  # an older compiler does not know the newest processors
                print(f"no kernels for {kind}: {error.stderr}", file=sys.stderr)
                failure = error
            else:
                os.replace(library, paths[kind])  # complete, so that no process sees half of it
    built = [path for path in paths.values() if path.exists()]
    if failure is not None and not built:
        raise failure
    for old in folder.glob("kernels-*.so"):
        if old.name.split("-")[1] != digest:
            old.unlink(missing_ok=True)
    return built


if __name__ == "__main__":
    try:
        print(*build(*map(Path, sys.argv[1:])), sep="\n")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"the kernels cannot be built: {getattr(error, 'stderr', '') or error}")
