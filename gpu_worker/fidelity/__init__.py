"""How near a policy's logits are to those of dense attention, over tokens that are forced through decode steps."""

from gpu_worker.fidelity.job import Job, Setting, read_job
from gpu_worker.fidelity.measure import Fidelity, Measured
from gpu_worker.fidelity.scores import Lane, Scores

__all__ = ["Fidelity", "Job", "Lane", "Measured", "Scores", "Setting", "read_job"]
