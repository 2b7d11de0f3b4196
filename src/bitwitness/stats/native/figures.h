/* Loops over tensors of one type, T, written once for float and for double: LANES sums each, side by side, and in the first of
   them what is left over after the last whole row. A chunk stays in the nearest cache while it is read again, and meanwhile the
   next is on its way. */

INLINE void NAMED(figures_of_row)(const T *x, ptrdiff_t width, T *low, T *high, T *sum, T *square)
{
    for (int j = 0; j < width; j++) {
        T value = x[j];
        low[j] = value < low[j] ? value : low[j];
        high[j] = value > high[j] ? value : high[j];
        sum[j] += value;
        square[j] += value * value;
    }
}

INLINE void NAMED(figures)(const T *x, ptrdiff_t count, T *low, T *high, T *sum, T *square)
{
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES)
        NAMED(figures_of_row)(x + i, LANES, low, high, sum, square);
    NAMED(figures_of_row)(x + i, count - i, low, high, sum, square);
}

INLINE void NAMED(product_of_row)(const T *x, const double *weights, ptrdiff_t width, double *sum)
{
    for (int j = 0; j < width; j++)
        sum[j] += (double)x[j] * weights[j];
}

/* In double, whose products of floats are exact: equal values have equal sketches, on whatever device they are taken. */
INLINE void NAMED(product)(const T *x, const double *weights, ptrdiff_t count, double *sum)
{
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES)
        NAMED(product_of_row)(x + i, weights + i, LANES, sum);
    NAMED(product_of_row)(x + i, weights + i, count - i, sum);
}

/* A chunk's `figures`, and its `product` with weights, which is returned; known where this is compiled. By turns, piece by piece:
   an addition waits for the one before, and meanwhile the processor has the other's to do; of one loop for both a compiler makes
   no vectors. */
INLINE double NAMED(chunk)(int figures, int product, const T *x, const double *weights, ptrdiff_t count, T *low, T *high,
                           double *out)
{
    T sum[LANES] = {0}, square[LANES] = {0};
    double sketched[LANES] = {0}, total = 0, squares = 0, signed_sum = 0;
    ptrdiff_t i = 0;
    for (; i + PIECE <= count; i += PIECE) {
        fetch(x + i + 2 * CHUNK, PIECE * sizeof(T));
        if (figures)
            NAMED(figures)(x + i, PIECE, low, high, sum, square);
        if (product)
            NAMED(product)(x + i, weights + i, PIECE, sketched);
    }
    if (figures)
        NAMED(figures)(x + i, count - i, low, high, sum, square);
    if (product)
        NAMED(product)(x + i, weights + i, count - i, sketched);
    for (int j = 0; j < LANES; j++) {
        total += sum[j];
        squares += square[j];
        signed_sum += sketched[j];
    }
    if (figures) {
        out[TOTAL] += total;
        out[SQUARES] += squares;
    }
    return signed_sum;
}

INLINE void NAMED(distance_of_row)(const T *x, const T *other, ptrdiff_t width, T *sum)
{
    for (int j = 0; j < width; j++) {
        T gap = x[j] - other[j];
        sum[j] += gap * gap;
    }
}

INLINE double NAMED(distance)(const T *x, const T *other, ptrdiff_t count)
{
    T sum[LANES] = {0};
    double total = 0;
    ptrdiff_t i = 0;
    for (; i + PIECE <= count; i += PIECE) {
        fetch(other + i + CHUNK, PIECE * sizeof(T));
        for (int row = 0; row < PIECE; row += LANES)
            NAMED(distance_of_row)(x + i + row, other + i + row, LANES, sum);
    }
    for (; i + LANES <= count; i += LANES)
        NAMED(distance_of_row)(x + i, other + i, LANES, sum);
    NAMED(distance_of_row)(x + i, other + i, count - i, sum);
    for (int j = 0; j < LANES; j++)
        total += sum[j];
    return total;
}

INLINE double NAMED(there)(const T *x, ptrdiff_t count)
{
    int32_t found = 0;
    for (ptrdiff_t i = 0; i < count; i++)
        found += x[i] != 0;
    return found;
}

/* What the sums of blocks from place `first` on come to: each has the sign of its block, where there are several. */
INLINE double NAMED(signed_sum)(ptrdiff_t first, ptrdiff_t count, const double *blocks, double total)
{
    for (ptrdiff_t k = 0; k < BESIDE && first + k * BLOCK < count; k++)
        total += count > BLOCK ? blocks[k] * sign_of_block((uint64_t)(first / BLOCK + k)) : blocks[k];
    return total;
}

/* BESIDE blocks at a time, a chunk of each: their weights are the same, and stay in the nearest cache meanwhile. */
#define FOR_EACH_CHUNK(count, first, k, start) \
    for (ptrdiff_t place = 0; place < BLOCK && first + place < count; place += CHUNK) \
        for (ptrdiff_t k = 0, start = first + place; k < BESIDE && start < count; k++, start += BLOCK)

INLINE double NAMED(sketch)(int kind, const void *values, ptrdiff_t count, const double *weights)
{
    T wide[CHUNK];
    double total = 0;
    for (ptrdiff_t first = 0; first < count; first += BESIDE * BLOCK) {
        double blocks[BESIDE] = {0};
        FOR_EACH_CHUNK(count, first, k, start) {
            ptrdiff_t length = count - start < CHUNK ? count - start : CHUNK;
            const T *x = NAMED(widened)(kind, values, start, length, wide);
            blocks[k] += NAMED(chunk)(0, 1, x, weights + place, length, NULL, NULL, NULL);
        }
        total = NAMED(signed_sum)(first, count, blocks, total);
    }
    return total;
}

INLINE void NAMED(read)(int kind, const void *values, ptrdiff_t count, const double *weights, void *before, int zeros,
                        double *out)
{
    T low[LANES], high[LANES], wide[CHUNK], old[CHUNK];
    for (int j = 0; j < LANES; j++) {
        low[j] = (T)__builtin_inf();
        high[j] = -low[j];
    }
    for (ptrdiff_t first = 0; first < count; first += BESIDE * BLOCK) {
        double blocks[BESIDE] = {0};
        FOR_EACH_CHUNK(count, first, k, start) {
            ptrdiff_t length = count - start < CHUNK ? count - start : CHUNK;
            const T *x = NAMED(widened)(kind, values, start, length, wide);
            if (weights)
                blocks[k] += NAMED(chunk)(1, 1, x, weights + place, length, low, high, out);
            else
                NAMED(chunk)(1, 0, x, NULL, length, low, high, out);
            if (zeros)
                out[THERE] += NAMED(there)(x, length);
            if (before) {
                out[MOVED] += NAMED(distance)(x, NAMED(widened)(kind, before, start, length, old), length);
                memcpy((char *)before + start * size_of(kind), (const char *)values + start * size_of(kind),
                       (size_t)length * (size_t)size_of(kind));
            }
        }
        if (weights)
            out[SIGNED] = NAMED(signed_sum)(first, count, blocks, out[SIGNED]);
    }
    out[LOW] = low[0], out[HIGH] = high[0];
    for (int j = 1; j < LANES; j++) {
        out[LOW] = low[j] < out[LOW] ? low[j] : out[LOW];
        out[HIGH] = high[j] > out[HIGH] ? high[j] : out[HIGH];
    }
}
#undef FOR_EACH_CHUNK
