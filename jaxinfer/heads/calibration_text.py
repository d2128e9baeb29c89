"""The text that heads are compared on where none is given: written for this project, of many kinds, because
heads that look alike on prose may differ on code, lists or numbers."""

TEXT = '''\
The harbour was quiet before sunrise. Two fishermen sat on an upturned crate and mended a net, \
passing the needle back and forth without a word. When the first ferry sounded its horn, the older \
one looked up, counted the lights along the far shore, and said that the wind would turn before \
noon. It did. By eleven the flags stood straight out from their poles, and the small boats that had \
left at dawn came home one after another with their sails half down.

Rivers carry more than water. A slow river drops what it holds: first gravel, then sand, and last of \
all the finest clay, which settles only where the current almost stops. That is why the mouth of a \
large river is so often a plain of mud, cut by channels that move a little every year. Farmers have \
used such plains for thousands of years, since the soil is renewed by every flood; engineers who \
built dams upstream learned that the fields below them slowly grew poor.

"Did you bring the key?" asked Marta.
"I thought you had it," said Paul. He turned out his pockets: a ticket, two coins, a pencil without \
a point.
"Then we shall have to wait for the others."
They sat down on the stairs. After a while Paul began to laugh, and then Marta laughed as well, \
although neither of them could have said what was funny.

How to plant a young tree
1. Dig a hole twice as wide as the roots and exactly as deep.
2. Loosen the soil at the sides with a fork, so that new roots can enter it.
3. Set the tree upright, fill in half of the soil, and water it well.
4. Add the rest, press it down with your foot, and water again.
5. Tie the trunk to a stake for the first two winters, but not too tightly.

def moving_average(values, width):
    """Means of `width` neighbours; the list gets shorter by width - 1."""
    if width < 1 or width > len(values):
        raise ValueError(f"width must be between 1 and {len(values)}, got {width}")
    total = sum(values[:width])
    means = [total / width]
    for index in range(width, len(values)):
        total += values[index] - values[index - width]
        means.append(total / width)
    return means

The committee met on 14 March 2019 in Lisbon and agreed on three points. First, that the budget of \
2.4 million euros, an increase of 8 per cent over the year before, should be spent on repairs and \
not on new buildings. Second, that the report should be published in four languages. Third, that the \
next meeting would be held in September, provided that at least twelve of the nineteen members could \
attend.

A train leaves at 9:15 and travels 180 kilometres in two hours and a quarter. Its average speed is \
therefore 180 / 2.25 = 80 kilometres an hour. A second train leaves half an hour later at 100 \
kilometres an hour. When it starts, the first is 40 kilometres ahead, and the distance shrinks by 20 \
kilometres every hour, so that it would need two hours to catch up: it meets the first train 200 \
kilometres from the station, if the line is that long.

Dear Ms Okafor, thank you for your letter of last week. We are sorry that the lamp arrived broken. A \
new one was sent this morning and should reach you by Thursday; please keep the old one, or give it \
to somebody who repairs such things. If anything else is missing, write to us and mention order \
number 40713. Yours sincerely, Daniel Brandt.

Once upon a time there was a little girl named Lily who lived near a dark forest. Every day she \
walked to the edge of the trees and called, "Hello! Is anyone there?" One morning a small brown bear \
answered. He was sad because he had lost his red ball. Lily said, "Do not cry. We can look for it \
together." They looked under the leaves and behind the big stones, and at last they found the ball \
in the pond. The bear was very happy, and from that day on they were friends.

| planet  | days in a year | moons |
|---------|----------------|-------|
| Mercury | 88             | 0     |
| Earth   | 365            | 1     |
| Mars    | 687            | 2     |

{"name": "sensor-7", "unit": "celsius", "readings": [21.5, 21.7, 22.0, 21.9], "valid": true, "note": null}

Light bends when it passes from air into glass because it travels more slowly there. The side of the \
beam that enters first is held back first, and the whole front swings round, as a row of marching \
people would if those on the left stepped into deep mud. Different colours are slowed by different \
amounts, which is why a prism spreads white light into a band from red to violet. Newton showed that \
a second prism could put the colours together again, and concluded that they had been in the light \
from the beginning.

Question: Which of these is not a mammal: the whale, the bat, the penguin or the otter?
Answer: The penguin is a bird. It lays eggs and has feathers, although it cannot fly; the other \
three give milk to their young.

Le marché ouvre à sept heures. On y trouve du pain, du fromage, des pommes et parfois des fleurs. \
Der Weg führt zuerst durch den Wald und dann am Fluss entlang bis zur alten Mühle. La tienda cierra \
a las ocho, pero los sábados está abierta hasta medianoche.

In the end the old machine was kept, not because anyone needed it, but because nobody wanted to be \
the one who threw it away. It stood in a corner of the workshop under a sheet. Visitors asked about \
it, and whoever was there would lift the sheet, turn the big wheel once, and tell the story of the \
summer when it had worked through three nights without a pause, so that the bridge could open on the \
day that had been promised.
'''
