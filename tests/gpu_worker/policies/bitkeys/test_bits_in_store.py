"""A store that selects codes keys as the worker does, and chooses as it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from policy_index import SHAPE, Tokens, grow, new_index, select

from gpu_worker.policies.bitkeys.policy import BitKeys
from kv_store.client import BitParams, RowFormat
from kv_store.index import ArrayKeys, FitOptions, make_index

POLICY = BitKeys()


def test_the_store_codes_and_selects_as_the_worker() -> None:
    shape = replace(SHAPE, row_format=RowFormat(64, "fp32"), max_model_len=1100)
    tokens, plan = Tokens.random(1100, 0, shape), POLICY.plan(900, 90)
    tokens.keys[..., 3] += 30.0
    index = new_index(POLICY, shape)
    begin, end = grow(POLICY, index, 1, tokens, plan)
    query = torch.randn(1, 2 * shape.num_kv_heads, 64, generator=torch.Generator().manual_seed(2))
    chosen = select(POLICY, index, query, {1: (begin, end)}, layer=1, k=60)[0]

    job = POLICY.store_job(plan, begin, 900 - plan.num_recent)
    assert (job.begin, job.end, job.params) == (0, 900, BitParams(begin))
    store = make_index(job.params)
    for head in range(shape.num_kv_heads):
        keys = tokens.keys[1, head].numpy()
        anchors, codes = store.fit_head(ArrayKeys(keys[:900]), FitOptions(1, 0, 0)).arrays
        added = store.extend_head(ArrayKeys(keys[900:end]), (anchors, codes))
        codes = np.concatenate([codes, added])
        ours = index.codes[1, 1, head, begin:end].numpy()
        # Sums are rounded in another order: a coordinate may fall on the other side of a border.
        assert (codes[:, :-2] == ours).mean() > 0.999
        group = query[0, 2 * head : 2 * head + 2].numpy()
        found = store.select_head(group, [(anchors, codes)], 60, shape.scale) + begin
        assert len(set(found.tolist()) ^ set(chosen[head])) <= 2
