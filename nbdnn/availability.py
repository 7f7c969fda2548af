"""Whether cuDNN is there, and which one."""

from __future__ import annotations

from nbdnn import config

_ABSENT = "this version of nbdnn has no cuDNN bindings: every op runs on the CPU candidates"


def version(raises: bool = True) -> int:
    """Version of the loaded cuDNN, as in 92700 for 9.27.0.

    Raises
    ------
    RuntimeError
        Where there is none; with ``raises=False`` the result is -1 instead.
    """
    if raises:
        raise RuntimeError(_ABSENT)
    return -1


class _Available:
    """Whether cuDNN works here: call it; `msg` says why not."""

    msg = ""

    def __call__(self) -> bool:
        """Whether cuDNN can be used. RuntimeError where the flag dnn.enabled demands it and it cannot."""
        enabled = config.current()["dnn.enabled"]
        self.msg = "the flag dnn.enabled is False" if enabled is False else _ABSENT
        if enabled is True:
            raise RuntimeError(f"the flag dnn.enabled is True, but {_ABSENT}")
        return False


dnn_available = _Available()
