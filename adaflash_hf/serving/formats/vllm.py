"""For vLLM's method dflash: z-lab's format in bfloat16, without a length head.

vLLM refuses tensors it does not know, so the head has to go. It takes a draft vocabulary as rows of the target's LM
head, which are written along.
"""

from __future__ import annotations

import torch

from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .draft_vocabulary import draft_vocabulary_tensors
from .engine_limits import refuse_what_is_lost
from .tensor_dtypes import dtype_name
from .zlab import without_extras, zlab_config


__all__ = ["FORMAT"]


def _write(bundle: DrafterBundle, options: WriteOptions) -> DrafterForm:
    notes = refuse_what_is_lost(bundle.config, "vllm")
    holds, rounding = without_extras(bundle, options, keep_length_head=False, keep_draft_vocabulary=True)
    config = {**zlab_config(holds.config), "dtype": dtype_name(holds.tensors)}
    tensors = {name: tensor for name, tensor in holds.tensors.items() if name != "draft_token_ids"}
    if extra := draft_vocabulary_tensors(bundle, options, with_members=False):
        config["draft_vocab_size"] = holds.config.draft_vocab_size
        tensors |= extra
    return DrafterForm(config=config, tensors=tensors, holds=holds, notes=notes + rounding)


FORMAT = CheckpointFormat(name="vllm", title="vLLM, method dflash", write=_write, dtype=torch.bfloat16)
