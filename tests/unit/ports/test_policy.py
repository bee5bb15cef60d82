"""The entry of a policy refuses fields of other types."""

import pytest

from shardcore.domain.errors import PluginError
from shardcore.ports.policy import PolicyEntry


@pytest.mark.parametrize("count", [0, -1, True, "2", None])
def test_a_number_of_batch_axes_that_is_none_is_refused(count):
    with pytest.raises(PluginError, match=r"batch_ndim=\.\.\.\): expected an int of 1 or more"):
        PolicyEntry("mine", "An example.", lambda model, mesh: {}, batch_ndim=count)
