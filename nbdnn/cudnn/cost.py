"""What cuDNN's methods cost, as a guess goes by it on an empty database.

cuDNN ranks its engines and algorithms but names no times. A method's time is that of its products, at the share of the
peak that methods of its kind reached on an H200 (November 2026), or that of its bytes, whichever is longer; and each
further place in cuDNN's ranking adds a little, so that its order holds among equals.
"""

from __future__ import annotations

from math import ceil, prod

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, floor_us, tensor_flops_per_s
from nbdnn.problem import DEFAULT_ALIGN
from nbdnn.problem_conv import ConvProblem

# Of products of 1x1 taps, forward and image gradients, the second (26 layers of up to 8 us).
_LAUNCH_US, _LAUNCH_OF_POINTS_US = 4.0, 3.2
# Each place behind the first of cuDNN's ranking.
_A_PLACE = 0.03
# A layer of 64 channels and 3x3 taps reached 0.37 of the peak in bf16 and 0.4 in TF32; one of 1x1 taps, a plain product
# of matrices, 0.4 to 0.8 in bf16, where its bytes did not take longer: 0.8 to 1 of a copy's rate.
_SHARE = {"f16": 0.4, "bf16": 0.4, "f64": 0.5}
_SHARE_OF_POINTS, _SHARE_OF_COPY, _SHARE_OF_FEW = 0.5, 0.95, 0.85
_FEW_CHANNELS, _EVEN, _VECTOR_ELEMS = 32, 8, 8
# Of both in 16 bits, where channels or filters are as few as a tile's, and taps several: 5x5 of 32 channels took
# 28.5 us, guessed to be 16, 3x3x3 929 and 586; of 2x2 windows side by side what cuDNN ranks first took 90, others 16.
_SHARE_OF_NARROW = 0.6
# What else the engines take that cuDNN ranks first where channels are few or no multiple of 8, in groups, or taps
# dilated: of 133 such problems of small extents they took 2.1 times the best of all, and what is guessed now 1.3.
_ODD_US = 12.0
# Of 16-bit data at addresses that are no multiples of 16, which only the slowest engines take (25 and 34 times as
# long).
_UNALIGNED = 8.0
# Groups of so many channels and more in 16 bits, of the floor's rate: ResNeXt's of 4 and 8 channels took 3.3 to 3.9 of
# it, filter gradients of 4 channels 11; RegNet's of 24, 40, 48 and 56 channels 12 to 31.
_FEWEST_IN_GROUP, _SHARE_OF_GROUPS, _TILE_CHANNELS, _FILTERS_OF_PART = 4, 0.26, 8, 3.0
_SHARE_OF_ODD_GROUPS = 0.065  # of channels that are no power of two
# Float32: share and launch of 106 layers of a ResNet-50 and a MobileNet v2, in planes, that had no few channels.
_OF_F32 = {"conv_fwd": (0.4, 8.0), "conv_bwd_data": (0.33, 10.0), "conv_bwd_filter": (0.3, 20.0)}
# A filter gradient that splits no sum goes through all pixels in each block: 25,000 took 390 us, 400,000 2100. Image
# gradients in float64 that add nothing to memory took 1.2 to 1.7 times as long as those that do.
_PIXEL_US, _WHOLE_F64 = 0.012, 1.5
# So do, over three axes in float32, all but the rarest of those that cuDNN ranks: 524,000 took 16 ms and more. Strided
# gradients of the image there make every product that a stride of 1 would.
_VOLUME_PIXEL_US = 0.03
# So do forwards and image gradients through the products of an output, however few outputs there are: 4608 of them, for
# 512 channels of one 7x7 image, took 166 us in float32, 12 in 16 bits and 30 in planes (200 layers of 1 to 4 images).
# us of a product, and of the rest: in float32 by what splits no sum, and by what does but for filters of one tap; in 16
# bits by (whether there is one tap, whether channels are last).
_WHOLE_SUM, _OTHER_SUM = (0.035, 4.0), (0.067, 4.0)
_NARROW_SUM = {
    (True, True): (0.0015, 2.7),
    (True, False): (0.0098, 3.0),
    (False, True): (0.0018, 4.0),
    (False, False): (0.0043, 9.5),
}
# In 16 bits, channels last: of image gradients with strides, by whether there is one tap, the same; of filter
# gradients, by whether they are products of matrices, us of a pixel (the sums of more than some thousands are split)
# and of the rest (30 layers of two images: 11.5 us was guessed to be 5.1).
_STRIDED_SUM = {True: (0.0013, 9.5), False: (0.0066, 6.6)}
_FILTER_SUM, _FILTER_PIXELS = {True: (0.0003, 4.8), False: (0.0007, 7.0)}, 6272
# 16-bit data in NCHW are turned to channels-last and back, in launches of their own: us, and how often the bytes of all
# operands pass once more. Of 1x1, whose planes are read as they lie where pixels are whole vectors, with what is fused,
# and without (68 us of 13 for 32x128x28x28 to 512 with bias and relu in f16; 36 without vectors for 256x14x14 to 1024).
_TURNED = ("f16", "bf16")
_TURN_TAPS, _TURN_FUSED, _TURN_POINTS = (11.0, 2.0), (9.0, 6.3), (2.0, 4.0)
# Spectra are of tiles of 32x32 or of whole images, which took twice what a copy of them does, and more (320 layers, an
# H200). So do those of filters alone: 512 to 512 channels of 3x3 take 700 us for one image.
_FFT_TILE, _SMALLEST_FFT, _OF_WHOLE_IMAGES = 32, 8, 2.0


def method_us(
    problem: ConvProblem, device: Gpu, place: int, tf32: bool = False, slower: float = 1.0, whole: bool = False
) -> float:
    """Microseconds of a method at a place (0 the first) of cuDNN's ranking; `slower` than methods of its kind. whole: a
    product that splits no sum, nor the outputs by what a stride leaves of them, which matters in float32 and float64.
    """
    kind, channels = "bf16" if tf32 else problem.dtype, problem.c // problem.groups
    is_pointwise = kind in _TURNED and max(problem.filter, default=1) == 1 and max(problem.stride, default=1) == 1
    (share, launch_us), odd_us = _rate(problem.op, kind, is_pointwise), 0.0
    is_volume = kind == "f32" and problem.ndim == 3
    if problem.op == "conv_bwd_filter" and (is_volume or (whole and kind in ("f32", "f64"))):
        odd_us = problem.n * prod(problem.out_spatial) * (_VOLUME_PIXEL_US if is_volume else _PIXEL_US)
    if kind == "f32" and problem.op == "conv_bwd_data" and (whole or is_volume):
        slower *= max(1.0, prod(problem.stride) / (1 if is_volume else prod(problem.filter)))
    if kind == "f64" and problem.op == "conv_bwd_data" and whole:
        slower *= _WHOLE_F64
    few, least = min(channels, problem.k) < _FEW_CHANNELS, min(channels, problem.k // problem.groups)
    # Few channels of one tap are read and written as others are: layers of 16 and 24 took 0.9 to 1.1 of this.
    if problem.groups == 1 and (is_pointwise or not few) and _is_plain(problem):
        products_us = problem.flops / tensor_flops_per_s(device, problem.dtype, tf32) * 1e6
        of_copy = _SHARE_OF_FEW if few else _SHARE_OF_COPY
        if kind in _TURNED and not is_pointwise and min(channels, problem.k) == _FEW_CHANNELS:
            share, of_copy = share * _SHARE_OF_NARROW, of_copy * _SHARE_OF_NARROW
        busy_us = max(products_us / share, problem.min_bytes / copy_bytes_per_s(device) / of_copy * 1e6)
    elif kind in _TURNED and problem.groups > 1 and least >= _FEWEST_IN_GROUP and _is_plain(problem):
        busy_us = floor_us(problem, device) / (_SHARE_OF_ODD_GROUPS if least & (least - 1) else _SHARE_OF_GROUPS)
        busy_us *= _FILTERS_OF_PART if problem.op == "conv_bwd_filter" and least < _TILE_CHANNELS else 1.0
    else:
        # Few channels or filters fill no matrix: first, last and grouped layers reached about 0.1 of the floor.
        busy_us, odd_us = floor_us(problem, device, tf32) / (share / 4), odd_us + _ODD_US
    if kind in _TURNED:
        launches_us, times = _turning(problem, is_pointwise)
        busy_us += times * problem.min_bytes / copy_bytes_per_s(device) * 1e6
        odd_us = odd_us or launches_us
        if problem.align < DEFAULT_ALIGN:
            busy_us, odd_us = busy_us * _UNALIGNED, max(odd_us, _ODD_US)
    us = max(busy_us * slower + launch_us + odd_us, 0.0 if tf32 else _sum_us(problem, whole))
    return us * (1 + _A_PLACE * place)


def spectra_us(problem: ConvProblem, device: Gpu, tiled: bool) -> float:
    """Microseconds in which the spectra of all operands are written and read."""
    if tiled:
        extents = [_FFT_TILE] * problem.ndim
        steps = [_FFT_TILE - taps + 1 for taps in problem.filter]
        tiles = prod(ceil(out / max(1, step)) for out, step in zip(problem.out_spatial, steps, strict=True))
    else:
        padded = [extent + sum(pads) for extent, pads in zip(problem.spatial, problem.pad, strict=True)]
        extents, tiles = [max(_SMALLEST_FFT, 1 << (extent - 1).bit_length()) for extent in padded], 1
    elems = prod(extents[:-1]) * (extents[-1] // 2 + 1)
    spectra = problem.k * problem.c // problem.groups + tiles * problem.n * (problem.k + problem.c)
    return 2 * 8 * elems * spectra * (1.0 if tiled else _OF_WHOLE_IMAGES) / copy_bytes_per_s(device) * 1e6


def _sum_us(problem: ConvProblem, whole: bool) -> float:
    """Microseconds in which the products of an output follow each other; 0 where that is not known."""
    taps, reached = prod(problem.filter), prod(problem.filter) / prod(problem.stride)
    is_last, is_strided = problem.channels_last and problem.y_channels_last, max(problem.stride, default=1) > 1
    if problem.groups > 1 or not _is_plain(problem):
        return 0.0
    if problem.op == "conv_bwd_filter":
        if problem.dtype not in _TURNED or not is_last:
            return 0.0
        pixel_us, rest_us = _FILTER_SUM[taps == 1 and not is_strided]
        return min(problem.n * prod(problem.out_spatial), _FILTER_PIXELS) * pixel_us + rest_us
    products = problem.c * taps if problem.op == "conv_fwd" else problem.k * max(1.0, reached)
    if problem.dtype == "f32" and (whole or taps == 1):
        product_us, rest_us = _WHOLE_SUM if whole else _OTHER_SUM
    elif problem.dtype in _TURNED:
        # Planes of one tap are read as they lie where their pixels are whole vectors.
        as_last = is_last or (taps == 1 and _turning(problem, not is_strided) == (0.0, 0.0))
        product_us, rest_us = _NARROW_SUM[taps == 1, as_last]
        if problem.op == "conv_bwd_data" and is_strided and is_last:
            product_us, rest_us = _STRIDED_SUM[taps == 1]
    else:
        return 0.0
    return products * product_us + rest_us


def _turning(problem: ConvProblem, is_pointwise: bool) -> tuple[float, float]:
    """What 16-bit data take to be turned: microseconds, and how often all bytes pass once more."""
    if problem.channels_last and problem.y_channels_last:
        return 0.0, 0.0
    if not is_pointwise:
        return _TURN_TAPS
    if not {"beta"}.issuperset(problem.epilogue):
        return _TURN_FUSED
    mixed = problem.channels_last != problem.y_channels_last
    is_turned = mixed or problem.op == "conv_bwd_filter" or prod(problem.spatial) % _VECTOR_ELEMS > 0
    return _TURN_POINTS if is_turned else (0.0, 0.0)


def _rate(op: str, kind: str, is_pointwise: bool) -> tuple[float, float]:
    """The share of the peak that products reach, and the microseconds of a launch."""
    if kind == "f32":
        return _OF_F32[op]
    if is_pointwise:
        return _SHARE_OF_POINTS, _LAUNCH_US if op == "conv_bwd_filter" else _LAUNCH_OF_POINTS_US
    return _SHARE[kind], _LAUNCH_US


def _is_plain(problem: ConvProblem) -> bool:
    return max(problem.dilation, default=1) == 1 and problem.c % _EVEN == problem.k % _EVEN == 0
