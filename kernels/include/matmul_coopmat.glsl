// SPDX-License-Identifier: Apache-2.0
// matmul by cooperative matrices: a workgroup takes ROWS rows and TOKENS tokens, a subgroup
// SUBGROUP_ROWS and SUBGROUP_TOKENS of them. DEEP elements along k at a time (32 or 64) are made
// halves in shared memory; those of the next step are asked for before this one's are multiplied
// and, with two SIDES, put away without a wait for the others. Eight elements that lie together are
// 0, 2, 1, 3, 4, 6, 5, 7, of weights and activations alike, as packed words come apart.
// Sums are separate variables: an array of matrices lies in memory where one index of it is not a
// constant to the driver. Grid: n / ROWS over x, tokens / TOKENS over y and z; workgroups that follow
// one another take the same rows and the next tokens, so that weights are read once.

const uint EIGHTS = DEEP / 8u;    // of a row in a step
const uint BLOCKS = DEEP / 32u;   // of a step
const uint STRIDE = EIGHTS + 1u;  // of eights, between rows, so that banks differ
const uint SUBGROUPS_ALONG_ROWS = ROWS / SUBGROUP_ROWS;
// Eights of four rows; where they are fewer than invocations some have none.
const uint ROW_UNITS = (ROWS * EIGHTS / 4u + PVR_WG_X - 1u) / PVR_WG_X;
const bool ROWS_BY_ALL = ROWS * EIGHTS / 4u >= PVR_WG_X;
const uint TOKEN_UNITS = TOKENS * EIGHTS / PVR_WG_X;     // eights

shared uvec4 rows_shared[SIDES * ROWS * STRIDE];
shared uvec4 tokens_shared[SIDES * TOKENS * STRIDE];
shared float results[PVR_WG_X * 8u];  // a matrix a subgroup

#if defined(FMT_F16)
struct Words { uvec2 k[8]; };
#elif defined(FMT_Q8)
struct Words { uvec4 head, low, high; };
#else
struct Words { uvec4 head, q; };
#endif

// Eight elements, number j of a block, of the four rows whose block begins at `at`.
Words fetch_eight(uint at, uint j) {
    Words words;
#if defined(FMT_F16)
    [[unroll]] for (uint i = 0u; i < 8u; i++)
        words.k[i] = weights[at + (j * 8u + i) * 4u];
#else
    words.head = weights[at];
#if defined(FMT_Q4)
    words.q = weights[at + 4u + 4u * j];
#else
    words.low = weights[at + 4u + 8u * j];
    words.high = weights[at + 8u + 8u * j];
#endif
#endif
    return words;
}

// Those of one of the rows as halves.
uvec4 row_halves(Words words, uint r) {
#if defined(FMT_F16)
    uvec4 first, second;  // elements 0, 1, 4, 5 and 2, 3, 6, 7
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        uint at = (i & 1u) + (i >> 1) * 4u;
        first[i] = words.k[at][r >> 1];
        second[i] = words.k[at + 2u][r >> 1];
    }
    return (r & 1u) == 0u ? (first & 0xffffu) | second << 16
                          : first >> 16 | (second & 0xffff0000u);
#else
    f16vec2 head = packed_half2(words.head[r]);
#if defined(FMT_Q4)
    uint q = words.q[r];
    f16vec2 low = f16vec2(head.y + float16_t(8.0) * head.x);  // the value of 8
#define PART(bytes) packFloat2x16(packed_halves((bytes) & 0x000f000fu, 8.0) * head.x + low)
    return uvec4(PART(q), PART(q >> 8), PART(q >> 4), PART(q >> 12));
#else
    uint p = words.low[r] ^ 0x80808080u, q = words.high[r] ^ 0x80808080u;
#define PART(bytes) packFloat2x16(packed_halves((bytes) & 0x00ff00ffu, 128.0) * head.x)
    return uvec4(PART(p), PART(p >> 8), PART(q), PART(q >> 8));
#endif
#endif
}

// Eight activations as halves.
uvec4 token_halves(vec4 a, vec4 b) {
    const float16_t most = float16_t(65504.0);
    f16vec4 p = clamp(f16vec4(a.xzyw), -most, most), q = clamp(f16vec4(b.xzyw), -most, most);
    return uvec4(packFloat2x16(p.xy), packFloat2x16(p.zw), packFloat2x16(q.xy),
                 packFloat2x16(q.zw));
}

// Writes the matrix in the subgroup's part of `results`, whose first elements these are.
void written(uint row, uint token) {
    uint place = coopmat_subgroup() * 256u;
    coopmat_barrier();
    for (uint e = coopmat_lane(); e < 256u; e += 32u) {
        uint t = token + e / 16u, r = row + e % 16u;
        if (t < pvr_n_tokens())
            store1(r, t * push.ldy + push.y0 + r, results[place + e]);
    }
    coopmat_barrier();
}

// DO(i) for a subgroup's matrices of tokens, DO(j) for those of rows, DO(i, j) for sums.
#if SUBGROUP_TOKENS == 64
#define FOR_TOKENS(DO) DO(0) DO(1) DO(2) DO(3)
#define FOR_TOKENS_OF(DO, j) DO(0, j) DO(1, j) DO(2, j) DO(3, j)
#else
#define FOR_TOKENS(DO) DO(0) DO(1)
#define FOR_TOKENS_OF(DO, j) DO(0, j) DO(1, j)
#endif
#if SUBGROUP_ROWS == 64
#define FOR_ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#else
#define FOR_ROWS(DO) DO(0) DO(1)
#endif

void main() {
    uint parts = (pvr_n_tokens() + TOKENS - 1u) / TOKENS;  // of the tokens
    uint number = pvr_token_group() * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint row0 = number / parts * ROWS, token0 = number % parts * TOKENS;
    if (row0 >= push.n)
        return;
    uint lane = gl_LocalInvocationID.x, eight = lane % EIGHTS, own_block = eight >> 2;
    uint blocks = push.k >> 5, steps = (blocks + BLOCKS - 1u) / BLOCKS;
    // Rows and tokens that are not there are read as the last and not stored.
    uint last_quad = (push.n + 15u & ~15u) / 4u - 1u, last_token = pvr_n_tokens() - 1u;
    uint row_at[ROW_UNITS], token_at[TOKEN_UNITS];
    [[unroll]] for (uint i = 0u; i < ROW_UNITS; i++) {
        uint quad = row0 / 4u + (lane + i * PVR_WG_X) / EIGHTS;
        row_at[i] = weights_quad(min(quad, last_quad), push.k);
    }
    [[unroll]] for (uint i = 0u; i < TOKEN_UNITS; i++) {
        uint token = min(token0 + (lane + i * PVR_WG_X) / EIGHTS, last_token);
        token_at[i] = token * (push.k >> 2) + (eight & 3u) * 2u;
    }

    bool rows_too = ROWS_BY_ALL || lane < ROWS * EIGHTS / 4u;
    Words words[ROW_UNITS];
    vec4 values[TOKEN_UNITS * 2u];
#define FETCH(step)                                                                \
    {                                                                              \
        uint block = min((step) * BLOCKS + own_block, blocks - 1u);                \
        if (rows_too) {                                                            \
            [[unroll]] for (uint i = 0u; i < ROW_UNITS; i++)                       \
                words[i] =                                                         \
                    fetch_eight(row_at[i] + block * WEIGHTS_BLOCK, eight & 3u);    \
        }                                                                          \
        [[unroll]] for (uint i = 0u; i < TOKEN_UNITS; i++) {                       \
            values[2u * i] = x[token_at[i] + block * 8u];                          \
            values[2u * i + 1u] = x[token_at[i] + block * 8u + 1u];                \
        }                                                                          \
    }
    // Of a block that is not there activations are zeros.
#define KEEP(side, step)                                                           \
    {                                                                              \
        if (rows_too) {                                                            \
            [[unroll]] for (uint i = 0u; i < ROW_UNITS; i++) {                     \
                uint row = (lane + i * PVR_WG_X) / EIGHTS * 4u;                    \
                [[unroll]] for (uint r = 0u; r < 4u; r++)                          \
                    rows_shared[((side) * ROWS + row + r) * STRIDE + eight] =      \
                        row_halves(words[i], r);                                   \
            }                                                                      \
        }                                                                          \
        bool there = BLOCKS == 1u || (step) * BLOCKS + own_block < blocks;         \
        [[unroll]] for (uint i = 0u; i < TOKEN_UNITS; i++) {                       \
            uint token = (lane + i * PVR_WG_X) / EIGHTS;                           \
            uvec4 given = token_halves(values[2u * i], values[2u * i + 1u]);       \
            tokens_shared[((side) * TOKENS + token) * STRIDE + eight] =            \
                there ? given : uvec4(0u);                                         \
        }                                                                          \
    }

    uint row = coopmat_subgroup() % SUBGROUPS_ALONG_ROWS * SUBGROUP_ROWS;
    uint token = coopmat_subgroup() / SUBGROUPS_ALONG_ROWS * SUBGROUP_TOKENS;
    COOPMAT_B b;
#define BEGIN_SUM(i, j) COOPMAT_SUM sum##i##j = COOPMAT_ZERO;
#define BEGIN_ROWS(j) FOR_TOKENS_OF(BEGIN_SUM, j)
#define BEGIN_TOKENS(i) COOPMAT_A a##i;
    FOR_ROWS(BEGIN_ROWS)
    FOR_TOKENS(BEGIN_TOKENS)

    FETCH(0u)
    KEEP(0u, 0u)
    barrier();
    for (uint step = 0u; step < steps; step++) {
        uint side = step & (SIDES - 1u), next = min(step + 1u, steps - 1u);
        FETCH(next)
        uint row_from = (side * ROWS + row) * STRIDE, token_from = (side * TOKENS + token) * STRIDE;
#define MULTIPLY(i, j) coopmat_multiply(a##i, b, sum##i##j);
#define TAKE_TOKENS(i) \
        coopmat_load_a(a##i, tokens_shared, token_from + 16u * uint(i) * STRIDE + k, STRIDE);
#define TAKE_ROWS(j)                                                                    \
        coopmat_load_b(b, rows_shared, row_from + 16u * uint(j) * STRIDE + k, STRIDE);     \
        FOR_TOKENS_OF(MULTIPLY, j)
#define TAKE(at) { const uint k = at; FOR_TOKENS(TAKE_TOKENS) FOR_ROWS(TAKE_ROWS) }
        TAKE(0u)
        TAKE(2u)
#if DEEP == 64
        TAKE(4u)
        TAKE(6u)
#endif
#if SIDES == 1
        barrier();
#endif
        KEEP(side ^ (SIDES - 1u), next)
        barrier();
    }

    row += row0;
    token += token0;
    bool whole = row0 + ROWS <= push.n && token0 + TOKENS <= pvr_n_tokens();
    if (whole) {  // straight to where it belongs
        COOPMAT_SUM before;
#define PLACE(i, j) (token + 16u * uint(i)) * push.ldy + push.y0 + row + 16u * uint(j)
#define PUT(i, j)                                               \
    if (push.accumulate != 0u) {                                \
        coopmat_load_sum(before, y, PLACE(i, j), push.ldy);     \
        coopmat_add(before, sum##i##j);                         \
    }                                                           \
    coopmat_store(sum##i##j, y, PLACE(i, j), push.ldy);
#define PUT_ROWS(j) FOR_TOKENS_OF(PUT, j)
        FOR_ROWS(PUT_ROWS)
        return;
    }
#define WRITE(i, j)                                                   \
    coopmat_store(sum##i##j, results, coopmat_subgroup() * 256u, 16u); \
    written(row + 16u * uint(j), token + 16u * uint(i));
#define WRITE_ROWS(j) FOR_TOKENS_OF(WRITE, j)
    FOR_ROWS(WRITE_ROWS)
}
