// SPDX-License-Identifier: Apache-2.0
// matmul by cooperative matrices: a workgroup takes ROWS rows and TOKENS tokens, a subgroup 32 rows
// and SUBGROUP_TOKENS tokens of them. 32 elements along k at a time are made halves in shared memory,
// those of the next step while this one's are multiplied. Four elements that lie together there are
// 0, 2, 1, 3, of weights and activations alike, since that is how packed words come apart.
// Grid: n / ROWS over x, tokens / TOKENS over y and z.

const uint STRIDE = 10u;  // of four halves, between rows: 80 bytes, so that banks differ
const uint ROWS_AT_ONCE = 2u, TOKENS_AT_ONCE = SUBGROUP_TOKENS / 16u;  // matrices
const uint ROW_UNITS = ROWS * 2u / PVR_WG_X, TOKEN_UNITS = TOKENS * 8u / PVR_WG_X;
const uint SUBGROUPS_ALONG_ROWS = ROWS / (16u * ROWS_AT_ONCE);

shared f16vec4 rows_shared[2u * ROWS * STRIDE];
shared f16vec4 tokens_shared[2u * TOKENS * STRIDE];
shared float results[PVR_WG_X * 8u];

f16vec4 halves(Words words, uint four, uint r) {
#if defined(FMT_F16)
    uint pair = r >> 1, side = r & 1u;
    return f16vec4(packed_half2(words.k[0][pair])[side], packed_half2(words.k[2][pair])[side],
                   packed_half2(words.k[1][pair])[side], packed_half2(words.k[3][pair])[side]);
#else
    f16vec2 head = packed_half2(words.head[r]);
#if defined(FMT_Q4)
    uint q = words.q[r] >> 4u * (four & 1u);
    f16vec2 low = f16vec2(head.y + float16_t(8.0) * head.x);  // the value of 8
    return f16vec4(packed_halves(q & 0x000f000fu, 8.0) * head.x + low,
                   packed_halves(q >> 8 & 0x000f000fu, 8.0) * head.x + low);
#else
    uint q = words.q[r] ^ 0x80808080u;
    return f16vec4(packed_halves(q & 0x00ff00ffu, 128.0), packed_halves(q >> 8 & 0x00ff00ffu, 128.0))
        * head.x;
#endif
#endif
}

void main() {
    uint row0 = gl_WorkGroupID.x * ROWS, token0 = pvr_token_group() * TOKENS;
    if (row0 >= push.n || token0 >= pvr_n_tokens())
        return;
    uint lane = gl_LocalInvocationID.x, four = lane & 7u, blocks = push.k >> 5;
    // Rows and tokens that are not there are read as the last and not stored.
    uint last_quad = (push.n + 15u & ~15u) / 4u - 1u, last_token = pvr_n_tokens() - 1u;
    uint row_at[ROW_UNITS], token_at[TOKEN_UNITS];
    [[unroll]] for (uint i = 0u; i < ROW_UNITS; i++)
        row_at[i] = weights_quad(min(row0 / 4u + lane / 8u + i * (PVR_WG_X / 8u), last_quad), push.k);
    [[unroll]] for (uint i = 0u; i < TOKEN_UNITS; i++) {
        uint token = min(token0 + lane / 8u + i * (PVR_WG_X / 8u), last_token);
        token_at[i] = token * (push.k >> 2) + four;
    }

    Words words[ROW_UNITS];
    vec4 values[TOKEN_UNITS];
#define FETCH(block)                                                            \
    [[unroll]] for (uint i = 0u; i < ROW_UNITS; i++)                            \
        words[i] = fetch_rows(row_at[i] + (block) * WEIGHTS_BLOCK, four);       \
    [[unroll]] for (uint i = 0u; i < TOKEN_UNITS; i++)                          \
        values[i] = x[token_at[i] + (block) * 8u];
#define KEEP(side)                                                              \
    [[unroll]] for (uint i = 0u; i < ROW_UNITS; i++) {                          \
        uint row = (lane / 8u + i * (PVR_WG_X / 8u)) * 4u;                      \
        [[unroll]] for (uint r = 0u; r < 4u; r++)                               \
            rows_shared[((side) * ROWS + row + r) * STRIDE + four] =            \
                halves(words[i], four, r);                                      \
    }                                                                           \
    [[unroll]] for (uint i = 0u; i < TOKEN_UNITS; i++) {                        \
        uint token = lane / 8u + i * (PVR_WG_X / 8u);                           \
        tokens_shared[((side) * TOKENS + token) * STRIDE + four] =              \
            f16vec4(clamp(values[i].xzyw, -65504.0, 65504.0));                  \
    }

    uint row = coopmat_subgroup() % SUBGROUPS_ALONG_ROWS * 16u * ROWS_AT_ONCE;
    uint token = coopmat_subgroup() / SUBGROUPS_ALONG_ROWS * 16u * TOKENS_AT_ONCE;
    COOPMAT_SUM sums[TOKENS_AT_ONCE * ROWS_AT_ONCE];
    [[unroll]] for (uint i = 0u; i < TOKENS_AT_ONCE * ROWS_AT_ONCE; i++)
        sums[i] = COOPMAT_ZERO;

    FETCH(0u)
    KEEP(0u)
    barrier();
    for (uint block = 0u; block < blocks; block++) {
        uint side = block & 1u, next = min(block + 1u, blocks - 1u);
        FETCH(next)
        [[unroll]] for (uint k = 0u; k < 8u; k += 4u) {
            COOPMAT_A a[TOKENS_AT_ONCE];
            [[unroll]] for (uint i = 0u; i < TOKENS_AT_ONCE; i++)
                coopmat_load_a(a[i], tokens_shared,
                               (side * TOKENS + token + 16u * i) * STRIDE + k, STRIDE);
            [[unroll]] for (uint j = 0u; j < ROWS_AT_ONCE; j++) {
                COOPMAT_B b;
                coopmat_load_b(b, rows_shared, (side * ROWS + row + 16u * j) * STRIDE + k, STRIDE);
                [[unroll]] for (uint i = 0u; i < TOKENS_AT_ONCE; i++)
                    coopmat_multiply(a[i], b, sums[i * ROWS_AT_ONCE + j]);
            }
        }
        KEEP(side ^ 1u)
        barrier();
    }

    uint place = coopmat_subgroup() * 256u;
    [[unroll]] for (uint i = 0u; i < TOKENS_AT_ONCE; i++) {
        [[unroll]] for (uint j = 0u; j < ROWS_AT_ONCE; j++) {
            coopmat_store(sums[i * ROWS_AT_ONCE + j], results, place, 16u);
            barrier();
            for (uint e = coopmat_lane(); e < 256u; e += 32u) {
                uint t = token0 + token + 16u * i + e / 16u, r = row0 + row + 16u * j + e % 16u;
                if (t <= last_token)
                    store1(r, t * push.ldy + push.y0 + r, results[place + e]);
            }
            barrier();
        }
    }
}
