import numpy as np
import pandas as pd
import pytest
import torch

import ownerwise as ow
from ownerwise.mechanisms.constraints import equalized_odds


def part():
    return ow.Partition({"sex": ("F", "M"), "label": (0, 1, 2)})


def test_every_record_has_one_cell_by_the_values_of_its_columns():
    cells = part().cells({"sex": ["F", "M", "M", "F"], "label": np.array([0, 2, 0, 1])})
    np.testing.assert_array_equal(cells, [0, 5, 3, 1])
    assert part().shape == (6, 3)


def test_targets_are_class_and_cell():
    found = part().targets(torch.tensor([2, 0]), {"sex": np.array(["M", "F"])})
    assert found.tolist() == [[2, 5], [0, 0]]
    assert found.dtype == torch.int64
    named = ow.Partition({"sex": ("F", "M")}, classes=("paid", "default"))
    assert named.targets(["default", "paid"], {"sex": ["M", "F"]}).tolist() == [[1, 1], [0, 0]]
    assert ow.Partition({}, classes=2).targets([1, 0]).tolist() == [[1, 0], [0, 0]]


def test_conditions_pick_pairs_of_cell_and_predicted_class():
    found = part()
    women = found["sex"] == "F"
    np.testing.assert_array_equal(women.mask[:, 0], [1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal((found["label"] == 1).mask[:, 2], [0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal((found["label"] != 1).mask, ~(found["label"] == 1).mask)
    np.testing.assert_array_equal((found.predicted == 2).mask, [[0, 0, 1]] * 6)
    np.testing.assert_array_equal((~women | women).mask, True)
    np.testing.assert_array_equal(found.wrong.mask, ~np.tile(np.eye(3, dtype=bool), (2, 1)))
    assert (women & (found["label"] != 1)).name == "sex = F and label ≠ 1"


def test_everything_wrong_with_a_partition_is_listed():
    with pytest.raises(ow.OwnerwiseError) as error:
        ow.Partition({"sex": ("F", "F"), "age": (), "label": (0, 1)}, classes=3)
    assert len(error.value.problems) == 3
    with pytest.raises(ow.OwnerwiseError, match="at least two distinct"):
        ow.Partition({"sex": ("F", "M")})


def test_everything_wrong_with_columns_is_listed():
    with pytest.raises(ow.OwnerwiseError) as error:
        part().cells({"sex": ["F", "X"], "age": [1, 2]})
    text = str(error.value)
    assert "an unknown value in record 1; expected one of 'F', 'M'" in text
    assert "'age' is not in the partition" in text
    assert "'label' is missing" in text
    with pytest.raises(ow.OwnerwiseError, match="'label' has 1 records"):
        part().cells({"sex": ["F", "M"], "label": [0]})
    with pytest.raises(
        ow.OwnerwiseError, match=r"labels has an unknown value in record 0; expected one of 0, 1, 2"
    ):
        part().targets([7], {"sex": ["F"]})
    with pytest.raises(ow.OwnerwiseError, match="got 2 labels, but 1 column entries"):
        ow.Partition({"sex": ("F", "M")}, classes=2).targets([0, 1], {"sex": ["F"]})


def test_columns_may_be_those_of_pandas():
    frame = pd.DataFrame({"sex": ["M", "F", "M"]})
    found = part().targets(pd.Series([2, 0, 1], index=[5, 6, 7]), frame)
    assert found.tolist() == [[2, 5], [0, 0], [1, 4]]
    grouped = pd.DataFrame({"sex": pd.Categorical(["M", "F", "M"])})
    assert part().targets([2, 0, 1], grouped).tolist() == found.tolist()


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
def test_missing_values_need_a_name(missing):
    for columns in ({"sex": ["F", missing]}, pd.DataFrame({"sex": ["F", missing]})):
        with pytest.raises(ow.OwnerwiseError, match=r"'sex' has .* such as 'unknown'"):
            part().targets([0, 1], columns)
    with pytest.raises(ow.OwnerwiseError, match=r"labels has .* such as 'unknown'"):
        part().targets([0, missing], {"sex": ["F", "M"]})


def test_conditions_are_combined_with_signs_not_words():
    """`and` would keep the second condition only."""
    women, positive = part()["sex"] == "F", part()["label"] == 1
    uses = (
        lambda: women and positive,
        lambda: women or positive,
        lambda: not women,  # pyright: ignore[reportGeneralTypeIssues]
    )
    for use in uses:
        with pytest.raises(ow.OwnerwiseError, match=r"'sex = F' .* with & \(and\), \| \(or\)"):
            use()


def test_the_missing_label_is_named_with_its_values():
    plain = ow.Partition({"sex": ("F", "M")}, classes=2)
    with pytest.raises(ow.OwnerwiseError) as refusal:
        equalized_odds(plain, "sex", max_gap=0.1)
    assert "Partition({'sex': ('F', 'M'), 'label': (0, 1)})" in str(refusal.value)
    with pytest.raises(ow.OwnerwiseError, match=r"no column 'label' .* add it: "):
        _ = plain.wrong


def test_unknown_columns_and_values_are_named():
    with pytest.raises(ow.OwnerwiseError, match="no column 'race'"):
        part()["race"]
    for compare in (lambda c: c == "X", lambda c: c != "X"):
        with pytest.raises(ow.OwnerwiseError, match=r"sex = 'X': expected one of 'F', 'M'"):
            compare(part()["sex"])
    with pytest.raises(ow.OwnerwiseError, match="different partitions"):
        _ = (part()["sex"] == "F") & (part()["sex"] == "F")
