"""Trailing metadata of every kind that grpc gives."""

from __future__ import annotations

from collections.abc import Iterator, KeysView

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from carrel.process.trailing import trailing_of
from gateway.errors import StoreUnavailable
from gateway.worker_client import error_of

PAIRS = (("carrel-code", "store_unavailable"), ("other", "1"))


class OldMetadata(Metadata):
    """As grpcio 1.76 has it: its keys are pairs."""

    def keys(self) -> KeysView[str]:
        return KeysView(self)  # type: ignore[arg-type]


class Failed:
    def __init__(self, metadata: object) -> None:
        self._metadata = metadata

    def trailing_metadata(self) -> object:
        return self._metadata


def kinds() -> Iterator[object]:
    yield PAIRS
    yield Metadata(*PAIRS)
    yield OldMetadata(*PAIRS)


@pytest.mark.parametrize("metadata", [*kinds()], ids=lambda metadata: type(metadata).__name__)
def test_pairs_are_read_whatever_has_them(metadata: object) -> None:
    assert trailing_of(Failed(metadata)) == dict(PAIRS)


@pytest.mark.parametrize("nothing", [None, (), OldMetadata()])
def test_nothing_is_nothing(nothing: object) -> None:
    assert trailing_of(Failed(nothing)) == {}


def test_a_workers_refusal_is_told_as_it_is() -> None:
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), OldMetadata(*PAIRS), details="gone")
    assert isinstance(error_of(error, 1.0), StoreUnavailable)
