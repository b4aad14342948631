// SPDX-License-Identifier: Apache-2.0
// matvec for large GPUs, by int8: four neighbours take a block of 16 rows, four rows each, and round
// the activations of that block for themselves alone, so that nobody waits for a workgroup before
// the sums. Weights are asked for first and always AHEAD blocks early, also across the ends of
// tiles; a workgroup takes several tiles where there are many. What was asked for is in variables
// with names: an array lies in memory where a driver leaves the loop over it a loop. To be included
// by matvec.glsl.

const uint SLOTS = PVR_WG_X / 4u;  // blocks side by side

// Rounds the block's part of this invocation to the place `at`; where it is not there, zeros.
void round_part(uint block, uint at, uint part, bool there, bool counts) {
    uint i = block * 8u + 2u * part;
    vec4 a = taken(i, there && counts), b = taken(i + 1u, there && counts);
    vec4 size = max(abs(a), abs(b));
    float most = max(max(size.x, size.y), max(size.z, size.w)), sum_a, sum_b;
    most = max(most, subgroupShuffleXor(most, 1u));
    most = max(most, subgroupShuffleXor(most, 2u));
    vec2 step = packed_step(there ? most : 0.0);
    uint low = packed_round(a, step.y, sum_a), high = packed_round(b, step.y, sum_b);
    float sum = sum_a + sum_b;
    sum += subgroupShuffleXor(sum, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    uint word = (part & 1u) * 2u;
    rounded[at * 2u + (part >> 1)][word] = low;
    rounded[at * 2u + (part >> 1)][word + 1u] = high;
    if (part == 0u)
        steps[at] = vec2(step.x, step.x * sum);
}

// What the four neighbours wrote is there for all of them.
void rounded_now() {
    subgroupMemoryBarrierShared();
    subgroupBarrier();
}

void main() {
    uint first = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint apart = gl_NumWorkGroups.x * gl_NumWorkGroups.y;
    uint lane = wide_lane(), slot = lane >> 2, part = lane & 3u;
    uint blocks = push.k >> 5, turns = (blocks + SLOTS - 1u) / SLOTS, tiles = (push.n + 15u) >> 4;
    if (first >= tiles)
        return;
    uint total = (tiles - first + apart - 1u) / apart * PASSES * turns;
    bool whole = blocks <= CHUNK;

#if DIRECT == 1
#define EACH(DO) DO(0)
#elif DIRECT == 2
#define EACH(DO) DO(0) DO(1)
#else
#define EACH(DO) DO(0) DO(1) DO(2)
#endif
#define UNIT(i) Unit unit##i;
    EACH(UNIT)
    uint asked = 0u, ask_tile = first, ask_pass = 0u, ask_turn = 0u;
    uint origin = weights_quad(tile_of(first, 0u) * 4u + part, push.k);
#define ASK(i)                                                                            \
    if (asked < total) {                                                                  \
        uint block = min(ask_turn * SLOTS + slot, blocks - 1u);                           \
        unit##i = fetch(origin + block * WEIGHTS_BLOCK);                                  \
        asked++;                                                                          \
        if (++ask_turn == turns) {                                                        \
            ask_turn = 0u;                                                                \
            if (++ask_pass == PASSES) {                                                   \
                ask_pass = 0u;                                                            \
                ask_tile += apart;                                                        \
            }                                                                             \
            origin = weights_quad(tile_of(ask_tile, ask_pass) * 4u + part, push.k);       \
        }                                                                                 \
    }
    EACH(ASK)

    if (whole) {
        [[unroll]] for (uint i = 0u; i < 2u; i++) {
            if (i < turns) {
                uint block = i * SLOTS + slot;
                round_part(min(block, blocks - 1u), block, part, block < blocks, true);
            }
        }
        for (uint i = 2u; i < turns; i++) {
            uint block = i * SLOTS + slot;
            round_part(min(block, blocks - 1u), block, part, block < blocks, true);
        }
        rounded_now();
    }

    uint tile = first, pass = 0u, turn = 0u, side = 0u;
    vec4 sum = vec4(0.0), none = vec4(0.0);
#define TAKE(i)                                                                           \
    if (done + uint(i) < total) {                                                         \
        Unit unit = unit##i;                                                              \
        ASK(i)                                                                            \
        uint at = turn * SLOTS + slot;                                                    \
        if (!whole) {                                                                     \
            bool there = at < blocks;                                                     \
            uint block = min(at, blocks - 1u);                                            \
            at = slot;                                                                    \
            rounded_now(); /* what is there was read */                                   \
            round_part(block, at, part, there, tile == first && pass == 0u);              \
            rounded_now();                                                                \
        }                                                                                 \
        add(unit, at, sum, none);                                                         \
        if (++turn == turns) {                                                            \
            finish(sum, lane, tile, pass, side * PVR_WG_X);                               \
            sum = vec4(0.0);                                                              \
            turn = 0u;                                                                    \
            side ^= 1u;                                                                   \
            if (++pass == PASSES) {                                                       \
                pass = 0u;                                                                \
                tile += apart;                                                            \
            }                                                                             \
        }                                                                                 \
    }
    for (uint done = 0u; done < total; done += uint(DIRECT)) {
        EACH(TAKE)
    }
}
