/* Draws one token from each row: the highest (x - best) / temperature + noise within the row's
 * bounds. kernels/gumbel_max.py defines the noise.
 *
 * The noise of a token costs two logarithms, in double precision. A bound of it costs a few integer
 * instructions, and none reaches 23; so nearly all tokens are passed over, and the result is the
 * same. */
#include "_native.h"

#include <math.h>

#define GOLDEN 0x9e3779b97f4a7c15u
#define SCRAMBLE_1 0xbf58476d1ce4e5b9u
#define SCRAMBLE_2 0x94d049bb133111ebu
#define MAX_NOISE 22.88f /* -ln(-ln(1 - 2^-33)) */
#define SLACK 1e-3f      /* more than what float32 rounds off */
#define MIN_TEMPERATURE 1e-30f

struct draw {
    const float *x;
    ptrdiff_t size;
    uint64_t key;
    float best, temperature, inverse_temperature, low, high;
};

struct drawn {
    double score;
    int64_t id;
};

struct draws {
    const float *x, *best, *temperature, *low, *high;
    const int64_t *keys;
    int64_t *ids;
    ptrdiff_t size;
    int level;
};

static double noise_of(uint64_t state)
{
    state = (state ^ state >> 30) * SCRAMBLE_1;
    state = (state ^ state >> 27) * SCRAMBLE_2;
    double v = ((double)(state >> 32) + 0.5) * 0x1p-32;
    return -log(-log1p(-v));
}

/* Ids come in rising order: of equal scores the first one stays. */
static void try_token(const struct draw *d, struct drawn *drawn, ptrdiff_t id)
{
    float x = d->x[id];
    if (!(x >= d->low && x <= d->high))
        return;
    double scaled = ((double)x - (double)d->best) / (double)d->temperature;
    double score = scaled + noise_of(d->key + (uint64_t)id * GOLDEN);
    if (score > drawn->score) {
        drawn->score = score;
        drawn->id = id;
    }
}

#define PER_LEVEL "_native_gumbel.h"
#include "_native_levels.h"

typedef void (*draw_fn)(const struct draw *d, struct drawn *drawn);
static const draw_fn draw_rows[NUM_LEVELS] = {
    draw_row_portable,
#if defined(__x86_64__)
    draw_row_avx2,
    draw_row_avx512,
#endif
};

static void draw_one(void *argument, ptrdiff_t i)
{
    const struct draws *all = argument;
    float temperature = all->temperature[i];
    if (!(temperature > MIN_TEMPERATURE))
        temperature = MIN_TEMPERATURE;
    struct draw d = {all->x + i * all->size, all->size, (uint64_t)all->keys[i], all->best[i],
                     temperature, 1 / temperature, all->low[i], all->high[i]};
    struct drawn drawn = {-INFINITY, 0};
    draw_rows[all->level](&d, &drawn);
    all->ids[i] = drawn.id;
}

PyObject *native_gumbel_max(PyObject *module, PyObject *args)
{
    enum { X, BEST, TEMPERATURE, LOW, HIGH, KEYS, IDS, NUM };
    Py_buffer b[NUM];
    struct draws all = {.level = best_level};
    ptrdiff_t num_rows;
    int num_threads, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*w*ni|i", &b[X], &b[BEST], &b[TEMPERATURE], &b[LOW],
                          &b[HIGH], &b[KEYS], &b[IDS], &all.size, &num_threads, &all.level))
        return NULL;
    valid = check_level(all.level) && check_row_size(all.size);
    num_rows = valid ? b[X].len / 4 / all.size : 0;
    for (int i = BEST; i < NUM; i++)
        valid = valid && check_row_values(&b[i], num_rows, i >= KEYS ? 8 : 4);
    if (valid) {
        all.x = b[X].buf, all.best = b[BEST].buf, all.temperature = b[TEMPERATURE].buf;
        all.low = b[LOW].buf, all.high = b[HIGH].buf, all.keys = b[KEYS].buf;
        all.ids = b[IDS].buf;
        Py_BEGIN_ALLOW_THREADS
        run_tasks(draw_one, &all, num_rows, num_threads);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < NUM; i++)
        PyBuffer_Release(&b[i]);
    return valid ? Py_NewRef(Py_None) : NULL;
}
