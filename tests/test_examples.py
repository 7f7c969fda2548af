"""The examples do what they say; `make demo` runs the one of ResNet-50."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_network_learns() -> None:
    losses, right = example("train").train(40)
    assert losses[0] > 1 and max(losses[-5:]) < 0.2 and right > 0.9


@pytest.mark.usefixtures("torch")
def test_a_layer_of_torch_has_torchs_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("autograd").main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
