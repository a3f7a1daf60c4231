/* Attention of a block of few queries, as of a decoded token; see _native_attention.c. Included
 * once for each instruction set, after _native_vector.h.
 *
 * With a query a lane most lanes would be idle. Here a lane is a token while scores are made, and
 * then a number of a head. Each sum runs in the order of _native_attention.h, so that a decoded
 * token gets the bits that it gets in a prompt. */

#define MAX_FEW (LANES / 2)
#define FEW_STRIP (LANES == 16 ? 4 : 2) /* queries whose sums fit the registers */

/* Four numbers of every fourth row, side by side. */
#if LANES == 16
#define WIDE __m512
#define WITH(name) _mm512_##name
#define ROWS(x) _mm512_insertf32x8(_mm512_castps256_ps512(HALF(x)), HALF((x) + 8 * dim), 1)
#elif LANES == 8
#define WIDE __m256
#define WITH(name) _mm256_##name
#define ROWS(x) HALF(x)
#endif
#define HALF(x)                                                                                    \
    _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x)), _mm_loadu_ps((x) + 4 * dim), 1)

/* Numbers k … k + 3 of LANES keys that follow each other: turned[i] has number i of each. */
static ALWAYS_INLINE TARGET void NAME(turn)(const float *keys, ptrdiff_t dim,
                                            NAME(vector) turned[4])
{
#if LANES == 4
    NAME(vector) row[4];
    for (int i = 0; i < 4; i++)
        row[i] = LOAD(keys + i * dim);
    for (int i = 0; i < 4; i++)
        turned[i] = (NAME(vector)){row[0][i], row[1][i], row[2][i], row[3][i]};
#else
    WIDE row[4], low[2], high[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        row[i] = ROWS(keys + i * dim);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        low[i] = WITH(unpacklo_ps)(row[2 * i], row[2 * i + 1]);
        high[i] = WITH(unpackhi_ps)(row[2 * i], row[2 * i + 1]);
    }
    turned[0] = (NAME(vector))WITH(shuffle_ps)(low[0], low[1], 0x44);
    turned[1] = (NAME(vector))WITH(shuffle_ps)(low[0], low[1], 0xee);
    turned[2] = (NAME(vector))WITH(shuffle_ps)(high[0], high[1], 0x44);
    turned[3] = (NAME(vector))WITH(shuffle_ps)(high[0], high[1], 0xee);
#endif
}

/* scores[query][token] of twice LANES tokens. Meanwhile it asks for as many keys of the cells
 * `ahead`, line after line. */
static ALWAYS_INLINE TARGET void NAME(score_few)(int num, const float *const keys[2],
                                                 const float *queries, ptrdiff_t dim, float *scores,
                                                 const float *const ahead[2])
{
    NAME(vector) sum[2][MAX_FEW], turned[4];
#pragma GCC unroll 8
    for (int q = 0; q < num; q++)
        sum[0][q] = sum[1][q] = (NAME(vector)){0};
    for (ptrdiff_t k = 0; k < dim; k += 4, queries += 4 * num) {
        ptrdiff_t line = k * LANES / 8;
        const float *next = line < dim ? ahead[0] + line * 16 : ahead[1] + (line - dim) * 16;
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++)
            __builtin_prefetch(next + i * 16, 0, 3);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            NAME(turn)(keys[half] + k, dim, turned);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 8
                for (int q = 0; q < num; q++)
                    sum[half][q] += turned[i] * queries[i * num + q];
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 8
        for (int q = 0; q < num; q++)
            STORE(scores + q * CHUNK_TOKENS + half * LANES, sum[half][q]);
}

static ALWAYS_INLINE TARGET void NAME(score_few_chunk)(const struct attention *a, int num,
                                                       struct block *b, const struct chunk *c,
                                                       float *scores)
{
    const float *ahead[2], *keys[2];
    ptrdiff_t num_tokens = c->num_pages * PAGE_TOKENS;
    for (ptrdiff_t token = 0; token < num_tokens; token += 2 * LANES) {
        for (int half = 0; half < 2; half++) {
            ptrdiff_t t = least(token + half * LANES, num_tokens - LANES);
            keys[half] = c->keys[t / PAGE_TOKENS] + t % PAGE_TOKENS * a->dim;
            ahead[half] = keys[half];
            if (t == token + half * LANES && t % PAGE_TOKENS == 0)
                ahead[half] = cell_ahead(a, &b->keys_ahead, 0, keys[half]);
        }
        NAME(score_few)(num, keys, b->queries, a->dim, scores + token, ahead);
    }
}

/* As NAME(weigh), but for the sums, which NAME(add_few) makes. */
static ALWAYS_INLINE TARGET void NAME(weigh_one)(const struct attention *a, struct block *b,
                                                 const struct chunk *c, int q, float *scores)
{
    NAME(ints) lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    ptrdiff_t begin = (c->first - c->base) / LANES * LANES, num = c->end - c->base;
    ptrdiff_t last = b->positions[q];
    int32_t first = (int32_t)(most(c->first, last - a->window + 1) - c->base);
    int32_t end = (int32_t)(least(c->end, last + 1) - c->base);
    NAME(vector) before = FILLED(b->highest[q]), highest = before;
    for (ptrdiff_t t = begin; t < num; t += LANES) {
        NAME(ints) token = lane + (int32_t)t;
        NAME(vector) s = LOAD(scores + t) * a->scale;
        if (a->softcap > 0)
            s = NAME(capped)(s, a->softcap);
        s = SELECT((token >= first) & (token < end), s, FILLED(UNSEEN));
        highest = SELECT(s > highest, s, highest);
        STORE(scores + t, s);
    }
    float most_seen = highest[0];
    for (int i = 1; i < LANES; i++)
        most_seen = highest[i] > most_seen ? highest[i] : most_seen;
    highest = FILLED(most_seen);
    for (ptrdiff_t t = begin; t < num; t += LANES)
        STORE(scores + t, NAME(exponential)(LOAD(scores + t) - highest));
    b->shares[q] = NAME(exponential)(before - highest)[0];
    b->highest[q] = most_seen;
}

/* out[query][vectors of dims] = out · share + weights · values of `num` queries from q on.
 * Meanwhile it asks for the same numbers of the cells `ahead`, one for each page. */
static ALWAYS_INLINE TARGET void NAME(add_few)(const struct attention *a, int num, int vectors,
                                               struct block *b, const struct chunk *c,
                                               const float *weights, ptrdiff_t q, ptrdiff_t d,
                                               const float *const *ahead)
{
    NAME(vector) sum[FEW_STRIP][4], value[4];
    float total[FEW_STRIP], *out = b->out + q * a->dim + d;
#pragma GCC unroll 4
    for (int i = 0; i < num; i++) {
        total[i] = b->sums[q + i] * b->shares[q + i];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[i][v] = LOAD(out + i * a->dim + v * LANES) * b->shares[q + i];
    }
    for (ptrdiff_t t = c->first - c->base, page_end; t < c->end - c->base; t = page_end) {
        const float *cell = c->keys[t / PAGE_TOKENS] + a->value_offset;
        const float *next = ahead[t / PAGE_TOKENS] + t % PAGE_TOKENS * a->dim + d;
        cell += t % PAGE_TOKENS * a->dim + d;
        page_end = least((t / PAGE_TOKENS + 1) * PAGE_TOKENS, c->end - c->base);
        for (; t < page_end; t++, cell += a->dim, next += a->dim) {
#pragma GCC unroll 4
            for (int at = 0; at < vectors * LANES; at += 16)
                __builtin_prefetch(next + at, 0, 3);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                value[v] = LOAD(cell + v * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < num; i++) {
                float weight = weights[(q + i) * CHUNK_TOKENS + t];
                total[i] += weight;
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++)
                    sum[i][v] += value[v] * weight;
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < num; i++) {
        if (d + vectors * LANES == a->dim)
            b->sums[q + i] = total[i];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            STORE(out + i * a->dim + v * LANES, sum[i][v]);
    }
}

static ALWAYS_INLINE TARGET void NAME(add_few_chunk)(const struct attention *a, int num,
                                                     struct block *b, const struct chunk *c,
                                                     const float *weights, ptrdiff_t q,
                                                     const float *const *ahead)
{
    ptrdiff_t d = 0;
    for (; d + 4 * LANES <= a->dim; d += 4 * LANES)
        NAME(add_few)(a, num, 4, b, c, weights, q, d, ahead);
    for (; d < a->dim; d += LANES)
        NAME(add_few)(a, num, 1, b, c, weights, q, d, ahead);
}

static ALWAYS_INLINE TARGET void NAME(attend_few)(const struct attention *a, int num,
                                                  struct block *b)
{
    float scores[MAX_FEW * CHUNK_TOKENS] __attribute__((aligned(64)));
    const float *ahead[CHUNK_PAGES];
    struct chunk c;
    gather_queries(a, b, num);
    for (c.end = b->span.first; next_chunk(a, b, &c, num - 1);) {
        NAME(score_few_chunk)(a, num, b, &c, scores);
        for (int q = 0; q < num; q++)
            NAME(weigh_one)(a, b, &c, q, scores + q * CHUNK_TOKENS);
        for (ptrdiff_t i = 0; i < c.num_pages; i++)
            ahead[i] = cell_ahead(a, &b->values_ahead, a->value_offset, c.keys[i]);
        int q = 0;
        for (; q + FEW_STRIP <= num; q += FEW_STRIP)
            NAME(add_few_chunk)(a, FEW_STRIP, b, &c, scores, q, q ? c.keys : ahead);
        if (q < num)
            NAME(add_few_chunk)(a, num % FEW_STRIP, b, &c, scores, q, q ? c.keys : ahead);
    }
    scatter_output(a, b, num);
}

#undef WIDE
#undef WITH
#undef ROWS
