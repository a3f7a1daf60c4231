/* A product whose weight lies in panels of PANEL columns, each read front to back. */
#ifndef PACELINE_NATIVE_PANELS_H
#define PACELINE_NATIVE_PANELS_H

#include "_native.h"

#include <string.h>

#define PANEL 32 /* columns; kernels/product.py and kernels/quantized.py pack them */

/* Cache lines that will be needed next. */
struct lines {
    const char *first;
    ptrdiff_t count;
};

/* What the kinds of weights share; the first member of their own structs. */
struct panels {
    const char *weight, *x;
    const float *bias;
    float *out;
    ptrdiff_t rows, columns, panel_bytes, row_bytes; /* row_bytes: of x */
    int accumulate, max_rows;
    /* Finishes `rows` rows from `row` on of one panel, at most max_rows. */
    void (*tile)(const struct panels *p, int rows, ptrdiff_t row, ptrdiff_t panel,
                 const struct lines *ahead);
    ptrdiff_t num_panels, height, panels_per_task, rows_per_task, num_row_tasks; /* are set */
    int num_threads;
};

static ALWAYS_INLINE ptrdiff_t ceil_div(ptrdiff_t a, ptrdiff_t b) { return (a + b - 1) / b; }
static ALWAYS_INLINE ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static ALWAYS_INLINE ptrdiff_t most(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

/* Of all tiles but the last ones. */
ptrdiff_t tile_height(ptrdiff_t rows, int max_rows);

/* Computes all tiles; a tile begins at a multiple of the height. */
void run_panels(struct panels *p, int num_threads);

/* Asks for the lines that put_sums will write. */
static ALWAYS_INLINE void ask_for_sums(const struct panels *p, int rows, ptrdiff_t row,
                                       ptrdiff_t column)
{
    const float *out = p->out + row * p->columns + column;
    for (int r = 0; r < rows; r++, out += p->columns)
#pragma GCC unroll 2
        for (int c = 0; c < PANEL; c += 16)
            __builtin_prefetch(out + c, 1, 3);
}

/* Adds what the sums are to be added to, and puts them where they belong. */
static ALWAYS_INLINE void put_sums(const struct panels *p, int rows, ptrdiff_t row,
                                   ptrdiff_t column, const float *sums)
{
    ptrdiff_t width = least(p->columns - column, PANEL);
    const float *bias = p->bias ? p->bias + column : NULL;
    float *out = p->out + row * p->columns + column;
    for (int r = 0; r < rows; r++, sums += PANEL, out += p->columns) {
        if (p->accumulate)
            for (ptrdiff_t c = 0; c < width; c++)
                out[c] += sums[c];
        else
            memcpy(out, sums, (size_t)width * sizeof *out);
        if (bias)
            for (ptrdiff_t c = 0; c < width; c++)
                out[c] += bias[c];
    }
}

#endif
