"""Write demo/data/train.jsonl and test.jsonl: calendar notes in plain words, each with the JSON it means.

Everything comes from the word lists and sentence patterns below and one seed. The test rows use patterns, events,
people and places that no training row has.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

KEYS = ("event", "person", "day", "time", "place")
SYSTEM = (
    "Turn the note into JSON with the keys event, person, day, time, place. "
    "Write the day in full. Use null for what the note does not say."
)
SEED = 7
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Words:
    """What one split may say."""

    events: tuple[str, ...]
    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    places: tuple[str, ...]
    patterns: tuple[str, ...]


def listed(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(","))


def paired(left: str, right: str) -> tuple[str, ...]:
    return tuple(f"{a} {b}" for a in listed(left) for b in listed(right))


# In a pattern, {with} {on} {at} {in} are phrases that may be left out; {person} {day} {time} {place} are always said.
# What a pattern has no slot for is not said, so its value is null.
TRAIN = Words(
    events=paired(
        """piano, guitar, drum, singing, swimming, driving, French, Spanish, riding, yoga, baking, pottery, drama,
        judo, sewing, math, biology, history, physics, poetry, chess, tennis, archery, hockey, painting, sailing,
        climbing, geography, boxing, photography, writing, calligraphy, knitting, Latin, algebra, fencing""",
        "lesson, class, exam, course, workshop, practice",
    )
    + paired(
        """budget, code, design, contract, safety, quarterly, board, staff, parent, neighbourhood, project, union,
        sales, client, investor, status, strategy, security, hiring, product, payroll, legal, insurance, warehouse,
        roadmap, customer, tax, launch, press, fundraising, research, inventory""",
        "review, meeting, call, briefing, update, workshop",
    )
    + paired(
        """birthday, farewell, engagement, office, pool, family, charity, award, business, street, harvest, retirement,
        wedding, reunion, summer, alumni""",
        "party, lunch, dinner, reception",
    )
    + listed(
        """dentist appointment, hairdresser appointment, visa appointment, bank appointment, vet appointment, job
        interview, radio interview, exit interview, city tour, factory tour, campus tour, brewery tour, choir
        rehearsal, orchestra rehearsal, bike repair, laptop repair, dishwasher repair, car inspection, kitchen
        inspection, flu shot, blood test, eye exam, road test, haircut, coffee, brunch, breakfast, dinner, book
        club, film club, quiz night, movie night, study group, house viewing, lease signing, guest lecture, welcome
        drinks, spring cleaning, football match, volleyball match, science fair, job fair, book signing, ticket
        pickup, grocery delivery, furniture delivery, server upgrade, fire drill, beach walk, mountain hike, grant
        application"""
    ),
    first_names=listed(
        """Anna, Marcus, Priya, Tom, Elena, Yusuf, Sofia, Liam, Mei, Carlos, Nadia, Oliver, Ingrid, Kofi, Hannah,
        Diego, Fatima, Lucas, Aisha, Peter, Chloe, Ravi, Emma, Hugo, Zoe, Ben, Leila, Sam, Greta, Ivan, Jonas,
        Tariq, Mabel, Svetlana, Rashid, Ximena, Thandi, Walter, Adaeze, Bruno, Colette, Esther, Gareth, Helga,
        Isaac, Jamal, Keiko, Lorenzo, Matilda, Nikolai, Pavel, Quentin, Roberta, Stefan, Ulrich, Vera, Winston,
        Yasmin, Julia, Omar, Kate, Daniel, Nina, Paul, Grace, Arthur, Simone, Ahmed, Bridget, Cedric, Dmitri,
        Eleanor, Farid, Gloria, Hamish"""
    ),
    last_names=listed(
        """Lee, Novak, Okafor, Brandt, Whitfield, Hill, Tanaka, Dubois, Abernathy, Ortiz, Kowalski, Shah, Fairchild,
        Park, Reyes, Lindqvist, Stone, Haddad, Moreau, Weiss, Petrova, Eriksen, Mbeki, Finch, Miller, Adler, Romano,
        Sato, Ivanova, Murphy, Delgado, Schneider, Bennett, Chowdhury, Fraser, Gallagher, Holm, Jankowski, Kaplan,
        Larsen"""
    ),
    places=listed(
        """the library, room 204, the Blue Door Cafe, the town hall, the north office, the gym, Maple Street School,
        the train station, the harbour, room 12, the city museum, the Green Lantern, the main lobby, the river park,
        Elm Street, the art studio, the clinic, the market square, the old mill, the conference room, the rooftop
        bar, the community centre, Pine Hill, the south campus, the bakery, the tennis club, room 318, the airport,
        Casa Verde, the Orchard Hotel, the theatre, lab 5, the post office, the Silver Fork, the playground, the
        second floor, building C, the botanical garden, Lakeside Plaza, the pool, room 51, lab 2, building K, the
        bus stop, the warehouse, the courthouse, the chapel, the ferry terminal, the east wing, Juniper Hall, the
        Crooked Spoon, the stadium, the bookshop, Oak Avenue, the cafeteria, the Hotel Astoria, building A, lab 14,
        room 660, building R, Harbour Street, the Golden Anchor, the swimming hall, the observatory"""
    ),
    patterns=(
        "{event} {with} {on} {at} {in}",
        "{on} {event} {with} {at} {in}",
        "Remind me about the {event} {with} {on} {at} {in}.",
        "Don't forget: {event} {on} {at} {with} {in}",
        "I have a {event} {in} {on} {at} {with}.",
        "Please add {event} {with} to my calendar, {day} {at} {in}.",
        "{person} wants to meet for {event} {on} {at} {in}.",
        "{day}, {time}: {event} {in} {with}",
        "{time} {on}, {event} {with} {in}",
        "We moved the {event} to {day} {at} {in}.",
        "Meeting {person} {in} {on} {at} for {event}.",
        "The {event} {with} is {on} {at} {in}.",
        "Can you put down a {event} {on} {at} {with} {in}?",
        "{person} said {day} works for the {event}, {at} {in}.",
        "Booked: {event} {at} {on} {in} {with}",
        "{place}, {day} {time} - {event} {with}",
        "There is a {event} {in} {on}. It starts {at}.",
        "Just got off the phone, {event} {with} is set for {day} {at} {in}.",
        "So {person} and I will do {event} {on}, {at} {in}",
        "{at} {on} I'm seeing {person} for {event} {in}",
        "note to self: {event} {on} {in} {at} {with}",
        "The {event} starts {at} {on} {in}, {person} is coming too.",
        "{event}? yes, {day} {at} {in} {with}",
        "Looks like {event} {with} happens {in} {on} {at}.",
        "Schedule: {event} / {day} / {time} / {place}",
        "Schedule: {event} / {person} / {day} / {time}",
        "Save the date, {event} {with} {on} {at} {in}!",
        "My {event} {on} got confirmed for {time} {in}.",
        "Tell {person} the {event} is {in} {on} {at}.",
        "new entry - {event} {in}, {on}, {at}, {with}",
        "{person} has invited me to {event} {in} {on}, be there {at}.",
        "I promised {person} a {event} {on} {at} {in}.",
        "Hi, {person} arranged a {event} {on} {at} {in}.",
        "Could you tell {person} that I planned a {event} {in} {on} {at}?",
        "FYI, {event} {with} {at} {on} {in}.",
        "Agenda: {day} {time}, {event}, {place}, {person}",
    ),
)

TEST = Words(
    events=paired("violin, cooking, chemistry, rowing, German, geometry, surfing", "lesson, class, exam, practice")
    + paired("marketing, supplier, hardware, compliance, election", "review, meeting, call")
    + listed(
        """chest x-ray, garden party, passport appointment, thesis defence, wine tasting, team breakfast, roof repair,
        podcast recording, museum visit, barbecue, boat trip, carpet cleaning, anniversary dinner, physio session,
        photo shoot, parcel pickup, graduation lunch"""
    ),
    first_names=listed(
        """Beatriz, Noah, Amara, Felix, Yuki, Clara, Victor, Margaret, Sanjay, Lucy, Ibrahim, Katarina, Edward, Rosa,
        Timothy, Chiara, Leonard, Miriam"""
    ),
    last_names=listed(
        "Castillo, Singh, Becker, Nguyen, Harlow, Lang, Jensen, Osei, Parker, Rossi, Andersson, Kim, Fletcher, Medina"
    ),
    places=listed(
        """the Red Kettle, room 407, the boat house, the west office, Cedar Road, the concert hall, the food court, lab
        9, the Hotel Miramar, the dog park, building F, the Corner Bistro, the gallery, room 83, the bank, Willow
        Street, the lighthouse, the third floor, the ice rink, building H"""
    ),
    patterns=(
        "Heads up, {event} {with} {on} {at} {in}.",
        "Could you note that {person} booked a {event} {on} {at} {in}?",
        "{on} {at} there's the {event} {in} {with}.",
        "Calendar: {day} {time}, {event}, {place}",
        "{event} {in} {with}, {day} {at}.",
        "I agreed to a {event} {with} {at} {on} {in}",
        "See {person} {on} {at} about the {event} {in}.",
        "The {event} will now be {in} {on} {at}.",
        "Need to be {in} {at} {on} for a {event} {with}.",
        "{person} just confirmed the {event} for {day} {at}.",
    ),
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HOURS = ("twelve", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
TITLES = ("Dr.", "Mr.", "Mrs.", "Ms.", "Professor", "Coach")
MINUTES = (0, 0, 0, 30, 30, 15, 45, 10, 20, 40)


def clock(hour: int, minute: int, rng: random.Random) -> str:
    """3:30 pm, 15:30, half past three."""
    hour12, half = hour % 12 or 12, "am" if hour < 12 else "pm"
    spoken = {0: "{} o'clock", 15: "quarter past {}", 30: "half past {}", 45: "quarter to {}"}
    style = rng.choice(("short", "short", "long", "spoken"))
    if style == "long":
        return f"{hour:02d}:{minute:02d}"
    if style == "spoken" and (hour, minute) == (12, 0):
        return "noon"
    if style == "spoken" and minute in spoken:
        return spoken[minute].format(HOURS[(hour + (minute == 45)) % 12])
    space = rng.choice(("", " "))
    return f"{hour12}{space}{half}" if minute == 0 else f"{hour12}:{minute:02d}{space}{half}"


def day_said(day: str, rng: random.Random) -> str:
    return rng.choice((day, day, day, day[:3], f"next {day}", day.lower()))


def preposition(place: str) -> str:
    if "floor" in place:
        return "on"
    return "in" if place.startswith(("room", "lab", "building")) else "at"


def person_said(words: Words, rng: random.Random) -> str:
    """Anna, Anna Stone, Dr. Stone."""
    first, last = rng.choice(words.first_names), rng.choice(words.last_names)
    return rng.choice((first, first, first, f"{first} {last}", f"{rng.choice(TITLES)} {last}"))


def note(words: Words, rng: random.Random) -> tuple[str, dict[str, str | None]]:
    """One sentence and the fields it says."""
    pattern = rng.choice(words.patterns)
    event, person, place = rng.choice(words.events), person_said(words, rng), rng.choice(words.places)
    day, time = rng.choice(DAYS), clock(rng.randint(7, 20), rng.choice(MINUTES), rng)
    values = {"event": event, "person": person, "day": day, "time": time, "place": place.removeprefix("the ")}
    said = values | {"day": day_said(day, rng), "place": place}
    phrases = {
        "with": ("person", f"with {person}", 0.7),
        "on": ("day", said["day"] if said["day"].startswith("next") else f"on {said['day']}", 0.85),
        "at": ("time", f"at {time}", 0.85),
        "in": ("place", f"{preposition(place)} {place}", 0.6),
    }
    fields: dict[str, str | None] = dict.fromkeys(KEYS)

    def fill(match: re.Match[str]) -> str:
        slot = match.group(1)
        if slot in said:
            fields[slot] = values[slot]
            return said[slot]
        field, phrase, chance = phrases[slot]
        if rng.random() > chance:
            return ""
        fields[field] = values[field]
        return phrase

    return tidy(re.sub(r"\{(\w+)\}", fill, pattern), rng), fields


def tidy(text: str, rng: random.Random) -> str:
    """Close the gaps of phrases left out, and vary case and a/an as people do."""
    text = re.sub(r"\s+", " ", text).strip(" ,-")
    text = re.sub(r" ([.,:!?])", r"\1", text)
    text = re.sub(r",([,.!?])", r"\1", text)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:] if rng.random() < 0.7 else text


def chat(text: str, fields: dict[str, str | None]) -> dict[str, list[dict[str, str]]]:
    roles = ("system", "user", "assistant")
    contents = (SYSTEM, text, json.dumps(fields, ensure_ascii=False))
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}


def rows(words: Words, count: int, seed: int) -> list[dict]:
    rng, seen, out = random.Random(seed), set(), []
    while len(out) < count:
        text, fields = note(words, rng)
        # A note of two facts is hardly a note.
        if text in seen or sum(v is not None for v in fields.values()) < 3:
            continue
        seen.add(text)
        out.append(chat(text, fields))
    return out


def dump(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=300, help="training rows (default: %(default)s)")
    parser.add_argument("--test", type=int, default=64, help="held-out rows (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=DATA, help="folder to write to (default: %(default)s)")
    args = parser.parse_args()
    dump(rows(TRAIN, args.train, SEED), args.out / "train.jsonl")
    dump(rows(TEST, args.test, SEED + 1), args.out / "test.jsonl")


if __name__ == "__main__":
    main()
