"""How servers with the OpenAI interface are asked for token ids, and what of that must not reach the client.

SGLang puts ids and figures of speculation into `sglext`, or into each choice of a completion; vLLM puts ids into each
choice and beside them. Any other server is asked for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


__all__ = ["ADDED_MARKS", "DIALECTS", "Dialect", "without_added"]

_SGLEXT_FIELDS = {
    "return_input_ids_in_sglext": "input_ids",
    "return_output_ids_in_sglext": "output_ids",
    "return_spec_tokens_details": "spec_tokens_details",
}
_TOKEN_IDS = "return_token_ids"
_ID_FIELDS = ("prompt_token_ids", "response_token_ids", "token_ids")
# Events without any of these need not be looked into.
ADDED_MARKS = (b'"sglext"', b'token_ids"')


@dataclass(frozen=True)
class Dialect:
    """
    What a kind of server takes beside OpenAI's fields.

    Attributes:
        name: Of the server.
        added: Fields to add to a request, by the last part of its route.
    """

    name: str
    added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def added_to(self, route: str, body: Mapping[str, Any]) -> tuple[str, ...]:
        """
        Fields to set to true, those left out that the client has set itself.

        Args:
            route (`str`): `"chat/completions"` or `"completions"`.
            body (`Mapping`): The client's request.
        """
        return tuple(name for name in self.added.get(route, ()) if not body.get(name))


DIALECTS = {
    "sglang": Dialect(
        "sglang",
        {
            "chat/completions": tuple(_SGLEXT_FIELDS),
            "completions": (_TOKEN_IDS, "return_spec_tokens_details"),
        },
    ),
    "vllm": Dialect("vllm", {"chat/completions": (_TOKEN_IDS,), "completions": (_TOKEN_IDS,)}),
    "other": Dialect("other"),
}


def without_added(fields: dict[str, Any], added: Collection[str]) -> dict[str, Any] | None:
    """
    A response, or one event of it, as the client would have seen it without our fields.

    Args:
        fields (`dict`): As the server sent it; it is changed in place.
        added (`Collection[str]`): Fields that we added to the request.

    Returns:
        `dict` or None: None if nothing but what we asked for was in it.
    """
    extension = fields.get("sglext")
    if isinstance(extension, dict):
        for request_field, response_field in _SGLEXT_FIELDS.items():
            if request_field in added:
                extension.pop(response_field, None)
        if not extension:
            del fields["sglext"]
            if fields.get("choices") == [] and not fields.get("usage"):
                return None
    if _TOKEN_IDS in added:
        for holder in (fields, *(fields.get("choices") or [])):
            for name in _ID_FIELDS:
                holder.pop(name, None)
    return fields
