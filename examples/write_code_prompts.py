"""Turns solved programming tasks into function stubs to complete, as `adaflash evaluate` puts those of HumanEval.

A drafter learns the form of the prompts as well as the text of the answers: after tasks in sentences alone, bare
stubs are still new to it. Each record needs the task in words (`text`, `prompt` or `instruction`) and a Python
solution (`code` or `output`), of which only signature and imports are kept; a `test_list` becomes doctests:

    python examples/write_code_prompts.py --tasks mbpp.jsonl --tasks codealpaca.json --out runs/stubs.jsonl
    adaflash trajectories --prompts runs/stubs.jsonl --domain code --out runs/trajectories
"""

import argparse
import ast
import textwrap
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from adaflash_hf.errors import AdaFlashError
from adaflash_hf.training.prompts import read_records, write_prompt_file


INDENT = "    "
REQUEST = "Complete this Python function:\n\n```python\n{}\n```"


def parsed(solution: str) -> ast.Module | None:
    """The solution as Python; None where it is another language, or broken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(solution.replace("\r\n", "\n"))
    except SyntaxError:
        return None


def doctests(assertions: list[str]) -> list[str]:
    """Lines of a doctest for each `assert call == value`; other assertions are left out."""
    lines = []
    for assertion in assertions:
        try:
            statement = ast.parse(assertion.strip()).body[0]
        except (SyntaxError, IndexError):
            continue
        if (
            isinstance(statement, ast.Assert)
            and isinstance(statement.test, ast.Compare)
            and isinstance(statement.test.ops[0], ast.Eq)
        ):
            lines += [f">>> {ast.unparse(statement.test.left)}", ast.unparse(statement.test.comparators[0])]
    return lines


def stub(record: dict[str, Any]) -> str | None:
    """Signature and docstring of the record's solution, or None where it has no Python function."""
    task = next((record[key] for key in ("text", "prompt", "instruction") if record.get(key)), None)
    tree = parsed(str(record.get("code") or record.get("output") or ""))
    body = [] if tree is None else tree.body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    if task is None or not functions:
        return None
    function = functions[-1]  # those before it are its helpers
    imports = [ast.unparse(node) for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    described = textwrap.wrap(" ".join(task.split()), 95) + doctests(record.get("test_list") or [])
    return (
        "".join(f"{line}\n" for line in imports)
        + ("\n\n" if imports else "")
        + f"def {function.name}({ast.unparse(function.args)}){returns}:\n"
        + f'{INDENT}""" '
        + f"\n{INDENT}".join(described)
        + f'\n{INDENT}"""'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", type=Path, action="append", required=True, help="JSON or JSON lines; may be repeated"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines with one `prompt` each")
    arguments = parser.parse_args()

    try:
        records = [record for path in arguments.tasks for _, record in read_records(path)]
    except AdaFlashError as error:
        parser.error(f"--tasks cannot be read: {error}")
    prompts = list(dict.fromkeys(REQUEST.format(made) for record in records if (made := stub(record))))
    try:
        write_prompt_file(arguments.out, prompts)
    except AdaFlashError as error:
        parser.error(f"--out cannot be written: {error}")
    Console().print(
        f"{len(prompts)} stubs from {len(records)} tasks written to {arguments.out}", markup=False, soft_wrap=True
    )


if __name__ == "__main__":
    main()
