from __future__ import annotations

from stand_ins import StandInDrafter, StandInTarget, byte_tokenizer

from adaflash_hf.cli import main
from adaflash_hf.commands import loading


def test_demo_decodes_the_shipped_prompts_both_ways(monkeypatch, capsys):
    target = StandInTarget()
    models = loading.LoadedModels(target, byte_tokenizer(), StandInDrafter())
    monkeypatch.setattr(loading, "load_models", lambda *args: models)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["demo", "--max-new-tokens", "4", "--length-policy", "fixed", "--draft-proposal", "argmax"]) == 0
    captured = capsys.readouterr()
    text = captured.out
    assert "`--draft-proposal` is 'argmax', but decoding is greedy" in captured.err
    assert all(source in text for source in ("GSM8K test/0", "HumanEval/1", "Vicuna/2"))
    assert "6 of 6 identical" in text
    # Two warm-ups and six prompts, both sides each.
    assert len(target.calls) == 16
    assert sum(call.get("length_policy") == "fixed" for call in target.calls) == 8
