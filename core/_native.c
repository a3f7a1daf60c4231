/* Block keys: the SHA-256 chain of core/keys.py, whose chain_keys_reference is the definition.
 *
 * One key hashes 116 bytes (tag, parent, 16 token ids, number of extras), which pad to exactly two
 * SHA-256 blocks. SHA-256 as in FIPS 180-4; with the SHA extensions of x86 where the CPU has them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define KEY_BYTES 32
#define BLOCK_TOKEN_BYTES 64 /* 16 tokens of 4 bytes */
#define MESSAGE_BYTES 116
#define PADDED_BYTES 128
#define PARENT_OFFSET 12
#define TOKENS_OFFSET 48

static const uint32_t round_constants[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static const uint32_t initial_state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

typedef void (*compress_fn)(uint32_t state[8], const uint8_t *block);

static uint32_t load_be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be32(uint8_t *p, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(value >> (24 - 8 * i));
}

static void store_le32(uint8_t *p, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(value >> (8 * i));
}

static uint32_t rotr(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void compress_portable(uint32_t state[8], const uint8_t *block)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = load_be32(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (rotr(a, 7) ^ rotr(a, 18) ^ a >> 3) +
               (rotr(b, 17) ^ rotr(b, 19) ^ b >> 10);
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t e = s[4], a = s[0];
        uint32_t t1 = s[7] + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & s[5]) ^ (~e & s[6])) +
                      round_constants[i] + w[i];
        uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) +
                      ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        state[i] += s[i];
}

#if defined(__x86_64__)
/* The instructions want the state as (a b e f) and (c d g h), four rounds a step. */
__attribute__((target("sha,sse4.1"))) static void compress_sha_ni(uint32_t state[8],
                                                                  const uint8_t *block)
{
    const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i *k = (const __m128i *)round_constants;
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, cdab, 0xF0);
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (i < 4) {
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)block + i), byte_swap);
        } else {
            __m128i last = w[(i + 3) & 3];
            __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]),
                                        _mm_alignr_epi8(last, w[(i + 2) & 3], 4));
            w[i & 3] = _mm_sha256msg2_epu32(sum, last);
        }
        __m128i keyed = _mm_add_epi32(w[i & 3], k[i]);
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
    __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static int has_sha_ni(void)
{
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("sse4.1") || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return b >> 29 & 1;
}
#endif

static compress_fn fastest_compress(void)
{
#if defined(__x86_64__)
    if (has_sha_ni())
        return compress_sha_ni;
#endif
    return compress_portable;
}

/* Everything of the padded message that is the same for each key. */
static void prepare_message(uint8_t message[PADDED_BYTES])
{
    memset(message, 0, PADDED_BYTES);
    memcpy(message, "pl-key-1", 8);
    store_le32(message + 8, KEY_BYTES);
    store_le32(message + 44, BLOCK_TOKEN_BYTES);
    message[MESSAGE_BYTES] = 0x80;
    store_be32(message + PADDED_BYTES - 4, 8 * MESSAGE_BYTES);
}

static void hash_chain(compress_fn compress, const uint8_t *parent, const uint8_t *tokens,
                       Py_ssize_t num_blocks, uint8_t *keys)
{
    uint8_t message[PADDED_BYTES];
    prepare_message(message);
    for (Py_ssize_t i = 0; i < num_blocks; i++, keys += KEY_BYTES) {
        uint32_t state[8];
        memcpy(state, initial_state, sizeof state);
        memcpy(message + PARENT_OFFSET, parent, KEY_BYTES);
        memcpy(message + TOKENS_OFFSET, tokens + i * BLOCK_TOKEN_BYTES, BLOCK_TOKEN_BYTES);
        compress(state, message);
        compress(state, message + 64);
        for (int j = 0; j < 8; j++)
            store_be32(keys + 4 * j, state[j]);
        parent = keys;
    }
}

static PyObject *run_chain(PyObject *args, compress_fn compress)
{
    Py_buffer parent, tokens;
    PyObject *keys = NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &parent, &tokens))
        return NULL;
    Py_ssize_t num_blocks = tokens.len / BLOCK_TOKEN_BYTES;
    if (parent.len != KEY_BYTES)
        PyErr_Format(PyExc_ValueError, "parent has %zd bytes: must be a key of %d", parent.len,
                     KEY_BYTES);
    else
        keys = PyBytes_FromStringAndSize(NULL, num_blocks * KEY_BYTES);
    if (keys) {
        uint8_t *out = (uint8_t *)PyBytes_AS_STRING(keys);
        Py_BEGIN_ALLOW_THREADS
        hash_chain(compress, parent.buf, tokens.buf, num_blocks, out);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&tokens);
    return keys;
}

static PyObject *chain_keys(PyObject *module, PyObject *args)
{
    (void)module;
    return run_chain(args, fastest_compress());
}

static PyObject *chain_keys_portable(PyObject *module, PyObject *args)
{
    (void)module;
    return run_chain(args, compress_portable);
}

static PyMethodDef methods[] = {
    {"chain_keys", chain_keys, METH_VARARGS,
     "chain_keys(parent, packed_token_ids) -> keys of the full 16-token blocks, 32 bytes each"},
    {"chain_keys_portable", chain_keys_portable, METH_VARARGS,
     "chain_keys without CPU extensions, for tests of that path"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "paceline.core._native", "SHA-256 chain of block keys", 0, methods,
    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
