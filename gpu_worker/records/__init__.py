"""The records that cross the engine's seam: a request in, events out."""

from gpu_worker.records.events import (
    AttentionEvent,
    CompleteEvent,
    ErrorEvent,
    Event,
    EventSink,
    FinishReason,
    ProgressEvent,
    PromptEvent,
    TokenEvent,
    Usage,
)
from gpu_worker.records.reports import (
    EngineInfo,
    EngineStats,
    SessionCard,
)
from gpu_worker.records.requests import (
    Budget,
    Constraint,
    GenerationRequest,
    Grammar,
    GrammarKind,
    HotCacheSize,
    IndexDevice,
    SamplingParams,
)

__all__ = [
    "AttentionEvent",
    "Budget",
    "CompleteEvent",
    "Constraint",
    "EngineInfo",
    "EngineStats",
    "ErrorEvent",
    "Event",
    "EventSink",
    "FinishReason",
    "GenerationRequest",
    "Grammar",
    "GrammarKind",
    "HotCacheSize",
    "IndexDevice",
    "ProgressEvent",
    "PromptEvent",
    "SamplingParams",
    "SessionCard",
    "TokenEvent",
    "Usage",
]
