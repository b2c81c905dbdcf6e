/* Vectors as long as a register, and what is computed with them.

`../ops_cpu.py` compiles the sources of this folder together, for float32 on the CPU at hand, and calls them. In
all of them, a tensor of torch's is a pointer to its first number, and contiguous. `threads`: how many may share
the work; they are OpenMP's, and so torch's own. Of finite numbers, no row's result depends on the rows beside
it, or on their number. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

/* What a register holds, and how many rows' sums fit into the registers beside what they are made of. */
#if defined(__AVX512F__)
#define LANES 16
#define TOGETHER 8
#elif defined(__AVX__)
#define LANES 8
#define TOGETHER 6
#else
#define LANES 4
#define TOGETHER 6
#endif

#define WORTH 262144 /* multiplications that are worth a second thread */

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));
typedef uint16_t words __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4)));

INLINE vec load(const float *numbers) { return *(const vec *)numbers; }
INLINE void store(float *numbers, vec v) { *(vec *)numbers = v; }
INLINE vec splat(float number) { return number - (vec){0}; }

INLINE vec larger(vec a, vec b) { /* the second one if they cannot be compared */
    ivec first = a > b;
    return (vec)((first & (ivec)a) | (~first & (ivec)b));
}

INLINE float sum(vec v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* e to the power of x, to 2e-7: 2 to the power of its whole part times a polynomial of the rest, which is
between -1/2 and 1/2 (the minimax one of degree 6). NaN stays NaN, and below e to the power of -87 is 0. */
INLINE vec exponential(vec x) {
    vec powers = larger(splat(-126.0f), x * 1.44269504088896341f);
    powers = -larger(splat(-127.0f), -powers);
    /* Rounded: the conversion cuts off what is behind the point, so all is made positive first. */
    ivec whole = __builtin_convertvector(powers + 128.5f, ivec) - 128;
    vec rest = powers - __builtin_convertvector(whole, vec);
    vec result = splat(0.000154035303933816f);
    result = result * rest + 0.00133335581464284f;
    result = result * rest + 0.00961812910762848f;
    result = result * rest + 0.0555041086648216f;
    result = result * rest + 0.240226506959101f;
    result = result * rest + 0.693147180559945f;
    result = result * rest + 1.0f;
    return (vec)((ivec)(result * (vec)((whole + 127) << 23)) & ~(x < -87.0f));
}
