"""Test the order of last uses against a plain list of all uses."""

from __future__ import annotations

import numpy as np
from store_samples import Clock

from kv_store.last_uses import LastUses


def test_the_least_recently_used_come_first_as_in_a_plain_list(clock: Clock) -> None:
    random, uses, plain = np.random.default_rng(0), LastUses(20, clock), []
    for _ in range(60):
        clock.now += random.integers(2)
        chain = random.choice(20, random.integers(6), replace=False)
        uses.renew(chain)
        # The first of a chain is used last.
        plain = [place for place in plain if place not in chain] + chain[::-1].tolist()
        assert (uses.at[chain] == clock.now).all()
        among = random.permutation(plain)[: random.integers(len(plain) + 1)]
        count = int(random.integers(1, 22))
        assert uses.oldest(among, count).tolist() == [place for place in plain if place in among][:count]
