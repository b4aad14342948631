// SPDX-License-Identifier: Apache-2.0
// nsr by cooperative matrices of 16 x 16 x 16, halves into float32: the layers between the first
// and the last are products of 16 places of a row with the weights of a tap. A place has 16 halves,
// one pixel of 16 channels or two of 8, so that what a product reads and writes lies side by side.
// A subgroup does 16 places of ROWS rows; each matrix of input serves the rows above and below it.

layout(std430, set = 0, binding = 2) readonly buffer Halves { f16vec4 halves[]; };

const uint PIXELS = 16 / CHANNELS;         // of a place
const uint ACROSS = CHANNELS == 16 ? 3 : 2;  // products a row of taps
const uint MOVES = (8 * (COLUMNS / PIXELS) + PVR_WG_X - 1) / PVR_WG_X;
// Behind the last row lies what its last products read and nobody uses.
shared f16vec4 cells[CELLS + 8];

uint row_cells, current;  // cells of a row; where the rows at work begin

#define MATRIX_OF(TYPE, USE) coopmat<TYPE, gl_ScopeSubgroup, 16, 16, gl_MatrixUse##USE>

// Where row `row` of a layer's ROWS + 2 rows of input begins.
uint row_of(uint layer, uint row) {
    return row < 2u ? (2u * (layer - 1u) + row) * row_cells : current + (row - 2u) * row_cells;
}

// The first layer's rows, from luma.
void first_layer(uint first) {
    const uint tail = 9u * OUT4;
    for (uint i = gl_LocalInvocationID.x; i < ROWS * 4u * wide * OUT4; i += PVR_WG_X) {
        const uint part = i % OUT4, x = (i / OUT4) % (4u * wide), row = i / (OUT4 * 4u * wide);
        vec4 sum = w[tail + part];
        for (uint a = 0u; a < 3u; a++)
            for (uint b = 0u; b < 3u; b++)
                sum += luma_at(first + row + a - 2u, x + b) * w[(3u * a + b) * OUT4 + part];
        cells[current + row * row_cells + x * OUT4 + part] =
            f16vec4(prelu(sum, w[tail + OUT4 + part]));
    }
}

// Sums of the last layer for four pixels from column x on. `at`: its weights.
void last_layer(out vec4 acc[4], uint at, uint row, uint x, uint group) {
    const uint groups = map_groups();
    const vec4 bias = w[at + CHANNELS * 9u * groups + group];
    for (int o = 0; o < 4; o++) acc[o] = vec4(bias[o]);
    for (uint a = 0u; a < 3u; a++) {
        const uint line = row_of(push.layers - 1u, row + a) + x * OUT4;
        for (uint c = 0u; c < OUT4; c++) {
            vec4 v[6];
            for (uint i = 0u; i < 6u; i++) v[i] = vec4(cells[line + i * OUT4 + c]);
            for (uint j = 0u; j < 4u; j++)
                for (uint b = 0u; b < 3u; b++) {
                    const vec4 k = w[at + ((4u * c + j) * 9u + 3u * a + b) * groups + group];
                    const vec4 s = vec4(v[b][j], v[b + 1u][j], v[b + 2u][j], v[b + 3u][j]);
                    for (int o = 0; o < 4; o++) acc[o] += k[o] * s;
                }
        }
    }
}

void main() {
    const uint n = push.layers, me = gl_LocalInvocationID.x, rows = 2u * (n - 1u) + ROWS;
    // Whole matrices: 16 places.
    if (!place_strip(CELLS / (rows * OUT4) / (16u * PIXELS) * 4u * PIXELS)) return;
    row_cells = 4u * wide * OUT4;
    current = 2u * (n - 1u) * row_cells;

    const uint groups = map_groups(), kept = 2u * row_cells;
    // Weights in vectors: where the last layer's begin, and the matrices.
    const uint last = (11u + (n - 2u) * (CHANNELS * 9u + 2u)) * OUT4;
    const uint matrices = (last + (CHANNELS * 9u + 2u + 25u) * groups + 15u) / 16u * 16u;
    const bool busy = gl_SubgroupID < wide / (4u * PIXELS);
    const uint places = gl_SubgroupID * 16u;
    for (uint first = 0u; first < lines + 2u * n; first += ROWS) {
        load_luma(first);
        barrier();
        first_layer(first);
        barrier();
        uint layer = 1u;
        for (; layer + 1u < n && first + ROWS > 2u * (layer + 1u); layer++) {
            MATRIX_OF(float16_t, Accumulator) result[ROWS];
            if (busy) {
                const uint at = matrices + (layer - 1u) * (3u * ACROSS * 32u + 128u);
                const uint tail = at + 3u * ACROSS * 32u;
                MATRIX_OF(float, Accumulator) acc[ROWS];
                [[unroll]] for (uint r = 0u; r < ROWS; r++)
                    coopMatLoad(acc[r], w, tail, 4u, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint i = 0u; i < ACROSS; i++) {
                    MATRIX_OF(float16_t, B) k[3];
                    [[unroll]] for (uint a = 0u; a < 3u; a++)
                        coopMatLoad(k[a], halves, 2u * at + (a * ACROSS + i) * 64u, 4u,
                                    gl_CooperativeMatrixLayoutRowMajor);
                    [[unroll]] for (uint r = 0u; r < ROWS + 2u; r++) {
                        MATRIX_OF(float16_t, A) x;
                        coopMatLoad(x, cells, row_of(layer, r) + (places + i) * 4u, 4u,
                                    gl_CooperativeMatrixLayoutRowMajor);
                        [[unroll]] for (uint a = 0u; a < 3u; a++)
                            if (r >= a && r - a < ROWS) acc[r - a] = coopMatMulAdd(x, k[a], acc[r - a]);
                    }
                }
                MATRIX_OF(float, Accumulator) slope;
                coopMatLoad(slope, w, tail + 64u, 4u, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint r = 0u; r < ROWS; r++) {
                    for (uint i = 0u; i < acc[r].length(); i++) {
                        const float v = acc[r][i];
                        acc[r][i] = v > 0.0 ? v : slope[i] * v;
                    }
                    result[r] = MATRIX_OF(float16_t, Accumulator)(acc[r]);
                }
            }
            f16vec4 moved[MOVES];
            for (uint i = 0u; i < MOVES; i++)
                moved[i] = cells[row_of(layer, ROWS) + min(me + i * PVR_WG_X, kept - 1u)];
            barrier();
            for (uint i = 0u; i < MOVES; i++)
                if (me + i * PVR_WG_X < kept)
                    cells[(layer - 1u) * kept + me + i * PVR_WG_X] = moved[i];
            if (busy)
                [[unroll]] for (uint r = 0u; r < ROWS; r++)
                    coopMatStore(result[r], cells, current + r * row_cells + places * 4u, 4u,
                                 gl_CooperativeMatrixLayoutRowMajor);
            barrier();
        }
        if (first + ROWS > 2u * n) {
            for (uint i = me; i < ROWS * wide * groups; i += PVR_WG_X) {
                const uint r = (i / wide) % ROWS, x = 4u * (i % wide), group = i / (wide * ROWS);
                const uint line = first + r - 2u * n;
                if (line >= lines || x >= cols) continue;
                vec4 acc[4];
                last_layer(acc, last, r, x, group);
                finish(acc, last, group, line, x);
            }
            barrier();
        }
        // What the last of these layers wrote is the next one's input.
        for (uint i = me; i < kept; i += PVR_WG_X)
            cells[(layer - 1u) * kept + i] = cells[row_of(layer, ROWS) + i];
    }
}
