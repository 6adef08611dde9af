"""The commands as a shell runs them: real processes, real signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import httpx
import pytest
from free_ports import free_port
from sglang_server import SGLangServer
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf import cli
from adaflash_hf.commands.loading import find_drafter
from adaflash_hf.embedded_target import EMBEDDED_TARGET_NAME, embedded_target_directory
from adaflash_hf.online.published_versions import VersionManifest
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer
from adaflash_hf.serving.draft_payload import draft_weights
from adaflash_hf.serving.formats import convert_drafter


@pytest.mark.parametrize("command", [[], ["sglang"], ["reload"], ["collect"]])
def test_help(command, capsys):
    assert cli.main(["serve", *command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.fixture(scope="module")
def target_model():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(target_model):
    return tiny_drafter(target_model)


@pytest.fixture
def target(target_model, tmp_path):
    """What is compared with the drafter: no weights."""
    target_model.config.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


@pytest.fixture
def export(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "native")
    convert_drafter(tmp_path / "native", tmp_path / "export", "sglang")
    return str(tmp_path / "export")


@pytest.fixture
def python(tmp_path):
    """An interpreter beside a `sglang` that writes down how it was called and answers /health."""
    folder = tmp_path / "env"
    site = folder / "site" / "sglang-0.5.23.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/site" exec "{sys.executable}" -S "$@"\n')
    script = folder / "sglang"
    script.write_text(
        f"#!{sys.executable}\n"
        "import http.server, json, signal, sys\n"
        f"json.dump(sys.argv[1:], open({str(folder / 'called')!r}, 'w'))\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def log_message(self, *args): pass\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "http.server.HTTPServer(('127.0.0.1', port), Handler).serve_forever()\n"
    )
    for path in (python, script):
        path.chmod(0o755)
    return python


def test_the_command_is_shown(export, target, python, capsys):
    arguments = ["serve", "sglang", export, "--target", target, "--python", str(python), "--print"]
    assert cli.main([*arguments, "--attention-backend", "fa3", "--", "--log-level", "debug"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(
        f"{python.parent}/sglang serve --model-path {target} --speculative-algorithm DFLASH"
    )
    assert captured.out.endswith(
        "--attention-backend fa3 --weight-version adaflash-0 --enable-metrics --log-level debug\n"
    )
    assert "note: SGLang runs at most 48 requests" in captured.err


def test_the_embedded_target_is_a_directory_to_sglang(python, tmp_path, capsys):
    convert_drafter(find_drafter(EMBEDDED_TARGET_NAME, None), tmp_path / "export", "sglang")
    arguments = ["serve", "sglang", str(tmp_path / "export"), "--target", EMBEDDED_TARGET_NAME]
    assert cli.main([*arguments, "--python", str(python), "--print"]) == 0
    assert f"serve --model-path {embedded_target_directory()} --spec" in capsys.readouterr().out


def test_it_is_run_and_ended(export, target, python):
    port = free_port()
    arguments = ["serve", "sglang", export, "--target", target, "--python", str(python), "--port", str(port)]
    command = [sys.executable, "-m", "adaflash_hf.cli", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "ready at" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
    assert lines[-1] == f"adaflash: ready at http://127.0.0.1:{port}\n"
    assert json.loads((python.parent / "called").read_text())[:3] == ["serve", "--model-path", target]


def test_without_sglang(export, capsys):
    # The Python of these tests has none: SGLang pins another torch.
    assert cli.main(["serve", "sglang", export, "--target", "t"]) == 2
    assert "pip install sglang==" in capsys.readouterr().err


def test_the_command_is_shown_without_sglang_too(export, target, capsys):
    assert cli.main(["serve", "sglang", export, "--target", target, "--print"]) == 0
    captured = capsys.readouterr()
    assert f"--model-path {target} --speculative-algorithm DFLASH" in captured.out
    assert "note: the command was not checked against an installation: SGLang is not installed" in captured.err


def test_reload_once(drafter, tmp_path, capsys):
    publisher = Publisher(tmp_path / "published")
    publisher.publish(drafter, VersionManifest(0))
    draft = dict(draft_weights(publisher.path_of(0), has_plugin=False).tensors)
    with SGLangServer(draft=draft, target={"norm.weight": draft["norm.weight"]}).run() as server:
        arguments = ["serve", "reload", "--publish-dir", str(publisher.directory), "--replica", server.url, "--once"]
        assert cli.main([*arguments, "--probe-prompts", "2"]) == 0
        assert server.weight_version == "adaflash-0"
    assert f"{server.url}: version 0" in capsys.readouterr().out
    assert (
        cli.main(
            ["serve", "reload", "--publish-dir", str(publisher.directory), "--replica", "http://127.0.0.1:9", "--once"]
        )
        == 1
    )
    assert "does not answer /model_info" in capsys.readouterr().out


def test_collect(tmp_path):
    port, buffer = free_port(), tmp_path / "buffer"
    with SGLangServer().run() as server:
        command = [sys.executable, "-m", "adaflash_hf.cli", "serve", "collect", "--buffer", str(buffer)]
        command += ["--upstream", f"{server.url}/v1", "--port", str(port)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            body = {"messages": [{"role": "user", "content": "hello"}]}
            answer = None
            while answer is None:
                assert process.poll() is None
                try:
                    url = f"http://127.0.0.1:{port}/v1/chat/completions"
                    answer = httpx.post(url, json=body, timeout=600, trust_env=False)
                except httpx.TransportError:
                    time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(600) == 0
    assert answer.json()["choices"][0]["message"]["content"] == "you said hello"
    # What was under way when it ended is in the buffer.
    assert ReplayBuffer(buffer).depth().appended == 1


@pytest.mark.parametrize("name", ["--buffer-rows", "--max-rows"])
def test_the_buffers_limit_has_an_earlier_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr("adaflash_hf.serving.collector.serve_collector", lambda *args, **kwargs: None)
    command = ["serve", "collect", "--upstream", "http://127.0.0.1:9/v1", "--dialect", "other"]
    assert cli.main([*command, "--buffer", str(tmp_path / "buffer"), name, "7"]) == 0
    assert ReplayBuffer(tmp_path / "buffer").settings.max_rows == 7
    assert cli.main([*command, "--buffer", str(tmp_path / "buffer")]) == 0
    assert ReplayBuffer(tmp_path / "buffer").settings.max_rows == 7, "an existing one keeps what it has"


def test_only_the_newer_name_is_shown_with_its_default(tmp_path, capsys):
    assert cli.main(["serve", "collect", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"[default: (as it has; {BufferSettings().max_rows} in a new one)" in shown
    assert "--max-rows" not in shown
    arguments = ["--buffer", str(tmp_path / "buffer"), "--upstream", "http://127.0.0.1:9/v1"]
    assert cli.main(["serve", "collect", *arguments, "--buffer-rows", "7", "--max-rows", "8"]) == 2
    assert "pass one of them" in capsys.readouterr().err
