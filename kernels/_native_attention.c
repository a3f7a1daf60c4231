/* Attention of a whole batch straight over the paged pool, in float32.
 *
 * The work is cut into blocks: up to two vectors of queries of one sequence that share a KV head
 * (a prompt's tokens and their heads, or the heads of one decoded token). A block passes over its
 * tokens in chunks of pages and keeps a running softmax (Milakov, Gimelshein 2018).
 */
#include "_native.h"

#include <string.h>

#define PAGE_TOKENS 16
#define CHUNK_PAGES 8
#define CHUNK_TOKENS (CHUNK_PAGES * PAGE_TOKENS)
#define PAGES_AHEAD 2
#define CELLS_AHEAD (2 * PAGES_AHEAD) /* of keys and of values */
#define TASKS_PER_THREAD 8 /* a thread that loses its core holds up an eighth of its share */
#define MAX_LANES 32
#define MAX_DIM 256
#define UNSEEN -1e30f
#define MAX_WINDOW (1 << 30)

struct attention {
    const float *query, *pool;
    float *out;
    const int64_t *starts, *contexts, *table; /* of each sequence: rows, tokens, pages */
    ptrdiff_t num_rows, num_sequences, table_width, num_pages;
    ptrdiff_t query_stride, num_heads, num_kv_heads, dim;
    ptrdiff_t page_size, layer_offset, value_offset; /* in floats */
    ptrdiff_t window, lanes;
    ptrdiff_t *first_block; /* of each sequence; then their number */
    ptrdiff_t blocks_per_task;
    const struct kernel *kernel;
    float scale, softcap;
};

/* What a block computes, and the tokens first … end - 1 that any of its queries sees. */
struct span {
    ptrdiff_t sequence, kv_head, first_query, num_queries, first, end;
};

/* The page that is asked for next, PAGES_AHEAD before it is computed, also over the end of a block:
 * a block of a decoded token has few pages, and memory takes as long as one of them. */
struct cursor {
    struct span span;
    ptrdiff_t block, end_block, i_page;
};

struct block {
    struct span span;
    struct cursor keys_ahead, values_ahead;
    float queries[MAX_DIM * MAX_LANES]; /* [dim][lane] */
    float out[MAX_DIM * MAX_LANES];     /* [dim][lane], is_small: [query][dim] */
    float highest[MAX_LANES], sums[MAX_LANES], shares[MAX_LANES];
    int32_t positions[MAX_LANES];
    int is_small;
} __attribute__((aligned(64)));

/* Tokens first … end - 1 in pages that begin with token `base`. */
struct chunk {
    ptrdiff_t base, first, end, num_pages;
    const float *keys[CHUNK_PAGES]; /* cells */
    int is_edge;                    /* not every query sees every token */
};

static ptrdiff_t ceil_div(ptrdiff_t a, ptrdiff_t b) { return (a + b - 1) / b; }
static ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static ptrdiff_t most(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

static ptrdiff_t query_len(const struct attention *a, ptrdiff_t sequence)
{
    return a->starts[sequence + 1] - a->starts[sequence];
}

/* Where a query lies among all rows and heads. */
static ptrdiff_t row_of(const struct attention *a, const struct span *s, ptrdiff_t query)
{
    return a->starts[s->sequence] + query / (a->num_heads / a->num_kv_heads);
}

static ptrdiff_t head_of(const struct attention *a, const struct span *s, ptrdiff_t query)
{
    ptrdiff_t group = a->num_heads / a->num_kv_heads;
    return s->kv_head * group + query % group;
}

/* How many tokens of a sequence come before row 0 of the step, if that were its own. */
static ptrdiff_t past_of(const struct attention *a, ptrdiff_t sequence)
{
    return a->contexts[sequence] - a->starts[sequence + 1];
}

/* Queries into lanes; lanes without one repeat the last. */
static void gather_queries(const struct attention *a, struct block *b, int width)
{
    const struct span *s = &b->span;
    ptrdiff_t past = past_of(a, s->sequence);
    memset(b->out, 0, (size_t)(a->dim * width) * sizeof *b->out);
    for (int lane = 0; lane < width; lane++) {
        ptrdiff_t query = s->first_query + least(lane, s->num_queries - 1);
        ptrdiff_t row = row_of(a, s, query);
        const float *from = a->query + row * a->query_stride + head_of(a, s, query) * a->dim;
        for (ptrdiff_t k = 0; k < a->dim; k++)
            b->queries[k * width + lane] = from[k];
        b->positions[lane] = (int32_t)(past + row);
        b->highest[lane] = UNSEEN;
        b->sums[lane] = 0;
    }
}

static void scatter_output(const struct attention *a, const struct block *b, int width)
{
    for (ptrdiff_t lane = 0; lane < b->span.num_queries; lane++) {
        ptrdiff_t query = b->span.first_query + lane;
        ptrdiff_t place = row_of(a, &b->span, query) * a->num_heads + head_of(a, &b->span, query);
        const float *from = b->is_small ? b->out + lane * a->dim : b->out + lane;
        ptrdiff_t step = b->is_small ? 1 : width;
        float *to = a->out + place * a->dim;
        float factor = 1 / b->sums[lane];
        for (ptrdiff_t k = 0; k < a->dim; k++)
            to[k] = from[k * step] * factor;
    }
}

static const float *key_cell(const struct attention *a, const struct span *s, ptrdiff_t i_page)
{
    int64_t page = a->table[s->sequence * a->table_width + i_page];
    return a->pool + page * a->page_size + a->layer_offset + s->kv_head * PAGE_TOKENS * a->dim;
}

/* The tokens after those of `c`; false when there are none. Chunks end at fixed positions: what a
 * query gets does not depend on the others in its block. */
static int next_chunk(const struct attention *a, const struct block *b, struct chunk *c,
                      int last_lane)
{
    ptrdiff_t i_page = c->end / PAGE_TOKENS;
    if (c->end >= b->span.end)
        return 0;
    c->first = c->end;
    c->base = i_page * PAGE_TOKENS;
    c->end = least((c->first / CHUNK_TOKENS + 1) * CHUNK_TOKENS, b->span.end);
    c->num_pages = ceil_div(c->end - c->base, PAGE_TOKENS);
    for (ptrdiff_t i = 0; i < c->num_pages; i++)
        c->keys[i] = key_cell(a, &b->span, i_page + i);
    c->is_edge = c->end - 1 > b->positions[0] || c->first <= b->positions[last_lane] - a->window;
    return 1;
}

static ptrdiff_t blocks_of(const struct attention *a, ptrdiff_t sequence)
{
    return ceil_div(query_len(a, sequence) * (a->num_heads / a->num_kv_heads), a->lanes);
}

static struct span span_of(const struct attention *a, ptrdiff_t block)
{
    struct span s;
    ptrdiff_t low = 0, high = a->num_sequences; /* the sequence is one of low … high - 1 */
    while (high - low > 1) {
        ptrdiff_t middle = (low + high) / 2;
        if (a->first_block[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    ptrdiff_t num_blocks = blocks_of(a, low), i = block - a->first_block[low];
    ptrdiff_t num_queries = query_len(a, low) * (a->num_heads / a->num_kv_heads);
    s.sequence = low;
    s.kv_head = i % a->num_kv_heads;
    /* The last queries see most: first, so that no thread begins them when all else is done. */
    s.first_query = (num_blocks - 1 - i / a->num_kv_heads) * a->lanes;
    s.num_queries = least(a->lanes, num_queries - s.first_query);
    ptrdiff_t past = past_of(a, low);
    s.first = most(0, past + row_of(a, &s, s.first_query) + 1 - a->window);
    s.end = past + row_of(a, &s, s.first_query + s.num_queries - 1) + 1;
    return s;
}

static void move_on(const struct attention *a, struct cursor *c)
{
    c->i_page++;
    if (c->i_page * PAGE_TOKENS < c->span.end || c->block == c->end_block)
        return;
    c->block++;
    if (c->block < c->end_block) {
        c->span = span_of(a, c->block);
        c->i_page = c->span.first / PAGE_TOKENS;
    }
}

/* The cell at `offset` of a cursor's page, which goes on to the next. At the end of a task there is
 * none: then `own`, which is near. */
static const float *cell_ahead(const struct attention *a, struct cursor *c, ptrdiff_t offset,
                               const float *own)
{
    if (c->block >= c->end_block)
        return own;
    const float *cell = key_cell(a, &c->span, c->i_page) + offset;
    move_on(a, c);
    return cell;
}

/* Keys and values of the next pages, asked for while `num_pages` are computed: a core fetches some
 * 20 lines of each at a time. */
static void look_ahead(const struct attention *a, struct block *b, const float *own,
                       ptrdiff_t num_pages, const float **cells)
{
    for (ptrdiff_t i = 0; i < PAGES_AHEAD; i++) {
        cells[i] = cells[i + PAGES_AHEAD] = own;
        if (i < num_pages) {
            cells[i] = cell_ahead(a, &b->keys_ahead, 0, own);
            cells[i + PAGES_AHEAD] = cell_ahead(a, &b->values_ahead, a->value_offset, own);
        }
    }
}

#define PER_LEVEL "_native_attention.h"
#include "_native_levels.h"

static const struct kernel {
    void (*attend)(const struct attention *a, struct block *b);
    int lanes;
} kernels[NUM_LEVELS] = {
    {attend_portable, 8},
#if defined(__x86_64__)
    {attend_avx2, 16},
    {attend_avx512, 32},
#endif
};

static void attend_blocks(void *argument, ptrdiff_t task)
{
    const struct attention *a = argument;
    struct cursor ahead = {.block = task * a->blocks_per_task};
    struct block b;
    ptrdiff_t block = ahead.block;
    ahead.end_block = least(block + a->blocks_per_task, a->first_block[a->num_sequences]);
    ahead.span = span_of(a, block);
    ahead.i_page = ahead.span.first / PAGE_TOKENS;
    for (int i = 0; i < PAGES_AHEAD; i++)
        move_on(a, &ahead);
    b.keys_ahead = b.values_ahead = ahead;
    for (; block < ahead.end_block; block++) {
        b.span = span_of(a, block);
        a->kernel->attend(a, &b);
    }
}

/* A table may hold anything where no token is seen. */
static int check_sequence(const struct attention *a, ptrdiff_t i)
{
    int64_t length = query_len(a, i), context = a->contexts[i];
    if (a->starts[i] < 0 || length < 1 || a->starts[i + 1] > a->num_rows || context < length ||
        ceil_div(context, PAGE_TOKENS) > a->table_width) {
        PyErr_Format(PyExc_ValueError,
                     "sequence %zd: rows %lld to %lld of %zd, %lld tokens, %zd pages at most", i,
                     (long long)a->starts[i], (long long)a->starts[i + 1], a->num_rows,
                     (long long)context, a->table_width);
        return 0;
    }
    ptrdiff_t first = most(0, context - length + 1 - a->window) / PAGE_TOKENS;
    for (ptrdiff_t j = first; j < ceil_div(context, PAGE_TOKENS); j++) {
        int64_t page = a->table[i * a->table_width + j];
        if (page < 0 || page >= a->num_pages) {
            PyErr_Format(PyExc_IndexError, "block_table[%zd, %zd]=%lld: the pool has %zd pages", i,
                         j, (long long)page, a->num_pages);
            return 0;
        }
    }
    return 1;
}

static int check_shape(const struct attention *a, ptrdiff_t num_layers, ptrdiff_t layer)
{
    ptrdiff_t limit = 1 << 20;
    if (a->num_kv_heads > 0 && a->num_kv_heads <= a->num_heads && a->num_heads < limit &&
        a->num_heads % a->num_kv_heads == 0 && a->dim > 0 && a->dim <= MAX_DIM &&
        a->dim % 8 == 0 && layer >= 0 && layer < num_layers && num_layers < limit &&
        a->window > 0 && a->window <= MAX_WINDOW)
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "attention of %zd heads, %zd of KV, dim %zd, layer %zd of %zd, window %zd is not "
                 "supported",
                 a->num_heads, a->num_kv_heads, a->dim, layer, num_layers, a->window);
    return 0;
}

static int check_buffers(const struct attention *a, const Py_buffer *query, const Py_buffer *out,
                         const Py_buffer *starts, const Py_buffer *contexts, const Py_buffer *table)
{
    ptrdiff_t used = (a->num_rows - 1) * a->query_stride + a->num_heads * a->dim;
    ptrdiff_t num_sequences = contexts->len / 8;
    if (num_sequences > 0 && starts->len == contexts->len + 8 && table->len % contexts->len == 0 &&
        a->num_rows > 0 && a->query_stride >= a->num_heads * a->dim && query->len / 4 >= used)
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "attention of %zd rows, %zd sequences: query of %zd bytes, out %zd, starts %zd, "
                 "block table %zd do not agree",
                 a->num_rows, num_sequences, query->len, out->len, starts->len, table->len);
    return 0;
}

static int check_sequences(const struct attention *a)
{
    for (ptrdiff_t i = 0; i < a->num_sequences; i++)
        if (!check_sequence(a, i))
            return 0;
    return 1;
}

static void attend_all(struct attention *a, int num_threads)
{
    ptrdiff_t num_blocks = 0;
    for (ptrdiff_t i = 0; i < a->num_sequences; i++) {
        a->first_block[i] = num_blocks;
        num_blocks += a->num_kv_heads * blocks_of(a, i);
    }
    a->first_block[a->num_sequences] = num_blocks;
    a->blocks_per_task = ceil_div(num_blocks, (ptrdiff_t)num_threads * TASKS_PER_THREAD);
    run_tasks(attend_blocks, a, ceil_div(num_blocks, a->blocks_per_task), num_threads);
}

PyObject *native_attend(PyObject *module, PyObject *args)
{
    Py_buffer query, out, pool, starts, contexts, table;
    struct attention a = {0};
    ptrdiff_t num_layers, layer;
    int num_threads, level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*y*y*y*y*nnnnnnnffi|i", &query, &out, &pool, &starts, &contexts,
                          &table, &a.query_stride, &a.num_heads, &a.num_kv_heads, &a.dim,
                          &num_layers, &layer, &a.window, &a.scale, &a.softcap, &num_threads,
                          &level))
        return NULL;
    a.window = a.window ? a.window : MAX_WINDOW;
    valid = check_level(level) && check_shape(&a, num_layers, layer);
    if (valid) {
        ptrdiff_t run = a.num_kv_heads * PAGE_TOKENS * a.dim;
        a.query = query.buf, a.pool = pool.buf, a.out = out.buf;
        a.starts = starts.buf, a.contexts = contexts.buf, a.table = table.buf;
        a.num_sequences = contexts.len / 8;
        a.num_rows = out.len / 4 / (a.num_heads * a.dim);
        a.page_size = num_layers * 2 * run;
        a.layer_offset = layer * 2 * run;
        a.value_offset = run;
        a.num_pages = pool.len / 4 / a.page_size;
        a.kernel = &kernels[level];
        a.lanes = a.kernel->lanes;
        valid = check_buffers(&a, &query, &out, &starts, &contexts, &table);
    }
    if (valid) {
        a.table_width = table.len / contexts.len;
        a.first_block = PyMem_Calloc((size_t)a.num_sequences + 1, sizeof *a.first_block);
        valid = a.first_block ? check_sequences(&a) : (PyErr_NoMemory(), 0);
    }
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        attend_all(&a, num_threads);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(a.first_block);
    Py_buffer *buffers[] = {&query, &out, &pool, &starts, &contexts, &table};
    for (int i = 0; i < 6; i++)
        PyBuffer_Release(buffers[i]);
    return valid ? Py_NewRef(Py_None) : NULL;
}
