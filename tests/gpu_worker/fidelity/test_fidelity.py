"""Scores of tokens that are forced through decode steps are those of a whole dense forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from engine_rig import Rig, every_small_policy, random_prompt

from gpu_worker.errors import ConfigError
from gpu_worker.fidelity import Fidelity, Job, Setting, read_job

NUM_FORCED, NUM_GENERATED = 12, 10
DOCUMENTS = tuple(random_prompt(110 + index, seed=index) for index in range(3))


def job(*settings: Setting) -> Job:
    return Job(DOCUMENTS, settings, NUM_FORCED, NUM_GENERATED, num_together=2)


def test_forced_tokens_are_scored_as_a_dense_forward_scores_them() -> None:
    rig = Rig()
    whole, part = Setting("oracle", 1.0), Setting("oracle", 40.0)
    found = [each for some in Fidelity(rig.worker, job(whole, part)).run() for each in some]
    # Two documents side by side under every setting, then the last one.
    assert [(each.document, each.policy, each.budget) for each in found] == [
        (document, policy, budget)
        for group in ((0, 1), (2,))
        for policy, budget in (("full", None), ("oracle", 1.0), ("oracle", 40.0))
        for document in group
    ]
    for each in found:
        token_ids = torch.tensor(DOCUMENTS[each.document])
        log_probs = dense_forward(rig.model.decoder, token_ids).log_softmax(-1)
        # The first forced token is the prefill's to predict.
        first = len(token_ids) - NUM_FORCED
        scored = log_probs[first:-1].gather(1, token_ids[first + 1 :, None])
        assert each.num_scored == len(scored) == NUM_FORCED - 1
        if each.budget in (None, 1.0):
            assert each.nll == pytest.approx(-scored.mean().item(), abs=1e-4)
            assert each.kl == pytest.approx(0.0, abs=1e-5)
            assert (each.agreement, each.same_tokens) == (1.0, NUM_GENERATED)
        else:
            assert each.nll != pytest.approx(-scored.mean().item(), abs=1e-4)
            assert each.kl is not None
            assert each.kl > 1e-3
            assert each.attended == 40
            assert each.same_tokens is not None
            assert each.same_tokens < NUM_GENERATED
    rig.check_empty()


def test_output_errors_are_by_layer_and_head_of_measured_documents() -> None:
    rig = Rig(policies=every_small_policy(), tokens_per_slab=256)
    settings = [Setting(policy, s) for policy in ("oracle", "snapkv") for s in (0.97, 0.2)]
    asked = Job(DOCUMENTS[:2], tuple(settings), NUM_FORCED, 0, num_together=2, measured=(1,))
    found = [each for some in Fidelity(rig.worker, asked).run() for each in some]
    shape = rig.model.config.num_layers, rig.model.config.num_heads
    means = {}
    for each in found:
        is_measured = each.document == 1 and each.policy != "full"
        assert (each.output_errors is not None) == (each.best_recall is not None) == is_measured
        if each.output_errors is not None:
            errors = torch.tensor(each.output_errors)
            assert errors.shape == shape
            means[each.policy, each.budget] = errors.mean().item()
    for policy in ("oracle", "snapkv"):
        assert 0.0 < means[policy, 0.97] < 0.2 * means[policy, 0.2] < 0.2
    assert means["oracle", 0.2] < means["snapkv", 0.2]
    rig.check_empty()


def test_what_a_policy_refuses_is_told_and_the_others_go_on() -> None:
    rig = Rig(policies=every_small_policy())
    refused = Setting("chelsea+outliers", 12.0)
    found = [
        each for some in Fidelity(rig.worker, job(refused, Setting("oracle", 0.5))).run() for each in some
    ]
    assert all((each.error is None) == (each.policy != "chelsea+outliers") for each in found)


def test_time_that_is_up_ends_between_settings() -> None:
    rig, asked = Rig(), 0

    def is_over() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    settings = [Setting("oracle", share) for share in (0.5, 0.25)]
    found = list(Fidelity(rig.worker, job(*settings), is_over).run())
    assert [some[0].budget for some in found] == [None, 0.5]


def test_a_job_is_read_and_a_short_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    content = {
        "documents": [[1, 2, 3, 4]],
        "settings": [["oracle", 0.5]],
        "num_forced": 2,
        "num_generated": 0,
        "measured": [0],
    }
    path.write_text(json.dumps(content))
    assert read_job(path) == Job(((1, 2, 3, 4),), (Setting("oracle", 0.5),), 2, 0, measured=(0,))
    path.write_text(json.dumps(content | {"num_forced": 4}))
    with pytest.raises(ConfigError, match="documents with more"):
        read_job(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no job"):
        read_job(path)
