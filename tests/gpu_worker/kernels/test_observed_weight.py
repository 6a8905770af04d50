"""The reference reads any number of queries at a time. All else is in the table of `test_contract`."""

from __future__ import annotations

import pytest
import torch
from operations.weights import queries_anywhere

from gpu_worker.kernels.observed_weight import reference


@pytest.mark.parametrize("max_weights", [1, 200])
@pytest.mark.parametrize("group", [1, 3])
def test_any_number_of_queries_at_a_time(group: int, max_weights: int) -> None:
    arguments = queries_anywhere(group, 9, 21, "none")
    found = reference.observed_weight(**arguments, max_weights=max_weights)
    torch.testing.assert_close(found, reference.observed_weight(**arguments), atol=1e-6, rtol=1e-5)
