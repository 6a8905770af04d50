"""Reports of all replicas' workers and stores, added up to one report each."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from google.protobuf.message import Message

from gpu_worker.v1 import gpu_worker_pb2 as pb

_OF_CALLS = ("call_bounds", "calls")
# how the names of fields end that count since a process's start; all others are of now
_COUNTING = ("_total", "_seconds", "_ratio")


def all_workers(known: Iterable[pb.StatsResponse], told: Iterable[pb.StatsResponse]) -> pb.StatsResponse:
    """Every figure summed. told: by those too that are gone, so that what counts never falls; known: by the others."""
    total, (known, told) = pb.StatsResponse(), (tuple(known), tuple(told))
    for field in total.DESCRIPTOR.fields:
        for each in told if field.name.endswith(_COUNTING) else known:
            _add(total, each, field.name)
    total.store_reachable = any(each.store_reachable for each in known)
    return total


def all_stores(each_told: Iterable[pb.StoreStatsResponse]) -> pb.StoreStatsResponse:
    """Every figure summed. All stores have the same bounds, as they are of one edition."""
    total, calls = pb.StoreStatsResponse(), dict[str, pb.StoreCalls]()
    names = [field.name for field in total.DESCRIPTOR.fields if field.name not in _OF_CALLS]
    for told in each_told:
        for name in names:
            _add(total, told, name)
        total.call_bounds[:] = told.call_bounds
        for each in told.calls:
            nothing = pb.StoreCalls(method=each.method, counts=[0] * len(each.counts))
            known = calls.setdefault(each.method, nothing)
            known.seconds += each.seconds
            known.counts[:] = map(sum, zip(known.counts, each.counts, strict=True))
            for code, count in each.codes.items():
                known.codes[code] += count
    total.calls.extend(calls.values())
    return total


def _add(total: Message, told: Message, name: str) -> None:
    """One field: a number, a histogram, or either by kind."""
    kind = total.DESCRIPTOR.fields_by_name[name].message_type
    mine, its = getattr(total, name), getattr(told, name)
    if kind is None:
        setattr(total, name, mine + its)
    elif not kind.GetOptions().map_entry:
        _add_histogram(mine, its)
    elif kind.fields_by_name["value"].message_type is None:
        for key, count in its.items():
            mine[key] += count
    else:
        for key, histogram in its.items():
            _add_histogram(mine[key], histogram)


def _add_histogram(mine: pb.Histogram, its: pb.Histogram) -> None:
    """Add a histogram. Bounds are equal, since all processes have one version; one that was not sent is empty."""
    if its.counts:
        mine.bounds[:] = its.bounds
        mine.counts[:] = map(sum, zip_longest(mine.counts, its.counts, fillvalue=0))
        mine.sum += its.sum
