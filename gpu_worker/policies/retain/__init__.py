"""Retain: each layer keeps a part of the prompt, or means of it."""

from gpu_worker.policies.retain.base import LayerRows, Retained, RetainPolicy, ScoredPolicy
from gpu_worker.policies.retain.cam import CaM
from gpu_worker.policies.retain.chelsea import Chelsea
from gpu_worker.policies.retain.h2o import H2O, H2OCompensated
from gpu_worker.policies.retain.nacl import NACL
from gpu_worker.policies.retain.protokv import ProtoKV
from gpu_worker.policies.retain.pyramidkv import PyramidKV
from gpu_worker.policies.retain.scissorhands import Scissorhands
from gpu_worker.policies.retain.semantickv import SemanticKV
from gpu_worker.policies.retain.snapkv import SnapKV
from gpu_worker.policies.retain.streaming_llm import StreamingLLM

__all__ = [
    "H2O",
    "NACL",
    "CaM",
    "Chelsea",
    "H2OCompensated",
    "LayerRows",
    "ProtoKV",
    "PyramidKV",
    "RetainPolicy",
    "Retained",
    "Scissorhands",
    "ScoredPolicy",
    "SemanticKV",
    "SnapKV",
    "StreamingLLM",
]
