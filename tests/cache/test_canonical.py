from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_planner.cache.canonical import canonical_json, digest

printable = st.text(st.characters(min_codepoint=32, max_codepoint=126))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | printable,
    lambda inner: st.lists(inner) | st.dictionaries(printable, inner),
    max_leaves=20,
)


def test_one_form_whatever_the_key_order() -> None:
    assert canonical_json({"b": 1, "a": [True, None, 'e"']}) == b'{"a":[true,null,"e\\""],"b":1}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


def test_tuples_and_lists_are_one_thing() -> None:
    assert digest({"a": (1, 2)}) == digest({"a": [1, 2]})


@given(values)
def test_ascii_without_spaces_outside_strings(value: object) -> None:
    import json

    text = canonical_json(value)
    assert text.isascii()
    assert json.loads(text) == json.loads(json.dumps(value))
    assert canonical_json(json.loads(text)) == text


@pytest.mark.parametrize(
    "value",
    [1.5, {"a": [0.0]}, {1: "a"}, {"a": b"bytes"}, {"a": {1, 2}}, float("nan"), "é", ["a\n"], {"\0": 1}, "\ud800"],
)
def test_what_has_no_single_form_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(TypeError, match="value"):
        canonical_json(value)
