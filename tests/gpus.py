"""The GPU that tests run on, or where there is none, one to plan and compile for."""

from __future__ import annotations

from nbdnn import driver
from nbdnn.device import Gpu, gpu

H200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 150_109_880_320, 62_914_560, "13.0", 1.98e9, 4.8e12)
DEVICE = gpu(0) if driver.device_count() else H200
