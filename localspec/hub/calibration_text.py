"""Prose of our own for calibrating and judging a quantised model where the user gives no text. Text only, no logic."""

from __future__ import annotations

CALIBRATION_PROSE = (
    """The ferry to the island leaves at a quarter past seven, and in winter there is only one a day. Whoever misses it
sleeps at the harbour or drives around the whole bay, which takes four hours when the roads are dry. My grandfather,
who repaired its engine for thirty years, used to say that the sea keeps its own timetable and that the printed one
was for tourists. He kept a notebook in which he wrote down every delay with its cause: fog, ice, a strike, a wedding
party that would not stop dancing, and once a cow that had swum out from the northern shore and refused to be moved.
When he retired he gave me the notebook. I have read it so often that I know whole pages by heart, and I still find
entries that I had overlooked. The last one says only: calm water, full ship, left on time.
""",
    """To bake a plain loaf you need 500 grams of flour, 350 grams of water, 10 grams of salt and a little yeast. Mix
flour and water first and let them rest for half an hour; then add the yeast and the salt and knead until the dough
is smooth. Let it rise in a covered bowl until it has doubled, which takes between one and two hours depending on the
temperature of the room. Shape it, let it rise once more for forty minutes, and heat the oven to 240 degrees Celsius.
Bake it for ten minutes with steam, then lower the heat to 200 degrees and bake for another thirty. It is done when
it sounds hollow if you knock on its bottom. Common mistakes are too much yeast, too little salt, and cutting the
bread while it is still hot. If the crumb is dense, the dough was either too dry or too young.
""",
    """Question: A tank holds 240 litres. One pipe fills it in 6 hours, another empties it in 8 hours. Both are open.
After how many hours is the empty tank full?

Answer: The first pipe brings 240 / 6 = 40 litres an hour. The second takes away 240 / 8 = 30 litres an hour. Together
the tank gains 40 - 30 = 10 litres an hour, so it is full after 240 / 10 = 24 hours. To check: in 24 hours the first
pipe brings 24 * 40 = 960 litres, the second takes 24 * 30 = 720 litres, and 960 - 720 = 240. The answer is 24 hours.

Question: Which planets of the solar system have no moons?

Answer: Mercury and Venus have none. Earth has one, Mars has two small ones, and each of the outer planets has many.
""",
    """Rivers carry sand the way a sentence carries its meaning, some of it visible and most of it not. Where the water
slows down, the sand sinks; where it hurries, it digs. A bend grows because the outer bank is worn away while the
inner one collects what was taken upstream, and so a river that started almost straight will wander more with every
century until it cuts through its own neck and leaves a lake behind. Engineers of the nineteenth century straightened
many rivers in Europe to win land and to make shipping safe. They succeeded, but the faster water deepened the bed,
the level of the ground water fell, and floods arrived downstream sooner and higher than before. Today some of these
rivers are given back a part of their old plain. It is slow and expensive work, and it needs patience with farmers,
towns and fish alike.
""",
    """# Release notes

- The importer reads folders with several weight files and says which one is damaged.
- `--json` prints one object per line; numbers are plain, sizes are in bytes.
- Fixed: a conversation that was deleted while it was being written came back after a restart.
- Fixed: the progress line flickered in narrow terminals.

| version | date | size |
| --- | --- | --- |
| 1.2.0 | 2025-03-04 | 12.4 MB |
| 1.3.0 | 2025-06-19 | 12.9 MB |

Dear Ms Okafor, thank you for your letter of 3 May. We have looked into the matter and found that the parcel was
delivered to the wrong address. We will send you a replacement this week and apologise for the trouble. If you have
further questions, please call us between 9 a.m. and 5 p.m. or answer this message.
""",
)

HELD_OUT_PROSE = """The old observatory stands on a hill above the town, and on clear evenings its door is open to
everybody. Most visitors come for the moon, because it is bright and needs no explanation, and leave having seen the
rings of Saturn, which they had not believed to be real. The guide is a retired teacher of chemistry. She begins with
the same question every time: how far away is the nearest star? Children answer first and are usually right, since
they think of the sun. Then she turns the telescope, slowly, by hand, and tells them to wait until the eye has become
used to the dark. It takes about twenty minutes before the faintest stars appear. Nobody may use a lamp during this
time, and nobody is allowed to hurry. Some people find this hard. They look for their phones, they whisper, they count
the steps to the exit. But after a while even they grow quiet, and someone always says that it is strange how much
there is to see when one does nothing at all. In the year before the road was built, fewer than two hundred visitors
came; now there are more than six thousand, and the town has agreed to switch off half of its street lights at eleven.
"""
