/* Attention of one block of queries for one instruction set; see _native_attention.c. Included
 * once for each, after _native_vector.h.
 *
 * A lane is a query: scores are [token][lane], so that the softmax needs nothing across lanes, and
 * keys and values are read as they lie in their pages, number by number. */

/* Scores of 8 tokens, one product of [8, dim] keys and [dim, lanes] queries. Meanwhile it asks for
 * a line in each step, of the cells `ahead` in turn. */
static ALWAYS_INLINE TARGET void NAME(score)(int vectors, const float *keys, const float *queries,
                                             ptrdiff_t dim, float *scores,
                                             const float *const *ahead)
{
    NAME(vector) sum[8][2], query[2];
    const float *row[3] = {keys, keys + 3 * dim, keys + 6 * dim};
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++)
        sum[t][0] = sum[t][1] = (NAME(vector)){0};
    for (ptrdiff_t k = 0; k < dim; k++, queries += vectors * LANES) {
        __builtin_prefetch(ahead[k % CELLS_AHEAD] + k / CELLS_AHEAD * 16, 0, 2);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            query[v] = LOAD(queries + v * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) {
            float key = row[t / 3][t % 3 * dim];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sum[t][v] += query[v] * key;
        }
        row[0]++, row[1]++, row[2]++;
    }
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            STORE(scores + (t * vectors + v) * LANES, sum[t][v]);
}

static ALWAYS_INLINE TARGET void NAME(score_chunk)(const struct attention *a, int vectors,
                                                   struct block *b, const struct chunk *c,
                                                   float *scores)
{
    const float *ahead[CELLS_AHEAD];
    for (ptrdiff_t i = 0; i < 2 * c->num_pages; i++, scores += 8 * vectors * LANES) {
        const float *keys = c->keys[i / 2] + i % 2 * 8 * a->dim;
        if (i % CELLS_AHEAD == 0)
            look_ahead(a, b, keys, c->num_pages - i / 2, ahead);
        NAME(score)(vectors, keys, b->queries, a->dim, scores, ahead);
        for (int cell = 0; cell < CELLS_AHEAD; cell++)
            ahead[cell] += 16 / CELLS_AHEAD * a->dim;
    }
}

/* c tanh(s / c) = c - 2 c / (e^(2 s / c) + 1) */
static ALWAYS_INLINE TARGET NAME(vector) NAME(capped)(NAME(vector) s, float cap)
{
    return cap - 2.0f * cap / (NAME(exponential)(s * (2.0f / cap)) + 1.0f);
}

/* Scores become weights e^(score - highest); sums and the share that earlier output keeps follow.
 * A lane sees tokens of its window only. UNSEEN is finite: where a lane has seen nothing yet, all
 * weighs the same until its first token makes the share of that nothing. */
static ALWAYS_INLINE TARGET void NAME(weigh)(const struct attention *a, int vectors,
                                             struct block *b, const struct chunk *c, float *scores)
{
    for (int v = 0; v < vectors; v++) {
        float *column = scores + v * LANES;
        NAME(ints) last = (NAME(ints))LOAD((const float *)b->positions + v * LANES);
        NAME(vector) before = LOAD(b->highest + v * LANES), highest = before;
        for (ptrdiff_t t = c->first; t < c->end; t++) {
            float *at = column + (t - c->base) * vectors * LANES;
            NAME(vector) s = LOAD(at) * a->scale;
            if (a->softcap > 0)
                s = NAME(capped)(s, a->softcap);
            if (c->is_edge) {
                NAME(ints) token = (NAME(ints)){0} + (int32_t)t;
                NAME(ints) seen = (token <= last) & (token > last - (int32_t)a->window);
                s = SELECT(seen, s, FILLED(UNSEEN));
            }
            highest = SELECT(s > highest, s, highest);
            STORE(at, s);
        }
        NAME(vector) share = NAME(exponential)(before - highest);
        NAME(vector) sum = LOAD(b->sums + v * LANES) * share;
        for (ptrdiff_t t = c->first; t < c->end; t++) {
            float *at = column + (t - c->base) * vectors * LANES;
            NAME(vector) weight = NAME(exponential)(LOAD(at) - highest);
            sum += weight;
            STORE(at, weight);
        }
        STORE(b->highest + v * LANES, highest);
        STORE(b->shares + v * LANES, share);
        STORE(b->sums + v * LANES, sum);
    }
}

/* out[8 dims][lanes] = out · share + values · weights. */
static ALWAYS_INLINE TARGET void NAME(add_values)(const struct attention *a, int vectors,
                                                  struct block *b, const struct chunk *c,
                                                  const float *weights, ptrdiff_t d)
{
    NAME(vector) sum[8][2], weight[2];
    float *out = b->out + d * vectors * LANES;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = LOAD(out + (i * vectors + v) * LANES) * LOAD(b->shares + v * LANES);
    for (ptrdiff_t t = c->first; t < c->end; t++) {
        ptrdiff_t i_page = (t - c->base) / PAGE_TOKENS;
        const float *value = c->keys[i_page] + a->value_offset + t % PAGE_TOKENS * a->dim + d;
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            weight[v] = LOAD(weights + ((t - c->base) * vectors + v) * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sum[i][v] += weight[v] * value[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            STORE(out + (i * vectors + v) * LANES, sum[i][v]);
}

static ALWAYS_INLINE TARGET void NAME(add_chunk)(const struct attention *a, int vectors,
                                                 struct block *b, const struct chunk *c,
                                                 const float *weights)
{
    for (ptrdiff_t d = 0; d < a->dim; d += 8)
        NAME(add_values)(a, vectors, b, c, weights, d);
}

static ALWAYS_INLINE TARGET void NAME(attend_lanes)(const struct attention *a, int vectors,
                                                    struct block *b)
{
    float scores[CHUNK_TOKENS * 2 * LANES] __attribute__((aligned(64)));
    struct chunk c;
    gather_queries(a, b, vectors * LANES);
    for (c.end = b->span.first; next_chunk(a, b, &c, vectors * LANES - 1);) {
        NAME(score_chunk)(a, vectors, b, &c, scores);
        NAME(weigh)(a, vectors, b, &c, scores);
        NAME(add_chunk)(a, vectors, b, &c, scores);
    }
    scatter_output(a, b, vectors * LANES);
}

#include "_native_attention_few.h"

#define CASE(num)                                                                                  \
    case num:                                                                                      \
        NAME(attend_few)(a, num, b);                                                               \
        return;

static TARGET void NAME(attend)(const struct attention *a, struct block *b)
{
    b->is_small = b->span.num_queries <= MAX_FEW && a->dim % LANES == 0;
    if (b->is_small)
        switch (b->span.num_queries) {
            CASE(1) CASE(2)
#if LANES > 4
            CASE(3) CASE(4)
#endif
#if LANES > 8
            CASE(5) CASE(6) CASE(7) CASE(8)
#endif
        }
    if (b->span.num_queries <= LANES)
        NAME(attend_lanes)(a, 1, b);
    else
        NAME(attend_lanes)(a, 2, b);
}
#undef CASE
