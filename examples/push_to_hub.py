"""A drafter to the Hub, with its card, and back.

    hf auth login
    python examples/push_to_hub.py org/my-drafter --drafter runs/drafter --private

Whoever loads it needs no more than transformers: the sources of the model are pushed beside the weights, and
`AutoModel.from_pretrained(..., trust_remote_code=True)` runs them. With this package installed, its own are used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from transformers import AutoModel

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.commands.loading import find_drafter
from adaflash_hf.errors import AdaFlashError
from adaflash_hf.hub_connection import loading_checkpoint
from adaflash_hf.hub_upload import reserve_repository, talking_to_hub


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", help="org/name")
    parser.add_argument("--target", default="smollm2-135m", help="decides the default of --drafter")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--private", action="store_true", help="of a repository that is new")
    args = parser.parse_args(argv)

    path = find_drafter(args.target, args.drafter)
    with loading_checkpoint(path, "--drafter"):
        drafter = DFlashDrafterModel.from_pretrained(path)
    reserve_repository(args.repository, private=args.private)
    with talking_to_hub(args.repository):
        drafter.push_to_hub(args.repository, private=args.private or None)
        again = AutoModel.from_pretrained(args.repository)
    same = all(tensor.equal(again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    sys.stdout.write(f"{args.repository}: {'the same' if same else 'ANOTHER'} drafter came back\n")


if __name__ == "__main__":
    try:
        main()
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
