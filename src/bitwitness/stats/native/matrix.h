/* Sums over rows or columns of a matrix, each value fetched from memory once: its product with a vector, and its squares beside it.
   T is float or double; half types are widened a piece at a time.

   Written in vectors of 64 bytes, which a compiler divides where registers are smaller: of plain loops it leaves sums in memory.
   SIDE of them are taken side by side, so that additions need not wait for each other. */

typedef T NAMED(lanes) __attribute__((vector_size(64)));
typedef T NAMED(half) __attribute__((vector_size(32)));
typedef T NAMED(quarter) __attribute__((vector_size(16)));
#define WIDTH ((ptrdiff_t)(64 / sizeof(T)))
#define LOAD(name, from) \
    NAMED(lanes) name; \
    memcpy(&name, from, sizeof name)

/* WIDTH values from place i on; `kind`, T's own or BFLOAT16, is known where this is compiled. */
INLINE NAMED(lanes) NAMED(loaded)(int kind, const void *x, ptrdiff_t i)
{
    NAMED(lanes) value;
    if (kind == BFLOAT16) {
        halves narrow;
        memcpy(&narrow, (const uint16_t *)x + i, sizeof narrow);
        words wide = __builtin_convertvector(narrow, words) << 16;
        memcpy(&value, &wide, sizeof value);
    } else {
        memcpy(&value, (const T *)x + i, sizeof value);
    }
    return value;
}

/* `count` values at the end of a row, at most WIDTH, with zeros behind them; of any kind that copy takes. */
INLINE NAMED(lanes) NAMED(loaded_rest)(int kind, const void *x, ptrdiff_t i, ptrdiff_t count)
{
    T rest[WIDTH] = {0};
    NAMED(copy)(kind, (const char *)x + i * size_of(kind), count, rest);
    LOAD(value, rest);
    return value;
}

INLINE T NAMED(added)(const NAMED(lanes) *values)
{
    NAMED(lanes) all = (values[0] + values[1]) + (values[2] + values[3]);
    NAMED(half) half[2];
    NAMED(quarter) quarter[2];
    T sums[16 / sizeof(T)], sum = 0;
    memcpy(half, &all, sizeof half);
    half[0] += half[1];
    memcpy(quarter, half, sizeof quarter);
    quarter[0] += quarter[1];
    memcpy(sums, quarter, sizeof sums);
    for (size_t j = 0; j < 16 / sizeof(T); j++)
        sum += sums[j];
    return sum;
}

/* A piece of a row: adds its product with v to *sum, and its squares to *square. `kind` as in loaded. */
INLINE void NAMED(along)(int kind, const void *x, const T *v, ptrdiff_t count, T *sum, T *square)
{
    NAMED(lanes) sums[SIDE] = {{0}}, squares[SIDE] = {{0}};
    ptrdiff_t i = 0;
    for (; i + SIDE * WIDTH <= count; i += SIDE * WIDTH)
        for (int j = 0; j < SIDE; j++) {
            NAMED(lanes) here = NAMED(loaded)(kind, x, i + j * WIDTH);
            LOAD(by, v + i + j * WIDTH);
            sums[j] += here * by;
            squares[j] += here * here;
        }
    for (; i + WIDTH <= count; i += WIDTH) {
        NAMED(lanes) here = NAMED(loaded)(kind, x, i);
        LOAD(by, v + i);
        sums[1] += here * by;
        squares[1] += here * here;
    }
    if (i < count) {
        NAMED(lanes) here = NAMED(loaded_rest)(kind, x, i, count - i), by = NAMED(loaded_rest)(OF_T, v, i, count - i);
        sums[0] += here * by;
        squares[0] += here * here;
    }
    *sum += NAMED(added)(sums);
    *square += NAMED(added)(squares);
}

/* `count` values of a row from `start` on, with CHUNK places for who must widen them first. */
INLINE void NAMED(along_row)(int kind, const void *row, ptrdiff_t start, const T *v, ptrdiff_t count, T *wide, T *sum, T *square)
{
    if (kind == BFLOAT16) {
        fetch((const uint16_t *)row + start + CHUNK, count * (ptrdiff_t)sizeof(uint16_t));
        NAMED(along)(BFLOAT16, (const uint16_t *)row + start, v, count, sum, square);
    } else {
        NAMED(along)(OF_T, NAMED(widened)(kind, row, start, count, wide), v, count, sum, square);
    }
}

/* x [rows, width], a row every `step` values; v [width]; sums and squares [rows]. */
INLINE void NAMED(rows)(int kind, const void *x, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t step, const T *v, T *sums, T *squares)
{
    T wide[CHUNK];
    for (ptrdiff_t r = 0; r < rows; r++) {
        const void *row = (const char *)x + r * step * size_of(kind);
        sums[r] = squares[r] = 0;
        for (ptrdiff_t start = 0; start < width; start += CHUNK) {
            ptrdiff_t length = width - start < CHUNK ? width - start : CHUNK;
            NAMED(along_row)(kind, row, start, v + start, length, wide, sums + r, squares + r);
        }
    }
}

/* FEW_ROWS rows at most, `step` apart, of SIDE lanes of columns: adds what they come to to sum and square. `kind` as in loaded.
   The columns beside them are asked for meanwhile: a processor foresees nothing of so short pieces of many rows. */
INLINE void NAMED(down)(int kind, const void *x, ptrdiff_t rows, ptrdiff_t step, const T *v, T *sum, T *square)
{
    NAMED(lanes) sums[SIDE] = {{0}}, squares[SIDE] = {{0}};
    for (ptrdiff_t r = 0; r < rows; r++) {
        fetch((const char *)x + (r * step + SIDE * WIDTH) * size_of(kind), SIDE * WIDTH * size_of(kind));
        for (int j = 0; j < SIDE; j++) {
            NAMED(lanes) here = NAMED(loaded)(kind, x, r * step + j * WIDTH);
            sums[j] += here * v[r];
            squares[j] += here * here;
        }
    }
    for (int j = 0; j < SIDE; j++) {
        LOAD(sum_before, sum + j * WIDTH);
        LOAD(square_before, square + j * WIDTH);
        sums[j] += sum_before;
        squares[j] += square_before;
    }
    memcpy(sum, sums, sizeof sums);
    memcpy(square, squares, sizeof squares);
}

/* FEW_ROWS rows at most of some columns, at most SIDE lanes of them. */
INLINE void NAMED(tile)(int kind, const void *x, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t step, const T *v, T *sums, T *squares)
{
    T wide[FEW_ROWS][SIDE * WIDTH], sum[SIDE * WIDTH] = {0}, square[SIDE * WIDTH] = {0};
    if (columns == SIDE * WIDTH && kind == BFLOAT16) {
        NAMED(down)(BFLOAT16, x, rows, step, v, sums, squares);
        return;
    }
    if (columns == SIDE * WIDTH && kind == OF_T) {
        NAMED(down)(OF_T, x, rows, step, v, sums, squares);
        return;
    }
    memset(wide, 0, sizeof wide);
    for (ptrdiff_t r = 0; r < rows; r++)
        NAMED(copy)(kind, (const char *)x + r * step * size_of(kind), columns, wide[r]);
    NAMED(down)(OF_T, wide[0], rows, SIDE * WIDTH, v, sum, square);
    for (ptrdiff_t j = 0; j < columns; j++) {
        sums[j] += sum[j];
        squares[j] += square[j];
    }
}

/* x [rows, width], a row every `step` values; v [rows]; sums and squares [width]. */
INLINE void NAMED(columns)(int kind, const void *x, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t step, const T *v, T *sums, T *squares)
{
    memset(sums, 0, (size_t)width * sizeof(T));
    memset(squares, 0, (size_t)width * sizeof(T));
    for (ptrdiff_t r = 0; r < rows; r += FEW_ROWS)
        for (ptrdiff_t first = 0; first < width; first += SIDE * WIDTH) {
            const void *from = (const char *)x + (r * step + first) * size_of(kind);
            ptrdiff_t some = rows - r < FEW_ROWS ? rows - r : FEW_ROWS, columns = width - first;
            columns = columns < SIDE * WIDTH ? columns : SIDE * WIDTH;
            NAMED(tile)(kind, from, some, columns, step, v + r, sums + first, squares + first);
        }
}

/* Pieces of two rows: adds their dot product to *dot, and the squares of either. `kind` as in loaded. */
INLINE void NAMED(beside)(int kind, const void *x, const void *y, ptrdiff_t count, T *dot, T *square, T *other)
{
    NAMED(lanes) dots[SIDE] = {{0}}, squares[SIDE] = {{0}}, others[SIDE] = {{0}};
    ptrdiff_t i = 0;
    for (; i + SIDE * WIDTH <= count; i += SIDE * WIDTH)
        for (int j = 0; j < SIDE; j++) {
            NAMED(lanes) a = NAMED(loaded)(kind, x, i + j * WIDTH), b = NAMED(loaded)(kind, y, i + j * WIDTH);
            dots[j] += a * b;
            squares[j] += a * a;
            others[j] += b * b;
        }
    for (; i < count; i += WIDTH) {
        ptrdiff_t some = count - i < WIDTH ? count - i : WIDTH;
        NAMED(lanes) a = NAMED(loaded_rest)(kind, x, i, some), b = NAMED(loaded_rest)(kind, y, i, some);
        dots[0] += a * b;
        squares[0] += a * a;
        others[0] += b * b;
    }
    *dot += NAMED(added)(dots);
    *square += NAMED(added)(squares);
    *other += NAMED(added)(others);
}

/* The dot product of two rows, and the squares of either. */
INLINE void NAMED(pair)(int kind, const void *x, const void *y, ptrdiff_t width, T *dot, T *square, T *other)
{
    T wide[CHUNK], too[CHUNK];
    *dot = *square = *other = 0;
    for (ptrdiff_t start = 0; start < width; start += CHUNK) {
        ptrdiff_t length = width - start < CHUNK ? width - start : CHUNK;
        if (kind == BFLOAT16) {
            NAMED(beside)(BFLOAT16, (const uint16_t *)x + start, (const uint16_t *)y + start, length, dot, square, other);
            continue;
        }
        const T *a = NAMED(widened)(kind, x, start, length, wide), *b = NAMED(widened)(kind, y, start, length, too);
        NAMED(beside)(OF_T, a, b, length, dot, square, other);
    }
}
#undef WIDTH
#undef LOAD
