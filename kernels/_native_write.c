/* Puts the KV of new tokens into their slots of a paged pool, in float32. */
#include "_native.h"

#include <string.h>

#define PAGE_TOKENS 16
#define TASK_TOKENS 64

struct write {
    const float *kv; /* [tokens][2 * heads][dim] */
    float *pool;
    const int64_t *slots;
    ptrdiff_t num_tokens, kv_stride, num_cells, dim, page_size, layer_offset;
};

static void write_tokens(void *argument, ptrdiff_t task)
{
    const struct write *w = argument;
    ptrdiff_t token = task * TASK_TOKENS, end = token + TASK_TOKENS;
    for (; token < end && token < w->num_tokens; token++) {
        int64_t page = w->slots[token] / PAGE_TOKENS, offset = w->slots[token] % PAGE_TOKENS;
        const float *from = w->kv + token * w->kv_stride;
        float *to = w->pool + page * w->page_size + w->layer_offset + offset * w->dim;
        for (ptrdiff_t cell = 0; cell < w->num_cells; cell++)
            memcpy(to + cell * PAGE_TOKENS * w->dim, from + cell * w->dim,
                   (size_t)w->dim * sizeof *to);
    }
}

static int check_write(const struct write *w, const Py_buffer *kv, ptrdiff_t num_layers,
                       ptrdiff_t layer)
{
    ptrdiff_t limit = 1 << 20, row = w->num_cells * w->dim;
    if (w->num_cells > 0 && w->num_cells < limit && w->dim > 0 && w->dim < limit &&
        num_layers < limit && layer >= 0 && layer < num_layers && w->kv_stride >= row &&
        kv->len / 4 >= (w->num_tokens - 1) * w->kv_stride + row)
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "KV of %zd tokens, %zd cells, dim %zd, layer %zd of %zd: %zd bytes do not agree",
                 w->num_tokens, w->num_cells, w->dim, layer, num_layers, kv->len);
    return 0;
}

static int check_slots(const struct write *w, ptrdiff_t num_pages)
{
    for (ptrdiff_t i = 0; i < w->num_tokens; i++)
        if (w->slots[i] < 0 || w->slots[i] / PAGE_TOKENS >= num_pages) {
            PyErr_Format(PyExc_IndexError, "slot_mapping[%zd]=%lld: the pool has %zd pages", i,
                         (long long)w->slots[i], num_pages);
            return 0;
        }
    return 1;
}

PyObject *native_write_kv(PyObject *module, PyObject *args)
{
    Py_buffer kv, pool, slots;
    struct write w = {0};
    ptrdiff_t num_layers, layer;
    int num_threads, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*y*nnnnni", &kv, &pool, &slots, &w.kv_stride, &w.num_cells,
                          &w.dim, &num_layers, &layer, &num_threads))
        return NULL;
    w.kv = kv.buf, w.pool = pool.buf, w.slots = slots.buf;
    w.num_tokens = slots.len / 8;
    valid = check_write(&w, &kv, num_layers, layer);
    if (valid) {
        ptrdiff_t run = w.num_cells * PAGE_TOKENS * w.dim;
        w.page_size = num_layers * run;
        w.layer_offset = layer * run;
        valid = check_slots(&w, pool.len / 4 / w.page_size);
    }
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        run_tasks(write_tokens, &w, (w.num_tokens + TASK_TOKENS - 1) / TASK_TOKENS, num_threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&kv);
    PyBuffer_Release(&pool);
    PyBuffer_Release(&slots);
    return valid ? Py_NewRef(Py_None) : NULL;
}
