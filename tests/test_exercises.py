"""The checks of the exercises: whatever is handed in gets an answer, and a usual mistake the hint that fits it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import split_policy
from attnlab._boot import INTERPRETED
from attnlab.eager import oracle
from attnlab.inspect.exercises import check_exercise, lesson_06_decode_kernel
from attnlab.inspect.exercises.registry import Wrong, ask, exercises
from attnlab.inspect.exercises.toy import toy
from attnlab.inspect.record import Scores
from attnlab.kernels.core import finite_or_zero
from attnlab.mods import jit, tl
from attnlab.plan.index import KVIndex
from attnlab.plan.policies.balanced import Balanced
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import HostPolicy
from attnlab.spec import ScoreMod
from attnlab.trace import STAGES

NO_ANSWERS = {
    "none": None,
    "dots": ...,
    "number": -1,
    "text": "?",
    "list": [],
    "tensor": torch.zeros(3),
    "empty function": lambda *args: None,
    "function that raises": lambda *args: 1 / 0,
    "function of text": lambda *args: "?",
    "function of texts": lambda *args: ("?", "?", "?"),
    "function of nothings": lambda *args: (None, ..., None),
}


def said(number: str, answer: object) -> str:
    return repr(check_exercise(number, answer))


@pytest.mark.parametrize("number", exercises.names())
@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_no_answer_breaks_a_check(number: str, answer: object) -> None:
    verdict = check_exercise(number, answer)
    assert not verdict.right
    assert repr(verdict).startswith(f"{number}: not yet. ")


def test_an_unknown_exercise_is_named() -> None:
    with pytest.raises(ValueError, match="exercise: expected one of 00-1, .*, got '99-9'"):
        check_exercise("99-9", 1)
    with pytest.raises(ValueError, match=r"exercise: expected one of 00-1, .*, got \['x'\]"):
        check_exercise(["x"], 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["complex", "in place"])
def test_what_looks_right_but_is_not(change: str) -> None:
    def right(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return oracle.attention(q, k, v, scale=scale)[0]

    def wrong(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        got = right(q, k, v, scale)
        if change == "complex":
            return got + 1j
        q *= scale
        return got

    hint = {"complex": "expected a tensor of numbers, got complex", "in place": "it changes what it is given"}
    assert check_exercise("00-3", right).right
    assert hint[change] in said("00-3", wrong)


def test_a_list_or_a_state_that_is_changed_in_place_is_noticed() -> None:
    assert "it changes what it is given" in said("01-3", lambda pages, size, at: [pages.pop(0), at][0] * size)
    assert "it changes what it is given" in said("03-2", lambda a, b: (a[0], a[1].add_(b[1]), a[2]))


@pytest.mark.parametrize(
    ("number", "answer", "hint"),
    [
        ("00-1", 512, "the key alone"),
        ("00-1", 4096, "Only KV heads"),
        ("00-1", "1024", "Expected a whole number, got str"),
        ("00-1", 1024.0, "Expected a whole number, got the number 1024.0"),
        ("00-1", torch.zeros(2), "Expected a whole number, got Tensor"),
        ("00-2", 7, "Expected a Workbench, got the number 7"),
        ("00-3", 7, "Expected a function, got the number 7"),
        (
            "00-3",
            lambda q, k, v, scale: 1 / 0,
            "v [5, 1, 32] and scale 0.125: it raised ZeroDivisionError: division by",
        ),
        ("00-3", lambda q, k, v, scale: q, "expected shape [1, 32], got [1, 64]"),
        ("01-1", [20, 21, 22, 23, 12, 13], "lowest free page"),
        ("01-1", [12, 13, 14, 20, 21, 22], "Slot 15 is left out"),
        ("01-1", [3, 5], "Those are the right pages. Which slots are in them? Page 3 holds 12 to 15."),
        ("01-1", [20, 21, 12, 13, 14, 15], "in another order"),
        ("01-1", [12, 13, 14, 15, 16, 17], "The first four are right"),
        ("01-1", [12, 13, 14], "a list of 6 slots, one for each token, got 3"),
        ("01-1", "12", "Expected a list, got str"),
        ("01-1", [12.9, 13.9, 14.9, 15.9, 20.9, 21.9], "Expected whole numbers, got [12.9"),
        ("01-1", ["12", "13", "14", "15", "20", "21"], "Expected whole numbers, got ['12'"),
        ("02-1", [2, 31.5], "Expected whole numbers, got [2, 31.5]"),
        ("08-2", ["-1", "0", "1", "2", "2"], "Expected whole numbers, got ['-1'"),
        ("15-1", [48.5, 96.0], "Expected whole numbers, got [48.5, 96.0]"),
        ("01-2", 300, "300 slots are no whole number of pages: expected a multiple of 16"),
        ("01-2", 20, "20 pages is right. How many slots"),
        ("01-2", 304, "page 0 is the sink"),
        ("01-2", 288, "Too few"),
        ("01-2", 336, "fewer slots would do"),
        ("01-3", lambda pages, size, position: pages[0] * size + position, "expected slot"),
        ("01-3", lambda pages, size, position: pages[99], "page size 1 and position 0: it raised IndexError"),
        ("02-1", 31, "Expected a pair (request, position), got the number 31"),
        ("02-1", [2], "Expected a pair (request, position), got [2]"),
        ("02-1", (31, 2), "the request comes first"),
        ("02-1", (1, 31), "Not that request"),
        ("02-1", (2, 100), "Count the position"),
        (
            "02-3",
            lambda table, rows, lens: (lens.cumsum(0), table[0]),
            "expected indptr [0, 3, 5], got [3, 5]. It begins",
        ),
        ("02-3", lambda table, rows, lens: table, "expected 2 things, (indptr, slots), got Tensor"),
        ("03-1", 0.25, "the weight of A"),
        ("03-1", 3, "The weights of both sum to 1"),
        ("03-1", 75, "between 0 and 1"),
        ("03-1", 0.01, "The number of keys does not matter"),
        ("03-2", lambda a, b: a[:2], "expected 3 things, (max, sum, acc), got 2"),
        ("03-3", lambda scores, values, block: scores.exp() @ values / scores.exp().sum(), "exp was given all 5 keys"),
        ("04-1", 9, "How many of them cover 257?"),
        ("04-2", 9, "With splits=9 the longest range still holds 256 keys"),
        ("04-2", 32, "fewer would do"),
        ("04-3", "tile", "2,048, 96 and 700 keys: the one of 97 has a range of 97 keys; at most 96"),
        ("04-3", "nobody's", "policy: expected one of balanced, seed"),
        ("05-1", 64, "64 is how many get a program. How many are left?"),
        ("05-1", 124, "each of 8 KV heads has a program for every range"),
        ("05-1", 0, "how many ranges does `seed` allow it at most?"),
        ("05-1", 100, "Programs are ranges times KV heads"),
        ("05-2", 300, "Expected a power of two, such as 256 or 512, got 300"),
        ("05-2", 8192, "With tile=8192 the finish is 1.25 even shares"),
        ("05-2", 256, "a larger tile would do, with fewer partials"),
        (
            "05-3",
            "seed",
            "One request of 32,000 keys, 8 KV heads and 132 multiprocessors: the finish is 4,000 keys, 2.06",
        ),
        ("05-3", "tile", "125 ranges, and 67 should do. Measure a range against the even share"),
        ("06-1", [264, 1024], "The other way round"),
        ("06-1", [384, 264], "(a): a tile has 16 rows"),
        ("06-1", [704, 264], "(a): the last tile has all its columns"),
        ("06-1", [512, 264], "(a): that is one tile. How many does a range of 44 keys take?"),
        ("06-1", [1536, 264], "(a): a program serves one KV head"),
        ("06-1", [7, 264], "(a): 16 rows, 32 columns a tile"),
        ("06-1", [1024, 1056], "(b): those are the heads of the layer"),
        ("06-1", [1024, 258], "(b): keys 256 to 299, both included, are one more"),
        ("06-1", [1024, 7], "(b): 44 keys, and how many"),
        ("06-1", [1024], "a list of two numbers, (a) and (b), got [1024]"),
        ("06-2", lambda kv_head, tile, row, group: kv_head * group + tile * 16 + row, "no member 1, counted from 0"),
        ("06-2", lambda kv_head, tile, row, group: row if row < group else -1, "Head 0 reads KV head 0. Where does"),
        ("06-2", lambda kv_head, tile, row, group: -1, "The group has a member 0: this row is in use"),
        ("06-3", lambda *pointers: None, "Expected a kernel, a function below @triton.jit, got function"),
        ("07-1", [20, 15], "(a): that would be all of them"),
        ("07-1", [12, 15], "(a): those are the tiles of cached keys alone"),
        ("07-1", [6, 15], "(a): those are the tiles of new keys alone"),
        ("07-1", [15, 15], "(a): the new keys are an array of their own"),
        ("07-1", [7, 15], "(a): there are 4 tiles of queries"),
        ("07-1", [18, 16], "(b): that would be all of them"),
        ("07-1", [18, 18], "(b): in one list the tile that holds the last cached keys"),
        ("07-1", [18, 7], "(b): tile i of queries reads the list up to 300 + 64 (i + 1)"),
        ("07-1", [18], "a list of two numbers, (a) and (b), got [18]"),
        (
            "07-2",
            200,
            "Chunks of 200 visit 111 tiles, and fewer would do. The last tile of queries of every chunk has 8",
        ),
        ("07-2", 64, "The queries fill their tiles. But 64 cached keys leave a tile of keys with idle columns"),
        ("07-2", 1024, "Expected 1 to 200 tokens, got 1024"),
        ("07-2", 0, "Expected 1 to 200 tokens, got 0"),
        ("07-3", lambda tile, *rest: (0, 0, 0), "expected 4 things, (first entry, last entry, first new, last new)"),
        ("08-1", [84, 85, 104], "(a) is one too early. The 100 cached tokens stand at 0 to 99, the new one at 100"),
        ("08-1", [0, 85, 104], "(a): the query stands at 100, and sees 16 keys with its own"),
        ("08-1", [85, 104, 104], "(b): one list serves all queries"),
        ("08-1", [85, 84, 104], "(b): the list begins where the first new query looks back to"),
        ("08-1", [85, 85, 85], "(c): the window moves along. The last of 20 queries stands at 119"),
        ("08-1", [85, 85, 105], "(c) is off by one"),
        ("08-1", [85, 85], "a list of three positions, (a), (b) and (c), got [85, 85]"),
        ("08-2", [-1, 0, 1, 2, 3], "Draft 3 has depth 3, so it stands at position 11 and sees back to 8"),
        ("08-2", [-1, 0, 0, 0, 0], "the deepest has depth 1 only"),
        ("08-2", [-1, 0, 0], "There should be 5 drafts, got 3 parents"),
        ("08-2", [-1, 2, 0, 0, 0], "parents: draft 1: expected an earlier draft, 0 to 0, got 2"),
        ("09-1", [0.75, 0.125, 64512], "(a): that is the sink's share"),
        ("09-1", [1, 0.125, 64512], "(a): they would sum to 1 without the sink"),
        ("09-1", [1 / 3, 0.125, 64512], "(a): the keys have that much for each part of the sink's"),
        ("09-1", [0.3, 0.125, 64512], "How many times as much is that?"),
        ("09-1", [0.25, 0.5, 64512], "(b): that is its share of the keys' weight"),
        ("09-1", [0.25, 0.2, 64512], "(b): half of what all keys have"),
        ("09-1", [0.25, 0.125, 1_024_000], "(c): that is by key"),
        ("09-1", [0.25, 0.125, 16128], "(c): that is how many numbers they are"),
        ("09-1", [0.25, 0.125, 63488], "(c): the last page holds only 8 keys, but takes a number of its own"),
        ("09-1", [0.25, 0.125, 64000], "(c): the last page holds only 8 keys, but takes a number of its own"),
        ("09-1", [0.25, 0.125, 63], "How many pages have 1,000 keys?"),
        ("09-1", ["1/4", 0.125, 64512], "Expected three numbers, got ['1/4'"),
        ("09-1", [0.25, 0.125], "a list of three numbers, (a), (b) and (c), got [0.25, 0.125]"),
        ("09-2", Scores(pool="key", heads=(6,)), "The stage 'masked' is wanted, but not asked for"),
        ("09-2", Scores(stages=("masked", "weights"), pool="key"), "57 rows are left out. Of 9 heads one is studied"),
        ("09-2", Scores(stages=STAGES, pool="key"), "153 rows are left out. Nobody studies raw or scaled or capped"),
        ("09-2", Scores(stages=("masked", "weights"), heads=(5,), pool="key"), "heads=(5,) leaves it out"),
        ("09-2", Scores(stages=("masked", "weights"), heads=(6,)), "pool=None makes bins of many keys here"),
        ("09-3", "nobody's", "score modifier: expected one of alibi, relative_bias"),
        ("09-3", "alibi", "the score -1.13 of key 0 in head 0 became -20.63; expected -4.81"),
        ("12-1", [107, 104, 54], "(a): that is its place in the batch. How many steps is draft 7 away from the root?"),
        ("12-1", [104, 104, 54], "(a) is one too far: the 100 cached tokens stand at 0 to 99, so the root at 100"),
        ("12-1", [3, 104, 54], "(a): the root stands at 100. Draft 7 follows 5, and so on"),
        ("10-1", [2, 2], "(a): 1 + 2²⁴ lies between two numbers that fp32 has"),
        ("10-1", [1, 1], "(a): add one number after the other, and round"),
        ("10-1", [1, 0], "The two are in the wrong order"),
        ("10-1", [0, 2], "(b): the first range is 1 + 2²⁴, which is rounded"),
        ("10-1", [0, 0], "(b): the second range is 1 - 2²⁴"),
        ("10-1", [0, 7], "(b): sum each range by itself"),
        ("10-1", [0], "a list of two numbers, (a) and (b), got [0]"),
        (
            "10-2",
            Static(splits=8),
            "With 256 tokens a full range holds keys 0 to 31; one token later they are cut anew",
        ),
        ("10-2", Static(splits=1), "With 301 tokens a range holds 301 keys; at most 300"),
        ("10-2", Tile(tile=128), "No range moves, but 2,000 tokens have 16 ranges. Longer ones are allowed"),
        ("10-2", Tile(tile=512), "With 301 tokens a range holds 301 keys"),
        ("10-2", "seed", "they are cut anew"),
        (
            "10-2",
            Balanced(tile=256),
            "but this policy looks at the neighbours: in another batch they would. Which policy",
        ),
        ("10-2", 256, "Expected a split policy, got the number 256"),
        (
            "10-3",
            "tile",
            "With 300 keys: expected (0, 64), (64, 128), (128, 256), (256, 300), got (0, 256), (256, 300)",
        ),
        ("11-1", [17.5, 448, 0.3125, 0], "Of 17.5 it does not hold 17.5. From 16 to 32 there are 8 numbers, 2 apart"),
        ("11-1", [16, 448, 0.3125, 0], "Both are numbers of the format, 2 apart there"),
        ("11-1", [18, 1000, 0.3125, 0], "there is no infinity, and what is above saturates"),
        ("11-1", [18, math.inf, 0.3125, 0], "Of 1000 it does not hold inf"),
        ("11-1", [18, 448, 0.28125, 0], "Both are numbers of the format, 0.03125 apart there"),
        ("11-1", [18, 448, 0.3, 0], "From 0.25 to 0.5 there are 8 numbers"),
        ("11-1", [18, 448, 0.3125, 2**-9], "Below 2⁻⁶ the numbers are 2⁻⁹ = 0.00195 apart, down to 0"),
        ("11-1", [18, 448], "a list of 4 numbers, one for each, got [18, 448]"),
        ("11-2", (1.0, 1.0), "K saturates: divided by its scale, the largest number is 3,650"),
        ("11-2", (1 / 8, 1e-6), "A larger scale makes what is stored smaller"),
        ("11-2", (8.0, 1.0), "V underflows: divided by its scale, the largest number is only 0.00093"),
        ("11-2", (1e6, 1e-6), "K underflows"),
        ("11-2", (8.0, 1e-9), "V saturates"),
        ("11-2", (8.0, 0.0), "v_scale: expected a number above 0, got 0"),
        ("11-2", (math.nan, 1e-6), "k_scale: expected a number above 0, got nan"),
        ("11-2", 8.0, "Expected a pair (k_scale, v_scale), got the number 8.0"),
        ("11-2", (8.0,), "Expected a pair (k_scale, v_scale), got (8.0,)"),
        ("12-1", [103, 108, 54], "(b): those would be all drafts up to 7"),
        ("12-1", [103, 103, 54], "(b) is one too few: a draft sees itself as well"),
        ("12-1", [103, 4, 54], "(b): it sees 100 cached keys and the drafts on its path"),
        ("12-1", [103, 104, 53], "(c) is one too early: the window of 50 counts the draft's own key"),
        ("12-1", [103, 104, 58], "(c): that is counted from its place in the batch"),
        ("12-1", [103, 104, 0], "(c): the draft stands at 103, and sees 50 positions with its own"),
        ("12-1", [103, 104], "a list of three numbers, (a), (b) and (c), got [103, 104]"),
        ("12-2", list(range(13)), "The path is [0, 2, 6, 9, 12] now, and 4 rows would still move"),
        ("12-2", [0, 2, 6, 9, 1, 12, 3, 4, 5, 7, 8, 10, 11], "The path is [0, 1, 2, 3, 5] now, and 1 row would still"),
        (
            "12-2",
            [0, 2, 6, 9, 12],
            "no order of the drafts: expected each of the drafts 0 to 12 once; missing: 1, 3, 4",
        ),
        (
            "12-2",
            [0, 6, 2, 9, 12, 1, 3, 4, 5, 7, 8, 10, 11],
            "no order of the drafts: draft [6] comes before the one that it follows",
        ),
        ("13-1", [2176, 4, 171], "(a): the values are columns of the row, and take no memory"),
        ("13-1", [73728, 4, 171], "(a): one row serves all heads"),
        ("13-1", [1024, 4, 171], "(a): the columns with the position are cached, too"),
        ("13-1", [576, 4, 171], "(a): that is how many numbers a row has"),
        ("13-1", [640, 4, 171], "(a): a row has 512 + 64 numbers, of 2 bytes each"),
        ("13-1", [1152, 8, 171], "(b): that is for the heads of DeepSeek-V3. This model has 64"),
        ("13-1", [1152, 1, 171], "(b): all 64 heads read the range, and a program has room for 16"),
        ("13-1", [1152, 4, 170], "(c) is one too few"),
        ("13-1", [1152, 4, 121], "(c): the expanded form multiplies 320 times for each query, too"),
        ("13-1", [1152, 4, 500], "(c): for n queries a key and head take 1088 n multiplications absorbed"),
        ("13-1", [1152, 4], "a list of three numbers, (a), (b) and (c), got [1152, 4]"),
        ("13-2", 300, "Expected a power of two, such as 256 or 512, got 300"),
        ("13-2", 256, "With tile=256 partials move 178% of the keys' bytes"),
        ("13-2", 16384, "less than a tenth, but a smaller tile would do"),
        ("14-1", [1164, 69, 9], "(a): a draft has an entry for each of the 3 drafts, too"),
        ("14-1", [300, 69, 9], "(a): that is the memory for one request; the graph was captured for 4"),
        ("14-1", [400, 69, 9], "(a): a request has a row for each of its 3 drafts"),
        ("14-1", [1200, 60, 9], "(b): a draft has an entry for each of the 3 drafts, too"),
        ("14-1", [1200, 23, 9], "(b): one request, 3 drafts, and 20 cached keys. How many pairs are these?"),
        ("14-1", [1200, 69, 3], "(c): an input has a row for each draft, not for each request"),
        ("14-1", [1200, 69, 12], "(c): the inputs have 12 rows. How many are the step's?"),
        ("14-1", [1200, 69], "a list of three numbers, (a), (b) and (c), got [1200, 69]"),
        ("14-2", [1, 32, 64], "A step of 2 takes the graph for 32, so that 30 rows are padding"),
        ("14-2", [2, 6, 14, 30, 62], "A step of 64 requests fits into no graph"),
        ("14-2", [1, 2, 4, 8, 16, 32, 64], "No step is too much padding, but 6 graphs would do"),
        ("14-2", [0, 2, 6, 14, 30, 62, 64], "A graph is captured for at least 1 request, got [0, 2"),
        ("14-2", [2.5, 64], "Expected whole numbers, got [2.5, 64]"),
        ("15-1", [143, 144], "a page of 16 is freed as a whole"),
        ("15-1", [128, 128], "The window of 50 counts the query's own key: 193 sees back to 144"),
        ("15-1", [144, 144], "You rounded up: the query at 192 still sees keys of the page"),
        ("15-1", [150, 150], "both are multiples of 16"),
        ("15-1", [112, 128], "Which is the first key that each query sees"),
        ("15-1", [144], "a list of two positions, one for each query, got [144]"),
        (
            "15-2",
            47,
            "Keys before 40 are gone. Where no draft is kept, the next token stands at 40 and sees back to 33",
        ),
        ("15-2", 43, "Keys before 36 are gone"),
        ("15-2", 31, "keys from 24 on are kept, and no query from position 40 on sees those before 33"),
    ],
)
def test_a_typical_mistake_gets_a_hint(number: str, answer: object, hint: str) -> None:
    assert hint in said(number, answer)


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("00-1", torch.tensor(1024)),
        ("01-1", torch.tensor([12, 13, 14, 15, 20, 21])),
        ("01-1", torch.tensor([12, 13, 14, 15, 20, 21]).numpy()),
        ("01-2", torch.tensor([320])),
        ("02-1", torch.tensor([2, 31])),
        ("02-1", [torch.tensor(2), torch.tensor(31)]),
        ("03-1", torch.tensor(0.75)),
        ("04-1", torch.tensor(5)),
        ("05-1", torch.tensor(68)),
        ("05-2", torch.tensor([4096])),
        ("06-1", torch.tensor([1024, 264])),
        ("07-1", torch.tensor([18, 15])),
        ("07-2", torch.tensor(128)),
        ("08-1", torch.tensor([85, 85, 104])),
        ("08-2", torch.tensor([-1, 0, 1, 1, 0])),
        ("09-1", torch.tensor([0.25, 0.125, 64512])),
        ("12-1", torch.tensor([103, 104, 54])),
        ("12-2", torch.tensor([0, 2, 6, 9, 12, 3, 7, 10, 1, 4, 5, 8, 11])),
        ("13-1", torch.tensor([1152, 4, 171])),
        ("13-2", torch.tensor(8192)),
        ("14-1", torch.tensor([1200, 69, 9])),
        ("14-2", torch.tensor([64, 2, 6, 14, 30, 62])),
        ("14-2", [1, 4, 10, 22, 46, 64]),
        ("15-1", torch.tensor([128, 144])),
        ("15-2", torch.tensor(42)),
    ],
)
def test_a_tensor_is_as_good_as_the_number_or_list_that_it_holds(number: str, answer: object) -> None:
    assert said(number, answer) == f"{number}: yes, that is right."


# Policies of the reader's own


def in_ranges_of(size: Callable[[float], float], kv_heads: int | None = None) -> Callable[..., Any]:
    """Return a rule whose ranges are as long as `size` says of the even share."""

    def rule(lens: list[int], ctx: Any) -> list[list[tuple[int, int]]]:
        even = sum(lens) * (ctx.kv_heads if kv_heads is None else kv_heads) / ctx.multiprocessors
        step = math.ceil(size(even))
        return [[(at, min(at + step, n)) for at in range(0, n, step)] for n in lens]

    return rule


QUARTERS: dict[str, tuple[Callable[..., Any], str]] = {
    "right": (in_ranges_of(lambda even: max(32, even / 4)), "yes"),
    "one even share": (in_ranges_of(lambda even: max(32, even)), "1.35 even shares of 11,854. It is at most"),
    "KV heads forgotten": (in_ranges_of(lambda even: max(32, even / 4), kv_heads=1), "525 ranges, and 67 should do"),
    "KV heads of the lesson": (in_ranges_of(lambda even: max(32, even / 4), kv_heads=8), "4 KV heads and 132"),
    "no shortest range": (in_ranges_of(lambda even: max(1, even / 4)), "its request's last holds 13 keys; at least 32"),
    "not cut": (lambda lens, ctx: [[(0, n)] for n in lens], "16.50 even shares of 1,939. It is at most"),
    "half forgotten": (lambda lens, ctx: [[(0, n // 2)] for n in lens], "keys 16000 to 31999 are in no range"),
}


@pytest.mark.parametrize("mistake", QUARTERS)
def test_a_policy_that_finishes_near_an_even_share(mistake: str) -> None:
    rule, hint = QUARTERS[mistake]
    policy = HostPolicy(name="quarter", rule=rule, max_ranges=5000)
    assert hint in said("05-3", policy)


# Score modifiers


@jit
def far_loses(scores, q_pos, kv_pos, q_index, head, valid, aux_ptr, aux_stride_token, aux_stride_head, aux_width):
    return scores - tl.log(1.0 + (q_pos - kv_pos).to(tl.float32))


@jit
def nothing_done(scores, q_pos, kv_pos, q_index, head, valid, aux_ptr, aux_stride_token, aux_stride_head, aux_width):
    return scores


@jit
def misspelt(scores, q_pos, kv_pos, q_index, head, valid, aux_ptr, aux_stride_token, aux_stride_head, aux_width):
    return scores - tl.logg(1.0 + (q_pos - kv_pos).to(tl.float32))


def log_distance(scores: Tensor, q_pos: Tensor, kv_pos: Tensor, *_: Any) -> Tensor:
    return scores - torch.log1p((q_pos - kv_pos).float())


MODIFIERS: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "right": (log_distance, far_loses, "yes"),
    "torch alone": (log_distance, nothing_done, "Triton, with a query at 39 and 40 keys: the score 1.72 of key 0"),
    "does not compile": (log_distance, misspelt, "Triton, with a query at 39 and 40 keys: it raised AttributeError: "),
    "no kernel": (log_distance, 7, "it raised TypeError: 'int' object is not callable."),
    "nothing done": (lambda s, *_: s, far_loses, "torch, with a query at 39 and 40 keys: the score -1.13 of key 0"),
    "added": (lambda s, q, k, *_: s + torch.log1p((q - k).float()), far_loses, "subtract the logarithm, do not add it"),
    "base 2": (lambda s, q, k, *_: s - torch.log2(1.0 + (q - k)), far_loses, "the logarithm to base 2"),
    "linear": (lambda s, q, k, *_: s - (q - k), far_loses, "a penalty by distance itself, as ALiBi's"),
    "position": (lambda s, q, k, *_: s - torch.log1p(k.float()), far_loses, "by the key's position"),
    "no 1": (lambda s, q, k, *_: s - torch.log((q - k).float()), far_loses, "the result holds inf or nan"),
    "shape": (lambda s, *_: s[0], far_loses, "expected scores of shape [1, 8, 40], got [8, 40]"),
    "in place": (lambda s, q, k, *_: s.sub_(torch.log1p((q - k).float())), far_loses, "it changes what it is given"),
}


@pytest.mark.parametrize("mistake", MODIFIERS)
def test_a_modifier_of_the_readers_own(mistake: str) -> None:
    meaning, kernel, hint = MODIFIERS[mistake]
    assert hint in said("09-3", ScoreMod(name="kerple", torch=meaning, triton=kernel, needs_aux=False))


# Latent attention


def attend_latent(
    q_nope: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    *,
    hidden: int | None = 1,
    from_first: bool = False,
    rope: float = 1.0,
    wide: bool = False,
    up: bool = True,
) -> Tensor:
    """The absorbed form; `hidden`: the first key that is hidden, counted from a query's own."""
    queries, keys, latent = q_nope.shape[0], rows.shape[0], w_uk.shape[2]
    q = torch.cat([torch.einsum("qhd,hdl->qhl", q_nope, w_uk), q_rope * rope], -1)
    scores = torch.einsum("qhd,kd->qhk", q, rows) * (rows.shape[1] ** -0.5 if wide else scale)
    if hidden is not None:
        own = torch.arange(queries) + (0 if from_first else keys - queries)
        scores = scores.masked_fill((torch.arange(keys) >= own[:, None] + hidden)[:, None], -math.inf)
    out = torch.einsum("qhk,kl->qhl", torch.softmax(scores, -1), rows[:, :latent])
    return torch.einsum("qhl,hdl->qhd", out, w_uv) if up else out


LATENT: dict[str, tuple[dict[str, Any], str]] = {
    "right": ({}, "yes"),
    "all keys": ({"hidden": None}, "With 3 queries, 9 keys and 4 heads: off by"),
    "keys that come later": ({"hidden": None}, "Every query sees all keys, also of tokens that come after its own"),
    "counted from the first key": (
        {"from_first": True},
        "query i of n stands at keys - n + i, and sees keys up to that one",
    ),
    "own key hidden": ({"hidden": 0}, "A query sees its own key as well"),
    "scale of rows": ({"wide": True}, "That is the scale of rows. Use the one that is given"),
    "no position": ({"rope": 0.0}, "The scores leave out the columns with the position"),
    "latents": ({"up": False}, "these are latents"),
}


@pytest.mark.parametrize("mistake", LATENT)
def test_latent_attention(mistake: str) -> None:
    changes, hint = LATENT[mistake]
    assert hint in said("13-3", lambda *args: attend_latent(*args, **changes))


def test_latent_attention_without_a_scale() -> None:
    assert "The scale is left out" in said("13-3", lambda *args: attend_latent(*args[:-1], 1.0))


# Attention with grouped heads


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, in_turn: bool = False, softmax_dim: int = -1) -> Tensor:
    group = q.shape[0] // k.shape[1]
    k, v = (x.repeat(1, group, 1) if in_turn else x.repeat_interleave(group, 1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,khd->hk", q, k) * scale, softmax_dim)
    return torch.einsum("hk,khd->hd", weights, v)


GROUPED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "right": (attend, "yes"),
    "heads in turn": (lambda *args: attend(*args, in_turn=True), "i // 4, as repeat_interleave makes it"),
    "no scale": (lambda q, k, v, scale: attend(q, k, v, 1.0), "without the scale"),
    "a scale of its own": (lambda q, k, v, scale: attend(q, k, v, 64**-0.5), "Use the scale that is given"),
    "softmax over heads": (lambda *args: attend(*args, softmax_dim=0), "Over what does the softmax go?"),
    "heads upside down": (lambda q, k, v, scale: attend(q, k.flip(1), v.flip(1), scale), "Which KV head does each"),
}


@pytest.mark.parametrize("mistake", GROUPED)
def test_grouped_attention(mistake: str) -> None:
    answer, hint = GROUPED[mistake]
    assert hint in said("00-3", answer)


# The index


def test_two_requests_the_other_way_round() -> None:
    bench = toy()
    slots = torch.cat([bench.table.slots_of(row).long() for row in (bench.table.rows[0], bench.table.rows[2])])
    answer = KVIndex(indptr=torch.tensor([0, 5, 205], dtype=torch.int32), slots=slots, space="pool")
    assert "the other way round" in said("02-2", answer)


def test_the_rows_of_the_table_are_not_those_of_the_batch() -> None:
    def gather(table: Tensor, rows: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        return indptr, torch.cat([table[i, :n] for i, n in enumerate(lens.tolist())])

    assert "request i is in row rows[i]" in said("02-3", gather)


# Merging


def merge_to(top_of_nothing: float) -> Callable[[Any, Any], Any]:
    def merge(a: Any, b: Any) -> Any:
        top = torch.maximum(a[0], b[0])
        top = torch.where(top == -torch.inf, top_of_nothing, top)
        fade_a, fade_b = torch.exp(a[0] - top), torch.exp(b[0] - top)
        return top, a[1] * fade_a + b[1] * fade_b, a[2] * fade_a + b[2] * fade_b

    return merge


def test_nothing_merged_with_nothing() -> None:
    assert "Nothing on both sides: sum is nan" in said("03-2", merge_to(-torch.inf))
    assert "max should be -inf, got 0.0. Subtract another number" in said("03-2", merge_to(0.0))


def blockwise(
    *, fade_sum: bool = True, fade_acc: bool = True, whole: bool = False, divide: bool = True
) -> Callable[[Tensor, Tensor, int], Tensor]:
    def attend_in_blocks(scores: Tensor, values: Tensor, block: int) -> Tensor:
        top, total, acc = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(values.shape[1])
        for start in range(0, len(scores) // block * block if whole else len(scores), block):
            s, v = scores[start : start + block], values[start : start + block]
            higher = torch.maximum(top, s.max())
            fade, p = torch.exp(top - higher), torch.exp(s - higher)
            top, total, acc = higher, total * (fade if fade_sum else 1), acc * (fade if fade_acc else 1)
            total, acc = total + p.sum(), acc + p @ v
        return acc / total if divide else acc

    return attend_in_blocks


def two_passes(scores: Tensor, values: Tensor, block: int) -> Tensor:
    top = scores.max()
    parts = [(torch.exp(s - top), v) for s, v in zip(scores.split(block), values.split(block), strict=True)]
    return sum(p @ v for p, v in parts) / sum(p.sum() for p, _ in parts)


def without_maximum(scores: Tensor, values: Tensor, block: int) -> Tensor:
    parts = [(torch.exp(s), v) for s, v in zip(scores.split(block), values.split(block), strict=True)]
    return sum(p @ v for p, v in parts) / sum(p.sum() for p, _ in parts)


BLOCKWISE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "right": (blockwise(), "yes"),
    "sum not brought along": (blockwise(fade_sum=False), "The sum is not brought to the new maximum"),
    "acc not brought along": (blockwise(fade_acc=False), "acc is not brought to the new maximum"),
    "neither brought along": (blockwise(fade_sum=False, fade_acc=False), "Neither acc nor the sum is brought"),
    "last block left out": (blockwise(whole=True), "The last block is left out: it holds 1 of the keys"),
    "not divided": (blockwise(divide=False), "The result is acc / sum"),
    "no maximum": (without_maximum, "inf or nan. Is the maximum subtracted"),
    "all at once": (lambda scores, values, block: scores.softmax(0) @ values, "softmax was given all 5 keys at once"),
    "all at once, by function": (lambda s, v, block: torch.softmax(s, 0) @ v, "softmax was given all 5 keys at once"),
    "two passes": (two_passes, "max was given all 5 keys at once"),
}


@pytest.mark.parametrize("mistake", BLOCKWISE)
def test_attention_in_blocks(mistake: str) -> None:
    answer, hint = BLOCKWISE[mistake]
    assert hint in said("03-3", answer)


# A policy


def of_ceiling(n: int) -> list[tuple[int, int]]:
    """Equal ranges, rounded up: what is missing is missing from the last."""
    count = -(-n // 96)
    size = -(-n // count) if count else 0
    return [(i * size, min(n, (i + 1) * size)) for i in range(count)]


def even(n: int) -> list[tuple[int, int]]:
    count = -(-n // 96)
    return [(n * i // count, n * (i + 1) // count) for i in range(count)]


POLICIES: dict[str, tuple[Callable[[int], Any], int, str]] = {
    "right": (even, 64, "yes"),
    "the last is shorter": (of_ceiling, 64, "22 ranges of 74 to 94 keys; the largest and smallest may differ by one."),
    "too many": (lambda n: [(i, i + 1) for i in range(n)], 4096, "the one of 96 is cut into 96 ranges; 1 would do"),
    "promises too little": (even, 4, "it raised ValueError: policy 'mine': request 5 has 11 ranges"),
    "raises": (
        lambda n: [(0, n // n)],
        64,
        "of 0, 1, 96, 97, 200, 1,000, 2,048, 96 and 700 keys: it raised ZeroDivision",
    ),
}


@pytest.mark.parametrize("mistake", POLICIES)
def test_an_even_policy(mistake: str) -> None:
    rule, most, hint = POLICIES[mistake]

    @split_policy("mine", needs_host_lens=True, max_ranges=most)
    def mine(lens: Any, ctx: Any) -> Any:
        return [rule(n) for n in lens]

    assert hint in said("04-3", "mine")


# Cuts at fixed places


def doubled(*, strict: bool = True, last: Callable[[int, int], int] = min, sizes: bool = False) -> Callable[..., Any]:
    """Return a rule whose cuts, or sizes, are 64 and then doubled."""

    def rule(n: int) -> list[tuple[int, int]]:
        places = [0, *(64 * (2 ** (i + 1) - 1 if sizes else 2**i) for i in range(20))]
        pairs = zip(places, places[1:], strict=False)
        return [(a, last(b, n)) for a, b in pairs if (a < n if strict else a <= n)]

    return rule


DOUBLINGS: dict[str, tuple[Callable[..., Any], str]] = {
    "right": (lambda lens, ctx: map(doubled(), lens), "yes"),
    "not cut": (lambda lens, ctx: [[(0, n)] if n else [] for n in lens], "300 keys: expected (0, 64), (64, 128)"),
    "sizes": (lambda lens, ctx: map(doubled(sizes=True), lens), "The places of the cuts are doubled, not the sizes"),
    "an empty one": (lambda lens, ctx: map(doubled(strict=False), lens), "With 128 keys: it raised"),
    "behind the end": (lambda lens, ctx: [[(0, 64), (64, 128), (128, 256), (256, 512)]] * len(lens), "it raised"),
    "of the longest": (lambda lens, ctx: [doubled()(max(lens))[: len(doubled()(n))] for n in lens], "it raised"),
}


@pytest.mark.parametrize("mistake", DOUBLINGS)
def test_a_policy_whose_cuts_are_doubled(mistake: str) -> None:
    rule, hint = DOUBLINGS[mistake]
    policy = HostPolicy(name="doubling", rule=lambda lens, ctx: list(rule(lens, ctx)), max_ranges=32)
    verdict = said("10-3", policy)
    assert hint in verdict and (": yes" in verdict) == (mistake == "right"), verdict


def test_cuts_at_fixed_places_of_any_length_that_fits() -> None:
    for tile in (250, 256, 300):
        assert check_exercise("10-2", Tile(tile=tile)).right
    assert check_exercise("10-2", HostPolicy(name="mine", rule=fixed_cuts, max_ranges=8)).right


def test_fixed_places_that_are_others_in_a_crowd() -> None:
    policy = HostPolicy(name="mine", rule=lambda lens, ctx: fixed_cuts(lens, ctx, first=100 + len(lens)), max_ranges=8)
    assert "this policy looks at the neighbours" in said("10-2", policy)


def fixed_cuts(lens: list[int], ctx: Any, *, first: int = 100) -> list[list[tuple[int, int]]]:
    places = [0, first, *range(400, 2201, 300)]
    return [[(a, min(b, n)) for a, b in zip(places, places[1:], strict=False) if a < n] for n in lens]


# Rows in fp8


def attended(
    *,
    of_scores: float = 1,
    of_k: float = 1,
    of_v: float = 1,
    later: float = 0,
    swapped: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[..., Tensor]:
    """Return an attention over stored rows whose scales go to these powers."""

    def attend_fp8(q: Tensor, k: Tensor, v: Tensor, scale: float, k_scale: float, v_scale: float) -> Tensor:
        k_scale, v_scale = (v_scale, k_scale) if swapped else (k_scale, v_scale)
        scores = (q @ k.float().T * (scale**of_scores * k_scale**of_k)).to(dtype)
        return (torch.softmax(scores, -1) @ v.to(dtype)).float() * v_scale**of_v * k_scale**later

    return attend_fp8


IN_FP8: dict[str, tuple[Callable[..., Any], str]] = {
    "right": (attended(), "yes"),
    "rows scaled one by one": (
        lambda q, k, v, s, ks, vs: torch.softmax(q @ (k.float() * ks).T * s, -1) @ (v.float() * vs),
        "yes",
    ),
    "no v_scale": (attended(of_v=0), "v_scale is missing"),
    "no k_scale": (attended(of_k=0), "k_scale is missing"),
    "none": (attended(of_k=0, of_v=0), "Neither k_scale nor v_scale is applied"),
    "exchanged": (attended(swapped=True), "The scales are exchanged"),
    "divided": (attended(of_k=-1, of_v=-1), "so the way back multiplies"),
    "instead": (attended(of_scores=0), "k_scale comes on top of the layer's own scale"),
    "twice": (attended(of_v=2), "v_scale is applied twice"),
    "k_scale too late": (attended(of_k=0, later=1), "k_scale belongs to the scores: multiply before the softmax"),
    "narrow": (attended(dtype=torch.bfloat16), "off by"),
    "not lifted": (lambda q, k, v, s, ks, vs: q @ k.T, "lift k and v with .float() first"),
    "values not lifted": (
        lambda q, k, v, s, ks, vs: torch.softmax(q @ k.float().T * s * ks, -1) @ v,
        "lift k and v with .float() first",
    ),
    "raises": (lambda q, *rest: q @ q[:0], "it raised RuntimeError"),
    "keys": (lambda q, k, v, s, ks, vs: k.float(), "expected shape [1, 8], got [3, 8]"),
}


@pytest.mark.parametrize("mistake", IN_FP8)
def test_a_decode_over_stored_rows(mistake: str) -> None:
    answer, hint = IN_FP8[mistake]
    assert hint in said("11-3", answer)


def test_scales_have_room() -> None:
    for scales in ((8.0, 2e-6), (8.2, 2.1e-6), (64.0, 1e-5), [128, 1e-5], torch.tensor([16.0, 2**-17])):
        assert check_exercise("11-2", scales).right, scales


# The list of a window


def listed(
    *, back: int = 1, floor: int = 0, both: Callable[..., int] = max, own: int = 1, chunked: bool = True, row: int = 0
) -> Callable[..., Any]:
    """A list that begins so many keys behind where the window ends, and ends so many behind the query."""

    def visible(slots: list[int], position: int, window: int | None, chunk: int | None) -> Any:
        firsts = [] if window is None else [max(floor, position - window + back)]
        firsts += [position // chunk * chunk] if chunk is not None and chunked else []
        start = both([*firsts, 0] if len(firsts) < 1 else firsts)
        return start, slots[start + row : position + own + row]

    return visible


LISTS: dict[str, tuple[Callable[..., Any], str]] = {
    "right": (listed(), "yes"),
    "a radius": (
        listed(back=0),
        "expected start 2, got 1. A window of 4 counts the query's own key: 3 come before it.",
    ),
    "a negative start": (listed(floor=-99), "A request shorter than its window begins at 0"),
    "the wider of two": (listed(both=min), "A key must be within both limits, so the later of the two beginnings"),
    "no chunk": (listed(chunked=False), "The chunk hides keys, too: it begins at a multiple of 8"),
    "without its own": (listed(own=0), "The query's own key is one of those that it sees"),
    "what comes behind": (listed(own=2), "What stands behind the query is not seen"),
    "the wrong slots": (listed(row=1), "The slot of position p is slots[p]"),
    "a chunk that moves along": (
        lambda slots, p, w, c: (start := max(0, p - min(w or 99, c or 99) + 1), slots[start : p + 1]),
        "That is a window of 8. A chunk begins at a multiple of 8",
    ),
    "no pair": (lambda slots, p, w, c: slots[max(0, p - 3) : p + 1], "expected 2 things, (start, slots), got"),
    "the pair turned round": (lambda slots, p, w, c: ([slots[p]], p), "start should be one position, got [5]"),
}


@pytest.mark.parametrize("mistake", LISTS)
def test_the_list_of_a_window(mistake: str) -> None:
    answer, hint = LISTS[mistake]
    assert hint in said("08-3", answer)


# The judge of drafts


def judge(
    *, root: bool = True, by_parent: bool = True, by_word: bool = True, steps: int = 99, of: int = 0
) -> Callable[..., Any]:
    """A walk down the tree; `of` 1 asks the child, and not its parent, what the target has chosen."""

    def accepted(parents: list[int], tokens: list[str], chosen: list[str]) -> list[int]:
        path = [0]
        for draft in range(1, len(parents)):
            asks = draft if of else path[-1]
            follows = parents[draft] == path[-1] or not by_parent
            if follows and (tokens[draft] == chosen[asks] or not by_word) and len(path) <= steps:
                path.append(draft)
        return path if root else path[1:]

    return accepted


JUDGES: dict[str, tuple[Callable[..., Any], str]] = {
    "right": (judge(), "yes"),
    "a tensor": (lambda *tree: torch.tensor(judge()(*tree)), "yes"),
    "without the root": (judge(root=False), "expected [0, 2], got [2]. The path begins with the root"),
    "another branch": (judge(by_parent=False), "got [0, 2, 5]. Draft 5 does not follow draft 2, but 3"),
    "any child": (judge(by_word=False), "After draft 0 the target chooses 'c', and draft 1 says 'b'"),
    "one step": (judge(steps=1), "After draft 1 the target chooses 'c'; draft 2 follows it and says that"),
    "asks the child": (
        judge(of=1),
        "expected [0, 2], got [0]. After draft 0 the target chooses 'c'; draft 2 follows it and",
    ),
    "one number": (lambda *tree: 0, "expected a list of drafts, got 0"),
    "no numbers": (lambda *tree: [0.5], "Expected whole numbers, got [0.5]"),
    "no draft": (lambda *tree: [0, 99], "There is no draft 99"),
    "too long": (lambda *tree: [*judge()(*tree), 0], "Draft 0 does not follow draft 2, but -1: it is on another path"),
}


@pytest.mark.parametrize("mistake", JUDGES)
def test_a_judge_of_drafts(mistake: str) -> None:
    answer, hint = JUDGES[mistake]
    assert hint in said("12-3", answer)


# A graph's memory


def filler(
    *, rows: bool = True, lens: bool = True, offsets: str = "all", shift: int = 0, bound: bool = False
) -> Callable[..., Any]:
    """Fill a graph's memory; `bound` binds the names instead, `offsets` says which are set."""

    def refill(r: Tensor, n: Tensor, indptr: Tensor, slots: Tensor, step: list[Any]) -> Any:
        live = len(step)
        counts = torch.tensor([len(mine) for _, mine in step] + [0] * (4 - live))
        if bound:
            r, n, indptr = torch.zeros(4), counts, counts.cumsum(0)
            return None
        r[:live], n[:live] = torch.tensor([row for row, _ in step], dtype=torch.int64), counts[:live]
        r[live:], n[live:] = r[live:] * (not rows), n[live:] * (not lens)
        ends = counts.cumsum(0)
        indptr[1 : {"all": 5, "live": live + 1}.get(offsets, 1)] = ends[: {"all": 4, "live": live}.get(offsets, 0)]
        if offsets == "zero":
            indptr[1 : live + 1], indptr[live + 1 :] = ends[:live], 0
        listed = torch.tensor([slot for _, mine in step for slot in mine], dtype=torch.int64)
        slots[shift : shift + len(listed)] = listed
        return None

    return refill


FILLERS: dict[str, tuple[Callable[..., Any], str]] = {
    "right": (filler(), "yes"),
    "rows stay": (filler(rows=False), "Step 1, of 2 requests: rows is ["),
    "lengths stay": (filler(lens=False), "those of the padded rows are left over from an earlier step, and are read"),
    "offsets stay": (filler(offsets="live"), "the lists of padded rows are not empty, so the rest must be"),
    "offsets of zero": (filler(offsets="zero"), "the lists of padded rows are not empty, so the rest must be"),
    "no offsets": (filler(offsets="none"), "Step 0, of 4 requests: expected indptr to begin with [0, "),
    "slots elsewhere": (filler(shift=1), "Step 0, of 4 requests: expected slots to begin with ["),
    "names bound": (
        filler(bound=True),
        "The memory is as before. Fill the tensors that you are given: `rows[:]",
    ),
    "returned": (lambda *memory: 7, "expected the tensors to be filled in place and nothing to be returned, got 7"),
    "raises": (lambda *memory: memory[9], "Step 0, of 4 requests: it raised IndexError"),
}


@pytest.mark.parametrize("mistake", FILLERS)
def test_a_graphs_memory(mistake: str) -> None:
    answer, hint = FILLERS[mistake]
    assert hint in said("14-3", answer)


# Translation


def through(stored: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    return lambda ids, pages, size: stored(pages[ids // size]) * size + ids % size


TRANSLATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "right": (
        lambda ids, pages, size: torch.where(pages[ids // size] < 0, 0, pages[ids // size] * size + ids % size),
        "yes",
    ),
    "-1 is no page": (through(lambda page: page), "slot 8 became -4, expected 0. Its page 2 has -1 behind it"),
    "the places of page 0": (
        through(lambda page: page.clamp(min=0)),
        "slot 9 became 1, expected 0. All slots of a page without one behind it become 0: one slot",
    ),
    "only the page": (
        lambda ids, pages, size: pages[ids // size].clamp(min=0) * size,
        "slot 1 became 0, expected 1. It is in page 0, behind which stands page 0; at which place in it?",
    ),
    "a list for a matrix": (
        lambda ids, pages, size: torch.where(
            pages[ids // size] < 0, 0, pages[ids // size] * size + ids % size
        ).flatten(),
        "expected shape [3, 4], as ids has, got [12]",
    ),
    "one slot at a time": (
        lambda ids, pages, size: int(pages[ids // size]),
        "of shape [32], pages [0, 3, -1, 1, 2, -1, 5, 4] and page size 4: it raised ValueError",
    ),
}


@pytest.mark.parametrize("mistake", TRANSLATIONS)
def test_a_translation(mistake: str) -> None:
    answer, hint = TRANSLATIONS[mistake]
    assert hint in said("15-3", answer)


# The tiles of an extend


def visits(
    tile: int,
    cached: int,
    new: int,
    window: int | None,
    block_m: int,
    block_n: int,
    *,
    by_borders: bool = False,
    rounded: bool = True,
    clipped: bool = True,
    of_new: bool = True,
    back: int = 1,
) -> tuple[int, int, int, int]:
    query = cached + tile * block_m
    start = 0 if window is None else max(0, cached - window + 1)
    seen = 0 if window is None else max(0, query - window + back)
    listed, step = cached - start, block_n if rounded else 1
    first = max(0, seen - start) // step * step if seen < cached or by_borders else listed
    last = (tile + 1) * block_m
    return first, listed, max(0, seen - cached) // step * step if of_new else 0, min(new, last) if clipped else last


VISITS: dict[str, tuple[dict[str, Any], str]] = {
    "right": ({}, "yes"),
    "as the kernel does": ({"by_borders": True}, "It should visit nothing of the list: no query of the tile sees any"),
    "not rounded": ({"rounded": False}, "Tiles begin at multiples of 128: round down to one"),
    "beyond the end": ({"clipped": False}, "There are 5: behind them is nothing to read"),
    "new ones from the first": ({"of_new": False}, "sees back to 47 there; in which tile is that?"),
    "a window one key short": ({"back": 2}, "sees back to 48 there; in which tile is that?"),
}


@pytest.mark.parametrize("mistake", VISITS)
def test_the_tiles_of_an_extend(mistake: str) -> None:
    how, hint = VISITS[mistake]
    assert hint in said("07-3", lambda *args: visits(*args, **how))


def test_all_new_keys_are_too_many() -> None:
    def all_new(tile: int, cached: int, new: int, *rest: Any) -> tuple[int, ...]:
        return (*visits(tile, cached, new, *rest)[:3], new)

    assert "Where does the last query of the tile stand?" in said("07-3", all_new)
    assert "There is no entry -6 of the list: the first is 0" in said("07-3", lambda *args: (-6, *visits(*args)[1:]))
    assert "Of the list it should visit 0 to 6. Where does the last query" in said(
        "07-3", lambda *args: (0, 0, *visits(*args)[2:])
    )


# A merge in Triton


@jit
def merge(
    indptr_ptr: Any,
    max_ptr: Any,
    sum_ptr: Any,
    acc_ptr: Any,
    out_ptr: Any,
    fade_acc: Any,
    fade_sum: Any,
    safe: Any,
    divide: Any,
    more: Any,
) -> None:
    row, dims = tl.program_id(0), tl.arange(0, 16)
    top, total, acc = float("-inf"), 0.0, tl.zeros([16], tl.float32)
    for partial in range(tl.load(indptr_ptr + row), tl.load(indptr_ptr + row + 1) + more):
        own = tl.load(max_ptr + partial)
        higher = tl.maximum(top, own)
        shift = finite_or_zero(higher) if safe else higher
        fade, weight = tl.exp(top - shift), tl.exp(own - shift)
        total = total * fade + tl.load(sum_ptr + partial) * weight if fade_sum else total + tl.load(sum_ptr + partial)
        own_acc = tl.load(acc_ptr + partial * 16 + dims)
        acc = acc * fade + own_acc * weight if fade_acc else acc + own_acc
        top = higher
    total = tl.where(total == 0.0, 1.0, total) if safe else total
    tl.store(out_ptr + row * 16 + dims, acc / total if divide else acc)


MERGES: dict[str, tuple[dict[str, int], str]] = {
    "right": ({}, "yes"),
    "acc as it is": ({"fade_acc": 0}, "The sum is brought to the largest maximum, acc is not"),
    "sum as it is": ({"fade_sum": 0}, "acc is brought to the largest maximum, the sum is not"),
    "both as they are": ({"fade_acc": 0, "fade_sum": 0}, "Partials are measured from their own maxima"),
    "not divided": ({"divide": 0}, "That is acc: divide by the sum"),
    "nothing": ({"safe": 0}, "It has no partial: 0 divided by 0 is nan"),
    "one less": ({"more": -1}, "The last partial is left out"),
    "one more": ({"more": 1}, "off by up to"),
}


@pytest.mark.skipif(not INTERPRETED, reason="the mistakes are chosen while the kernel runs")
@pytest.mark.parametrize("mistake", MERGES)
def test_a_merge_in_triton(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how, hint = MERGES[mistake]
    chosen = {"fade_acc": 1, "fade_sum": 1, "safe": 1, "divide": 1, "more": 0, **how}

    class Chosen:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args: merge[grid](*args, *chosen.values())

    monkeypatch.setattr(lesson_06_decode_kernel, "is_jitted", lambda answer: True)
    assert hint in said("06-3", Chosen())


def test_a_function_that_leaves_nan_alone_changes_nothing() -> None:
    given = torch.tensor([float("nan"), 1.0])
    assert ask("x", lambda t: 1, given) == 1
    with pytest.raises(Wrong, match="it changes what it is given"):
        ask("x", lambda t: t.fill_(float("nan")) is not None, given)
