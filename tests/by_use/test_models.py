"""`by_use` on models of all kinds: each parameter has the role and the view that its source says."""

import pytest
import real_language_models  # noqa: F401
import real_other_models  # noqa: F401
import real_vision_models  # noqa: F401
from use_models import MODELS, differences

from muon_jax import by_use


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_has_its_role_and_view(name):
    fn, params, inputs, expected = MODELS[name]()
    assert not differences(by_use(fn, params, *inputs).parameters, expected)
