from __future__ import annotations

from adaflash_hf.serving.observed_response import ObservedResponse, rounds_of_details
from adaflash_hf.serving.served_versions import VersionHistory


def test_events_and_whole_answers_come_to_the_same() -> None:
    whole, streamed = ObservedResponse("chat/completions", {}), ObservedResponse("chat/completions", {})
    extension = {"input_ids": [5, 6], "output_ids": [[7, 8, 9]]}
    choice = {"index": 0, "message": {"content": "hello you"}, "finish_reason": "stop", "matched_stop": 9}
    whole.add({"id": "a", "choices": [choice], "sglext": extension, "usage": {"completion_tokens": 3}})
    for event in (
        {"id": "a", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"id": "a", "choices": [{"index": 0, "delta": {"content": "hello"}}]},
        {"id": "a", "choices": [{"index": 0, "delta": {"content": " you"}, "finish_reason": None}]},
        {"id": "a", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": 9}]},
        {"id": "a", "choices": [], "sglext": extension},
        {"id": "a", "choices": [], "usage": {"completion_tokens": 3}},
    ):
        streamed.add(event)
    for seen in (whole, streamed):
        assert "".join(seen.choices[0].text) == "hello you"
        assert (seen.choices[0].token_ids, seen.prompt_ids_of(0)) == ([7, 8, 9], [5, 6])
        assert (seen.choices[0].finish_reason, seen.choices[0].matched_stop) == ("stop", 9)
        assert seen.completion_tokens_of(0) == 3 and not seen.is_failed


def test_several_prompts_and_choices() -> None:
    seen = ObservedResponse("completions", {"n": 2, "prompt": ["a", "b"]})
    prompts = {0: [1], 2: [2]}
    for index in range(4):
        choice = {"index": index, "text": "x", "token_ids": [10 + index], "prompt_token_ids": prompts.get(index)}
        seen.add({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 4}})
    assert [seen.prompt_ids_of(index) for index in range(4)] == [[1], [1], [2], [2]]
    assert [seen.prompt_index(index) for index in range(4)] == [0, 0, 1, 1]
    # Counts of all together say nothing of one.
    assert seen.completion_tokens_of(1) is None and seen.prompt_tokens() is None


def test_parts_that_a_parser_took_out() -> None:
    seen = ObservedResponse("chat/completions", {})
    seen.add({"choices": [{"index": 0, "message": {"content": "", "tool_calls": [{"id": "f"}]}}]})
    assert seen.choices[0].is_reshaped


def test_rounds_from_histograms() -> None:
    details = {
        "spec_verify_ct": 5,
        "spec_num_proposed_drafts": 15,
        "spec_correct_drafts_histogram": [2, 1, 0, 2],
        "spec_cap_lens_histogram": [],
    }
    assert rounds_of_details(details) == [(4, 3), (4, 3), (4, 1), (4, 0), (4, 0)]
    capped = {**details, "spec_cap_lens_histogram": [0, 0, 3, 0, 2]}
    assert rounds_of_details(capped) == [(4, 3), (4, 3), (2, 1), (2, 0), (2, 0)]
    assert rounds_of_details({}) == []


def test_versions_by_arrival_where_only_text_comes() -> None:
    history = VersionHistory(1)
    history.saw(2, at_s=10.0)
    seen = ObservedResponse("chat/completions", {})
    for at_s in (8.0, 9.0, 11.0, 12.0):
        seen.add({"choices": [{"index": 0, "delta": {"content": "x"}}]}, at_s)
    # Ten tokens over four pieces, two of which came before the update; a final token is in no piece.
    assert seen.spans_of(0, 10, history) == [(1, 0, 5), (2, 5, 10)]


def test_versions_by_arrival_of_ids() -> None:
    history = VersionHistory(0)
    history.saw(3, at_s=10.0)
    seen = ObservedResponse("completions", {})
    for at_s, ids in ((9.0, [1, 2, 3]), (11.0, [4])):
        seen.add({"choices": [{"index": 0, "text": "x", "token_ids": ids}]}, at_s)
    assert seen.spans_of(0, 4, history) == [(0, 0, 3), (3, 3, 4)]


def test_reported_versions_end_where_the_tokens_do() -> None:
    seen = ObservedResponse("chat/completions", {})
    spans = [{"version": "adaflash-1", "start": 0, "end": 4}, {"version": "adaflash-2", "start": 4, "end": 9}]
    seen.add({"choices": [{"index": 0, "message": {"content": "x"}}], "metadata": {"weight_versions": spans}})
    history = VersionHistory(7)
    assert seen.spans_of(0, 10, history) == [(1, 0, 4), (2, 4, 10)]
    assert seen.spans_of(0, 3, history) == [(1, 0, 3)]
    assert ObservedResponse("completions", {}).choices == {}


def test_errors() -> None:
    for fields in ({"error": {"message": "x"}}, {"object": "error", "message": "x"}):
        seen = ObservedResponse("chat/completions", {})
        seen.add(fields)
        assert seen.is_failed
