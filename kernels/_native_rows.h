/* One row of each operation of _native_rows.c for one instruction set. Included once for each,
 * after _native_vector.h. What a vector does not fill is done number by number. */

static TARGET void NAME(norm_row)(const struct rows *r, ptrdiff_t row)
{
    const float *x = r->x + row * r->x_stride;
    float *out = r->out + row * r->size;
    ptrdiff_t i, j;
    NAME(vector) sums[4] = {{0}};
    float total = 0;
    for (i = 0; i + 4 * LANES <= r->size; i += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++)
            sums[v] += LOAD(x + i + v * LANES) * LOAD(x + i + v * LANES);
    sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (j = 0; j < LANES; j++)
        total += sums[0][j];
    for (; i < r->size; i++)
        total += x[i] * x[i];
    float scale = 1 / sqrtf(total / (float)r->size + r->epsilon);
    for (i = 0; i + LANES <= r->size; i += LANES)
        STORE(out + i, LOAD(x + i) * scale * LOAD(r->weight + i));
    for (; i < r->size; i++)
        out[i] = x[i] * scale * r->weight[i];
}

/* silu(g) = g / (1 + e^-g); gelu with tanh is g / (1 + e^-2z), z = sqrt(2 / pi) (g + 0.044715 g³). */
static ALWAYS_INLINE TARGET NAME(vector) NAME(activated)(NAME(vector) gate, int activation)
{
    NAME(vector) power = -gate;
    if (activation == GELU_TANH)
        power = gate * (-1.59576912f - 0.07135482f * gate * gate);
    return gate / (1.0f + NAME(exponential)(power));
}

static TARGET void NAME(gate_row)(const struct rows *r, ptrdiff_t row)
{
    const float *gate = r->x + row * r->x_stride, *up = gate + r->size;
    float *out = r->out + row * r->size;
    ptrdiff_t i = 0;
    for (; i + LANES <= r->size; i += LANES)
        STORE(out + i, NAME(activated)(LOAD(gate + i), r->activation) * LOAD(up + i));
    for (; i < r->size; i++)
        out[i] = NAME(activated)(FILLED(gate[i]), r->activation)[0] * up[i];
}

/* All heads of one token: (a, b) → (a cos + b sin, b cos + a sin); the sines carry their signs. */
static TARGET void NAME(rotate_row)(const struct rows *r, ptrdiff_t row)
{
    const float *cosines = r->cosines + row * r->table_stride;
    const float *sines = r->sines + row * r->table_stride;
    ptrdiff_t half = r->size / 2;
    for (ptrdiff_t head = 0; head < r->num_heads; head++) {
        float *a = r->out + row * r->x_stride + head * r->head_stride, *b = a + half;
        ptrdiff_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            NAME(vector) low = LOAD(a + i), high = LOAD(b + i);
            STORE(a + i, low * LOAD(cosines + i) + high * LOAD(sines + i));
            STORE(b + i, high * LOAD(cosines + half + i) + low * LOAD(sines + half + i));
        }
        for (; i < half; i++) {
            float low = a[i], high = b[i];
            a[i] = low * cosines[i] + high * sines[i];
            b[i] = high * cosines[half + i] + low * sines[half + i];
        }
    }
}

/* The highest of `count` numbers; NaN if there is any. */
static ALWAYS_INLINE TARGET float NAME(highest)(const float *x, ptrdiff_t count)
{
    NAME(vector) highest = FILLED(x[0]);
    NAME(ints) odd = {0};
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        NAME(vector) values = LOAD(x + i);
        odd |= values != values;
        highest = SELECT(values > highest, values, highest);
    }
    float found = x[0];
    for (int lane = 0; lane < LANES; lane++)
        found = odd[lane] ? NAN : highest[lane] > found ? highest[lane] : found;
    for (; i < count; i++)
        found = x[i] > found || x[i] != x[i] ? x[i] : found;
    return found;
}

/* The first place of the highest number, or of the first NaN: by parts, then within one. */
static TARGET void NAME(max_row)(const struct rows *r, ptrdiff_t row)
{
    const float *x = r->x + row * r->size;
    float best = x[0];
    ptrdiff_t part = 0, i;
    for (i = 0; i < r->size && best == best; i += MAX_PART) {
        ptrdiff_t left = r->size - i;
        float found = NAME(highest)(x + i, left < MAX_PART ? left : MAX_PART);
        if (found > best || found != found) {
            best = found;
            part = i;
        }
    }
    for (i = part; x[i] != best && x[i] == x[i];)
        i++;
    r->out[row] = best;
    r->ids[row] = i;
}
