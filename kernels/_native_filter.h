/* One row of _native_filter.c for one instruction set. Included once for each, after
 * _native_vector.h. */

typedef uint32_t NAME(uints) __attribute__((vector_size(LANES * 4)));

/* Numbers of a row from `i` on; what lies beyond its end is below every bound. */
static ALWAYS_INLINE TARGET NAME(vector) NAME(numbers)(const struct row *r, ptrdiff_t i)
{
    if (i + LANES <= r->size)
        return LOAD(r->x + i);
    NAME(vector) numbers = FILLED(-INFINITY);
    for (int lane = 0; i + lane < r->size; lane++)
        numbers[lane] = r->x[i + lane];
    return numbers;
}

static ALWAYS_INLINE TARGET NAME(vector) NAME(scaled)(const struct row *r, NAME(vector) x)
{
    return (x - r->best) * r->inverse_temperature;
}

static ALWAYS_INLINE TARGET NAME(vector) NAME(key)(const struct row *r, NAME(vector) x,
                                                   enum order order)
{
    if (order == BY_LOGIT)
        return x;
    NAME(vector) distance = x - r->center; /* nothing that could be fused, so always the same */
    return SELECT(distance > 0.0f, -distance, distance);
}

/* The same order as unsigned integers. */
static ALWAYS_INLINE TARGET NAME(uints) NAME(ordered)(NAME(vector) key)
{
    NAME(ints) bits = (NAME(ints))key;
    return (NAME(uints))(bits ^ (bits >> 31 | INT32_MIN));
}

/* Adds the weights of numbers whose ordered key begins with `prefix` up to their next digit. */
static ALWAYS_INLINE TARGET void NAME(count_digits)(const struct row *r, enum order order,
                                                    enum weight weight,
                                                    const struct digits *digits, int digit,
                                                    uint32_t prefix, double *buckets)
{
    int shift = digits->shifts[digit];
    uint32_t digit_mask = (1u << digits->bits[digit]) - 1;
    for (ptrdiff_t i = 0; i < r->size; i += LANES) {
        NAME(vector) x = NAME(numbers)(r, i);
        NAME(ints) counts = x >= r->low;
        if (!NAME(any)(counts))
            continue;
        NAME(uints) ordered = NAME(ordered)(NAME(key)(r, x, order));
        if (digit > 0) {
            counts &= ordered >> digits->shifts[digit - 1] == prefix;
            if (!NAME(any)(counts))
                continue;
        }
        NAME(uints) places = (ordered >> shift) & digit_mask;
        NAME(vector) weights = FILLED(1.0f);
        if (weight == MASS)
            weights = NAME(exponential)(NAME(scaled)(r, x));
        for (int lane = 0; lane < LANES; lane++)
            if (counts[lane])
                buckets[places[lane]] += (double)weights[lane];
    }
}

/* The key of the last number that is kept: from the best down, while what came before weighs less
 * than `share` (of the whole mass) or than so many. One digit of the key after the other. */
static ALWAYS_INLINE TARGET float NAME(border)(const struct row *r, enum order order,
                                               enum weight weight, double share)
{
    const struct digits *digits = r->size > MAX_FEW ? &long_digits : &short_digits;
    double buckets[MAX_BUCKETS], before = 0, limit = share;
    uint32_t prefix = 0;
    for (int digit = 0; digit < digits->count; digit++) {
        int num_buckets = 1 << digits->bits[digit];
        memset(buckets, 0, (size_t)num_buckets * sizeof *buckets);
        NAME(count_digits)(r, order, weight, digits, digit, prefix, buckets);
        if (digit == 0 && weight == MASS)
            limit = share * total(buckets, num_buckets);
        prefix = prefix << digits->bits[digit] |
                 walk_down(buckets, num_buckets, &before, limit);
    }
    return key_of(prefix);
}

/* Copies together what is kept, if it is not much. */
static TARGET void NAME(gather)(struct row *r)
{
    ptrdiff_t count = 0;
    if (r->size <= MAX_FEW)
        return;
    for (ptrdiff_t i = 0; i < r->size; i += LANES) {
        NAME(vector) x = NAME(numbers)(r, i);
        NAME(ints) kept = x >= r->low;
        if (!NAME(any)(kept))
            continue;
        if (count > MAX_FEW - LANES)
            return;
        for (int lane = 0; lane < LANES; lane++) {
            r->few[count] = x[lane];
            count -= kept[lane]; /* a true lane is -1 */
        }
    }
    r->x = r->few;
    r->size = count;
}

/* A number that at least `top_k` numbers reach: so many parts of the row have one. */
static TARGET float NAME(reached)(const struct row *r, int64_t top_k)
{
    float maxima[NUM_PARTS];
    ptrdiff_t part = (r->size / NUM_PARTS) / LANES * LANES;
    for (ptrdiff_t i = 0; i < NUM_PARTS; i++) {
        NAME(vector) highest = FILLED(-INFINITY);
        for (ptrdiff_t j = i * part; j < (i + 1) * part; j += LANES) {
            NAME(vector) x = LOAD(r->x + j);
            highest = SELECT(x > highest, x, highest);
        }
        maxima[i] = -INFINITY;
        for (int lane = 0; lane < LANES; lane++)
            maxima[i] = highest[lane] > maxima[i] ? highest[lane] : maxima[i];
    }
    struct row parts = {.x = maxima, .size = NUM_PARTS, .low = -INFINITY};
    return NAME(border)(&parts, BY_LOGIT, COUNT, (double)top_k);
}

static TARGET void NAME(keep_top)(struct row *r, int64_t top_k)
{
    if (r->size > MAX_FEW && top_k <= NUM_PARTS) {
        float reached = NAME(reached)(r, top_k);
        r->low = reached > r->low ? reached : r->low;
    }
    NAME(gather)(r);
    if (top_k < r->size)
        r->low = NAME(border)(r, BY_LOGIT, COUNT, (double)top_k);
    NAME(gather)(r);
}

/* The mean logit: where a token is as surprising as a token is on average. */
static TARGET float NAME(mean)(const struct row *r)
{
    double mass = 0, moment = 0;
    for (ptrdiff_t i = 0; i < r->size;) {
        NAME(vector) masses = {0}, moments = {0};
        for (int part = 0; part < 32 && i < r->size; part++, i += LANES) {
            NAME(vector) x = NAME(numbers)(r, i), scaled = NAME(scaled)(r, x);
            scaled = SELECT(scaled < -87.0f, FILLED(-87.0f), scaled);
            NAME(vector) weights = NAME(exponential)(scaled);
            weights = SELECT(x >= r->low, weights, FILLED(0.0f));
            masses += weights;
            moments += weights * scaled;
        }
        for (int lane = 0; lane < LANES; lane++) {
            mass += (double)masses[lane];
            moment += (double)moments[lane];
        }
    }
    return (float)(r->best + r->temperature * (moment / mass));
}

/* Lowest and highest number whose key is at least `key`. */
static TARGET void NAME(narrow)(struct row *r, float key)
{
    NAME(vector) low = FILLED(INFINITY), high = FILLED(-INFINITY);
    for (ptrdiff_t i = 0; i < r->size; i += LANES) {
        NAME(vector) x = NAME(numbers)(r, i);
        NAME(ints) kept = (x >= r->low) & (NAME(key)(r, x, BY_DISTANCE) >= key);
        low = SELECT(kept & (x < low), x, low);
        high = SELECT(kept & (x > high), x, high);
    }
    float lowest = INFINITY, highest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) {
        lowest = low[lane] < lowest ? low[lane] : lowest;
        highest = high[lane] > highest ? high[lane] : highest;
    }
    r->low = lowest;
    r->high = highest;
}

static TARGET void NAME(filter_row)(struct row *r, const struct limits *limits)
{
    if (limits->min_p > 0) {
        double bound = r->best + r->temperature * log(limits->min_p);
        r->low = bound > r->low ? (float)bound : r->low;
    }
    if (limits->top_k > 0)
        NAME(keep_top)(r, limits->top_k);
    else if (limits->min_p > 0)
        NAME(gather)(r);
    if (limits->top_p < 1)
        r->low = NAME(border)(r, BY_LOGIT, MASS, limits->top_p);
    if (limits->typical_p < 1) {
        NAME(gather)(r);
        r->center = NAME(mean)(r);
        NAME(narrow)(r, NAME(border)(r, BY_DISTANCE, MASS, limits->typical_p));
    }
}
