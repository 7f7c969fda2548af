"""Engines, plans and packs, planned for a GPU that need not be here."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from planned import DEVICE, H200_PROPERTIES

from nbdnn.cudnn import plan_file
from nbdnn.cudnn.api import StatusError
from nbdnn.cudnn.conv_operations import Scalars, operations
from nbdnn.cudnn.descriptors import Backend
from nbdnn.cudnn.enums import Attribute, AttributeType
from nbdnn.cudnn.graph import (
    EngineConfig,
    Packs,
    Plan,
    Proposal,
    operation_graph,
    plan,
    proposals,
)
from nbdnn.cudnn.handle import property_descriptor
from nbdnn.errors import NbdnnWarning
from nbdnn.problem import parse

LAYER = "n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross"


def graph(text: str, scalars: Scalars = Scalars()) -> Backend:  # noqa: B008
    return operation_graph(operations(parse(text), scalars).operations)


def proposed(text: str) -> list[Proposal]:
    return proposals(graph(text), property_descriptor(DEVICE))


def test_the_gpu_is_as_it_was_described() -> None:
    told = json.loads(property_descriptor(DEVICE).get_text(Attribute.DEVICEPROP_JSON_REPRESENTATION))
    assert told["multiProcessorCount"] == DEVICE.sms and set(told) <= set(H200_PROPERTIES)


@pytest.mark.parametrize(
    "text",
    [
        f"conv_fwd:bf16:{LAYER}:nhwc",
        f"conv_fwd:f32:{LAYER}:nchw",
        f"conv_bwd_data:f16:{LAYER}:nchw",
        f"conv_bwd_filter:f64:{LAYER}:nhwc",
        f"conv_fwd:bf16:{LAYER}:nhwc:e:bias+relu",
    ],
)
def test_a_config_by_its_numbers_is_the_proposed_one(text: str) -> None:
    """What is stored, engine and knobs, makes the plan that the heuristics meant."""
    where, found = property_descriptor(DEVICE), proposed(text)
    assert len(found) >= 3 and len({str(each.config) for each in found}) == len(found)
    for proposal in found:
        if not proposal.compiled_at_run_time:
            assert plan(where, graph(text), proposal.config).workspace_bytes == proposal.workspace_bytes
    assert any(proposal.workspace_bytes for proposal in found)


def test_a_configs_text() -> None:
    assert str(EngineConfig(62, ((2, 5), (13, 1)))) == "e62:2=5,13=1"
    assert str(EngineConfig(0)) == "e0"


def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(StatusError, match="cudnnBackendFinalize -> CUDNN_STATUS_"):
        plan(property_descriptor(DEVICE), graph(f"conv_fwd:f32:{LAYER}:nchw"), EngineConfig(9999))


def test_a_graph_that_no_engine_runs() -> None:
    assert proposed(f"conv_fwd:f16:cf16:{LAYER.replace('cross', 'conv')}:nhwc:e:bias+relu") == []


def test_packs_hold_pointers_by_id_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Attribute, list[int]]] = []
    real = Backend.set

    def recording(self: Backend, attribute: Attribute, values: Sequence[int], *kind: AttributeType) -> Backend:
        told.append((attribute, list(values)))
        return real(self, attribute, values, *kind)

    monkeypatch.setattr(Backend, "set", recording)
    packs = Packs([(1, 0), (2, 1), (3, 2), (4, 3), (9, 2)], own=(4096,))
    first = packs((256, 512, 768), 1024)
    assert told == [
        (Attribute.VARIANT_PACK_DATA_POINTERS, [256, 512, 768, 4096, 768]),
        (Attribute.VARIANT_PACK_UNIQUE_IDS, [1, 2, 3, 4, 9]),
        (Attribute.VARIANT_PACK_WORKSPACE, [1024]),
    ]
    assert packs((256, 512, 768), 1024) == first and len(told) == 3
    assert len({first, packs((256, 512, 768), 2048), packs((256, 512, 1280), 1024)}) == 3


def test_packs_are_bounded_and_forget_what_was_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdnn.cudnn.graph._MOST_PACKS", 2)
    packs = Packs([(1, 0)])
    for address in (256, 512, 256, 768):
        packs((address,), 0)
    assert [pointers for (pointers, _) in packs._packs] == [(256,), (768,)]


class TestStoredPlans:
    """A plan whose kernel is compiled: kept on disk, and compiled again where the file is no good."""

    TEXT = "conv_fwd:f32:n32c144h56w56:k144r3s3:p1x1:u1x1:d1x1:g144:cross:nhwc"

    @pytest.fixture
    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Plan]:
        """Compile the plan; made.calls counts."""
        monkeypatch.setattr(plan_file, "folder", lambda: tmp_path / "plans")
        compiled = next(proposal for proposal in proposed(self.TEXT) if proposal.compiled_at_run_time)

        def made() -> Plan:
            made.calls += 1
            return plan(property_descriptor(DEVICE), graph(self.TEXT), compiled.config)

        made.calls = 0
        return made

    def stored(self, make: Callable[[], Plan], key: str = "key") -> Plan:
        return plan_file.stored_plan((key,), DEVICE, property_descriptor(DEVICE), make)

    def test_made_once_and_read_again(self, make: Callable[[], Plan], tmp_path: Path) -> None:
        first = self.stored(make)
        again = self.stored(make)
        assert make.calls == 1 and again.text() == first.text() and again.workspace_bytes == first.workspace_bytes
        (file,) = (tmp_path / "plans").iterdir()
        assert b'"cudnnVersion"' in file.read_bytes() and file.stat().st_size > 10_000
        self.stored(make, "another")
        assert make.calls == 2 and len(list((tmp_path / "plans").iterdir())) == 2

    @pytest.mark.parametrize("fault", ["truncated", "changed", "empty", "of another cuDNN", "unreadable"])
    def test_a_damaged_file_is_compiled_again(
        self, make: Callable[[], Plan], tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.stored(make)
        (file,) = (tmp_path / "plans").iterdir()
        good = file.read_bytes()
        match fault:
            case "truncated":
                file.write_bytes(good[:1000])
            case "changed":
                file.write_bytes(good.replace(b'"dim":', b'"Dim":'))
            case "empty":
                file.write_bytes(b"")
            case "of another cuDNN":
                text = good.partition(b"\n")[2].replace(b'"cudnnVersion":', b'"cudnnVersion":1')
                plan_file._write(file, text)
            case "unreadable":
                file.unlink()
                file.mkdir()
        is_told = pytest.warns(NbdnnWarning, match="cannot be kept") if fault == "unreadable" else nullcontext()
        with caplog.at_level(logging.WARNING, "nbdnn"), is_told:
            assert self.stored(make).text()
        assert make.calls == 2 and "compiling again" in caplog.text
        if fault != "unreadable":
            assert self.stored(make).text() and make.calls == 2  # the file is whole again

    def test_a_place_that_cannot_be_written(self, make: Callable[[], Plan], tmp_path: Path) -> None:
        (tmp_path / "plans").touch()
        with pytest.warns(NbdnnWarning, match="cannot be kept"):
            assert self.stored(make).workspace_bytes >= 0
        assert make.calls == 1
