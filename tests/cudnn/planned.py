"""A GPU to plan for: the one that is here, else an H200 as cuDNN describes it."""

from __future__ import annotations

import json

from gpus import DEVICE, H200

from nbdnn import driver
from nbdnn.cudnn import handle

# As cuDNN 9.19 gave it on an H200, and what 9.28 asks for besides.
H200_PROPERTIES = {
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536,
    "multiProcessorCount": 132,
    "smCountOrigin": 0,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "oversizedSharedMemoryPerBlock": 0,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "pciDeviceId": 6,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 150109880320,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "l2CacheSize": 62914560,
    "cudaDeviceId": 0,
    "deviceVer": 900,
    "driverVer": 13000,
    "deviceName": "NVIDIA H200",
}

if not driver.device_count():
    handle.describe(H200, json.dumps(H200_PROPERTIES).encode())

__all__ = ["DEVICE", "H200_PROPERTIES"]
