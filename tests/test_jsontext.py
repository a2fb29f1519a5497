"""Text that is put together is that of `json.dumps`, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packckpt.jsontext import COMPACT, INDENTED, Style

# Half surrogate pairs, quotes, line breaks: whatever a name in JSON can be.
TEXT = st.text(st.characters())
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=10)
# What a table holds: few different values, of one type.
TABLES = st.one_of(
    st.dictionaries(TEXT, st.lists(st.sampled_from(["a\n", 'b"', "é"]), max_size=3).map(tuple)),
    st.dictionaries(TEXT, st.sampled_from([0.0, 7.0, 2.0**53, 1e-9])),
    st.dictionaries(TEXT, TEXT),
)
EXPECTED: dict[Style, dict[str, Any]] = {
    COMPACT: {"sort_keys": True, "separators": (",", ":")},
    INDENTED: {"indent": 2},
}


@pytest.mark.parametrize("style", EXPECTED, ids=str)
class TestTextIsThatOfJson:
    @given(value=VALUES)
    def test_of_a_value(self, style: Style, value: Any) -> None:
        assert style.value(value, 0) == json.dumps(value, **EXPECTED[style])

    @given(content=st.dictionaries(TEXT, VALUES), tables=st.dictionaries(TEXT, TABLES, max_size=3))
    def test_of_an_object_put_together(self, style: Style, content: dict[str, Any], tables: dict[str, Any]) -> None:
        texts = {name: style.value(value, 1) for name, value in content.items()}
        texts.update({name: style.table(table, 1) for name, table in tables.items()})

        assert style.members(texts, 0) == json.dumps({**content, **tables}, **EXPECTED[style])

    @given(objects=st.dictionaries(TEXT, TABLES, max_size=3))
    def test_of_objects_in_an_object_in_an_object(self, style: Style, objects: dict[str, Any]) -> None:
        inner = style.members({name: style.table(table, 2) for name, table in objects.items()}, 1)

        assert style.members({"outer": inner}, 0) == json.dumps({"outer": objects}, **EXPECTED[style])
