/* What a step does to each row between its products, in float32 and one pass over memory. */
#include "_native.h"

#include <math.h>

#define TASK_NUMBERS (1 << 14) /* that a task handles: waking a thread for fewer costs more */
#define MAX_PART 1024           /* numbers, searched twice only where the highest is */

enum activation { SILU, GELU_TANH, NUM_ACTIVATIONS };

struct rows {
    const float *x, *weight, *cosines, *sines;
    float *out;
    int64_t *ids;
    ptrdiff_t num_rows, size, x_stride, num_heads, head_stride, table_stride;
    ptrdiff_t rows_per_task;
    float epsilon;
    int activation;
    void (*one)(const struct rows *r, ptrdiff_t row);
};

#define PER_LEVEL "_native_rows.h"
#include "_native_levels.h"

static const struct kernel {
    void (*norm)(const struct rows *r, ptrdiff_t row);
    void (*gate)(const struct rows *r, ptrdiff_t row);
    void (*rotate)(const struct rows *r, ptrdiff_t row);
    void (*max)(const struct rows *r, ptrdiff_t row);
} kernels[NUM_LEVELS] = {
    {norm_row_portable, gate_row_portable, rotate_row_portable, max_row_portable},
#if defined(__x86_64__)
    {norm_row_avx2, gate_row_avx2, rotate_row_avx2, max_row_avx2},
    {norm_row_avx512, gate_row_avx512, rotate_row_avx512, max_row_avx512},
#endif
};

static void do_rows(void *argument, ptrdiff_t task)
{
    const struct rows *r = argument;
    ptrdiff_t row = task * r->rows_per_task, end = row + r->rows_per_task;
    for (; row < end && row < r->num_rows; row++)
        r->one(r, row);
}

static void do_all(struct rows *r, ptrdiff_t numbers_per_row, int num_threads)
{
    Py_BEGIN_ALLOW_THREADS
    r->rows_per_task = TASK_NUMBERS / numbers_per_row + 1;
    ptrdiff_t num_tasks = (r->num_rows + r->rows_per_task - 1) / r->rows_per_task;
    run_tasks(do_rows, r, num_tasks, num_threads);
    Py_END_ALLOW_THREADS
}

static int check_fit(const char *name, ptrdiff_t num_bytes, ptrdiff_t num_numbers)
{
    if (num_bytes / 4 >= num_numbers)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes, %zd numbers are needed", name, num_bytes,
                 num_numbers);
    return 0;
}

static int check_sizes(const struct rows *r)
{
    ptrdiff_t limit = (ptrdiff_t)1 << 28;
    if (r->num_rows >= 0 && r->num_rows < limit && r->size > 0 && r->size < limit &&
        r->num_heads >= 0 && r->num_heads < limit && r->x_stride >= 0 && r->x_stride < limit &&
        r->head_stride >= 0 && r->head_stride < limit && r->table_stride >= 0 &&
        r->table_stride < limit)
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd rows of %zd numbers are not supported", r->num_rows,
                 r->size);
    return 0;
}

/* Numbers from the first to the last of `num_rows` runs. */
static ptrdiff_t span(ptrdiff_t num_rows, ptrdiff_t stride, ptrdiff_t size)
{
    return num_rows ? (num_rows - 1) * stride + size : 0;
}

PyObject *native_rms_norm(PyObject *module, PyObject *args)
{
    Py_buffer x, weight, out;
    struct rows r = {0};
    int num_threads, level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*w*nfi|i", &x, &weight, &out, &r.size, &r.epsilon, &num_threads,
                          &level))
        return NULL;
    valid = check_level(level) && check_sizes(&r);
    if (valid) {
        r.num_rows = x.len / 4 / r.size;
        r.x_stride = r.size;
        r.x = x.buf, r.weight = weight.buf, r.out = out.buf;
        r.one = kernels[level].norm;
        valid = check_fit("weight", weight.len, r.size) &&
                check_fit("out", out.len, r.num_rows * r.size);
    }
    if (valid)
        do_all(&r, r.size, num_threads);
    PyBuffer_Release(&x);
    PyBuffer_Release(&weight);
    PyBuffer_Release(&out);
    return valid ? Py_NewRef(Py_None) : NULL;
}

PyObject *native_gate(PyObject *module, PyObject *args)
{
    Py_buffer x, out;
    struct rows r = {0};
    int num_threads, level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*nii|i", &x, &out, &r.size, &r.activation, &num_threads,
                          &level))
        return NULL;
    valid = check_level(level) && check_sizes(&r);
    if (valid && (r.activation < 0 || r.activation >= NUM_ACTIVATIONS)) {
        PyErr_Format(PyExc_ValueError, "activation=%d is not known", r.activation);
        valid = 0;
    }
    if (valid) {
        r.x_stride = 2 * r.size;
        r.num_rows = x.len / 4 / r.x_stride;
        r.x = x.buf, r.out = out.buf;
        r.one = kernels[level].gate;
        valid = check_fit("out", out.len, r.num_rows * r.size);
    }
    if (valid)
        do_all(&r, 4 * r.size, num_threads); /* an exponential is worth more than a product */
    PyBuffer_Release(&x);
    PyBuffer_Release(&out);
    return valid ? Py_NewRef(Py_None) : NULL;
}

PyObject *native_rotate(PyObject *module, PyObject *args)
{
    Py_buffer heads, cosines, sines;
    struct rows r = {0};
    int num_threads, level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*y*nnnnnni|i", &heads, &cosines, &sines, &r.num_rows,
                          &r.num_heads, &r.size, &r.x_stride, &r.head_stride, &r.table_stride,
                          &num_threads, &level))
        return NULL;
    r.out = heads.buf, r.cosines = cosines.buf, r.sines = sines.buf;
    valid = check_level(level) && check_sizes(&r);
    if (valid) {
        ptrdiff_t row = span(r.num_heads, r.head_stride, r.size);
        ptrdiff_t table = span(r.num_rows, r.table_stride, r.size);
        r.one = kernels[level].rotate;
        valid = check_fit("heads", heads.len, span(r.num_rows, r.x_stride, row)) &&
                check_fit("cosines", cosines.len, table) && check_fit("sines", sines.len, table);
    }
    if (valid)
        do_all(&r, r.num_heads * r.size, num_threads);
    PyBuffer_Release(&heads);
    PyBuffer_Release(&cosines);
    PyBuffer_Release(&sines);
    return valid ? Py_NewRef(Py_None) : NULL;
}

PyObject *native_row_max(PyObject *module, PyObject *args)
{
    Py_buffer x, best, ids;
    struct rows r = {0};
    int num_threads, level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*w*ni|i", &x, &best, &ids, &r.size, &num_threads, &level))
        return NULL;
    valid = check_level(level) && check_sizes(&r);
    if (valid) {
        r.num_rows = x.len / 4 / r.size;
        r.x = x.buf, r.out = best.buf, r.ids = ids.buf;
        r.one = kernels[level].max;
        valid = check_fit("best", best.len, r.num_rows) &&
                check_fit("ids", ids.len, 2 * r.num_rows);
    }
    if (valid)
        do_all(&r, r.size, num_threads);
    PyBuffer_Release(&x);
    PyBuffer_Release(&best);
    PyBuffer_Release(&ids);
    return valid ? Py_NewRef(Py_None) : NULL;
}
