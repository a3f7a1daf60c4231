/* x @ weight + bias over a weight of 4 or 8 bits in groups of 32 along the depth.
 *
 *     weight[k, c] = scale[k / 32, c] (number[k, c] - zero[k / 32, c])
 *     x[r, k]     ~= step[r, k / 32] integer[r, k]      |integer| <= 127
 *     out[r, c]    = Σ_groups scale step (Σ_32 number integer - zero Σ_32 integer)
 *
 * A panel holds a block for each group: 16-bit floats scale[PANEL] and, where it has them,
 * zero[PANEL]; then the numbers, four of the depth of a column side by side: [8][PANEL][4] bytes,
 * or [4][PANEL][4] with the even quads in the low nibbles and the odd ones in the high ones.
 * kernels/quantized.py packs them. The sums of a group are integers, so that all instruction sets
 * agree on them.
 */
#include "_native_panels.h"

#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define GROUP 32
#define LEAST 1e-30f /* a group below it counts as zeros: its inverse would overflow */
#define TASK_NUMBERS (1 << 14)

struct quantized {
    struct panels panels;
    const float *rows; /* [rows, depth] as they came */
    int8_t *x;         /* [tiles][groups][rows of the tile][GROUP] */
    float *factors;    /* [tiles][groups][rows of the tile][step, sum] */
    ptrdiff_t depth, num_groups, block_bytes, head_bytes, rows_per_task;
    int bits, has_zeros;
    void (*quantize)(const float *x, int count, int8_t *integers, float *factors);
};

#define MAX_ROWS 4
#define NAME(x) x##_portable
#define TARGET
#define LANES 4
#define WIDTH_4 1
#define WIDTH_8 1
typedef float vector_portable __attribute__((vector_size(16)));
typedef uint8_t bytes_portable __attribute__((vector_size(16)));
typedef int16_t shorts_portable __attribute__((vector_size(32)));
typedef int32_t pairs_portable __attribute__((vector_size(32)));
/* 16 products fit 16 bits each, and so do the sums of a group's where numbers have 4 bits. */
typedef struct {
    shorts_portable narrow;
    pairs_portable wide;
} sums_portable;

static ALWAYS_INLINE bytes_portable low_portable(bytes_portable n) { return n & 15; }
static ALWAYS_INLINE bytes_portable high_portable(bytes_portable n) { return n >> 4; }

static ALWAYS_INLINE shorts_portable products_portable(bytes_portable n, const int8_t *x)
{
    typedef int8_t factors __attribute__((vector_size(16)));
    typedef int32_t quads __attribute__((vector_size(16)));
    int32_t quad;
    memcpy(&quad, x, 4);
    factors repeated = (factors)((quads){0} + quad);
    return __builtin_convertvector(n, shorts_portable) *
           __builtin_convertvector(repeated, shorts_portable);
}

static ALWAYS_INLINE pairs_portable paired(shorts_portable products)
{
    pairs_portable pairs = (pairs_portable)products;
    return ((pairs << 16) >> 16) + (pairs >> 16);
}

static ALWAYS_INLINE sums_portable add_4_portable(sums_portable sum, bytes_portable n,
                                                  const int8_t *x)
{
    sum.narrow += products_portable(n, x);
    return sum;
}

static ALWAYS_INLINE sums_portable add_8_portable(sums_portable sum, bytes_portable n,
                                                  const int8_t *x)
{
    sum.wide += paired(products_portable(n, x));
    return sum;
}

static ALWAYS_INLINE vector_portable joined(pairs_portable p)
{
    return (vector_portable){(float)(p[0] + p[1]), (float)(p[2] + p[3]), (float)(p[4] + p[5]),
                             (float)(p[6] + p[7])};
}

static ALWAYS_INLINE vector_portable total_4_portable(sums_portable sum)
{
    return joined(paired(sum.narrow));
}

static ALWAYS_INLINE vector_portable total_8_portable(sums_portable sum)
{
    return joined(sum.wide);
}

static ALWAYS_INLINE float wide(uint16_t half)
{
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value, magic = 0x1p112f; /* moves the exponent from 5 to 8 bits, subnormals too */
    memcpy(&value, &bits, 4);
    value *= magic;
    return half & 0x8000 ? -value : value;
}

static ALWAYS_INLINE vector_portable half_portable(const char *p)
{
    uint16_t h[4];
    memcpy(h, p, 8);
    return (vector_portable){wide(h[0]), wide(h[1]), wide(h[2]), wide(h[3])};
}
#include "_native_quantized.h"
#undef NAME
#undef TARGET
#undef LANES
#undef WIDTH_4
#undef WIDTH_8

#if defined(__x86_64__)
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define WIDTH_4 2
#define WIDTH_8 1
typedef __m256 vector_avx2;
typedef __m256i bytes_avx2;
/* 16-bit sums of pairs of products: at most 8 · 2 · 15 · 127 in a group, which fits. 8 bits are
 * summed as nibbles. */
typedef struct {
    __m256i low, high;
} sums_avx2;

static ALWAYS_INLINE TARGET bytes_avx2 low_avx2(bytes_avx2 n)
{
    return _mm256_and_si256(n, _mm256_set1_epi8(15));
}

static ALWAYS_INLINE TARGET bytes_avx2 high_avx2(bytes_avx2 n)
{
    return low_avx2(_mm256_srli_epi16(n, 4));
}

static ALWAYS_INLINE TARGET __m256i quad_avx2(const int8_t *x)
{
    int32_t quad;
    memcpy(&quad, x, 4);
    return _mm256_set1_epi32(quad);
}

static ALWAYS_INLINE TARGET sums_avx2 add_4_avx2(sums_avx2 sum, bytes_avx2 n, const int8_t *x)
{
    sum.low = _mm256_add_epi16(sum.low, _mm256_maddubs_epi16(n, quad_avx2(x)));
    return sum;
}

static ALWAYS_INLINE TARGET sums_avx2 add_8_avx2(sums_avx2 sum, bytes_avx2 n, const int8_t *x)
{
    sum.high = _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(high_avx2(n), quad_avx2(x)));
    return add_4_avx2(sum, low_avx2(n), x);
}

static ALWAYS_INLINE TARGET vector_avx2 total_4_avx2(sums_avx2 sum)
{
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum.low, _mm256_set1_epi16(1)));
}

static ALWAYS_INLINE TARGET vector_avx2 total_8_avx2(sums_avx2 sum)
{
    return _mm256_cvtepi32_ps(
        _mm256_add_epi32(_mm256_madd_epi16(sum.low, _mm256_set1_epi16(1)),
                         _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16))));
}

static ALWAYS_INLINE TARGET vector_avx2 half_avx2(const char *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
#include "_native_quantized.h"
#undef NAME
#undef TARGET
#undef LANES
#undef WIDTH_4
#undef WIDTH_8
#undef MAX_ROWS

#define MAX_ROWS 8
#define NAME(x) x##_vnni
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,fma")))
#define LANES 16
#define WIDTH_4 2
#define WIDTH_8 2
typedef __m512 vector_vnni;
typedef __m512i bytes_vnni;
typedef __m512i sums_vnni;

static ALWAYS_INLINE TARGET bytes_vnni low_vnni(bytes_vnni n)
{
    return _mm512_and_si512(n, _mm512_set1_epi8(15));
}

static ALWAYS_INLINE TARGET bytes_vnni high_vnni(bytes_vnni n)
{
    return low_vnni(_mm512_srli_epi16(n, 4));
}

static ALWAYS_INLINE TARGET sums_vnni add_8_vnni(sums_vnni sum, bytes_vnni n, const int8_t *x)
{
    int32_t quad;
    memcpy(&quad, x, 4);
    return _mm512_dpbusd_epi32(sum, n, _mm512_set1_epi32(quad));
}
#define add_4_vnni add_8_vnni

static ALWAYS_INLINE TARGET vector_vnni total_8_vnni(sums_vnni sum)
{
    return _mm512_cvtepi32_ps(sum);
}
#define total_4_vnni total_8_vnni

static ALWAYS_INLINE TARGET vector_vnni half_vnni(const char *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
#include "_native_quantized.h"
#endif

typedef void (*tile_fn)(const struct panels *p, int rows, ptrdiff_t row, ptrdiff_t panel,
                        const struct lines *ahead);

static const struct kernel {
    tile_fn tile_of_4, tile_of_8;
    void (*quantize)(const float *x, int count, int8_t *integers, float *factors);
    int max_rows;
} kernels[NUM_LEVELS] = {
    {tile_of_4_portable, tile_of_8_portable, quantize_portable, 4},
#if defined(__x86_64__)
    {tile_of_4_avx2, tile_of_8_avx2, quantize_avx2, 4},
    {tile_of_4_vnni, tile_of_8_vnni, quantize_vnni, 8},
#endif
};

/* AVX-512 without its integer products is no faster here than AVX2. */
static const struct kernel *find_kernel(int level)
{
#if defined(__x86_64__)
    if (level == AVX512 && !__builtin_cpu_supports("avx512vnni"))
        level = AVX2;
    if (level == AVX2 && !__builtin_cpu_supports("f16c"))
        level = PORTABLE;
#endif
    return &kernels[level];
}

static void quantize_rows(void *argument, ptrdiff_t task)
{
    const struct quantized *q = argument;
    ptrdiff_t first = task * q->rows_per_task, height = q->panels.height;
    ptrdiff_t end = least(first + q->rows_per_task, q->panels.rows);
    for (ptrdiff_t row = first; row < end; row++) {
        ptrdiff_t tile = row / height, r = row % height;
        ptrdiff_t at = tile * height * q->num_groups + r;
        const float *x = q->rows + row * q->depth;
        for (ptrdiff_t g = 0; g < q->num_groups; g++, at += height)
            q->quantize(x + g * GROUP, (int)least(GROUP, q->depth - g * GROUP),
                        q->x + at * GROUP, q->factors + at * 2);
    }
}

/* False where there is no memory for the integers. */
static int compute(struct quantized *q, int num_threads)
{
    struct panels *p = &q->panels;
    p->height = tile_height(p->rows, p->max_rows);
    ptrdiff_t num_cells = ceil_div(p->rows, p->height) * p->height * q->num_groups;
    char *memory = malloc((size_t)num_cells * (GROUP + 8));
    if (!memory)
        return 0;
    q->factors = (float *)memory;
    q->x = (int8_t *)(memory + num_cells * 8);
    p->x = (const char *)q->x;
    q->rows_per_task = ceil_div(TASK_NUMBERS, q->depth);
    run_tasks(quantize_rows, q, ceil_div(p->rows, q->rows_per_task), num_threads);
    run_panels(p, num_threads);
    free(memory);
    return 1;
}

static int check_sizes(const struct quantized *q, const Py_buffer *x, const Py_buffer *weight,
                       const Py_buffer *bias, const Py_buffer *out)
{
    const struct panels *p = &q->panels;
    ptrdiff_t limit = (ptrdiff_t)1 << 28;
    if ((q->bits == 4 || q->bits == 8) && p->rows > 0 && q->depth > 0 && p->columns > 0 &&
        p->rows < limit && q->depth < limit && p->columns < limit &&
        x->len / 4 == p->rows * q->depth &&
        weight->len == ceil_div(p->columns, PANEL) * p->panel_bytes &&
        (uintptr_t)weight->buf % 64 == 0 && out->len / 4 == p->rows * p->columns &&
        (!p->bias || bias->len / 4 == p->columns))
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "product of %zd rows, depth %zd, %zd columns of %d bits: x has %zd bytes, weight "
                 "%zd, out %zd; they must agree, and weight must lie at a multiple of 64",
                 p->rows, q->depth, p->columns, q->bits, x->len, weight->len, out->len);
    return 0;
}

static void set_sizes(struct quantized *q)
{
    q->num_groups = ceil_div(q->depth, GROUP);
    q->head_bytes = PANEL * 2 * (q->has_zeros ? 2 : 1);
    q->block_bytes = q->head_bytes + GROUP * PANEL * q->bits / 8;
    q->panels.panel_bytes = q->num_groups * q->block_bytes;
    q->panels.row_bytes = q->num_groups * GROUP;
}

PyObject *native_quantized_product(PyObject *module, PyObject *args)
{
    Py_buffer x, weight, bias, out;
    struct quantized q;
    struct panels *p = &q.panels;
    int num_threads, level = best_level, valid;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*z*w*nnnippi|i", &x, &weight, &bias, &out, &p->rows, &q.depth,
                          &p->columns, &q.bits, &q.has_zeros, &p->accumulate, &num_threads,
                          &level))
        return NULL;
    q.rows = x.buf;
    p->weight = weight.buf;
    p->bias = bias.buf;
    p->out = out.buf;
    set_sizes(&q);
    valid = check_level(level) && check_sizes(&q, &x, &weight, &bias, &out);
    if (valid) {
        const struct kernel *kernel = find_kernel(level);
        p->tile = q.bits == 4 ? kernel->tile_of_4 : kernel->tile_of_8;
        p->max_rows = kernel->max_rows;
        q.quantize = kernel->quantize;
        Py_BEGIN_ALLOW_THREADS
        valid = compute(&q, num_threads);
        Py_END_ALLOW_THREADS
        if (!valid)
            PyErr_NoMemory();
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&weight);
    if (bias.obj)
        PyBuffer_Release(&bias);
    PyBuffer_Release(&out);
    return valid ? Py_NewRef(Py_None) : NULL;
}
