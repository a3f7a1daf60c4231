/* Log-probability and rank of one token of each row, and the best tokens of the row: without a
 * sort, in two passes over the row and a third over the few parts that hold the best. */
#include "_native.h"

#include <math.h>

#define MAX_TOP 128
#define MAX_PARTS 256
#define MIN_PART 1024 /* numbers */

struct scored {
    const float *x;
    ptrdiff_t size, part;
    int64_t id;
    float *logprob;
    int64_t *rank;
};

/* The best numbers so far, best first; of equal ones the first. */
struct top {
    float *values;
    int64_t *ids;
    ptrdiff_t size, count;
    float lowest; /* less cannot be one of them */
};

struct scores {
    const float *x;
    const int64_t *ids;
    float *logprobs, *top_logprobs;
    int64_t *ranks, *top_ids;
    ptrdiff_t size, num_top;
    int level;
};

static void insert(struct top *top, float x, int64_t id)
{
    if (!(x >= top->lowest) || (top->count == top->size && !(x > top->lowest)))
        return;
    ptrdiff_t i = top->count < top->size ? top->count++ : top->count - 1;
    for (; i > 0 && top->values[i - 1] < x; i--) {
        top->values[i] = top->values[i - 1];
        top->ids[i] = top->ids[i - 1];
    }
    top->values[i] = x;
    top->ids[i] = id;
    if (top->count == top->size)
        top->lowest = top->values[top->size - 1];
}

/* So many numbers are at least as high; -inf if there are not so many. */
static float nth_highest(const float *x, ptrdiff_t count, ptrdiff_t n)
{
    float values[MAX_TOP];
    int64_t ids[MAX_TOP];
    struct top top = {values, ids, n, 0, -INFINITY};
    if (n == 0)
        return INFINITY;
    for (ptrdiff_t i = 0; i < count; i++)
        insert(&top, x[i], i);
    return top.count == n ? top.lowest : -INFINITY;
}

#define PER_LEVEL "_native_scores.h"
#include "_native_levels.h"

typedef void (*score_fn)(const struct scored *s, struct top *top);
static const score_fn score_rows[NUM_LEVELS] = {
    score_row_portable,
#if defined(__x86_64__)
    score_row_avx2,
    score_row_avx512,
#endif
};

static void score_one(void *argument, ptrdiff_t i)
{
    const struct scores *all = argument;
    ptrdiff_t part = (all->size + MAX_PARTS - 1) / MAX_PARTS;
    struct scored s = {all->x + i * all->size, all->size, part < MIN_PART ? MIN_PART : part,
                       all->ids[i], all->logprobs + i, all->ranks + i};
    struct top top = {all->top_logprobs + i * all->num_top, all->top_ids + i * all->num_top,
                      all->num_top, 0, 0};
    score_rows[all->level](&s, &top);
    for (ptrdiff_t j = top.count; j < top.size; j++) { /* a row with NaN */
        top.values[j] = -INFINITY;
        top.ids[j] = 0;
    }
}

static int check_ids(const int64_t *ids, ptrdiff_t num_rows, ptrdiff_t size)
{
    for (ptrdiff_t i = 0; i < num_rows; i++)
        if (ids[i] < 0 || ids[i] >= size) {
            PyErr_Format(PyExc_IndexError, "ids[%zd]=%lld: a row has %zd numbers", i,
                         (long long)ids[i], size);
            return 0;
        }
    return 1;
}

PyObject *native_token_scores(PyObject *module, PyObject *args)
{
    enum { X, IDS, LOGPROBS, RANKS, TOP_IDS, TOP_LOGPROBS, NUM };
    Py_buffer b[NUM];
    struct scores all = {.level = best_level};
    ptrdiff_t num_rows;
    int num_threads, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*w*w*w*w*nni|i", &b[X], &b[IDS], &b[LOGPROBS], &b[RANKS],
                          &b[TOP_IDS], &b[TOP_LOGPROBS], &all.size, &all.num_top, &num_threads,
                          &all.level))
        return NULL;
    valid = check_level(all.level) && check_row_size(all.size);
    if (valid && (all.num_top < 0 || all.num_top > MAX_TOP || all.num_top > all.size)) {
        PyErr_Format(PyExc_ValueError, "num_top=%zd: at most %d, and no more than a row has",
                     all.num_top, MAX_TOP);
        valid = 0;
    }
    num_rows = valid ? b[X].len / 4 / all.size : 0;
    valid = valid && check_row_values(&b[IDS], num_rows, 8) &&
            check_row_values(&b[LOGPROBS], num_rows, 4) &&
            check_row_values(&b[RANKS], num_rows, 8) &&
            check_row_values(&b[TOP_IDS], num_rows * all.num_top, 8) &&
            check_row_values(&b[TOP_LOGPROBS], num_rows * all.num_top, 4) &&
            check_ids(b[IDS].buf, num_rows, all.size);
    if (valid) {
        all.x = b[X].buf, all.ids = b[IDS].buf, all.logprobs = b[LOGPROBS].buf;
        all.ranks = b[RANKS].buf, all.top_ids = b[TOP_IDS].buf;
        all.top_logprobs = b[TOP_LOGPROBS].buf;
        Py_BEGIN_ALLOW_THREADS
        run_tasks(score_one, &all, num_rows, num_threads);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < NUM; i++)
        PyBuffer_Release(&b[i]);
    return valid ? Py_NewRef(Py_None) : NULL;
}
