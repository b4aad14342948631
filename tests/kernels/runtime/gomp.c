/* SPDX-License-Identifier: Apache-2.0 */
/* OpenMP's parallel regions by plain threads, preloaded before libgomp: ThreadSanitizer understands these, while libgomp is
 * not compiled with it, so that every hand-over by its own futexes would be reported as a race. */
#include <pthread.h>

enum { MOST = 256 };

typedef void (*region)(void *);

typedef struct member {
    region body;
    void *data;
    int number, count;
} member;

static __thread int number, count = 1;

static void *enter(void *given) {
    const member *m = given;
    number = m->number;
    count = m->count;
    m->body(m->data);
    return NULL;
}

void GOMP_parallel(region body, void *data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

void GOMP_parallel(region body, void *data, unsigned threads, unsigned flags) {
    (void)flags;
    pthread_t made[MOST];
    member members[MOST];
    int n = threads < 1 ? 1 : threads > MOST ? MOST : (int)threads;
    for (int i = 0; i < n; i++)
        members[i] = (member){body, data, i, n};
    for (int i = 1; i < n; i++)
        if (pthread_create(&made[i], NULL, enter, &members[i]) != 0)
            __builtin_trap();
    enter(&members[0]);
    for (int i = 1; i < n; i++)
        pthread_join(made[i], NULL);
    number = 0;
    count = 1;
}

int omp_get_thread_num(void) { return number; }

int omp_get_num_threads(void) { return count; }
