"""Dropout in plain NumPy, with the generator that all providers share: Philox4x32-10.

    word[i] = word i % 4 of the generator's block offset + i // 4, with the seed as key
    kept[i] = word[i] >= threshold          y[i] = x[i] * scale where kept, else 0

Source: J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC11).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nbdnn.expected import BoundedSample, Sample
from nbdnn.problem_dropout import BLOCK_ELEMS, DropoutProblem

_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS, _WORD = 10, np.uint64(0xFFFFFFFF)


def philox(block: np.ndarray, seed: int) -> np.ndarray:
    """The four words of each block, along a new last axis. block, seed: as 64-bit integers, of whatever sign."""
    block = block.astype(np.uint64)
    zero = np.zeros_like(block)
    counter = [block & _WORD, block >> np.uint64(32), zero, zero]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(_ROUNDS):
        first, second = (counter[2 * i] * np.uint64(m) for i, m in enumerate(_MULTIPLIERS))
        counter = [
            (second >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
            second & _WORD,
            (first >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
            first & _WORD,
        ]
        key = [(word + step) & 0xFFFFFFFF for word, step in zip(key, _WEYL, strict=True)]
    return np.stack(counter, axis=-1).astype(np.uint32)


def kept(elements: int, state: np.ndarray, threshold: float) -> np.ndarray:
    """Whether each element is kept."""
    seed, offset = (int(word) for word in state)
    blocks = np.arange(-(-elements // BLOCK_ELEMS), dtype=np.uint64) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
    return philox(blocks, seed).reshape(-1)[:elements] >= threshold


def samples(
    problem: DropoutProblem, operands: Mapping[str, np.ndarray], scalars: tuple[float, ...], count: int | None
) -> dict[str, Sample]:
    """Every element of every output: it takes no longer than to draw the input."""
    threshold, scale = scalars
    index = (np.arange(problem.elements),)
    if problem.op == "dropout_bwd":
        bits = np.unpackbits(operands["mask"], bitorder="little")[: problem.elements].astype(bool)
        dx = np.where(bits, operands["dy"].astype(np.float64) * scale, 0.0)
        return {"dx": BoundedSample(index, dx, abs(dx), problem.dtype)}
    state = operands["state"]
    bits = kept(problem.elements, state, threshold)
    y = np.where(bits, operands["x"].astype(np.float64) * scale, 0.0)
    mask, advanced = np.packbits(bits, bitorder="little"), state + np.array([0, problem.blocks])
    return {
        "y": BoundedSample(index, y, abs(y), problem.dtype),
        "mask": _exact(mask, "u8"),
        "state": _exact(advanced, "i64"),
    }


def _exact(values: np.ndarray, dtype: str) -> BoundedSample:
    return BoundedSample((np.arange(len(values)),), values, np.zeros(len(values)), dtype)
