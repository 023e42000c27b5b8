"""TensorBoard's event files that are written here: checksums by published values, files by TensorBoard's own reader."""

import numpy as np
import pytest

from tristep.viz.record.adapters import adapter
from tristep.viz.record.event_files import EventFile, crc32c


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_checksums_are_those_of_the_standard(data, crc):
    assert crc32c(data) == crc


@pytest.mark.parametrize("length", [4, 5, 255, 256, 257, 1000, 20_000])
def test_checksums_are_tensorboards(length):
    oracle = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").crc32c
    data = np.random.default_rng(length).bytes(length)
    assert crc32c(data) == int(oracle(data))


def test_tensorboard_reads_what_two_files_hold(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader").LegacyEventFileLoader
    event = pytest.importorskip("tensorboard.compat.proto.event_pb2").Event
    summary = pytest.importorskip("tensorboard.compat.proto.summary_pb2").Summary
    files = [EventFile(tmp_path / "new", event) for _ in range(2)]
    for number, file in enumerate(files):
        for step in range(3):
            file.add_summary(
                summary(value=[summary.Value(tag=f"name {i}", simple_value=number + step + i) for i in range(300)]), step
            )
        file.close()
    paths = sorted((tmp_path / "new").iterdir())
    assert len(paths) == 2
    for number, path in enumerate(paths):
        first, *rest = loader(str(path)).Load()
        assert first.file_version == "brain.Event:2"
        assert [each.step for each in rest] == [0, 1, 2]
        for step, each in enumerate(rest):
            assert [value.simple_value for value in each.summary.value] == [number + step + i for i in range(300)]


def test_a_folder_with_an_address_is_left_to_tensorboards_writer(tmp_path, monkeypatch):
    boards = pytest.importorskip("torch.utils.tensorboard")
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    place = "memory://tristep-events"
    with boards.SummaryWriter(place) as writer:
        target = adapter(writer)
        target.log(3, {"loss": 0.5})
        target.close()
    files = [name for name in fsspec.filesystem("memory").ls("/tristep-events", detail=False) if name.endswith(".tristep")]
    assert len(files) == 1
    assert b"loss" in fsspec.filesystem("memory").cat(files[0])
    assert not list(tmp_path.iterdir())
