"""Settings from environment variables."""

from __future__ import annotations

import pytest

from adaflash_hf import InvalidInputError
from adaflash_hf.serving.sglang_plugin.settings import PluginSettings


def test_defaults_are_those_of_the_packages_own_engine() -> None:
    settings = PluginSettings.from_environment({"ADAFLASH_OF_SOMEBODY_ELSE": "1"})
    assert settings == PluginSettings(length_scale=1.3, min_verify_length=2, activation_concurrency=16)


def test_variables() -> None:
    environment = {
        "ADAFLASH_LENGTH_SCALE": "1.05",
        "ADAFLASH_MIN_VERIFY_LENGTH": "1",
        "ADAFLASH_ACTIVATION_CONCURRENCY": "4",
    }
    assert PluginSettings.from_environment(environment) == PluginSettings(1.05, 1, 4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ADAFLASH_LENGTH_SCALE", "wide", "ADAFLASH_LENGTH_SCALE is 'wide', expected a number"),
        ("ADAFLASH_LENGTH_SCALE", "0", "`length_scale` is 0.0, expected a positive number"),
        ("ADAFLASH_MIN_VERIFY_LENGTH", "1.5", "ADAFLASH_MIN_VERIFY_LENGTH is '1.5', expected a whole number"),
        ("ADAFLASH_MIN_VERIFY_LENGTH", "0", "`min_verify_length` is 0, expected 1 or more"),
        ("ADAFLASH_ACTIVATION_CONCURRENCY", "-3", "`activation_concurrency` is -3, expected 1 or more"),
    ],
)
def test_what_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        PluginSettings.from_environment({name: value})
