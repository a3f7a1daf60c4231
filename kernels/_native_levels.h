/* Includes PER_LEVEL, a file's code in terms of _native_vector.h, once for each instruction set.
 * What it defines as NAME(x) is then x_portable and, on x86, x_avx2 and x_avx512. */
#define NAME(x) x##_portable
#define TARGET
#define LANES 4
#include "_native_vector.h"

#include PER_LEVEL
#undef NAME
#undef TARGET
#undef LANES

#if defined(__x86_64__)
#define NAME(x) x##_avx2
#define TARGET TARGET_AVX2
#define LANES 8
#include "_native_vector.h"

#include PER_LEVEL
#undef NAME
#undef TARGET
#undef LANES

#define NAME(x) x##_avx512
#define TARGET TARGET_AVX512
#define LANES 16
#include "_native_vector.h"

#include PER_LEVEL
#endif
