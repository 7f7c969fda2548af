"""What cuDNN's methods cost, as a guess goes by it on an empty database.

cuDNN ranks its engines and algorithms but names no times. A method's time is the floor of the problem over the share of
it that methods of its kind reached on an H200 (November 2026), and each further place in cuDNN's ranking adds a little,
so that its order holds among equals.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, floor_us
from nbdnn.problem_conv import ConvProblem

_LAUNCH_US = 4.0
# Each place behind the first of cuDNN's ranking.
_A_PLACE = 0.03
# A layer of 64 channels and 3x3 taps reached 0.37 of the floor in bf16 and 0.4 in TF32, 0.6 in float32.
_SHARE = {"f16": 0.4, "bf16": 0.4, "f32": 0.6, "f64": 0.5}
# 16-bit data in NCHW are turned to channels-last and back: read and written once more.
_TURNED = ("f16", "bf16")


def method_us(problem: ConvProblem, device: Gpu, place: int, tf32: bool = False, slower: float = 1.0) -> float:
    """Microseconds of a method at a place (0 the first) of cuDNN's ranking; `slower` than methods of its kind."""
    share = _SHARE["bf16" if tf32 else problem.dtype]
    if 1 < problem.c // problem.groups < 16:
        share /= 4  # few channels fill no matrix: stems and grouped layers reached about 0.1
    busy_us = floor_us(problem, device, tf32) / share * slower
    if (problem.dtype in _TURNED or tf32) and not problem.channels_last:
        busy_us += 2 * problem.min_bytes / copy_bytes_per_s(device) * 1e6
    return (busy_us + _LAUNCH_US) * (1 + _A_PLACE * place)
