"""One running SGLang server, as far as its drafter's weights are concerned.

Read against SGLang 0.5.23. Only routes that know the drafter from the target are used. `/update_weights_from_disk` is
not one of them: it reports success and writes same-named tensors of the drafter over the target's. Of the others:

- an update waits for all running requests unless generation is paused, so it is paused, in place;
- an update that cannot flush the cache reports failure although the weights are in, so it is told not to flush;
- names that the drafter does not have are skipped without a word, so `reload_client.py` compares checksums;
- `/update_weight_version` ends all requests by default, so the version travels with the last tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..error_text import install_hint
from ..errors import InvalidInputError, MissingDependencyError, ServerError


__all__ = ["Replica", "ReplicaAddress", "ServedModel"]

_SHOWN_ERROR = 300
_DRAFT_PREFIX = "draft."


@dataclass(frozen=True)
class ReplicaAddress:
    """
    Where a server is, and how to be let in.

    Attributes:
        url: As `http://host:30000`; never that of a router, which would pick one server for each call.
        api_key: Its `--api-key`, for requests.
        admin_api_key: Its `--admin-api-key`, for weights; the other one is used if it has none.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidInputError(f"`replica` is {self.url!r}, expected an address as 'http://host:30000'.")


@dataclass(frozen=True)
class ServedModel:
    """
    What a server says it serves.

    Attributes:
        name: Of the target, for requests.
        weight_version: Its label for its weights.
        algorithm: Speculative algorithm; None if it does not speculate.
        draft_path: The drafter it was started with.
        tp_size: Processes that each need the tensors.
        device: As `"cuda"`.
    """

    name: str
    weight_version: str
    algorithm: str | None
    draft_path: str | None
    tp_size: int
    device: str


class Replica:
    """
    Calls a server.

    Args:
        address (`ReplicaAddress`): Where it is.
        timeout_s (`float`, *optional*, defaults to 120.0): Give a call up after this long.
    """

    def __init__(self, address: ReplicaAddress, timeout_s: float = 120.0) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(
                f"`replica` needs httpx, which is not installed. Run: {install_hint('serve')}."
            ) from error
        self.address = address
        self.url = address.url.rstrip("/").removesuffix("/v1")
        self._error = httpx.HTTPError
        self._http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(timeout_s, connect=10.0), trust_env=False)

    def close(self) -> None:
        """End the connections."""
        self._http.close()

    def served(self) -> ServedModel:
        """What it serves now."""
        info, server = self._get("/model_info"), self._get("/server_info")
        return ServedModel(
            name=str(info.get("served_model_name") or info.get("model_path")),
            weight_version=str(info.get("weight_version")),
            algorithm=server.get("speculative_algorithm"),
            draft_path=server.get("speculative_draft_model_path"),
            tp_size=int(server.get("tp_size") or 1),
            device=str(server.get("device") or "cuda"),
        )

    def weight_version(self) -> str:
        """Its label for its weights."""
        return str(self._get("/model_info").get("weight_version"))

    def checksums(self, selector: str) -> dict[str, str]:
        """
        Checksum of each tensor of one side, by rank and name.

        Args:
            selector (`str`): `"target"` or `"draft"`.
        """
        answer = self._control("/weights_checker", {"action": "checksum", "selector": selector})
        sums = {}
        for number, rank in enumerate(answer.get("ranks") or []):
            for name, value in rank["checksums"].items():
                sums[f"{number}:{name.removeprefix(_DRAFT_PREFIX) if selector == 'draft' else name}"] = value
        if not sums:
            raise ServerError(
                f"{self.url} has no tensors of the {selector}; a draft can only be updated on a server that was "
                "started with --speculative-algorithm."
            )
        return sums

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Running requests wait, where they are, and go on afterwards."""
        self._control("/pause_generation", {"mode": "in_place"})
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """Let requests go on; nothing happens if they are not paused."""
        self._control("/continue_generation", {"torch_empty_cache": False})

    def clean_up(self) -> None:
        """What somebody left who was killed while they updated: an open session, and requests that wait."""
        try:
            self._control("/end_weight_update", {})
        except ServerError as error:
            if "no weight-update session is open" not in str(error):
                raise
        finally:
            self.resume()

    @contextmanager
    def draft_update(self) -> Iterator[None]:
        """A session in which the drafter's tensors, and only those, may be written."""
        try:
            self._control("/begin_weight_update", {"selector": "draft"})
        except ServerError as error:
            if "already open" not in str(error):
                raise
            # Somebody was killed in the middle of one. Whatever they wrote is written over now.
            self._control("/end_weight_update", {})
            self._control("/begin_weight_update", {"selector": "draft"})
        try:
            yield
        finally:
            self._control("/end_weight_update", {})

    def update_draft(self, payload: str, tp_size: int, weight_version: str | None) -> None:
        """
        Write some tensors of the drafter.

        Args:
            payload (`str`): See `draft_payload.py`.
            tp_size (`int`): Processes that each need them.
            weight_version (`str`, *optional*): New label, with the last tensors.
        """
        body: dict[str, Any] = {
            "serialized_named_tensors": [payload] * tp_size,
            "selector": "draft",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        self._control("/update_weights_from_tensor", body)

    def flush_cache(self) -> bool:
        """
        Forget cached prefixes, whose draft keys and values are an earlier version's.

        Returns:
            `bool`: whether it did; it does not while requests run.
        """
        try:
            self._control("/flush_cache", {})
        except ServerError:
            return False
        return True

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int, model: str, salt: str) -> dict[str, Any]:
        """
        Answer one prompt greedily, without cached prefixes.

        Args:
            prompt (`str` or `Sequence[int]`): What a user says, or token ids.
            max_new_tokens (`int`): Length of the answer.
            model (`str`): Name of the target.
            salt (`str`): Requests of different salts share no cache.

        Returns:
            `dict`: SGLang's figures of speculation; empty if it does not speculate.
        """
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
            "return_spec_tokens_details": True,
        }
        if isinstance(prompt, str):
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
        else:
            path, body["prompt"] = "/v1/completions", list(prompt)
        answer = self._call("POST", path, self.address.api_key, body)
        details = (answer.get("sglext") or {}).get("spec_tokens_details") or {}
        return details[0] if isinstance(details, list) else details

    def _get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, self.address.api_key)

    def _control(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._call("POST", path, self.address.admin_api_key or self.address.api_key, body)
        if answer.get("success") is False:
            raise ServerError(f"{self.url} refuses {path}: {answer.get('message')}")
        return answer

    def _call(self, method: str, path: str, key: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            response = self._http.request(method, path, json=body, headers=headers)
        except self._error as error:
            raise ServerError(
                f"{self.url} does not answer {path} ({type(error).__name__}: {error}). It may be starting, or gone; "
                "check the address."
            ) from error
        if response.status_code in (401, 403):
            raise ServerError(f"{self.url} answers {response.status_code} to {path}; check the API keys.")
        if not response.is_success:
            raise ServerError(f"{self.url} answers {response.status_code} to {path}: {response.text[:_SHOWN_ERROR]}")
        try:
            fields = response.json()
        except ValueError:
            fields = {}  # some routes answer in prose
        return fields if isinstance(fields, dict) else {}
