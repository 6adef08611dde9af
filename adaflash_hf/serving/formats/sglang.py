"""For SGLang's own DFLASH algorithm: z-lab's format in bfloat16, without heads.

SGLang ignores tensors it does not know and leaves those it misses uninitialised, both without a word, so what is
written is compared with the exact list of names. Its workers feed the drafter bfloat16 embeddings whatever the dtype
of the weights is, so bfloat16 is the only one that works.
"""

from __future__ import annotations

import torch

from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .zlab import write_for


__all__ = ["FORMAT"]


def _write(bundle: DrafterBundle, options: WriteOptions) -> DrafterForm:
    return write_for("sglang", bundle, options)


FORMAT = CheckpointFormat(name="sglang", title="SGLang, algorithm DFLASH", write=_write, dtype=torch.bfloat16)
