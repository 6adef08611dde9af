"""The DFlash drafter: proposes the tokens of a whole block in one forward, from the target's hidden states.

The drafter has no embedding and no LM head; both are the target's. Its keys and values come from two streams: the
context (the target's hidden states at committed positions, projected once for all layers) and the block itself (the
anchor's embedding and mask embeddings). Only the block has queries.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DFlashCache
from transformers.integrations import use_kernel_forward_from_hub
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import capture_outputs

from .checkpoint_loading import StrictCheckpointMixin
from .configuration_dflash_drafter import DFlashDrafterConfig
from .errors import InvalidInputError
from .modeling_length_head import LengthHeadModel


# transformers 5.24 renamed the field; both spellings must come out under the name the installed release reads.
OUTPUT_CACHE_FIELD = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


@use_kernel_forward_from_hub("RMSNorm")
class DFlashDrafterRMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        if not torch.is_grad_enabled():
            # The same in one call. Training keeps to the steps below, whose dtypes under autocast are spelled out.
            return self.weight * nn.functional.rms_norm(hidden_states, self.weight.shape, eps=self.variance_epsilon)
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class DFlashDrafterRotaryEmbedding(nn.Module):
    """Cosines and sines of absolute target positions."""

    inv_freq: torch.Tensor

    def __init__(self, config: DFlashDrafterConfig) -> None:
        super().__init__()
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        rope_init_fn: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = rope_init_fn(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: DFlashDrafterConfig, **kwargs: Any) -> tuple[torch.Tensor, float]:
        """Inverse frequencies of unscaled RoPE; transformers' weight initialisation calls it by this name."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)  # [B, n_new + block, D]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def rotation(cos: torch.Tensor, sin: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What [`apply_rotary`] needs of the last `rows` positions: cosines, and sines with the first half negated, both
    `[B, 1, rows, D]`. Made once for all layers."""
    cos, sin = cos[:, None, -rows:], sin[:, None, -rows:]
    half = sin.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotates `[B, heads, rows, D]` states: (a, b) to (a cos - b sin, b cos + a sin), a and b the halves."""
    return states * cos + states.roll(states.shape[-1] // 2, dims=-1) * signed_sin


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference attention with the signature of transformers' attention interface."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling  # [B, heads, block, keys]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class DFlashDrafterAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block through the same projections."""

    def __init__(self, config: DFlashDrafterConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.is_causal_layer(layer_idx)
        self.sliding_window = config.window_of_layer(layer_idx)
        query_size = config.num_attention_heads * self.head_dim
        key_value_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DFlashDrafterRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = DFlashDrafterRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        rotations: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        source = hidden_states if context is None else torch.cat([context, hidden_states], dim=1)
        query = self.q_norm(self._split_heads(self.q_proj(hidden_states)))
        key = self.k_norm(self._split_heads(self.k_proj(source)))
        value = self._split_heads(self.v_proj(source))  # [B, kv heads, n_new + block, D]
        query, key = apply_rotary(query, *rotations[0]), apply_rotary(key, *rotations[1])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()  # [B, block, heads * D]
        return self.o_proj(output), weights

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)  # [B, heads, n, D]


class DFlashDrafterMLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: DFlashDrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class DFlashDrafterDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm residual layer. The context does not pass through `input_layernorm`; it was normed once for all."""

    def __init__(self, config: DFlashDrafterConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashDrafterAttention(config, layer_idx)
        self.mlp = DFlashDrafterMLP(config)
        self.input_layernorm = DFlashDrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DFlashDrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        rotations: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(normed, context, rotations, attention_mask, cache=cache, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDrafterPreTrainedModel(StrictCheckpointMixin, PreTrainedModel):
    """Weight initialisation and loading, of this package's checkpoints, z-lab's and the AdaFlash authors'."""

    config: DFlashDrafterConfig
    config_class = DFlashDrafterConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDrafterDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DFlashDrafterDecoderLayer, "attentions": DFlashDrafterAttention}

    def get_input_embeddings(self) -> None:
        """There are none: the target's are used. Without this, FSDP and others that look for them raise."""
        return None


class DFlashDrafterModel(DFlashDrafterPreTrainedModel):
    """
    Block-diffusion drafter with an optional length head (`length_head`, None without one) and an optional draft
    vocabulary (`draft_token_ids`: the tokens it drafts, ascending; None for all of the target's).
    """

    draft_token_ids: torch.Tensor | None

    def __init__(self, config: DFlashDrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.context_feature_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashDrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashDrafterDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = DFlashDrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashDrafterRotaryEmbedding(config)
        head_config = config.length_head_config
        self.length_head = None if head_config is None else LengthHeadModel(head_config)
        size = config.draft_vocab_size
        self.register_buffer("draft_token_ids", None if size is None else torch.arange(size))
        self.gradient_checkpointing = False
        self.post_init()

    def set_draft_vocabulary(self, token_ids: torch.Tensor | None) -> None:
        """
        Limits the tokens the drafter can draft; what is generated stays the target's own choice among all of them.

        Args:
            token_ids (`torch.Tensor` of shape `[draft_vocab_size]`, *optional*):
                Ids in the target's vocabulary, ascending; None to draft all tokens.
        """
        if token_ids is not None:
            token_ids = torch.as_tensor(token_ids, device=self.fc.weight.device)
            is_list = token_ids.ndim == 1 and token_ids.numel() > 0 and not token_ids.is_floating_point()
            if not is_list or int(token_ids[0]) < 0 or bool((token_ids.diff() <= 0).any()):
                raise InvalidInputError(
                    f"`token_ids` is {token_ids!r}; expected different ids in one dimension, ascending from 0 or more."
                )
            token_ids = token_ids.long()
        self.config.draft_vocab_size = None if token_ids is None else len(token_ids)
        self.draft_token_ids = token_ids

    def project_context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Args:
            context_hidden_states (`torch.Tensor` of shape `[batch_size, n, config.context_feature_size]`):
                The target's hidden states at `config.target_layer_ids`, side by side.

        Returns:
            `torch.Tensor` of shape `[batch_size, n, hidden_size]`: What every layer's keys and values are made from.
        """
        if context_hidden_states.shape[-1] != self.config.context_feature_size:
            raise InvalidInputError(
                f"`context_hidden_states` has width {context_hidden_states.shape[-1]}; expected "
                f"{self.config.context_feature_size} = {len(self.config.target_layer_ids)} layers x "
                f"{self.config.target_hidden_size}. Concatenate `hidden_states[i + 1]` for i in "
                f"`target_layer_ids` = {self.config.target_layer_ids}."
            )
        return self.hidden_norm(self.fc(context_hidden_states))

    @capture_outputs
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            noise_embeds (`torch.Tensor` of shape `[batch_size, block, hidden_size]`):
                Target embeddings of the anchor and the mask tokens, times `config.input_embedding_scale`.
            context_hidden_states (`torch.Tensor` of shape `[batch_size, n_new, config.context_feature_size]`):
                Target hidden states at the committed positions that the cache does not hold yet; None if there are
                none.
            attention_mask (`torch.Tensor` or `dict`, *optional*):
                None; or `[batch_size, n_cached + n_new + block]`, 1 where a key is visible; or a four-dimensional
                mask for all layers; or `{"full_attention": mask, "sliding_attention": mask}`, used as it is, where
                None stands for the layer type's own rule.
            position_ids (`torch.Tensor` of shape `[batch_size or 1, n_new + block]`, *optional*):
                Positions in the target of the new context and the block; by default they follow the cache.
            cache (`Cache`, *optional*):
                Keys and values of the context. Those of the new context and of the block are appended; crop the
                block away (`cache.crop(-block)`) before the next call.
            use_cache (`bool`, *optional*):
                Makes a cache when none is given.
            past_key_values (`Cache`, *optional*):
                What transformers before 5.24 calls `cache`.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutputWithPast`]: `last_hidden_state` is `[batch_size, block,
            hidden_size]`, after the final norm.
        """
        cache = past_key_values if cache is None else cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled() and cache is not None:
            raise InvalidInputError(
                "`cache` was given while gradient checkpointing is active in training; recomputing a layer would "
                "append to the cache twice. Pass the whole context without one, or call "
                "`gradient_checkpointing_disable()`."
            )
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
            cache.activate_past_recording()

        context = None
        if context_hidden_states is not None and context_hidden_states.shape[1] > 0:
            context = self.project_context(context_hidden_states)
        new_keys = noise_embeds.shape[1] + (0 if context is None else context.shape[1])
        if position_ids is None:
            first = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(new_keys, device=noise_embeds.device) + first)[None]
        masks = self._layer_masks(noise_embeds, new_keys, attention_mask, cache)
        cos, sin = self.rotary_emb(noise_embeds, position_ids)
        rotations = rotation(cos, sin, noise_embeds.shape[1]), rotation(cos, sin, new_keys)  # of queries, of keys

        # Each layer knows its own causality; a value from the caller must not override it inside the attention.
        kwargs.pop("is_causal", None)
        hidden_states = noise_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states, context, rotations, attention_mask=masks[layer_type], cache=cache, **kwargs
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{OUTPUT_CACHE_FIELD: cache})

    def compute_logits(self, hidden_states: torch.Tensor, output_embeddings: nn.Module) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[..., hidden_size]`): Rows of `last_hidden_state`.
            output_embeddings (`nn.Module`): The target's LM head.

        Returns:
            `torch.Tensor` of shape `[..., vocab_size]`
        """
        # A matmul on a sliced three-dimensional tensor copies the whole LM head per batch entry, ten times slower.
        logits = output_embeddings(hidden_states.reshape(-1, hidden_states.shape[-1]))
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.view(*hidden_states.shape[:-1], -1)

    def _layer_masks(
        self, noise_embeds: torch.Tensor, new_keys: int, attention_mask: Any, cache: Cache | None
    ) -> dict[str, Any]:
        """The mask of each layer type in use, in the form the attention implementation wants."""
        masks = {}
        for layer_type in dict.fromkeys(self.config.layer_types):
            given = attention_mask.get(layer_type) if isinstance(attention_mask, dict) else attention_mask
            if given is not None and (isinstance(attention_mask, dict) or len(given.shape) == 4):
                masks[layer_type] = given
            else:
                layer_idx = self.config.layer_types.index(layer_type)
                masks[layer_type] = self._layer_mask(noise_embeds, new_keys, given, cache, layer_idx)
        return masks

    def _layer_mask(
        self,
        noise_embeds: torch.Tensor,
        new_keys: int,
        padding: torch.Tensor | None,
        cache: Cache | None,
        layer_idx: int,
    ) -> Any:
        """
        Which keys each row of the block sees in layer `layer_idx`: those of the context and the block, at most
        `sliding_window` - 1 back in a sliding layer, and none after the row in a causal one.
        """
        build = ALL_MASK_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        window, is_causal = self.config.window_of_layer(layer_idx), self.config.is_causal_layer(layer_idx)
        is_preallocated = cache is not None and cache.is_compileable
        if build is None or (cache is None and padding is None and window is None and not is_causal):
            return None
        # Asked of the layer, not of the cache: `DFlashCache` adds its own count of new context to both.
        cached, (key_length, key_offset) = 0, (new_keys, 0)
        if cache is not None and layer_idx < len(cache.layers):
            cached = cache.layers[layer_idx].get_seq_length()
            key_length, key_offset = cache.layers[layer_idx].get_mask_sizes(new_keys)
        block = noise_embeds.shape[1]
        end = cached + new_keys
        if is_preallocated and window is not None:
            raise InvalidInputError(
                f"`cache` is a {type(cache).__name__}, whose sliding layers cannot give back what the block "
                "displaced. Use a `DFlashCache`, as `use_cache=True` makes."
            )
        # transformers would fill a short mask up with invisible keys, the block among them.
        if padding is not None and not is_preallocated and padding.shape[-1] != end:
            raise InvalidInputError(
                f"`attention_mask` covers {padding.shape[-1]} keys; expected {end} = {cached} in the cache + "
                f"{new_keys - block} new + {block} of the block. Extend it over all of them."
            )

        def is_visible(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            visible = kv_idx <= q_idx if is_causal else kv_idx < end
            return visible if window is None else visible & (q_idx - kv_idx < window)

        return build(
            batch_size=noise_embeds.shape[0],
            q_length=block,
            kv_length=key_length,
            q_offset=end - block,
            kv_offset=key_offset,
            mask_function=is_visible,
            attention_mask=None if padding is None else padding.to(noise_embeds.device, torch.bool),
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=window is None and not is_causal and not is_preallocated,
            dtype=noise_embeds.dtype,
            config=self.config,
            device=noise_embeds.device,
        )


DFlashDrafterModel.register_for_auto_class("AutoModel")

__all__ = ["DFlashDrafterModel", "DFlashDrafterPreTrainedModel"]
