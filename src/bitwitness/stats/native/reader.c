/* The figures of tensors on a CPU, each value fetched from memory once.

   Compiled when the package is built (hatch_build.py) and loaded by reader.py; without it parts.py does the same with torch's
   operators, in five passes. Nothing of Python or torch is called here.

   The bits of the results depend on the values alone, not on the processor: LANES sums run side by side whatever the width of
   its registers, and products are rounded before they are added (-ffp-contract=off). */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, PIECE = 128, CHUNK = 1024, BLOCK = 1 << 15, BESIDE = 4, LINE = 64 };
enum { FEW_ROWS = 16, SIDE = 4 };
enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum { LOW, HIGH, TOTAL, SQUARES, SIGNED, THERE, MOVED, FIGURES };

/* what is not inlined would not be compiled for each processor */
#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ON_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ON_EACH_PROCESSOR
#endif

/* Asks for memory that is read soon, which a processor does not do of itself beyond a page, or while it is busy with what it has;
   what lies beyond a tensor does no harm. Once per PIECE: among the values of a row it would keep a compiler from using vectors. */
INLINE void fetch(const void *from, ptrdiff_t bytes)
{
#ifdef __GNUC__
    for (ptrdiff_t i = 0; i < bytes; i += LINE)
        __builtin_prefetch((const char *)from + i);
#else
    (void)from, (void)bytes;
#endif
}

INLINE ptrdiff_t size_of(int kind) { return kind == FLOAT64 ? 8 : kind == FLOAT32 ? 4 : 2; }

/* The signs of blocks in stats/sketch.py: the top bits of splitmix64. */
INLINE double sign_of_block(uint64_t block)
{
    uint64_t x = (((uint64_t)1 << 40) + block + 1) * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (x ^ (x >> 31)) >> 63 ? -1.0 : 1.0;
}

INLINE void widen_bfloat16(const uint16_t *from, float *to, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

INLINE void widen_float16(const uint16_t *from, float *to, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        uint32_t half = from[i], rest = (half & 0x7FFF) << 13, bits;
        uint32_t special = (half & 0x7C00) == 0x7C00 ? 0x7F800000 : 0; /* Inf and NaN: the largest exponent in either format */
        float value;
        memcpy(&value, &rest, sizeof value);
        value *= 0x1p112f; /* the exponents of the formats begin 112 apart; subnormal numbers become normal ones */
        memcpy(&bits, &value, sizeof bits);
        bits |= special | (half & 0x8000) << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

INLINE const float *widened_float(int kind, const void *values, ptrdiff_t start, ptrdiff_t count, float *wide)
{
    if (kind == FLOAT32)
        return (const float *)values + start;
    fetch((const uint16_t *)values + start + CHUNK, count * (ptrdiff_t)sizeof(uint16_t));
    if (kind == BFLOAT16)
        widen_bfloat16((const uint16_t *)values + start, wide, count);
    else
        widen_float16((const uint16_t *)values + start, wide, count);
    return wide;
}

INLINE const double *widened_double(int kind, const void *values, ptrdiff_t start, ptrdiff_t count, double *wide)
{
    (void)kind, (void)count, (void)wide;
    return (const double *)values + start;
}

/* `count` values as they lie, widened. */
INLINE void copy_float(int kind, const void *values, ptrdiff_t count, float *to)
{
    if (kind == FLOAT32)
        memcpy(to, values, (size_t)count * sizeof(float));
    else if (kind == BFLOAT16)
        widen_bfloat16(values, to, count);
    else
        widen_float16(values, to, count);
}

INLINE void copy_double(int kind, const void *values, ptrdiff_t count, double *to)
{
    (void)kind;
    memcpy(to, values, (size_t)count * sizeof(double));
}

/* bfloat16 in vectors, and what it is widened to */
typedef uint16_t halves __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(64)));

#define T float
#define OF_T FLOAT32
#define NAMED(function) function##_float
#include "figures.h"
#include "matrix.h"
#undef T
#undef OF_T
#undef NAMED
#define T double
#define OF_T FLOAT64
#define NAMED(function) function##_double
#include "figures.h"
#include "matrix.h"

#include "many.h"
#include "fold.h"

/* What a change of the arguments below changes, too: a library that was built of other sources is not used. */
int bitwitness_reader_version(void) { return 7; }

/* Writes FIGURES numbers for `count` values. `weights`: BLOCK of them, or NULL for no sketch; `before`: as many values of the same
   kind, which are replaced once their squared distance is known, or NULL; `zeros`: count what is not zero. What is not asked for
   is 0. Where the squares' sum is not finite the extremes mean nothing. */
ON_EACH_PROCESSOR
void bitwitness_read(int kind, const void *values, ptrdiff_t count, const double *weights, void *before, int zeros, double *out)
{
    for (int i = 0; i < FIGURES; i++)
        out[i] = 0;
    if (kind == FLOAT64)
        read_double(kind, values, count, weights, before, zeros, out);
    else
        read_float(kind, values, count, weights, before, zeros, out);
}

/* The same of many tensors, without sketches: `out` is [tensors, FIGURES]; `before` NULL, or with NULL where there is none. */
void bitwitness_read_all(ptrdiff_t tensors, const int32_t *kinds, const void *const *values, const int64_t *counts,
                         void *const *before, int zeros, double *out)
{
    for (ptrdiff_t i = 0; i < tensors; i++)
        bitwitness_read(kinds[i], values[i], counts[i], NULL, before ? before[i] : NULL, zeros, out + i * FIGURES);
}

/* The sketch alone, of the same bits. */
ON_EACH_PROCESSOR
double bitwitness_sketch(int kind, const void *values, ptrdiff_t count, const double *weights)
{
    return kind == FLOAT64 ? sketch_double(kind, values, count, weights) : sketch_float(kind, values, count, weights);
}

/* Sums `count` rows of ROW_WORDS words, one each into `rows`, and adds to ROW_WORDS sums of `columns`. */
ON_EACH_PROCESSOR
void bitwitness_fold(const void *bytes, ptrdiff_t count, uint64_t *rows, uint64_t *columns)
{
    ptrdiff_t i = 0;
    for (; i + TOGETHER <= count; i += TOGETHER)
        fold_eight((const unsigned char *)bytes + i * ROW_BYTES, rows + i, columns);
    for (; i < count; i++)
        fold_row((const unsigned char *)bytes + i * ROW_BYTES, rows + i, columns);
}

/* The hash that comes of such sums, and of the `length` bytes, at most a row and 3, that follow the rows. */
uint64_t bitwitness_hash(const uint64_t *rows, ptrdiff_t count, const uint64_t *columns, const void *tail, ptrdiff_t length)
{
    return finished(rows, count, columns, (const unsigned char *)tail, length);
}

/* Both for many tensors: of each its `counts` rows, one after another tensor's in `rows`, its columns in [tensors, ROW_WORDS],
   what follows its rows in `tails` [tensors, ROW_BYTES + 8], and its hash. Columns and tails are zeros before. */
void bitwitness_hash_all(ptrdiff_t tensors, const void *const *places, const int64_t *lengths, const int64_t *counts,
                         uint64_t *rows, uint64_t *columns, unsigned char *tails, uint64_t *hashes)
{
    for (ptrdiff_t i = 0; i < tensors; i++) {
        const unsigned char *bytes = (const unsigned char *)places[i];
        ptrdiff_t count = counts[i], rest = lengths[i] - count * ROW_BYTES;
        uint64_t *mine = columns + i * ROW_WORDS;
        unsigned char *tail = tails + i * (ROW_BYTES + 8);
        if (rest)
            memcpy(tail, bytes + count * ROW_BYTES, (size_t)rest);
        if (count)
            bitwitness_fold(bytes, count, rows, mine);
        hashes[i] = count ? finished(rows, count, mine, tail, rest) : finished_small(tail, rest);
        rows += count;
    }
}

/* Products of `batch` matrices x with a vector each, and the squares beside them, in float (double for FLOAT64). A matrix is
   [rows, width], a row every `step` values, a matrix every `apart`; its vectors lie `between` apart, 0 where all matrices share
   one. `across` 0: over each row, v [width], sums and squares [batch, rows]; 1: over each column, v [rows], [batch, width]. */
ON_EACH_PROCESSOR
void bitwitness_products(int kind, int across, const void *x, ptrdiff_t batch, ptrdiff_t apart, ptrdiff_t rows, ptrdiff_t width,
                         ptrdiff_t step, const void *v, ptrdiff_t between, void *sums, void *squares)
{
    ptrdiff_t each = across ? width : rows, size = kind == FLOAT64 ? sizeof(double) : sizeof(float);
    for (ptrdiff_t i = 0; i < batch; i++) {
        const void *from = (const char *)x + i * apart * size_of(kind), *by = (const char *)v + i * between * size;
        void *to = (char *)sums + i * each * size, *beside = (char *)squares + i * each * size;
        if (kind == FLOAT64 && across)
            columns_double(kind, from, rows, width, step, by, to, beside);
        else if (kind == FLOAT64)
            rows_double(kind, from, rows, width, step, by, to, beside);
        else if (across)
            columns_float(kind, from, rows, width, step, by, to, beside);
        else
            rows_float(kind, from, rows, width, step, by, to, beside);
    }
}

/* The same of one matrix, of bfloat16 or float32, with `vectors` at once, in float: over each row 2, 4 or 8, v [vectors, width] and
   sums [rows, vectors]; over each column 2 or 4, v [rows, vectors] and sums [vectors, width]. Squares [rows] or [width]. */
ON_EACH_PROCESSOR
void bitwitness_many(int kind, int vectors, int across, const void *x, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t step,
                     const float *v, float *sums, float *squares)
{
    if (kind == BFLOAT16)
        many_of(BFLOAT16, vectors, across, x, rows, width, step, v, sums, squares);
    else
        many_of(FLOAT32, vectors, across, x, rows, width, step, v, sums, squares);
}

/* Dot products of the rows of x and y, [a, b, c, width], and the squares of either; `steps`: of a, b, c in x, then in y. The three
   results follow each other, [3, a, b, c], in float (double for FLOAT64). */
ON_EACH_PROCESSOR
void bitwitness_pairs(int kind, const void *x, const void *y, const int64_t *sizes, const int64_t *steps, void *out)
{
    ptrdiff_t count = sizes[0] * sizes[1] * sizes[2], n = 0;
    for (int64_t a = 0; a < sizes[0]; a++)
        for (int64_t b = 0; b < sizes[1]; b++)
            for (int64_t c = 0; c < sizes[2]; c++, n++) {
                const void *left = (const char *)x + (a * steps[0] + b * steps[1] + c * steps[2]) * size_of(kind);
                const void *right = (const char *)y + (a * steps[3] + b * steps[4] + c * steps[5]) * size_of(kind);
                if (kind == FLOAT64) {
                    double *to = (double *)out + n;
                    pair_double(kind, left, right, sizes[3], to, to + count, to + 2 * count);
                } else {
                    float *to = (float *)out + n;
                    pair_float(kind, left, right, sizes[3], to, to + count, to + 2 * count);
                }
            }
}
