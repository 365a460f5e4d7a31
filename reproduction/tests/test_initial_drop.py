import numpy as np
import pytest

from ownerwise_reproduction.initial_drop import minority_initial_drop


def test_minority_initial_drop():
    """The first evaluations in a row, but for one; later ones, however bad, are not initial."""
    strict = [1.0, 1.3, 0.9, 1.2, 0.9, 0.9, 1.5]
    groups = np.stack([np.linspace(1.0, 0.4, 7), strict], axis=1)
    overall = np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    lax, strict = minority_initial_drop(groups, overall)
    assert lax is None
    assert strict.depth == pytest.approx(0.3)
    assert (strict.first, strict.last) == (1, 3)
    with pytest.raises(ValueError, match="expected"):
        minority_initial_drop(groups, overall[:3])
