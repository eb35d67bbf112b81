"""Solutions to the exercises. What stands below `# %% 03-2` replaces the notebook's cell of that exercise.

The first part prepares what the notebooks have prepared by then, so that this file also runs by itself.
"""

import math

import torch
from einops import einsum, rearrange

import attnlab
from attnlab import Scores
from attnlab.kernels.core import finite_or_zero
from attnlab.mods import jit, tl
from attnlab.mods.registry import register_score_mod
from attnlab.plan.index import KVIndex
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import SplitContext
from attnlab.plan.splits import cut

attention = attnlab.AttentionSpec(heads=8, kv_heads=2, qk_dim=64, v_dim=64, scale=64**-0.5)
model = attnlab.ModelSpec.uniform(attention, layers=1, context_len=2048, page_size=4, kv_dtype=torch.float32)
wb = attnlab.workbench(model, lens=[5, 64, 200, 1], policy="seed", engine="eager")
ctx = SplitContext(heads=32, kv_heads=8, v_dim=128, mla=False, context_len=131072, multiprocessors=132)

# %% 00-1
# A key and a value, for each of 2 KV heads, of 64 numbers, of 4 bytes.
answer_00_1 = 2 * 2 * 64 * 4

# %% 00-2
# Tiles of 256 keys are longer than the longest request. Static(splits=1) would do as well.
answer_00_2 = attnlab.workbench(model, lens=[5, 64, 200, 1], policy="tile", engine="eager")


# %% 00-3
def attend(q, k, v, scale):
    """Return the output of every query head."""
    groups = rearrange(q, "(kv_heads group) dim -> kv_heads group dim", kv_heads=k.shape[1])
    scores = einsum(groups, k, "kv_heads group dim, keys kv_heads dim -> kv_heads group keys") * scale
    weights = torch.softmax(scores, dim=-1)
    out = einsum(weights, v, "kv_heads group keys, keys kv_heads dim -> kv_heads group dim")
    return rearrange(out, "kv_heads group dim -> (kv_heads group) dim")


# %% 01-1
# Page 3 came back and is the lowest free one; page 4 is a's, so page 5 is next.
answer_01_1 = [12, 13, 14, 15, 20, 21]

# %% 01-2
# The sink's page, and 1 + 4 + 13 + 1 pages for the requests.
answer_01_2 = 16 * 20


# %% 01-3
def slot_of(pages, page_size, position):
    """Return the slot of the token at a position."""
    return pages[position // page_size] * page_size + position % page_size


# %% 02-1
# Request 2 begins at entry 69 and ends before 269.
answer_02_1 = (2, 100 - 69)

# %% 02-2
full = wb.plan().lane(0).layout.index
slots = torch.cat([full.slots[69:269], full.slots[0:5]])
answer_02_2 = KVIndex(indptr=torch.tensor([0, 200, 205], dtype=torch.int32), slots=slots, space=full.space)


# %% 02-3
def gather(table, rows, lens):
    """Return (indptr, slots) of a batch."""
    indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    owner = torch.repeat_interleave(torch.arange(len(rows)), lens)
    position = torch.arange(int(indptr[-1])) - indptr[owner]
    return indptr.int(), table[rows[owner], position].long()


# %% 03-heads
# The question above the explorer, for layer 18 and 8 ranges.
# Most weight on the first range, where the attention sink is: heads 1, 3, 7 and 8 (77, 84, 94 and 100%).
# Most on the last, with the newest tokens: heads 0, 2, 5 and 6 (82, 63, 90 and 82%). Head 4 does both, half and half.
# In layer 0 no head has a sink: all weigh the newest range most.

# %% 03-1
# B is three times as loud as A: 3 of 4 parts. How many keys made it so does not matter.
answer_03_1 = 3 / 4


# %% 03-2
def merge_any(a, b):
    """Merge two states, each a (max, sum, acc); a part without keys has max -inf."""
    top = torch.maximum(a[0], b[0])
    base = torch.where(top == -math.inf, 0.0, top)  # a finite number to measure from
    fade_a, fade_b = torch.exp(a[0] - base), torch.exp(b[0] - base)
    return top, a[1] * fade_a + b[1] * fade_b, a[2] * fade_a + b[2] * fade_b


# %% 03-3
def attend_in_blocks(scores, values, block):
    """Return softmax(scores) @ values, reading `block` keys at a time."""
    top, total, acc = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(values.shape[1])
    for start in range(0, len(scores), block):
        s, v = scores[start : start + block], values[start : start + block]
        higher = torch.maximum(top, s.max())
        fade, p = torch.exp(top - higher), torch.exp(s - higher)
        top, total, acc = higher, total * fade + p.sum(), acc * fade + p @ v
    return acc / total


# %% 04-1
# 257 / 8 is a little over 32, rounded up to 64: four ranges of 64 and one of a single key.
answer_04_1 = 5

# %% 04-2
# 2,048 / 128 is 16. The shorter requests have shorter ranges already.
answer_04_2 = 16
ranges = cut(Static(splits=answer_04_2), [2048, 96, 700], ctx).to_host().ranges
for mine in ranges:
    print(f"{len(mine):2} ranges, the longest holds {max(end - start for start, end in mine)} keys")


# %% 04-3
@attnlab.split_policy("even", needs_host_lens=True, max_ranges=64)
def even(lens, ctx):
    """Ranges of at most 96 keys, equal up to one key."""
    counts = [-(-n // 96) for n in lens]
    return [[(n * i // c, n * (i + 1) // c) for i in range(c)] for n, c in zip(lens, counts, strict=True)]


attnlab.show(cut("even", [5, 64, 200, 1], ctx))

# %% 05-1
# 8 ranges, each for 8 KV heads, are 64 programs, and 132 - 64 multiprocessors have none.
answer_05_1 = 68

# %% 05-2
# A range of 4,096 keys is a quarter of the even share of 16,294. With 8,192 the finish is 1.25 even shares.
answer_05_2 = 4096


# %% 05-3
@attnlab.split_policy("quarter", needs_host_lens=True, max_ranges=1024)
def quarter(lens, ctx):
    """Finish within a quarter of an even share."""
    even = sum(lens) * ctx.kv_heads / ctx.multiprocessors
    size = max(32, math.ceil(even / 4))
    return [[(at, min(at + size, n)) for at in range(0, n, size)] for n in lens]


# %% 06-1
# Two tiles of 16 rows and 32 columns. A group has 24 / 4 = 6 heads, and the range 44 keys.
answer_06_1 = [16 * 64, 6 * 44]


# %% 06-2
def head_of(kv_head, tile, row, group):
    """Return the query head in a row of a KV head's tile, or -1 where the row is idle."""
    member = tile * 16 + row
    return kv_head * group + member if member < group else -1


# %% 06-3
@jit
def merge(indptr_ptr, max_ptr, sum_ptr, acc_ptr, out_ptr):
    """Merge the partials of row `tl.program_id(0)`, and store its output."""
    row, dims = tl.program_id(0), tl.arange(0, 16)
    top, total, acc = float("-inf"), 0.0, tl.zeros([16], tl.float32)
    for partial in range(tl.load(indptr_ptr + row), tl.load(indptr_ptr + row + 1)):
        own_top = tl.load(max_ptr + partial)
        new_top = tl.maximum(top, own_top)
        shift = finite_or_zero(new_top)
        fade, weight = tl.exp(top - shift), tl.exp(own_top - shift)
        total = total * fade + tl.load(sum_ptr + partial) * weight
        acc = acc * fade + tl.load(acc_ptr + partial * 16 + dims) * weight
        top = new_top
    tl.store(out_ptr + row * 16 + dims, acc / tl.where(total == 0.0, 1.0, total))


# %% 07-1
# Each of 4 tiles of queries visits 3 tiles of cached keys, and 1, 1, 2 and 2 of new ones: 12 + 6. In one list they read
# up to key 364, 428, 492 and 500: 3 + 4 + 4 + 4.
answer_07_1 = [18, 15]

# %% 07-2
# With 64, every tile of queries is full as well, but every second chunk cuts a tile of cached keys in two.
answer_07_2 = 128


# %% 07-3
def visits(tile, cached, new, window, block_m, block_n):
    """Return (first, last) of the list's entries, then (first, last) of the new keys."""
    query = cached + tile * block_m  # the first of the tile
    start, seen = (0 if window is None else max(0, at - window + 1) for at in (cached, query))
    listed = cached - start
    first = (seen - start) // block_n * block_n if seen < cached else listed  # or else nothing of the list is seen
    return first, listed, max(0, seen - cached) // block_n * block_n, min(new, (tile + 1) * block_m)


# %% 08-1
# The new token stands at 100, and 15 keys before it are in its window: 85. An extend's list begins where its first
# query looks back to, which stands at 100 as well. The last of 20 stands at 119.
answer_08_1 = [85, 85, 104]

# %% 08-2
# A draft of depth d stands at 8 + d and sees back to 5 + d, so that depth 2 is the last that still sees key 7.
answer_08_2 = [-1, 0, 0, 1, 1]


# %% 08-3
def visible(slots, position, window, chunk):
    """Return (start, slots) of the keys that a query at this position sees."""
    start = 0
    if window is not None:
        start = max(start, position - window + 1)
    if chunk is not None:
        start = max(start, position // chunk * chunk)
    return start, slots[start : position + 1]


# %% 09-1
# The sink counts three times as much as all keys, which keep a quarter; one of them has half of that. 1,000 keys are 63
# pages, the last of 8 keys: 8 queries, 32 heads, 63 numbers of 4 bytes.
answer_09_1 = [1 / 4, 1 / 8, 8 * 32 * 63 * 4]

# %% 09-2
# Two stages of one head instead of five of nine. 32 rows of nearly 2,048 keys, twice, are 520,000 bytes; the outputs,
# which a recording keeps as well, are another 74,000.
answer_09_2 = Scores(stages=("masked", "weights"), heads=(6,), pool="key")


# %% 09-3
@jit
def kerple_triton(scores, q_pos, kv_pos, q_index, head, valid, aux_ptr, aux_stride_token, aux_stride_head, aux_width):
    """The same for kernels."""
    distance = tl.maximum(q_pos - kv_pos, 0)  # a tile has places beyond the last key, which come with numbers too
    return scores - tl.log(1.0 + distance.to(tl.float32))


def kerple(scores, q_pos, kv_pos, q_index, head, aux):
    """Return scores - ln(1 + distance)."""
    return scores - torch.log1p((q_pos - kv_pos).float())


register_score_mod(attnlab.ScoreMod(name="kerple", torch=kerple, triton=kerple_triton, needs_aux=False))

# %% 10-1
# From left to right 1 + 2**24 is rounded to 2**24, once more, and minus 2**24 is 0. In two ranges the first is 2**24
# again, but 1 - 2**24 has 24 digits and keeps its 1.
answer_10_1 = [0, 1]

# %% 10-2
# Tiles of 250 keys would do as well, up to 300.
answer_10_2 = Tile(tile=256)


# %% 10-3
@attnlab.split_policy("doubling", needs_host_lens=True, max_ranges=32)
def doubling(lens, ctx):
    """Ranges that end at 64, 128, 256, ..., and where the request does."""
    cuts = [0, *(64 * 2**i for i in range(31))]
    return [[(a, min(b, n)) for a, b in zip(cuts, cuts[1:], strict=False) if a < n] for n in lens]


attnlab.show(cut("doubling", [5, 64, 300, 2048], ctx))


# %% 11-1
# From 16 on the steps are 2, from 0.25 on 1/32. 1000 saturates, and 0.0005 is nearer to 0 than to 2**-9.
answer_11_1 = [18, 448, 0.3125, 0]

# %% 11-2
# With the largest number just below 448. Powers of two around these would do as well.
answer_11_2 = (8.0, 2e-6)


# %% 11-3
def attend_fp8(q, k, v, scale, k_scale, v_scale):
    """Return the output of every query head over the true rows."""
    scores = (q * (scale * k_scale)) @ k.float().T
    return torch.softmax(scores, dim=-1) @ v.float() * v_scale


# %% 12-1
# The path of draft 7 is 0, 2, 5, 7, so it stands 3 behind the root's 100, and sees 100 keys and 4 drafts. The window
# counts its own key: 103 - 50 + 1.
answer_12_1 = [103, 104, 54]

# %% 12-2
# The path first, then all others in their old order. Any order will do that keeps parents before children.
answer_12_2 = [0, 2, 6, 9, 12, 1, 3, 4, 5, 7, 8, 10, 11]


# %% 12-3
def accepted(parents, tokens, chosen):
    """Return the path that the target agrees with."""
    path = [0]
    for draft, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent == path[-1] and token == chosen[parent]:
            path.append(draft)
    return path


# %% 13-1
# 576 numbers of 2 bytes; 64 heads in tiles of 16. Absorbed, n queries multiply 1,088 n times for each key and head;
# expanded 320 n times, and 131,072 times before: 131,072 / 768 is 170.7.
answer_13_1 = [1152, 4, 171]

# %% 13-2
# 16 ranges are left of 131,072 tokens, with 128 programs for 132 multiprocessors.
answer_13_2 = 8192


# %% 13-3
def attend_latent(q_nope, q_rope, rows, w_uk, w_uv, scale):
    """Return the output of every query and head."""
    queries, keys, latent = q_nope.shape[0], rows.shape[0], w_uk.shape[2]
    absorbed = einsum(q_nope, w_uk, "queries heads dim, heads dim latent -> queries heads latent")
    q = torch.cat([absorbed, q_rope], -1)
    scores = einsum(q, rows, "queries heads dim, keys dim -> queries heads keys") * scale
    position = torch.arange(keys - queries, keys)
    behind = torch.arange(keys) > position[:, None]
    weights = torch.softmax(scores.masked_fill(behind[:, None], -math.inf), -1)
    latents = einsum(weights, rows[:, :latent], "queries heads keys, keys latent -> queries heads latent")
    return einsum(latents, w_uv, "queries heads latent, heads dim latent -> queries heads dim")


# %% 14-1
# Four requests have 3 rows of 97 + 3 entries each. The one has 3 rows of 20 + 3, and 3 of the 4 x 3 rows of an input.
answer_14_1 = [1200, 69, 9]

# %% 14-2
# A step of 1 may have one padded row. Behind a graph for s comes a step of s + 1, which may take one for 2 s + 2.
answer_14_2 = [2, 6, 14, 30, 62, 64]


# %% 14-3
def refill(rows, lens, indptr, slots, step):
    """Fill the memory in place, and padded rows with what stands for nothing."""
    live, listed = len(step), [slot for _, mine in step for slot in mine]
    for memory, numbers in ((rows, [row for row, _ in step]), (lens, [len(mine) for _, mine in step])):
        memory[:live] = torch.tensor(numbers)
        memory[live:] = 0
    indptr[1:] = lens.cumsum(0)
    slots[: len(listed)] = torch.tensor(listed)


# %% 15-1
# The query at 192 sees back to 143, which is in the page that begins at 128. The one at 193 sees back to 144, where a
# page begins.
answer_15_1 = [128, 144]

# %% 15-2
# Where no draft is kept, the next token stands at 40. Up to 42 no other page is freed.
answer_15_2 = 40


# %% 15-3
def translate_all(ids, pages, page_size):
    """Return the storage's slots behind slots of the table."""
    stored = pages[ids // page_size]
    return torch.where(stored >= 0, stored * page_size + ids % page_size, 0)
