"""What drafting is measured on: answers that repeat much of their prompt, and text that nobody can guess."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kinetic_core.errors import TemplateError

if TYPE_CHECKING:
    from kinetic_core.engine.model import Model

CODE = '''\
class Basket:
    """Goods that a customer has chosen, with their prices in cents."""

    def __init__(self, currency="EUR"):
        self.currency = currency
        self.goods = []
        self.discount = 0

    def add(self, name, price, count=1):
        if price < 0 or count < 1:
            raise ValueError("a price is at least 0 and a count at least 1")
        self.goods.append((name, price, count))

    def remove(self, name):
        before = len(self.goods)
        self.goods = [entry for entry in self.goods if entry[0] != name]
        return before - len(self.goods)

    def total(self):
        total = 0
        for name, price, count in self.goods:
            total += price * count
        if self.discount:
            total -= total * self.discount // 100
        return total

    def receipt(self):
        lines = []
        for name, price, count in self.goods:
            lines.append(f"{count:3} x {name:20} {price / 100:8.2f}")
        lines.append(f"total {self.currency} {self.total() / 100:.2f}")
        return "\\n".join(lines)
'''

PASSAGE = """\
The old lighthouse stood at the end of the harbour wall, where the stones were green with weed and the wind never \
quite stopped. Every evening, an hour before dark, Marta climbed its hundred and twelve steps with a can of oil in \
one hand and a book in the other. She had done so for nineteen years, and her mother had done so before her. From the \
gallery she could see the whole bay: the fishing boats coming home in a line, the ferry with its yellow lamps, and \
far out, where the water turned from blue to grey, the slow black shapes of the ships that never stopped here. She \
trimmed the wick, filled the lamp, polished the great lens with a cloth that had once been a shirt, and waited for \
the first star. When it came she lit the flame and set the clockwork going, and the beam went out across the water \
like an arm. After that there was nothing to do but read. She read about deserts and cities, about people who lived \
in towers of glass and never saw the sea. Sometimes she looked up and tried to imagine them, and sometimes she \
wondered whether one of them, at that same moment, was reading about a woman who sat in a tower of stone and kept a \
light burning for strangers. Towards midnight the wind usually rose, and then she put the book down and listened, \
because the wind in the gallery sounded like voices, and in all those years it had never once said the same thing \
twice. In the morning she wrote the weather into the log, one line for each night, and went down to the village to \
buy bread."""

PEOPLE = (
    ("Anna Berg", "nurse", "Oslo", 34, "piano"),
    ("Paul Mendes", "baker", "Porto", 51, "maps"),
    ("Amina Yusuf", "pilot", "Mombasa", 29, "birds"),
    ("Tom Nowak", "carpenter", "Gdansk", 42, "bees"),
    ("Lucy Hall", "teacher", "Leeds", 38, "running"),
    ("Ravi Menon", "chemist", "Kochi", 45, "poems"),
    ("Elena Rossi", "lawyer", "Turin", 57, "roses"),
    ("Jan de Vries", "gardener", "Utrecht", 63, "sailing"),
    ("Mei Tanaka", "violinist", "Osaka", 26, "baking"),
    ("Omar Farouk", "cook", "Cairo", 31, "radios"),
)
LINES = "\n".join(
    f"name: {name}; job: {job}; city: {city}; age: {age}; hobby: {hobby}" for name, job, city, age, hobby in PEOPLE
)
FILLED = "\n".join(
    json.dumps({"name": name, "job": job, "city": city, "age": age, "hobby": hobby}, indent=2)
    for name, job, city, age, hobby in PEOPLE
)

PROSE = """\
When the letter finally arrived, nobody in the house was awake except the cat. It lay on the mat by the door, pale \
blue, with a stamp from a country that had changed its name twice since the war. Outside, the milk cart rattled past \
and a boy whistled three notes of a song that everyone would know by summer."""


def chat_ids(model: Model, content: str) -> list[int]:
    """A user's message by the model's chat template, or the bare text where it has none that works."""
    try:
        return model.template.encode(model.tokenizer, [{"role": "user", "content": content}])
    except TemplateError:
        return model.tokenize(content + "\n\n")


@attrs.frozen
class Workload:
    """A prompt, and an answer that a good model gives to it.

    name: as in the table and in `--json`. instruction: what the user asks. answer: the answer in forced-text mode;
    empty where there is none. repeats: does the answer repeat what is in the prompt, so that drafts should help?
    """

    name: str
    instruction: str
    answer: str = ""
    repeats: bool = True

    def prompt_ids(self, model: Model) -> list[int]:
        """The prompt's tokens, as `chat_ids`."""
        return chat_ids(model, self.instruction)


WORKLOADS: Sequence[Workload] = (
    Workload(
        "rewrite code",
        f"Here is a Python class:\n\n```python\n{CODE}```\n\nWrite the same class again, with `goods` "
        "renamed to `items`.",
        f"```python\n{CODE.replace('goods', 'items')}```",
    ),
    Workload(
        "quote passage",
        f"Repeat the following passage word for word, without any comment.\n\n{PASSAGE}",
        PASSAGE,
    ),
    Workload(
        "fill JSON",
        f"Extract the data as JSON, one object per line.\n\n{LINES}",
        FILLED,
    ),
)

PLAIN_PROSE = Workload("free prose", f"Continue this story.\n\n{PROSE}", repeats=False)


def share_in_loops(token_ids: Sequence[int], longest_period: int = 64) -> float:
    """The share of tokens in a text's loops: tokens that repeat those one period earlier, for two periods or more.

    So the third and later copies of something said again and again count, and its first two do not.
    """
    looped = [False] * len(token_ids)
    for period in range(1, min(longest_period, len(token_ids) // 3) + 1):
        run = 0
        for at in range(period, len(token_ids)):
            run = run + 1 if token_ids[at] == token_ids[at - period] else 0
            if run > period:
                looped[at] = True
    return sum(looped) / len(token_ids) if token_ids else 0.0
