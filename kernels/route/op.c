/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens are shared out over the team; there are few experts, so that the best are looked for one
 * after the other. */
#include <math.h>
#include <string.h>

#include "pvr.h"

static void choose(const float *logits, size_t experts, size_t used, int norm, uint32_t *out) {
    float total = 0, most = 0, last = INFINITY;
    size_t last_id = 0;
    for (size_t j = 0; j < used; j++) {
        size_t id = experts;
        for (size_t e = 0; e < experts; e++) {
            const int later = logits[e] < last || (logits[e] == last && e > last_id);
            if (later && (id == experts || logits[e] > logits[id]))
                id = e;
        }
        if (id == experts)
            id = 0; /* numbers that are none: any expert will do */
        last = logits[id];
        last_id = id;
        most = j ? most : last;
        const float share = expf(last - most);
        total += share;
        out[2 * j] = (uint32_t)id;
        memcpy(out + 2 * j + 1, &share, 4);
    }
    if (!norm) {
        total = 0;
        for (size_t e = 0; e < experts; e++)
            total += expf(logits[e] - most);
    }
    for (size_t j = 0; j < used; j++) {
        float share;
        memcpy(&share, out + 2 * j + 1, 4);
        share /= total;
        memcpy(out + 2 * j + 1, &share, 4);
    }
}

PVR_OP(route) {
    const size_t experts = call->push[0], used = call->push[1];
    size_t begin, end;
    pvr_split(team, ((const uint32_t *)call->buf[0])[PVR_N_TOKENS], &begin, &end);
    for (size_t t = begin; t < end; t++)
        choose((const float *)call->buf[1] + t * experts, experts, used, call->push[2] != 0,
               (uint32_t *)call->buf[2] + 2 * t * used);
}
