"""The public names: sorted, lazy, and none of them missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import posttrain

HEAVY = ("torch", "transformers", "datasets", "peft", "accelerate")


def test_names_are_sorted_and_unique():
    assert list(posttrain.__all__) == sorted(set(posttrain.__all__))


@pytest.mark.parametrize("name", posttrain.__all__)
def test_name_resolves(name: str):
    assert getattr(posttrain, name).__name__ == name


def test_names_are_listed():
    assert set(posttrain.__all__) <= set(dir(posttrain))


def test_misspelt_name_is_an_attribute_error_with_a_hint():
    with pytest.raises(AttributeError, match="Did you mean 'SFTTrainer'"):
        posttrain.SFTTraner  # noqa: B018
    with pytest.raises(ImportError):
        from posttrain import NoSuchThing  # noqa: F401


def test_import_is_light():
    code = f"import sys, posttrain; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
