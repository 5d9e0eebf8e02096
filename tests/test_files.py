"""Files that are whole or not there."""

from __future__ import annotations

import pytest

from posttrain.files import read_object, whole_file


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    with whole_file(path) as partial:
        partial.write_text('{"a": 1}')
        assert not path.exists()
    assert read_object(path) == {"a": 1}
    with pytest.raises(KeyError), whole_file(path) as partial:
        partial.write_text("[")
        raise KeyError
    assert read_object(path) == {"a": 1} and [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("content", ["[1]", "{", None])
def test_what_is_no_object_reads_as_an_empty_one(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    assert read_object(path) == {}
