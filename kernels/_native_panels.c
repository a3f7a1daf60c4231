/* Shares out a product over panels.
 *
 * A panel is read front to back, whatever the number of rows, and only once from memory: for few
 * rows at the rate that memory gives, for many rows from the caches.
 */
#include "_native_panels.h"

#include <unistd.h>

#define TASKS_PER_THREAD 8 /* a thread that loses its core holds up an eighth of its share */

/* What a core keeps near while it streams: half of its second-level cache. */
static ptrdiff_t near_bytes = 512 << 10;

static void __attribute__((constructor)) find_near_bytes(void)
{
#if defined(_SC_LEVEL2_CACHE_SIZE)
    long cache_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE); /* 0 where it is not known */
    if (cache_bytes > 0)
        near_bytes = least(most(cache_bytes / 2, 128 << 10), 1 << 20);
#endif
}

/* Few rows: panel after panel, all rows of each; the next panel comes from memory meanwhile. */
static void stream_panels(void *argument, ptrdiff_t task)
{
    const struct panels *p = argument;
    ptrdiff_t first = task * p->panels_per_task;
    ptrdiff_t end = least(first + p->panels_per_task, p->num_panels);
    ptrdiff_t num_lines = ceil_div(p->panel_bytes / 64, ceil_div(p->rows, p->height));
    /* Threads take tasks in turn: the panel after the last is the first of the own next task. */
    ptrdiff_t next_task = (task + p->num_threads) * p->panels_per_task;
    for (ptrdiff_t panel = first; panel < end; panel++) {
        ptrdiff_t next = panel + 1 < end ? panel + 1 : next_task;
        struct lines ahead = {p->weight + next * p->panel_bytes,
                              next < p->num_panels ? num_lines : 0};
        for (ptrdiff_t row = 0; row < p->rows; row += p->height, ahead.first += 64 * ahead.count)
            p->tile(p, (int)least(p->height, p->rows - row), row, panel, &ahead);
    }
}

/* Many rows: some panels stay near while the rows pass by, and the next rows come meanwhile. */
static void pass_rows(void *argument, ptrdiff_t task)
{
    const struct panels *p = argument;
    ptrdiff_t first = task / p->num_row_tasks * p->panels_per_task;
    ptrdiff_t end = least(first + p->panels_per_task, p->num_panels);
    ptrdiff_t row = task % p->num_row_tasks * p->rows_per_task;
    ptrdiff_t last_row = least(row + p->rows_per_task, p->rows);
    for (; row < last_row; row += p->height) {
        ptrdiff_t next = row + p->height, num_next = least(p->height, last_row - next);
        ptrdiff_t num_lines = num_next > 0 ? num_next * p->row_bytes / 64 / (end - first) : 0;
        struct lines ahead = {p->x + next * p->row_bytes, num_lines};
        for (ptrdiff_t panel = first; panel < end; panel++, ahead.first += 64 * num_lines)
            p->tile(p, (int)least(p->height, last_row - row), row, panel, &ahead);
    }
}

ptrdiff_t tile_height(ptrdiff_t rows, int max_rows)
{
    return ceil_div(rows, ceil_div(rows, max_rows));
}

void run_panels(struct panels *p, int num_threads)
{
    ptrdiff_t wanted = (ptrdiff_t)num_threads * TASKS_PER_THREAD;
    p->num_panels = ceil_div(p->columns, PANEL);
    p->height = tile_height(p->rows, p->max_rows);
    p->num_threads = num_threads > 1 ? num_threads : 1;
    if (p->rows * p->row_bytes <= near_bytes) {
        p->panels_per_task = ceil_div(p->num_panels, wanted);
        run_tasks(stream_panels, p, ceil_div(p->num_panels, p->panels_per_task), num_threads);
        return;
    }
    ptrdiff_t near = near_bytes / p->panel_bytes;
    p->panels_per_task = near < 1 ? 1 : near;
    ptrdiff_t num_groups = ceil_div(p->num_panels, p->panels_per_task);
    ptrdiff_t num_tiles = ceil_div(p->rows, p->height);
    ptrdiff_t tiles = ceil_div(num_tiles, ceil_div(wanted, num_groups));
    p->rows_per_task = tiles * p->height;
    p->num_row_tasks = ceil_div(p->rows, p->rows_per_task);
    run_tasks(pass_rows, p, num_groups * p->num_row_tasks, num_threads);
}
