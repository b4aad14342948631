// SPDX-License-Identifier: Apache-2.0
// conv2d: an invocation does 4 pixels of a row and 8 output channels.

void main() {
    const uint x0 = 4u * gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint eighth = gl_GlobalInvocationID.z;
    if (x0 >= push.w || row >= push.h) return;

    vec4 a0 = vec4(0.0), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    const uint quads = push.xl / 4u, n8 = (push.cout + 7u) / 8u;
    const uint corner = push.origin - push.k / 2u * (push.xs + 1u) + row * push.xs + x0;
    for (uint tap = 0u; eighth < n8 && tap < push.k * push.k; tap++) {
        const uint first = corner + tap / push.k * push.xs + tap % push.k;
        for (uint c = 0u; c < push.cin; c += 4u) {
            const uint i = (c / push.xl * push.ps + first) * quads + c % push.xl / 4u;
            const vec4 p0 = x[i], p1 = x[i + quads], p2 = x[i + 2u * quads], p3 = x[i + 3u * quads];
            vec4 u, v;
#define STEP(n)                                                 \
            weights_of(eighth, tap, c + n, u, v);               \
            a0 += u * p0[n]; b0 += v * p0[n];                   \
            a1 += u * p1[n]; b1 += v * p1[n];                   \
            a2 += u * p2[n]; b2 += v * p2[n];                   \
            a3 += u * p3[n]; b3 += v * p3[n];
            STEP(0) STEP(1) STEP(2) STEP(3)
        }
    }
#define END(p, u, v)                                            \
    if (x0 + p < push.w) {                                      \
        finish(u, 2u * eighth, row, x0 + p);                    \
        finish(v, 2u * eighth + 1u, row, x0 + p);               \
    }
    END(0u, a0, b0) END(1u, a1, b1) END(2u, a2, b2) END(3u, a3, b3)
}
