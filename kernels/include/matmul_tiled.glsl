// SPDX-License-Identifier: Apache-2.0
// matmul by tiles in shared memory: a workgroup of 256 takes 128 rows and 64 tokens, 32 elements
// along k at a time, an invocation 2 x 4 rows and 4 tokens. The next elements are asked for before
// these are multiplied: in float32, or with PACKED_HALF and PACKED_INT8 as packed.glsl rounds them.
// Grid: n / 128 over x, tokens / 64 over y and z.

#if defined(PACKED_INT8)
#define ROW_TYPE uvec4  // four elements, of four rows or tokens
#define LAYERS 8u       // of these in a block
#elif defined(PACKED_HALF)
#define ROW_TYPE f16vec4  // one element of each of four
#define LAYERS 32u
#else
#define ROW_TYPE vec4
#define LAYERS 32u
#endif

const uint QUADS = 32u, TOKEN_QUADS = 16u;
const uint TOKEN_STRIDE = 17u;  // so that banks differ

shared ROW_TYPE rows_shared[LAYERS * QUADS];
shared ROW_TYPE tokens_shared[LAYERS * TOKEN_STRIDE];
#if defined(PACKED)
shared vec4 steps[TOKEN_QUADS];  // of four tokens
#endif
#if defined(PACKED_INT8)
shared vec4 totals[TOKEN_QUADS];
shared vec4 scales[QUADS], minimums[QUADS];
#endif

// Puts away weights of a quad.
void keep_rows(Words words, uint quad, uint four) {
#if defined(PACKED_INT8)
#if defined(FMT_Q4)
    rows_shared[four * QUADS + quad] = words.q >> 4u * (four & 1u) & 0x0f0f0f0fu;
#else
    rows_shared[four * QUADS + quad] = words.q;
#endif
    if (four == 0u)
        weights_scales_of(words.head, scales[quad], minimums[quad]);
#else
#if !defined(FMT_F16)
    vec4 scale, minimum;
    weights_scales_of(words.head, scale, minimum);
#endif
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
#if defined(FMT_Q4)
        vec4 row = vec4(words.q >> 8u * i + 4u * (four & 1u) & 15u) * scale + minimum;
#elif defined(FMT_Q8)
        vec4 row = vec4(ivec4(words.q << 24u - 8u * i) >> 24) * scale;
#else
        vec4 row = vec4(unpackHalf2x16(words.k[i].x), unpackHalf2x16(words.k[i].y));
#endif
        rows_shared[(four * 4u + i) * QUADS + quad] = ROW_TYPE(row);
    }
#endif
}

// Puts away activations of a token; eight neighbours have a block of it.
void keep_token(vec4 value, uint token, uint four) {
    uint quad = token >> 2, part = token & 3u;
#if defined(PACKED)
    vec4 size = abs(value);
    float most = max(max(size.x, size.y), max(size.z, size.w)), sum;
    for (uint other = 1u; other < 8u; other <<= 1)
        most = max(most, subgroupShuffleXor(most, other));
    vec2 step = packed_step(most);
    if (four == 0u)
        steps[quad][part] = step.x;
#endif
#if defined(PACKED_INT8)
    tokens_shared[four * TOKEN_STRIDE + quad][part] = packed_round(value, step.y, sum);
    for (uint other = 1u; other < 8u; other <<= 1)
        sum += subgroupShuffleXor(sum, other);
    if (four == 0u)
        totals[quad][part] = step.x * sum;
#else
#if defined(PACKED_HALF)
    f16vec4 given = f16vec4(value * step.y);
#else
    vec4 given = value;
#endif
    [[unroll]] for (uint i = 0u; i < 4u; i++)
        tokens_shared[(four * 4u + i) * TOKEN_STRIDE + quad][part] = given[i];
#endif
}

void main() {
    uint row0 = gl_WorkGroupID.x * ROWS, token0 = pvr_token_group() * TOKENS;
    if (row0 >= push.n || token0 >= pvr_n_tokens())
        return;
#if defined(PACKED)
    uint lane = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
#else
    uint lane = gl_LocalInvocationID.x;
#endif
    // Rows and tokens that are not there are read as the last and not stored.
    uint last_quad = (push.n + 15u & ~15u) / 4u - 1u, last_token = pvr_n_tokens() - 1u;
    uint quad = lane % QUADS, row_four = lane / QUADS, four = lane & 7u;
    uint row_at = weights_quad(min(row0 / 4u + quad, last_quad), push.k);
    uint token_at = min(token0 + lane / 8u, last_token) * (push.k >> 2) + four;
    uint next_at = min(token0 + lane / 8u + 32u, last_token) * (push.k >> 2) + four;
    uint own_quad = lane % 16u, own_tokens = lane / 16u;

    vec4 sums[8];
    [[unroll]] for (uint t = 0u; t < 8u; t++)
        sums[t] = vec4(0.0);
    Words words = fetch_rows(row_at, row_four);
    vec4 first = x[token_at], second = x[next_at];
    uint blocks = push.k >> 5;
    for (uint block = 0u; block < blocks; block++) {
        if (block != 0u)
            barrier();
        keep_rows(words, quad, row_four);
        keep_token(first, lane / 8u, four);
        keep_token(second, lane / 8u + 32u, four);
        barrier();
        uint next = min(block + 1u, blocks - 1u);
        words = fetch_rows(row_at + next * WEIGHTS_BLOCK, row_four);
        first = x[token_at + next * 8u];
        second = x[next_at + next * 8u];

#if defined(PACKED_INT8)
        ivec4 parts[8];
        [[unroll]] for (uint t = 0u; t < 8u; t++)
            parts[t] = ivec4(0);
        [[unroll]] for (uint i = 0u; i < LAYERS; i++) {
            uvec4 a = rows_shared[i * QUADS + own_quad], b = rows_shared[i * QUADS + own_quad + 16u];
            uvec4 v = tokens_shared[i * TOKEN_STRIDE + own_tokens];
            [[unroll]] for (uint t = 0u; t < 4u; t++) {
                [[unroll]] for (uint r = 0u; r < 4u; r++) {
                    parts[t][r] += packed_dot(a[r], v[t]);
                    parts[4u + t][r] += packed_dot(b[r], v[t]);
                }
            }
        }
        [[unroll]] for (uint side = 0u; side < 2u; side++) {
            vec4 scale = scales[own_quad + 16u * side], minimum = minimums[own_quad + 16u * side];
            [[unroll]] for (uint t = 0u; t < 4u; t++)
                sums[4u * side + t] += steps[own_tokens][t] * scale * vec4(parts[4u * side + t])
                    + totals[own_tokens][t] * minimum;
        }
#elif defined(PACKED_HALF)
        // Eight products at most are added in halves.
        for (uint i = 0u; i < LAYERS; i += 8u) {
            f16vec4 parts[8];
            [[unroll]] for (uint t = 0u; t < 8u; t++)
                parts[t] = f16vec4(0.0);
            [[unroll]] for (uint k = i; k < i + 8u; k++) {
                f16vec4 a = rows_shared[k * QUADS + own_quad];
                f16vec4 b = rows_shared[k * QUADS + own_quad + 16u];
                f16vec4 v = tokens_shared[k * TOKEN_STRIDE + own_tokens];
                [[unroll]] for (uint t = 0u; t < 4u; t++) {
                    parts[t] += a * v[t];
                    parts[4u + t] += b * v[t];
                }
            }
            [[unroll]] for (uint t = 0u; t < 8u; t++)
                sums[t] += steps[own_tokens][t & 3u] * vec4(parts[t]);
        }
#else
        [[unroll]] for (uint k = 0u; k < LAYERS; k++) {
            vec4 a = rows_shared[k * QUADS + own_quad], b = rows_shared[k * QUADS + own_quad + 16u];
            vec4 v = tokens_shared[k * TOKEN_STRIDE + own_tokens];
            [[unroll]] for (uint t = 0u; t < 4u; t++) {
                sums[t] += a * v[t];
                sums[4u + t] += b * v[t];
            }
        }
#endif
    }
    [[unroll]] for (uint t = 0u; t < 4u; t++) {
        store(row0 + 4u * own_quad, token0 + 4u * own_tokens + t, sums[t]);
        store(row0 + 4u * own_quad + 64u, token0 + 4u * own_tokens + t, sums[4u + t]);
    }
}
