"""What filter gradients by products of transformed images share, Winograd's and those by Fourier transforms: a block's
tile of the products M, which `winograd_product.py` makes."""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.fma_tile import Tile
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.problem_conv import ConvProblem

TILES = (Tile(128, 128), Tile(64, 64))
STAGES_OF_START = 3  # what filling the pipeline and storing a tile cost, in stages
_HOPELESS = 1.5  # times the best guess


class Config(NamedTuple):
    """A block's tile of M."""

    tile: Tile

    def __str__(self) -> str:
        return f"{self.tile.m}x{self.tile.n}"


class ByProducts(LaunchedCandidate[Config]):
    """A filter gradient of one tile of M or another."""

    op = "conv_bwd_filter"

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        """By the guess; of tiles that are not mostly empty, and none without hope."""
        fitting = [t for t in TILES if t.m < 2 * problem.k and t.n < 2 * problem.c] or [TILES[-1]]
        guesses = {Config(tile): self.estimate(problem, Config(tile), device) for tile in fitting}
        limit = _HOPELESS * min(guesses.values())
        return tuple(sorted((c for c in guesses if guesses[c] <= limit), key=guesses.__getitem__))
