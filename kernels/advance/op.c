/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "pvr.h"

enum { STEP = 3, RECORD_WORDS = 130, STRIDE = 192, MOST = 16 };

PVR_OP(advance) {
    if (team->tid)
        return;
    const uint32_t *record = call->buf[1];
    uint32_t *next = call->buf[2], *ids = call->buf[3], *records = call->buf[4];
    memcpy(records + STRIDE * (next[STEP] % MOST), record, 4 * RECORD_WORDS);
    ids[0] = record[0];
    next[PVR_POS0]++;
    next[STEP]++;
}
