/* The table of router/index.py; index_reference.py says the same in plain Python.
 *
 *     shard = first byte of the key       256 of them, so that no growth and no sweep pauses anyone
 *     young | old                         two generations a shard: LRU without a list
 *     slot  = group ‖ key[1:16] ‖ holders 24 bytes; one bit for each of the group's 64 views
 *
 * A generation is a table with linear probing, at most 4/5 full, that grows by half: 30 to 45 bytes
 * an entry. What is removed is closed up by moving its successors (Knuth 6.4, algorithm R).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define NUM_SHARDS 256
#define KEY_BYTES 16
#define MAX_GROUPS 256 /* of 64 views */
#define PAGE_BYTES 4096
#define CACHE_LINE 64
#define LOOK_AHEAD 16 /* blocks whose slots are on their way from memory */

typedef struct {
    uint64_t low, high, holders; /* holders 0: empty. Lowest byte of low: the group */
} slot;

typedef struct {
    slot *slots;
    size_t capacity, used;
} generation;

typedef struct {
    generation young, old;
} shard;

typedef struct {
    PyObject_HEAD
    shard shards[NUM_SHARDS];
    size_t generation_keys;
    uint64_t forgotten[MAX_GROUPS]; /* views that lost entries to the bound */
} Table;

typedef struct {
    uint64_t low, high;
    unsigned shard;
} place;

static place place_of(const uint8_t *key, unsigned group)
{
    place p;
    memcpy(&p.low, key, 8);
    memcpy(&p.high, key + 8, 8);
    p.shard = p.low & 0xff;
    p.low = (p.low & ~(uint64_t)0xff) | group;
    return p;
}

static size_t home(const generation *g, uint64_t low)
{
    uint32_t hash = (uint32_t)(low >> 32) + (uint32_t)(low & 0xff) * 0x9E3779B1u;
    return (size_t)((uint64_t)hash * g->capacity >> 32);
}

static size_t after(const generation *g, size_t i) { return i + 1 < g->capacity ? i + 1 : 0; }

static slot *find(const generation *g, const place *p)
{
    if (!g->used)
        return NULL;
    size_t i = home(g, p->low);
    while (g->slots[i].holders) {
        slot *s = g->slots + i;
        if (s->low == p->low && s->high == p->high)
            return s;
        i = after(g, i);
    }
    return NULL;
}

static void put(generation *g, slot new)
{
    size_t i = home(g, new.low);
    while (g->slots[i].holders)
        i = after(g, i);
    g->slots[i] = new;
    g->used++;
}

static void erase(generation *g, slot *gone)
{
    size_t hole = (size_t)(gone - g->slots), i = hole;
    while (g->slots[i = after(g, i)].holders) {
        size_t from_home = (i + g->capacity - home(g, g->slots[i].low)) % g->capacity;
        size_t from_hole = (i + g->capacity - hole) % g->capacity;
        if (from_home >= from_hole) {
            g->slots[hole] = g->slots[i];
            hole = i;
        }
    }
    g->slots[hole].holders = 0;
    g->used--;
}

static size_t num_bytes_of(size_t capacity)
{
    return (capacity * sizeof(slot) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static void discard(generation *g)
{
    if (g->slots)
        munmap(g->slots, num_bytes_of(g->capacity));
    memset(g, 0, sizeof *g);
}

/* Memory comes as pages and goes back as such: the heap is not left in pieces. */
static int make(generation *g, size_t capacity)
{
    size_t bytes = num_bytes_of(capacity);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        PyErr_NoMemory();
        return -1;
    }
    *g = (generation){memory, bytes / sizeof(slot), 0};
    return 0;
}

/* A new table of `capacity` slots without the holders in `retired` (by group; NULL: none). */
static int rebuild(generation *g, size_t capacity, const uint64_t *retired)
{
    generation next;
    if (make(&next, capacity) < 0)
        return -1;
    for (size_t i = 0; i < g->capacity; i++) {
        slot s = g->slots[i];
        if (retired)
            s.holders &= ~retired[s.low & 0xff];
        if (s.holders)
            put(&next, s);
    }
    discard(g);
    *g = next;
    return 0;
}

static size_t capacity_for(size_t keys) { return keys + keys / 4 + 2; }

static int make_room(Table *table, shard *s)
{
    generation *young = &s->young;
    if (young->used >= table->generation_keys) {
        for (size_t i = 0; i < s->old.capacity; i++)
            table->forgotten[s->old.slots[i].low & 0xff] |= s->old.slots[i].holders;
        discard(&s->old);
        s->old = *young;
        memset(young, 0, sizeof *young);
    }
    if (young->used + 1 <= young->capacity * 4 / 5)
        return 0;
    size_t limit = capacity_for(table->generation_keys), larger = young->capacity * 3 / 2 + 1;
    return rebuild(young, larger < limit ? larger : limit, NULL);
}

static int insert(Table *table, const place *p, uint64_t holders)
{
    shard *s = table->shards + p->shard;
    if (make_room(table, s) < 0)
        return -1;
    put(&s->young, (slot){p->low, p->high, holders});
    return 0;
}

/* Who holds the block; what is used again moves to the young generation. -1: no memory. */
static int look_up(Table *table, const place *p, uint64_t *holders)
{
    shard *s = table->shards + p->shard;
    slot *found = find(&s->young, p);
    *holders = found ? found->holders : 0;
    if (found || !(found = find(&s->old, p)))
        return 0;
    *holders = found->holders;
    erase(&s->old, found);
    return insert(table, p, *holders);
}

/* --- changes ---------------------------------------------------------------------------------- */

typedef struct {
    Py_ssize_t count;
    uint64_t low, high; /* XOR of the keys */
} change;

static void note(change *c, const uint8_t *key)
{
    uint64_t low, high;
    memcpy(&low, key, 8);
    memcpy(&high, key + 8, 8);
    c->count++;
    c->low ^= low;
    c->high ^= high;
}

static PyObject *changed(const change *c)
{
    uint64_t both[2] = {c->low, c->high};
    return Py_BuildValue("ny#", c->count, (const char *)both, (Py_ssize_t)sizeof both);
}

static int store_one(Table *table, const uint8_t *key, unsigned view, change *c)
{
    uint64_t bit = (uint64_t)1 << (view & 63);
    place p = place_of(key, view >> 6);
    shard *s = table->shards + p.shard;
    slot *found = find(&s->young, &p);
    uint64_t before = 0;
    if (found) {
        before = found->holders;
        found->holders |= bit;
    } else {
        if ((found = find(&s->old, &p))) {
            before = found->holders;
            erase(&s->old, found);
        }
        if (insert(table, &p, before | bit) < 0)
            return -1;
    }
    if (!(before & bit))
        note(c, key);
    return 0;
}

static int remove_one(Table *table, const uint8_t *key, unsigned view, change *c)
{
    uint64_t bit = (uint64_t)1 << (view & 63);
    place p = place_of(key, view >> 6);
    shard *s = table->shards + p.shard;
    generation *g = &s->young;
    slot *found = find(g, &p);
    if (!found)
        found = find(g = &s->old, &p);
    if (!found || !(found->holders & bit))
        return 0;
    note(c, key);
    found->holders &= ~bit;
    if (!found->holders)
        erase(g, found);
    return 0;
}

typedef int (*change_fn)(Table *, const uint8_t *, unsigned, change *);

static PyObject *change_all(Table *table, PyObject *args, change_fn change_one)
{
    Py_buffer packed;
    unsigned view;
    change c = {0, 0, 0};
    int failed = 0;
    if (!PyArg_ParseTuple(args, "Iy*", &view, &packed))
        return NULL;
    if (view >= 64 * MAX_GROUPS) {
        PyErr_Format(PyExc_ValueError, "view=%u: must be below %d", view, 64 * MAX_GROUPS);
        failed = 1;
    }
    const uint8_t *keys = packed.buf;
    for (Py_ssize_t at = 0; !failed && at + KEY_BYTES <= packed.len; at += KEY_BYTES)
        failed = change_one(table, keys + at, view, &c) < 0;
    PyBuffer_Release(&packed);
    return failed ? NULL : changed(&c);
}

static PyObject *Table_store(Table *table, PyObject *args)
{
    return change_all(table, args, store_one);
}

static PyObject *Table_remove(Table *table, PyObject *args)
{
    return change_all(table, args, remove_one);
}

static int copy_masks(uint64_t masks[MAX_GROUPS], const Py_buffer *packed)
{
    if (packed->len > MAX_GROUPS * 8) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of masks: at most %d", packed->len,
                     MAX_GROUPS * 8);
        return -1;
    }
    memset(masks, 0, MAX_GROUPS * 8);
    memcpy(masks, packed->buf, packed->len);
    return 0;
}

static PyObject *Table_sweep(Table *table, PyObject *args)
{
    unsigned index;
    Py_buffer packed;
    uint64_t retired[MAX_GROUPS];
    if (!PyArg_ParseTuple(args, "Iy*", &index, &packed))
        return NULL;
    int failed = copy_masks(retired, &packed) < 0;
    PyBuffer_Release(&packed);
    shard *s = table->shards + index % NUM_SHARDS;
    generation *both[2] = {&s->young, &s->old};
    for (int i = 0; i < 2 && !failed; i++) {
        size_t left = 0;
        for (size_t j = 0; j < both[i]->capacity; j++)
            left += (both[i]->slots[j].holders & ~retired[both[i]->slots[j].low & 0xff]) != 0;
        if (left)
            failed = rebuild(both[i], capacity_for(left), retired) < 0;
        else
            discard(both[i]);
    }
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* --- lookups ---------------------------------------------------------------------------------- */

static int record(PyObject *found, unsigned group, uint64_t views, Py_ssize_t depth)
{
    for (; views && depth; views &= views - 1) {
        PyObject *view = PyLong_FromLong(64 * group + __builtin_ctzll(views));
        PyObject *blocks = PyLong_FromSsize_t(depth);
        int failed = !view || !blocks || PyDict_SetItem(found, view, blocks) < 0;
        Py_XDECREF(view);
        Py_XDECREF(blocks);
        if (failed)
            return -1;
    }
    return 0;
}

/* Inline: GCC takes a function that only prefetches for one without effect, and drops the call. */
static inline __attribute__((always_inline)) void fetch_ahead(const Table *table,
                                                              const uint8_t *key, unsigned group)
{
    place p = place_of(key, group);
    const generation *g = &table->shards[p.shard].young;
    if (g->used) {
        const uint8_t *at = (const uint8_t *)(g->slots + home(g, p.low));
        __builtin_prefetch(at);
        __builtin_prefetch(at + CACHE_LINE); /* half of all runs of slots end there */
    }
}

/* Walks a chain for the views of one group that are in `alive`; stops where none is left. */
static int match_group(Table *table, const Py_buffer *keys, Py_ssize_t stride, unsigned group,
                       uint64_t alive, PyObject *found)
{
    Py_ssize_t num_blocks = (keys->len - KEY_BYTES) / stride + 1, block = 0;
    const uint8_t *first = keys->buf;
    for (; alive && block < num_blocks; block++) {
        uint64_t holders;
        place p = place_of(first + block * stride, group);
        if (block && block + LOOK_AHEAD < num_blocks)
            fetch_ahead(table, first + (block + LOOK_AHEAD) * stride, group);
        if (look_up(table, &p, &holders) < 0 || record(found, group, alive & ~holders, block) < 0)
            return -1;
        alive &= holders;
    }
    return record(found, group, alive, block);
}

static PyObject *Table_match(Table *table, PyObject *args)
{
    Py_buffer keys, live;
    Py_ssize_t stride;
    uint64_t alive[MAX_GROUPS];
    if (!PyArg_ParseTuple(args, "y*ny*", &keys, &stride, &live))
        return NULL;
    PyObject *found = copy_masks(alive, &live) < 0 ? NULL : PyDict_New();
    if (found && stride < KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "stride=%zd: must be at least %d", stride, KEY_BYTES);
        Py_CLEAR(found);
    }
    for (unsigned group = 0; found && keys.len >= KEY_BYTES && group < MAX_GROUPS; group++)
        if (alive[group] && match_group(table, &keys, stride, group, alive[group], found) < 0)
            Py_CLEAR(found);
    PyBuffer_Release(&keys);
    PyBuffer_Release(&live);
    return found;
}

static PyObject *Table_take_forgotten(Table *table, PyObject *unused)
{
    (void)unused;
    PyObject *masks =
        PyBytes_FromStringAndSize((const char *)table->forgotten, sizeof table->forgotten);
    memset(table->forgotten, 0, sizeof table->forgotten);
    return masks;
}

static PyObject *Table_max_keys(Table *table, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(2 * NUM_SHARDS * table->generation_keys);
}

static PyObject *Table_num_bytes(Table *table, void *unused)
{
    size_t slots = 0;
    (void)unused;
    for (int i = 0; i < NUM_SHARDS; i++)
        slots += table->shards[i].young.capacity + table->shards[i].old.capacity;
    return PyLong_FromSize_t(slots * sizeof(slot));
}

static Py_ssize_t Table_len(Table *table)
{
    size_t used = 0;
    for (int i = 0; i < NUM_SHARDS; i++)
        used += table->shards[i].young.used + table->shards[i].old.used;
    return (Py_ssize_t)used;
}

/* Whole pages, so that rounding up never exceeds the bound. */
static int Table_init(Table *table, PyObject *args, PyObject *keywords)
{
    Py_ssize_t max_bytes;
    static char *names[] = {"max_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "n", names, &max_bytes))
        return -1;
    size_t bytes = max_bytes < 0 ? 0 : (size_t)max_bytes / (2 * NUM_SHARDS);
    bytes -= bytes % PAGE_BYTES;
    if (!bytes || bytes / sizeof(slot) > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "max_bytes=%zd: must be at least %d", max_bytes,
                     2 * NUM_SHARDS * PAGE_BYTES);
        return -1;
    }
    table->generation_keys = (bytes / sizeof(slot) - 2) * 4 / 5;
    return 0;
}

static void Table_dealloc(Table *table)
{
    for (int i = 0; i < NUM_SHARDS; i++) {
        discard(&table->shards[i].young);
        discard(&table->shards[i].old);
    }
    Py_TYPE(table)->tp_free((PyObject *)table);
}

static PyMethodDef table_methods[] = {
    {"store", (PyCFunction)Table_store, METH_VARARGS,
     "store(view, packed) -> how many keys are new to the view, and their XOR"},
    {"remove", (PyCFunction)Table_remove, METH_VARARGS,
     "remove(view, packed) -> how many keys the view had, and their XOR"},
    {"match", (PyCFunction)Table_match, METH_VARARGS,
     "match(packed, stride, live) -> leading blocks by view, of those in the mask `live`"},
    {"sweep", (PyCFunction)Table_sweep, METH_VARARGS,
     "sweep(shard, retired): takes the views in the mask out of one shard"},
    {"take_forgotten", (PyCFunction)Table_take_forgotten, METH_NOARGS,
     "take_forgotten() -> mask of the views that lost keys to the bound since the last call"},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef table_properties[] = {
    {"max_keys", (getter)Table_max_keys, NULL, "then what was not used for long is forgotten",
     NULL},
    {"num_bytes", (getter)Table_num_bytes, NULL, "of the slots, used or not", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PySequenceMethods table_sequence = {.sq_length = (lenfunc)Table_len};

static PyTypeObject table_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "paceline.router._native.BlockTable",
    .tp_doc = "BlockTable(max_bytes)",
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Table_init,
    .tp_dealloc = (destructor)Table_dealloc,
    .tp_methods = table_methods,
    .tp_getset = table_properties,
    .tp_as_sequence = &table_sequence,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "paceline.router._native", "Table of blocks and their holders", 0,
    NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddType(made, &table_type) < 0)
        Py_CLEAR(made);
    return made;
}
