/* One row of _native_scores.c for one instruction set. Included once for each, after
 * _native_vector.h. */

/* The highest number of each part, and of the row. */
static TARGET float NAME(part_maxima)(const struct scored *s, float *maxima)
{
    float best = -INFINITY;
    for (ptrdiff_t part = 0, i = 0; i < s->size; part++) {
        ptrdiff_t end = s->size - i < s->part ? s->size : i + s->part;
        NAME(vector) highest = FILLED(-INFINITY);
        float found = -INFINITY;
        for (; i + LANES <= end; i += LANES) {
            NAME(vector) x = LOAD(s->x + i);
            highest = SELECT(x > highest, x, highest);
        }
        for (; i < end; i++)
            found = s->x[i] > found ? s->x[i] : found;
        for (int lane = 0; lane < LANES; lane++)
            found = highest[lane] > found ? highest[lane] : found;
        maxima[part] = found;
        best = found > best ? found : best;
    }
    return best;
}

/* Sum of e^(x - best); `rank`: how many numbers are at least `chosen`. */
static TARGET double NAME(mass_and_rank)(const struct scored *s, float best, float chosen,
                                         int64_t *rank)
{
    double mass = 0;
    NAME(ints) counts = {0};
    ptrdiff_t i = 0;
    while (i + LANES <= s->size) {
        NAME(vector) masses = {0};
        for (int part = 0; part < 32 && i + LANES <= s->size; part++, i += LANES) {
            NAME(vector) x = LOAD(s->x + i);
            masses += NAME(exponential)(x - best);
            counts -= x >= chosen; /* a true lane is -1 */
        }
        for (int lane = 0; lane < LANES; lane++)
            mass += (double)masses[lane];
    }
    *rank = 0;
    for (int lane = 0; lane < LANES; lane++)
        *rank += counts[lane];
    for (; i < s->size; i++) {
        mass += (double)NAME(exponential)(FILLED(s->x[i] - best))[0];
        *rank += s->x[i] >= chosen;
    }
    return mass;
}

/* The best of a part that are better than `lowest` of those found so far. */
static TARGET void NAME(search)(const struct scored *s, struct top *top, ptrdiff_t i,
                                ptrdiff_t end)
{
    for (; i + LANES <= end; i += LANES) {
        NAME(ints) better = LOAD(s->x + i) >= top->lowest;
        if (NAME(any)(better))
            for (int lane = 0; lane < LANES; lane++)
                insert(top, s->x[i + lane], i + lane);
    }
    for (; i < end; i++)
        insert(top, s->x[i], i);
}

static TARGET void NAME(score_row)(const struct scored *s, struct top *top)
{
    float maxima[MAX_PARTS];
    float best = NAME(part_maxima)(s, maxima), chosen = s->x[s->id];
    double normaliser = (double)best + log(NAME(mass_and_rank)(s, best, chosen, s->rank));
    *s->logprob = (float)((double)chosen - normaliser);
    ptrdiff_t num_parts = (s->size + s->part - 1) / s->part;
    top->lowest = nth_highest(maxima, num_parts, top->size);
    for (ptrdiff_t part = 0; part < num_parts; part++)
        if (maxima[part] >= top->lowest) {
            ptrdiff_t i = part * s->part;
            NAME(search)(s, top, i, s->size - i < s->part ? s->size : i + s->part);
        }
    for (ptrdiff_t i = 0; i < top->count; i++)
        top->values[i] = (float)((double)top->values[i] - normaliser);
}
