/* What the files of the compiled module share: instruction sets, threads, checks of arguments. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Instruction sets; the best that this CPU has and PACELINE_MAX_ISA allows, decided at import. */
enum level { PORTABLE, AVX2, AVX512, NUM_LEVELS };
extern int best_level;

#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,fma")))

/* False with a Python error set. */
int check_level(int level);
int check_row_size(ptrdiff_t size);
int check_row_values(const Py_buffer *values, ptrdiff_t num_rows, int value_bytes);

/* Runs task(argument, 0 … num_tasks - 1), in any order, on the caller and up to num_threads - 1
 * threads that wait for work. Returns when all are done. Needs no GIL. */
typedef void (*task_fn)(void *argument, ptrdiff_t task);
void run_tasks(task_fn task, void *argument, ptrdiff_t num_tasks, int num_threads);

PyObject *native_rms_norm(PyObject *module, PyObject *args);
PyObject *native_gate(PyObject *module, PyObject *args);
PyObject *native_rotate(PyObject *module, PyObject *args);
PyObject *native_row_max(PyObject *module, PyObject *args);
PyObject *native_filter(PyObject *module, PyObject *args);
PyObject *native_gumbel_max(PyObject *module, PyObject *args);
PyObject *native_token_scores(PyObject *module, PyObject *args);
PyObject *native_write_kv(PyObject *module, PyObject *args);
PyObject *native_attend(PyObject *module, PyObject *args);
PyObject *native_product(PyObject *module, PyObject *args);
PyObject *native_quantized_product(PyObject *module, PyObject *args);

#endif
