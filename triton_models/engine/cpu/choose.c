/* The choice of tokens: the most likely one, or the winner of the race of `../draw.py`. */

#include "vectors.h"

/* The natural logarithm of x in (0, 1], to 1e-7: as in Moshier's Cephes, logf. */
INLINE vec logarithm(vec x) {
    ivec bits = (ivec)x, exponent = (bits >> 23) - 126;
    vec rest = (vec)((bits & 0x007fffff) | 0x3f000000); /* from 1/2 to 1 */
    ivec small = rest < 0.707106781186547524f;
    exponent += small;
    rest += (vec)(small & (ivec)rest) - 1.0f;
    vec square = rest * rest, result = splat(7.0376836292e-2f), whole = __builtin_convertvector(exponent, vec);
    result = result * rest - 1.1514610310e-1f;
    result = result * rest + 1.1676998740e-1f;
    result = result * rest - 1.2420140846e-1f;
    result = result * rest + 1.4249322787e-1f;
    result = result * rest - 1.6668057665e-1f;
    result = result * rest + 2.0000714765e-1f;
    result = result * rest - 2.4999993993e-1f;
    result = result * rest + 3.3333331174e-1f;
    result = result * rest * square - 2.12194440e-4f * whole - 0.5f * square;
    return rest + result + 0.693359375f * whole;
}

/* Exponentially distributed numbers of tokens: `exponentials` in `draw.py`. */
INLINE vec exponential_numbers(uvec ids, const uint32_t *key) {
    uvec numbers = ids * 0x9E3779B9u + key[0];
    numbers ^= numbers >> 16;
    numbers *= 0x85EBCA6Bu;
    numbers ^= numbers >> 13;
    numbers += key[1];
    numbers *= 0xC2B2AE35u;
    numbers ^= numbers >> 16;
    /* log1p of minus a number from 0 to 1; what 1 plus it is rounded by is divided out again. */
    vec x = (__builtin_convertvector(numbers, vec) + 0.5f) * -((1.0f - 0x1p-24f) * 0x1p-32f), one = 1.0f + x;
    ivec nothing = one == 1.0f;
    vec logarithms = logarithm(one) * (x / (one - 1.0f));
    return -(vec)((nothing & (ivec)x) | (~nothing & (ivec)logarithms));
}

/* The first of the places of the largest number, which becomes `most`. */
INLINE int64_t place_of(vec numbers, ivec places, float *most) {
    int best = 0;
    for (int lane = 1; lane < LANES; lane++)
        if (numbers[lane] > numbers[best] || (numbers[lane] == numbers[best] && places[lane] < places[best])) best = lane;
    *most = numbers[best];
    return places[best];
}

/* Choose a token of each row of `logits`, [rows, vocabulary]: the most likely one at temperature 0, or the winner
of the race of `draw.py`, of all tokens.

`keys`: [rows, 2], from `row_keys`. `status`: [3, rows], see `SamplerOutputs`. */
void choose(const float *logits, int64_t rows, int64_t vocabulary, const float *temperatures, const uint32_t *keys,
            int64_t *status, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * vocabulary > WORTH / 16)
    for (int64_t row = 0; row < rows; row++) {
        const float *numbers = logits + row * vocabulary;
        float rest[LANES], most;
        int64_t whole = vocabulary / LANES * LANES;
        for (int lane = 0; lane < LANES; lane++) rest[lane] = whole + lane < vocabulary ? numbers[whole + lane] : -INFINITY;
        ivec lane_numbers, places = {0};
        for (int lane = 0; lane < LANES; lane++) lane_numbers[lane] = lane;
        vec best = splat(-INFINITY), zeros = {0};
        for (int64_t at = 0; at < vocabulary; at += LANES) {
            vec found = load(at < whole ? numbers + at : rest);
            ivec more = found > best;
            best = (vec)((more & (ivec)found) | (~more & (ivec)best));
            places = (more & (lane_numbers + (int32_t)at)) | (~more & places);
            if (at < whole) zeros += found * 0.0f; /* NaN of what is not finite */
        }
        float kept = 0;
        for (int64_t at = whole; at < vocabulary; at++) kept += numbers[at] * 0.0f;
        int64_t token = place_of(best, places, &most);
        status[rows + row] = sum(zeros) + kept == 0;
        status[2 * rows + row] = most > -INFINITY;
        if (temperatures[row] > 0 && most > -INFINITY && most < INFINITY) {
            float scale = 1.0f / temperatures[row];
            best = splat(-1.0f);
            for (int64_t at = 0; at < vocabulary; at += LANES) {
                ivec ids = lane_numbers + (int32_t)at;
                vec found = exponential((load(at < whole ? numbers + at : rest) - most) * scale);
                found /= exponential_numbers((uvec)ids, keys + 2 * row);
                ivec more = found > best;
                best = (vec)((more & (ivec)found) | (~more & (ivec)best));
                places = (more & ids) | (~more & places);
            }
            token = place_of(best, places, &most);
        }
        status[row] = token;
    }
}
