/* One row of _native_filter.c for one instruction set. Included once for each, after
 * _native_vector.h. */

typedef uint32_t NAME(uints) __attribute__((vector_size(LANES * 4)));

static ALWAYS_INLINE TARGET int NAME(any)(NAME(ints) mask)
{
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++)
        found |= mask[lane];
    return found;
}

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
                                                    enum weight weight, int digit,
                                                    uint32_t prefix, double *buckets)
{
    int shift = shifts[digit];
    uint32_t digit_mask = (uint32_t)num_buckets(digit) - 1;
    for (ptrdiff_t i = 0; i < r->size; i += LANES) {
        NAME(vector) x = NAME(numbers)(r, i);
        NAME(ints) counts = x >= r->low;
        if (!NAME(any)(counts))
            continue;
        NAME(uints) ordered = NAME(ordered)(NAME(key)(r, x, order));
        if (digit > 0) {
            counts &= ordered >> shifts[digit - 1] == prefix;
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
    double buckets[MAX_BUCKETS], before = 0, limit = share;
    uint32_t prefix = 0;
    for (int digit = 0; digit < NUM_DIGITS; digit++) {
        memset(buckets, 0, sizeof buckets);
        NAME(count_digits)(r, order, weight, digit, prefix, buckets);
        if (digit == 0 && weight == MASS)
            limit = share * total(buckets, num_buckets(digit));
        prefix = prefix << digit_bits[digit] |
                 walk_down(buckets, num_buckets(digit), &before, limit);
    }
    return key_of(prefix);
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
    if (limits->top_k > 0 && limits->top_k < r->size)
        r->low = NAME(border)(r, BY_LOGIT, COUNT, (double)limits->top_k);
    if (limits->top_p < 1)
        r->low = NAME(border)(r, BY_LOGIT, MASS, limits->top_p);
    if (limits->typical_p < 1) {
        r->center = NAME(mean)(r);
        NAME(narrow)(r, NAME(border)(r, BY_DISTANCE, MASS, limits->typical_p));
    }
}
