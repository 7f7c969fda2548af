"""`nbdnn info`: what a report of a problem should begin with."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import Any

import nbdnn
from nbdnn import config
from nbdnn.cli_output import size
from nbdnn.cli_targets import add_place, place
from nbdnn.device import Gpu


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info", help="versions, device, database, candidates", description="Facts for a bug report."
    )
    add_place(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    facts = _facts(args)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        first, *more = value.splitlines()
        print(f"{name:<{width}}  {first}", *(f"{'':{width}}  {line}" for line in more), sep="\n")
    return 0


def _facts(args: argparse.Namespace) -> dict[str, str]:
    config.numba_threads()  # before Numba is imported, which says in many lines what is wrong with it
    from nbdnn.dispatch import registry
    from nbdnn.kernels.cpu.compile import cache_dir
    from nbdnn.kernels.cpu.launch import threading_layer
    from nbdnn.problem import OPS

    layer = threading_layer()  # before the device: it decides how many threads there are
    device, database = place(args)
    if isinstance(device, Gpu):
        caches = f"L2 {size(device.l2_bytes)}"
        works = {"multiprocessors": str(device.sms), "driver": f"for CUDA {device.driver}"}
    else:
        caches = f"L2 {size(device.l2_bytes)} a core, last level {size(device.llc_bytes)}"
        works = {"threads": f"{device.threads}; Numba's layer: {layer}" + _ADVICE.get(layer, "")}
    return {
        "nbdnn": nbdnn.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "libraries": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "numba", "llvmlite")),
        "device": device.fingerprint,
        "caches": caches,
        "memory": f"{size(device.free_memory_bytes())} free",
        **works,
        "cudnn": _cudnn(),
        "database": f"{database.path} ({database.mode}, {'there' if database.path.exists() else 'not there yet'})",
        "kernel cache": str(cache_dir()),
        **{op: ", ".join(c.id.removeprefix(f"{op}/") for c in registry.candidates(op, kind=device.kind)) for op in OPS},
    }


def _cudnn() -> str:
    """The version of cuDNN and its file, or every file that was tried, one a line, and what is wrong with it."""
    from nbdnn.availability import dnn_available
    from nbdnn.cudnn.library import WHY, library
    from nbdnn.errors import CudnnError

    try:
        found = library()
    except CudnnError as error:
        return str(error).replace(WHY, "")
    try:
        used = [] if dnn_available() else [f"not used: {dnn_available.msg}"]
    except RuntimeError as error:
        used = [str(error)]
    return "\n".join([f"version {found.version}", *used, *map(str, found.tried)])


_ADVICE = {"workqueue": " (slow, one call at a time: install tbb)"}
