from __future__ import annotations

import pytest

from adaflash_hf.checkpoint_files import stored_model_type


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"model_type": "llama"}', "llama"),
        ('{"architectures": ["LlamaForCausalLM"]}', None),
        ('{"model_type": ["llama"]}', None),
        ('["llama"]', None),
    ],
)
def test_the_model_type_of_a_directory(text, expected, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert stored_model_type(tmp_path) == stored_model_type(str(tmp_path)) == expected


def test_where_no_configuration_can_be_read(tmp_path):
    with pytest.raises(OSError):
        stored_model_type(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError):
        stored_model_type(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError):
        stored_model_type(tmp_path)
