// SPDX-License-Identifier: Apache-2.0
// nsr in float32: an invocation does four pixels of a row and eight channels. A cell is a word of
// two channels (halves) for each of four neighbours in x.

const uint PAIRS = CHANNELS / 2, SETS = CHANNELS / 8;
// Groups of four channels that an invocation sums at a time: one where registers are few (one
// subgroup a workgroup), which reads its input once for each.
const int N4 = PVR_WG_X > 32 ? 2 : 1;
// Cells of two rows that an invocation moves.
const uint MOVES = (2 * PAIRS * (COLUMNS / 4) + PVR_WG_X - 1) / PVR_WG_X;
shared uvec4 cells[CELLS];

uint row_cells, current;  // cells of a row of all channels; where the rows at work begin

// Where row `row` of a layer's ROWS + 2 rows of input begins.
uint row_of(uint layer, uint row) {
    return row < 2u ? (2u * (layer - 1u) + row) * row_cells : current + (row - 2u) * row_cells;
}

// Cell i of the two newest rows at work.
uint newest(uint i) { return current + (ROWS - 2u) * row_cells + i; }

// One channel's row of input under four pixels (P, then Q): adds 3 taps to 4 * N4 sums.
#define TAPS(N4, P, Q, AT, NEXT)                                                     \
    {                                                                                \
        const vec4 taps[3] = vec4[3](P, vec4((P).yzw, (Q).x), vec4((P).zw, (Q).xy)); \
        for (int b = 0; b < 3; b++)                                                  \
            for (int g = 0; g < N4; g++) {                                           \
                const vec4 k = w[(AT) + b * (NEXT) + g];                             \
                for (int o = 0; o < 4; o++) acc[4 * g + o] += k[o] * taps[b];        \
            }                                                                        \
    }

// 4 * N4 sums of `layer` from all of its input. AT: the first weights, NEXT: vectors to those of
// the next tap.
#define CONVOLVE(N4, LAYER, ROW, XV, AT, NEXT)                                        \
    for (uint a = 0u; a < 3u; a++) {                                                  \
        const uint line = row_of(LAYER, (ROW) + a) + (XV);                            \
        for (uint c = 0u; c < PAIRS; c++) {                                           \
            const uvec4 p = cells[line + c * wide];                                   \
            const uvec4 q = cells[min(line + c * wide + 1u, CELLS - 1u)];             \
            vec4 lo, hi, lo_next = vec4(0.0), hi_next = vec4(0.0);                    \
            for (int j = 0; j < 4; j++) {                                             \
                const vec2 pair = unpackHalf2x16(p[j]);                               \
                lo[j] = pair.x, hi[j] = pair.y;                                       \
            }                                                                         \
            for (int j = 0; j < 2; j++) {                                             \
                const vec2 pair = unpackHalf2x16(q[j]);                               \
                lo_next[j] = pair.x, hi_next[j] = pair.y;                             \
            }                                                                         \
            const uint k0 = (AT) + (18u * c + 3u * a) * (NEXT);                       \
            TAPS(N4, lo, lo_next, k0, NEXT)                                           \
            TAPS(N4, hi, hi_next, k0 + 9u * (NEXT), NEXT)                             \
        }                                                                             \
    }

// The results of N4 groups of an invocation's two, from group G on.
#define SUM(G)                                                                            \
    {                                                                                     \
        vec4 acc[4 * N4];                                                                 \
        for (int o = 0; o < 4 * N4; o++) acc[o] = vec4(w[tail + G + o / 4][o % 4]);       \
        if (layer == 0u) {                                                                \
            for (uint a = 0u; a < 3u; a++) {                                              \
                const uint line = first + row + a - 2u;                                   \
                const vec4 p = luma_four(line, xv), q = luma_four(line, xv + 1u);         \
                TAPS(N4, p, q, at + 3u * a * OUT4 + 2u * set + G, OUT4)                   \
            }                                                                             \
        } else {                                                                          \
            CONVOLVE(N4, layer, row, xv, at + 2u * set + G, OUT4)                         \
        }                                                                                 \
        for (int o = 0; o < 4 * N4; o++)                                                  \
            acc[o] = prelu(acc[o], vec4(w[tail + OUT4 + G + o / 4][o % 4]));              \
        for (int o = 0; o < 2 * N4; o++)                                                  \
            for (int j = 0; j < 4; j++)                                                   \
                packed[2 * G + o][j] = packHalf2x16(vec2(acc[2 * o][j], acc[2 * o + 1][j])); \
    }

void main() {
    const uint n = push.layers, me = gl_LocalInvocationID.x;
    if (!place_strip(CELLS / ((2u * (n - 1u) + ROWS) * PAIRS))) return;
    row_cells = PAIRS * wide;
    current = 2u * (n - 1u) * row_cells;

    const uint xv = me % wide, part = me / wide, row = part % ROWS, set = part / ROWS;
    const uint groups = map_groups(), kept = 2u * row_cells;
    for (uint first = 0u; first < lines + 2u * n; first += ROWS) {
        load_luma(first);
        barrier();
        uint at = 0u, layer = 0u;
        for (; layer + 1u < n && first + ROWS > 2u * (layer + 1u); layer++) {
            // One more than needed: glslang would give uvec4[4] the layout of the parameters.
            uvec4 packed[5], moved[MOVES + 1u];
            const uint cin = layer == 0u ? 1u : CHANNELS;
            const uint tail = at + cin * 9u * OUT4 + 2u * set;
            if (set < SETS) {
                SUM(0)
                if (N4 == 1) SUM(1)
            }
            if (layer > 0u)
                for (uint i = 0u; i < MOVES; i++)
                    moved[i] = cells[newest(min(me + i * PVR_WG_X, kept - 1u))];
            barrier();
            if (layer > 0u)
                for (uint i = 0u; i < MOVES; i++)
                    if (me + i * PVR_WG_X < kept)
                        cells[(layer - 1u) * kept + me + i * PVR_WG_X] = moved[i];
            if (set < SETS) {
                const uint to = current + row * row_cells + 4u * set * wide + xv;
                for (int o = 0; o < 4; o++) cells[to + o * wide] = packed[o];
            }
            barrier();
            at += (cin * 9u + 2u) * OUT4;
        }
        if (first + ROWS > 2u * n) {
            for (uint i = me; i < ROWS * wide * groups; i += PVR_WG_X) {
                const uint r = (i / wide) % ROWS, under = i % wide, group = i / (wide * ROWS);
                const uint line = first + r - 2u * n;
                if (line >= lines || 4u * under >= cols) continue;
                vec4 acc[4];
                const vec4 bias = w[at + CHANNELS * 9u * groups + group];
                for (int o = 0; o < 4; o++) acc[o] = vec4(bias[o]);
                CONVOLVE(1, n - 1u, r, under, at + group, groups)
                finish(acc, at, group, line, 4u * under);
            }
            barrier();
        }
        // What the last of these layers wrote is the next one's input.
        if (layer > 0u)
            for (uint i = me; i < kept; i += PVR_WG_X)
                cells[(layer - 1u) * kept + i] = cells[newest(i)];
    }
}
