/* x @ weight + bias over a packed weight: [panels, depth, PANEL], columns padded with zeros.
 *
 * A panel is read front to back, whatever the number of rows, and only once from memory: for few
 * rows at the rate that memory gives, for many rows from the caches. All of the depth is summed
 * in registers.
 */
#include "_native.h"

#include <string.h>

#define PANEL 32 /* columns; kernels/product.py packs them */
#define NEAR_BYTES (512 << 10) /* what a core keeps near while it streams: half a small L2 */
#define TASKS_PER_THREAD 8     /* a thread that loses its core holds up an eighth of its share */

struct product {
    const float *x, *weight, *bias;
    float *out;
    ptrdiff_t rows, depth, columns, num_panels;
    int accumulate;
    const struct kernel *kernel;
    ptrdiff_t panels_per_task, rows_per_task, num_row_tasks;
};

/* Cache lines that will be needed next. */
struct lines {
    const char *first;
    ptrdiff_t count;
};

#define NAME(x) x##_portable
#define TARGET
#define LANES 4
#define MAX_ROWS 4
#include "_native_product.h"
#undef NAME
#undef TARGET
#undef LANES
#undef MAX_ROWS

#if defined(__x86_64__)
#define NAME(x) x##_avx2
#define TARGET TARGET_AVX2
#define LANES 8
#define MAX_ROWS 6
#include "_native_product.h"
#undef NAME
#undef TARGET
#undef LANES
#undef MAX_ROWS

#define NAME(x) x##_avx512
#define TARGET TARGET_AVX512
#define LANES 16
#define MAX_ROWS 14
#include "_native_product.h"
#undef NAME
#undef TARGET
#undef LANES
#undef MAX_ROWS
#endif

#define MOST_ROWS 14

static const struct kernel {
    void (*tile)(int rows, const struct lines *ahead, const float *x, const float *panel,
                 ptrdiff_t depth, float *sums);
    void (*finish)(const struct product *p, int rows, ptrdiff_t row, ptrdiff_t column,
                   const float *sums);
    int max_rows;
} kernels[NUM_LEVELS] = {
    {tile_portable, finish_portable, 4},
#if defined(__x86_64__)
    {tile_avx2, finish_avx2, 6},
    {tile_avx512, finish_avx512, 14},
#endif
};

static ptrdiff_t ceil_div(ptrdiff_t a, ptrdiff_t b) { return (a + b - 1) / b; }
static ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

static void compute_tile(const struct product *p, ptrdiff_t panel, ptrdiff_t row, ptrdiff_t rows,
                         const struct lines *ahead)
{
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    const float *weight = p->weight + panel * p->depth * PANEL;
    p->kernel->tile((int)rows, ahead, p->x + row * p->depth, weight, p->depth, sums);
    p->kernel->finish(p, (int)rows, row, panel * PANEL, sums);
}

/* Few rows: panel after panel, all rows of each; the next panel comes from memory meanwhile. */
static void stream_panels(void *argument, ptrdiff_t task)
{
    const struct product *p = argument;
    ptrdiff_t first = task * p->panels_per_task;
    ptrdiff_t end = least(first + p->panels_per_task, p->num_panels);
    ptrdiff_t num_tiles = ceil_div(p->rows, p->kernel->max_rows);
    ptrdiff_t height = ceil_div(p->rows, num_tiles);
    ptrdiff_t lines = p->depth * PANEL * 4 / 64;
    for (ptrdiff_t panel = first; panel < end; panel++) {
        struct lines ahead = {(const char *)(p->weight + (panel + 1) * p->depth * PANEL),
                              panel + 1 < end ? ceil_div(lines, num_tiles) : 0};
        for (ptrdiff_t row = 0; row < p->rows; row += height, ahead.first += 64 * ahead.count)
            compute_tile(p, panel, row, least(height, p->rows - row), &ahead);
    }
}

/* Many rows: some panels stay near while the rows pass by. */
static void pass_rows(void *argument, ptrdiff_t task)
{
    const struct product *p = argument;
    const struct lines none = {NULL, 0};
    ptrdiff_t first = task / p->num_row_tasks * p->panels_per_task;
    ptrdiff_t end = least(first + p->panels_per_task, p->num_panels);
    ptrdiff_t row = task % p->num_row_tasks * p->rows_per_task;
    ptrdiff_t last_row = least(row + p->rows_per_task, p->rows);
    for (; row < last_row; row += p->kernel->max_rows)
        for (ptrdiff_t panel = first; panel < end; panel++)
            compute_tile(p, panel, row, least(p->kernel->max_rows, last_row - row), &none);
}

static void compute(struct product *p, int num_threads)
{
    ptrdiff_t wanted = (ptrdiff_t)num_threads * TASKS_PER_THREAD;
    if (p->rows * p->depth * 4 <= NEAR_BYTES) {
        p->panels_per_task = ceil_div(p->num_panels, wanted);
        run_tasks(stream_panels, p, ceil_div(p->num_panels, p->panels_per_task), num_threads);
        return;
    }
    ptrdiff_t near = NEAR_BYTES / (p->depth * PANEL * 4);
    p->panels_per_task = near < 1 ? 1 : near;
    ptrdiff_t num_groups = ceil_div(p->num_panels, p->panels_per_task);
    ptrdiff_t num_tiles = ceil_div(p->rows, p->kernel->max_rows);
    ptrdiff_t tiles = ceil_div(num_tiles, ceil_div(wanted, num_groups));
    p->rows_per_task = tiles * p->kernel->max_rows;
    p->num_row_tasks = ceil_div(p->rows, p->rows_per_task);
    run_tasks(pass_rows, p, num_groups * p->num_row_tasks, num_threads);
}

static int check_sizes(const struct product *p, const Py_buffer *x, const Py_buffer *weight,
                       const Py_buffer *bias, const Py_buffer *out)
{
    ptrdiff_t limit = (ptrdiff_t)1 << 30;
    int sized = p->rows > 0 && p->depth > 0 && p->columns > 0 && p->rows < limit &&
                p->depth < limit && p->columns < limit;
    if (sized && x->len / 4 == p->rows * p->depth &&
        weight->len / 4 == p->num_panels * PANEL * p->depth &&
        out->len / 4 == p->rows * p->columns && (!p->bias || bias->len / 4 == p->columns))
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "product of %zd rows, depth %zd, %zd columns: x has %zd bytes, weight %zd, "
                 "out %zd; they must agree",
                 p->rows, p->depth, p->columns, x->len, weight->len, out->len);
    return 0;
}

PyObject *native_product(PyObject *module, PyObject *args)
{
    Py_buffer x, weight, bias, out;
    struct product p;
    int num_threads, level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*z*w*nnnpi|i", &x, &weight, &bias, &out, &p.rows, &p.depth,
                          &p.columns, &p.accumulate, &num_threads, &level))
        return NULL;
    p.x = x.buf;
    p.weight = weight.buf;
    p.bias = bias.buf;
    p.out = out.buf;
    p.num_panels = ceil_div(p.columns, PANEL);
    valid = check_level(level) && check_sizes(&p, &x, &weight, &bias, &out);
    if (valid) {
        p.kernel = &kernels[level];
        Py_BEGIN_ALLOW_THREADS
        compute(&p, num_threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&weight);
    if (bias.obj)
        PyBuffer_Release(&bias);
    PyBuffer_Release(&out);
    return valid ? Py_NewRef(Py_None) : NULL;
}
