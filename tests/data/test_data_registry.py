"""Data sets by name."""

from ownerwise import data
from tools.data_tools import problems


def test_the_library_has_one_data_set_of_its_own():
    assert next(iter(data.LOADERS)) == "digits"
    assert data.load("digits").name == "digits"


def test_an_unknown_name_is_answered_with_the_nearest():
    problems(lambda: data.load("digit"), "'digit'", "did you mean 'digits'?")


def test_options_are_those_of_the_loader():
    problems(
        lambda: data.load("digits", scaling="unit"), "no option scaling", "did you mean 'scale'?"
    )
    assert data.load("digits", scale="signed").train.inputs.min() == -1
