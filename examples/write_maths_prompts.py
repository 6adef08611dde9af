"""Asks the questions of a maths data set with other numbers: new prompts of the same form, as many as are wanted.

A length head learns how much of a block is accepted. On responses that its drafter was trained on more is accepted
than on any others, so a head needs some that the drafter has not seen, and a data set is soon used up. Whole numbers
are replaced by others of as many digits; a drafter learns from what the target answers, sensible or not:

    python examples/write_maths_prompts.py --questions gsm8k_train.jsonl --count 500 --out runs/questions.jsonl
    adaflash trajectories --prompts runs/questions.jsonl --domain maths --out runs/unseen
"""

import argparse
import random
import re
from pathlib import Path

from rich.console import Console

from adaflash_hf.errors import AdaFlashError
from adaflash_hf.training.prompts import read_prompt_file, write_prompt_file


NUMBER = re.compile(r"\d+")


def with_other_numbers(question: str, rng: random.Random) -> str:
    """The question with every number replaced, equal ones alike."""
    replaced: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        number = match.group()
        if number not in replaced:
            lowest = 10 ** (len(number) - 1)
            choices = [rng.randrange(lowest, 10 * lowest) for _ in range(2)]
            replaced[number] = next((str(choice) for choice in choices if str(choice) != number), number)
        return replaced[number]

    return NUMBER.sub(other, question)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="a file of prompts, such as that of GSM8K")
    parser.add_argument("--count", type=int, default=500, help="prompts to write, drawn from all; default: 500")
    parser.add_argument("--seed", type=int, default=0, help="decides which, and the numbers; default: 0")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines with one `prompt` each")
    arguments = parser.parse_args()

    try:
        read = [prompt.messages[-1][1] for prompt in read_prompt_file(arguments.questions, "maths")]
    except AdaFlashError as error:
        parser.error(f"--questions cannot be read: {error}")
    rng = random.Random(arguments.seed)
    questions = [question for question in read if NUMBER.search(question)]
    if not 1 <= arguments.count <= len(questions):
        parser.error(
            f"--count is {arguments.count}, but {len(questions)} questions have numbers; ask for 1 to {len(questions)}"
        )
    made = [with_other_numbers(question, rng) for question in rng.sample(questions, arguments.count)]
    prompts = sorted(set(made) - set(read))  # one-digit numbers may come out as those of another question
    try:
        write_prompt_file(arguments.out, prompts)
    except AdaFlashError as error:
        parser.error(f"--out cannot be written: {error}")
    Console().print(f"{len(prompts)} questions written to {arguments.out}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
