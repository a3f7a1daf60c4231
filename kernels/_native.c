/* Verified copy of KV pages: one loop loads, sums and stores. kernels/checksum.py defines the sum.
 *
 * A page is num_runs runs of num_heads cells. Each cell's 8-byte words are hashed by position,
 *     (lo32 + key[2i + 8 run]) * (hi32 + key[2i + 1 + 8 run]),
 * and added up per head. Whole pages leave through streaming stores: the destination is not read
 * again soon, and a plain store would first fetch the line that it overwrites. Where the CPU has
 * AVX2 or AVX-512 is decided at import.
 */
#include "_native.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define NUM_KEYS 4096
#define KEYS_PER_RUN 8
#define KEY_SEED 0x706163656c696e65u
#define PREFETCH_BYTES 1024 /* measured on scattered 720 KiB pages: 3 to 7 % over none */

enum store { NO_STORE, PLAIN_STORE, STREAMING_STORE };

/* Copies (destination may be NULL with NO_STORE) and hashes `bytes`; keys do not wrap within it. */
typedef uint64_t (*segment_fn)(uint8_t *destination, const uint8_t *source, size_t bytes,
                               const uint32_t *key);

struct geometry {
    Py_ssize_t page_bytes, num_runs, num_heads, cell_bytes, used_bytes;
};

static uint32_t keys[NUM_KEYS] __attribute__((aligned(64)));
int best_level = PORTABLE;
static const char *const level_names[NUM_LEVELS] = {"portable", "avx2", "avx512"};

/* splitmix64 (Steele, Lea, Flood 2014); low halves of its outputs. */
static void fill_keys(void)
{
    uint64_t state = KEY_SEED;
    for (int i = 0; i < NUM_KEYS; i++) {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        keys[i] = (uint32_t)(z ^ z >> 31);
    }
}

static ALWAYS_INLINE uint64_t hash_words(uint8_t *d, const uint8_t *s, size_t bytes,
                                         const uint32_t *key, enum store store)
{
    uint64_t sum = 0, word;
    for (size_t i = 0; i < bytes; i += 8, key += 2) {
        memcpy(&word, s + i, 8);
        if (store != NO_STORE)
            memcpy(d + i, &word, 8);
        word = le64toh(word);
        uint32_t low = (uint32_t)word + key[0], high = (uint32_t)(word >> 32) + key[1];
        sum += (uint64_t)low * high;
    }
    return sum;
}

static uint64_t portable_sum(uint8_t *d, const uint8_t *s, size_t n, const uint32_t *key)
{
    return hash_words(d, s, n, key, NO_STORE);
}

static uint64_t portable_copy(uint8_t *d, const uint8_t *s, size_t n, const uint32_t *key)
{
    return hash_words(d, s, n, key, PLAIN_STORE);
}

#if defined(__x86_64__)
static ALWAYS_INLINE TARGET_AVX2 __m256i step_avx2(uint8_t *d, const uint8_t *s,
                                                   const uint32_t *key, __m256i sum,
                                                   enum store store)
{
    __m256i words = _mm256_loadu_si256((const __m256i *)s);
    if (store == PLAIN_STORE)
        _mm256_storeu_si256((__m256i *)d, words);
    if (store == STREAMING_STORE)
        _mm256_stream_si256((__m256i *)d, words);
    __m256i keyed = _mm256_add_epi32(words, _mm256_load_si256((const __m256i *)key));
    return _mm256_add_epi64(sum, _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
}

static ALWAYS_INLINE TARGET_AVX2 uint64_t hash_avx2(uint8_t *d, const uint8_t *s, size_t bytes,
                                                    const uint32_t *key, enum store store)
{
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                       _mm256_setzero_si256()};
    uint64_t lanes[4];
    size_t i = 0;
    for (; i + 128 <= bytes; i += 128, key += 32) {
        _mm_prefetch((const char *)s + i + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)s + i + PREFETCH_BYTES + 64, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            sums[j] = step_avx2(d + i + 32 * j, s + i + 32 * j, key + 8 * j, sums[j], store);
    }
    for (; i + 32 <= bytes; i += 32, key += 8)
        sums[0] = step_avx2(d + i, s + i, key, sums[0], store);
    sums[0] = _mm256_add_epi64(sums[0], sums[1]);
    sums[2] = _mm256_add_epi64(sums[2], sums[3]);
    _mm256_storeu_si256((__m256i *)lanes, _mm256_add_epi64(sums[0], sums[2]));
    uint64_t rest = hash_words(d + i, s + i, bytes - i, key, store);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] + rest;
}

static ALWAYS_INLINE TARGET_AVX512 __m512i step_avx512(uint8_t *d, const uint8_t *s,
                                                       const uint32_t *key, __m512i sum,
                                                       enum store store)
{
    __m512i words = _mm512_loadu_si512(s);
    if (store == PLAIN_STORE)
        _mm512_storeu_si512(d, words);
    if (store == STREAMING_STORE)
        _mm512_stream_si512((__m512i *)d, words);
    __m512i keyed = _mm512_add_epi32(words, _mm512_loadu_si512(key));
    return _mm512_add_epi64(sum, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
}

static ALWAYS_INLINE TARGET_AVX512 uint64_t hash_avx512(uint8_t *d, const uint8_t *s, size_t bytes,
                                                        const uint32_t *key, enum store store)
{
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    size_t i = 0;
    for (; i + 128 <= bytes; i += 128, key += 32) {
        _mm_prefetch((const char *)s + i + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)s + i + PREFETCH_BYTES + 64, _MM_HINT_T0);
        sums[0] = step_avx512(d + i, s + i, key, sums[0], store);
        sums[1] = step_avx512(d + i + 64, s + i + 64, key + 16, sums[1], store);
    }
    uint64_t rest = hash_words(d + i, s + i, bytes - i, key, store);
    return (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(sums[0], sums[1])) + rest;
}

#define DEFINE_VARIANT(name, target, hash, store)                                                  \
    static target uint64_t name(uint8_t *d, const uint8_t *s, size_t n, const uint32_t *key)       \
    {                                                                                              \
        return hash(d, s, n, key, store);                                                          \
    }
DEFINE_VARIANT(avx2_sum, TARGET_AVX2, hash_avx2, NO_STORE)
DEFINE_VARIANT(avx2_copy, TARGET_AVX2, hash_avx2, PLAIN_STORE)
DEFINE_VARIANT(avx2_stream, TARGET_AVX2, hash_avx2, STREAMING_STORE)
DEFINE_VARIANT(avx512_sum, TARGET_AVX512, hash_avx512, NO_STORE)
DEFINE_VARIANT(avx512_copy, TARGET_AVX512, hash_avx512, PLAIN_STORE)
DEFINE_VARIANT(avx512_stream, TARGET_AVX512, hash_avx512, STREAMING_STORE)
#endif

static const segment_fn segments[NUM_LEVELS][3] = {
    {portable_sum, portable_copy, portable_copy},
#if defined(__x86_64__)
    {avx2_sum, avx2_copy, avx2_stream},
    {avx512_sum, avx512_copy, avx512_stream},
#endif
};

static int level_of_this_cpu(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return AVX2;
#endif
    return PORTABLE;
}

/* What this CPU has and PACELINE_MAX_ISA allows. -1 with a Python error set. */
static int detect_level(void)
{
    const char *wanted = getenv("PACELINE_MAX_ISA");
    int best = level_of_this_cpu();
    if (!wanted || !*wanted)
        return best;
    for (int level = 0; level < NUM_LEVELS; level++)
        if (!strcmp(wanted, level_names[level]))
            return level < best ? level : best;
    PyErr_Format(PyExc_ValueError, "PACELINE_MAX_ISA=%s: must be portable, avx2 or avx512", wanted);
    return -1;
}

/* Streaming stores are for whole cache lines. Where the keys wrap in the middle of one, its second
 * half is copied plainly: this many bytes. */
static size_t rest_of_line(const uint8_t *destination)
{
    size_t rest = -(uintptr_t)destination % 64;
    return destination && rest % 32 == 0 ? rest : 0;
}

static uint64_t hash_cell(segment_fn segment, uint8_t *destination, const uint8_t *source,
                          size_t bytes, Py_ssize_t run)
{
    size_t offset = (size_t)run * KEYS_PER_RUN % NUM_KEYS;
    uint64_t sum = 0;
    while (bytes) {
        size_t until_wrap = (NUM_KEYS - offset) * sizeof *keys, line = rest_of_line(destination);
        size_t limit = line ? line : until_wrap;
        size_t part = bytes < limit ? bytes : limit;
        sum += (line ? portable_copy : segment)(destination, source, part, keys + offset);
        if (destination)
            destination += part;
        source += part;
        bytes -= part;
        offset = (offset + part / sizeof *keys) % NUM_KEYS;
    }
    return sum;
}

static void hash_page(const struct geometry *g, segment_fn segment, uint8_t *destination,
                      const uint8_t *source, uint64_t *sums)
{
    for (Py_ssize_t run = 0; run < g->num_runs; run++)
        for (Py_ssize_t head = 0; head < g->num_heads; head++) {
            Py_ssize_t at = (run * g->num_heads + head) * g->cell_bytes;
            uint8_t *to = destination ? destination + at : NULL;
            sums[head] += hash_cell(segment, to, source + at, (size_t)g->used_bytes, run);
        }
}

static int streams(const struct geometry *g, const uint8_t *destination)
{
    int aligned = (uintptr_t)destination % 64 == 0 && g->cell_bytes % 64 == 0;
    return aligned && g->used_bytes == g->cell_bytes;
}

static void hash_pages(const struct geometry *g, int level, uint8_t *destination,
                       const uint8_t *source, const int64_t *to, const int64_t *from,
                       Py_ssize_t num_pages, uint64_t *sums)
{
    enum store store = NO_STORE;
    if (destination)
        store = streams(g, destination) ? STREAMING_STORE : PLAIN_STORE;
    memset(sums, 0, (size_t)(num_pages * g->num_heads) * sizeof *sums);
    for (Py_ssize_t i = 0; i < num_pages; i++) {
        uint8_t *target = destination ? destination + to[i] * g->page_bytes : NULL;
        hash_page(g, segments[level][store], target, source + from[i] * g->page_bytes,
                  sums + i * g->num_heads);
    }
#if defined(__x86_64__)
    if (store == STREAMING_STORE)
        _mm_sfence();
#endif
}

static int check_geometry(const struct geometry *g)
{
    int words = g->cell_bytes > 0 && g->cell_bytes % 8 == 0 && g->used_bytes > 0 &&
                g->used_bytes % 8 == 0 && g->used_bytes <= g->cell_bytes;
    Py_ssize_t limit = (Py_ssize_t)1 << 31;
    int sized = g->num_runs > 0 && g->num_heads > 0 && g->num_runs < limit && g->num_heads < limit;
    if (words && sized && g->page_bytes / g->cell_bytes / g->num_heads == g->num_runs &&
        g->page_bytes == g->num_runs * g->num_heads * g->cell_bytes)
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "page of %zd bytes, %zd runs, %zd heads, cells of %zd bytes, %zd used: "
                 "must agree, in multiples of 8",
                 g->page_bytes, g->num_runs, g->num_heads, g->cell_bytes, g->used_bytes);
    return 0;
}

static int check_pages(const char *name, const Py_buffer *ids, const Py_buffer *memory,
                       Py_ssize_t page_bytes)
{
    Py_ssize_t num_pages = memory->len / page_bytes;
    const int64_t *page = ids->buf;
    for (Py_ssize_t i = 0; i < ids->len / 8; i++)
        if (page[i] < 0 || page[i] >= num_pages) {
            PyErr_Format(PyExc_IndexError, "%s[%zd]=%lld: the pool has %zd pages", name, i,
                         (long long)page[i], num_pages);
            return 0;
        }
    return 1;
}

static int check_lengths(const Py_buffer *to, const Py_buffer *from, const Py_buffer *sums,
                         Py_ssize_t num_heads)
{
    if (from->len % 8 == 0 && to->len == from->len && sums->len / num_heads == from->len &&
        sums->len == from->len * num_heads && (uintptr_t)from->buf % 8 == 0 &&
        (uintptr_t)to->buf % 8 == 0 && (uintptr_t)sums->buf % 8 == 0)
        return 1;
    PyErr_SetString(PyExc_ValueError,
                    "page ids (int64) of both sides and sums (uint64, one a page and head) must "
                    "have matching lengths");
    return 0;
}

int check_level(int level)
{
    if (level >= 0 && level <= best_level)
        return 1;
    PyErr_Format(PyExc_ValueError, "level=%d: this CPU has 0 to %d", level, best_level);
    return 0;
}

int check_row_size(ptrdiff_t size)
{
    if (size > 0 && size < (ptrdiff_t)1 << 28)
        return 1;
    PyErr_Format(PyExc_ValueError, "rows of %zd numbers are not supported", size);
    return 0;
}

int check_row_values(const Py_buffer *values, ptrdiff_t num_rows, int value_bytes)
{
    if (values->len == num_rows * value_bytes && (uintptr_t)values->buf % value_bytes == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes for %zd rows, %d a row are needed", values->len,
                 num_rows, value_bytes);
    return 0;
}

static PyObject *copy_pages(PyObject *module, PyObject *args)
{
    Py_buffer destination, source, to, from, sums;
    struct geometry g;
    int level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*y*y*nnnnnw*|i", &destination, &source, &to, &from,
                          &g.page_bytes, &g.num_runs, &g.num_heads, &g.cell_bytes, &g.used_bytes,
                          &sums, &level))
        return NULL;
    valid = check_geometry(&g) && check_lengths(&to, &from, &sums, g.num_heads) &&
            check_pages("destination_pages", &to, &destination, g.page_bytes) &&
            check_pages("source_pages", &from, &source, g.page_bytes) && check_level(level);
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        hash_pages(&g, level, destination.buf, source.buf, to.buf, from.buf, from.len / 8,
                   sums.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&destination);
    PyBuffer_Release(&source);
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    PyBuffer_Release(&sums);
    return valid ? Py_NewRef(Py_None) : NULL;
}

static PyObject *sum_pages(PyObject *module, PyObject *args)
{
    Py_buffer memory, pages, sums;
    struct geometry g;
    int level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*nnnnnw*|i", &memory, &pages, &g.page_bytes, &g.num_runs,
                          &g.num_heads, &g.cell_bytes, &g.used_bytes, &sums, &level))
        return NULL;
    valid = check_geometry(&g) && check_lengths(&pages, &pages, &sums, g.num_heads) &&
            check_pages("pages", &pages, &memory, g.page_bytes) && check_level(level);
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        hash_pages(&g, level, NULL, memory.buf, NULL, pages.buf, pages.len / 8, sums.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&pages);
    PyBuffer_Release(&sums);
    return valid ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"attend", native_attend, METH_VARARGS, "Attends over a paged pool."},
    {"copy_pages", copy_pages, METH_VARARGS, "Copies pages and sums what it copies."},
    {"filter", native_filter, METH_VARARGS, "Bounds of the logits that filters keep."},
    {"gate", native_gate, METH_VARARGS, "Multiplies by an activated gate."},
    {"gumbel_max", native_gumbel_max, METH_VARARGS, "Draws one token from each row."},
    {"rms_norm", native_rms_norm, METH_VARARGS, "Root mean square norm."},
    {"rotate", native_rotate, METH_VARARGS, "Rotates heads by their positions."},
    {"row_max", native_row_max, METH_VARARGS, "Highest number of each row, and where."},
    {"write_kv", native_write_kv, METH_VARARGS, "Writes new KV into a paged pool."},
    {"product", native_product, METH_VARARGS, "Multiplies by a packed weight."},
    {"quantized_product", native_quantized_product, METH_VARARGS, "The same, of 4 or 8 bits."},
    {"sum_pages", sum_pages, METH_VARARGS, "Sums pages."},
    {"token_scores", native_token_scores, METH_VARARGS, "Log-probabilities of tokens."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "paceline.kernels._native", "Compiled kernels of the CPU", 0, methods,
    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *self = PyModule_Create(&module);
    int level = detect_level();
    if (level < 0) {
        Py_XDECREF(self);
        return NULL;
    }
    best_level = level;
    fill_keys();
    if (self && PyModule_AddIntConstant(self, "BEST_LEVEL", best_level) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
