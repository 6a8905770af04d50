"""The stores of all replicas, as one."""

from __future__ import annotations

from collections.abc import Iterable

from gpu_worker.v1 import gpu_worker_pb2 as pb

_OF_CALLS = ("call_bounds", "calls")


def all_stores(each_told: Iterable[pb.StoreStatsResponse]) -> pb.StoreStatsResponse:
    """Every figure summed. All stores have the same bounds, as they are of one edition."""
    total, calls = pb.StoreStatsResponse(), dict[str, pb.StoreCalls]()
    names = [field.name for field in total.DESCRIPTOR.fields if field.name not in _OF_CALLS]
    for told in each_told:
        for name in names:
            setattr(total, name, getattr(total, name) + getattr(told, name))
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
