/* One row of _native_gumbel.c for one instruction set. Included once for each, after
 * _native_vector.h. */

typedef uint64_t NAME(words) __attribute__((vector_size(LANES * 4))); /* half of the lanes */

static ALWAYS_INLINE TARGET NAME(words) NAME(scramble)(NAME(words) x)
{
    x = (x ^ x >> 30) * SCRAMBLE_1;
    return (x ^ x >> 27) * SCRAMBLE_2;
}

/* At least the noise of the tokens at `states` (low half, high half). With h the top 32 bits of a
 * state, v ≥ h 2^-32 and noise ≤ -ln v; a float's bits are at most its logarithm, in steps of
 * 2^-23. */
static ALWAYS_INLINE TARGET NAME(vector) NAME(noise_bound)(const NAME(words) states[2])
{
    union {
        NAME(ints) all;
        int32_t one[LANES];
    } high;
    for (int half = 0; half < 2; half++) {
        NAME(words) z = NAME(scramble)(states[half]) >> 33; /* 31 bits: a signed integer */
        for (int lane = 0; lane < LANES / 2; lane++)
            high.one[half * (LANES / 2) + lane] = (int32_t)z[lane];
    }
    NAME(ints) bits = (NAME(ints))__builtin_convertvector(high.all, NAME(vector));
    NAME(vector) logarithm = __builtin_convertvector(bits, NAME(vector)) * 0x1p-23f - 127.0f;
    return (31.0f - logarithm) * 0.69314718f;
}

/* Draws from x[i, i + LANES), of which only `count` are in the row. */
static ALWAYS_INLINE TARGET void NAME(draw_part)(const struct draw *d, struct drawn *drawn,
                                                 ptrdiff_t i, NAME(vector) x,
                                                 const NAME(words) states[2])
{
    NAME(vector) scaled = (x - d->best) * d->inverse_temperature;
    NAME(ints) may_win = (x >= d->low) & (x <= d->high) &
                         (scaled + MAX_NOISE >= (float)drawn->score - SLACK);
    if (!NAME(any)(may_win))
        return;
    NAME(vector) bound = scaled + NAME(noise_bound)(states);
    may_win &= bound >= (float)drawn->score - SLACK;
    if (!NAME(any)(may_win))
        return;
    for (int lane = 0; lane < LANES; lane++)
        if (may_win[lane])
            try_token(d, drawn, i + lane);
}

static TARGET void NAME(draw_row)(const struct draw *d, struct drawn *drawn)
{
    NAME(words) states[2];
    for (int lane = 0; lane < LANES; lane++)
        states[lane * 2 / LANES][lane % (LANES / 2)] = d->key + (uint64_t)lane * GOLDEN;
    ptrdiff_t i = 0;
    for (; i + LANES <= d->size; i += LANES) {
        NAME(draw_part)(d, drawn, i, LOAD(d->x + i), states);
        states[0] += LANES * GOLDEN;
        states[1] += LANES * GOLDEN;
    }
    for (; i < d->size; i++)
        try_token(d, drawn, i);
}
