"""The whole of it on a real SGLang: it serves, its traffic is kept, a drafter learns from it, and is given back.

    clients -> collector -> SGLang, started by `adaflash serve sglang`
                  |             ^
            replay buffer    reload client
                  |             ^
              OnlineTrainer -> published versions

Opt-in, as `test_sglang_plugin.py` is: `make test-sglang`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from tiny_models import tiny_drafter, tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.online_trainer import OnlineTrainer
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.recorder import TrajectoryRecorder
from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer
from adaflash_hf.serving.acceptance_probe import ServerProbe
from adaflash_hf.serving.collector import Collector, CollectorSettings
from adaflash_hf.serving.formats import convert_drafter
from adaflash_hf.serving.reload_client import ReloadClient
from adaflash_hf.serving.replica import Replica, ReplicaAddress
from adaflash_hf.serving.response_tokens import ResponseTokens


ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ADAFLASH_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
START_TIMEOUT_S = float(os.environ.get("ADAFLASH_SGLANG_START_TIMEOUT_S", "900"))
VOCAB_SIZE, FIRST_TOKEN, STEP = 96, 4, 3
BLOCK_SIZE = 5
UPDATES, REQUESTS = 10, 20
NEW_TOKENS = 32

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="needs SGLang in an environment of its own: run `make test-sglang`, or set ADAFLASH_SGLANG_PYTHON",
)


def following(token: int, count: int) -> list[int]:
    """What the target has learnt to say after a token: every third one, round and round."""
    span = VOCAB_SIZE - FIRST_TOKEN
    return [FIRST_TOKEN + (token - FIRST_TOKEN + STEP * i) % span for i in range(count)]


def trained_target(folder: Path) -> PreTrainedModel:
    """A tiny Qwen3 that counts, with a tokenizer of one word per token."""
    model = tiny_target("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        starts = torch.randint(FIRST_TOKEN, VOCAB_SIZE, (32,), generator=generator).tolist()
        rows = torch.tensor([following(start, 24) for start in starts])
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.3
    # Weights that bfloat16 holds exactly, so that what is trained on is what is served.
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", bos_token="w1", eos_token="w2")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return model.float().eval()


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


@contextmanager
def sglang(export: Path, target: Path, log: Path) -> Iterator[str]:
    """Its address, once `adaflash serve sglang` says that it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "adaflash_hf.cli", "serve", "sglang", str(export), "--target", str(target)]
    command += ["--python", str(PYTHON), "--port", str(port), "--start-timeout", str(START_TIMEOUT_S)]
    command += ["--max-running-requests", "64", "--activation-concurrency", "1", "--verify-mode", "cap-accept", "--"]
    command += ["--device", "cpu", "--disable-overlap-schedule", "--max-total-tokens", "20000"]
    command += ["--skip-server-warmup"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**inherited, "HF_HUB_OFFLINE": "1"})
    try:
        while "adaflash: ready at" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) is not None


@contextmanager
def collector(upstream: str, recorder: TrajectoryRecorder) -> Iterator[tuple[str, Collector]]:
    made = Collector(CollectorSettings(upstream, version_poll_s=0.2), recorder, ResponseTokens())
    server = uvicorn.Server(uvicorn.Config(made.application(), port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", made
    finally:
        server.should_exit = True
        thread.join(60)


def ask(url: str, number: int) -> str:
    """One client, every second one streaming."""
    words = " ".join(f"w{token}" for token in following(FIRST_TOKEN + 7 * number % (VOCAB_SIZE - FIRST_TOKEN), 4))
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert "sglext" not in answer.text
    return answer.text


def test_ten_updates_with_rising_acceptance(tmp_path: Path) -> None:
    target = trained_target(tmp_path / "target")
    head = {"head_type": "mean_linear", "bottleneck_size": 8}
    drafter = tiny_drafter(target, block_size=BLOCK_SIZE, length_head_config=head)
    drafter.config.target_model_name_or_path = str(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "native")
    convert_drafter(tmp_path / "native", tmp_path / "export", "sglang-plugin")
    path = tmp_path / "buffer"
    ReplayBuffer(path, BufferSettings(held_out_share=0.25)).close()
    arguments = OnlineTrainingArguments(
        round_size=10,
        epochs=6,
        gradient_accumulation_steps=1,
        learning_rate=1e-2,
        min_held_out=2,
        held_out=16,
        tolerance=1.0,
    )
    publisher = Publisher(tmp_path / "published", keep_versions=20)
    trainer = OnlineTrainer(drafter, target, ReplayBuffer(path), publisher, arguments, poll_s=0.05)
    with sglang(tmp_path / "export", tmp_path / "target", tmp_path / "sglang.log") as url:
        replica = Replica(ReplicaAddress(url))
        checksums = replica.checksums("target")
        with TrajectoryRecorder(path, flush_interval_s=0.05) as recorder, collector(url, recorder) as (proxy, made):
            client = ReloadClient(publisher.directory, [ReplicaAddress(url)], probe=ServerProbe(path, num_prompts=4))
            with ThreadPoolExecutor(4) as clients:
                for update in range(UPDATES + 1):
                    numbers = range(REQUESTS * update, REQUESTS * (update + 1))
                    list(clients.map(lambda number: ask(proxy, number), numbers))
                    assert recorder.flush(60)
                    if update < UPDATES:
                        assert trainer.run(max_rounds=1) == 1
                        assert client.check(), client.status
                        assert replica.weight_version() == f"adaflash-{update + 1}"
            counts, status = made.tokens.counts, client.status
            client.close()
        assert replica.checksums("target") == checksums, "not one tensor of the target has changed"
    assert counts == {"ids": REQUESTS * (UPDATES + 1)}, "the server sent the ids of every answer"
    assert status["replicas"][0]["reloads"] == UPDATES and status["refused"] == {}
    served = {one.drafter_version: one for one in ReplayBuffer(path).acceptance()}
    taus = [served[version].acceptance_length for version in range(UPDATES + 1)]
    print("\ntau by version:", " ".join(f"{tau:.2f}" for tau in taus))  # noqa: T201 the numbers are what the run is for
    assert taus[-1] > 1.5 * taus[0]
    assert sum(taus[6:]) / 5 > sum(taus[1:6]) / 5, "and it goes on rising"
