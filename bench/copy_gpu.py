"""What a kernel takes that reads so many bytes and writes as many, beside the floor of `compare_gpu_ops.py`.

    python bench/copy_gpu.py [--markdown FILE]

PyTorch's addition of 0, which reads and writes float32 as fast as kernels do that have nothing else to do, measured as
the rows of that bench are: a graph replayed, operands cold in the second-level cache. What is above the floor, which is
the bandwidth alone, is a launch and the latency of memory: no kernel of so many bytes is seen to be faster by much.
"""

from __future__ import annotations

import argparse
from functools import partial
from math import ceil
from pathlib import Path

import torch
from compare_gpu import Peer

from nbdnn import driver
from nbdnn.cli_output import print_table
from nbdnn.device import Gpu, gpu
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s

_FLOORS_US = 0.1, 0.4, 1.0, 1.9, 3.0, 4.5, 6.0, 9.0, 12.0, 18.0, 24.0, 36.0, 60.0, 125.0
_SAMPLES, _MOST_COPIES = 5, 256
_COLUMNS = ["floor", "MB", "read and written", "of the floor"]


def measured_us(bytes_: int, device: Gpu) -> float:
    """Half of the bytes are read."""
    elements = bytes_ // 8
    copies = min(_MOST_COPIES, ceil(1.5 * device.l2_bytes / bytes_))
    sources = [torch.randn(elements, device="cuda") for _ in range(copies)]
    peer = Peer([partial(torch.add, source, 0.0, out=torch.empty_like(source)) for source in sources])
    for _ in range(_SAMPLES):
        peer.sample()
    return peer.median_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU")
    torch.zeros(1, device="cuda")
    driver.use(0)
    device, rows = gpu(0), []
    for floor_us in _FLOORS_US:
        bytes_ = int(floor_us * 1e-6 * copy_bytes_per_s(device)) // 32 * 32
        us = measured_us(bytes_, device)
        rows.append([f"{floor_us:.1f}", f"{bytes_ / 1e6:.1f}", f"{us:.1f}", f"{us / floor_us:.2f}"])
    print_table("microseconds of device time", _COLUMNS, rows, right=_COLUMNS)
    if args.markdown:
        lines = [_COLUMNS, ["--:"] * len(_COLUMNS), *rows]
        args.markdown.write_text("".join("| " + " | ".join(line) + " |\n" for line in lines))


if __name__ == "__main__":
    main()
