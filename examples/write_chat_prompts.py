"""Writes varied chat prompts: every template with every topic of its kind, shuffled.

A drafter learns chat from the target's answers to chat prompts, and a small target asked to write its own user turns
(`adaflash prompts`) repeats itself. These were written for this repository, so the file may go wherever the code goes:

    python examples/write_chat_prompts.py --out runs/chat.jsonl --count 2000
    adaflash trajectories --prompts runs/chat.jsonl --domain chat --out runs/trajectories
"""

import argparse
import json
import random
from pathlib import Path

from rich.console import Console


TEMPLATES: dict[str, list[str]] = {
    "subject": [
        "Explain {} to a ten-year-old.",
        "What should everyone know about {}?",
        "How did our understanding of {} change over the last century?",
        "What are common misconceptions about {}, and what is true instead?",
        "Give me a short introduction to {} with two examples.",
        "Why does {} matter in everyday life?",
        "Summarize the main ideas behind {} in a few paragraphs.",
        "Write five quiz questions about {} and answer them.",
        "Compare two competing views of {}.",
        "What are the biggest open questions in {}?",
    ],
    "skill": [
        "How do I get better at {}?",
        "What mistakes do beginners make when {}, and how can I avoid them?",
        "Make a four-week plan for someone who wants to start {}.",
        "I keep giving up on {}. What would you advise?",
        "What do I need before I begin {}?",
        "Write an encouraging message to a friend who has just started {}.",
        "How can I tell whether I am making progress in {}?",
        "Describe a typical day of a person who earns a living by {}.",
    ],
    "scene": [
        "Write a short story that takes place in {}.",
        "Describe {} so vividly that the reader can smell it.",
        "Write a dialogue between two strangers who meet in {}.",
        "Write a poem about {}.",
        "Imagine that you live in {}. What does your morning look like?",
        "Write a letter home from {}.",
        "Write the opening paragraph of a mystery novel set in {}.",
    ],
    "role": [
        "Pretend that you are {}. Introduce yourself and tell me about your work.",
        "You are {}. A newcomer asks you for the most important lesson you have learned. What do you say?",
        "Answer as {}: what is the hardest part of your life?",
        "Write a diary entry of {}.",
        "If {} could travel to our time, what would surprise them most?",
        "Write a speech in which {} thanks the people who helped them.",
    ],
    "change": [
        "What would the world look like if {}?",
        "Suppose that {}. Which jobs would disappear, and which would be new?",
        "How would people's daily routines change if {}?",
        "Imagine that {}. Describe the first week.",
        "Argue for and against the claim that we would be happier if {}.",
    ],
    "count": [
        "Roughly how many {} are there? Show how you estimate it step by step.",
        "How would you find out how many {} there are without any official figures?",
        "Estimate the number of {} and say which of your assumptions is the weakest.",
    ],
    "choice": [
        "What are the pros and cons of {}?",
        "Should I consider {}? Help me decide.",
        "Write a polite email to my manager about {}.",
        "Which questions should I ask before {}?",
        "List seven practical tips for {}.",
        "Write a short blog post about {}.",
        "What does research say about {}?",
    ],
}

# Separated by semicolons.
TOPICS: dict[str, str] = {
    "subject": """
        photosynthesis; inflation; the water cycle; vaccines; black holes; the Roman Republic; plate
        tectonics; probability; natural selection; the French Revolution; supply and demand; gravity; jazz;
        Buddhism; antibiotic resistance; the human heart; the printing press; renewable energy; democracy;
        sleep; the immune system; memory; volcanoes; the stock market; machine learning; the Silk Road; coral
        reefs; electric motors; the ozone layer; Greek mythology; nutrition; encryption; the Industrial
        Revolution; migration of birds; chemical bonds; the moon; public transport; Impressionism; the
        Internet; tides
    """,
    "skill": """
        learning the guitar; running long distances; writing short stories; cooking for a family; gardening;
        speaking in public; saving money; drawing portraits; learning Spanish; playing chess; photography;
        managing a small team; meditating; knitting; teaching children; repairing bicycles; baking bread;
        negotiating; reading faster; studying for exams; dancing salsa; birdwatching; building furniture;
        swimming; keeping a journal; programming; hiking in the mountains; making new friends
    """,
    "scene": """
        a lighthouse in winter; a night train; a crowded market; a library after closing time; a small island;
        a space station; a bakery before dawn; an abandoned factory; a desert village; a hospital waiting
        room; a school during summer holidays; a harbour in fog; a mountain hut; an old theatre; a city under
        the sea; a rooftop garden; a railway museum; a forest after rain; a busy airport; a castle kitchen
    """,
    "role": """
        a medieval blacksmith; a deep-sea diver; a detective in London; a farmer on Mars; a ship's cook; a
        retired astronaut; a village doctor in 1850; a museum guard; a robot who paints; a sheepdog; a
        Renaissance inventor; a football coach; a beekeeper; a judge; a street musician; a queen in exile; a
        translator at a peace conference; a firefighter; a chess grandmaster; a lost explorer
    """,
    "change": """
        nobody needed to sleep; electricity had never been discovered; everyone could speak every language;
        cars were banned from cities; people lived for two hundred years; the oceans rose by ten metres;
        schools taught only through games; money did not exist; animals could talk; the Moon disappeared; all
        work could be done from home; the Library of Alexandria had survived; plastic had never been invented;
        everyone had to work on a farm for a year; memories could be sold; days had thirty hours
    """,
    "count": """
        piano tuners in Chicago; bicycles in Amsterdam; books printed in a year; trees in a large park; phone
        calls made in a day; dogs in Brazil; bricks in a typical house; restaurants in Tokyo; heartbeats in a
        lifetime; words a person speaks in a week; windows in New York; grains of rice in a bag
    """,
    "choice": """
        working from home; changing careers at forty; adopting a dog; moving to another country; going
        vegetarian; buying a used car; asking for a raise; starting a small business; studying abroad; sharing
        a flat; switching to a four-day week; learning online instead of in class; living without a car; a job
        interview; travelling alone; handling criticism; organising a conference; writing a resume; a better
        night's sleep; reducing food waste; dealing with a difficult colleague; planning a birthday party;
        staying healthy at a desk
    """,
}


def chat_prompts() -> list[str]:
    """Every template with every topic of its kind."""
    return [
        template.format(" ".join(topic.split()))
        for kind, topics in TOPICS.items()
        for template in TEMPLATES[kind]
        for topic in topics.split(";")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines with one `prompt` each")
    parser.add_argument("--count", type=int, help="how many at most (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle")
    arguments = parser.parse_args()

    prompts = chat_prompts()
    random.Random(arguments.seed).shuffle(prompts)
    prompts = prompts[: arguments.count]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    Console().print(f"{len(prompts)} prompts written to {arguments.out}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
