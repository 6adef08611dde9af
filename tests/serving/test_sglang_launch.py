from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.errors import DrafterCompatibilityError, InvalidInputError, MissingDependencyError
from adaflash_hf.serving.formats import convert_drafter
from adaflash_hf.serving.inspection import Inspection, inspect_drafter
from adaflash_hf.serving.sglang_launch import SGLangInstallation, SGLangOptions, find_sglang, plan_launch


STOCK = SGLangInstallation("/env/bin/python", "0.5.23")
WITH_PLUGIN = SGLangInstallation("/env/bin/python", "0.5.23", ("adaflash", "other"))


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Inspection]:
    """Inspections of one drafter, native and exported."""
    folder = tmp_path_factory.mktemp("exports")
    drafter = tiny_drafter(tiny_target("llama"), length_head_config={})
    drafter.config.target_model_name_or_path = "org/target"
    drafter.save_pretrained(folder / "native")
    for name in ("sglang", "sglang-plugin"):
        convert_drafter(folder / "native", folder / name, name)
    return {name: inspect_drafter(folder / name) for name in ("native", "sglang", "sglang-plugin")}


def fake_installation(folder: Path, *distributions: str, plugin: bool = False) -> str:
    """A Python that has packages of these names, by their metadata; nothing can be imported."""
    site = folder / "site"
    for text in distributions:
        name, version = text.split("==")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if plugin and name == "adaflash-hf":
            (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nadaflash = adaflash_hf:nothing\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_what_a_python_has_is_asked_of_it(tmp_path):
    python = fake_installation(tmp_path, "sglang==0.5.23", "adaflash-hf==0.1", plugin=True)
    assert find_sglang(python) == SGLangInstallation(python, "0.5.23", ("adaflash",))


def test_what_to_install_where_it_is_missing(tmp_path):
    python = fake_installation(tmp_path, "adaflash-hf==0.1")
    with pytest.raises(MissingDependencyError, match=r"pip install sglang==0\.5\.23 adaflash-hf \(or the directory"):
        find_sglang(python)
    with pytest.raises(InvalidInputError, match="`python` is '/nowhere/python', which does not run"):
        find_sglang("/nowhere/python")
    with pytest.raises(InvalidInputError, match="does not run as a Python"):
        find_sglang("/bin/true")


def test_the_script_beside_the_python_is_preferred(tmp_path):
    installation = SGLangInstallation(str(tmp_path / "python"), "0.5.23")
    assert installation.program == [str(tmp_path / "python"), "-m", "sglang.launch_server"]
    (tmp_path / "sglang").touch()
    assert installation.program == [str(tmp_path / "sglang"), "serve"]


def test_the_command_of_an_export(exports):
    options = SGLangOptions(
        port=31000,
        attention_backend="fa3",
        max_running_requests=128,
        mem_fraction_static=0.8,
        tp_size=2,
        extra=("--log-level", "info"),
    )
    source = exports["sglang"].source
    command = plan_launch(exports["sglang"], None, STOCK, options)
    assert command.arguments == [
        *("/env/bin/python", "-m", "sglang.launch_server", "--model-path", "org/target"),
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", source),
        *("--speculative-num-draft-tokens", "4", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "31000"),
        *("--attention-backend", "fa3", "--max-running-requests", "128", "--mem-fraction-static", "0.8"),
        *("--tp-size", "2", "--weight-version", "adaflash-0", "--enable-metrics", "--log-level", "info"),
    ]
    assert command.environment == {} and command.notes == []
    assert any("48 requests" in note for note in plan_launch(exports["sglang"], None, STOCK, SGLangOptions()).notes)


def test_the_plugin_and_its_settings(exports):
    options = SGLangOptions(
        verify_mode="compact", length_scale=1.2, min_verify_length=3, activation_concurrency=8, enable_metrics=False
    )
    command = plan_launch(exports["sglang-plugin"], "local/target", WITH_PLUGIN, options)
    assert command.arguments[4:7] == ["local/target", "--speculative-algorithm", "ADAFLASH"]
    assert command.environment == {
        "SGLANG_RAGGED_VERIFY_MODE": "compact",
        "ADAFLASH_LENGTH_SCALE": "1.2",
        "ADAFLASH_MIN_VERIFY_LENGTH": "3",
        "ADAFLASH_ACTIVATION_CONCURRENCY": "8",
    }
    assert "--enable-metrics" not in command.arguments
    assert str(command).startswith("SGLANG_RAGGED_VERIFY_MODE=compact ")
    assert not any("length head" in note for note in command.notes)
    unset = plan_launch(exports["sglang-plugin"], "local/target", WITH_PLUGIN, SGLangOptions())
    assert "The length head stays off unless --verify-mode is compact." in unset.notes


@pytest.mark.parametrize("given", ["--port", "--port=31000", "--speculative-num-draft-tokens", "--model-path"])
def test_what_is_passed_on_must_not_contradict(given):
    with pytest.raises(InvalidInputError, match=f"`{given.partition('=')[0]}` stands among what is passed on"):
        SGLangOptions(extra=("--log-level", "info", given, "9"))


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("localhost", "localhost")],  # noqa: S104
)
def test_where_it_answers(host, address):
    assert SGLangOptions(host=host, port=31000).address == f"http://{address}:31000"


def test_settings_of_the_plugin_without_it(exports):
    with pytest.raises(InvalidInputError, match="`length_scale` is .* and for the plugin.*--to sglang-plugin"):
        plan_launch(exports["sglang"], None, STOCK, SGLangOptions(length_scale=1.0))
    with pytest.raises(InvalidInputError, match="`verify_mode` is 'fast'; choose one of static"):
        SGLangOptions(verify_mode="fast")


def test_the_plugin_where_it_cannot_run(exports):
    with pytest.raises(MissingDependencyError, match=r"/env/bin/python -m pip install adaflash-hf \(or the directory"):
        plan_launch(exports["sglang-plugin"], None, STOCK, SGLangOptions())
    newer = SGLangInstallation("/env/bin/python", "0.5.99", ("adaflash",))
    with pytest.raises(MissingDependencyError, match=r"works with SGLang 0\.5\.23.*has 0\.5\.99"):
        plan_launch(exports["sglang-plugin"], None, newer, SGLangOptions())
    # Without the plugin it is only said.
    assert any("0.5.99" in note for note in plan_launch(exports["sglang"], None, newer, SGLangOptions()).notes)


def test_what_sglang_would_refuse_or_run_wrongly(exports, tmp_path):
    with pytest.raises(DrafterCompatibilityError, match="adaflash export --to sglang"):
        plan_launch(exports["native"], None, STOCK, SGLangOptions())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DrafterCompatibilityError, match="is no drafter that can be served"):
        plan_launch(inspect_drafter(tmp_path), None, STOCK, SGLangOptions())


def test_a_target_must_be_named(exports, tmp_path):
    drafter = tiny_drafter(tiny_target("llama"))
    drafter.save_pretrained(tmp_path / "native")
    convert_drafter(tmp_path / "native", tmp_path / "out", "sglang")
    with pytest.raises(InvalidInputError, match="does not name its target; pass it with --target"):
        plan_launch(inspect_drafter(tmp_path / "out"), None, STOCK, SGLangOptions())
