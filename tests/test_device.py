"""Facts about the device: how much memory may still be taken, and how many threads there are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from nbdnn import config, device

LIMIT, USED, CACHED = 1 << 30, 1000 << 20, 900 << 20


@pytest.mark.parametrize(
    ("names", "limit", "free"),
    [
        (("memory.max", "memory.current", "inactive_file"), str(LIMIT), LIMIT - USED + CACHED),
        (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), str(LIMIT), LIMIT - USED + CACHED),
        (("memory.max", "memory.current", "inactive_file"), str(64 << 20), 0),
        (("memory.max", "memory.current", "inactive_file"), "max", 4 << 40),
    ],
)
def test_memory_of_a_control_group_is_free_where_it_caches_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, str, str], limit: str, free: int
) -> None:
    for name, text in zip(names, (limit, str(USED)), strict=False):
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_anon 7\n{names[2]} {CACHED}\nactive_file 9\n")
    monkeypatch.setattr(device, "_CONTROL_GROUPS", (device._ControlGroup(str(tmp_path), *names),))
    monkeypatch.setattr(device, "_meminfo_available_bytes", lambda: 4 << 40)
    assert device.cpu_device().free_memory_bytes() == free


def test_a_machine_without_control_groups_has_what_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing = device._ControlGroup(str(tmp_path), "memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(device, "_CONTROL_GROUPS", (nothing,))
    monkeypatch.setattr(device, "_meminfo_available_bytes", lambda: 123)
    assert device.cpu_device().free_memory_bytes() == 123


def test_threads_are_counted_while_another_thread_imports_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_ask_numba", None)
    for name in ("numba", "numba.core.config", "numba.np.ufunc.parallel"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert device.thread_count() == (config.numba_threads() or device.processors())
