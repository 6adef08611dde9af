"""Writes varied chat prompts: every template with every topic of its kind, shuffled.

A drafter learns chat from the target's answers to chat prompts, and a small target asked to write its own user turns
(`adaflash prompts`) repeats itself. These were written for this repository, so the file may go wherever the code goes:

    python examples/write_chat_prompts.py --out runs/chat.jsonl --count 2000
    adaflash trajectories --prompts runs/chat.jsonl --domain chat --out runs/trajectories
"""

import argparse
import random
from pathlib import Path

from rich.console import Console

from adaflash_hf.errors import AdaFlashError
from adaflash_hf.training.prompts import write_prompt_file


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
        "How many {} are there? Explain your reasoning step by step.",
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
    "history": [
        "What if {}?",
        "How might the world be different today if {}?",
    ],
    "society": [
        "How does {} affect people and communities?",
        "What are the main causes and consequences of {}?",
        "Which factors should a city consider when dealing with {}?",
        "How can governments and companies respond to {}?",
        "Discuss the ethical questions raised by {}.",
    ],
    "reasoning": [
        "How can you tell {}?",
        "What clues might show {}?",
        "Why might it be hard to judge {}?",
    ],
    "document": [
        "Write {}.",
        "Can you help me write {}?",
        "Draft {} in a friendly tone.",
        "Give me an outline and a first draft of {}.",
    ],
    "coding": [
        "Write a Python function that {}.",
        "Implement a program that {} and explain how it works.",
        "Show me code in JavaScript that {}.",
    ],
    "school": [
        "{} Show the steps.",
        "{}",
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
        Internet; tides; earthquakes; the periodic table; genetics; the Renaissance; solar panels; blockchain;
        the nervous system; the Cold War; recycling; bacteria; the carbon cycle; game theory; the Ottoman
        Empire; opera; glaciers; insulin; human rights; the placebo effect; fermentation; satellites;
        taxation; the Great Depression; statistics; wetlands; operating systems; behavioural economics; the
        theory of relativity; urban planning; dinosaurs; international trade; databases; stoicism; the Space
        Race; soil; artificial intelligence in medicine; trade unions; cybersecurity; the Enlightenment;
        allergies; search engines
    """,
    "skill": """
        learning the guitar; running long distances; writing short stories; cooking for a family; gardening;
        speaking in public; saving money; drawing portraits; learning Spanish; playing chess; photography;
        managing a small team; meditating; knitting; teaching children; repairing bicycles; baking bread;
        negotiating; reading faster; studying for exams; dancing salsa; birdwatching; building furniture;
        swimming; keeping a journal; programming; hiking in the mountains; making new friends; writing clean
        code; learning to sing; investing for retirement; giving feedback; playing the piano; losing weight;
        remembering names; drawing comics; learning Japanese; leading meetings; growing vegetables; waking up
        early; solving puzzles; acting on stage; sewing clothes; writing poetry; running a podcast; debating;
        cooking without recipes; touch typing; rock climbing; designing websites
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
        translator at a peace conference; a firefighter; a chess grandmaster; a lost explorer; a pirate's
        parrot; a Viking sailor; a news reporter at the Olympics; an opera singer; a lighthouse keeper; a
        wizard's apprentice; the mayor of a small town; a surgeon in a field hospital; an Arctic researcher; a
        Roman senator; a spaceship's computer; a train driver; a toy maker; a cowboy; a superhero's sidekick;
        a tennis champion; a samurai; a stand-up comedian; a tea merchant; a survivor on a desert island
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
        lifetime; words a person speaks in a week; windows in New York; grains of rice in a bag; drops of
        water in a swimming pool; hairs on a human head; emails sent in a year; cups of coffee drunk in London
        in a day; leaves on an oak; steps a postman takes in a career; letters in a newspaper; stars visible
        on a clear night; photographs taken in a month; bees in a country; kilometres a taxi drives in its
        life; meals served by an airline in a year; tennis balls that fit into a bus; dreams a person has;
        pencils a school uses in a year; breaths taken in a day
    """,
    "choice": """
        working from home; changing careers at forty; adopting a dog; moving to another country; going
        vegetarian; buying a used car; asking for a raise; starting a small business; studying abroad; sharing
        a flat; switching to a four-day week; learning online instead of in class; living without a car; a job
        interview; travelling alone; handling criticism; organising a conference; writing a resume; a better
        night's sleep; reducing food waste; dealing with a difficult colleague; planning a birthday party;
        staying healthy at a desk
    """,
    "history": """
        Rome had never fallen; the steam engine had been invented in ancient Greece; Napoleon had won at
        Waterloo; the printing press had never reached Europe; penicillin had not been discovered; the Berlin
        Wall still stood; the Titanic had arrived safely; dinosaurs had survived; the Panama Canal had not
        been built; Mozart had lived to eighty; Leonardo da Vinci had published his notebooks; the telephone
        had been invented before the telegraph; China had colonised America; the First World War had been
        avoided; the Great Fire of London had not happened; Marie Curie had become a painter; the Silk Road
        had never opened; the metric system had been rejected everywhere; the first computers had been built
        in Baghdad; television had never been invented; Gandhi had stayed a lawyer; the Vikings had settled in
        Canada for good; the French Revolution had failed; gunpowder had stayed a secret; Einstein had become
        a musician; the Apollo missions had found life; the Aztec calendar had become the world's; aeroplanes
        had been invented in 1750; nobody had domesticated horses; Shakespeare had written in Latin
    """,
    "society": """
        ageing populations; online advertising; remote work; air pollution; fast fashion; screen time; mass
        tourism; urban farming; genetic testing; self-driving cars; food waste; rising rents; loneliness;
        electric scooters; language barriers; deforestation; nuclear power; online learning; misinformation;
        water scarcity; universal basic income; facial recognition; noise in cities; organ donation; space
        tourism; cashless payment; childhood obesity; video games; animal testing; volunteer work
    """,
    "reasoning": """
        whether a job offer is serious; whether a used bicycle is worth its price; whether somebody is tired
        or bored; whether a news story has been exaggerated; whether a neighbourhood is friendly; whether a
        plan is too ambitious; whether a child has understood an explanation; whether a recipe will work at
        high altitude; whether a shop treats its staff well; whether an apology is sincere; whether a plant
        needs more water or less; whether a meeting is going badly; whether a study can be trusted; whether a
        friend wants advice or just a listener; whether a book is meant for children; whether a landlord is
        honest; whether a bargain is real; whether a team trusts its leader; whether a photograph has been
        altered; whether a language course suits you
    """,
    "document": """
        a cover letter for a position as a nurse; an email that postpones a meeting; a complaint about a late
        delivery; an invitation to a school reunion; a review of a disappointing restaurant; a review of a new
        novel; a press release for a charity run; a script for a video about bees; a blog post about a weekend
        in Lisbon; a thank-you note to a teacher; a proposal for a community garden; a letter of
        recommendation for an intern; an announcement of a software update; a reply to an angry customer; a
        toast for a golden wedding; a newsletter for a chess club; an advertisement for a bakery; a report on
        a science fair; a podcast introduction about the history of tea; a product description of a backpack;
        a request for a refund; a farewell email to colleagues; a summary of a town meeting; a concert review;
        a speech for the first day of school
    """,
    "coding": """
        checks whether a string is a palindrome; merges two sorted lists; counts the vowels in a text;
        validates a phone number; finds the second largest number in a list; removes duplicates from a list
        and keeps the order; converts Roman numerals; reverses the words of a sentence; computes the greatest
        common divisor; simulates a stack; finds all prime numbers below a limit; sorts a list by quicksort;
        parses a CSV line; computes compound interest; checks whether two words are anagrams; rotates a
        matrix; counts words in a file; finds the shortest path in a grid; generates a random password;
        formats a date
    """,
    "school": """
        Solve for x: 4x - 7 = 2x + 9.; Find the value of g(3) where g(x) = 2x^2 - 5x + 1.; What is the area of
        a circle with a radius of 7 cm?; Find the distance between the points (1, 2) and (7, 10).; What is the
        slope of the line through (0, 3) and (4, 11)?; Factor x^2 - 5x + 6.; A bag holds 3 red and 5 blue
        marbles. What is the probability of drawing a red one?; Convert 72 km/h to metres per second.; What is
        15% of 240?; Find the average of 12, 18, 25 and 33.; Solve the system x + y = 10 and x - y = 4.; How
        many degrees do the angles of a hexagon sum up to?; Simplify (3x^2)(4x^3).; What is the derivative of
        3x^3 - 4x + 2?; Find the hypotenuse of a right triangle with legs of 9 and 12.; A shop cuts a price of
        80 dollars by 25%. What does the article cost now?
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
    try:
        write_prompt_file(arguments.out, prompts)
    except AdaFlashError as error:
        parser.error(f"--out cannot be written: {error}")
    Console().print(f"{len(prompts)} prompts written to {arguments.out}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
