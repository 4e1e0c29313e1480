"""Random models whose matrices are known by construction: none is routed wrong in silence."""

import helpers
import pytest
from random_models import matrices, random_model

from muon_jax import by_use


def wrong_routes(seed):
    """The parameters with other matrices than expected, or None where `by_use` raises."""
    fn, params, inputs, expected, _ = random_model(seed)
    try:
        routes = by_use(fn, params, *inputs)
    except ValueError:
        return None
    return [
        routed
        for routed in routes.parameters
        if matrices(routed.shape, routed.view) != matrices(routed.shape, expected[routed.path])
    ]


@pytest.mark.parametrize(
    "seeds", helpers.mostly_slow([range(0, 12), range(12, 24)], [range(0, 12)]), ids=str
)
def test_no_route_is_wrong(seeds):
    assert {seed: found for seed in seeds if (found := wrong_routes(seed))} == {}


@helpers.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_models_and_few_raise():
    found = {seed: wrong_routes(seed) for seed in range(100, 1100)}
    assert {seed: routes for seed, routes in found.items() if routes} == {}
    assert sum(routes is None for routes in found.values()) <= 20
