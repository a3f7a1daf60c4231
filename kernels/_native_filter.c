/* Which logits a token may have: min_p, top_k, top_p and typical_p of each row, as two bounds.
 * kernels/token_filter.py says what they mean.
 *
 * A border is found by radix selection: keys as unsigned integers, a histogram of counts or masses
 * over each of their digits, the later ones over the few numbers that share the earlier digits.
 * Nothing is sorted, so that a flat row costs no more than a steep one. Once few numbers are left,
 * they are copied together, and the next filter need not read the row. */
#include "_native.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define MAX_DIGITS 4
#define MAX_BUCKETS 2048
#define MAX_FEW 4096
#define NUM_PARTS 256
#define MIN_TEMPERATURE 1e-30f

enum order { BY_LOGIT, BY_DISTANCE };
enum weight { COUNT, MASS };

/* Many numbers: few passes. Few numbers: small histograms, which are cleared and searched. */
static const struct digits {
    int count, bits[MAX_DIGITS], shifts[MAX_DIGITS];
} long_digits = {3, {11, 11, 10}, {21, 10, 0}}, short_digits = {4, {8, 8, 8, 8}, {24, 16, 8, 0}};

struct row {
    const float *x;
    ptrdiff_t size;
    float best, temperature, inverse_temperature, center;
    float low, high; /* of those that are kept so far */
    float *few;      /* room for MAX_FEW */
};

struct limits {
    double min_p, top_p, typical_p;
    int64_t top_k;
};

struct filters {
    const float *x, *best, *temperature, *min_p, *top_p, *typical_p;
    const int64_t *top_k;
    float *low, *high;
    ptrdiff_t num_rows, size;
    int level;
};

static double total(const double *buckets, int count)
{
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += buckets[i];
    return sum;
}

/* The bucket in which `before` plus what lies above reaches `limit`; the last one if none does.
 * `before` becomes what lies above it. */
static uint32_t walk_down(const double *buckets, int count, double *before, double limit)
{
    double above = *before;
    int found = 0;
    for (int i = count - 1; i >= 0; i--) {
        if (buckets[i] <= 0)
            continue;
        found = i;
        *before = above;
        above += buckets[i];
        if (above >= limit)
            break;
    }
    return (uint32_t)found;
}

static float key_of(uint32_t ordered)
{
    uint32_t bits = ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered;
    float key;
    memcpy(&key, &bits, sizeof key);
    return key;
}

#define PER_LEVEL "_native_filter.h"
#include "_native_levels.h"

typedef void (*filter_fn)(struct row *r, const struct limits *limits);
static const filter_fn filter_rows[NUM_LEVELS] = {
    filter_row_portable,
#if defined(__x86_64__)
    filter_row_avx2,
    filter_row_avx512,
#endif
};

static void filter_one(void *argument, ptrdiff_t i)
{
    const struct filters *f = argument;
    float temperature = f->temperature[i];
    if (!(temperature > MIN_TEMPERATURE))
        temperature = MIN_TEMPERATURE;
    float few[MAX_FEW];
    struct row r = {.x = f->x + i * f->size, .size = f->size, .best = f->best[i],
                    .temperature = temperature, .inverse_temperature = 1 / temperature,
                    .low = -FLT_MAX, .high = INFINITY, .few = few};
    struct limits limits = {f->min_p[i], f->top_p[i], f->typical_p[i], f->top_k[i]};
    if (isfinite(r.best))
        filter_rows[f->level](&r, &limits);
    f->low[i] = r.low;
    f->high[i] = r.high;
}

PyObject *native_filter(PyObject *module, PyObject *args)
{
    enum { X, BEST, TEMPERATURE, MIN_P, TOP_K, TOP_P, TYPICAL_P, LOW, HIGH, NUM };
    Py_buffer b[NUM];
    struct filters f = {.level = best_level};
    int num_threads, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*w*w*ni|i", &b[X], &b[BEST], &b[TEMPERATURE],
                          &b[MIN_P], &b[TOP_K], &b[TOP_P], &b[TYPICAL_P], &b[LOW], &b[HIGH],
                          &f.size, &num_threads, &f.level))
        return NULL;
    valid = check_level(f.level) && check_row_size(f.size);
    f.num_rows = valid ? b[X].len / 4 / f.size : 0;
    for (int i = BEST; i < NUM; i++)
        valid = valid && check_row_values(&b[i], f.num_rows, i == TOP_K ? 8 : 4);
    if (valid) {
        f.x = b[X].buf, f.best = b[BEST].buf, f.temperature = b[TEMPERATURE].buf;
        f.min_p = b[MIN_P].buf, f.top_k = b[TOP_K].buf, f.top_p = b[TOP_P].buf;
        f.typical_p = b[TYPICAL_P].buf, f.low = b[LOW].buf, f.high = b[HIGH].buf;
        Py_BEGIN_ALLOW_THREADS
        run_tasks(filter_one, &f, f.num_rows, num_threads);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < NUM; i++)
        PyBuffer_Release(&b[i]);
    return valid ? Py_NewRef(Py_None) : NULL;
}
