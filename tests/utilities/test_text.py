from pl_grouprl.utilities.text import first_names, shorten


def test_the_first_names_and_how_many_more():
    assert first_names(["a", "b"]) == "a, b"
    assert first_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert first_names(["a", "b", "c"], limit=2) == "a, b and 1 more"
    assert first_names([]) == "none"


def test_a_long_value_is_cut():
    assert shorten("a" * 78) == f"'{'a' * 78}'"
    assert shorten("a" * 79) == f"'{'a' * 79}..."
    assert shorten([1, 2, 3], length=4) == "[1, ..."
