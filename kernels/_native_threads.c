/* Threads that share out small tasks and wait without burning a core.
 *
 * A step has some hundred products of 10 to 1000 µs. Waking a sleeping thread costs as much as a
 * small product, so threads look for work for SPIN_NS before they sleep. The caller never waits
 * for a thread that has not begun: where other processes hold its core, the caller does the work
 * alone. One job at a time; a second caller meanwhile works alone.
 */
#include "_native.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 64
#define SPIN_NS 100000
#define OPEN 0x10000u /* in `state`: a job may be joined; the lower bits count who is inside */

static struct {
    task_fn task;
    void *argument;
    ptrdiff_t num_tasks;
    int max_helpers;
    _Atomic ptrdiff_t next;
} job;

static _Atomic uint32_t state, generation, num_sleeping;
static _Atomic int caller_sleeps;
static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t threads[MAX_THREADS];
static int num_started;

static void sleep_while(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int num_threads)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, num_threads, NULL, NULL, 0);
}

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Until `word` is another than `value`, or SPIN_NS have passed. Returns what it is. */
static uint32_t spin_while(_Atomic uint32_t *word, uint32_t value)
{
    int64_t end = now_ns() + SPIN_NS;
    do
        for (int i = 0; i < 32; i++) {
            uint32_t found = atomic_load_explicit(word, memory_order_acquire);
            if (found != value)
                return found;
            relax();
        }
    while (now_ns() < end);
    return value;
}

static void do_tasks(void)
{
    ptrdiff_t i;
    while ((i = atomic_fetch_add_explicit(&job.next, 1, memory_order_relaxed)) < job.num_tasks)
        job.task(job.argument, i);
}

static void leave(void)
{
    if (atomic_fetch_sub(&state, 1) == 1 && atomic_load(&caller_sleeps))
        wake(&state, 1);
}

/* Whether this thread may work on the job: it is then counted, and the caller waits for it. */
static int join(void)
{
    uint32_t seen = atomic_load(&state);
    while (seen & OPEN) {
        if (!atomic_compare_exchange_weak(&state, &seen, seen + 1))
            continue;
        if ((int)(seen - OPEN) < job.max_helpers)
            return 1;
        leave();
        return 0;
    }
    return 0;
}

static void *help(void *unused)
{
    uint32_t seen = 0;
    (void)unused;
    for (;;) {
        uint32_t found = spin_while(&generation, seen);
        while (found == seen) {
            atomic_fetch_add(&num_sleeping, 1);
            sleep_while(&generation, seen);
            atomic_fetch_sub(&num_sleeping, 1);
            found = atomic_load(&generation);
        }
        seen = found;
        if (join()) {
            do_tasks();
            leave();
        }
    }
    return NULL;
}

static void wait_for_helpers(void)
{
    uint32_t inside = atomic_fetch_and(&state, ~OPEN) & ~OPEN;
    while (inside) {
        uint32_t found = spin_while(&state, inside);
        if (found == inside) {
            atomic_store(&caller_sleeps, 1);
            sleep_while(&state, inside);
            atomic_store(&caller_sleeps, 0);
            found = atomic_load(&state);
        }
        inside = found;
    }
}

static void start_threads(int wanted)
{
    for (; num_started < wanted; num_started++) {
        if (pthread_create(&threads[num_started], NULL, help, NULL))
            return; /* fewer threads do the same work */
        pthread_detach(threads[num_started]);
    }
}

/* A thread that has slept long is often woken on the caller's core, where it waits for its turn
 * while other cores idle: a decode step after 0.6 s took 21 ms instead of 16. */
static void keep_off_this_core(void)
{
    cpu_set_t cores;
    int own = sched_getcpu();
    if (own < 0 || sched_getaffinity(0, sizeof cores, &cores) || CPU_COUNT(&cores) < 2)
        return;
    CPU_CLR((size_t)own, &cores);
    for (int i = 0; i < num_started; i++)
        pthread_setaffinity_np(threads[i], sizeof cores, &cores);
}

/* A child of fork has the caller's thread only. */
static void forget_threads(void)
{
    num_started = 0;
    atomic_store(&num_sleeping, 0);
    atomic_store(&state, 0);
    pthread_mutex_init(&caller_lock, NULL);
}

static void __attribute__((constructor)) watch_forks(void)
{
    pthread_atfork(NULL, NULL, forget_threads);
}

void run_tasks(task_fn task, void *argument, ptrdiff_t num_tasks, int num_threads)
{
    int max_helpers = (num_threads < MAX_THREADS ? num_threads : MAX_THREADS) - 1;
    if (num_tasks < 2 || max_helpers < 1 || pthread_mutex_trylock(&caller_lock)) {
        for (ptrdiff_t i = 0; i < num_tasks; i++)
            task(argument, i);
        return;
    }
    start_threads(max_helpers);
    job.task = task;
    job.argument = argument;
    job.num_tasks = num_tasks;
    job.max_helpers = max_helpers;
    atomic_store(&job.next, 0);
    atomic_store(&state, OPEN);
    atomic_fetch_add(&generation, 1);
    if (atomic_load(&num_sleeping)) {
        keep_off_this_core();
        wake(&generation, max_helpers);
    }
    do_tasks();
    wait_for_helpers();
    pthread_mutex_unlock(&caller_lock);
}
