/* Tiles of a quantised product for one instruction set. Included once for each, with
 *     NAME(x)   the name of x for this set
 *     TARGET    its function attribute
 *     LANES     columns a vector
 *     MAX_ROWS  rows of a tile
 *     WIDTH_4, WIDTH_8  vectors of a strip whose sums fit the registers, by bits
 * and, for the vectors of this set,
 *     vector, bytes, sums           floats; 4 LANES bytes; integer sums of LANES columns
 *     low, high                     nibbles of bytes
 *     add_4, add_8                  sums + the products of LANES times 4 numbers with 4 factors
 *     total_4, total_8              sums as floats
 *     half                          floats from 16 bits each */

/* sums[row][PANEL] of the columns from `first` on; counts and bits are constants where this is
 * inlined. A group's integers are summed exactly, its share is added in float32. */
static ALWAYS_INLINE TARGET void NAME(strip)(int bits, int rows, int vectors,
                                             const struct quantized *q, const int8_t *x,
                                             const float *factors, const char *block, int first,
                                             const struct lines *ahead, float *sums)
{
    NAME(vector) sum[MAX_ROWS][2];
    const char *line = ahead->first;
    ptrdiff_t lines_left = ahead->count;
    ptrdiff_t lines = q->block_bytes / 64;
    int height = (int)q->panels.height;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[r][v] = (NAME(vector)){0};
    for (ptrdiff_t g = 0; g < q->num_groups; g++, block += q->block_bytes) {
        NAME(sums) total[MAX_ROWS][2];
        const char *values = block + q->head_bytes + first * 4;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                total[r][v] = (NAME(sums)){0};
        if (lines_left > 0) {
            lines_left -= lines;
            for (ptrdiff_t i = 0; i < lines; i++, line += 64)
                __builtin_prefetch(line, 0, 2);
        }
#pragma GCC unroll 8
        for (int i = 0; i < bits; i++, values += PANEL * 4)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                NAME(bytes) number = *(const NAME(bytes) *)(values + v * LANES * 4);
                if (bits == 4) {
                    NAME(bytes) low = NAME(low)(number), high = NAME(high)(number);
#pragma GCC unroll 16
                    for (int r = 0; r < rows; r++) {
                        const int8_t *factor = x + r * GROUP + 8 * i;
                        total[r][v] = NAME(add_4)(total[r][v], low, factor);
                        total[r][v] = NAME(add_4)(total[r][v], high, factor + 4);
                    }
                } else
#pragma GCC unroll 16
                    for (int r = 0; r < rows; r++)
                        total[r][v] = NAME(add_8)(total[r][v], number, x + r * GROUP + 4 * i);
            }
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            const char *head = block + (first + v * LANES) * 2;
            NAME(vector) scale = NAME(half)(head);
            NAME(vector) zero = (NAME(vector)){0} + (float)(1 << (bits - 1));
            if (q->has_zeros)
                zero = NAME(half)(head + PANEL * 2);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                NAME(vector) n = bits == 4 ? NAME(total_4)(total[r][v]) : NAME(total_8)(total[r][v]);
                n -= zero * factors[2 * r + 1];
                sum[r][v] += n * (scale * factors[2 * r]);
            }
        }
        x += height * GROUP;
        factors += height * 2;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            __builtin_memcpy(sums + r * PANEL + first + v * LANES, &sum[r][v], LANES * 4);
}

static ALWAYS_INLINE TARGET void NAME(strips)(int bits, int rows, const struct quantized *q,
                                              const int8_t *x, const float *factors,
                                              const char *block, const struct lines *ahead,
                                              float *sums)
{
    const struct lines none = {NULL, 0};
    int vectors = bits == 4 ? WIDTH_4 : WIDTH_8;
    for (int first = 0; first < PANEL; first += vectors * LANES)
        NAME(strip)(bits, rows, vectors, q, x, factors, block, first, first ? &none : ahead, sums);
}

#define CASE(rows)                                                                                 \
    case rows:                                                                                     \
        NAME(strips)(bits, rows, q, x, factors, block, ahead, sums);                               \
        break;

static ALWAYS_INLINE TARGET void NAME(tile)(int bits, const struct panels *p, int rows,
                                            ptrdiff_t row, ptrdiff_t panel,
                                            const struct lines *ahead)
{
    const struct quantized *q = (const struct quantized *)p;
    const int8_t *x = q->x + row * q->num_groups * GROUP;
    const float *factors = q->factors + row * q->num_groups * 2;
    const char *block = p->weight + panel * p->panel_bytes;
    float sums[MAX_ROWS * PANEL] __attribute__((aligned(64)));
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if MAX_ROWS > 4
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
    }
    put_sums(p, rows, row, panel * PANEL, sums);
}
#undef CASE

static TARGET void NAME(tile_of_4)(const struct panels *p, int rows, ptrdiff_t row,
                                   ptrdiff_t panel, const struct lines *ahead)
{
    NAME(tile)(4, p, rows, row, panel, ahead);
}

static TARGET void NAME(tile_of_8)(const struct panels *p, int rows, ptrdiff_t row,
                                   ptrdiff_t panel, const struct lines *ahead)
{
    NAME(tile)(8, p, rows, row, panel, ahead);
}

/* One group of a row: factors[0] = the highest magnitude / 127 and factors[1] = the sum of the
 * integers. What is not finite makes all results of the row NaN. */
static TARGET void NAME(quantize)(const float *x, int count, int8_t *integers, float *factors)
{
    float padded[GROUP] = {0}, highest;
    int32_t bits[GROUP], most = 0, sum = 0;
    memcpy(padded, x, count == GROUP ? sizeof padded : (size_t)count * sizeof *x);
    memcpy(bits, padded, sizeof bits);
    for (int i = 0; i < GROUP; i++) { /* magnitudes are ordered like their bits */
        int32_t magnitude = bits[i] & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    memcpy(&highest, &most, sizeof highest);
    if (most >= 0x7f800000 || highest <= LEAST) {
        memset(integers, 0, GROUP);
        factors[0] = most >= 0x7f800000 ? __builtin_nanf("") : 0;
        factors[1] = 0;
        return;
    }
    float inverse = 127 / highest;
    for (int i = 0; i < GROUP; i++) {
        int32_t integer = (int32_t)__builtin_rintf(padded[i] * inverse);
        integers[i] = (int8_t)integer;
        sum += integer;
    }
    factors[0] = highest / 127;
    factors[1] = (float)sum;
}
