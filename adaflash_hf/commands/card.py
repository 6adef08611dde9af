"""`adaflash card`: the model card of a drafter, from its configuration, its records and measured results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import PrivateOption


__all__ = ["card"]


def card(
    drafter: Annotated[
        Path, typer.Argument(help="Directory of a drafter; its run.json and metrics.json are read too.")
    ],
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            "--bench",
            help="Results of `adaflash bench` or `adaflash evaluate` (.json), as often as wanted; default: "
            "*bench*.json beside the weights.",
        ),
    ] = None,
    records: Annotated[
        Path | None, typer.Option("--records", help="Directory of run.json and metrics.json, if they are elsewhere.")
    ] = None,
    notes: Annotated[
        Path | None,
        typer.Option(
            "--notes",
            help="Markdown with what nobody can measure, under '## Training' and '## Intended use and limits'.",
        ),
    ] = None,
    repo_id: Annotated[
        str | None, typer.Option("--repo-id", help="Where the drafter is or will be, org/name.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="Hub id of the target; default: what the configuration names.")
    ] = None,
    card_license: Annotated[
        str | None, typer.Option("--license", help="Such as apache-2.0; default: the target's.")
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Upload drafter and card to --repo-id.")] = False,
    private: PrivateOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a card that was written by hand.")] = False,
) -> None:
    """Write or update the README.md of DRAFTER: metadata, code for each engine, measured tables, recipe and limits."""
    from ..errors import InvalidInputError
    from ..hub_upload import check_card_on_hub, check_repository_name, reserve_repository, upload_drafter
    from ..model_card import CARD_FILE, CardOptions, build_drafter_card, may_be_replaced, save_drafter_card
    from ..output_places import check_writable

    if push and repo_id is None:
        raise InvalidInputError("`--push` is given without `--repo-id`; say where to, as org/name.")
    if private and not push:
        raise InvalidInputError("`--private` is given without `--push`, so there is no repository to create.")
    if repo_id is not None:
        check_repository_name(repo_id)
    path = drafter / CARD_FILE
    if path.is_file() and not force and not may_be_replaced(path.read_text(encoding="utf-8")):
        raise InvalidInputError(
            f"{path} was not written by this command, and what somebody wrote there would be lost; move it away or "
            "give --force."
        )
    options = CardOptions(
        repo_id=repo_id,
        base_model=base_model,
        license=card_license,
        bench=bench if bench is not None else sorted(drafter.glob("*bench*.json")),
        records=records,
        notes=notes,
    )
    check_writable(drafter, "drafter")
    made = build_drafter_card(drafter, options)
    if push and repo_id is not None:
        reserve_repository(repo_id, private=private)
        if not force:
            check_card_on_hub(repo_id)
    typer.echo(f"Wrote {save_drafter_card(made, drafter)}")
    if push and repo_id is not None:
        typer.echo(f"Pushed to {upload_drafter(drafter, repo_id, replace_card=force)}")
