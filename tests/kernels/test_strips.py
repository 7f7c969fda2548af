"""How many rows a worker's own strips have."""

from __future__ import annotations

from nbdnn.kernels.cpu.strips import own_rows


def test_two_workers_share_an_image_evenly() -> None:
    assert own_rows(height=28, width=28, outer=1, most_rows=28, tile_pixels=16, threads=2) == 14


def test_a_strip_has_no_more_rows_than_fit() -> None:
    assert own_rows(height=28, width=28, outer=1, most_rows=8, tile_pixels=16, threads=2) == 7


def test_images_are_not_cut_where_there_are_enough() -> None:
    assert own_rows(height=7, width=7, outer=8, most_rows=7, tile_pixels=7, threads=2) == 7


def test_too_few_rows_leave_workers_idle() -> None:
    assert own_rows(height=7, width=7, outer=1, most_rows=7, tile_pixels=16, threads=2) == 0
    assert own_rows(height=1, width=1000, outer=3, most_rows=1, tile_pixels=16, threads=2) == 0


def test_more_images_than_one_looks_at() -> None:
    assert own_rows(height=8, width=8, outer=1000, most_rows=8, tile_pixels=16, threads=2) == 0
