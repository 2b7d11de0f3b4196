/* The two folds of stats/fold.py, in one reading: sums of rows of words as they lie, and of columns of words shifted by half
   a word. Sums wrap around. Words are read at any address; what a shifted word reads beyond its row is the next row's, or the
   half word that follows the last one.

   Eight rows at a time: the processor fetches eight streams ahead of itself, and a column is read and written once for eight
   words (a row at a time reads memory at half the pace; one that asks for what comes next is slower, too). */

enum { ROW_WORDS = 1021, ROW_BYTES = 8 * ROW_WORDS, HALF_WORD = 4, TOGETHER = 8 };

INLINE uint64_t word_at(const unsigned char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

INLINE void fold_row(const unsigned char *row, uint64_t *sum, uint64_t *columns)
{
    uint64_t total = 0;
    for (ptrdiff_t i = 0; i < ROW_WORDS; i++) {
        total += word_at(row + 8 * i);
        columns[i] += word_at(row + 8 * i + HALF_WORD);
    }
    *sum = total;
}

INLINE void fold_eight(const unsigned char *rows, uint64_t *sums, uint64_t *columns)
{
    uint64_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
    for (ptrdiff_t i = 0; i < ROW_WORDS; i++) {
        const unsigned char *at = rows + 8 * i, *half = at + HALF_WORD;
        a += word_at(at);
        b += word_at(at + ROW_BYTES);
        c += word_at(at + 2 * ROW_BYTES);
        d += word_at(at + 3 * ROW_BYTES);
        e += word_at(at + 4 * ROW_BYTES);
        f += word_at(at + 5 * ROW_BYTES);
        g += word_at(at + 6 * ROW_BYTES);
        h += word_at(at + 7 * ROW_BYTES);
        columns[i] += word_at(half) + word_at(half + ROW_BYTES) + word_at(half + 2 * ROW_BYTES)
            + word_at(half + 3 * ROW_BYTES) + word_at(half + 4 * ROW_BYTES) + word_at(half + 5 * ROW_BYTES)
            + word_at(half + 6 * ROW_BYTES) + word_at(half + 7 * ROW_BYTES);
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d, sums[4] = e, sums[5] = f, sums[6] = g, sums[7] = h;
}

/* The mixer and the numbering of stats/digest.py. */
INLINE uint64_t scrambled(uint64_t x)
{
    x = (x ^ (x >> 32)) * UINT64_C(0xD6E8FEB86659FD93);
    x = (x ^ (x >> 32)) * UINT64_C(0xD6E8FEB86659FD93);
    return x ^ (x >> 32);
}

INLINE uint64_t numbered(uint64_t number) { return number * UINT64_C(0x9E3779B97F4A7C15); }

/* The hash that the sums of `count` rows and of the columns come to, with the `length` bytes that follow these rows. */
INLINE uint64_t finished(const uint64_t *rows, ptrdiff_t count, const uint64_t *columns, const unsigned char *tail, ptrdiff_t length)
{
    unsigned char bytes[ROW_BYTES + 8] = {0}, beyond[8] = {0};
    ptrdiff_t inside = length < ROW_BYTES ? length : ROW_BYTES;
    uint64_t last = 0, hash = 0;
    memcpy(bytes, tail, (size_t)inside);
    memcpy(bytes + ROW_BYTES, bytes, HALF_WORD); /* the last shifted word goes on at the beginning */
    memcpy(beyond, tail + inside, (size_t)(length - inside));
    for (ptrdiff_t i = 0; i < ROW_WORDS; i++) {
        last += word_at(bytes + 8 * i);
        hash += scrambled(columns[i] + word_at(bytes + 8 * i + HALF_WORD) + numbered((UINT64_C(1) << 32) + (uint64_t)i));
    }
    for (ptrdiff_t i = 0; i < count; i++)
        hash += scrambled(rows[i] + numbered((uint64_t)i));
    last += numbered(word_at(beyond) - 1 - (uint64_t)(count * ROW_BYTES + length));
    return hash + scrambled(last);
}

/* The same of what has no whole row: its words turn around its own end. `bytes` are followed by zeros up to a whole word. */
INLINE uint64_t finished_small(const unsigned char *bytes, ptrdiff_t length)
{
    ptrdiff_t words = length ? (length + 7) / 8 : 1;
    uint64_t last = numbered(-(uint64_t)1 - (uint64_t)length), hash = 0;
    for (ptrdiff_t i = 0; i < words; i++) {
        uint64_t word = word_at(bytes + 8 * i), next = word_at(bytes + 8 * ((i + 1) % words));
        last += word;
        hash += scrambled(((word >> 32) | (next << 32)) + numbered((UINT64_C(1) << 32) + (uint64_t)i));
    }
    return hash + scrambled(last);
}
