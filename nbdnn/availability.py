"""Whether cuDNN is there, and which one."""

from __future__ import annotations

from nbdnn import config, driver
from nbdnn.errors import CudnnError


def version(raises: bool = True) -> int:
    """Version of the loaded cuDNN, as in 92700 for 9.27.0.

    Raises
    ------
    RuntimeError
        Where there is none; with ``raises=False`` the result is -1 instead. Always where its parts are of different
        versions.
    """
    from nbdnn.cudnn.library import MixedVersions, library

    try:
        return library().version
    except MixedVersions:
        raise
    except CudnnError:
        if raises:
            raise
        return -1


class _Available:
    """Whether cuDNN works here: call it; `msg` says why not."""

    msg = ""

    def __call__(self) -> bool:
        """Whether cuDNN can be used. RuntimeError where the flag dnn.enabled demands it and it cannot."""
        enabled = config.current()["dnn.enabled"]
        self.msg = "the flag dnn.enabled is False" if enabled is False else _fault()
        if enabled is True and self.msg:
            raise RuntimeError(f"the flag dnn.enabled is True, but {self.msg}")
        return not self.msg


def _fault() -> str:
    """Why cuDNN cannot be used; '' where it can."""
    if not driver.device_count():
        return "there is no GPU, or no driver for it: every op runs on the CPU candidates"
    from nbdnn.cudnn.library import library

    try:
        library()
    except CudnnError as error:
        return str(error)
    return ""


dnn_available = _Available()
