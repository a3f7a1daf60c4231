/* x @ weight + bias over a packed weight: [panels, depth, PANEL], columns padded with zeros.
 *
 * All of the depth is summed in registers.
 */
#include "_native_panels.h"

struct product {
    struct panels panels;
    ptrdiff_t depth;
};

/* How a kind of core is asked for weights, as measured: docs/performance.md. */
static struct habits {
    ptrdiff_t max_places; /* in memory, asked in turn where lines are many: a power of two */
    ptrdiff_t max_lines;  /* a step: of more the core itself sees that they follow each other */
    ptrdiff_t near_steps; /* of the depth, from the second-level cache to the first */
} habits = {4, PANEL, 8};

static void __attribute__((constructor)) find_habits(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd"))
        habits = (struct habits){1, 1, 48};
#endif
}

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

static const struct kernel {
    void (*tile)(const struct panels *p, int rows, ptrdiff_t row, ptrdiff_t panel,
                 const struct lines *ahead);
    int max_rows;
} kernels[NUM_LEVELS] = {
    {tile_portable, 4},
#if defined(__x86_64__)
    {tile_avx2, 6},
    {tile_avx512, 14},
#endif
};

static int check_sizes(const struct product *p, const Py_buffer *x, const Py_buffer *weight,
                       const Py_buffer *bias, const Py_buffer *out)
{
    const struct panels *panels = &p->panels;
    ptrdiff_t limit = (ptrdiff_t)1 << 30, rows = panels->rows, columns = panels->columns;
    int sized = rows > 0 && p->depth > 0 && columns > 0 && rows < limit && p->depth < limit &&
                columns < limit;
    if (sized && x->len / 4 == rows * p->depth &&
        weight->len / 4 == ceil_div(columns, PANEL) * PANEL * p->depth &&
        out->len / 4 == rows * columns && (!panels->bias || bias->len / 4 == columns))
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "product of %zd rows, depth %zd, %zd columns: x has %zd bytes, weight %zd, "
                 "out %zd; they must agree",
                 rows, p->depth, columns, x->len, weight->len, out->len);
    return 0;
}

PyObject *native_product(PyObject *module, PyObject *args)
{
    Py_buffer x, weight, bias, out;
    struct product p;
    int num_threads, level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*z*w*nnnpi|i", &x, &weight, &bias, &out, &p.panels.rows,
                          &p.depth, &p.panels.columns, &p.panels.accumulate, &num_threads, &level))
        return NULL;
    p.panels.x = x.buf;
    p.panels.weight = weight.buf;
    p.panels.bias = bias.buf;
    p.panels.out = out.buf;
    valid = check_level(level) && check_sizes(&p, &x, &weight, &bias, &out);
    if (valid) {
        p.panels.row_bytes = p.depth * 4;
        p.panels.panel_bytes = p.depth * PANEL * 4;
        p.panels.tile = kernels[level].tile;
        p.panels.max_rows = kernels[level].max_rows;
        Py_BEGIN_ALLOW_THREADS
        run_panels(&p.panels, num_threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&weight);
    if (bias.obj)
        PyBuffer_Release(&bias);
    PyBuffer_Release(&out);
    return valid ? Py_NewRef(Py_None) : NULL;
}
