/* Products of a matrix with a few vectors at once, and the squares beside them, each value fetched from memory once: what matrix.h
   does with one vector. In float, of bfloat16 or float32. `vectors` (2, 4, and over rows MANY) and `kind` are known where this is
   compiled, so that all sums stay in registers; those of MANY over columns would not. */

enum { FEW = 4, MANY = 8, ROWS = 4, LANE = 16, NEAR = 1 << 12 };
#define UNROLLED _Pragma("GCC unroll 8")

INLINE float lane_sum(lanes_float value)
{
    lanes_float alone[SIDE] = {value};
    return added_float(alone);
}

/* `count` values, LANE at most, of each of `rows` rows, `step` apart, and of v [vectors, width]: adds what they come to. */
INLINE void many_lane(int kind, int vectors, const void *x, int rows, ptrdiff_t step, ptrdiff_t count, const float *v, ptrdiff_t width,
                      lanes_float (*all)[MANY], lanes_float *square)
{
    lanes_float here[ROWS];
    UNROLLED for (int r = 0; r < rows; r++) {
        here[r] = count < LANE ? loaded_rest_float(kind, x, r * step, count) : loaded_float(kind, x, r * step);
        square[r] += here[r] * here[r];
    }
    UNROLLED for (int g = 0; g < vectors; g++) {
        const float *from = v + g * width;
        lanes_float by = count < LANE ? loaded_rest_float(FLOAT32, from, 0, count) : loaded_float(FLOAT32, from, 0);
        UNROLLED for (int r = 0; r < rows; r++)
            all[r][g] += here[r] * by;
    }
}

/* `rows` rows, ROWS at most; as below. */
INLINE void many_along(int kind, int vectors, const void *x, int rows, ptrdiff_t step, ptrdiff_t width, const float *v, float *sums,
                       float *squares)
{
    lanes_float all[ROWS][MANY] = {{{0}}}, square[ROWS] = {{0}};
    ptrdiff_t i = 0;
    for (; i + LANE <= width; i += LANE)
        many_lane(kind, vectors, (const char *)x + i * size_of(kind), rows, step, LANE, v + i, width, all, square);
    if (i < width)
        many_lane(kind, vectors, (const char *)x + i * size_of(kind), rows, step, width - i, v + i, width, all, square);
    UNROLLED for (int r = 0; r < rows; r++) {
        squares[r] = lane_sum(square[r]);
        UNROLLED for (int g = 0; g < vectors; g++)
            sums[r * vectors + g] = lane_sum(all[r][g]);
    }
}

/* x [rows, width], a row every `step` values; v [vectors, width]; sums [rows, vectors], squares [rows]. Row by row, as they lie in
   memory, where the vectors stay in the nearest cache, in NEAR values; else what is fetched of them serves ROWS rows. */
INLINE void many_rows(int kind, int vectors, const void *x, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t step, const float *v,
                      float *sums, float *squares)
{
    ptrdiff_t r = 0;
    for (; vectors * width > NEAR && r + ROWS <= rows; r += ROWS) {
        const char *from = (const char *)x + r * step * size_of(kind);
        many_along(kind, vectors, from, ROWS, step, width, v, sums + r * vectors, squares + r);
    }
    for (; r < rows; r++)
        many_along(kind, vectors, (const char *)x + r * step * size_of(kind), 1, step, width, v, sums + r * vectors, squares + r);
}

/* FEW_ROWS rows at most of `lanes` lanes of columns, of which the last has `rest` values: adds their products with v [rows, vectors]
   to sums [vectors, width], and their squares. */
INLINE void many_down(int kind, int vectors, const void *x, ptrdiff_t rows, ptrdiff_t step, int lanes, ptrdiff_t rest, const float *v,
                      ptrdiff_t width, float *sums, float *squares)
{
    lanes_float all[FEW][SIDE] = {{{0}}}, square[SIDE] = {{0}}, here;
    for (ptrdiff_t r = 0; r < rows; r++) {
        UNROLLED for (int j = 0; j < lanes; j++) {
            ptrdiff_t at = r * step + j * LANE;
            here = j + 1 < lanes || rest == LANE ? loaded_float(kind, x, at) : loaded_rest_float(kind, x, at, rest);
            square[j] += here * here;
            UNROLLED for (int g = 0; g < vectors; g++)
                all[g][j] += here * v[r * vectors + g];
        }
    }
    for (int j = 0; j < lanes; j++) {
        ptrdiff_t count = j + 1 < lanes ? LANE : rest;
        for (ptrdiff_t i = 0; i < count; i++) {
            squares[j * LANE + i] += square[j][i];
            for (int g = 0; g < vectors; g++)
                sums[g * width + j * LANE + i] += all[g][j][i];
        }
    }
}

/* x [rows, width], a row every `step` values; v [rows, vectors]; sums [vectors, width], squares [width]. */
INLINE void many_columns(int kind, int vectors, const void *x, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t step, const float *v,
                         float *sums, float *squares)
{
    memset(sums, 0, (size_t)(width * vectors) * sizeof(float));
    memset(squares, 0, (size_t)width * sizeof(float));
    for (ptrdiff_t r = 0; r < rows; r += FEW_ROWS) {
        ptrdiff_t some = rows - r < FEW_ROWS ? rows - r : FEW_ROWS, first = 0;
        const float *by = v + r * vectors;
        for (; first + SIDE * LANE <= width; first += SIDE * LANE) {
            const char *from = (const char *)x + (r * step + first) * size_of(kind);
            many_down(kind, vectors, from, some, step, SIDE, LANE, by, width, sums + first, squares + first);
        }
        for (; first < width; first += LANE) {
            const char *from = (const char *)x + (r * step + first) * size_of(kind);
            ptrdiff_t rest = width - first < LANE ? width - first : LANE;
            many_down(kind, vectors, from, some, step, 1, rest, by, width, sums + first, squares + first);
        }
    }
}

/* Either of the two above. */
INLINE void many_of(int kind, int vectors, int across, const void *x, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t step, const float *v,
                    float *sums, float *squares)
{
    if (across && vectors == 2)
        many_columns(kind, 2, x, rows, width, step, v, sums, squares);
    else if (across)
        many_columns(kind, FEW, x, rows, width, step, v, sums, squares);
    else if (vectors == 2)
        many_rows(kind, 2, x, rows, width, step, v, sums, squares);
    else if (vectors == FEW)
        many_rows(kind, FEW, x, rows, width, step, v, sums, squares);
    else
        many_rows(kind, MANY, x, rows, width, step, v, sums, squares);
}
#undef UNROLLED
