/* Tiles of a matrix product for one instruction set. Included once for each, with
 *     NAME(x)   the name of x for this set
 *     TARGET    its function attribute
 *     LANES     floats a vector
 *     MAX_ROWS  rows of a strip of two vectors whose sums, weights and factor fit the registers */

typedef float NAME(vector) __attribute__((vector_size(LANES * 4)));
typedef float NAME(loose) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* sums[row][PANEL] = rows of x times `vectors` vectors of columns of a panel; both counts are
 * constants where this is inlined. Rows share pointers by threes, which is what addressing modes
 * give for nothing: 14 pointers would not fit the registers.
 *
 * Meanwhile it asks for the lines of `ahead`, spread over the depth: in a burst they hold up the
 * weights that come from the caches. Where they are many it asks at several places in turn, if the
 * core is of those that run ahead by themselves at each, but only some 20 lines far. */
static ALWAYS_INLINE TARGET void NAME(strip)(int rows, int vectors, const struct lines *ahead,
                                             const float *x, const float *panel, ptrdiff_t depth,
                                             float *sums)
{
    NAME(vector) sum[MAX_ROWS][4], weight[4];
    const float *row[(MAX_ROWS + 2) / 3];
    const char *line = ahead->first;
    ptrdiff_t places = ahead->count * 4 > depth ? habits.max_places : 1;
    ptrdiff_t part = ahead->count / places * 64; /* bytes from one place to the next */
    ptrdiff_t near = habits.near_steps * PANEL;
    ptrdiff_t step = least(part / depth, 64 / places);
    if (ahead->count > habits.max_lines * depth)
        part = 0;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[r][v] = (NAME(vector)){0};
#pragma GCC unroll 16
    for (int r = 0; r < rows; r += 3)
        row[r / 3] = x + r * depth;
    for (ptrdiff_t k = 0; k < depth; k++, panel += PANEL, line += step) {
        if (part)
            __builtin_prefetch(line + (k & (places - 1)) * part, 0, 2);
#pragma GCC unroll 2
        for (int at = 0; at < vectors * LANES; at += 16)
            __builtin_prefetch(panel + near + at, 0, 3);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            weight[v] = *(const NAME(loose) *)(panel + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            float factor = row[r / 3][r % 3 * depth];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[r][v] += weight[v] * factor;
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r += 3)
            row[r / 3]++;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            *(NAME(loose) *)(sums + r * PANEL + v * LANES) = sum[r][v];
}

/* A whole panel, in strips as wide as the registers hold for so many rows. */
static ALWAYS_INLINE TARGET void NAME(strips)(int rows, const struct lines *ahead, const float *x,
                                              const float *panel, ptrdiff_t depth, float *sums)
{
    const struct lines none = {NULL, 0};
    int wide = LANES * 4 <= PANEL && rows * 4 <= MAX_ROWS * 2;
    int vectors = wide ? 4 : 2;
    NAME(strip)(rows, vectors, ahead, x, panel, depth, sums);
    for (int at = vectors * LANES; at < PANEL; at += vectors * LANES)
        NAME(strip)(rows, vectors, &none, x, panel + at, depth, sums + at);
}

#define CASE(rows)                                                                                 \
    case rows:                                                                                     \
        NAME(strips)(rows, ahead, x, panel, depth, sums);                                          \
        break;

static TARGET void NAME(tile)(const struct panels *p, int rows, ptrdiff_t row, ptrdiff_t i_panel,
                              const struct lines *ahead)
{
    const struct product *product = (const struct product *)p;
    ptrdiff_t depth = product->depth;
    const float *x = (const float *)p->x + row * depth;
    const float *panel = (const float *)(p->weight + i_panel * p->panel_bytes);
    float sums[MAX_ROWS * PANEL] __attribute__((aligned(64)));
    ask_for_sums(p, rows, row, i_panel * PANEL);
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if MAX_ROWS > 4
        CASE(5) CASE(6)
#endif
#if MAX_ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
    put_sums(p, rows, row, i_panel * PANEL, sums);
}
#undef CASE
