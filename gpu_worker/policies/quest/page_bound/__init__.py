"""Upper bound of a query's inner products with the keys of every page."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.quest.page_bound import reference

page_bound = by_device(reference.page_bound)
