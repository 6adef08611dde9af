"""Configuration of the DFlash block-diffusion drafter."""

import math
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from .checkpoint_formats import native_config_dict
from .configuration_length_head import LengthHeadConfig
from .errors import AdaFlashError, DrafterCheckpointError, InvalidInputError


BLOCK_LAYOUTS = ("anchor_then_masks", "anchor_first")
LAYER_TYPES = ("full_attention", "sliding_attention")
MIN_BLOCK_SIZE = 2


def build_target_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """
    Layers of the target to read context features from: evenly spaced between the second and the third-last.

    Args:
        num_target_layers (`int`): Decoder layers of the target.
        num_features (`int`): How many layers to read.

    Returns:
        `list[int]`: Zero-based ids; id i stands for the output of layer i, `hidden_states[i + 1]` in transformers.
    """
    _check_integer("num_target_layers", num_target_layers, minimum=1)
    _check_integer("num_features", num_features, minimum=1)
    if num_features == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    ids = [round(first + i * (last - first) / (num_features - 1)) for i in range(num_features)]
    if last < first or len(set(ids)) < num_features:
        raise InvalidInputError(
            f"`num_features` is {num_features}, but a target of {num_target_layers} layers (`num_target_layers`) has "
            f"no {num_features} different layers between its second and its third-last. Pass `target_layer_ids`."
        )
    return ids


def _check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):
        limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InvalidInputError(f"`{name}` is {value!r}; it must be an integer, {limits}. Correct the configuration.")


@strict
class DFlashDrafterConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDrafterModel`]. The defaults are those of a five-layer drafter for Qwen3-8B.

    Args:
        vocab_size (`int`, *optional*, defaults to 151936):
            Vocabulary of the target the drafter was trained for; None when unknown. The drafter has no embedding.
        draft_vocab_size (`int`, *optional*):
            Gives the drafter a draft vocabulary: it drafts only the tokens listed in its buffer `draft_token_ids`,
            and the LM head is multiplied for these rows alone. By default it drafts all tokens.
        hidden_size (`int`, defaults to 4096):
            Width of the drafter. It must equal the target's, whose embeddings and LM head the drafter uses.
        intermediate_size (`int`, defaults to 12288):
            Width of the gated MLP.
        num_hidden_layers (`int`, defaults to 5):
            Layers of the drafter.
        num_attention_heads (`int`, defaults to 32), num_key_value_heads (`int`, *optional*, defaults to 8),
        head_dim (`int`, *optional*, defaults to 128):
            Shape of the attention; None means as many as query heads, and `hidden_size / num_attention_heads`.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each layer; all full by default.
        sliding_window (`int`, *optional*):
            W of the sliding layers: a query at position q sees keys at positions above q - W.
        is_causal (`bool`, *optional*):
            Who sees whom inside the block. None: sliding layers are causal and full layers bidirectional, as DFlash
            checkpoints that do not declare it. False: bidirectional in every layer. True: causal in every layer.
        rope_parameters (`dict`, *optional*):
            `rope_type`, `rope_theta` and what the type needs. `rope_theta` and `rope_scaling` are read as well.
        block_size (`int`, defaults to 16):
            Rows of a block, the anchor included.
        block_layout (`str`, defaults to `"anchor_then_masks"`):
            `"anchor_then_masks"`: row k of the block predicts the token at anchor + k, row 0 gives no draft.
            `"anchor_first"`: row k predicts the token at anchor + k + 1.
        mask_token_id (`int`, defaults to 151669):
            Token whose target embedding fills the rows after the anchor: an existing row of that embedding.
        num_target_layers (`int`, defaults to 36):
            Decoder layers of the target.
        target_layer_ids (`list[int]`, *optional*):
            Target layers whose outputs are the context features, zero-based: id i is `hidden_states[i + 1]`. By
            default as many as the drafter has layers, spread by [`build_target_layer_ids`].
        target_hidden_size (`int`, *optional*):
            Width of the target's hidden states; `hidden_size` by default.
        input_embedding_scale (`float`, defaults to 1.0):
            Whoever embeds the block multiplies the target's raw embedding rows by it.
        output_multiplier (`float`, defaults to 1.0):
            Factor on the logits, before the soft cap.
        final_logit_softcapping (`float`, *optional*):
            c in `c * tanh(logits / c)`.
        target_model_name_or_path (`str`, *optional*):
            The target the drafter was trained for, for people and for the model card.
        length_head_config (`dict` or [`LengthHeadConfig`], *optional*):
            Gives the drafter a length head.
    """

    model_type = "dflash_drafter"
    default_theta = 1_000_000.0
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int | None = 151936
    draft_vocab_size: int | None = None
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    sliding_window: int | None = None
    is_causal: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    block_size: int = 16
    block_layout: str = "anchor_then_masks"
    mask_token_id: int = 151669
    num_target_layers: int = 36
    input_embedding_scale: float | int = 1.0
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    target_model_name_or_path: str | None = None

    if TYPE_CHECKING:  # What a reader finds once `__post_init__` has filled them in.
        num_key_value_heads: int
        head_dim: int
        layer_types: list[str]
        rope_parameters: dict[str, Any]
        target_layer_ids: list[int]
        target_hidden_size: int
        length_head_config: LengthHeadConfig | None
    else:
        num_key_value_heads: int | None = 8
        head_dim: int | None = 128
        layer_types: list[str] | None = None
        rope_parameters: dict | None = None
        target_layer_ids: list[int] | None = None
        target_hidden_size: int | None = None
        length_head_config: dict | PreTrainedConfig | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_sizes()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_layer_ids is None:
            self.target_layer_ids = build_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        self._build_length_head_config()
        self._check_attention()
        self._check_block()
        super().__post_init__(**kwargs)
        if not isinstance((self.rope_parameters or {}).get("rope_theta"), (int, float)):
            raise InvalidInputError(
                f"`rope_parameters` is {self.rope_parameters!r}; every layer of a drafter shares one flat dictionary "
                'with a number under "rope_theta". Give that dictionary.'
            )
        self._check_factors()

    @property
    def draft_length(self) -> int:
        """Tokens one block can draft."""
        return self.block_size if self.block_layout == "anchor_first" else self.block_size - 1

    @property
    def context_feature_size(self) -> int:
        """Width of the concatenated context features."""
        return len(self.target_layer_ids) * self.target_hidden_size

    def is_causal_layer(self, layer_idx: int) -> bool:
        """Whether rows of the block see only the rows before them in layer `layer_idx`."""
        if self.is_causal is None:
            return self.layer_types[layer_idx] == "sliding_attention"
        return self.is_causal

    @property
    def is_block_causal(self) -> bool:
        """Whether no row of a block sees a later one, so that a block can be cut without changing what remains."""
        return all(self.is_causal_layer(layer_idx) for layer_idx in range(self.num_hidden_layers))

    def window_of_layer(self, layer_idx: int) -> int | None:
        """Window of layer `layer_idx` in tokens; None if it sees everything."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config_dict or not isinstance(config_dict, dict):
            raise DrafterCheckpointError(
                f"{pretrained_model_name_or_path} has no config.json, or one that holds nothing. Copy the one that "
                "belongs to the weights beside them."
            )
        return native_config_dict(config_dict, source=str(pretrained_model_name_or_path)), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "DFlashDrafterConfig":
        """Builds the configuration from a `config.json`, of this format or of another that [`native_config_dict`]
        translates.

        Raises:
            InvalidInputError: A field has a value that cannot be used.
        """
        native = native_config_dict(config_dict)
        try:
            return super().from_dict(native, **kwargs)
        except AdaFlashError:
            raise
        except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
            # Where a field's validator speaks, what its check raised says the same in one line.
            cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
            reason = f"{' '.join(str(cause).split()).rstrip(' .')}. Correct it there."
            raise InvalidInputError(f"The drafter's config.json cannot be used: {reason}") from error

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds; of the length head, too, only what differs from transformers' defaults."""
        fields = super().to_diff_dict()
        # No field of a drafter: transformers' trainer leaves it on every configuration that it trains.
        fields.pop("use_cache", None)
        if self.length_head_config is not None:
            head = self.length_head_config.to_diff_dict()
            head.pop("transformers_version", None)
            fields["length_head_config"] = head
        return fields

    def _check_sizes(self) -> None:
        sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
        for name in (*sizes.split(), "num_target_layers"):
            _check_integer(name, getattr(self, name), minimum=1)
        for name in ("vocab_size", "num_key_value_heads", "head_dim", "target_hidden_size", "sliding_window"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), minimum=1)

    def _check_attention(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidInputError(
                f"`num_attention_heads` is {self.num_attention_heads} and `num_key_value_heads` is "
                f"{self.num_key_value_heads}; the first must be a multiple of the second. Correct the configuration."
            )
        unknown = set(self.layer_types) - set(LAYER_TYPES)
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise InvalidInputError(
                f"`layer_types` is {self.layer_types!r}; it must hold `num_hidden_layers` = {self.num_hidden_layers} "
                f"of {' or '.join(map(repr, LAYER_TYPES))}. Correct the configuration."
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise InvalidInputError(
                "`sliding_window` is None although `layer_types` has sliding layers; set it to their window in tokens."
            )

    def _check_block(self) -> None:
        _check_integer(
            "block_size", self.block_size, MIN_BLOCK_SIZE, max(MIN_BLOCK_SIZE, self.max_position_embeddings)
        )
        if self.draft_vocab_size is not None:
            _check_integer("draft_vocab_size", self.draft_vocab_size, minimum=1, maximum=self.vocab_size)
        last_token = None if self.vocab_size is None else self.vocab_size - 1
        _check_integer("mask_token_id", self.mask_token_id, minimum=0, maximum=last_token)
        if self.block_layout not in BLOCK_LAYOUTS:
            raise InvalidInputError(
                f"`block_layout` is {self.block_layout!r}; known layouts are {', '.join(map(repr, BLOCK_LAYOUTS))}. "
                "Set the one the drafter was trained with: a wrong one costs nearly all acceptance."
            )
        ids = self.target_layer_ids
        if not isinstance(ids, list) or not ids or len(set(ids)) != len(ids):
            raise InvalidInputError(f"`target_layer_ids` is {ids!r}; it must be a list of different layer ids.")
        for layer_id in ids:
            _check_integer("target_layer_ids", layer_id, minimum=0, maximum=self.num_target_layers - 1)

    def _check_factors(self) -> None:
        """With a zero, an infinity or a NaN among these every draft would be wrong, and nothing would say so."""
        factors: dict[str, Any] = {"rope_parameters['rope_theta']": self.rope_parameters["rope_theta"]}
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            factors[name] = getattr(self, name)
        for name, value in factors.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidInputError(
                    f"`{name}` is {value!r}; it must be a finite number above 0. Correct the configuration."
                )

    def _build_length_head_config(self) -> None:
        head = self.length_head_config
        if head is None:
            return
        if isinstance(head, dict):
            head = LengthHeadConfig(**{"hidden_size": self.hidden_size, **head})
        if head.hidden_size != self.hidden_size:
            raise InvalidInputError(
                f"`length_head_config.hidden_size` is {head.hidden_size} but the drafter's `hidden_size` is "
                f"{self.hidden_size}; they must be equal. Leave it out to have it filled in."
            )
        self.length_head_config = head


DFlashDrafterConfig.register_for_auto_class()

__all__ = ["BLOCK_LAYOUTS", "DFlashDrafterConfig", "build_target_layer_ids"]
