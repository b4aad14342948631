/* SPDX-License-Identifier: Apache-2.0 */
/* How a team divides a tile (strip.h): what each of its threads has to do. */
#include "strip.h"

/* units: samples of each thread, with those that its strips and parts have in common with others. The answer: samples
 * of the tile that somebody does. */
size_t divided(uint32_t tw, uint32_t th, uint32_t layers, int threads, size_t *units) {
    uint32_t params[16] = {[PVR_N_TILES] = 1};
    const pvr_call call = {.push = {8, 0, 0, tw, th, 8, layers, 2}, .buf = {params}};
    const pvr_team team = {.n = threads};
    const pvr_strips s = pvr_plan_strips(&call, &team, 4, 2, VL);
    size_t whole = 0;
    for (int i = 0; i < threads; i++) {
        const pvr_team one = {.tid = i, .n = threads};
        size_t begin, end;
        pvr_split(&one, s.strips * s.parts, &begin, &end);
        for (units[i] = 0; begin < end; begin++) {
            const size_t part = begin % s.parts, x = begin / s.parts * s.strip;
            const size_t rows = th * (part + 1) / s.parts - th * part / s.parts;
            if (x >= tw) continue;
            const size_t columns = tw - x < s.strip ? tw - x : s.strip;
            whole += rows * columns;
            units[i] += (rows + 2 * layers) * (columns + 2 * layers);
        }
    }
    return whole;
}
