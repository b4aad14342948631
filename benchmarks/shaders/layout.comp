// SPDX-License-Identifier: Apache-2.0
// y = W x for matrices of int8 with a scale for each 32 (INT8) or of halves, in tiles of 16 rows as
// docs/architecture.md has them (SIXTEEN), or row by row. All else is the same: an invocation takes
// four rows and every eighth block of 32 along k, 16 bytes a load (8 of halves in tiles).
#version 450
layout(local_size_x = 32) in;

#if defined(INT8) || !defined(SIXTEEN)
layout(std430, set = 0, binding = 1) readonly buffer W { uvec4 w[]; };
#else
layout(std430, set = 0, binding = 1) readonly buffer W { uvec2 w[]; };
#endif
layout(std430, set = 0, binding = 2) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };

const uint BLOCKS = uint(K) / 32u;
shared vec4 parts[32];

#if defined(INT8)
vec4 bytes(uvec4 q, uint i) { return vec4(ivec4(q << 24u - 8u * i) >> 24); }
vec4 word(uint q) { return vec4(ivec4(q << 24, q << 16, q << 8, q) >> 24); }
vec4 halves(uvec4 q) {
    return vec4(unpackHalf2x16(q.x).x, unpackHalf2x16(q.y).x, unpackHalf2x16(q.z).x,
                unpackHalf2x16(q.w).x);
}
#endif

vec4 block_of(uint quad, uint block) {
    vec4 part = vec4(0.0);
#if defined(INT8) && defined(SIXTEEN)
    uint at = ((quad >> 2) * BLOCKS + block) * 36u + (quad & 3u);
    for (uint j = 0u; j < 8u; j++) {
        uvec4 q = w[at + 4u + 4u * j];
        vec4 v = x[block * 8u + j];
        part += v.x * bytes(q, 0u) + v.y * bytes(q, 1u) + v.z * bytes(q, 2u) + v.w * bytes(q, 3u);
    }
    return part * halves(w[at]);
#elif defined(INT8)
    // Scales stand before the rows: [N][BLOCKS] words, four rows of a block together.
    uint rows = uint(N) * BLOCKS / 4u + quad * (uint(K) / 4u) + block * 2u;
    for (uint r = 0u; r < 4u; r++)
        for (uint j = 0u; j < 2u; j++) {
            uvec4 q = w[rows + r * (uint(K) / 16u) + j];
            uint i = block * 8u + 4u * j;
            part[r] += dot(word(q.x), x[i]) + dot(word(q.y), x[i + 1u])
                + dot(word(q.z), x[i + 2u]) + dot(word(q.w), x[i + 3u]);
        }
    return part * halves(w[quad * BLOCKS + block]);
#elif defined(SIXTEEN)
    uint at = ((quad >> 2) * uint(K) + block * 32u) * 4u + (quad & 3u);
    for (uint i = 0u; i < 8u; i++) {
        vec4 v = x[block * 8u + i];
        for (uint j = 0u; j < 4u; j++) {
            uvec2 q = w[at + (4u * i + j) * 4u];
            part += v[j] * vec4(unpackHalf2x16(q.x), unpackHalf2x16(q.y));
        }
    }
    return part;
#else
    for (uint r = 0u; r < 4u; r++) {
        uint at = (quad * 4u + r) * (uint(K) / 8u) + block * 4u;
        for (uint i = 0u; i < 4u; i++) {
            uvec4 q = w[at + i];
            part[r] += dot(vec4(unpackHalf2x16(q.x), unpackHalf2x16(q.y)), x[block * 8u + 2u * i])
                + dot(vec4(unpackHalf2x16(q.z), unpackHalf2x16(q.w)), x[block * 8u + 2u * i + 1u]);
        }
    }
    return part;
#endif
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    vec4 sum = vec4(0.0);
    for (uint block = lane >> 2; block < BLOCKS; block += 8u)
        sum += block_of(gl_WorkGroupID.x * 4u + (lane & 3u), block);
    parts[lane] = sum;
    barrier();
    if (lane >= 16u)
        return;
    float total = 0.0;
    for (uint i = 0u; i < 8u; i++)
        total += parts[(lane >> 2) + 4u * i][lane & 3u];
    y[gl_WorkGroupID.x * 16u + lane] = total;
}
