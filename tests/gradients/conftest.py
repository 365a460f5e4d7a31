import pytest
import torch


@pytest.fixture(autouse=True)
def _double_precision():
    """Equality is shown in float64; tests of other types say so."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
