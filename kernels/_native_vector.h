/* Vectors of one instruction set. Included once for each set, before the code that uses them, with
 *     NAME(x)   the name of x for this set
 *     TARGET    its function attribute
 *     LANES     floats a vector; 8 and 16 are those of x86 */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float NAME(vector) __attribute__((vector_size(LANES * 4)));
typedef int32_t NAME(ints) __attribute__((vector_size(LANES * 4)));
typedef float NAME(loose) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define LOAD(address) (*(const NAME(loose) *)(address))
#define STORE(address, value) (*(NAME(loose) *)(address) = (value))
#define FILLED(value) ((NAME(vector)){0} + (value))
/* Where a lane of `mask` is set, that of `a`, else of `b`. */
#define SELECT(mask, a, b)                                                                         \
    ((NAME(vector))(((mask) & (NAME(ints))(a)) | (~(mask) & (NAME(ints))(b))))

/* Whether a lane is set. */
static ALWAYS_INLINE TARGET int NAME(any)(NAME(ints) mask)
{
#if LANES == 16
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif LANES == 8
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++)
        found |= mask[lane];
    return found;
#endif
}

/* e^x within 2 units in the last place; NaN stays NaN. x = n ln 2 + r with ln 2 in two parts, then
 * the series of e^r up to r^7. */
static ALWAYS_INLINE TARGET NAME(vector) NAME(exponential)(NAME(vector) x)
{
    x = SELECT(x < -87.0f, FILLED(-87.0f), x);
    x = SELECT(x > 88.0f, FILLED(88.0f), x);
    NAME(vector) shifted = x * 1.44269504f + 12582912.0f; /* the integer n in its low bits */
    NAME(vector) n = shifted - 12582912.0f;
    NAME(vector) r = x - n * 0.693359375f + n * 2.12194440e-4f;
    NAME(vector) sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    NAME(ints) power = ((NAME(ints))shifted - 0x4b400000 + 127) << 23;
    return sum * (NAME(vector))power;
}
